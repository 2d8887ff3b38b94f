"""Sizes in bytes: read from text, written for people."""

import re

from ..errors import UsageError, UsageTypeError

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
MIB = 2**20


def parse_size(size: int | float | str) -> int:
    """Return the bytes of a number, or of a text such as "16GiB", "16G", "16 GB"; below one MiB, a unit is needed."""
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise UsageTypeError(f"a size is a number of bytes or a text such as '16GiB', got {size!r}")
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", str(size))
    if found is None or found[2].lower() not in UNITS:
        units = "B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB or K, M, G, T (of 1024)"
        raise UsageError(f"size {size!r} is not understood; write a number and a unit, '16GiB'; units: {units}")
    bytes_ = int(float(found[1]) * UNITS[found[2].lower()])
    if bytes_ <= 0:
        raise UsageError(f"size {size!r} is not allowed; allowed: sizes above 0")
    if not found[2] and bytes_ < MIB:
        raise UsageError(f"size {size!r} has no unit, and that many bytes hold no model; did you mean '{found[1]}GiB'?")
    return bytes_


def mib(size: int | float) -> str:
    """Return a size as "12.3 MiB" or "1234 MiB", always in the same unit, so that columns can be compared."""
    return f"{size / MIB:.1f} MiB" if size < 100 * MIB else f"{size / MIB:.0f} MiB"
