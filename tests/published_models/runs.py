"""One case: a published folder is written, trained for two steps, exported, and read in transformers 5 and 4."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

import lowmem
from lowmem.errors import InputError
from lowmem.models.build import load_config
from lowmem.run import prepare
from lowmem.run.ending import Ending
from lowmem.settings import Settings
from tests.published_models import probe

TOLERANCE_5, TOLERANCE_4 = 1e-5, 1e-4  # of the largest logit; 4 computes some products in another order
PROBE = Path(probe.__file__)


@dataclass(frozen=True)
class Case:
    """A published folder. `tokenizer` writes its tokenizer's files for a config; `config` is the small one."""

    name: str
    kind: str
    config: dict
    tokenizer: Callable[[Path, dict], None]
    weights: tuple[str, ...] = ()
    generation: dict | None = None
    chat: bool = False


Ask = Callable[..., dict]


@contextlib.contextmanager
def transformers_4(python: Path) -> Iterator[Ask | None]:
    """Yields a function that asks probe.py under `python`, whose transformers is another: one process for many
    requests. Yields None if there is no such environment."""
    if not python.exists():
        yield None
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([python, PROBE], text=True, **pipes) as process:

        def ask(do: str, **request) -> dict:
            process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask


def run(case: Case, room: Path, ask_4: Ask | None) -> dict:
    """Runs `case` in an empty folder `room`: its row's `outcome`, `said`, `checks` and `values`."""
    folder, out = room / "model", room / "out"
    folder.mkdir(parents=True)
    write(case, folder, ask_4)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(room / "log.txt", "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        try:
            logits = train(case, folder, out, room)
        except InputError as error:
            written = sorted(path.name for path in out.iterdir()) if out.exists() else []
            checks = {"nothing was written": not written, "named": named(case, str(error))}
            return {"outcome": "refused", "said": portable(str(error), room), "checks": checks, "values": {}}
        except Exception as error:
            said = portable(probe.reason(error), room)
            return {"outcome": "failed", "said": said, "checks": {"trained": False}, "values": {}}
        checks, values, said = compare(folder, out / "model", logits, room, ask_4)
    return {"outcome": "trained", "said": portable("; ".join(said), room), "checks": checks, "values": values}


def portable(sentence: str, room: Path) -> str:
    return sentence.replace(str(room) + "/", "")


def named(case: Case, sentence: str) -> bool:
    """True if a refusal names the model, file, package or token that it is about."""
    names = [case.config.get("model_type"), *case.config.get("architectures", ())]
    names += ["T5", "tokenizer", "sentencepiece", "tiktoken", "quantised", "eos_token", "model_type"]
    return any(name.lower() in sentence.lower() for name in names if name)


def write(case: Case, folder: Path, ask_4: Ask | None) -> None:
    """The folder as it is on the hub: weights as transformers 4 names them, where it knows the model."""
    config = dict(case.config)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    try:
        load_config(str(folder), "pretrained")
        answer = ask_4("make", folder=str(folder), weights=list(case.weights)) if ask_4 is not None else {"error": ""}
        if "error" in answer:
            probe.make(str(folder), list(case.weights))
    except InputError:  # it is refused before its weights are read
        (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if case.generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(case.generation, indent=2), encoding="utf-8")
    case.tokenizer(folder, config)


def train(case: Case, folder: Path, out: Path, room: Path) -> torch.Tensor:
    """Two steps and the export; the logits of the trained weights where they lie."""
    data = room / "data.jsonl"
    pair = {"prompt": "the cat sat on ", "completion": "the mat and said hello"}
    row = {"messages": probe.CHAT} if case.chat else pair
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(40)), encoding="utf-8")
    if not case.chat and not case.config.get("is_encoder_decoder"):
        data = room / "data.txt"
        data.write_text("the cat sat on the mat and said hello to the dog. \n" * 60, encoding="utf-8")
    trained, found = [], []

    def make_step(settings, decoder, *more):
        trained.append(decoder.model)
        return made(settings, decoder, *more)

    def finish(*arguments):
        trained[0].eval()
        found.append(probe.forward(trained[0]))
        trained[0].train()
        return finished(*arguments)

    made, finished = prepare.make_step, Ending.finish
    settings = Settings(
        model=str(folder), data=str(data), out=str(out), device="cpu", gpu_limit_bytes=None, seq=64, batch=2,
        micro_batch=1, steps=2, warmup_steps=0, lr=1e-3, recompute="on", report_to="none",
    )  # fmt: skip
    with patch.object(prepare, "make_step", make_step), patch.object(Ending, "finish", finish):
        lowmem.train(settings)
    return found[0]


