"""Reading objects: find the folders, compare all that is there, then read the arrays.

What is on disk is compared as a state of abstract arrays with an abstract copy of the
object, by `core/graph/fits.py`, and `loading.Choice` decides what may differ: the same
as for a state in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Path
from graftree.checkpoints import layouts, orbax_side, stored_leaves
from graftree.checkpoints.loading import Choice
from graftree.checkpoints.orbax_side import DiskPath, Fact
from graftree.checkpoints.stored_leaves import Target
from graftree.core import paths
from graftree.core.graph import fits, flattening
from graftree.core.graph.fits import Misfit, Pair
from graftree.core.states import flat_states

T = TypeVar("T")

# What a `save` with ``overwrite=True`` has beside the folder while it works.
NEW, OLD = ".graftree-new", ".graftree-old"


def steadily(find: Callable[[], Any], read: Callable[[Any], T]) -> T:
    """Reads a folder, and what is there now if it changes meanwhile.

    Somebody else may delete it, or put another one in its place. What was read of both
    could be damaged, or a mixture of two that looks whole.

    Args:
        find: Finds the folder to read; it is asked again.
        read: Reads it.

    Raises:
        CheckpointError: If it changes each time; with several processes if it changes
            once, as they may have read different things.
    """
    cause: Exception | None = None
    for _ in range(_ATTEMPTS if jax.process_count() == 1 else 1):
        folder = find()
        before = _identity(folder)
        try:
            result = read(folder)
        except Exception as error:
            if _identity(folder) == before:
                raise
            cause = error
        else:
            if _identity(folder) == before:
                return result
    raise errors.CheckpointError(
        f"Reading {folder} failed: it was deleted or replaced while it was read.\n"
        "Read it again, or have its writer keep more steps."
    ) from cause


_ATTEMPTS = 10


def _identity(folder: Any) -> Any:
    """What a folder has in common with itself alone; ``None`` if nothing is there."""
    if orbax_side.is_remote(folder):
        return (folder / orbax_side.COMMITTED).exists()
    try:
        found = os.stat(folder)
    except OSError:
        return None
    # Numbers of files are used again; with them the time at which it became whole.
    return found.st_dev, found.st_ino, found.st_mtime_ns


def found(folder: Any) -> Any:
    """The folder to read for a path: itself, or what a killed swap left for it."""
    with orbax_side.explained(orbax_side.READING, folder):
        return _found(folder)


def _found(folder: Any) -> Any:
    if orbax_side.exists(folder):
        return folder
    new = folder.parent / (folder.name + NEW)
    if not orbax_side.is_remote(folder) and new.exists():
        return new
    partial = folder.parent / (folder.name + orbax_side.PARTIAL)
    what = "only a part of one" if partial.exists() else "nothing"
    raise errors.CheckpointError(
        f"There is no checkpoint at {folder}: {what} is there.{_beside(folder)}"
    )


def _beside(folder: Any) -> str:
    """What there is to choose from, as a line of a message."""
    parent = folder.parent
    if orbax_side.is_remote(folder):
        return ""
    if not parent.is_dir():
        return f"\nIts parent is no folder: {parent}."
    names = sorted(path.name for path in parent.iterdir() if orbax_side.is_tree(path))
    return f"\nBeside it are: {', '.join(names[:10])}." if names else ""


def items_of(folder: Any) -> dict[str, Any] | None:
    """The folders of the objects in that of a step; ``None`` for a single tree."""
    with orbax_side.explained(orbax_side.READING, folder):
        return _items_of(folder)


def _items_of(folder: Any) -> dict[str, Any] | None:
    if orbax_side.is_tree(folder):
        return None
    below = [x for x in folder.iterdir() if x.is_dir()] if folder.is_dir() else []
    items = {x.name: x for x in below if orbax_side.is_tree(x)}
    if items and (folder / orbax_side.STEP_FILE).exists():
        return items
    steps = sorted(int(x.name) for x in below if x.name.isdecimal())
    lack = f"it has no {orbax_side.TREE_FILE}" if folder.is_dir() else "it is a file"
    raise errors.CheckpointError(
        f"{folder} is not a whole checkpoint: {lack}.\n"
        + (
            f"It has steps: restore {folder / str(steps[-1])}."
            if steps
            else "Give the path of what nnx.checkpoints.save, or Orbax, has written."
        )
    )


# ---------------------------------------------------------------- several objects


class Reading:
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
    folders: Mapping[str, Any],
    likes: Mapping[str, Any],
    choice: Choice,
    what: str,
    way_out: str = "",
) -> dict[str, Reading]:
    """Reads several objects; all are compared before the first is read.

    Args:
        folders: Where each of them is.
        likes: The objects to be filled, or objects like them. Paths begin with their
            names; a single object may have the name "".
        choice: What may differ.
        what: The first line of the message if anything else does.
        way_out: Its last line.
    """
    plans = {}
    for name, like in likes.items():
        with orbax_side.explained(orbax_side.READING, folders[name]):
            stored = orbax_side.read_facts(folders[name])
        plan = plans[name] = _Plan(like, stored)
        plan.choose(choice, (name,) if name else ())
    choice.check(what, way_out)
    return {name: plan.carry_out() for name, plan in plans.items()}


class _Plan:
    """What is read for an object."""

    def __init__(self, like: Any, stored: orbax_side.Stored) -> None:
        self._layout = layouts.Layout(like, "restore")
        self._stored = stored
        self._targets = _targets_of(self._layout, like)
        # For each slot where its value is on disk; `None` keeps what is there.
        self._places: list[DiskPath | None] = []

    def choose(self, choice: Choice, prefix: Path) -> None:
        """Decides what is read, and what is kept.

        Args:
            choice: Takes the decisions.
            prefix: What paths begin with.
        """
        node = self._layout.rebuilt([*map(_abstract, self._targets)], boxed=True)
        offer = self._offer()
        fit = fits.compare(node, flat_states.nest(offer.items()))
        place_of = {id(stored): place for place, stored in offer.items()}
        pairs = {pair.path: pair for pair in fit.pairs}
        start = 0
        for leaf in self._layout.leaves:
            targets = self._targets[start : start + leaf.count]
            start += leaf.count
            pair = pairs[leaf.path]
            given = [None] * leaf.count
            if pair.is_given:
                given = jax.tree.leaves(flattening.raw_of(pair.given))
            places = [place_of.get(id(x)) for x in given]
            pair = self._judged(pair, targets, places)
            pair = pair._replace(leaf=leaf.leaf)
            is_taken = choice.decide(_below(prefix, pair)) and pair.is_given
            self._places += places if is_taken else [None] * leaf.count
        for path, x in fit.unexpected:
            choice.drop((*prefix, *path), x)

    def _offer(self) -> dict[DiskPath, jax.ShapeDtypeStruct]:
        """What is on disk, as an abstract state."""
        offer = {
            place: jax.ShapeDtypeStruct(fact.shape, fact.dtype)
            for place, fact in self._stored.facts.items()
        }
        for slot, target in zip(self._layout.slots, self._targets, strict=True):
            # Arrays without numbers are not on disk.
            if target.is_empty and paths.spelled(slot.path) not in offer:
                offer.setdefault(slot.place, _abstract(target))
        return offer

    def _judged(
        self, pair: Pair, targets: Sequence[Target], places: Sequence[Any]
    ) -> Pair:
        """The pair without what doesn't count: Python numbers have no width."""
        facts = [self._stored.facts.get(place) for place in places]
        if all(map(_is_same_number, facts, targets)) and facts:
            kept = [
                x
                for x in pair.differences
                if not isinstance(x, Misfit) or x.what != "dtype"
            ]
            return pair._replace(differences=tuple(kept))
        return pair

    def carry_out(self) -> Reading:
        """Reads the arrays."""
        facts = self._stored.facts
        planned = [*zip(self._places, self._targets, strict=True)]
        wanted = {
            place: stored_leaves.wanted(target, facts[place].dtype)
            for place, target in planned
            if place in facts
        }
        with orbax_side.explained(orbax_side.READING, self._stored.folder):
            read = orbax_side.read(self._stored, wanted)
            new = [
                _kept(target)
                if place is None
                else stored_leaves.from_disk(read.get(place), target)
                for place, target in planned
            ]
        return Reading(self._layout, new)


