import gzip
import json
import re
import sys
import time

import numpy as np
import pytest
import torch

from lowmem.data import hub_data
from lowmem.data.formats import DEFAULT_CHAT_TEMPLATE
from lowmem.data.records import Reading
from lowmem.data.sources import open_source
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.errors import InputError
from tests.data.loading import (
    CONVERSATION,
    END,
    in_order,
    load,
    shown,
    tokens_of,
    trained_text,
    write_rows,
    write_table,
    write_texts,
)

# Packing


def test_packed_rows_are_the_documents_end_to_end_with_nothing_lost_but_the_tail(tmp_path):
    texts = [f"document {index} " * (index + 1) for index in range(9)]
    evaluation = in_order(write_texts(tmp_path / "a.jsonl", *texts))
    expected = [token for text in texts for token in [*text.encode(), END]]
    batches = [evaluation.batch(index) for index in range(len(evaluation))]
    inputs = torch.cat([batch.input_ids for batch in batches])
    tokens = [*inputs.flatten().tolist(), int(batches[-1].labels[-1, -1])]
    assert tokens == expected[: len(tokens)] and len(expected) - len(tokens) < 16
    batch = batches[0]
    assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:]) and batch.labels[0, -1] == batch.input_ids[1, 0]
    assert batch.position_ids is None and batch.document_ids is None


