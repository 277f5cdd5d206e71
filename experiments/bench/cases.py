"""Times a case: its work and plain code for the same work, by turns. Each case is one process, which run.py starts.

python -m experiments.bench.cases step        one line of JSON
"""

import ast
import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowmem.errors import LowmemError

ROOT = Path(__file__).resolve().parents[2]
MODEL, SEQ, BATCH, MICRO_BATCH = "gpt2", 64, 4, 2
VOCABULARY = 50257
REPEATS = 3
EXAMPLES, LONGEST_EXAMPLE = 12, 256  # in bytes, which are the tokens
TEXT_BYTES = 200_000_000
RUN = "--model gpt2 --init random --device cpu --seq 1024 --batch 4 --steps 2 --eval-batches 1"
SMALL = "--demo --device cpu --seq 32 --batch 4 --micro-batch 2 --steps 3 --eval-batches 1"
PROCESSES = {  # script, options, a model other than the script's
    "plan large": ("train_gpt2_large.py", "--plan-only --gpu rtx3060", None),
    "plan xl": ("train_gpt2_xl.py", "--plan-only --gpu rtx3060", None),
    "plan xl, 6 GiB": ("train_gpt2_xl.py", "--plan-only --gpu rtx3060 --gpu-limit 6GiB --ram-limit 24GiB", None),
    "plan llama-7b": ("train_gpt2_large.py", "--plan-only --gpu rtx3090", "llama-7b"),
    "small run": ("train_gpt2_large.py", SMALL, None),
    "run": ("train_gpt2_large.py", RUN, None),
}


@dataclass(frozen=True)
class Times:
    cpu_seconds: float  # of all threads together
    wall_seconds: float

    def least(self, other: "Times") -> "Times":
        return Times(min(self.cpu_seconds, other.cpu_seconds), min(self.wall_seconds, other.wall_seconds))


Work = Callable[[], object]
Case = Callable[[Path], tuple[Work, Work, float, str]]  # in a folder: work, plain work, an amount and its unit


def whole_process(case: str, tree: Path) -> dict:
    """Times a process of a script in `tree`, by the kernel's figures. A run resets the kernel's peak of RAM, so its
    peak is that of its report."""
    script, options, model = PROCESSES[case]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *options.split(), "--out", os.path.join(folder, "run")]
        if model is not None:
            from experiments.harness.models import MODELS  # needs transformers, which other cases import in their time

            MODELS[model].config().save_pretrained(folder)
            command += ["--model", folder, "--init", "random"]
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=tree, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        report, ram_bytes = Path(folder) / "run" / "report.json", usage.ru_maxrss * 1024
        if report.exists():
            ram_bytes = json.loads(report.read_text())["measured"]["ram_peak_bytes"]
    times = Times(usage.ru_utime + usage.ru_stime, time.perf_counter() - began)
    return vars(times) | {"ram_peak_bytes": ram_bytes}


def tokenized(tree: Path) -> dict:
    """Times a run in `tree` that starts on a long text, and one that resumes. RAM is the process's growth."""
    program = ROOT / "experiments" / "bench" / "tokenize.py"
    with tempfile.TemporaryDirectory(prefix="tokenize-") as folder:
        make_text(Path(folder) / "text.txt", TEXT_BYTES)
        # A file's path would put its folder, and so this tree's code, before `tree`.
        command = [sys.executable, "-", folder]
        result = subprocess.run(
            command, input=program.read_text(), cwd=tree, stdout=subprocess.PIPE, text=True, check=True
        )
        *_, last = result.stdout.splitlines()
    return json.loads(last)


def make_text(path: Path, size_bytes: int) -> None:
    """Writes `size_bytes` of installed Python sources as UTF-8, in a fixed order."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")]
    with open(path, "wb") as file:
        for source in (source for folder in folders for source in sorted(Path(folder).rglob("*.py"))):
            content = source.read_bytes().decode(errors="ignore").encode()
            file.write(content[: size_bytes - file.tell()])
            if file.tell() == size_bytes:
                return
    raise LowmemError(f"there are only {path.stat().st_size:,} bytes of text here, and not {size_bytes:,}")


def step(folder: Path) -> tuple[Work, Work, float, str]:
    """Prepares a training step of GPT-2's shape with its update; plain: the stock model's forward and backward."""
    import torch
    from transformers import AutoModelForCausalLM

    from lowmem.core.batch import Batch
    from lowmem.models.build import load_config

    training, store = _made()
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    stock = AutoModelForCausalLM.from_config(load_config(MODEL, "random")).train()

    def plain() -> None:
        for ids in tokens[:, :-1].split(MICRO_BATCH):
            stock(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        stock.zero_grad(set_to_none=True)

    steps = iter(range(10**6))
    return lambda: training(batch, next(steps), 1e-5), plain, BATCH * SEQ, "tokens"


def ragged(pack: str) -> Case:
    """Returns a case: a step of examples of many lengths, laid out as `pack` says; plain: padded."""

    def case(folder: Path) -> tuple[Work, Work, float, str]:
        from lowmem.data.dataset import load_data
        from lowmem.data.tokenizer import byte_level_tokenizer
        from lowmem.settings import Settings

        first, *others = (json.dumps(example) + "\n" for example in _signatures(EXAMPLES + 1))
        path, held_out = folder / "examples.jsonl", folder / "held-out.jsonl"
        path.write_text("".join(others))
        held_out.write_text(first)
        settings = Settings(
            data=str(path), eval_data=str(held_out), train_on="completion", seq=LONGEST_EXAMPLE, batch=EXAMPLES, steps=1
        )
        training, _ = _made()
        batches = []
        for kind in (pack, "padded"):
            tokenizer = byte_level_tokenizer()
            data = load_data(dataclasses.replace(settings, pack=kind), tokenizer, VOCABULARY)
            batches.append(data.train.batch(0))
            data.close()
        steps = iter(range(10**6))
        ours, padded = (lambda batch=batch: training(batch, next(steps), 1e-5) for batch in batches)
        return ours, padded, int(batches[0].lengths.sum()), "tokens"

    return case


def _signatures(count: int) -> list[dict[str, str]]:
    """Returns the first `count` functions of the standard library that have a docstring."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                found.append({"prompt": f"def {node.name}({ast.unparse(node.args)}):\n", "completion": docstring})
                if len(found) == count:
                    return found
    raise LowmemError(f"Python's standard library has fewer than {count} functions with a docstring here")


