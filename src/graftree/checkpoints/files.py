"""One object in one folder: `save` and `restore`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from graftree import errors
from graftree.checkpoints import layouts, orbax_side, processes, stored_leaves
from graftree.core import paths
from graftree.core.graph import differences

T = TypeVar("T")

# What a `save` with ``overwrite=True`` has beside the folder while it works.
_NEW, _OLD = ".graftree-new", ".graftree-old"


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
        overwrite: Whether the folder may exist, and is replaced. At every moment a
            whole checkpoint is on disk, which `restore` finds.

    Raises:
        CheckpointError: If the folder exists, or can't be written.
        TypeError: If a leaf can't be stored; all such paths are listed, and nothing is
            written.
        ValueError: If two paths have the same name on disk.

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
    _finish_swap(folder)
    exists = processes.agreed(folder.exists())
    if exists and not overwrite:
        raise errors.CheckpointError(
            f"nnx.checkpoints.save: {folder} exists.\nPass overwrite=True to replace "
            "it, or choose another path."
        )
    beside = folder.parent / (folder.name + _NEW) if exists else folder
    with orbax_side.explained("Saving to", folder):
        _remove(beside.parent / (beside.name + orbax_side.PARTIAL))
        try:
            orbax_side.write(beside, tree)
        except BaseException:
            _remove(beside.parent / (beside.name + orbax_side.PARTIAL))
            raise
        if exists:
            _swap(folder)


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
        folder.rename(folder.parent / (folder.name + _OLD))
        (folder.parent / (folder.name + _NEW)).rename(folder)
        _remove(folder.parent / (folder.name + _OLD))
    processes.wait_for_all("swap")


def _finish_swap(folder: Any) -> None:
    """Does what is left of a swap that was killed, and clears what lies about."""
    if not orbax_side.is_remote(folder) and processes.is_first():
        new, old = (folder.parent / (folder.name + end) for end in (_NEW, _OLD))
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


def restore(path: str | os.PathLike[str], like: T) -> T:
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
    folder = found(orbax_side.path_of(path))
    items = items_of(folder)
    if items is None:
        return read_all({"": folder}, {"": like}, f"{folder}")[""].rebuilt()
    if not isinstance(like, Mapping) or set(like) != set(items):
        raise errors.CheckpointError(
            f"{folder} has several objects: {', '.join(sorted(items))}.\nPass the "
            f"folder of one, e.g. {items[min(items)]}, or a dict with all of them."
        )
    read = read_all(items, dict(like), f"{folder}")
    return type(like)({name: read[name].rebuilt() for name in like})  # pyright: ignore


class Read:
    """An object, and what was read for it."""

    def __init__(self, layout: layouts.Layout, new: Sequence[Any]) -> None:
        self._layout, self._new = layout, new

    def rebuilt(self) -> Any:
        """A new object with the values."""
        return self._layout.rebuilt(self._new)

    def update(self) -> dict[Any, Any]:
        """What `nnx.update` is to write into the object itself."""
        return self._layout.update(self._new)


def read_all(
    folders: Mapping[str, Any], likes: Mapping[str, Any], where: str
) -> dict[str, Read]:
    """Reads several objects, all of which are compared before one is read."""
    plans = {}
    lines: list[str] = []
    for name, like in likes.items():
        folder = folders[name]
        with orbax_side.explained("Reading", folder):
            stored = orbax_side.read_facts(folder)
        plan = _Plan(layouts.Layout(like, "restore"), stored)
        lines += [f"{name}: {line}" if name else line for line in plan.misfits]
        plans[name] = plan
    if lines:
        raise errors.StateMismatchError(
            errors.message(
                f"The checkpoint {where} does not fit the object.",
                where="\n".join(lines),
                way_out="Restore into an object as it was saved. Nothing was changed.",
            )
        )
    return {name: plan.carry_out() for name, plan in plans.items()}


class _Plan:
    """What is read for an object, and what keeps it from being read."""

    def __init__(self, layout: layouts.Layout, stored: orbax_side.Stored) -> None:
        self._layout, self._stored = layout, stored
        self._targets: list[stored_leaves.Target] = []
        self._places: list[Any] = []  # on disk; `None` where nothing is read
        self.misfits: list[str] = []
        missing = []
        taken = set()
        for slot in layout.slots:
            try:
                target = stored_leaves.target_of(slot.value)
            except stored_leaves.Unsupported as reason:
                self.misfits.append(f"{paths.to_string(slot.path)} {reason}")
                continue
            place = _place_of(slot, stored.facts)
            if place is None and not target.is_empty:
                missing.append(slot.path)
            elif place is not None:
                taken.add(place)
                self.misfits += _compare(slot, target, stored.facts[place])
            self._targets.append(target)
            self._places.append(place)
        unexpected = [_shown(place) for place in stored.facts if place not in taken]
        self.misfits += [
            line.strip()
            for line in differences.missing_and_unexpected(missing, unexpected, 1000)
        ]

    def carry_out(self) -> Read:
        """Reads the arrays."""
        wanted = {
            place: stored_leaves.wanted(target)
            for place, target in zip(self._places, self._targets, strict=True)
            if place is not None
        }
        with orbax_side.explained("Reading", self._stored.folder):
            read = orbax_side.read(self._stored, wanted)
            new = [
                stored_leaves.from_disk(read.get(place), target)
                for place, target in zip(self._places, self._targets, strict=True)
            ]
        return Read(self._layout, new)


def _shown(place: tuple[str, ...]) -> tuple[str, ...]:
    return place[:-1] if place[-1:] == ("value",) else place


def _place_of(slot: layouts.Slot, facts: Mapping[Any, Any]) -> Any:
    """Where the value of a slot is on disk, or ``None``."""
    plain = tuple(map(str, slot.path))
    # A pure dict has no level `value`; a bare array may have been a Variable.
    for place in (slot.place, plain, (*plain, "value")):
        if place in facts:
            return place
    return None


def _compare(
    slot: layouts.Slot, target: stored_leaves.Target, fact: orbax_side.Fact
) -> list[str]:
    """A line if what is on disk does not fit."""
    name = paths.to_string(slot.path, "<root>")
    stored, wanted = _words(fact.shape, fact.dtype), _words(target.shape, target.dtype)
    if fact.shape != target.shape or not _fits(fact, target):
        return [f"{name}: {stored} saved, the object has {wanted}"]
    return []


def _fits(fact: orbax_side.Fact, target: stored_leaves.Target) -> bool:
    if fact.dtype == target.dtype:
        return True
    # A Python number has no width of its own.
    is_number = fact.kind == "scalar" or target.kind == "number"
    return is_number and any(
        jnp.issubdtype(fact.dtype, kind) and jnp.issubdtype(target.dtype, kind)
        for kind in (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    )


def _words(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


# ---------------------------------------------------------------- what a folder is


def found(folder: Any) -> Any:
    """The folder to read for a path: itself, or what a killed swap left for it."""
    if not folder.exists() and not orbax_side.is_remote(folder):
        new = folder.parent / (folder.name + _NEW)
        if new.exists():
            return new
    if not folder.exists():
        partial = folder.parent / (folder.name + orbax_side.PARTIAL)
        what = "only a part of one" if partial.exists() else "nothing"
        raise errors.CheckpointError(
            f"There is no checkpoint at {folder}: {what} is there."
        )
    return folder


def items_of(folder: Any) -> dict[str, Any] | None:
    """The folders of the objects in that of a step; ``None`` for a single tree."""
    if orbax_side.is_tree(folder):
        return None
    below = [x for x in folder.iterdir() if x.is_dir()] if folder.is_dir() else []
    items = {x.name: x for x in below if orbax_side.is_tree(x)}
    if not items:
        raise errors.CheckpointError(
            f"{folder} is not a whole checkpoint: it has no {orbax_side.TREE_FILE}."
        )
    return items
