"""Examples have the tokens of their whole text, for every kind of tokenizer, split where the trained text begins."""

import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from lowmem.data import documents
from lowmem.data.encoder import Encoder
from lowmem.data.formats import find_format
from lowmem.data.records import Reading, Record, Source
from lowmem.data.seams import Seams
from lowmem.data.stored import ArrayFolder
from lowmem.run.evaluation import sample
from lowmem.settings import Settings
from tests.data.loading import CONVERSATION
from tests.data.test_long_text import TEXTS, small_windows
from tests.data.tokenizer_kinds import KINDS, OTHERS, of_kind, tokenizer

PAIRS = [
    ("question : the cat", " yes"), ("question :\n", "yes"), ("### Response:\n", "\nyes"), ("the ", "cat"),
    ("the", "cat"), ("", "yes"), ("no?  ", "  yes  "), ("no", " "), ("no ", "\n"), ("sat.", "\n\nthe dog"),
    ("12", "345 22"), ("aaaa", "aaaaaa"), ("e", "\u0301x"), ("été é", "é naïve"), ("中文", "字中"), ("🙂", "🙂 🙂"),
    ("ﬁ", "ﬁ ①"), ("<|user|>hello<|assistant|>", " yes"), ("hello<|end|>", "yes<|end|>"), ("hello</s>", " yes</s>"),
    ("<s>the", "cat"), ("the <|strip|>", "  cat"), ("the  ", "<|strip|> cat"), ("the<|word|>", " cat"),
    ("the <|word|>", "s cat"),
]  # fmt: skip

ALL = [(kind, begins, ends) for kind in KINDS for begins, ends in itertools.product((False, True), repeat=2)]
ALL += [(kind, False, False) for kind in OTHERS]


def examples(of, rows: list[dict], tmp_path, **more) -> list[tuple[list[int], list[bool]]]:
    """The tokens of each row and whether each is trained, as they are written."""
    records = [Record(f"a.jsonl:{number}", columns) for number, columns in enumerate(rows, 1)]
    settings, folder = Settings(**{"seq": 10_000} | more), ArrayFolder(Path(tempfile.mkdtemp(dir=tmp_path)))
    found = documents.read_documents(Source("a", []), records, None, settings, of, 2**20, folder)
    trained = [True] * len(found.tokens) if found.trained is None else found.trained[:].tolist()
    spans = itertools.pairwise([0, *itertools.accumulate(found.lengths.tolist())])
    return [(found.tokens[start:end].tolist(), trained[start:end]) for start, end in spans]


def whole(of, text: str) -> tuple[int, list[int]]:
    """Returns the number of tokens before the text, and all tokens: the tokenizer's, and one end of text."""
    begun, body = of(text)["input_ids"], of(text, add_special_tokens=False)["input_ids"]
    before = int(bool(of.bos_token_id) and begun[:1] == [of.bos_token_id] and not text.startswith(of.bos_token))
    end = [] if text.rstrip().endswith(of.eos_token) else [of.eos_token_id]
    if "<s>" not in text and "</s>" not in text:
        assert begun == [of.bos_token_id] * before + body + [of.eos_token_id] * (len(begun) - before - len(body))
    return before, [of.bos_token_id] * before + body + end


def joins_at_the_seam(kind: str, prompt: str) -> bool:
    """True if the prompt alone has the same last id, although that token also begins the answer."""
    return (kind, prompt) in {("t5", "no?  "), ("wordpiece", "ﬁ")}  # spaces in a row are one; an unknown word is one


