"""Tensors of few bits with a scale for each block, decoded while they are read.

    MXFP4   X_blocks     uint8[experts, rows, blocks, 16]       two codes in a byte, the
            X_scales     uint8[experts, rows, blocks]           lower bits first
            X            bfloat16[experts, 32 * blocks, rows]
    FP8     X            float8[..., rows, columns]
            X_scale_inv  number[..., blocks, blocks]            or one for all of X
            X            float32[..., rows, columns]

A value is that of its code, times the scale of its block. For MXFP4, as gpt-oss has it,
the scale is a power of two, whose exponent is stored plus 127; the last two axes are
exchanged as `transformers` does it, so one table is for such a file and for one that
has X itself. Blocks of FP8 may be cut off at the ends of X. Their size is what
``config.json`` beside the file says; otherwise a power of two, of which the numbers of
blocks allow only one.

A tensor that a table names is decoded if the file has scales for it that the table does
not name. Only the codes and scales of a piece are read, and a float8 tensor without
scales is an error in a file that has some.

References:
    Rouhani et al., 2023, "OCP Microscaling Formats (MX) Specification", section 5.3.
    DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", section 3.3.2.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from graftree.core.text import descriptions
from graftree.weights import layouts, stored_tensors
from graftree.weights.stored_tensors import Source, Stored, file_error

_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"

# The values of codes of four bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
# Those of the two codes in a byte.
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)


class _Encoded(NamedTuple):
    """A tensor that is decoded.

    Attributes:
        parts: The names of its tensors in the file.
        stored: The facts about it, decoded.
        read: Reads a piece of it.
    """

    parts: tuple[str, str]
    stored: Stored
    read: Callable[[layouts.Index], np.ndarray]


def decoded(source: Source, names: Iterable[str] | None = None) -> Source:
    """Gives a source whose tensors of these names are decoded, if they are encoded.

    Args:
        source: Where they are. It stays the owner of its files.
        names: The tensors that are asked for; ``None``: all.

    Raises:
        WeightsError: If codes and scales don't fit each other, or a tensor lacks scales
            that others have.
    """
    tensors = source.tensors
    if names is None:
        names = {name.removesuffix(_BLOCKS) for name in tensors}
        names = {name for name in names if not name.endswith((_SCALES, _SCALE_INV))}
    names = {*names}
    encoded = {name: x for name in names if (x := _encoded(source, name, names))}
    _check_scaled(source, names, encoded)
    if not encoded:
        return source
    owners = {part: name for name, x in encoded.items() for part in x.parts}
    facts = {
        owners.get(name, name): encoded[owners[name]].stored
        if name in owners
        else stored
        for name, stored in tensors.items()
    }

    def read(name: str, index: layouts.Index, stored: Stored) -> np.ndarray:
        if name not in encoded:
            return source.read(name, index, stored.shape)
        piece = _pieces(encoded[name].stored.shape, stored.shape, index)
        array = encoded[name].read(piece.cover)
        return array.reshape(piece.lengths)[piece.cut]

    return Source(
        source.name, facts, read, contextlib.ExitStack(), metadata=source.metadata
    )


def _encoded(source: Source, name: str, names: set[str]) -> _Encoded | None:
    """Returns a tensor of a name, if it is encoded."""
    parts = (name + _BLOCKS, name + _SCALES)
    if name not in source.tensors and {*parts} <= source.tensors.keys() - names:
        return _mxfp4(source, name, parts)
    parts = (name, name + _SCALE_INV)
    if {*parts} <= source.tensors.keys() and parts[1] not in names:
        return _scaled(source, parts)
    return None


def _check_scaled(
    source: Source, names: set[str], encoded: dict[str, _Encoded]
) -> None:
    """Raises if a float8 tensor has no scales, and others do."""
    if not any(x.parts[1].endswith(_SCALE_INV) for x in encoded.values()):
        return
    for name in sorted(names & source.tensors.keys() - encoded.keys()):
        dtype = source.tensors[name].dtype
        if _is_float8(dtype) and name + _SCALE_INV not in names:
            fault = f"it is {dtype}, but has no {name + _SCALE_INV}, unlike others"
            way_out = "Get the file again, or load a dict of decoded tensors."
            raise file_error(source.name, fault, name, way_out)


def _misfit(source: Source, parts: Sequence[str], expected: str) -> Exception:
    codes, scales = (
        f"{part} {descriptions.describe(source.tensors[part])}" for part in parts
    )
    fault = f"its scales don't fit: {codes} and {scales}; {expected}"
    way_out = "If it is in another format, load a dict of decoded tensors."
    return file_error(source.name, fault, parts[0], way_out)


def _is_float8(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


# ------------------------------------------------------------------------------ MXFP4


def _mxfp4(source: Source, name: str, parts: tuple[str, str]) -> _Encoded:
    blocks, scales = (source.tensors[part] for part in parts)
    are_bytes = blocks.dtype == np.uint8 and scales.dtype in (np.uint8, _E8M0)
    is_fitting = are_bytes and blocks.shape == (*scales.shape, 16)
    if not is_fitting or len(scales.shape) != 3:
        expected = (
            "MXFP4 is uint8[experts,rows,blocks,16], and scales for each 16 bytes"
        )
        raise _misfit(source, parts, expected)
    experts, rows, count = scales.shape
    stored = Stored(jnp.dtype(jnp.bfloat16), (experts, 32 * count, rows))

    def read(index: layouts.Index) -> np.ndarray:
        of_expert, of_columns, of_rows = index
        first, last = of_columns.start // 32, -(-of_columns.stop // 32)
        cut = slice(of_columns.start - 32 * first, of_columns.stop - 32 * first)
        pieces = []
        # One by one: decoding takes several times the memory of what it gives.
        for i in range(of_expert.start, of_expert.stop):
            at = (slice(i, i + 1), of_rows, slice(first, last))
            codes = source.read(parts[0], (*at, slice(0, 16)))
            values = _PAIRS[codes].reshape(*codes.shape[1:3], 32)
            with np.errstate(over="ignore"):  # as in float arithmetic elsewhere
                values *= _numbers(source.read(parts[1], at))[0, ..., None]
            values = values.reshape(len(values), -1)[:, cut]
            pieces.append(values.astype(stored.dtype))
        shape = (0, of_rows.stop - of_rows.start, of_columns.stop - of_columns.start)
        array = np.stack(pieces) if pieces else np.empty(shape, stored.dtype)
        return array.swapaxes(1, 2)

    return _Encoded(parts, stored, read)


_E8M0 = jnp.dtype(jnp.float8_e8m0fnu)


def _numbers(scales: np.ndarray) -> np.ndarray:
    """Returns scales as float32; bytes are exponents."""
    if scales.dtype == np.uint8:
        scales = scales.view(_E8M0)
    return scales.astype(np.float32)


# -------------------------------------------------------------------------------- FP8


def _scaled(source: Source, parts: tuple[str, str]) -> _Encoded:
    codes, scales = (source.tensors[part] for part in parts)
    is_scalar = scales.shape in ((), (1,))
    shape = (1,) * len(codes.shape) if is_scalar else scales.shape
    is_number = jnp.issubdtype(scales.dtype, jnp.floating) or scales.dtype == np.uint8
    is_fitting = is_scalar or shape[:-2] == codes.shape[:-2]
    is_fitting &= len(codes.shape) == len(shape) > 1 and scales.size * codes.size > 0
    if not (_is_float8(codes.dtype) and is_number and is_fitting):
        expected = "FP8 is float8[...,rows,columns], with as many axes of blocks"
        raise _misfit(source, parts, expected)
    said = _said_in_config(source.name) or (None, None)
    sizes = []
    for size, count, of_config in zip(codes.shape[-2:], shape[-2:], said, strict=True):
        block = size if is_scalar else of_config or _power_of_two(size, count)
        if -(-size // block) != count:
            by = f"blocks of {block}" + " by config.json" * (of_config is not None)
            raise _misfit(source, parts, f"{count} {by} don't make {size}")
        sizes.append(block)
    return _Encoded(
        parts,
        Stored(np.dtype(np.float32), codes.shape),
        functools.partial(_read_scaled, source, parts, shape, sizes),
    )


def _power_of_two(size: int, count: int) -> int:
    """Returns the size of blocks, the only power of two that can give this count."""
    return 1 << (-(-size // count) - 1).bit_length()


def _said_in_config(path: str) -> Sequence[int] | None:
    """Returns the size of blocks that ``config.json`` beside a file says."""
    config = os.path.join(os.path.dirname(path), "config.json")
    if not os.path.isfile(path) or not os.path.isfile(config):
        return None
    try:
        with stored_tensors.Explained(config), open(config, encoding="utf-8") as file:
            sizes = json.load(file)["quantization_config"]["weight_block_size"]
    except (KeyError, TypeError):
        return None
    except ValueError as error:
        raise file_error(config, f"it is not JSON: {error}") from None
    if sizes is None:
        return None
    if (
        not isinstance(sizes, list)
        or [type(x) is int and x > 0 for x in sizes] != [True] * 2
    ):
        raise file_error(config, f"its weight_block_size is {sizes}")
    return sizes


def _read_scaled(
    source: Source,
    parts: tuple[str, str],
    shape: Sequence[int],
    sizes: Sequence[int],
    index: layouts.Index,
) -> np.ndarray:
    """Reads a piece of a tensor: its codes, times the scales of their blocks."""
    *lead, of_rows, of_columns = index
    lead = [
        x if count > 1 else slice(0, 1) for x, count in zip(lead, shape, strict=False)
    ]
    (first_row, last_row), (first, last) = (
        (x.start // size, -(-x.stop // size))
        for x, size in zip((of_rows, of_columns), sizes, strict=True)
    )
    values = source.read(parts[0], index).astype(np.float32)
    at = (*lead, slice(first_row, last_row), slice(first, last))
    scales = _numbers(source.read(parts[1], at, shape))
    start = of_columns.start - first * sizes[1]
    width = of_columns.stop - of_columns.start
    # By rows of blocks: scales for all values at once would take as much memory.
    for i, row in enumerate(range(first_row, last_row)):
        begin = max(row * sizes[0] - of_rows.start, 0)
        end = (row + 1) * sizes[0] - of_rows.start
        factors = np.repeat(scales[..., i, :], sizes[1], axis=-1)
        values[..., begin:end, :] *= factors[..., None, start : start + width]
    return values


# ------------------------------------------------------------------------------ pieces


class _ViewPiece(NamedTuple):
    """A piece of a view of a tensor, in the axes of the tensor.

    Attributes:
        cover: A piece of the tensor that contains it.
        lengths: The shape of that, in the axes of the view.
        cut: Where the piece is in it.
    """

    cover: layouts.Index
    lengths: list[int]
    cut: layouts.Index


def _pieces(
    shape: Sequence[int], view: Sequence[int], index: layouts.Index
) -> _ViewPiece:
    """Finds a piece of a view, in which axes of a tensor are divided into several."""
    bounds = stored_tensors.bounds_of(view, index)
    cover, lengths, cut, begin = [], list[int](), [], 0
    for axis, size in enumerate(shape):
        end, product = begin, 1
        is_last = axis == len(shape) - 1
        while end < len(view) and (
            product != size or is_last or (end == begin and view[end] == 1)
        ):
            product *= view[end]
            end += 1
        inner = math.prod(view[begin + 1 : end])
        for i, (length, start, stop) in enumerate(bounds[begin:end]):
            if i == 0:
                cover.append(slice(start * inner, stop * inner))
                lengths.append(stop - start)
                cut.append(slice(None))
            else:
                lengths.append(length)
                cut.append(slice(start, stop))
        if begin == end:
            cover.append(slice(0, 1))
        begin = end
    return _ViewPiece(tuple(cover), lengths, tuple(cut))