def _targets_of(layout: layouts.Layout, like: Any) -> list[Target]:
    """What each value of an object wants from disk."""
    found, refused = [], []
    for slot in layout.slots:
        try:
            found.append(stored_leaves.target_of(slot.value, slot.metadata))
        except stored_leaves.Unsupported as reason:
            refused.append(f"{paths.to_string(slot.path, '<root>')} {reason}")
    if refused:
        raise ValueError(
            errors.message(
                f"No checkpoint can be restored into the {type(like).__name__}.",
                where="\n".join(refused),
            )
        )
    return found


def _abstract(target: Target) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(target.shape, target.dtype)


def _kept(target: Target) -> Any:
    """What stays as it is, in a buffer of its own: the other may be donated."""
    return target.like.copy() if isinstance(target.like, jax.Array) else target.like


def _below(prefix: Path, pair: Pair) -> Pair:
    """A pair with the name of its object before all paths."""
    differences = [
        x._replace(path=(*prefix, *x.path)) if isinstance(x, Misfit) else (*prefix, *x)
        for x in pair.differences
    ]
    return pair._replace(path=(*prefix, *pair.path), differences=tuple(differences))


def _is_same_number(fact: Fact | None, target: Target) -> bool:
    """Whether one of both is a Python number, and the other of that kind."""
    if fact is None or "scalar" not in (fact.kind, _SCALAR.get(target.kind)):
        return False
    return any(
        jnp.issubdtype(fact.dtype, kind) and jnp.issubdtype(target.dtype, kind)
        for kind in (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    )


_SCALAR = {"number": "scalar"}
