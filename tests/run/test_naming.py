"""The run folder that is named after the model and the data: another run never stands in the way."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lowmem.run.main import main
from lowmem.run.naming import with_run_folder
from lowmem.settings import Settings
from runs import SCRIPTS, write_rows


def folder(settings: Settings, said: list | None = None) -> str:
    return with_run_folder(settings, (said if said is not None else []).append).out


def begun(settings: Settings) -> Settings:
    """`settings` with their folder, which a run has begun to write."""
    settings = replace(settings, out=folder(settings))
    Path(settings.out).mkdir(parents=True)
    (Path(settings.out) / "settings.json").write_text(json.dumps(asdict(settings)))
    return settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize(("values", "name"), [
    ({}, "gpt2-large-python-stdlib"), ({"data": "wikitext"}, "gpt2-large-wikitext"),
    ({"model": "EleutherAI/pythia-410m", "data": "org/set:part"}, "pythia-410m-set-part"),
    ({"model": "runs/mine/model/", "data": "my_texts/chats.jsonl=2"}, "mine-chats"),
    ({"model": "a/config.json", "data": "."}, "a-here"), ({"data": "texts/*.jsonl"}, "gpt2-large-texts"),
    ({"data": "*.txt"}, "gpt2-large-here"), ({"data": ("a.txt", "b.txt=0.5", "a.txt")}, "gpt2-large-a+b"),
    ({"data": tuple("abcde")}, "gpt2-large-a+b+c+2-more"), ({"data": "my chats (new).csv"}, "gpt2-large-my-chats-new"),
    ({"data": "x" * 200}, "gpt2-large-" + "x" * 60), ({"model": "gpt2-demo", "demo": True, "data": "a"}, "demo"),
])  # fmt: skip
def test_a_folder_is_named_after_the_model_and_the_data(values, name):
    assert folder(Settings(**values)) == f"runs/{name}"
    assert folder(Settings(**values, out="mine")) == "mine"


@pytest.mark.parametrize(
    "more",
    [{}, {"eval_every": 5}, {"ram_limit_bytes": "9GiB"}, {"states": "streamed"}, {"log_every": 3}, {"resume": "never"}]
    + [{"steps": 20, "schedule": "constant", "lr": 1e-5}],
)
def test_the_same_command_finds_its_own_run_again(more):
    settings = Settings(steps=10, data="wikitext")
    begun(settings)
    said = []
    assert folder(replace(settings, **more), said) == "runs/gpt2-large-wikitext" and not said


@pytest.mark.parametrize(
    "other",
    [{"lr": 1e-4}, {"steps": 20}, {"steps": 5}, {"seq": 64}, {"max_samples": 9}, {"data": "a/wikitext"}]
    + [{"precision": "fp16"}, {"micro_batch": 2}, {"steps": None, "epochs": 3.0}, {"model": "mine/gpt2-large"}],
)
def test_another_command_gets_a_folder_of_its_own_and_finds_that_again(other):
    first = begun(Settings(steps=10, data="wikitext"))
    second = replace(first, **other, out=None)
    said = []
    assert folder(second, said) == f"{first.out}-2"
    (sentence,) = said
    assert "null" not in sentence
    assert sentence.startswith(f"{first.out} holds another run (--") and sentence.endswith(f"to {first.out}-2")
    begun(second)
    assert folder(second) == f"{first.out}-2" and folder(replace(first, out=None)) == first.out
    assert folder(replace(first, seed=5, out=None)) == f"{first.out}-3"


def test_a_settings_json_that_cannot_be_read_is_left_alone(tmp_path):
    Path("runs/gpt2-large-python-stdlib").mkdir(parents=True)
    for text in ("{", "[]"):
        Path("runs/gpt2-large-python-stdlib/settings.json").write_text(text)
        assert folder(Settings()) == "runs/gpt2-large-python-stdlib-2"


def test_a_plan_goes_into_that_folder_and_does_not_take_it(capsys):
    options = ["--demo", "--plan-only", "--device", "cpu", "--seq", "16", "--batch", "2"]
    assert main(SCRIPTS["large"].SETTINGS, options) == 0
    assert Path("runs/demo/plan.json").exists()
    assert folder(Settings(demo=True)) == "runs/demo"


def test_a_preview_shows_what_is_trained_on_and_writes_nothing(tmp_path, capsys):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello,\tyou"}]
    rows = [{"messages": turns}, {"messages": [*turns, *turns]}]
    options = ["--demo", "--data", write_rows(Path("chats.jsonl"), rows), "--preview"]
    assert main(SCRIPTS["large"].SETTINGS, [*options, "5"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "the tokenizer is the byte-level one: a token is a byte (256, and one for the end of a text)"
    assert shown[2:9] == [
        "",
        "chats.jsonl:1: 32 tokens, 12 of them trained on",
        "not trained    20 | User: Hi",
        "                  | ",
        "                  | Assistant:",
        "    trained    12 |  Hello,\\tyou<|endoftext|>",
        "",
    ]
    assert shown[9].startswith("chats.jsonl:2: ") and shown[1].startswith("chats.jsonl: messages through")
    assert max(map(len, shown[2:])) <= 80
    assert main(SCRIPTS["large"].SETTINGS, [*options, "1"]) == 0
    assert "chats.jsonl:2" not in capsys.readouterr().out
    assert [path.name for path in Path().iterdir()] == ["chats.jsonl"]


def test_a_preview_of_plain_text_counts_the_labels(capsys):
    """Seen to fail: the first token of a row, and the one after an end of text, were shown as trained on."""
    for name in "ab":
        Path(f"{name}.txt").write_text(name * 9)
    options = ["--demo", "--data", "*.txt", "--seq", "14", "--preview", "1", "--document-mask"]
    assert main(SCRIPTS["large"].SETTINGS, options) == 0
    shown = capsys.readouterr().out
    assert "15 tokens, 13 of them trained on" in shown
    assert [line.split() for line in shown.splitlines() if " | " in line] == [
        ["not", "trained", "1", "|", "a"], ["trained", "9", "|", "aaaaaaaa<|endoftext|>"],
        ["not", "trained", "1", "|", "b"], ["trained", "4", "|", "bbbb"],
    ]  # fmt: skip


def test_a_refusal_does_not_first_name_the_folder_of_a_run_that_will_not_begin(capsys):
    Path("runs/gpt2-large-python-stdlib").mkdir(parents=True)
    Path("runs/gpt2-large-python-stdlib/settings.json").write_text("{")
    Path("runs/gpt2-large-python-stdlib-2").write_text("")
    assert main(SCRIPTS["large"].SETTINGS, ["--device", "cpu", "--init", "random"]) != 0
    assert "holds another run" not in capsys.readouterr().err
