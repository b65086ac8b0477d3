"""Writes safetensors files: one, or a set with an index, as Hugging Face names them.

All is written under names with ``.partial`` at the end, and renamed when it is on disk.
So a write that fails, or is killed, leaves the files that were there. Where a set takes
the names of an older one, the older index goes first and the new one comes last: at no
moment does an index stand beside files of another set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO

import numpy as np

from graftree import errors
from graftree.weights import headers, indexes, open_files, stored_dtypes
from graftree.weights.stored_tensors import Stored, quoted

INDEX = ".index.json"
SUFFIX = ".safetensors"
PARTIAL = ".partial"


@dataclasses.dataclass(frozen=True)
class Out:
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        dtype: Its dtype.
        shape: Its shape.
        make: Makes the array; called once, when its turn has come.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], Any]

    @property
    def stored(self) -> Stored:
        """What a file says of it."""
        return Stored(np.dtype(self.dtype), tuple(self.shape))


def write(
    path: str | os.PathLike[str],
    tensors: Iterable[Out],
    *,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes tensors, one after the other; returns the paths when all is on disk.

    Args:
        path: A file, if it ends with ``.safetensors``; else a folder, for
            ``model.safetensors``. It is made, and files of these names are replaced.
        tensors: What to write. Their order decides only which file each gets into.
        shard_bytes: If there is more than that, several files are written, each with
            at most so many bytes of data, and an index. A larger tensor gets a file of
            its own.
        metadata: Text by name for the header of each file; None for none.

    Raises:
        WeightsError: If a tensor can't be stored, or the disk refuses; what was there
            before is then still there.
    """
    path = os.path.expanduser(os.fspath(path))
    outs = _checked([*tensors], metadata, path)
    folder, stem = os.path.split(path.removesuffix(SUFFIX))
    if not path.endswith(SUFFIX):
        folder, stem = path, "model"
    groups = _groups(outs, shard_bytes)
    names = [f"{stem}{SUFFIX}"]
    if len(groups) > 1:
        count = len(groups)
        names = [f"{stem}-{i:05}-of-{count:05}{SUFFIX}" for i in range(1, count + 1)]
    targets = [os.path.join(folder, name) for name in names]
    index = os.path.join(folder, stem + SUFFIX + INDEX)
    other = index if len(groups) == 1 else os.path.join(folder, stem + SUFFIX)
    _check_free(path, targets, other)
    with _explained(path), _folder(folder), _partials([*targets, index]):
        for target, group in zip(targets, groups, strict=True):
            _write_file(target + PARTIAL, group, metadata)
        if len(groups) == 1:
            os.replace(targets[0] + PARTIAL, targets[0])
            return targets
        with open(index + PARTIAL, "x", encoding="utf-8") as file:
            file.write(_index_text(names, groups))
            _flush(file)
        _replace_set(targets, index)
    return [*targets, index]


def in_order(tensors: Iterable[Out], shard_bytes: int | None = None) -> list[Out]:
    """The tensors in the order in which `write` makes them."""
    return [out for group in _groups([*tensors], shard_bytes) for out in _sorted(group)]


# ---------------------------------------------------------------- what to write


def _checked(
    outs: Sequence[Out], metadata: Mapping[str, str] | None, path: str
) -> Sequence[Out]:
    """The tensors, if a file can hold them all."""
    refused, seen = [], set()
    for out in outs:
        if out.name in seen:
            refused.append(f"tensor {quoted(out.name)}: there are two of this name")
        seen.add(out.name)
        if not _is_text(out.name) or out.name == headers.METADATA:
            refused.append(f"tensor {out.name!r}: no name that a file can have")
        elif out.stored.dtype not in stored_dtypes.NAMES:
            refused.append(
                f"tensor {quoted(out.name)}: dtype {out.dtype}, which the format lacks"
            )
        elif len(out.shape) > headers.MAX_RANK:
            refused.append(f"tensor {quoted(out.name)}: {len(out.shape)} axes")
    refused += [
        f"metadata {key!r}: {value!r} is to be text"
        for key, value in (metadata or {}).items()
        if not _is_text(key) or not _is_text(value)
    ]
    if refused:
        raise _refusal(path, "\n".join(refused[:20]), "Nothing was written.")
    return outs


def _is_text(value: Any) -> bool:
    """Whether it is a string without halves of characters, which UTF-8 lacks."""
    return isinstance(value, str) and not headers.HALVES.search(value)


def _groups(outs: Sequence[Out], limit: int | None) -> list[list[Out]]:
    """The tensors of each file: in order, until one is full."""
    if limit is not None and limit <= 0:
        raise ValueError(f"shard_bytes is {limit}, and must be positive.")
    if limit is None or sum(out.stored.nbytes for out in outs) <= limit:
        return [[*outs]]
    groups, group, size = [], [], 0
    for out in outs:
        nbytes = out.stored.nbytes
        if nbytes > limit:
            groups.append([out])
            continue
        if group and size + nbytes > limit:
            groups.append(group)
            group, size = [], 0
        group.append(out)
        size += nbytes
    return [*groups, group] if group else groups