def load(folder: Path) -> tuple[Work, Work, float, str]:
    """Prepares loading a saved model into its places; plain: safetensors' own reading into as many tensors."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    from lowmem.models.build import load_config, make_decoder
    from lowmem.models.load import read_weights
    from lowmem.units import GIB

    config = load_config(MODEL, "random")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    _, store = _made()
    named = make_decoder(config, "fp32", "fp32").model  # which has the names of the file's tensors, and no weights
    with safe_open(path, "pt") as file:
        places = {name: torch.zeros(file.get_slice(name).get_shape()) for name in file.keys()}

    def plain() -> None:
        with safe_open(path, "pt") as file:
            for name, place in places.items():
                place.copy_(file.get_tensor(name))

    return lambda: store.write(read_weights(named, str(folder))), plain, path.stat().st_size / GIB, "GiB"


def draw(folder: Path) -> tuple[Work, Work, float, str]:
    """Prepares random weights; plain: as many numbers drawn by torch."""
    import torch

    from lowmem.models.build import load_config
    from lowmem.models.load import random_weights
    from lowmem.units import GIB

    _, store = _made()
    config = load_config(MODEL, "random")

    def plain() -> None:
        for part in store.parts:
            torch.empty(part.working.numel()).normal_()

    size = sum(weight.nbytes for _, weight in store.masters()) / GIB
    return lambda: store.write(random_weights(config, 0)), plain, size, "GiB"


def save(folder: Path) -> tuple[Work, Work, float, str]:
    """Prepares a checkpoint with AdamW's states; plain: the same bytes in one file and one fsync."""
    from lowmem.run.checkpoint import save_checkpoint
    from lowmem.units import GIB

    _, store = _made()
    tensors = [tensor for part in store.parts for tensor in (part.working, *part.state.values())]
    steps = iter(range(10**6))

    def plain() -> None:
        with open(folder / "plain", "wb", buffering=0) as file:
            for tensor in tensors:
                rest = memoryview(tensor.numpy()).cast("B")
                while len(rest):
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        (folder / "plain").unlink()

    def work() -> None:
        save_checkpoint(folder, store, {"step": next(steps)}, keep_last=1)

    return work, plain, sum(tensor.nbytes for tensor in tensors) / GIB, "GiB"


IN_PROCESS: dict[str, Case] = {
    "step": step, "sorted": ragged("sorted"), "packed": ragged("packed"), "load": load, "draw": draw, "save": save,
}  # fmt: skip
CASES = (*PROCESSES, *IN_PROCESS, "tokenize")


def _made():
    """Returns a CPU step in fp32, with exact AdamW, clipping and no recomputation, and its store."""
    import torch

    from lowmem.core.layout import Layout
    from lowmem.core.optimizers import Hyperparameters, get_optimizer
    from lowmem.core.parameters import Store
    from lowmem.core.precision import LossScale
    from lowmem.core.step import TrainingStep
    from lowmem.models.build import load_config, make_decoder
    from lowmem.models.load import random_weights

    config = load_config(MODEL, "random")
    decoder, optimizer = make_decoder(config, "fp32", "fp32"), get_optimizer("adamw")
    layout = Layout(MICRO_BATCH, kept=99, states_on_gpu=len(decoder.units))
    store = Store(decoder, torch.device("cpu"), torch.float32, optimizer, layout)
    store.write(random_weights(config, 0))
    training = TrainingStep(
        decoder, store, Hyperparameters(weight_decay=0.01), clip_norm=1.0, seed=0, loss_scale=LossScale(False)
    )
    return training, store


def timed(work: Work) -> Times:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Times(time.process_time() - cpu, time.perf_counter() - wall)


def in_turns(work: Work, plain: Work) -> tuple[Times, Times]:
    timed(work), timed(plain)  # a warm-up
    # The least time counts, for other processes only add to it.
    pairs = [(timed(work), timed(plain)) for _ in range(REPEATS)]
    least = pairs[0]
    for pair in pairs[1:]:
        least = least[0].least(pair[0]), least[1].least(pair[1])
    return least


def main() -> int:
    (name,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        work, plain, amount, unit = IN_PROCESS[name](Path(folder))
        ours, theirs = in_turns(work, plain)
    found = vars(ours) | {f"plain_{key}": value for key, value in vars(theirs).items()}
    print(json.dumps(found | {"amount": amount, "unit": unit}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
