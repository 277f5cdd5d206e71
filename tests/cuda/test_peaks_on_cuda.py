"""The figures of tests/cudasim/programs.json are those of PyTorch's own allocator."""

import json

import on_card

WRITTEN_DOWN = on_card.ROOT / "tests/cudasim/programs.json"


def test_small_programs_have_the_peaks_that_are_written_down():
    found = on_card.output("-m", "tests.cuda.programs", options=("--gpu", "rtx3060"))
    assert json.loads(found) == json.loads(WRITTEN_DOWN.read_text("utf-8"))
