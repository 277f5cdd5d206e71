"""`lowmem.cuda_peak` of small programs, against PyTorch's own allocator."""

import json
from pathlib import Path

import pytest

import lowmem
from tests.cudasim.programs import PROGRAMS

# What sorting takes besides its buffers is not modelled, and gradients of biases that are one tensor are two here.
NOT_EXACT = {"indexing with many": 6144, "LSTMCell, autocast True": 6144}
REAL = json.loads((Path(__file__).parent / "programs.json").read_text("utf-8"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_peak_that_it_has_on_a_gpu(name):
    found = lowmem.cuda_peak(PROGRAMS[name]).allocated_bytes
    assert abs(found - REAL[name]) <= NOT_EXACT.get(name, 0)
