"""Random object graphs for property tests: one strategy, `graphs`.

A graph is a Module whose attributes are of every kind that the library tells apart:
Variables (with metadata, with refs, with dicts as values), arrays, Modules, `nnx.List`
and `nnx.Dict`, containers marked as data, leaves that are no arrays, and static values,
unhashable ones included. Unless trees are asked for, Modules and Variables are shared,
and Modules refer back to those that contain them.

Each array has values of its own, so that two leaves which changed places are seen.
"""

import collections
import dataclasses
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import graftree as nnx
from tests.zoo import Box, Hidden, Kind, Node

Pair = collections.namedtuple("Pair", ["second", "first"])


def examples(few, many):
    """The settings of a property: as many examples as `make test-all` has time for."""
    return hypothesis.settings(max_examples=many if os.environ.get("TEST_ALL") else few)


Scale = Kind


class Block(Box):
    """The name that messages in tests/contract have."""


@nnx.dataclass
class Record(nnx.Module):
    """A dataclass, so that its instances compare by value and can't be hashed."""

    weights: object = nnx.data(default=None)
    label: str = nnx.static(default="record")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Moments:
    """A pytree of JAX, with fields that are not in the order of their names."""

    variance: object
    mean: object


def param(value=1.0):
    """A Param of two equal numbers."""
    return nnx.Param(jnp.full(2, value, jnp.float32))


NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f", "B", "C", "_e", "a2", "a10"])
STATICS = st.sampled_from(
    [3, 2.5, "text", None, True, (), (1, "x"), [1, [2]], {"k": 1}, np.tanh, Box]
)
ODD_LEAVES = st.sampled_from([3, "text", None, jax.ShapeDtypeStruct((2,), np.float32)])


@st.composite
def graphs(draw, *, trees=False, refs=True):
    """A Module with a random content.

    Args:
        draw: Given by hypothesis.
        trees: Whether to leave out what tree mode refuses: shared references, cycles
            and objects that are no pytrees.
        refs: Whether some Variables are backed by a ``jax.Ref``.
    """
    return _Build(draw, trees, refs).module(depth=0)


class _Build:
    """The making of one graph."""

    def __init__(self, draw, trees, refs):
        self.draw = draw
        self.trees = trees
        self.refs = refs
        self.made = []
        self.open = []
        self.count = 0

    def module(self, depth):
        kinds = [Box, Node, Record] + ([] if self.trees else [Hidden])
        obj = self.draw(st.sampled_from(kinds))()
        self.open.append(obj)
        # The root is empty at times; else it holds enough to be shared further down.
        fewest = self.draw(st.sampled_from([0, 5, 6, 7])) if depth == 0 else 0
        names = st.lists(NAMES, min_size=fewest, max_size=fewest + 3, unique=True)
        for name in self.draw(names):
            setattr(obj, name, self.attribute(depth))
        self.open.pop()
        self.made.append(obj)
        return obj

    def attribute(self, depth):
        # What stands here twice is drawn twice as often.
        makers = [self.variable, self.array, self.odd_leaf, self.static]
        if depth < 3:
            makers += 2 * [self.marked_container, self.item_node, self.inner_module]
        if not self.trees:
            makers += [self.back_reference] + 3 * [self.shared]
        return self.draw(st.sampled_from(makers))(depth)

    def variable(self, depth):
        kind = self.draw(st.sampled_from([nnx.Param, nnx.BatchStat, Kind]))
        form = self.draw(st.sampled_from(["plain", "tagged", "mapping", "ref"]))
        value, metadata = self.array(depth), {}
        if form == "mapping":
            value = {"x": value, "y": (self.array(depth), None)}
        elif form == "ref":
            metadata = {"ref": True} if self.refs else {}
        elif form == "tagged":
            metadata = {"tag": self.draw(st.text("ab", max_size=2)), "notes": [1]}
        self.made.append(kind(value, **metadata))
        return self.made[-1]

    def array(self, depth):
        self.count += 1
        made = np.full(self.draw(st.sampled_from([(), (2,)])), self.count, np.float32)
        return made if self.draw(st.booleans()) else jax.device_put(made)

    def odd_leaf(self, depth):
        return nnx.data(self.draw(ODD_LEAVES))

    def static(self, depth):
        return nnx.static(self.draw(STATICS))

    def inner_module(self, depth):
        return self.module(depth + 1)

    def shared(self, depth):
        return self.draw(st.sampled_from(self.made)) if self.made else None

    def back_reference(self, depth):
        return self.draw(st.sampled_from(self.open))

    def item_node(self, depth):
        n = self.draw(st.sampled_from([0, 1, 2, 2, 3]))
        items = [self.attribute(depth + 1) for _ in range(n)]
        keys = self.draw(st.none() | st.permutations(["a", "b", "items"]))
        named = dict(zip(keys or (), items, strict=False))
        self.made.append(nnx.List(items) if keys is None else nnx.Dict(named))
        return self.made[-1]

    def marked_container(self, depth):
        return nnx.data(self.container(depth))

    def container(self, depth):
        makers = [self.list, self.tuple, self.dict, self.pair, self.moments, self.state]
        return self.draw(st.sampled_from(makers))(depth + 1)

    def list(self, depth):
        n = self.draw(st.sampled_from([0, 1, 2, 2, 3]))
        return [self.item(depth) for _ in range(n)]

    def tuple(self, depth):
        return tuple(self.list(depth))

    def dict(self, depth):
        keys = self.draw(st.sampled_from([("a", "B"), (10, 2), ((1, "x"), (0, "y"))]))
        return dict(zip(keys, self.list(depth), strict=False))

    def state(self, depth):
        names = self.draw(st.permutations(["a", "b", "c"]))
        return nnx.State(dict(zip(names, self.list(depth), strict=False)))

    def pair(self, depth):
        return Pair(self.item(depth), self.item(depth))

    def moments(self, depth):
        return Moments(self.item(depth), self.item(depth))

    def item(self, depth):
        makers = 2 * [self.variable] + [self.array, self.plain]
        if depth < 3:
            makers += [self.container, self.inner_module]
        if not self.trees:
            makers += [self.back_reference] + 2 * [self.shared]
        return self.draw(st.sampled_from(makers))(depth)

    def plain(self, depth):
        return self.draw(st.sampled_from([3, "text", None, ()]))
