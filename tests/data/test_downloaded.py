"""Data sets in folders: downloaded from the hub, saved by `datasets`, or fetched without Git LFS."""

import json

import pytest

from lowmem.data import hub_data
from lowmem.data.hub_data import choose_splits
from lowmem.data.records import Reading
from lowmem.data.sources import is_on_hub, open_source
from lowmem.errors import InputError
from tests.data.loading import POINTER, load, write_rows, write_table, write_texts

CARD = "---\nlicense: mit\n---\n# About these data\n"
CONFIGS = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/part-*.jsonl
  - split: test
    path: [en/held.jsonl, en/gone.jsonl]
- config_name: no
  default: %s
  data_files: "no/*.jsonl"
---
"""


def make(folder, *names, card=None):
    """Makes a folder of files with one row each; the row's text is the file's name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{name} " * 9
        if path.suffix == ".parquet":
            write_table(path, [{"text": text}])
        elif path.suffix == ".csv":
            path.write_text(f"text\n{text}\n")
        elif path.suffix in (".jsonl", ".json"):
            write_texts(path, text)
        else:
            path.write_text(text)
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


def read(spec):
    """The files whose rows are trained on, and those whose rows are held out."""
    source = open_source(str(spec), Reading())
    return tuple(
        sorted({str(row.columns.get("text")).split()[0] for row in rows})
        for rows in (source.train, source.evaluation or ())
    )


