"""One object in one folder: `save` and `restore`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from graftree import errors
from graftree.checkpoints import (
    layouts,
    loading,
    locks,
    orbax_side,
    processes,
    readings,
    stored_leaves,
)
from graftree.core import paths

T = TypeVar("T")


def save(path: str | os.PathLike[str], obj: Any, *, overwrite: bool = False) -> None:
    """Saves an object to a folder; returns when all of it is on disk.

    Stored is what ``nnx.state(obj)`` lists, in the layout of Orbax checkpoints of
    `flax.nnx`; a shared Variable once, of an array ref its content. The structure is
    not stored: `restore` takes it from an object. In a program of several processes all
    of them call it.

    Args:
        path: The folder; relative, with ``~``, or remote (``gs://...``). Its parents
            are made.
        obj: A Module, State, Optimizer, Rngs, metric, Variable, or another pytree of
            arrays and numbers; also tuples, lists and dicts of them.
        overwrite: Whether the path may be that of a checkpoint, which is replaced. At
            every moment a whole checkpoint is on disk, which `restore` finds.

    Raises:
        CheckpointError: If the folder exists, or can't be written; or if somebody else
            saves to it.
        TypeError: If a leaf can't be stored; all such paths are listed, and nothing is
            written.
        ValueError: If two paths have the same name on disk, or one has none.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.checkpoints.save(folder, model)
        >>> other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
        >>> restored = nnx.checkpoints.restore(folder, other)
        >>> bool(jnp.all(restored.kernel[...] == model.kernel[...]))
        True
    """
    folder = orbax_side.path_of(path)
    tree = stored_tree(obj, "save")
    if overwrite and orbax_side.is_remote(folder):
        raise ValueError(
            f"nnx.checkpoints.save can't overwrite {folder}: in an object store no "
            "folder can be replaced at once.\nSave to another path, and delete this "
            "one afterwards."
        )
    with locks.held(folder):
        _finish_swap(folder)
        exists = processes.agreed(folder.exists())
        if exists:
            _check_replaceable(folder, overwrite)
        _write(folder, tree, exists)


def _write(folder: Any, tree: Mapping[str, Any], exists: bool) -> None:
    """Writes a tree to a folder, which changes at once if it exists."""
    beside = folder.parent / (folder.name + readings.NEW) if exists else folder
    with orbax_side.explained("Saving to", folder):
        _remove(beside.parent / (beside.name + orbax_side.PARTIAL))
        try:
            orbax_side.write(beside, tree)
        except BaseException:
            _remove(beside.parent / (beside.name + orbax_side.PARTIAL))
            raise
        if exists:
            _swap(folder)


def _check_replaceable(folder: Any, overwrite: bool) -> None:
    """Raises if a folder that exists may not be replaced."""
    if not overwrite:
        what, way_out = "exists", "Pass overwrite=True to replace it, or choose"
    elif orbax_side.is_tree(folder) or _is_empty(folder):
        return
    else:
        what, way_out = "is no checkpoint, so it is not replaced", "Choose"
    raise errors.CheckpointError(
        f"nnx.checkpoints.save: {folder} {what}.\n{way_out} another path."
    )


def _is_empty(folder: Any) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def stored_tree(obj: Any, function: str, name: str = "") -> dict[str, Any]:
    """The tree of arrays that is stored of an object.

    Args:
        obj: The object.
        function: Who stores it, for messages.
        name: What it is called there.

    Raises:
        TypeError: If a leaf can't be stored.
    """
    layout = layouts.Layout(obj, function)
    named = f"{name}: " if name else ""
    stored, refused = [], []
    for slot in layout.slots:
        try:
            stored.append(stored_leaves.to_disk(slot.value))
        except stored_leaves.Unsupported as reason:
            where = paths.to_string(slot.path, "<root>")
            refused.append(f"{named}{where} {reason}")
    if not refused and layout.slots and not all(slot.place for slot in layout.slots):
        refused.append(f"{named}<root> is a single array: put it in a dict")
    if refused:
        raise TypeError(
            errors.message(
                f"nnx.checkpoints.{function} can't store all of the "
                f"{type(obj).__name__}.",
                where="\n".join(refused),
                way_out="Leave these out, or convert them to arrays.",
            )
        )
    return layout.tree(processes.shared(stored))


def _swap(folder: Any) -> None:
    """Puts the new folder in the place of the old one."""
    if processes.is_first():
        # Between the two renames, the new one is whole, and `restore` looks for it.
        folder.rename(folder.parent / (folder.name + readings.OLD))
        (folder.parent / (folder.name + readings.NEW)).rename(folder)
        _remove(folder.parent / (folder.name + readings.OLD))
    processes.wait_for_all("swap")


def _finish_swap(folder: Any) -> None:
    """Does what is left of a swap that was killed, and clears what lies about."""
    if not orbax_side.is_remote(folder) and processes.is_first():
        new, old = (
            folder.parent / (folder.name + end) for end in (readings.NEW, readings.OLD)
        )
        with orbax_side.explained("Saving to", folder):
            if new.exists() and not folder.exists():
                new.rename(folder)
            _remove(new)
            _remove(old)
    processes.wait_for_all("finish")


def _remove(folder: Any) -> None:
    if processes.is_first() and folder.exists():
        folder.rmtree()


# ---------------------------------------------------------------- restoring


def restore(
    path: str | os.PathLike[str],
    like: T,
    *,
    missing: Any = None,
    unexpected: Any = None,
    cast: bool = False,
) -> T:
    """Reads an object from a folder.

    All paths, shapes and dtypes are compared before an array is read. Arrays go
    straight onto the shardings that ``like`` has, whatever the number of devices and
    processes was when they were saved; onto the default device where it has none.

    Args:
        path: What `save` wrote; or a checkpoint of a State, a Module, an Optimizer or a
            pure dict by a program for `flax.nnx`; or the folder of a step with several
            objects, for a dict of them.
        like: An object of the structure to restore, concrete or abstract
            (`nnx.eval_shape`, `nnx.get_abstract_model`). It stays as it is.
        missing: Which leaves of ``like`` may be missing on disk; the new object has
            copies of their values. A pattern of paths such as ``"head.**"``, a class
            such as `nnx.LoRAParam`, a function of path and leaf, ``...`` for all, or a
            list of these. ``None`` for none.
        unexpected: Which leaves on disk may be left there; of the same forms.
        cast: Whether dtypes may differ: arrays get those of ``like``, of the same kind
            (floating, complex, integer). An integer that does not fit is an error.

    Returns:
        A new object like ``like``, with the saved values.

    Raises:
        CheckpointError: If there is no whole checkpoint, or it can't be read.
        StateMismatchError: If the checkpoint does not fit; it lists all differences.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/rngs"
        >>> rngs = nnx.Rngs(0)
        >>> nnx.checkpoints.save(folder, rngs)
        >>> abstract = nnx.eval_shape(lambda: nnx.Rngs(1))
        >>> bool(nnx.checkpoints.restore(folder, abstract).params() == rngs.params())
        True
    """
    path = orbax_side.path_of(path)

    def read(folder: Any) -> T:
        choice = loading.Choice(missing, unexpected, cast, has_values=False)
        return _restored(folder, like, choice)

    return readings.steadily(lambda: readings.found(path), read)


def _restored(folder: Any, like: Any, choice: loading.Choice) -> Any:
    what = f"nnx.checkpoints.restore: {folder} does not fit the {type(like).__name__}."
    items = readings.items_of(folder)
    if items is not None and [*items] == [_ONLY] and not _has_names(like, items):
        folder, items = items[_ONLY], None
    if items is None:
        read = readings.read_all({"": folder}, {"": like}, choice, what)
        return read[""].rebuilt()
    if not _has_names(like, items):
        raise errors.CheckpointError(
            f"{folder} has several objects: {', '.join(sorted(items))}.\nPass the "
            f"folder of one, e.g. {items[min(items)]}, or a dict with all of them."
        )
    likes: Any = like
    read = readings.read_all(items, likes, choice, what)
    rebuilt: Any = {name: read[name].rebuilt() for name in likes}
    return rebuilt


# What Orbax's manager calls the object of a step, if it is the only one.
_ONLY = "default"


def _has_names(like: Any, items: Mapping[str, Any]) -> bool:
    return isinstance(like, dict) and set(like) == set(items)
