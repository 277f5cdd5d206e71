"""Gives random command lines and files to the real entry points: any error that a user can cause ends in a sentence.

    python -m tests.faults.fuzz --examples 1000 [--only jsonl ...]

Each example calls the Large script's main (the demo's model, one step on the CPU, no network) or lowmem.plan's, in this
process. It fails if an exception comes out, if it hangs, if the exit code is none of the contract's, if a refusal (2,
3) says nothing or wrote a file, or if files are missing or half-written after the run. Failures are counted by place,
and the first of each is shown.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"})
sys.modules["matplotlib"] = None  # pictures would take as long as the runs

import torch  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lowmem.files import MANIFEST  # noqa: E402
from lowmem.run import plan_command  # noqa: E402
from lowmem.run.main import main as run_script  # noqa: E402
from lowmem.run.options import NAMES, REFUSED  # noqa: E402
from tests.faults import table  # noqa: E402
from tests.runs import SCRIPTS, SMALL, content, rehash, remembering  # noqa: E402

HANG_SECONDS = 180  # a plan that finds no room for seven billion parameters takes most of a minute on an idle core
EXIT_CODES = {0, 1, 2, 3, 4}  # 75 takes a signal
COMPLETE = {"settings.json", "plan.json", "metrics.jsonl", "report.json", "model/model.safetensors"}
ONE_STEP = (*SMALL, "--steps", "1", "--recompute", "on")  # half as much to plan


class Hang(BaseException):
    """An example that was still running after HANG_SECONDS. No Exception, because tried code may catch those."""


class Finding(Exception):
    """An example that ended in another way than the contract says."""


def checked(folder: Path, entry: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Calls `entry` in `folder` and returns its exit code. Raises Finding or Hang, or the exception of `entry`."""
    before = content(folder)
    errors, output = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(HANG_SECONDS)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output), contextlib.chdir(folder):
            code = entry(arguments)
    except SystemExit as stopped:  # --help, and argparse in lowmem.plan
        code = stopped.code
    finally:
        signal.alarm(0)
    said, after = errors.getvalue(), content(folder)
    if code not in EXIT_CODES:
        raise Finding(f"exit code {code}")
    if "Traceback" in said:
        raise Finding(f"a traceback on stderr: {said[-300:]}")
    if code != 0 and not (said + output.getvalue()).strip():
        raise Finding(f"exit code {code} without a word")
    if code in (2, 3) and (after != before or list(folder.glob("out*"))):
        raise Finding(
            f"exit code {code}, saying {said[-200:]!r}, and written: {sorted(after.keys() ^ before.keys())[:5]}"
        )
    if any(part in name for name in after for part in (".partial", ".previous", ".tmp-", ".old-")):
        raise Finding(f"half-written files are left: {sorted(after)}")
    done = folder / "out"
    if code == 0 and entry is script and (done / "metrics.jsonl").exists():
        names = content(done).keys()
        if not names >= COMPLETE or not any(name.startswith("checkpoints/step-") for name in names):
            raise Finding(f"a run that ended well lacks files: {sorted(COMPLETE - names)}")
    return code


def _hang(*_):
    raise Hang(f"still running after {HANG_SECONDS} s")


def script(arguments: list[str]) -> int:
    with patch("lowmem.run.prepare.process_aside", remembering):
        return run_script(SCRIPTS["large"].SETTINGS, arguments)


# --- random things

SPELLINGS = [f"--{name}" for name in NAMES] + ["--" + name.replace("-", "_") for name in (*NAMES, *REFUSED)]
SPELLINGS += ["--config", "-h", "--", "---", "--=", "-x"]
VALUES = ["1", "2", "4", "0", "-1", "0.5", "1e-4", "1e30", "nan", "inf", "auto", "none", "on", "off", "11GiB", "900MiB"]
VALUES += ["random", "pretrained", "cosine", "adamw", "adamw8bit", "sgd", "bf16", "fp16", "true", "", " ", "a b", "--"]
VALUES += ["-5GiB", "é", "\udce9", "%s", "{", "\0", "out", "text.txt", ".", "wikitext", "org/name", "gpt2-demo"]
TYPED = st.tuples(st.sampled_from(SPELLINGS), st.sampled_from(VALUES) | st.text(max_size=8)).map(list)
WORDS = st.sampled_from([*SPELLINGS, *VALUES]).map(lambda word: [word]) | st.text(max_size=8).map(lambda word: [word])
PLAN_WORDS = ("--model", "--seq", "--batch", "--gpu-limit", "--ram-limit", "--gpu", "--gpus", "--json", "--help", "-x")
PLAN_VALUES = (*VALUES, "t4", "rtx3090", "8", "128", "config.json")


