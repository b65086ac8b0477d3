r"""Files in the format of the library `safetensors`: one, or several with an index.

A file is (all numbers little-endian, offsets from where the data begins)

    8 bytes    the size of the header
    header     {"__metadata__": {"format": "pt"},
                "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
               as JSON in UTF-8, from the first byte on, with spaces at the end
    data       each tensor in C order; they follow each other without gaps

A header is checked when the file is opened. The library accepts all files that we
accept, and reads the same. We refuse more than it does: repeated keys, fields besides
the three, anything before the first brace, and shapes that no array can have. Reading a
header takes some twenty times its own memory.

An index has the file of each tensor. It is not trusted: its files must be in its own
folder, and each must hold exactly the tensors that the index lists for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.weights import stored_tensors
from graftree.weights.stored_tensors import OpenFile, Source, Stored, file_error, quoted

# For a header, as in the library, and for an index.
MAX_SIZE = 100_000_000
MAX_INDEX_SIZE = 64 * 2**20

SUFFIX, INDEX = ".safetensors", ".index.json"
METADATA = "__metadata__"
_FIELDS = dict.fromkeys(["dtype", "shape", "data_offsets"])

# In the order of the format, which sorts tensors by it, the last first.
_NAMED = (
    "BOOL bool U8 uint8 I8 int8 F8_E5M2 float8_e5m2 F8_E4M3 float8_e4m3fn "
    "F8_E8M0 float8_e8m0fnu F8_E4M3FNUZ float8_e4m3fnuz F8_E5M2FNUZ float8_e5m2fnuz "
    "I16 int16 U16 uint16 F16 float16 BF16 bfloat16 I32 int32 U32 uint32 F32 float32 "
    "C64 complex64 F64 float64 I64 int64 U64 uint64"
).split()
DTYPES = dict(zip(_NAMED[::2], map(jnp.dtype, _NAMED[1::2]), strict=True))
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Several elements share a byte there, so no slice of them is a range of bytes.
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")


def open_file(path: str) -> Source:
    """Opens one file.

    Raises:
        WeightsError: If it can't be read, or anything in its header is wrong.
    """
    with contextlib.ExitStack() as files:
        file = files.enter_context(contextlib.closing(OpenFile(path)))
        size = _header_size(file)
        data = file.read_bytes(8, size)
        tensors, metadata = _parsed(data, file.size - size - 8, file.name)

        def read(name: str, index: tuple[slice, ...], stored: Stored) -> np.ndarray:
            array = file.read_array(stored, 8 + size + tensors[name][1], index)
            if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
                raise file_error(file.name, "booleans that are neither 0 nor 1", name)
            return array

        stored_by_name = {name: stored for name, (stored, _, _) in tensors.items()}
        return Source(file.name, stored_by_name, read, files.pop_all(), metadata)


def _header_size(file: OpenFile) -> int:
    if file.size < 8:
        fault = f"it has {file.size} bytes, fewer than a header"
        raise file_error(file.name, fault)
    size = int.from_bytes(file.read_bytes(0, 8), "little")
    is_wrong = size > MAX_SIZE or 8 + size > file.size
    if is_wrong and (other := stored_tensors.recognized(file.name)):
        raise file_error(file.name, f"it is {other[0]}", way_out=other[1])
    said = f"its header would have {size} bytes, but"
    if size > MAX_SIZE:
        way_out = "It is damaged, or not a safetensors file."
        raise file_error(file.name, f"{said} at most {MAX_SIZE} fit", way_out=way_out)
    if 8 + size > file.size:
        raise file_error(file.name, f"{said} the file has {file.size}: it is cut off")
    return size


# ------------------------------------------------------------------------- the header


# By name, in the order of their data: the facts about a tensor, its begin and end.
_Tensors = dict[str, tuple[Stored, int, int]]


def _parsed(data: bytes, data_size: int, file: str) -> tuple[_Tensors, Any]:
    """Reads a header, with its metadata, and checks it against the size of the data."""

    def size(text: str) -> int:
        # At most the digits of 2**64: converting more would take long.
        if text.startswith("-") or len(text) > 20:
            fault = (
                f"its header has the number {quoted(text[:21])}, which is not a size"
            )
            raise file_error(file, fault)
        return int(text)

    if not data.startswith(b"{"):
        start = quoted(data[:20].decode(errors="replace"))
        raise file_error(file, f"its header must begin with a brace, but has {start}")
    content = _json(data, file, "its header", size)
    metadata = None
    if METADATA in content:
        metadata = content.pop(METADATA)
        if not isinstance(metadata, dict) or not all(map(is_text, metadata.values())):
            fault = f"its metadata is {_shown(metadata)}, not a dict of strings"
            raise file_error(file, fault)
    for name in content:
        if not is_text(name):
            raise file_error(file, "its header has an incomplete character", name)
    entries = [(name, _tensor(fields, name, file)) for name, fields in content.items()]
    tensors = dict(sorted(entries, key=lambda item: item[1][1:]))
    _check_ranges(tensors, data_size, file)
    return tensors, metadata


def _json(
    data: bytes, file: str, subject: str, parse_int: Callable[[str], int] | None = None
) -> Any:
    """Reads JSON in which no key is repeated."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            keys = set()
            twice = next(key for key, _ in pairs if key in keys or keys.add(key))
            raise file_error(file, f"{subject} has the key {quoted(twice)} twice")
        return mapping

    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=unique, parse_int=parse_int)
    except errors.WeightsError:
        raise
    except UnicodeDecodeError as error:
        said = f"is not UTF-8, at byte {error.start} of it"
    except RecursionError:
        said = "nests too deeply"
    except json.JSONDecodeError as error:
        rest = quoted(error.doc[error.pos : error.pos + 20])
        said = f"is not JSON: {error.msg} at character {error.pos}, which has {rest}"
    except ValueError as error:
        said = f"is not JSON: {error}"
    raise file_error(file, f"{subject} {said}")


