"""Which bytes of a stored tensor belong to a slice of it.

Axes are first merged: one that is taken whole belongs to the axis before it. So each of
those that are left, but for the first, is taken in part, and the last one is a run of
bytes without a gap:

    float32[6,4,5], [1:3, :, :]   one axis of 120, from 20 to 60   1 run of 160 bytes
    float32[6,4,5], [:, 1:2, :]   6 of 6, and 5 to 10 of 20        6 runs of 20 bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Of an axis: its size, and where the slice starts and stops.
Bounds = tuple[int, int, int]


def bounds_of(shape: Sequence[int], index: Sequence[slice]) -> list[Bounds]:
    """The bounds of a slice.

    Raises:
        ValueError: If it has another rank, or a step.
    """
    if len(index) != len(shape) or any(part.step not in (None, 1) for part in index):
        raise ValueError(f"{index} is no slice of step 1 of the shape {tuple(shape)}.")
    bounds = []
    for size, part in zip(shape, index, strict=True):
        start, stop, _ = part.indices(size)
        bounds.append((size, start, max(start, stop)))
    return bounds


def runs(bounds: Sequence[Bounds], itemsize: int) -> tuple[int, Iterator[int]]:
    """How long each run of bytes is, and where they start."""
    if any(start == stop for _, start, stop in bounds):
        return 0, iter(())
    *outer, (size, start, stop) = _merged(bounds)
    first = start * itemsize
    starts = (first + base for base in _starts(outer, size * itemsize))
    return (stop - start) * itemsize, starts


def _merged(bounds: Sequence[Bounds]) -> list[Bounds]:
    merged: list[Bounds] = [(1, 0, 1)]
    for size, start, stop in bounds:
        last, begin, end = merged[-1]
        if (start, stop) == (0, size):
            merged[-1] = (last * size, begin * size, end * size)
        elif (begin, end) == (0, 1) == (0, last):
            merged[-1] = (size, start, stop)
        else:
            merged.append((size, start, stop))
    return merged


def _starts(axes: Sequence[Bounds], width: int) -> Iterator[int]:
    """Where each element of the slice starts, one by one: there may be millions."""
    if not axes:
        yield 0
        return
    *outer, (size, start, stop) = axes
    for base in _starts(outer, size * width):
        yield from range(base + start * width, base + stop * width, width)