def test_document_mask_restarts_positions_and_trains_no_first_token_of_a_document(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", "abc", "d", "efghijk")
    batch = in_order(path, seq=10, batch=1, document_mask=True).batch(0)
    assert "".join(token for token, _ in shown(batch, 0)) == "abc$d$efgh"
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert shown(batch, 0)[2:7] == [("c", "$"), ("$", ""), ("d", "$"), ("$", ""), ("e", "f")]
    assert batch.trained_tokens == 8 and batch.document_ids.dtype == torch.int32


def test_description_says_whether_attention_crosses_documents_and_what_was_unused(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", "x" * 40)
    said = load(path).description
    assert "packed into 2 rows of 16 (8 unused); attention crosses document ends" in said and "byte-level" in said
    assert "attention stops at a document's end" in load(path, document_mask=True).description


@pytest.mark.parametrize(("vocabulary_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_tokens_take_two_bytes_where_the_vocabulary_allows(tmp_path, vocabulary_size, dtype):
    (tmp_path / "a.txt").write_text("x" * 40)
    data = load(tmp_path / "a.txt", vocabulary_size=vocabulary_size)
    assert data.train.parts[0].documents.tokens.dtype == dtype and data.train.batch(0).input_ids.dtype == torch.int64


# Batches


def numbered(path, count: int):
    """`count` lines of 8 bytes."""
    path.write_text("".join(f"{index:07d}\n" for index in range(count)))
    return path


def test_a_batch_is_a_function_of_seed_and_step_and_every_epoch_has_every_row_once(tmp_path):
    numbered(tmp_path / "a.txt", 22)  # 11 rows of 16, batches of 4
    rows = load(tmp_path / "a.txt", batch=4).train
    assert rows.rows == 11 and rows.steps_per_epoch == 2.75
    forwards = [rows.batch(step).input_ids for step in range(11)]
    fresh = load(tmp_path / "a.txt", batch=4).train
    assert all(torch.equal(fresh.batch(step).input_ids, forwards[step]) for step in reversed(range(11)))
    epochs = torch.cat(forwards).split(11)  # four epochs; two batches straddle a border
    numbers = [[bytes(row.tolist()[:7]) for row in epoch] for epoch in epochs]
    assert all(len(set(epoch)) == 11 for epoch in numbers) and len({tuple(epoch) for epoch in numbers}) == 4
    other = load(tmp_path / "a.txt", batch=4, seed=1).train
    assert not torch.equal(other.batch(0).input_ids, forwards[0])


def test_batch_order_does_not_touch_the_global_generators(tmp_path):
    numbered(tmp_path / "a.txt", 40)
    np.random.seed(1)
    torch.manual_seed(1)
    states = np.random.get_state()[1].copy(), torch.get_rng_state()
    load(tmp_path / "a.txt").train.batch(5)
    assert np.array_equal(np.random.get_state()[1], states[0]) and torch.equal(torch.get_rng_state(), states[1])


def test_fixed_batch_is_the_same_batch_every_step(tmp_path):
    numbered(tmp_path / "a.txt", 40)
    fixed, free = load(tmp_path / "a.txt", fixed_batch=True).train, load(tmp_path / "a.txt").train
    assert all(torch.equal(fixed.batch(step).input_ids, free.batch(0).input_ids) for step in (0, 1, 17))
    assert fixed.steps_per_epoch == 1 and not torch.equal(free.batch(1).input_ids, free.batch(0).input_ids)


def test_a_batch_larger_than_the_data_repeats_it(tmp_path):
    assert load(numbered(tmp_path / "a.txt", 4), batch=5).train.batch(0).input_ids.shape == (5, 16)


def test_evaluation_keeps_its_order_ends_with_a_smaller_batch_and_cycles(tmp_path):
    numbered(tmp_path / "a.txt", 10)
    rows = in_order(tmp_path / "a.txt")
    assert (rows.rows, len(rows)) == (5, 3) and rows.batch(2).input_ids.shape == (1, 16)
    firsts = [bytes(rows.batch(index).input_ids[0, :7].tolist()) for index in (0, 1, 2)]
    assert firsts == [b"0000000", b"0000004", b"0000008"]
    assert torch.equal(rows.batch(3).input_ids, rows.batch(0).input_ids)


# Examples


def test_prompt_and_completion_train_the_completion_and_the_true_end_of_text(tmp_path):
    rows = [{"prompt": "Q:", "completion": " yes"}, {"prompt": "Say", "completion": " a"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    batch = in_order(path).batch(0)
    assert batch.input_ids.shape == (2, 6)  # padded to the longest of the batch, not to seq
    assert shown(batch, 0) == [("Q", ""), (":", " "), (" ", "y"), ("y", "e"), ("e", "s"), ("s", "$")]
    assert shown(batch, 1) == [("S", ""), ("a", ""), ("y", " "), (" ", "a"), ("a", "$"), ("$", "")]
    assert trained_text(in_order(path, train_on="all").batch(0)) == ": yes$"
    assert load(path, document_mask=True).train.batch(0).document_ids is None


def test_messages_without_a_template_use_the_default_one_say_so_and_leave_it_on_the_tokenizer(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CONVERSATION}])
    tokenizer = byte_level_tokenizer()
    data = load(path, tokenizer, seq=128, batch=1)
    batch = data.train.batch(0)
    assert "".join(t for t, _ in shown(batch, 0)) == "User: Hi\n\nAssistant: Hello$User: Bye\n\nAssistant: See you"
    assert trained_text(batch) == " Hello$ See you$"
    assert "default chat template" in data.description and tokenizer.chat_template == DEFAULT_CHAT_TEMPLATE
    assert trained_text(load(path, seq=128, batch=1, train_on="all").train.batch(0)).startswith("ser: Hi")


def test_long_examples_are_cut_and_counted_and_dropped_when_no_trained_token_is_left(tmp_path):
    sizes = [(1, 30), (17, 1), (1, 1), (14, 2)]
    rows = [{"prompt": "p" * prompt, "completion": "c" * completion} for prompt, completion in sizes]
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = load(path, eval_data=str(path))
    batches = [data.evaluations[0].batch(0), data.evaluations[0].batch(1)]
    assert data.evaluations[0].rows == 3 and batches[0].input_ids.shape == (2, 16)
    assert trained_text(batches[0], 0) == "c" * 16  # cut off: no end-of-text is taught
    assert trained_text(batches[1]) == "cc$"  # exactly seq + 1 tokens: whole
    assert "2 cut off at 16 tokens; 1 of these dropped" in data.description
    with pytest.raises(InputError, match="raise --seq"):
        load(write_rows(tmp_path / "b.jsonl", rows[1:2]))


# What is held out


def test_held_out_documents_are_never_trained_on_and_are_the_same_every_time(tmp_path):
    texts = [f"[{index % 50:02d}]" + "abcdefghij" * 3 for index in range(150)]  # every text three times
    path = write_texts(tmp_path / "a.jsonl", *texts)
    data = load(path, eval_fraction=0.1)
    documents = [
        bytes(tokens[tokens != END].astype(np.uint8)).split(b"[")[1:]
        for tokens in (batches.parts[0].documents.tokens[:] for batches in (data.train, data.evaluations[0]))
    ]
    assert not set(documents[0]) & set(documents[1])
    assert len(documents[0]) + len(documents[1]) == 150 and 15 <= len(documents[1]) <= 18
    again = load(path, eval_fraction=0.1, seed=5).evaluations[0].batch(0).input_ids
    assert again.equal(data.evaluations[0].batch(0).input_ids)
    assert load(path, eval_fraction=0).evaluations == ()


def test_one_long_text_has_its_end_held_out(tmp_path):
    text = "".join(f"{index:07d}\n" for index in range(100))
    (tmp_path / "a.txt").write_text(text)
    data = load(tmp_path / "a.txt", eval_fraction=0.1)
    tokens = [*text.encode(), END]
    assert tokens_of(data.train) == tokens[:-81]
    assert tokens_of(data.evaluations[0]) == tokens[-81:]
    assert "its last 81 tokens" in data.description


def test_examples_are_held_out_whole_and_too_few_are_not(tmp_path):
    rows = [{"prompt": "p", "completion": f"{index:03d}"} for index in range(100)]
    data = load(write_rows(tmp_path / "a.jsonl", rows), eval_fraction=0.01)
    assert (data.train.rows, data.evaluations[0].rows) == (99, 1)
    with pytest.raises(InputError, match="a.jsonl: --eval-fraction 0.999 leaves too little to train on"):
        load(tmp_path / "a.jsonl", eval_fraction=0.999)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with pytest.raises(InputError, match="a.json: --eval-fraction 0.999 leaves"):
        load(tmp_path / "a.json", eval_fraction=0.999)
    held_out = trained_text(data.evaluations[0].batch(0))
    assert held_out not in {trained_text(data.train.batch(step), row) for step in range(49) for row in (0, 1)}
    data = load(write_rows(tmp_path / "b.jsonl", rows[:1]), eval_fraction=0.01)
    assert (data.train.rows, data.evaluations) == (1, ()) and "nothing held out" in data.description


def test_standard_library_is_split_by_files_and_ready_in_seconds():
    data = load("python-stdlib", eval_fraction=0.01, seq=256, batch=16)
    parts = [batches.parts[0].documents for batches in (data.train, data.evaluations[0])]
    sizes = [len(documents.tokens) for documents in parts]
    assert sizes[0] > 3_000_000 and 0.01 <= sizes[1] / sum(sizes) <= 0.02
    assert not set(parts[0].keys) & set(parts[1].keys)
    assert len(parts[1].keys) >= 2
    names = [record.where for record in open_source("python-stdlib", Reading()).train]
    assert not [name for name in names if "test" in name.split("/") or "site-packages" in name] and "os.py" in names


# Where a batch was read


def test_a_batch_names_the_lines_that_its_text_is_from(tmp_path):
    texts = [f"[{line:03d}]" + "x" * (line % 13) for line in range(1, 101)]
    path = write_texts(tmp_path / "a.jsonl", *texts)
    lines = [line for line, text in enumerate(texts, 1) for _ in f"{text}$"]
    data = load(path, eval_data=str(path), batch=1)
    for row in range(data.evaluations[0].rows):  # in their order
        first, last = lines[16 * row], lines[16 * row + 16]
        at = f" at {(16 * row - lines.index(first)) / lines.count(first):.2%}"
        assert data.evaluations[0].where(row) == [f"{path}:{first}-{last}" if last > first else f"{path}:{first}{at}"]
    train = load(path, eval_fraction=0.1, batch=3).train  # in any order, with lines held out in between
    for step in range(30):
        named = [re.match(r".*a\.jsonl:(\d+)-?(\d*)", name).groups() for name in train.where(step)]
        spans = [range(int(first), int(last or first) + 1) for first, last in named]
        inputs = "".join(
            chr(token) if token != END else "$" for token in train.batch(step).input_ids.flatten().tolist()
        )
        assert all(any(int(line) in span for span in spans) for line in re.findall(r"\[(\d{3})\]", inputs))
        assert sum(map(len, spans)) <= 3 * 6


def test_a_batch_names_files_examples_and_places_in_a_long_text(tmp_path):
    folder = tmp_path / "texts2"
    folder.mkdir()
    (folder / "long.txt").write_text("x" * 799)
    for name in ("m", "n"):
        (folder / f"{name}.txt").write_text(name)
    write_rows(folder / "z.jsonl", [{"text": "row"}, {"text": "and the next row, at the end"}])
    rows = load(folder, eval_data=str(folder), batch=1).evaluations[0]
    assert rows.where(0) == [f"{folder}/long.txt at 0.00%"] and rows.where(25) == [f"{folder}/long.txt at 50.00%"]
    assert rows.where(50) == [f"{folder}/{name}" for name in ("m.txt", "n.txt", "z.jsonl:1-2")]
    path = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "p" * index, "completion": "c"} for index in range(1, 12)])
    train = load(path, batch=4).train
    for step in range(8):  # how long a prompt is says which line it is from
        prompts = (train.batch(step).input_ids == ord("p")).sum(1).tolist()
        assert train.where(step) == list(dict.fromkeys(f"{path}:{length}" for length in prompts))
    fixed = load(path, batch=4, fixed_batch=True).train
    assert fixed.where(5) == fixed.where(0) == train.where(0)


# Files


def test_every_file_format_gives_the_same_rows(tmp_path):
    rows = [{"text": f'naïve, "{index}"\nand 😀', "other": index} for index in range(20)]
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    quoted = ['"{}",{}\r\n'.format(row["text"].replace('"', '""'), row["other"]) for row in rows]
    (tmp_path / "a.csv").write_text("\ufefftext,other\r\n" + "".join(quoted))
    write_table(tmp_path / "a.parquet", rows)
    for kind in ("jsonl", "json", "csv", "parquet"):
        found = tokens_of(load(tmp_path / f"a.{kind}").train)
        assert found == [token for row in rows for token in [*row["text"].encode(), END]]


def test_a_folder_is_read_in_order_whole_files_and_rows_together(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("second file ")
    (tmp_path / "a.py").write_text("first = 1\r\n")
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / ".git" / "c.txt").write_text("hidden")
    (tmp_path / "notes.rst").write_text("not read")
    write_rows(tmp_path / "z.jsonl", [{"body": "third"}])
    data = load(tmp_path, text_field="body")
    expected = [*b"first = 1\r\n", END, *b"second file ", END, *b"third", END]
    assert tokens_of(data.train) == expected
    assert ".rst left out" in data.description and "1 empty one skipped" in data.description


BAD_FILES = {
    "bad JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: bad JSON"),
    "bad JSON in a list": ("a.json", b'[{"text": "a"},\n {"text" "b"}]', r"a\.json:2: bad JSON"),
    "not an object": ("a.jsonl", b'{"text": "a"}\n"b"\n', r"a\.jsonl:2: a row must be a JSON object"),
    "bad encoding": ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', r"a\.jsonl:2: not UTF-8"),
    "bad encoding in a text": ("a.txt", b"one\ntwo\ncaf\xe9\n", r"a\.txt:3: not UTF-8"),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: .*surrogate"),
    "empty file": ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
    "blank lines only": ("a.jsonl", b"\n\n", r"a\.jsonl: there is no document"),
    "empty text": ("a.jsonl", b'{"text": "a"}\n{"text": ""}\n', r"a\.jsonl:2: text is empty"),
    "empty completion": ("a.jsonl", b'{"prompt": "a", "completion": ""}\n', r"a\.jsonl:1: completion is empty"),
    "no answer": ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', r"a\.jsonl:1: .*no answer"),
    "messages are text": ("a.jsonl", b'{"messages": "a"}\n', r"a\.jsonl:1: messages must be a list"),
    "null": ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', r"a\.jsonl:2: text is empty \(null\)"),
    "a number": ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1: text must be text, not int"),
    "a column missing later": ("a.jsonl", b'{"text": "a"}\n\n{"b": "b"}\n', r"a\.jsonl:3: the column text"),
    "unknown columns": ("a.jsonl", b'{"question": "a", "reply": "b"}\n', r"columns \(question, reply\).*--text-field"),
    "two readings": ("a.jsonl", b'{"text": "a", "messages": []}\n', r"more than one way \(messages or text\)"),
    "short CSV row": ("a.csv", b"text,n\na,1\nb\n", r"a\.csv:3: the row does not have the 2 fields"),
    "carriage returns": ("a.csv", b"prompt,completion\ra,b\r", "bad CSV: a carriage return alone; quote that field"),
    "open quote": ("a.csv", b'text\n"a\n', r"a\.csv:2: bad CSV"),
    "compressed Parquet": ("a.parquet", gzip.compress(b"rows"), r"a\.parquet is compressed with gzip"),
    "not Parquet": ("a.parquet", b"PAR1 no", r"a\.parquet: not a Parquet file"),
    "unknown kind": ("a.rst", b"# a", r"a\.rst: files of kind \.rst are not read"),
    "too short": ("a.txt", b"a", r"do not fill one row of 16"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_input_is_refused_with_its_place(tmp_path, case):
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path / name)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_a_parquet_file_whose_texts_are_not_utf_8_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    texts = pyarrow.array([b"fine", b"\xb4 is no UTF-8"]).cast(pyarrow.string(), safe=False)
    path = write_table(tmp_path / "texts.parquet", pyarrow.table({"text": texts}))
    with pytest.raises(InputError, match="texts.parquet: not UTF-8 within 256 rows of row 1"):
        load(path)


def test_unknown_names_and_empty_folders_are_refused(tmp_path):
    for spec, message in (
        (tmp_path, "holds no file of the kinds"),
        (tmp_path / "no.txt", "no such file or folder"),
        ("/dev/null", "neither a file nor a folder"),
        ("wikitex", "not a known name"),
        ("data/no.jsonl", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            load(spec)


def test_a_token_id_outside_the_models_vocabulary_is_refused_with_its_place(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "plain text, long enough"}, {"text": "é"}])
    with pytest.raises(InputError, match=r"a\.jsonl:2: .*token id 195.* 190 ids"):
        tokenizer = byte_level_tokenizer()
        tokenizer.eos_token = "a"
        load(tmp_path / "a.jsonl", tokenizer, vocabulary_size=190)


def test_fingerprint_changes_with_tokens_vocabulary_and_rows(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": f"document {index} " * 3} for index in range(20)])
    tokenizer = byte_level_tokenizer()
    fingerprints = [
        load(path).fingerprint,
        load(path, seq=8).fingerprint,
        load(path, document_mask=True).fingerprint,
        load(path, eval_fraction=0.2).fingerprint,
    ]
    tokenizer.add_tokens(["never seen"])
    fingerprints.append(load(path, tokenizer, vocabulary_size=258).fingerprint)
    path.write_text(path.read_text().replace("document 7", "document 8", 1))
    fingerprints.append(load(path).fingerprint)
    assert len(set(fingerprints)) == 6 and load(path, seed=3).fingerprint == fingerprints[-1]


# The hub: the real package datasets, reading a local folder in the hub's place


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder per hub id; `datasets` loads from there what it would load from the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hub_data.hub, "why_unreachable", lambda: None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    asked = []

    def through(function):
        def call(path, name=None, **options):
            asked.append((path, name, options.get("streaming")))
            return function(str(tmp_path / path.replace("/", "--")), cache_dir=str(tmp_path / "cache"), **options)

        return call

    monkeypatch.setattr(datasets, "load_dataset", through(datasets.load_dataset))
    monkeypatch.setattr(datasets, "load_dataset_builder", through(datasets.load_dataset_builder))

    def publish(path, **splits):
        (tmp_path / path.replace("/", "--")).mkdir()
        for split, rows in splits.items():
            datasets.Dataset.from_list(rows).to_parquet(tmp_path / path.replace("/", "--") / f"{split}-0.parquet")
        return asked

    return publish


def test_wikitext_lines_are_joined_to_articles_and_its_validation_split_is_used(hub):
    first = ["", " = First = \n", "", " text of it . \n", " = = Section = = \n", " more . \n"]
    lines = [*first, " = Second = \n", " other . \n"]
    asked = hub(
        "Salesforce/wikitext",
        train=[{"text": line} for line in lines],
        validation=[{"text": " = Held out = \n"}, {"text": " for evaluation only . \n"}],
    )
    data = load("wikitext", steps=4, eval_fraction=0.01)
    expected = ("".join(lines[:6]).encode(), "".join(lines[6:]).encode())
    assert tokens_of(data.train) == [*expected[0], END, *expected[1], END]
    assert bytes(data.evaluations[0].batch(0).input_ids[0].tolist()).startswith(b" = Held out = ")
    assert ("Salesforce/wikitext", "wikitext-2-raw-v1", False) in asked


def test_codeparrot_is_streamed_as_far_as_needed(hub):
    asked = hub(
        "codeparrot/codeparrot-clean-train",
        train=[{"content": f"x = {index}\n" * 50_000, "size": 1} for index in range(12)],
    )
    hub("codeparrot/codeparrot-clean-valid", train=[{"content": "held out " * 9}])
    data = load("codeparrot", steps=3, eval_fraction=0.01)
    assert len(data.train.parts[0].documents.lengths) < 12 and data.train.rows >= 6
    assert bytes(data.evaluations[0].batch(0).input_ids[0].tolist()) == b"held out held ou"
    assert asked[0] == ("codeparrot/codeparrot-clean-train", None, True) and "streamed" in data.description
    with pytest.raises(InputError, match="give --steps"):
        load("codeparrot", steps=None)


def test_a_hub_data_set_is_read_by_its_columns_and_blank_rows_are_skipped(hub, monkeypatch):
    asked = hub(
        "org/chat",
        train=[{"id": index, "messages": CONVERSATION[:2]} for index in range(3)]
        + [{"id": 3, "messages": CONVERSATION[:1]}],
    )
    data = load("org/chat:small", steps=2, seq=128)
    assert data.train.rows == 3 and "1 empty one skipped" in data.description
    assert trained_text(data.train.batch(0)) == " Hello$" and asked[-1] == ("org/chat", "small", False)
    monkeypatch.setattr(hub_data, "STREAM_ABOVE_BYTES", -1)
    assert load("org/chat", steps=1, batch=1, seq=128).train.rows >= 1 and asked[-1] == ("org/chat", None, True)


def test_an_unreachable_hub_is_one_sentence_and_no_wait(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hub_data.hub, "why_unreachable", lambda: "no network")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    start = time.perf_counter()
    for spec in ("org/no-such-data", "wikitext", "codeparrot"):
        with pytest.raises(InputError, match="neither in the cache nor to be had from the hub") as caught:
            load(spec, steps=1)
        assert "\n" not in str(caught.value)
    assert time.perf_counter() - start < 15  # the hub's client alone tries for 23 seconds each


def test_a_data_set_with_a_script_and_a_missing_package_are_named(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hub_data.hub, "why_unreachable", lambda: None)

    def refuse(*_, **__):
        raise RuntimeError("Dataset scripts are no longer supported, but found old.py")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(InputError, match="loading script"):
        load("org/old")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        load("org/old")