def is_text(value: Any) -> bool:
    """Whether it is a string without halves of characters, which UTF-8 lacks."""
    return isinstance(value, str) and not _HALVES.search(value)


_HALVES = re.compile("[\ud800-\udfff]")


def _shown(value: Any) -> str:
    """Shows a value of a header in a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _tensor(fields: Any, name: str, file: str) -> tuple[Stored, int, int]:
    """Reads the entry of a tensor: its dtype and shape, and its begin and end."""

    def tensor_error(fault: str, way_out: str = stored_tensors.SUSPECT) -> Exception:
        return file_error(file, fault, name, way_out)

    if not isinstance(fields, dict):
        raise tensor_error(f"it is {_shown(fields)}, not an object with fields")
    if fields.keys() != _FIELDS.keys():
        for field in fields.keys() - _FIELDS.keys():
            raise tensor_error(f"the unknown field {quoted(field)}")
        missing = [field for field in _FIELDS if field not in fields]
        raise tensor_error(f"no {' and no '.join(missing)}")
    dtype, shape, offsets = map(fields.__getitem__, _FIELDS)
    if not isinstance(dtype, str):
        raise tensor_error(f"the dtype {_shown(dtype)} is not text")
    for field, sizes in (("shape", shape), ("offsets", offsets)):
        # Booleans are integers in Python.
        if not isinstance(sizes, list) or {*map(type, sizes)} - {int}:
            raise tensor_error(
                f"the {field} {_shown(sizes)} should be integers in a list"
            )
    most = stored_tensors.MAX_RANK
    if len(shape) > most:
        raise tensor_error(f"{len(shape)} axes, but an array has at most {most}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise tensor_error(f"the offsets {_shown(offsets)} are not a begin and an end")
    if dtype in _PACKED:
        way_out = "Such dtypes are not read. Store it as U8 or in a wider dtype."
        raise tensor_error(
            f"dtype {dtype}, whose elements are smaller than a byte", way_out
        )
    if dtype not in DTYPES:
        way_out = f"Known dtypes: {' '.join(DTYPES)}."
        raise tensor_error(f"the unknown dtype {quoted(dtype)}", way_out)
    stored = Stored(DTYPES[dtype], tuple(shape))
    nbytes, (begin, end) = stored.nbytes, offsets
    # No array has these sizes either, even with another axis of 0.
    if (nbytes or math.prod(size or 1 for size in shape)) >= 2**63:
        raise tensor_error(f"the shape {shape} is larger than any memory")
    if end - begin != nbytes:
        apart = f"the offsets {offsets} are {end - begin} bytes apart"
        raise tensor_error(f"{apart}, but {dtype}{shape} has {nbytes}")
    return stored, begin, end


def _check_ranges(tensors: _Tensors, data_size: int, file: str) -> None:
    """Raises unless the tensors follow each other and fill the data."""
    previous, expected = "", 0
    for name, (_, begin, end) in tensors.items():
        fault = ""
        if begin < expected:
            overlap = f"{begin} to {end} overlap those of {quoted(previous)}"
            fault = f"its bytes {overlap}, up to {expected}"
        elif begin > expected:
            fault = f"before it, the bytes {expected} to {begin} belong to no tensor"
        elif end > data_size:
            fault = f"it ends at byte {end}, but the file has {data_size} bytes of data"
            fault += ": it is cut off"
        if fault:
            raise file_error(file, fault, name)
        previous, expected = name, end
    if more := data_size - expected:
        fault = (
            f"its tensors have {expected} bytes, and {more} more follow that belong "
        )
        raise file_error(file, fault + "to none")


def header_of(
    tensors: Iterable[tuple[str, Stored]], metadata: Mapping[str, str] | None
) -> bytes:
    """Makes the header of a file with these tensors in this order."""
    content: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name, stored in tensors:
        content[name] = {
            "dtype": NAMES[stored.dtype],
            "shape": [int(size) for size in stored.shape],
            "data_offsets": [end, end + stored.nbytes],
        }
        end += stored.nbytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


# --------------------------------------------------------------------------- an index


def open_index(path: str) -> Source:
    """Opens the files of an index, all of them.

    Raises:
        WeightsError: If the index or one of the files is wrong, or they don't agree.
    """
    file_of = files_of_tensors(path)
    with contextlib.ExitStack() as files:
        opened = {
            file: files.enter_context(open_file(_path_of(path, file)))
            for file in dict.fromkeys(file_of.values())
        }
        _check_listed(file_of, opened, path)

        def read(name: str, index: tuple[slice, ...], stored: Stored) -> np.ndarray:
            return opened[file_of[name]].read(name, index, stored.shape)

        tensors = {name: opened[file].tensors[name] for name, file in file_of.items()}
        return Source(path, tensors, read, files.pop_all())


def files_of_tensors(path: str) -> dict[str, str]:
    """Reads the file of each tensor from an index."""
    with contextlib.closing(OpenFile(path)) as file:
        if file.size > MAX_INDEX_SIZE:
            fault = f"it has {file.size} bytes, but at most {MAX_INDEX_SIZE} are read"
            raise file_error(path, fault)
        content = _json(file.read_bytes(0, file.size), path, "it")
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict):
        fault = "it has no weight_map from the names of tensors to those of files"
        way_out = "It is not an index of safetensors files."
        raise file_error(path, fault, way_out=way_out)
    for name, file in file_of.items():
        if not isinstance(file, str):
            fault = f"has {type(file).__name__} instead of a file"
            raise file_error(path, fault, name)
    return file_of


def _check_listed(
    file_of: Mapping[str, str], opened: Mapping[str, Source], index: str
) -> None:
    """Raises unless the files hold the tensors that the index lists."""
    for name, file in file_of.items():
        if name not in opened[file].tensors:
            raise file_error(index, f"should be in {quoted(file)}, but is not", name)
    for file, source in opened.items():
        for name in source.tensors:
            listed_file = file_of.get(name)
            if listed_file != file:
                says = quoted(listed_file) if listed_file else "nothing about it"
                fault = f"is in {quoted(file)}; the index says {says}"
                raise file_error(index, fault, name)


def _path_of(index: str, file: str) -> str:
    """Returns the path of a file of the index; it must be in the index's folder."""
    folder, link = pathlib.Path(index).absolute().parent, None
    steps = pathlib.PurePosixPath(file).parts
    is_plain = bool(steps) and ".." not in steps and not file.startswith("/")
    if is_plain and is_text(file) and not any(x in file for x in "\\:\0"):
        # Not `Path.resolve`, which raises on Python 3.11 if links form a circle.
        target = pathlib.Path(os.path.realpath(folder / file))
        allowed = [folder.resolve()]
        # The cache of the Hugging Face hub: all its files are links to `blobs`.
        if folder.parent.name == "snapshots":
            allowed.append((folder.parent.parent / "blobs").resolve())
        if any(target.is_relative_to(root) for root in allowed):
            if target.exists():
                return str(folder / file)
            way_out = "Get all files of the set, and put them in one folder."
            raise file_error(
                index, f"the file {quoted(file)} is missing", way_out=way_out
            )
        link = f", a link to {target},"
    raise file_error(
        index,
        f"the file {quoted(file)}{link or ''} is not in the folder of the index",
        way_out="Only files in that folder are read. Move the file there if it "
        "belongs to the set; otherwise, don't trust the index.",
    )
