"""Several safetensors files with an index, which says where each tensor is.

The index is not trusted: its files must be in its own folder, and each must hold just
the tensors that the index says.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graftree import errors
from graftree.weights import open_files, stored_tensors, tensor_files

MAX_SIZE = 64 * 2**20


class IndexedFiles(stored_tensors.Source):
    """The files of an index, all open.

    Raises:
        WeightsError: If the index or one of the files is wrong, or they don't agree.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self._places = places_of(self.name)
        self._files: dict[str, tensor_files.TensorFile] = {}
        try:
            for file in dict.fromkeys(self._places.values()):
                self._files[file] = self._opened(file)
            self._check()
        except BaseException:
            self.close()
            raise
        self.tensors = {
            name: self._files[file].tensors[name] for name, file in self._places.items()
        }

    def _opened(self, file: str) -> tensor_files.TensorFile:
        path = _path_of(self.name, file)
        if not os.path.exists(path):
            raise stored_tensors.refusal(
                self.name,
                f"the file {stored_tensors.quoted(file)} is missing",
                way_out="Get all files of the set; they belong in one folder.",
            )
        return tensor_files.TensorFile(path)

    def _check(self) -> None:
        """Raises unless the files hold what the index says."""
        for name, file in self._places.items():
            if name not in self._files[file].tensors:
                raise stored_tensors.refusal(
                    self.name,
                    f"should be in {stored_tensors.quoted(file)}, and is not",
                    name,
                )
        for file, opened in self._files.items():
            for name in opened.tensors:
                place = self._places.get(name)
                if place != file:
                    says = stored_tensors.quoted(place) if place else "nothing of it"
                    raise stored_tensors.refusal(
                        self.name,
                        f"is in {stored_tensors.quoted(file)}; the index says {says}",
                        name,
                    )

    @property
    def files(self) -> Mapping[str, tensor_files.TensorFile]:
        """The files by name."""
        return self._files

    @property
    def bytes_read(self) -> int:
        """How many bytes of data have been read."""
        return sum(file.bytes_read for file in self._files.values())

    def read(
        self,
        name: str,
        index: Sequence[slice],
        shape: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Reads a slice of a tensor, and no bytes beside it."""
        return self._files[self._places[name]].read(name, index, shape)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


# ---------------------------------------------------------------- the index


def places_of(path: str) -> dict[str, str]:
    """The file of each tensor."""
    content = _content(path)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict):
        raise stored_tensors.refusal(
            path,
            "it has no weight_map, from names of tensors to names of files",
            way_out="It is no index of safetensors files.",
        )
    for name, file in places.items():
        if not isinstance(file, str):
            what = f"has {type(file).__name__} in the place of a file"
            raise stored_tensors.refusal(path, what, name)
    return places


def _content(path: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = {}
        for key, value in pairs:
            if key in found:
                raise stored_tensors.refusal(
                    path, f"it has the key {stored_tensors.quoted(key)} twice"
                )
            found[key] = value
        return found

    try:
        return json.loads(_text(path), object_pairs_hook=unique)
    except errors.WeightsError:
        raise
    except (ValueError, RecursionError) as error:
        what = "it nests too deeply" if isinstance(error, RecursionError) else error
        raise stored_tensors.refusal(path, f"it is no JSON: {what}") from error


def _text(path: str) -> str:
    file = open_files.OpenFile(path)
    try:
        if file.size > MAX_SIZE:
            raise stored_tensors.refusal(
                path, f"it has {file.size} bytes, and {MAX_SIZE} are the most"
            )
        return file.read_bytes(0, file.size).decode("utf-8")
    finally:
        file.close()


def _path_of(index: str, file: str) -> str:
    """Where a file of the index is: in its folder, or it is refused."""
    parts = pathlib.PurePosixPath(file).parts
    is_plain = bool(parts) and ".." not in parts and not file.startswith("/")
    if not is_plain or any(character in file for character in "\\:\0"):
        raise _outside(index, file, "")
    folder = pathlib.Path(index).absolute().parent
    # Not `Path.resolve`, which raises on Python 3.11 where links lead in a circle.
    target = pathlib.Path(os.path.realpath(folder / file))
    allowed = [folder.resolve()]
    # The cache of the Hugging Face hub: all its files are links to `blobs`.
    if folder.parent.name == "snapshots":
        allowed.append((folder.parent.parent / "blobs").resolve())
    if not any(target.is_relative_to(place) for place in allowed):
        raise _outside(index, file, f", a link to {target},")
    return str(folder / file)


def _outside(index: str, file: str, link: str) -> errors.WeightsError:
    return stored_tensors.refusal(
        index,
        f"the file {stored_tensors.quoted(file)}{link} is not in the folder of the "
        "index",
        way_out="Only files in that folder are read. Move the file there, if it "
        "belongs to the set, or else don't trust the index.",
    )
