"""Code that is written before and after training: what counts as code, what is held out, the loss, the page."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from experiments.code_generation import compare, corpus, generation, page, scoring, table
from experiments.code_generation.corpus import Beginning
from experiments.harness import rows as row_file
from lowmem.data.records import Record, Source
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.errors import InputError

# --- what counts as code


@pytest.mark.parametrize(
    "line",
    ["    return x", "if x:", "elif y > 2:", "else:", "except (A, B) as error:", "finally:", "for a in b: print(a)"]
    + ["@property", "case [1, _]:", "with open(f) as g:", "async def f(x):", "x = {1: '}'}", "yield", "lambda: 0"],
)
def test_a_line_of_code_parses_wherever_it_stands(line):
    assert scoring.line_parses(line) and scoring.line_parses("        " + line + "\n")


@pytest.mark.parametrize(
    "line", ["", "   ", "# a comment", "if x", "x = (1,", ")", "return return", "word word", '"""Opens.', "\0", "a\\"]
)
def test_what_is_no_statement_by_itself_does_not_count(line):
    assert not scoring.line_parses(line)


def test_a_function_ends_where_its_lines_are_no_longer_indented():
    generated = "    y = 2\n\n    return y\n\ndef other():\n    pass\n"
    head = "def f(x):\n"
    assert scoring.completion_of(head, generated) == "    y = 2\n\n    return y\n\n"
    assert scoring.completion_of("    @a\n    def f(x):\n", "        y = 2\n    z = 3\n") == "        y = 2\n"
    assert scoring.next_line_of("\n \n    y = 2\n    z") == "    y = 2" and scoring.next_line_of("    y = 2") is None
    assert scoring.completion_of(head, "    y = 2\n    ret") == "    y = 2\n"  # cut off within a line


@pytest.mark.parametrize(
    "completion, parses, compiles",
    [
        ("    return x\n", True, True),
        ("    break\n", True, False),
        ("    x = (\n", False, False),
        ("  return x\n", False, False),  # another indentation
        ("    # nothing\n", False, False),
        ("", False, False),
    ],
)
def test_a_completion_parses_or_compiles_with_its_beginning(completion, parses, compiles):
    begun = "def f(x):\n    x += 1\n"
    for indentation in ("", "    "):  # a method's
        texts = ["".join(indentation + line for line in text.splitlines(True)) for text in (begun, completion)]
        assert scoring.function_parses(*texts) is parses
        assert scoring.function_compiles(*texts) is compiles


# --- the corpus


@pytest.fixture(scope="module")
def documents() -> tuple[list[str], list[str]]:
    return corpus.split("python-stdlib", 2**30, 2**20)


def test_nothing_that_is_held_out_is_trained_on(documents):
    train, held_out = documents
    assert not set(train) & set(held_out) and len(train) > 10 * len(held_out) > 100
    assert documents == corpus.split("python-stdlib", 2**30, 2**20)
    fewer, _ = corpus.split("python-stdlib", 100_000, 2**20)
    assert fewer == train[: len(fewer)] and len(fewer) < len(train)


def test_a_publishers_own_held_out_part_is_taken(monkeypatch):
    def record(text: str, **more) -> Record:
        return Record("file:1", {"text": text}, **more)

    pieces = [record("a = 1\n", goes_on=True), record("b = 2\r\n", begun=True), record("c\n")]
    source = Source("a stream", pieces, [record("c\n"), record("d\n")])
    monkeypatch.setattr(corpus, "open_source", lambda *_: source)
    assert corpus.split("spec", 100, 100) == (["a = 1\nb = 2\n", "c\n"], ["d\n"]), "c is in both, and is not held out"
    monkeypatch.setattr(corpus, "open_source", lambda *_: Source("a stream", [Record("file:1", {"code": "x"})]))
    with pytest.raises(InputError, match="file:1 has no column 'text'"):
        corpus.split("spec", 100, 100)
    monkeypatch.setattr(corpus, "open_source", lambda *_: Source("a file", [record("c\n")]))
    with pytest.raises(InputError, match="too few documents"):
        corpus.split("spec", 100, 100)


def test_beginnings_are_functions_that_their_true_rest_completes(documents):
    _, held_out = documents
    found = corpus.beginnings(held_out, 60, seed=1)
    assert len(found) == 60 == len(set(found)) and found != corpus.beginnings(held_out, 60, seed=2)
    assert found == corpus.beginnings(held_out[::-1], 60, seed=1)
    for one in found:
        assert any(one.before + one.begun + one.rest in text for text in held_out)
        assert one.begun.count("def ") >= 1 and one.next_line[0].isspace()
    true = compare.shares(found, [one.rest + "\n" for one in found])
    assert true["parsing_lines"] == true["exact_next_lines"] == 1.0
    assert true["parsing_functions"] > 0.95, "strings of several lines may reach the margin, which ends a completion"


def test_the_tokenizer_gives_back_every_text(documents):
    train, held_out = documents
    tokenizer = corpus.train_tokenizer(train[:20], 400)
    text = held_out[0] + "\ttabs, ünï\u2003cödé 🐍\n"
    ids = generation.encoded(tokenizer, text)
    assert tokenizer.decode(ids) == text and max(ids) < len(tokenizer) == 400