TRAIN, TEST, VALID = (f"data/{split}-00000-of-00001.parquet" for split in ("train", "test", "validation"))
LAYOUTS = {  # files, card: which are trained on, which are held out
    "shards": ([TRAIN, TEST], CARD, [TRAIN], [TEST]),
    "shards without a card": ([TRAIN, TEST], None, [TRAIN], [TEST]),
    "validation before test": ([TRAIN, TEST, VALID], CARD, [TRAIN], [VALID]),
    "named splits": (
        [f"data/{split}-00000-of-00001.parquet" for split in ("test_gen", "test_sft", "train_gen", "train_sft")],
        CARD, ["data/train_gen-00000-of-00001.parquet"], ["data/test_gen-00000-of-00001.parquet"],
    ),
    "files": (["train.jsonl", "test.jsonl", "LICENSE.md"], CARD, ["train.jsonl"], ["test.jsonl"]),
    "files without a card": (["train.jsonl", "dev.jsonl", "README.md"], None, ["train.jsonl"], ["dev.jsonl"]),
    "words in names": (["my_train_1.csv", "my_val_1.csv", "extra.csv"], None, ["my_train_1.csv"], ["my_val_1.csv"]),
    "folders": (["train/a.json", "eval/c.json"], None, ["train/a.json"], ["eval/c.json"]),
    "folders within": (["en/train/a.jsonl", "en/test/b.jsonl"], CARD, ["en/train/a.jsonl"], ["en/test/b.jsonl"]),
    "texts": (["wiki.train.txt", "wiki.test.txt"], None, ["wiki.train.txt"], ["wiki.test.txt"]),
    "no splits": (["a.jsonl", "b.jsonl", "script.py", "dataset_infos.json"], CARD, ["a.jsonl", "b.jsonl"], []),
    "texts with a card": (["a.txt", "notes.md"], CARD, ["a.txt"], []),
    "the most common kind": (["a.jsonl", "a.parquet", "b.parquet"], CARD, ["a.parquet", "b.parquet"], []),
    "test alone": (["data/test-00000-of-00001.parquet"], CARD, [TEST], []),
    "hidden": (["train.jsonl", "test.jsonl", ".cache/huggingface/x.json"], CARD, ["train.jsonl"], ["test.jsonl"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_downloaded_data_set_is_split_as_the_hub_splits_it(tmp_path, case):
    names, card, train, held_out = LAYOUTS[case]
    assert read(make(tmp_path / "set", *names, card=card)) == (train, held_out)


TEXTS = {
    "texts": (["a.txt", "b.md", "README.md"], None),
    "test of time": (["a.txt", "test of time.txt", "train of thought.txt"], None),
    "code": (["train.py", "tests/test_train.py", "README.md"], None),
    "tables": (["train_1.jsonl", "train_2.jsonl", "more.jsonl"], None),
    "somebody's front matter": (["a.md", "b.md"], "---\ntitle: Home\nlayout: page\n---\nHi\n"),
    "a model's card": (["a.md", "train.txt"], "---\nlicense: mit\nbase_model: gpt2\n---\nHi\n"),
    "a broken card": (["a.md", "b.txt"], "---\nlicense: [\n---\nHi\n"),
}
NO_CARDS = ["# About these data\n", "---\nlicense: [\n---\nHi\n", "---\ntags:\n- text\n---\nHi\n", POINTER]


@pytest.mark.parametrize("text", NO_CARDS)
@pytest.mark.parametrize("name", ["README.md", "readme.md"])
def test_a_readme_beside_tables_is_no_text_whether_or_not_it_is_a_card(tmp_path, name, text):
    folder = make(tmp_path / "set", "data/train-00000-of-00001.parquet", "notes.md", f"sub/{name}")
    (folder / name).write_text(text)
    assert read(folder) == (["data/train-00000-of-00001.parquet", "notes.md"], [])
    assert f"({name} left out)" in open_source(str(folder), Reading()).name


@pytest.mark.parametrize("case", TEXTS)
def test_a_folder_of_texts_is_read_whole(tmp_path, case):
    names, card = TEXTS[case]
    folder = make(tmp_path / "set", *names, card=card)
    train, held_out = read(folder)
    assert len(train) == len({*names, "README.md"} if card else names) and held_out == []


def test_configurations_are_asked_for_by_name(tmp_path):
    names = ["en/part-0.jsonl", "en/part-1.jsonl", "en/held.jsonl", "no/a.jsonl"]
    folder = make(tmp_path / "set", *names, card=CONFIGS % "false")
    assert read(f"{folder}:en") == (names[:2], names[2:3]) and read(f"{folder}:no") == (names[3:], [])
    assert not is_on_hub(f"{folder}:en")
    with pytest.raises(InputError, match=r"has 2 configurations \(en, no\); name one as .*set:en"):
        read(folder)
    with pytest.raises(InputError, match="names no configuration fr; it has en, no"):
        read(f"{folder}:fr")
    (folder / "README.md").write_text(CONFIGS % "true")
    assert read(folder) == (names[3:], []) and "(configuration no)" in load(folder).description
    for name in names[:2]:
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"README.md: it names en/part-\*.jsonl for the split train of en, and"):
        read(f"{folder}:en")


def test_the_line_says_which_splits_are_used_and_eval_fraction_0_holds_nothing_out(tmp_path):
    folder = make(tmp_path / "set", "train.jsonl", "valid.jsonl", "test.jsonl", card=CARD)
    said = load(folder, eval_fraction=0.1)
    assert "splits not used: test" in said.description and ".md left out" in said.description
    assert len(said.evaluations) == 1 and "left out), split valid" in said.description
    assert "split validation, in place of --eval-fraction 0.1: " in said.description  # seen to fail: it was not said
    assert "in place of" not in load(folder, eval_fraction=0.01).description
    nothing = load(folder)
    assert nothing.evaluations == () and "nothing held out (--eval-fraction 0)" in nothing.description
    assert load(folder, eval_data=str(folder)).evaluations[0].parts[0].documents.files == (f"{folder}/valid.jsonl:",)


BAD_FOLDERS = {
    "packed": (["train.jsonl.gz", "test.jsonl"], None, r"train\.jsonl\.gz: files of kind \.gz are not read; unpack"),
    "a card alone": ([], CARD, "has the card of a data set and no file of the kinds"),
    "a script": (["set.py"], CARD, "scripts that load data are not run"),
    "arrow": (["a.arrow", "dataset_info.json"], None, r"a\.arrow: \.arrow files are read only as the folder"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_that_is_not_whole_is_named(tmp_path, case):
    names, card, message = BAD_FOLDERS[case]
    (tmp_path / "set").mkdir()
    with pytest.raises(InputError, match=message):
        read(make(tmp_path / "set", *names, card=card))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["train", "validation", "test"], ("train", "validation", " (splits not used: test)")),
        (["test_a", "train_b", "test_b"], ("train_b", "test_b", " (split train_b; splits not used: test_a)")),
        (["train"], ("train", None, "")),
        (["test"], ("test", None, " (split test)")),
        (["unsupervised", "dev", "train"], ("train", "dev", " (splits not used: unsupervised)")),
        (["default"], ("default", None, " (split default)")),
    ],
)  # fmt: skip
def test_one_split_is_trained_on_and_one_is_held_out(names, chosen):
    assert choose_splits(names) == chosen


def test_what_save_to_disk_wrote_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"id": 1, "text": "one row " * 9}, {"id": 2, "text": None}, {"id": 3, "text": "another " * 9}]
    one = datasets.Dataset.from_list(rows)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": one.select([2]), "train": one.select([0, 1])}).save_to_disk(tmp_path / "both")
    alone, both = load(tmp_path / "one"), load(tmp_path / "both", eval_fraction=0.1)
    assert "1 empty one skipped" in alone.description and "columns not used: id" in alone.description
    assert len(alone.train.parts[0].documents.lengths) == 2 and alone.evaluations == ()
    assert both.train.parts[0].documents.files == (f"{tmp_path / 'both'}, train row ",)
    assert both.evaluations[0].parts[0].documents.files == (f"{tmp_path / 'both'}, test row ",)
    with pytest.raises(InputError, match="give that folder"):
        load(next((tmp_path / "one").glob("*.arrow")))
    with pytest.raises(InputError, match="give that folder"):
        load(tmp_path)
    for file in [tmp_path / "one" / "state.json", *(tmp_path / "one").glob("*.arrow")]:
        content = file.read_bytes()
        file.write_text(POINTER)
        with pytest.raises(InputError, match=f"{file.name} is a Git LFS pointer"):
            load(tmp_path / "one")
        file.write_bytes(content)


