"""What follows from a GPU's compute capability alone, and not from the card: what one multiprocessor holds.

NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". PyTorch's kernels choose their
launch by these figures, and with the launch the size of their temporaries (reductions.py, temporaries.py).
"""

from typing import NamedTuple

from lowmem.units import KIB

Capability = tuple[int, int]


class Multiprocessor(NamedTuple):
    """`threads`: that one multiprocessor keeps resident; `shared_bytes`: of its shared memory; `shared_bytes_of_block`:
    what one block may have of that where it asks for more than 48 KiB; `blocks`: that it keeps resident."""

    threads: int
    shared_bytes: int
    shared_bytes_of_block: int
    blocks: int


MULTIPROCESSORS = {
    (5, 0): Multiprocessor(2048, 64 * KIB, 48 * KIB, 32),
    (5, 2): Multiprocessor(2048, 96 * KIB, 48 * KIB, 32),
    (6, 0): Multiprocessor(2048, 64 * KIB, 48 * KIB, 32),
    (6, 1): Multiprocessor(2048, 96 * KIB, 48 * KIB, 32),
    (7, 0): Multiprocessor(2048, 96 * KIB, 96 * KIB, 32),
    (7, 5): Multiprocessor(1024, 64 * KIB, 64 * KIB, 16),
    (8, 0): Multiprocessor(2048, 164 * KIB, 163 * KIB, 32),
    (8, 6): Multiprocessor(1536, 100 * KIB, 99 * KIB, 16),
    (8, 7): Multiprocessor(1536, 164 * KIB, 163 * KIB, 16),
    (8, 9): Multiprocessor(1536, 100 * KIB, 99 * KIB, 24),
    (9, 0): Multiprocessor(2048, 228 * KIB, 227 * KIB, 32),
    (10, 0): Multiprocessor(2048, 228 * KIB, 227 * KIB, 32),
    (12, 0): Multiprocessor(1536, 100 * KIB, 99 * KIB, 24),
}


def multiprocessor(capability: Capability) -> Multiprocessor:
    """That of `capability`; of one which is not in the table, the newest before it."""
    known = max((listed for listed in MULTIPROCESSORS if listed <= capability), default=min(MULTIPROCESSORS))
    return MULTIPROCESSORS[known]