# --- the model


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=64, n_layer=2, n_embd=32, n_head=4, initializer_range=0.4)
    return GPT2LMHeadModel(config).eval()


def test_the_loss_is_that_of_every_token_in_pieces_of_seq(model):
    tokenizer = byte_level_tokenizer()
    texts = ["def f():\n    pass\n", "x = 'ü'\n" * 9]
    ids = [256, *texts[0].encode(), 256, *texts[1].encode(), 256]
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 16):
            piece = torch.tensor([ids[start : start + 17]])
            total -= model(piece[:, :-1]).logits.log_softmax(-1).gather(-1, piece[:, 1:, None]).sum().item()
    found = generation.held_out_loss(model, tokenizer, texts, 16)
    assert found["tokens"] == len(ids) - 1 and found["bytes"] == sum(len(text.encode()) for text in texts)
    assert math.isclose(found["loss"], total / found["tokens"], rel_tol=1e-5)
    assert math.isclose(found["bits_per_byte"], total / math.log(2) / found["bytes"], rel_tol=1e-5)


def test_a_text_goes_on_as_transformers_continues_it(model):
    tokenizer = byte_level_tokenizer()
    prompt = "import os, sys\n" * 9
    ids = torch.tensor([list(prompt.encode())[-40:]])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=256, pad_token_id=256)[0, 40:]
    found = generation.continued(model, tokenizer, prompt, 40, 20)
    assert found == tokenizer.decode([token for token in expected.tolist() if token != 256]) != ""


def test_a_continuation_begins_behind_the_end_of_the_given_line(model, monkeypatch):
    """The end of a line and the next one's indentation are one token: the model is asked for both."""
    prompts, one = [], Beginning("import os\n", "def f(x):\n    x += 1\n\n", "    return x\n")

    def continued(_, __, prompt: str, *___) -> str:
        prompts.append(prompt)
        return texts.pop()

    texts = [" + 2\n    return x\n", "\n    return x\n"]
    monkeypatch.setattr(generation, "continued", continued)
    found = [compare.next_lines(model, byte_level_tokenizer(), one, 10, 10) for _ in range(2)]
    assert set(prompts) == {"import os\ndef f(x):\n    x += 1"}
    scores = [compare.shares([one], [text]) for text in found]
    assert [score["exact_next_lines"] for score in scores] == [1, 0]
    assert [score["compiling_functions"] for score in scores] == [1, 0] and scores[1]["parsing_lines"] == 0


# --- the command


