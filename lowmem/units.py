"""Byte sizes, written and read one way everywhere: GiB and G are both 2**30, and nothing else is called GB."""

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_FACTORS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_FACTORS |= {"k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB, "t": TIB, "tib": TIB}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes in a size such as ``11GiB``, ``16G``, ``800MiB`` or ``1.5g``; raises ValueError for anything else.

    ``GB`` and ``MB`` are refused: half of their users mean 10**9 and half mean 2**30.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 11GiB, 16G or 800MiB")
    number, suffix = match.groups()
    if suffix.lower() not in _FACTORS:
        raise ValueError(
            f"{text!r} is not a size: the unit {suffix!r} is unknown; use MiB, GiB (or M, G, both powers of two)"
        )
    size = float(number) * _FACTORS[suffix.lower()]
    if not 1 <= size < 2**63:
        raise ValueError(f"{text!r} is not a size: it must be at least one byte, and less than 8 EiB")
    return int(size)


def format_size(size_bytes: int) -> str:
    """A size for people, three significant digits: ``10.9 GiB``, ``800 MiB``, ``512 bytes``."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= factor:
            value = size_bytes / factor
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"
    return "1 byte" if size_bytes == 1 else f"{size_bytes} bytes"
