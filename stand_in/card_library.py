"""Calls the model of the card in card/*.c, in processes on the stand-in."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

COMPUTATION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class Counts(ctypes.Structure):
    """Holds the card's counts of calls and bytes since the process began. `device_bytes`, `page_locked_bytes`,
    `managed_bytes` and `managed_resident_bytes` are those in use now; `peak_` fields are the most so far."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("launches", "copies", "bytes_to_device", "bytes_to_host", "bytes_on_device"),
            *("device_bytes", "peak_device_bytes", "page_locked_bytes", "peak_page_locked_bytes"),
            *("managed_bytes", "managed_resident_bytes", "peak_managed_resident_bytes"),
            *("prefetched_to_device_bytes", "prefetched_to_host_bytes"),
        )
    ]


@cache
def library() -> ctypes.CDLL:
    """Returns the library that models the card, loaded. Raises KeyError outside of the stand-in."""
    card = ctypes.CDLL(str(Path(os.environ["STAND_IN_LIBRARIES"]) / "libstand_in_card.so"))
    card.card_counts.restype = ctypes.POINTER(Counts)
    card.card_arena.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)]
    card.card_launches.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    card.card_compute.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    card.card_set_computation.argtypes = [COMPUTATION]
    card.card_cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
    card.card_set_order.argtypes = [ctypes.c_char_p]
    card.card_set_page_locked_bytes.argtypes = [ctypes.c_size_t]
    card.card_set_page_locked_bytes.restype = ctypes.c_size_t
    return card


@contextmanager
def order(name: str) -> Iterator[None]:
    """Inside `with`, streams work in the order `name` (settings.ORDERS). Raises ValueError for an unknown order."""
    if not library().card_set_order(name.encode()):
        library().card_set_order(b"issue")
        raise ValueError(f"{name}: no such order of streams")
    try:
        yield
    finally:
        library().card_set_order(os.environ["STAND_IN_ORDER"].encode())


@contextmanager
def page_locked_limit(limit_bytes: int) -> Iterator[None]:
    before = library().card_set_page_locked_bytes(limit_bytes)
    try:
        yield
    finally:
        library().card_set_page_locked_bytes(before)


def counts() -> dict[str, int]:
    found = library().card_counts().contents
    return {name: getattr(found, name) for name, _ in Counts._fields_}