@pytest.mark.quick(8)
@pytest.mark.parametrize(("kind", "begins", "ends"), ALL)
def test_prompt_and_completion_are_the_tokens_of_their_text(kind, begins, ends, tmp_path):
    of = of_kind(kind, begins, ends)
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    for (prompt, completion), (ids, trained) in zip(PAIRS, examples(of, rows, tmp_path), strict=True):
        before, expected = whole(of, prompt + completion)
        assert ids == expected, (prompt, completion)
        first = trained.index(True)
        assert trained == [index >= first for index in range(len(ids))], (prompt, completion)
        given = of(prompt, add_special_tokens=False)["input_ids"]
        if ids[before : before + len(given)] == given and not joins_at_the_seam(kind, prompt):
            assert first == before + len(given), (prompt, completion)


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
@given(TEXTS, st.lists(st.integers(0, 600), max_size=5))
@settings(deadline=None, max_examples=15)
def test_any_text_cut_into_segments_keeps_its_tokens(kind, text, cuts):
    of = of_kind(kind)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    segments = [(text[start:end], index % 2 == 1) for index, (start, end) in enumerate(itertools.pairwise(edges))]
    encode = Encoder(of)
    [(ids, trained)] = Seams(encode, pairs=False)([segments])
    assert ids.tolist() == of(text, add_special_tokens=False)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        small_windows(patch, 64, 32)
        [(again, trained_again)] = Seams(encode, pairs=False)([segments])
    assert again.tolist() == ids.tolist() and trained_again.tolist() == trained.tolist()


def test_sources_and_targets_are_texts_of_their_own(tmp_path):
    """An encoder-decoder is given the one and writes the other, which begins as every text of its tokenizer does."""
    of = of_kind("t5", ends=True)
    row = {"prompt": "the cat", "completion": "yes, the dog"}
    [(ids, trained)] = examples(of, [row], tmp_path, target_tokens=50)
    source, target = (of(text, add_special_tokens=False)["input_ids"] for text in ("the cat", "yes, the dog"))
    assert ids == [*source, *target, of.eos_token_id]
    assert trained == [False] * len(source) + [True] * (len(target) + 1)


def test_what_is_put_before_a_text_may_be_several_tokens(tmp_path):
    """As GLM's [gMASK]<sop>."""
    from tokenizers import processors

    of = tokenizer("gpt2")
    special = [(token, of.convert_tokens_to_ids(token)) for token in ("<|user|>", "<s>")]
    of.backend_tokenizer.post_processor = processors.TemplateProcessing("<|user|> <s> $A", None, special)
    for text, begun in (("the cat", True), ("<|user|><s>the cat", False)):
        [(ids, _)] = examples(of, [{"text": text}], tmp_path)
        assert ids == [*(number for _, number in special * begun), *of(text, add_special_tokens=False)["input_ids"], 2]
    assert json.loads(of.backend_tokenizer.to_str())["post_processor"], "it is there as before"
    assert find_format(Record("a:1", {"messages": CONVERSATION}), Reading(), "completions", of).begin == ()


@pytest.mark.parametrize("kind", ["gpt2", "metaspace first", "t5", "python, prefix space"])
def test_a_token_that_straddles_the_beginning_of_an_answer_is_trained_and_counted(kind, tmp_path):
    notes = {}
    for prompt, completion in (("the", " cat"), ("the ", "cat")):
        mark = Seams(Encoder(of_kind(kind)), pairs=False)
        [(ids, trained)] = mark([[(prompt, False), (completion, True)]])
        notes[prompt] = mark.notes
        shown = of_kind(kind).convert_ids_to_tokens(ids[trained].tolist())
        assert len("".join(shown)) >= len(" cat"), "its space, too"
    assert notes["the"] == [] and ["in 1 of them one token" in note for note in notes["the "]] == [True]


@pytest.mark.parametrize(("begins", "ends"), itertools.product((False, True), repeat=2))
def test_a_sample_goes_on_from_the_tokens_that_examples_begin_with(begins, ends, tmp_path):
    """A tokenizer that ends every text would end the prompt, too."""
    of, given = tokenizer("llama2", begins, ends), []
    model = SimpleNamespace(
        config=LlamaConfig(), eval=lambda: None, generate=lambda input_ids, **_: given.append(input_ids) or input_ids
    )
    sample(SimpleNamespace(model=model, head_weight=torch.zeros(1), needs_sources=False), of, "the cat")
    [(ids, _)] = examples(of, [{"prompt": "the cat", "completion": "\n"}], tmp_path)
    assert given[0][0].tolist() == ids[:-2]