class Tags(HTMLParser):
    """Collects the open tags, and all text."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], set(), ""

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_what_a_model_writes_is_shown_and_never_obeyed(tmp_path):
    begun = [Beginning("", "def f(x):\n    x += 1\n", "    return x\n")]
    texts = ["<script>alert(1)</script>\x1b[2J\ud800\n"], ["    return x\n\ndef g():\n"]
    numbers = dict.fromkeys(page.ROWS, 0.25)
    report = {"before": numbers, "after": numbers, "true": {}, "training": None, "beginnings": 1, "data": "<b>"}
    page.write_page(tmp_path / "page.html", report | {"machine": "2 CPU cores"}, begun, *texts)
    page.write_text(tmp_path / "page.txt", report | {"machine": "2 CPU cores"}, begun, *texts)
    tags, content = Tags(), (tmp_path / "page.html").read_text()
    tags.feed(content)
    assert tags.open == ["html"] and not tags.seen & {"script", "b"}
    assert "<script>alert(1)</script>" in tags.text and "\x1b" not in content
    assert '<span class="good">    return x</span>\n\n<span class="rest">def g():' in content
    assert content.count("the true next line; the function compiles") == 2  # after, and the true text
    assert "no line that parses; the function does not parse" in (tmp_path / "page.txt").read_text()


SMALL = ["--shape", "1x32x2", "--vocabulary", "300", "--steps", "2", "--batch", "2", "--seq", "48"]
SMALL += ["--new-tokens", "8", "--prefixes", "3", "--held-out-bytes", "30KB", "--train-bytes", "3MB"]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> tuple[list[str], dict]:
    """A whole run with a tiny model: its options, and its report."""
    folder = tmp_path_factory.mktemp("code")
    options = [*SMALL, "--out", str(folder)]
    assert compare.main(options) == 0
    return options, json.loads((folder / "report.json").read_text())


def test_a_small_model_is_trained_and_compared(small_run):
    options, report = small_run
    assert report["training"]["steps"] == 2 and report["beginnings"] == 3
    assert report["after"]["loss"] < report["before"]["loss"]
    assert report["before"]["parsing_lines"] == 0 and report["true"]["exact_next_lines"] == 1
    folder = options[-1]
    assert {"samples.html", "samples.txt"} <= {path.name for path in compare.Path(folder).iterdir()}


@pytest.mark.exhaustive
def test_a_model_that_is_there_is_trained_and_compared(small_run, tmp_path, capsys):
    """Seen to fail: only a model of random weights could be trained."""
    options, report = small_run
    before = str(Path(options[-1]) / "before")
    assert compare.main([*options[4:-2], "--before", before, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["before"] == report["before"] and found["training"]["pretrained"]
    assert found["after"]["loss"] < found["before"]["loss"] and not (tmp_path / "before").exists()
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["lr"] == compare.RATES["pretrained"]
    assert compare.main([*options[4:-2], "--before", f"{before}/", "--out", str(tmp_path)]) == 2
    assert "its model was made with other data" in capsys.readouterr().err


def test_two_folders_are_compared_as_they_are(small_run, tmp_path, capsys):
    options, report = small_run
    folder = compare.Path(options[-1])
    pair = ["--before", str(folder / "before"), "--after", str(folder / "run" / "model")]
    assert compare.main([*options[8:-2], *pair, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["training"] is None and "bits per byte" in capsys.readouterr().out
    for name in ("before", "after"):
        assert found[name] | {"model": ""} == report[name] | {"model": ""}


def test_a_model_that_diverged_is_no_success(small_run, tmp_path, capsys, monkeypatch):
    """Seen to fail: a table of its continuations, and exit code 0."""
    options, _ = small_run
    losses = iter([5.0, math.nan])
    monkeypatch.setattr(compare.generation, "held_out_loss", lambda *_: {"loss": next(losses), "bits_per_byte": 1.0})
    before = str(Path(options[-1]) / "before")
    assert compare.main([*options[8:-2], "--before", before, "--after", before, "--out", str(tmp_path)]) == 1
    assert "error: the training diverged: the loss of step 2 is not finite" in capsys.readouterr().err


def test_weights_that_were_cut_off_are_said_in_a_sentence(small_run, tmp_path, capsys):
    options, _ = small_run
    cut = shutil.copytree(Path(options[-1]) / "before", tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 1000)
    assert (
        compare.main([*options[8:-2], "--before", str(cut), "--after", str(cut), "--out", str(tmp_path / "out")]) == 2
    )
    assert f"the weights of {cut} are truncated or corrupt" in capsys.readouterr().err


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "other, said",
    [
        (["--seed", "1"], "its model was made with other data, or another --seed or model"),
        (["--held-out-bytes", "20KB"], "its model was made with other data, or another --seed or model"),
        (["--lr", "-1"], "--lr -1 must be more than 0"),
        (["--lr", "0.5"], "the training ended before it was done"),  # and has said that --lr is another
    ],
)
def test_a_refused_command_leaves_a_finished_run_as_it_is(small_run, other, said, capsys):
    options, _ = small_run
    folder = Path(options[-1])

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = content()
    assert compare.main([*options, *other]) == 2
    errors = capsys.readouterr().err
    assert said in errors and "goes on" not in errors
    assert content() == before


@pytest.mark.exhaustive
def test_the_same_command_after_the_end_says_the_same(small_run):
    options, report = small_run
    assert compare.main(options) == 0
    found = json.loads((Path(options[-1]) / "report.json").read_text())
    for key in ("before", "after", "true"):
        assert found[key] == report[key]
    assert found["training"] | {"seconds": 0} == report["training"] | {"seconds": 0}


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_a_signal_ends_is_saved(tmp_path, number):
    words = [*SMALL, "--steps", "100000", "--out", str(tmp_path)]
    command = [sys.executable, "-m", compare.PROGRAM, *words]
    metrics, said = tmp_path / "run" / "metrics.jsonl", tmp_path / "said"
    with open(said, "w") as file:
        process = subprocess.Popen(command, cwd=row_file.ROOT, stderr=file, process_group=0)
    try:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        process.wait()
    finally:
        with suppress(ProcessLookupError):  # a training that was left behind
            os.killpg(process.pid, signal.SIGKILL)
    errors = said.read_text()
    assert process.returncode == 75, errors
    assert f"stopped by {number.name}" in errors and "the same command goes on" in errors
    assert list(tmp_path.glob("run/checkpoints/step-*/manifest.json")) and "Traceback" not in errors


def test_a_training_that_a_signal_killed_has_no_exit_code_of_its_own():
    assert compare.run_to_its_end([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == -signal.SIGKILL
    ended = compare.TrainingEnded(-signal.SIGKILL)
    assert ended.exit_code == 1 and "goes on" not in str(ended)


# --- the rows


def test_both_models_have_learned_to_write_code():
    rows = row_file.read(table.FOLDER / "results" / "rows.jsonl")
    for row in rows:
        assert row["seconds"] < 20 * 60 and row["training"] and row["machine"].startswith("2 CPU cores")
    random, pretrained = sorted(rows, key=lambda row: bool(row["training"].get("pretrained")))
    assert random["before"]["parsing_lines"] == 0 and random["after"]["parsing_lines"] >= 0.4
    assert random["after"]["bits_per_byte"] < 2.6 < random["before"]["bits_per_byte"]
    assert pretrained["after"]["parsing_lines"] > pretrained["before"]["parsing_lines"] > 0.8
    assert pretrained["after"]["bits_per_byte"] < 0.9 * pretrained["before"]["bits_per_byte"]
