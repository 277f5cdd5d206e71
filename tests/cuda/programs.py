"""Prints the most bytes that PyTorch's own allocator has for each program of tests/cudasim/programs.py, as JSON.

python -m stand_in --gpu rtx3060 -- -m tests.cuda.programs
"""

import gc
import json

import torch

from tests.cudasim.programs import PROGRAMS


def peak_bytes(program) -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    print(json.dumps({name: peak_bytes(program) for name, program in PROGRAMS.items()}, indent=0))
