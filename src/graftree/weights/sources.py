"""Opens sources: a file, a set of files, or one of these in a folder; arrays by name.

Nothing in a NumPy ``.npz`` archive is unpickled. If an array is stored uncompressed, as
`numpy.savez` does, slices are read; if compressed, all of it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.core.text import descriptions
from graftree.weights import stored_tensors, tensor_files
from graftree.weights.stored_tensors import (
    OpenFile,
    Source,
    Stored,
    file_error,
    usage_error,
)
from graftree.weights.tensor_files import INDEX, SUFFIX


def open(source: str | os.PathLike[str] | Mapping[str, Any]) -> Source:
    """Opens a source and checks its facts about tensors; reads no tensor.

    Args:
        source: A ``.safetensors`` file; an index of such files; an ``.npz`` file; a
            folder with one of the first two; or arrays by name, of NumPy, JAX or
            PyTorch.

    Raises:
        WeightsError: If it can't be read, is damaged, or is one of several.
        TypeError: If it is none of these, or if a value is not an array.
    """
    if isinstance(source, Mapping):
        return _of_arrays(source)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "nnx.weights reads a path, or a dict of arrays by name, not a "
            f"{type(source).__name__}."
        )
    path = os.path.expanduser(os.fspath(source))
    if os.path.isdir(path):
        path = _file_in(path)
    if path.endswith(".json"):
        return tensor_files.open_index(path)
    if path.endswith(".npz"):
        return _open_archive(path)
    return tensor_files.open_file(path)


_MODEL = f"model{SUFFIX}"


def _file_in(folder: str) -> str:
    """Finds the one file to read in a folder."""
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(SUFFIX)]
    index = [name for name in names if name.endswith(SUFFIX + INDEX)]
    chosen = index if len(index) == 1 else files
    if _MODEL in files:
        chosen = [_MODEL] * (_MODEL + INDEX not in index)
    if len(chosen) == 1:
        return os.path.join(folder, chosen[0])
    if files + index:
        fault = "it contains several files, and it is unclear which is first: "
        fault += ", ".join(index + files)
        way_out = "Pass the path of one of them, or of an index (.json) of a set."
        raise file_error(folder, fault, way_out=way_out)
    fault, way_out = f"it contains no {SUFFIX} file", "Pass the path of a file."
    for name in names:
        path = os.path.join(folder, name)
        if other := stored_tensors.recognized(path):
            fault, way_out = f"{fault}; {path} is {other[0]}", other[1]
            break
    raise file_error(folder, fault, way_out=way_out)


# ------------------------------------------------------------------ archives of NumPy


class _Member(NamedTuple):
    """One array of an archive.

    Attributes:
        info: Its entry in the archive.
        stored: The facts in its own header, and the form of its bytes.
        is_fortran: Whether the first axis varies fastest.
        begin: Where its data begins in the file; None if it is compressed.
    """

    info: zipfile.ZipInfo
    stored: Stored
    is_fortran: bool
    begin: int | None


def _open_archive(path: str) -> Source:
    """Opens an archive.

    Raises:
        WeightsError: If it can't be read, or one of its arrays is none of numbers.
    """
    with contextlib.ExitStack() as files:
        file = files.enter_context(contextlib.closing(OpenFile(path)))
        with _explained(path):
            archive = zipfile.ZipFile(file.stream)
        members: dict[str, _Member] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in members:
                raise file_error(path, "occurs twice", name)
            with _explained(path, name):
                members[name] = _member(file, archive, info, name)

        def read(name: str, index: tuple[slice, ...], stored: Stored) -> np.ndarray:
            member = members[name]
            reshaped = Stored(member.stored.dtype, stored.shape)
            if member.begin is None or (
                member.is_fortran and reshaped != member.stored
            ):
                with _explained(path, name), archive.open(member.info) as stream:
                    member_array = np.lib.format.read_array(stream, allow_pickle=False)
                # A copy: a view would keep all of it.
                array = np.array(member_array.reshape(reshaped.shape)[index])
                source.bytes_read += member_array.nbytes - array.nbytes
            elif member.is_fortran:
                turned = Stored(reshaped.dtype, reshaped.shape[::-1])
                array = file.read_array(turned, member.begin, index[::-1]).T
            else:
                array = file.read_array(reshaped, member.begin, index)
            return array.astype(stored.dtype, order="C", copy=False)

        tensors = {
            name: Stored(member.stored.dtype.newbyteorder("="), member.stored.shape)
            for name, member in members.items()
        }
        source = Source(path, tensors, read, files.pop_all())
        return source


# Of the three versions that NumPy writes, the last is for names that are not Latin-1,
# which only structured arrays have.
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _member(
    file: OpenFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str
) -> _Member:
    """Reads the header of an array and checks it."""

    def tensor_error(fault: str) -> errors.WeightsError:
        return file_error(file.name, fault, name)

    if not info.filename.endswith(".npy"):
        raise tensor_error("is not an array (.npy)")
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _READERS:
            raise tensor_error(f"the unknown version {version} of .npy")
        shape, is_fortran, dtype = _READERS[version](stream)
        header_size = stream.tell()
    if not _is_numeric(dtype):
        is_lost = dtype.kind == "V" and dtype.names is None
        lost = ": NumPy stores bfloat16 and float8 so, and loses which it was"
        raise tensor_error(f"dtype {dtype}, which is not a number{lost * is_lost}")
    if len(shape) > stored_tensors.MAX_RANK or min(shape, default=0) < 0:
        raise tensor_error(f"the shape {[*shape][:65]}")
    stored, size = Stored(dtype, shape), info.file_size - header_size
    if size != stored.nbytes:
        said = f"{descriptions.describe(stored)} has {stored.nbytes} bytes"
        raise tensor_error(f"{said}, but the file has {size} for it")
    if info.compress_type != zipfile.ZIP_STORED:
        return _Member(info, stored, is_fortran, None)
    # The data begins after a header of its own in the zip.
    local = file.read_bytes(info.header_offset, 30)
    begin = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:]))
    begin += header_size
    if begin + stored.nbytes > file.size:
        raise tensor_error("it is cut off")
    return _Member(info, stored, is_fortran, begin)


@contextlib.contextmanager
def _explained(path: str, name: str | None = None) -> Iterator[None]:
    """Turns every error about a damaged archive into one of ours."""
    try:
        yield
    except errors.WeightsError:
        raise
    except Exception as error:  # zipfile and NumPy raise those of a dozen classes
        raise file_error(path, f"{type(error).__name__}: {error}", name) from error


# --------------------------------------------------------------------- arrays by name


def _of_arrays(arrays: Mapping[str, Any]) -> Source:
    """Opens a dict of arrays, such as the state dict of a PyTorch model.

    PyTorch is not imported: its tensors are recognized by their methods.

    Raises:
        TypeError: If a name is not a string, or a value not an array of numbers.
    """
    source = f"the {type(arrays).__name__} of {len(arrays)} arrays"
    values = dict(arrays)
    stored_by_name = {name: _stored(value) for name, value in values.items()}
    refused = [
        f"{name!r}: {_described(values[name])}"
        for name, stored in stored_by_name.items()
        if stored is None or not isinstance(name, str)
    ]
    if refused:
        raise usage_error(
            f"nnx.weights can't read {source}.",
            examples=refused,
            way_out="Names must be strings, and values arrays of numbers that this "
            "process holds.",
            kind=TypeError,
        )

    def read(name: str, index: tuple[slice, ...], stored: Stored) -> np.ndarray:
        array = values[name]
        if stored != stored_by_name[name]:
            array = array.reshape(stored.shape)
        piece = array[index]
        if hasattr(piece, "detach"):
            piece = piece.detach().cpu()
            if stored.dtype.name in _WIDENED:
                piece = piece.float()
            piece = piece.numpy()
        return np.array(piece, stored.dtype, order="C")

    tensors = {name: stored for name, stored in stored_by_name.items() if stored}
    return Source(source, tensors, read, contextlib.ExitStack())


# Dtypes that PyTorch has and NumPy lacks, by the name that both give them. Their values
# go through float32, which has all of them.
_WIDENED = {
    dtype.name: dtype
    for dtype in tensor_files.NAMES
    if jnp.issubdtype(dtype, jnp.floating) and dtype.type.__module__ != "numpy"
}


def _stored(value: Any) -> Stored | None:
    """Its dtype and shape, or None if it is not an array of numbers."""
    if isinstance(value, jax.Array):
        is_data = not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if not is_data or not value.is_fully_addressable:
            return None
    elif hasattr(value, "detach"):
        name = str(value.dtype).rpartition(".")[2]
        try:
            return Stored(_WIDENED.get(name) or np.dtype(name), tuple(value.shape))
        except TypeError:
            return None
    elif not isinstance(value, np.ndarray):
        return None
    if not _is_numeric(value.dtype):
        return None
    return Stored(np.dtype(value.dtype).newbyteorder("="), tuple(value.shape))


def _is_numeric(dtype: np.dtype) -> bool:
    """Whether its elements are booleans or numbers."""
    return dtype.kind in "biufc" or dtype in tensor_files.NAMES


def _described(value: Any) -> str:
    kind = type(value).__name__
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return f"{kind} {descriptions.describe(value)}" if is_array else kind