def _index_text(names: Sequence[str], groups: Sequence[Sequence[Out]]) -> str:
    stored = [out.stored for group in groups for out in group]
    places = {
        out.name: name
        for name, group in zip(names, groups, strict=True)
        for out in group
    }
    content = {
        "metadata": {
            "total_parameters": sum(x.size for x in stored),
            "total_size": sum(x.nbytes for x in stored),
        },
        "weight_map": places,
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


# ---------------------------------------------------------------- one file

# An array that is not contiguous is copied in blocks of that many bytes.
_BLOCK = 2**24


def _write_file(
    path: str, outs: Sequence[Out], metadata: Mapping[str, str] | None
) -> None:
    outs = _sorted(outs)
    header = headers.text_of([(out.name, out.stored) for out in outs], metadata)
    if len(header) > headers.MAX_SIZE:
        raise _refusal(
            path.removesuffix(PARTIAL),
            f"its header would have {len(header)} bytes, and {headers.MAX_SIZE} are "
            "the most",
            "Pass shard_bytes, for several files.",
        )
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for out in outs:
            # In a call of its own: no name here holds an array while the next is made.
            _write_array(file, out, path)
        _flush(file)


def _sorted(outs: Sequence[Out]) -> list[Out]:
    by_name = {out.name: out for out in outs}
    order = headers.sorted_by_format([(out.name, out.stored) for out in outs])
    return [by_name[name] for name, _ in order]


def _write_array(file: BinaryIO, out: Out, path: str) -> None:
    for chunk in _chunks(_made(out, path)):
        file.write(chunk)


def _made(out: Out, path: str) -> np.ndarray:
    array = np.asarray(out.make())
    if (array.dtype, array.shape) != (out.stored.dtype, out.stored.shape):
        raise _refusal(
            path.removesuffix(PARTIAL),
            f"tensor {quoted(out.name)}: {out.dtype}{[*out.shape]} was announced, and "
            f"{array.dtype}{[*array.shape]} came",
            "Nothing was replaced.",
        )
    return array


def _chunks(array: np.ndarray) -> Iterator[memoryview]:
    """Its bytes in C order, with little copied at a time."""
    if array.flags.c_contiguous or array.nbytes <= _BLOCK:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return
    rows = max(1, _BLOCK * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        yield from _chunks(part[0] if rows == 1 else part)


def _flush(file: IO[Any]) -> None:
    """Has the system put it on disk: a rename may get there before the data does."""
    file.flush()
    os.fsync(file.fileno())


# ---------------------------------------------------------------- on disk


def _check_free(path: str, targets: Sequence[str], other: str) -> None:
    """Raises if something is in the way."""
    for target in targets:
        if os.path.isdir(target):
            raise _refusal(path, f"{target} is a folder", "Choose another path.")
    if os.path.exists(other):
        raise _refusal(
            path,
            f"{other} is there, and would be read in the place of what is written",
            "Delete it, or choose another folder.",
        )


def _replace_set(targets: Sequence[str], index: str) -> None:
    """Gives all files of a set their names, and removes the older set."""
    older = _shards_of(index)
    if any(os.path.exists(target) for target in targets):
        with contextlib.suppress(FileNotFoundError):
            os.remove(index)
    for target in targets:
        os.replace(target + PARTIAL, target)
    os.replace(index + PARTIAL, index)
    for left in older - {*targets}:
        with contextlib.suppress(OSError):
            os.remove(left)


def _shards_of(index: str) -> set[str]:
    """The files of an older set: those of its index that have such names."""
    stem = os.path.basename(index).removesuffix(SUFFIX + INDEX)
    pattern = re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}" + re.escape(SUFFIX))
    try:
        files = {*indexes.places_of(index).values()}
    except errors.WeightsError:
        return set()
    folder = os.path.dirname(index)
    return {os.path.join(folder, file) for file in files if pattern.fullmatch(file)}


@contextlib.contextmanager
def _folder(folder: str) -> Iterator[None]:
    """Makes the folder; one that it made is gone again if the write fails."""
    made, parent = [], os.path.abspath(folder)
    while not os.path.exists(parent):
        made.append(parent)
        parent = os.path.dirname(parent)
    os.makedirs(os.path.abspath(folder), exist_ok=True)
    try:
        yield
    except BaseException:
        for each in made:
            with contextlib.suppress(OSError):
                os.rmdir(each)
        raise


@contextlib.contextmanager
def _partials(targets: Sequence[str]) -> Iterator[None]:
    """Removes partial files, before (of a write that was killed) and after."""

    def clear() -> None:
        for target in targets:
            with contextlib.suppress(FileNotFoundError):
                os.remove(target + PARTIAL)

    clear()
    try:
        yield
    finally:
        clear()


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turns an error of the system into one that says what was not written."""
    try:
        yield
    except errors.GraftreeError:
        raise
    except OSError as error:
        found = _refusal(
            path, open_files.reason(error), "What was there before is still there."
        )
        found.errno = error.errno
        raise found from error


def _refusal(path: str, where: str, way_out: str) -> errors.WeightsError:
    return errors.WeightsError(
        errors.message(f"nnx.weights can't write {path}.", where=where, way_out=way_out)
    )
