"""Weights of a model into safetensors files: all of them, under the names of a table.

There is one file, or a set with an index, as Hugging Face names them. Files are written
under names that end in ``.partial``, and renamed when they are on disk. So a write that
fails, or is killed, leaves the earlier files. If a set takes the names of an older one,
the older index is deleted first and the new one comes last: an index never stands
beside files of another set. So it is with the config of an adapter.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO, NamedTuple

import jax
import numpy as np

from graftree import errors
from graftree.core import patterns
from graftree.core.text import descriptions
from graftree.sharding import collectives, process_arrays
from graftree.weights import stored_tensors, tables, tensor_files
from graftree.weights.stored_tensors import Stored, quoted, usage_error
from graftree.weights.tensor_files import INDEX, SUFFIX

PARTIAL = ".partial"

_write_error = functools.partial(stored_tensors.file_error, verb="write")


def save(
    path: Any,
    model: Any,
    mapping: Any,
    *,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    missing: Any = None,
) -> None:
    """Writes the weights of a model to a file, or to several.

    Writes everything that `load` read with the same table back bit by bit, with names,
    shapes and dtypes; tensors that `load` decoded (MXFP4, float8 with scales) are plain
    numbers of the model's dtype. The file is first written beside its place, so it is
    whole when it appears. With several processes, all must call it, and the first one
    writes.

    Args:
        path: A file; it is replaced. With ``shard_bytes``, a folder.
        model: The model.
        mapping: An `nnx.weights.Mapping`, or a dict of its lines.
        shard_bytes: The most bytes of tensors in a file. The folder gets as many files
            as needed, and an index, named as by Hugging Face; if one is enough, one
            file ``model.safetensors``. ``None``: one file.
        metadata: Strings that are written in front; ``None``: ``{"format": "pt"}``,
            which readers of Hugging Face ask for.
        missing: Which arrays of the model are not written: a pattern of paths, a class,
            a function of path and leaf, or a list of these. Random streams, caches and
            Intermediates never are.

    Raises:
        ValueError: If the mapping does not fit the model, or leaves out some of its
            arrays; or if the model is abstract, or has quantized kernels.
        WeightsError: If the disk refuses. What fails in one process fails in all.

    Example:
        >>> import pathlib, tempfile
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "model.safetensors"
        ...     nnx.weights.save(path, model, {"fc": "up"})
        ...     again = nnx.weights.load(path, nnx.clone(model), {"fc": "up"})
        >>> jnp.array_equal(again.up.kernel, model.up.kernel)
        Array(True, dtype=bool)
    """

    def prepare() -> Sequence[tables.Tensor]:
        tensors = tables.as_mapping(mapping).tensors(model)
        _check(model, tensors, missing)
        return tensors

    metadata = {"format": "pt"} if metadata is None else metadata
    save_tensors(path, prepare, metadata=metadata, shard_bytes=shard_bytes)


_SAVE = "nnx.weights.save"


def save_tensors(
    path: Any,
    prepare: Callable[[], Sequence[tables.Tensor]],
    *,
    metadata: Mapping[str, str],
    shard_bytes: int | None = None,
    texts: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Writes tensors of a model; of several processes, only the first one writes.

    Args:
        path: As for `write`, like the last three.
        prepare: Gives the tensors of this process, or raises.
        metadata: Text by name.
        shard_bytes: The most bytes of a file.
        texts: Gives the files of text beside it, once all is prepared.
    """
    outs: dict[str, NewTensor] = {}

    def compare() -> str:
        outs.update((tensor.name, out_of(tensor)) for tensor in prepare())
        return str([(out.name, out.stored) for out in outs.values()])

    everyone = collectives.gathered(_SAVE, compare)
    if any(each != everyone[0] for each in everyone):
        raise ValueError(
            f"{_SAVE}: the tensors differ between the processes.\nPass the same model "
            "and the same mapping in all of them."
        )
    options = {"shard_bytes": shard_bytes, "metadata": metadata, "texts": texts()}
    if len(everyone) == 1:
        write(path, outs.values(), **options)
    else:
        collectives.together(_SAVE, lambda: _write_together(path, outs, options))


def _write_together(
    path: Any, outs: Mapping[str, NewTensor], options: Mapping[str, Any]
) -> None:
    """Writes in the first process, while the others send the parts it lacks."""
    # All make the tensors in one order.
    groups = _groups([*outs.values()], options["shard_bytes"])
    pending = {out.name: out for group in groups for out in _sorted(group)}

    def make(name: str) -> np.ndarray:
        return pending.pop(name).make()

    failures: list[Exception] = []
    try:
        if collectives.is_first():
            makers = {name: functools.partial(make, name) for name in outs}
            watched = [out._replace(make=makers[out.name]) for out in outs.values()]
            write(path, watched, **options)
    finally:
        # Also after an error: the others wait for steps that all must take.
        for name in [*pending]:
            try:
                make(name)
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]


