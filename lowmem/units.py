"""Parses, formats and rounds byte sizes, intervals and counts. GiB and G are both 2**30, GB is 10**9."""

import math
import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
# GB and MB are powers of ten. Half of the users mean powers of two, but a smaller cap is safe.
_FACTORS = {"": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_FACTORS |= {"k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB, "t": TIB, "tib": TIB}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS = "s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?"  # only the first letter counts
_INTERVAL = re.compile(rf"\s*([0-9]{{1,12}}(?:\.[0-9]+)?)\s*((?:{_UNITS})?)\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_size(text: str) -> int:
    """Returns the bytes in a size such as ``11GiB``, ``16G``, ``800MiB`` or ``1.5g``. Raises ValueError for anything
    else."""
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


def parse_interval(text: str) -> int | str:
    """Returns an interval of steps, such as ``500``, as an int, and an interval of time, such as ``30min`` or ``2h``,
    as a str. Raises ValueError for anything else, and for zero."""
    match = _INTERVAL.fullmatch(text)
    if match is None or float(match[1]) == 0 or (not match[2] and "." in match[1]):
        raise ValueError(f"{text!r} is neither a number of steps nor a time; write it like 500, 30min or 2h")
    return f"{match[1]}{match[2].lower()}" if match[2] else int(match[1])


def interval_seconds(interval: int | str) -> float | None:
    """Returns the seconds of an interval from `parse_interval`; None for an interval in steps."""
    if isinstance(interval, int):
        return None
    number, unit = _INTERVAL.fullmatch(interval).groups()
    return float(number) * _SECONDS[unit[0].lower()]


def format_size(size_bytes: int, rounded_up: bool = False) -> str:
    """Formats a size for people, with three significant digits: ``10.9 GiB``, ``800 MiB``, ``512 bytes``."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= factor:
            value = size_bytes / factor
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{math.ceil(value * 10**digits) / 10**digits if rounded_up else value:.{digits}f} {unit}"
    return "1 byte" if size_bytes == 1 else f"{size_bytes} bytes"


def format_option(size_bytes: int) -> str:
    """Formats a size as an option's value, rounded up: ``17GiB``, or ``800MiB`` below 10 GiB."""
    unit, name = (GIB, "GiB") if size_bytes >= 10 * GIB else (MIB, "MiB")
    return f"{math.ceil(size_bytes / unit)}{name}"


def format_seconds(seconds: float) -> str:
    """Formats a duration for people: ``0.31 s``, ``40 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 100:
        return f"{seconds:.{2 if seconds < 10 else 3}g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def counted(number: int, things: str) -> str:
    """Returns `number` with its noun: "1 row" or "2,000 rows" for `things` "rows"."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"