def compare(folder: Path, exported: Path, logits: torch.Tensor, room: Path, ask_4: Ask | None):
    """Compares the export with the training in both versions; returns `checks`, `values` and remarks."""
    checks, values, said = {}, {}, []
    before, after = probe.read(str(folder), str(room / "first in 5.pt")), probe.read(str(exported), str(room / "5.pt"))
    checks["model in 5"] = _loaded(after, "5", said) and _near(
        values, "5 from training", logits, torch.load(room / "5.pt")[0], TOLERANCE_5
    )
    first = ask_4("read", folder=str(folder), logits=str(room / "first in 4.pt")) if ask_4 is not None else {}
    published = [answer for answer in (before, first) if "tokens" in answer]
    checks["tokens in 5"] = _same_tokens(published[:1], after, said, "5")
    if ask_4 is None:
        return checks, values, said
    last = ask_4("read", folder=str(exported), logits=str(room / "4.pt"))
    for version, answer in (("5", before), ("4", first)):
        if "model_error" in answer:
            said.append(f"transformers {version} does not load the published model ({answer['model_error']})")
    if "model_error" not in first:
        if "model_error" not in before:
            logits = (torch.cat(torch.load(room / f"first in {version}.pt"), 1) for version in "54")
            _near(values, "published, 4 from 5", *logits, 0)
        checks["model in 4"] = _loaded(last, "4", said) and _near(
            values, "4 from 5", *(torch.cat(torch.load(room / f"{n}.pt"), 1) for n in "54"), TOLERANCE_4
        )
        if "4 from 5" in values and not checks["model in 4"]:  # 4's fused attention leaves some settings out
            eager = {"folder": str(exported), "attention": "eager"}
            probe.read(**eager, logits=str(room / "eager 5.pt"))
            ask_4("read", **eager, logits=str(room / "eager 4.pt"))
            checks["model in 4"] = _near(
                values, "4 from 5, both eager", *(torch.cat(torch.load(room / f"eager {n}.pt"), 1) for n in "54"), 1e-4
            )
    if "tokens_error" in first:
        said.append(f"transformers 4 does not load the published tokenizer ({first['tokens_error']})")
    else:
        checks["tokens in 4"] = _same_tokens(published, last, said, "4")
        if first["tokens"] != before.get("tokens", first["tokens"]):
            keys = [key for key in first["tokens"] if first["tokens"][key] != before["tokens"][key]]
            said.append(f"4 and 5 read the published tokenizer differently ({', '.join(keys)})")
    return checks, values, said


def _loaded(answer: dict, where: str, said: list[str]) -> bool:
    problem = answer.get("model_error")
    if problem is None and (answer["missing"] or answer["mismatched"]):
        problem = f"missing {answer['missing'][:3]}, of another shape {answer['mismatched'][:3]}"
    if problem is not None:
        said.append(f"the model in {where}: {problem}")
    return problem is None


def _near(values: dict, name: str, one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """True if the largest difference, as a share of the largest logit, is within `tolerance`; kept in `values`."""
    values[name] = float(f"{(one - other).abs().max() / one.abs().max():.2g}")
    return values[name] <= tolerance


def _same_tokens(expected: list[dict], found: dict, said: list[str], where: str) -> bool:
    """True if each fact of the tokenizer `found` equals one of `expected`: training's, or the published one's in the
    same transformers."""
    if "tokens_error" in found:
        said.append(f"the tokenizer in {where}: {found['tokens_error']}")
        return False
    wanted, found = [answer["tokens"] for answer in expected], found["tokens"]
    differs = [key for key in found if wanted and all(found[key] != each[key] for each in wanted)]
    if differs:
        one, other = wanted[0][differs[0]], found[differs[0]]
        if isinstance(one, list) and len(one) == len(other):
            one, other = next((a, b) for a, b in zip(one, other, strict=True) if a != b)
        said.append(f"the tokenizer in {where}: {', '.join(differs)}: {str(one)[:60]} became {str(other)[:60]}")
    return not differs