def out_of(tensor: tables.Tensor) -> NewTensor:
    """Describes a tensor of a model that is to be written."""

    def make() -> np.ndarray:
        values = [array.value for array in tensor.arrays]
        layers = [x[tensor.at] for x in values] if tensor.at else values
        return tensor.solved.to_file(
            [np.asarray(process_arrays.read(x)) for x in layers]
        )

    dtype = np.dtype(tensor.arrays[0].value.dtype)
    return NewTensor(tensor.name, Stored(dtype, tensor.solved.file_shape), make)


def _check(model: Any, tensors: Sequence[tables.Tensor], missing: Any) -> None:
    """Raises unless all arrays that should be written can be."""
    may_miss = patterns.to_predicate([] if missing is None else missing)
    left_out = [
        tables.describe(array)
        for array in tables.left_out(model, tensors)
        if not may_miss(array.path, array.leaf)
    ]
    if left_out:
        raise usage_error(
            "nnx.weights.save: the mapping leaves out arrays of the model. Nothing "
            "was written.",
            examples=left_out,
            way_out="Add lines for them, or name them in missing=.",
        )
    tables.check_are_arrays(
        _SAVE,
        [array for tensor in tensors for array in tensor.arrays],
        "nnx.surgery.dequantize(model) makes them arrays, with their rounding.\n"
        "nnx.weights.save_adapter writes only LoRA, and checkpoints quantized models.",
    )
    for tensor in tensors:
        values = [array.value for array in tensor.arrays]
        way_out = ""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in values):
            way_out = "The model is abstract: it has no values."
        if len({np.dtype(x.dtype) for x in values}) > 1:
            way_out = "All arrays of a tensor must have the same dtype."
        if way_out:
            raise usage_error(
                f"nnx.weights.save: {tensor.name!r} can't be written. Nothing was "
                "written.",
                examples=map(tables.describe, tensor.arrays),
                way_out=way_out,
            )


# --------------------------------------------------------------------- any tensors


class NewTensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        stored: Its dtype and shape.
        make: Makes the array; called once, when it is written.
    """

    name: str
    stored: Stored
    make: Callable[[], Any]


def write(
    path: str | os.PathLike[str],
    tensors: Iterable[NewTensor],
    *,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    texts: Mapping[str, str] = types.MappingProxyType({}),
) -> list[str]:
    """Writes tensors, one after the other; returns the paths when all are on disk.

    Args:
        path: A file, if it ends with ``.safetensors``; else a folder, for
            ``model.safetensors``. It is made, and files of these names are replaced.
        tensors: The tensors. Their order decides only which file each gets into.
        shard_bytes: If there is more than that, several files are written, each with at
            most that many bytes of data, and an index. A larger tensor gets a file of
            its own.
        metadata: Text by name for the header of each file; None for none.
        texts: Files of text beside it, by name, which belong to these tensors. They
            never stand beside those of another write, as an index doesn't.

    Raises:
        WeightsError: If a tensor can't be stored, or the disk refuses; earlier files
            are then still there.
    """
    path = os.path.expanduser(os.fspath(path))
    outs = [*tensors]
    _check_storable(outs, metadata, path)
    folder, stem = path, "model"
    if path.endswith(SUFFIX):
        folder, stem = os.path.split(path.removesuffix(SUFFIX))
    single = os.path.join(folder, stem + SUFFIX)
    index = single + INDEX
    groups = _groups(outs, shard_bytes)
    count = len(groups)
    start = os.path.join(folder, f"{stem}-")
    names = [f"{start}{i:05}-of-{count:05}{SUFFIX}" for i in range(1, count + 1)]
    files = dict(zip(names if count > 1 else [single], groups, strict=True))
    texts = {os.path.join(folder, name): text for name, text in texts.items()}
    if count > 1:
        texts[index] = _index_text(files)
    _check_free(path, [*files, *texts], single if count > 1 else index)
    way_out = "The files that were there before are intact."
    with (
        stored_tensors.Explained(path, way_out, "write"),
        _prepared(folder, [*files, *texts, index]),
    ):
        for file, group in files.items():
            _write_file(file + PARTIAL, group, metadata)
        for file, text in texts.items():
            with open(file + PARTIAL, "x", encoding="utf-8") as stream:
                stream.write(text)
                _flush(stream)
        _replace([*files], [*texts], index)
    return [*files, *texts]


def _check_storable(
    outs: Sequence[NewTensor], metadata: Mapping[str, str] | None, path: str
) -> None:
    """Raises unless a file can hold all of the tensors."""
    refused, names = [], set()
    for out in outs:
        name = quoted(out.name) if isinstance(out.name, str) else repr(out.name)
        if out.name in names:
            refused.append(f"tensor {name}: two tensors have this name")
        names.add(out.name)
        if not tensor_files.is_text(out.name) or out.name == tensor_files.METADATA:
            refused.append(f"tensor {name}: not a name that a file can have")
        elif out.stored.dtype not in tensor_files.NAMES:
            dtype = out.stored.dtype
            refused.append(f"tensor {name}: the format has no dtype {dtype}")
        elif len(out.stored.shape) > stored_tensors.MAX_RANK:
            refused.append(f"tensor {name}: {len(out.stored.shape)} axes")
    for key, value in (metadata or {}).items():
        if not tensor_files.is_text(key) or not tensor_files.is_text(value):
            refused.append(f"metadata {key!r}: {value!r} must be a string")
    if refused:
        raise _write_error(
            path, "\n".join(refused[:20]), way_out="Nothing was written."
        )


def _groups(outs: Sequence[NewTensor], limit: int | None) -> list[list[NewTensor]]:
    """Divides tensors into files: in order, until one is full."""
    if limit is not None and limit <= 0:
        raise ValueError(f"shard_bytes must be positive, got {limit}.")
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


def _index_text(files: Mapping[str, Sequence[NewTensor]]) -> str:
    stored = [out.stored for group in files.values() for out in group]
    content = {
        "metadata": {
            "total_parameters": sum(x.size for x in stored),
            "total_size": sum(x.nbytes for x in stored),
        },
        "weight_map": {
            out.name: os.path.basename(x) for x, outs in files.items() for out in outs
        },
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


# ---------------------------------------------------------------- one file

# How many bytes of an array are copied at a time.
_BLOCK = 2**24


def _write_file(
    path: str, outs: Sequence[NewTensor], metadata: Mapping[str, str] | None
) -> None:
    outs = _sorted(outs)
    header = tensor_files.header_of([(out.name, out.stored) for out in outs], metadata)
    most = tensor_files.MAX_SIZE
    if len(header) > most:
        fault = f"its header would have {len(header)} bytes, but at most {most} fit"
        way_out = "Pass shard_bytes, to write several files."
        raise _write_error(path.removesuffix(PARTIAL), fault, way_out=way_out)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for out in outs:
            # In its own call: no name here holds an array while the next is made.
            _write_array(file, out, path)
        _flush(file)


def _sorted(outs: Sequence[NewTensor]) -> list[NewTensor]:
    """In the order of the library: wider dtypes first, so that data is aligned."""
    ranks = [*tensor_files.NAMES]
    return sorted(outs, key=lambda out: (-ranks.index(out.stored.dtype), out.name))


def _write_array(file: BinaryIO, out: NewTensor, path: str) -> None:
    array = np.asarray(out.make())
    if (array.dtype, array.shape) != (out.stored.dtype, out.stored.shape):
        said, came = map(descriptions.describe, (out.stored, array))
        fault = f"expected {said}, got {came}"
        path = path.removesuffix(PARTIAL)
        raise _write_error(path, fault, out.name, "Nothing was replaced.")
    # In C order, as `numpy.save` does it.
    blocks: Any = np.nditer(
        array,
        ["external_loop", "buffered", "zerosize_ok"],
        buffersize=max(1, _BLOCK // array.itemsize),
        order="C",
    )
    for block in blocks:
        file.write(block.tobytes())


def _flush(file: IO[Any]) -> None:
    """Forces it to disk: otherwise a rename may arrive before the data."""
    file.flush()
    os.fsync(file.fileno())


# ---------------------------------------------------------------- on disk


def _check_free(path: str, files: Iterable[str], other: str) -> None:
    """Raises if something is in the way."""
    for file in filter(os.path.isdir, files):
        raise _write_error(path, f"{file} is a folder", way_out="Choose another path.")
    if os.path.exists(other):
        fault = f"{other} exists, and would be read instead of what is written"
        raise _write_error(path, fault, way_out="Delete it, or choose another folder.")


def _replace(files: Sequence[str], texts: Sequence[str], index: str) -> None:
    """Gives files their names, and removes an older set."""
    older = _shards_of(index)
    # A set of other names stays whole until its index is replaced.
    remove(texts if any(map(os.path.exists, files)) else {*texts} - {index})
    for file in (*files, *texts):
        os.replace(file + PARTIAL, file)
    for left in older - {*files}:
        with contextlib.suppress(OSError):
            os.remove(left)


def _shards_of(index: str) -> set[str]:
    """Returns the files of an older set: those of its index that have such names."""
    stem = os.path.basename(index).removesuffix(SUFFIX + INDEX)
    pattern = re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}" + re.escape(SUFFIX))
    try:
        files = {*tensor_files.files_of_tensors(index).values()}
    except errors.WeightsError:
        return set()
    folder = os.path.dirname(index)
    return {os.path.join(folder, file) for file in files if pattern.fullmatch(file)}


@contextlib.contextmanager
def _prepared(folder: str, files: Sequence[str]) -> Iterator[None]:
    """Makes the folder; removes it again, and partial files, if the write fails."""
    new_folders, parent = [], os.path.abspath(folder)
    while not os.path.exists(parent):
        new_folders.append(parent)
        parent = os.path.dirname(parent)
    os.makedirs(os.path.abspath(folder), exist_ok=True)
    partials = [file + PARTIAL for file in files]
    try:
        remove(partials)  # Leftovers of a write that was killed.
        yield
    except BaseException:
        remove(partials)
        for each in new_folders:
            with contextlib.suppress(OSError):
                os.rmdir(each)
        raise


def remove(files: Iterable[str]) -> None:
    """Removes those of the files that are there."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            os.remove(file)
