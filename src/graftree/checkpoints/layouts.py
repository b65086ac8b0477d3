"""Objects as Orbax stores them, and the way back.

A checkpoint is a tree of arrays: what ``nnx.state(obj)`` lists, each Variable as a
folder with the single entry ``value``, all keys as strings. It is the layout of
checkpoints that programs for Flax NNX write, so each side reads the other's.

    model.layers[0].kernel        layers/0/kernel/value
    optimizer.opt_state[0].count  opt_state/0/count/value
    a bare array at "x"           x

Plain containers around objects (tuples, dicts, a `TrainState`) are taken apart by JAX,
so that numbers in them are stored too; objects by our own walk, which stores what is
shared once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax, config, errors
from graftree.core import paths
from graftree.core.graph import flattening, nodes
from graftree.core.states import flat_states
from graftree.core.variables import values as variable_values
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable

DiskPath = tuple[str, ...]


class Slot(NamedTuple):
    """One value of an object that is stored."""

    path: tuple[Any, ...]  # as the user writes it
    place: DiskPath  # on disk
    value: Any
    metadata: Mapping[str, Any]  # of its Variable


class Leaf(NamedTuple):
    """A Variable, a ref, an array or a number of an object."""

    path: tuple[Any, ...]
    leaf: Any
    treedef: Any  # of its value
    count: int  # of slots


class Layout:
    """An object, taken apart.

    Attributes:
        slots: What is stored of it, in order.
        leaves: The leaves that have these slots, in the same order.
    """

    def __init__(self, obj: Any, function: str) -> None:
        listed, self._treedef = jax.tree.flatten_with_path(obj, is_leaf=_is_part)
        self._parts = [part for _, part in listed]
        objects = {i: part for i, part in enumerate(self._parts) if _is_object(part)}
        if config.graph_mode(None):
            self._skeleton, leaves = flattening.flatten_graph(objects)
        else:
            name = f"checkpoints.{function}"
            flattening.flatten_tree(obj, name)  # its errors have the caller's paths
            self._skeleton, leaves = flattening.flatten_tree(objects, name)
        bases = [paths.from_jax(path) for path, _ in listed]
        self.slots: list[Slot] = []
        self.leaves = [
            self._add((*bases[path[0]], *path[1:]), leaf)
            for path, leaf in zip(self._skeleton.paths(), leaves, strict=True)
        ]
        self._num_owned = len(self.leaves)  # the others are in plain containers
        self.leaves += [
            self._add(bases[i], part)
            for i, part in enumerate(self._parts)
            if i not in objects
        ]
        _check_places(self.slots, function)

    def _add(self, path: tuple[Any, ...], leaf: Any) -> Leaf:
        raw = flattening.raw_of(leaf)
        is_variable = isinstance(leaf, Variable)
        metadata = variables.metadata_of(leaf) if is_variable else {}
        listed, treedef = jax.tree.flatten_with_path(raw, is_leaf=_is_part)
        for keys, value in listed:
            inner = paths.from_jax(keys)
            full = (*path, *inner)
            stored = (*path, "value", *inner) if is_variable else full
            value = value[...] if _jax.is_ref(value) else value
            self.slots.append(Slot(full, paths.spelled(stored), value, metadata))
        return Leaf(path, leaf, treedef, len(listed))

    def tree(self, stored: Sequence[Any]) -> dict[str, Any]:
        """The tree that Orbax gets.

        Args:
            stored: For each slot what is stored of it.
        """
        found: list[tuple[DiskPath, Any]] = []
        rest = iter(stored)
        for path, leaf, treedef, count in self.leaves:
            place = (*path, "value") if isinstance(leaf, Variable) else path
            value = treedef.unflatten([next(rest) for _ in range(count)])
            found.append((paths.spelled(place), value))
        # Orbax refuses a tree without any entry.
        return flat_states.nest(found) or {"nothing": None}

    def rebuilt(self, new: Sequence[Any], *, boxed: bool = False) -> Any:
        """A new object like the one taken apart.

        Args:
            new: For each slot its value.
            boxed: Whether what is not in an object gets a Variable, so that it counts
                as a leaf.
        """
        rest = iter(new)
        raw = [_as_stored(leaf, rest) for leaf in self.leaves]
        objects = flattening.unflatten(self._skeleton, raw[: self._num_owned])
        others = iter(raw[self._num_owned :])
        parts = [
            objects[i] if _is_object(part) else next(others)
            for i, part in enumerate(self._parts)
        ]
        if boxed:
            parts = [x if _is_object(x) else Variable(x) for x in parts]
        return self._treedef.unflatten(parts)

    def update(self, new: Sequence[Any]) -> dict[Any, Any]:
        """What `nnx.update` is to write into the object.

        Args:
            new: For each slot its value.
        """
        found: list[tuple[tuple[Any, ...], Any]] = []
        rest = iter(new)
        for path, leaf, treedef, count in self.leaves:
            value = treedef.unflatten([next(rest) for _ in range(count)])
            if isinstance(leaf, Variable):
                # As a Variable, so that a dict in it is not taken for more paths.
                value = variables.rebuild(
                    type(leaf), value, variables.metadata_of(leaf)
                )
            found.append((path, value))
        return flat_states.nest(found)


def _as_stored(leaf: Leaf, rest: Iterator[Any]) -> Any:
    """The raw value of a leaf, of the next slots; in a ref where one was."""
    value = leaf.treedef.unflatten([next(rest) for _ in range(leaf.count)])
    is_variable = isinstance(leaf.leaf, Variable)
    is_ref = leaf.leaf.ref if is_variable else _jax.is_ref(leaf.leaf)
    return variable_values.stored(value, ref=is_ref)


def _is_object(x: Any) -> bool:
    """Whether it may be shared: an object, a Variable or a ref."""
    return nodes.is_graph_node(x)


def _is_part(x: Any) -> bool:
    """Whether JAX is not to take it apart; iterators, for one, it would not refuse."""
    is_static = x is not None and nodes.kind_of(x) is nodes.Leaf.STATIC
    return is_static or _is_object(x)


def _check_places(slots: Sequence[Slot], function: str) -> None:
    """Raises if the disk would not keep the values apart, or not at all."""
    known: dict[str, Slot] = {}
    places = {slot.place: slot for slot in slots}
    for slot in slots:
        # Orbax joins keys with dots, and doesn't see that names collide.
        name = ".".join(slot.place)
        if slot.place and not _can_be_named(name):
            raise ValueError(
                errors.message(
                    f"nnx.checkpoints.{function}: {name!r} is no name on disk.",
                    where=f"{slot.path!r}",
                    way_out="Rename the key: a name is text, not empty, and doesn't "
                    "end with a slash.",
                )
            )
        above = (slot.place[:end] for end in range(1, len(slot.place)))
        other = next((places[place] for place in above if place in places), None)
        other = other or known.setdefault(name, slot)
        if other is not slot:
            raise ValueError(
                errors.message(
                    f"nnx.checkpoints.{function}: two paths have the same name on "
                    f"disk, {'.'.join(other.place)!r}.",
                    where=f"{other.path!r}\n{slot.path!r}",
                    way_out="Rename one of the keys: on disk they are strings, joined "
                    "by dots.",
                )
            )


def _can_be_named(name: str) -> bool:
    """Whether Orbax finds an array again that it has saved under a name."""
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    # TensorStore leaves out a slash at the end, so that the name is another one.
    return bool(name) and not name.endswith("/")