def mutated(whole: bytes) -> st.SearchStrategy[bytes]:
    """Returns a strategy: `whole` with bytes flipped, cut out, put in or doubled; or random bytes."""
    place = st.sampled_from(range(max(len(whole), 1)))  # integers() prefers the beginning
    piece = st.binary(min_size=1, max_size=8) | st.sampled_from(
        [b"\0", b"\n", b'"', b"{", b"]", b"\xff", b"null", b","]
    )
    change = st.tuples(st.sampled_from(["set", "insert", "cut", "end", "double"]), place, piece)
    return st.lists(change, min_size=1, max_size=4).map(lambda changes: _changed(whole, changes)) | st.binary(
        max_size=99
    )


def _changed(whole: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for how, place, piece in changes:
        before, after = whole[:place], whole[place:]
        whole = {
            "set": before + piece + after[len(piece) :], "insert": before + piece + after, "end": before,
            "cut": before + after[8 * len(piece) :], "double": before + after[:40] + after,
        }[how]  # fmt: skip
    return whole


# Sizes in a fuzzed config.json are small: huge ones would make the planner simulate a million blocks, or a CPU train
# them.
FIELDS = st.sampled_from([
    "model_type", "n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "n_inner", "activation_function",
    "resid_pdrop", "attn_pdrop", "layer_norm_epsilon", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "initializer_range", "scale_attn_weights", "dtype", "auto_map", "quantization_config", "rope_scaling",
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    "pad_token_id", "architectures", "is_decoder", "use_cache",
])  # fmt: skip
ANYTHING = st.sampled_from(
    [None, True, 0, 1, -1, 3, 7, 64, 512, 0.5, -0.5, 1e400, "", "4", "gelu", "llama", [], {}, [4]]
)


def kinds(folder: Path) -> dict[str, tuple[st.SearchStrategy, Callable[[Path, object], int]]]:
    """Returns {kind: (strategy, function that tries a drawn value in an empty folder)}. All examples start from files
    made in `folder`."""
    text = "".join(f"line {number}: its square is {number**2}\n" for number in range(60))
    shared = folder / "shared"
    shared.mkdir()
    (shared / "text.txt").write_text(text)
    files = _data_files(shared, text)
    assert script([*ONE_STEP, "--data", str(shared / "text.txt"), "--out", str(shared / "run")]) == 0
    model = shared / "run" / "model"
    config = json.loads((model / "config.json").read_text())
    weights = (model / "model.safetensors").read_bytes()
    checkpoint = {path.name: path.read_bytes() for path in (shared / "run/checkpoints/step-00000001").iterdir()}

    def on_data(suffix: str):
        def run(place: Path, drawn: bytes) -> int:
            (place / f"data.{suffix}").write_bytes(drawn)
            return checked(place, script, [*ONE_STEP, "--data", f"data.{suffix}", "--out", "out"])

        return mutated(files[suffix]), run

    def on_command(place: Path, drawn: list[list[str]]) -> int:
        (place / "text.txt").write_text(text)
        words = [word for words in drawn for word in words]
        return checked(place, script, [*ONE_STEP, "--data", "text.txt", "--out", "out", *words])

    def on_plan_command(place: Path, drawn: list[list[str]]) -> int:
        (place / "config.json").write_text(json.dumps(config))
        words = [word for words in drawn for word in words]
        return checked(place, plan_command.main, ["--model", "config.json", "--seq", "32", "--batch", "4", *words])

    def on_config(place: Path, drawn: dict | bytes, entry=script) -> int:
        (place / "model").mkdir()
        path = place / "model" / "config.json"
        path.write_bytes(drawn if isinstance(drawn, bytes) else json.dumps(config | drawn).encode())
        if entry is plan_command.main:
            return checked(place, entry, ["--model", str(path), "--seq", "32", "--batch", "4"])
        (place / "text.txt").write_text(text)
        return checked(
            place, script, [*ONE_STEP, "--model", "model", "--init", "random", "--data", "text.txt", "--out", "out"]
        )

    def on_weights(place: Path, drawn: bytes) -> int:
        shutil.copytree(model, place / "model")
        (place / "model" / "model.safetensors").write_bytes(drawn)
        arguments = ["--model", "model", "--init", "pretrained", "--data", str(shared / "text.txt"), "--out", "out"]
        return checked(place, script, [*ONE_STEP, *arguments])

    def on_checkpoint(place: Path, drawn: tuple[str, bytes, bool]) -> int:
        name, damaged, hashed = drawn
        shutil.copytree(shared / "run", place / "run")
        target = place / "run/checkpoints/step-00000001"
        (target / name).write_bytes(damaged)
        if hashed and name != MANIFEST:
            rehash(target)
        return checked(place, script, [*ONE_STEP, "--data", str(shared / "text.txt"), "--out", "run"])

    def on_settings(place: Path, drawn: bytes) -> int:
        (place / "settings.json").write_bytes(drawn)
        (place / "text.txt").write_text(text)
        return checked(place, script, ["--config", "settings.json", *ONE_STEP, "--data", "text.txt", "--out", "out"])

    small_config = mutated(json.dumps(config).encode()) | st.dictionaries(FIELDS, ANYTHING, min_size=1, max_size=3)
    damaged = st.sampled_from(sorted(checkpoint)).flatmap(
        lambda name: st.tuples(st.just(name), mutated(checkpoint[name]), st.booleans())
    )
    plan_words = st.lists(
        st.tuples(st.sampled_from(PLAN_WORDS), st.sampled_from(PLAN_VALUES)).map(list)
        | st.sampled_from([*PLAN_WORDS, *PLAN_VALUES]).map(lambda word: [word]),
        max_size=3,
    )
    return {
        "command": (st.lists(TYPED | WORDS, min_size=1, max_size=3), on_command),
        "plan-command": (plan_words, on_plan_command),
        **{suffix: on_data(suffix) for suffix in files},
        "config": (small_config, on_config),
        "plan-config": (small_config, lambda place, drawn: on_config(place, drawn, plan_command.main)),
        "weights": (mutated(weights[:4096]).map(lambda head: head + weights[4096:]) | mutated(weights), on_weights),
        "checkpoint": (damaged, on_checkpoint),
        "settings": (mutated((shared / "run/settings.json").read_bytes()), on_settings),
    }


def _data_files(folder: Path, text: str) -> dict[str, bytes]:
    """Returns a valid file of each kind."""
    lines = text.splitlines()
    texts = "".join(json.dumps({"text": line * 3}) + "\n" for line in lines)
    pairs = [{"prompt": line[:6], "completion": line[6:]} for line in lines]
    chats = [
        {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": "x"}]} for p in pairs
    ]
    found = {
        "txt": text.encode(), "py": text.encode(), "jsonl": texts.encode(), "json": json.dumps(chats[:20]).encode(),
        "csv": ("prompt,completion\n" + "".join(f'"{p["prompt"]}","{p["completion"]}"\n' for p in pairs)).encode(),
    }  # fmt: skip
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": [line * 3 for line in lines]}), folder / "text.parquet")
        found["parquet"] = (folder / "text.parquet").read_bytes()
    return found


def fuzz(kind: str, strategy: st.SearchStrategy, work: Callable[[Path, object], int], examples: int) -> dict:
    """Returns the row of one kind."""
    codes: dict[str, int] = {}
    failures: dict[str, str] = {}
    failed = 0
    began = time.monotonic()

    @seed(0)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=HealthCheck
    )
    @given(strategy)
    def example(drawn):
        nonlocal failed
        state = random.getstate()
        with tempfile.TemporaryDirectory() as folder:
            try:
                code = str(work(Path(folder), drawn))
            except (Exception, Hang) as error:  # anything is a finding; the example after it is tried all the same
                failed += 1
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__}: {str(error)[:400]} ({Path(place.filename).name}:{place.lineno})"
                failures.setdefault(where, repr(drawn)[:4000])
                code = "failed"
        random.setstate(state)
        codes[code] = codes.get(code, 0) + 1

    example()
    return {
        "kind": kind, "examples": sum(codes.values()), "exit_codes": dict(sorted(codes.items())), "failed": failed,
        "failures": failures, "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def main() -> int:
    parser = table.parser("fuzz", __doc__)
    parser.add_argument("--examples", type=int, default=1000, help="of each kind (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="instead of all kinds")
    options = parser.parse_args()
    common = table.common("fuzz", options.record)
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            found = kinds(Path(folder))
        for kind, (strategy, work) in found.items():
            if options.only is None or kind in options.only:
                row = fuzz(kind, strategy, work, options.examples)
                failed += row["failed"]
                table.report(common | row, options.record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