@pytest.mark.parametrize("content", ["{}", "[]", '{"splits": []}', '{"splits": "train"}'])
def test_a_damaged_list_of_splits_is_named(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(InputError, match=r"dataset_dict\.json: it must name the splits"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_git_lfs_pointers_are_named(tmp_path, name):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_text(POINTER)
    for spec in (tmp_path / "set", tmp_path / "set" / name):
        with pytest.raises(InputError, match="git lfs pull"):
            load(spec)


def test_the_folder_of_the_hub_s_client_is_what_its_main_branch_is(tmp_path):
    make(tmp_path / "datasets--org--name" / "snapshots" / "abc", "train.jsonl", "test.jsonl", card=CARD)
    (tmp_path / "datasets--org--name" / "refs").mkdir()
    (tmp_path / "datasets--org--name" / "refs" / "main").write_text("abc")
    assert read(tmp_path / "datasets--org--name") == (["train.jsonl"], ["test.jsonl"])


def test_values_that_python_cannot_hold_are_refused_with_their_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    late = pyarrow.array([{"role": "user", "content": "a", "time": 253_402_300_800_000}], pyarrow.struct(
        [("role", pyarrow.string()), ("content", pyarrow.string()), ("time", pyarrow.timestamp("ms"))]
    ))  # fmt: skip
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 1], late)})
    path = write_table(tmp_path / "late.parquet", table)
    with pytest.raises(InputError, match=r"late\.parquet: Python cannot hold a value within 256 rows of row 1"):
        load(path)


def test_a_data_set_of_which_every_row_is_skipped_says_why(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}]}] * 3
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"every document in it is empty \(.*row 1: messages, message 1: .*no content"):
        load(tmp_path / "saved")


def test_a_column_that_is_given_twice_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"])
    write_table(tmp_path / "a.parquet", twice)
    (tmp_path / "a.csv").write_text("text,id,text\na,1,b\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "a", "text": "b"}\n')
    (tmp_path / "a.json").write_text('[{"text": "a"},\n{"text": "a",\n"text": "b"}]')
    for name, where in (("a.parquet", ""), ("a.csv", ":1"), ("a.jsonl", ":2"), ("a.json", ":3")):
        with pytest.raises(InputError, match=rf"{name}{where}: .*text.* given twice"):
            load(tmp_path / name)


def test_columns_that_are_not_used_are_named_for_every_kind_of_file(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"id": 1, "text": "one row, long enough", "source": {"a": 1}},
        {"text": "another row", "id": 2, "source": None},
    ]
    write_rows(tmp_path / "a.jsonl", [rows[0], rows[1] | {"new\n\ud800": 1}])
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("id,text,source\n1,one row long enough,a\n2,another row,b\n")
    write_table(tmp_path / "a.parquet", rows)
    for kind in ("json", "csv", "parquet"):
        assert "; columns not used: id, source" in load(tmp_path / f"a.{kind}").description
    assert "; columns not used: id, source, 'new\\n\\ud800'" in load(tmp_path / "a.jsonl").description
    monkeypatch.setattr(hub_data.hub, "why_unreachable", lambda: None)
    loaded = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: loaded)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: loaded["train"])
    assert "; columns not used: id, source" in load("org/name", steps=None).description
