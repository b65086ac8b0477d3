"""Comparing object graphs by Python's means only: no library function is asked."""

import contextlib
import re

import jax
import numpy as np
import pytest

import graftree as nnx
from tests import strategies

BOOKKEEPING = ("_pytree__nodes", "_pytree__state")


def is_ref(x):
    return isinstance(x, jax.Ref)


def children(x):
    """(key, child) pairs of a Pytree or container; by Python's means only."""
    if isinstance(x, nnx.Pytree):
        return sorted((k, v) for k, v in vars(x).items() if k not in BOOKKEEPING)
    if isinstance(x, (list, tuple)):
        return list(enumerate(x))
    if isinstance(x, nnx.State):
        x = x.raw_mapping
    if isinstance(x, dict):
        return sorted(x.items(), key=lambda item: item[0])
    if isinstance(x, strategies.Moments):
        return [("mean", x.mean), ("variance", x.variance)]
    return []


def own_facts(x):
    """What is true of an object without its children."""
    if isinstance(x, nnx.Variable):
        return x.get_metadata()
    if isinstance(x, nnx.Pytree):
        state = x._pytree__state
        return dict(x._pytree__nodes), state.initializing, state.is_setup
    return [key for key, _ in children(x)]


def same_value(a, b):
    if isinstance(a, (np.ndarray, jax.Array)):
        same_type = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return same_type and bool(np.all(np.asarray(a) == np.asarray(b)))
    return type(a) is type(b) and a == b


def is_tracked(x):
    return isinstance(x, (nnx.Pytree, nnx.Variable)) or is_ref(x)


class Comparison:
    """Walks two graphs in step; the tracked objects of both must pair one to one."""

    def __init__(self, same_leaf):
        self.same_leaf = same_leaf
        self.left, self.right, self.pairs = {}, {}, []

    def check(self, a, b, path=()):
        assert type(a) is type(b), path
        if is_tracked(a):
            is_known = id(a) in self.left
            assert self.left.setdefault(id(a), b) is b, f"sharing differs at {path}"
            assert self.right.setdefault(id(b), a) is a, f"sharing differs at {path}"
            if is_known:
                return
            self.pairs.append((a, b))
        if is_ref(a):
            assert same_value(a[...], b[...]), path
            return
        assert own_facts(a) == own_facts(b), path
        if isinstance(a, nnx.Variable):
            self.check(a.get_raw_value(), b.get_raw_value(), (*path, "value"))
        elif isinstance(a, nnx.Pytree) or children(a):
            for (key, x), (_, y) in zip(children(a), children(b), strict=True):
                self.check(x, y, (*path, key))
        elif not isinstance(a, (list, tuple, dict, nnx.State, strategies.Moments)):
            assert self.same_leaf(a, b), path


def is_same(a, b):
    """Whether two leaves are one object, or equal strings (skeletons keep one)."""
    return a is b or (type(a) is type(b) is str and a == b)


def check_same(a, b, same_leaf=is_same):
    """Asserts that two graphs are alike; gives the pairs of their tracked objects."""
    comparison = Comparison(same_leaf)
    comparison.check(a, b)
    return comparison.pairs


def variables_of(pairs):
    return [(a, b) for a, b in pairs if isinstance(a, nnx.Variable)]


def nodes_of(pairs):
    return [(a, b) for a, b in pairs if isinstance(a, nnx.Pytree)]


def snapshot(x):
    """Identities and facts of all that is in a graph, to see whether it changed."""
    seen, found = set(), []

    def walk(x, path):
        found.append((path, id(x), own_facts(x)))
        if is_tracked(x):
            if id(x) in seen:
                return
            seen.add(id(x))
        if isinstance(x, nnx.Variable):
            walk(x.get_raw_value(), (*path, "value"))
        for key, child in children(x):
            walk(child, (*path, key))

    walk(x, ())
    return found


@contextlib.contextmanager
def unchanged(*objects):
    """Asserts that objects are afterwards what they were before."""
    before = snapshot(objects)
    yield
    assert snapshot(objects) == before


@contextlib.contextmanager
def raises(kind, *phrases):
    """Expects an exception that says all phrases in this order, in its notes too."""
    with pytest.raises(kind) as caught:
        yield caught
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(".*".join(map(re.escape, phrases)), said, re.DOTALL), said


def keys_of(x):
    """The keys of the children as the library spells them."""
    keys = [key for key, _ in children(x)]
    if isinstance(x, nnx.List):
        return [int(name) if name.isdecimal() else name for name in keys]
    if isinstance(x, nnx.Dict):
        # A key that is the name of a method is stored with a mark before it.
        return [name.removeprefix("@") for name in keys]
    return x._fields if hasattr(x, "_fields") else keys


def reached(x, path):
    """What stands in an object under a path of the library."""
    for key in path:
        if isinstance(x, nnx.Dict):
            x = x[key]
        elif isinstance(x, nnx.List):
            x = vars(x)[str(key)]
        elif isinstance(x, nnx.Pytree):
            x = vars(x)[key]
        else:
            x = getattr(x, key) if hasattr(x, str(key)) else x[key]
    return x
