"""Amounts in words: bytes, operations, seconds."""

from __future__ import annotations


def quantity(count: float | None) -> str:
    """Writes a number with a prefix of the SI and a space before the unit."""
    if not count:
        return "unknown" if count is None else "0 "
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.4g} {prefix}"
        count /= 1000
    return f"{count:.4g} P"


def num_bytes(count: float) -> str:
    """Writes a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"


def seconds(seconds: float | None) -> str:
    """Writes a time."""
    if seconds is None:
        return "unknown"
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
