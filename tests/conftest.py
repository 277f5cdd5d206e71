"""Every test: one thread. The tensors are tiny, and threads that wait for one another cost far more than they save.

The fixtures of whole runs (see runs.py) are here because tests/ and tests/faults/ share them: one finished run for all.
"""

import functools
import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from experiments.harness import rows, vocabulary
from lowmem.run import evaluation

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases of a test after the first n as exhaustive if the test is marked with quick(n)."""
    seen = Counter()
    for item in items:
        quick = item.get_closest_marker("quick")
        seen[name := (item.path, item.originalname)] += 1
        if quick and seen[name] > quick.args[0]:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(scope="module", autouse=True)
def frozen_objects():
    """Tests collect garbage often: a whole run six times. None of them looks through all that is there before a file's
    tests begin, such as imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def code_read_once():
    """Each row of an experiment names the code that made it: to read all of lowmem for one takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "code_of", functools.cache(rows.code_of))
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Two short files of text: enough to hold one out."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("one", "two"):
        lines = [f"{name} {number}: the square of it is {number**2}.\n" for number in range(150)]
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def gpt2_tokenizer():
    """GPT-2's own: its vocabulary of 50,257 comes with a package of the index."""
    return vocabulary.gpt2_tokenizer()


@pytest.fixture(scope="session")
def bpe_tokenizer():
    """A small GPT-2-like tokenizer: byte-level BPE with merges, trained on this file."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.data.tokenizer_kinds import bpe

    end, bytes_alone = "<|endoftext|>", pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = bpe([end], 400, None, bytes_alone, byte_level=True, corpus=[Path(__file__).read_text()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)


@pytest.fixture(scope="session")
def train(text):
    """Runs the Large script on `text`, or the --data that is given; returns its exit code. What was planned before is
    not planned again, and matplotlib renders the pictures of each process's first run alone."""
    from unittest.mock import patch

    from matplotlib.figure import Figure

    from lowmem.run.main import main
    from runs import SCRIPTS, SMALL, remembering

    def saved(figure: Figure, path: Path, **how) -> None:
        if path.name not in rendered:
            savefig(figure, path, **how)
            rendered[path.name] = path.read_bytes()
        path.write_bytes(rendered[path.name])

    rendered: dict[str, bytes] = {}
    savefig = Figure.savefig

    def run(out: Path, *options: str) -> int:
        data = [] if "--data" in options else ["--data", str(text)]
        with patch("lowmem.run.prepare.process_aside", remembering), patch.object(Figure, "savefig", saved):
            return main(SCRIPTS["large"].SETTINGS, [*SMALL, *data, "--out", str(out), *options])

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory, train) -> Path:
    """The folder of a run that ended as it should. Not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(out) == 0
    return out


@pytest.fixture
def held_out(monkeypatch):
    """Gives the losses that a run's evaluations find, one after another."""

    def give(*losses: float) -> None:
        rest = iter(losses)
        real = evaluation.evaluated
        monkeypatch.setattr(evaluation, "evaluated", lambda *given: real(*given) | {"eval_loss": next(rest)})

    return give
