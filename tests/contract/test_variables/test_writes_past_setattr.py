"""Writes past ``Pytree.__setattr__`` are seen by all that takes objects apart.

Issue 12, §9: calls of `jit` and the memos of `split`, `state` and `clone` went on with
what they knew, and `jax.tree.map` dropped attributes put into ``vars``.
"""

import copy
import functools
import inspect
import pickle
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx


class Plain(nnx.Module):
    """Written from outside, through `vars` and by setattr."""

    def __init__(self):
        self.p = nnx.Param(jnp.ones(()))
        self.k = 1

    @functools.cached_property
    def cached(self):
        return self.k + 1


class Overriding(Plain):
    """With a `__setattr__` and a `__delattr__` of its own that pass by ours."""

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def __delattr__(self, name):
        object.__delattr__(self, name)


class Mixin:
    pass


class Mixed(Mixin, Plain):
    """`__dict__` is first found in a class that is not ours."""


WRITES = {
    "setattr": setattr,
    "vars": lambda m, name, value: vars(m).__setitem__(name, value),
    "update": lambda m, name, value: m.__dict__.update({name: value}),
    "union": lambda m, name, value: m.__dict__.__ior__({name: value}),
    "setdefault": lambda m, name, value: (
        vars(m).pop(name, None),
        vars(m).setdefault(name, value),
    ),
    "held": lambda m, name, value: m.held.__setitem__(name, value),
}
REMOVALS = {
    "delattr": delattr,
    "del": lambda m, name: vars(m).__delitem__(name),
    "pop": lambda m, name: vars(m).pop(name),
}


def value_of(name, number):
    return number if name.startswith("k") else nnx.Param(jnp.full((), float(number)))


def content(m):
    """The attributes, as plain numbers."""
    entries = {k: v for k, v in vars(m).items() if not k.startswith("_pytree__")}
    return {k: float(v[...] if hasattr(v, "shape") else v) for k, v in entries.items()}


@nnx.jit
def by_jit(m):
    return m.p[...], nnx.clone(m)


READS = {
    "jit": lambda m: by_jit(m)[1],
    "split": lambda m: nnx.merge(*nnx.split(m)),
    "state": lambda m: nnx.merge(nnx.graphdef(m), nnx.state(m)),
    "clone": nnx.clone,
    "tree map": lambda m: jax.tree.map(lambda x: x, m),
    "jax.jit": jax.jit(lambda m: m),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}

NAMES = st.sampled_from(["p", "k", "k2", "p2", "p3"])
steps = st.one_of(
    st.tuples(st.sampled_from(sorted(WRITES)), NAMES, st.integers(0, 3)),
    st.tuples(st.sampled_from(sorted(REMOVALS)), st.sampled_from(["k2", "p2"])),
    st.tuples(st.just("read"), st.sampled_from(sorted(READS))),
)


@pytest.mark.parametrize("kind", [Plain, Overriding, Mixed])
@given(sequence=st.lists(steps, min_size=4, max_size=14), holds=st.booleans())
def test_reads_after_any_writes_see_what_is_there(kind, sequence, holds):
    m = kind()
    held: Any = vars(m) if holds else None
    for what, name, *rest in sequence:
        if what == "read":
            # Three times: what is known of an object is kept the second time.
            assert [content(READS[name](m)) for _ in range(3)] == [content(m)] * 3
        elif what in REMOVALS:
            if name in vars(m):
                REMOVALS[what](m, name)
        elif what == "held":
            (vars(m) if held is None else held)[name] = value_of(name, *rest)
        else:
            WRITES[what](m, name, value_of(name, *rest))
    for read in READS.values():
        assert content(read(m)) == content(m)


def known():
    """A Module that was split before."""
    m = Plain()
    for _ in range(3):
        nnx.split(m)
    return m


def test_state_after_two_splits_has_the_new_variable():
    m = known()
    vars(m)["p"] = nnx.Param(3.0)
    assert nnx.state(m)["p"].get_value() == 3.0


def test_cached_properties_are_seen():
    m, f = Plain(), nnx.jit(lambda m: sorted(set(vars(m)) & {"cached"}) and m.k)
    assert [f(m) for _ in range(3)] == [[]] * 3
    assert m.cached == 2 and f(m) == 1


def test_attribute_exchanged_for_another_in_vars_has_a_status():
    m = Plain()
    vars(m).pop("k")
    vars(m)["q"] = nnx.Param(jnp.ones(2))
    assert len(jax.tree.leaves(m)) == 2 and list(nnx.state(m)) == ["p", "q"]


def test_data_in_a_container_in_vars_is_refused_as_in_an_assignment():
    m = Plain()
    vars(m)["layers"] = [nnx.Param(jnp.ones(2))]
    with pytest.raises(ValueError, match=r"(?s)'layers' of Plain.*nnx.data"):
        jax.tree.leaves(m)


def test_another_dict_can_be_assigned():
    m, f = Plain(), nnx.jit(lambda m: m.p * m.k)
    assert [f(m).item() for _ in range(3)] == [1.0] * 3
    m.__dict__ = {**vars(m), "k": 7}
    assert [f(m).item() for _ in range(3)] == [7.0] * 3
    m.__dict__ = {"p": m.p, "k": 9}
    assert [f(m).item() for _ in range(3)] == [9.0] * 3


@runtime_checkable
class HasK(Protocol):
    k: int


def test_vars_are_what_python_and_jax_take_for_a_dict():
    m = known()
    assert isinstance(m, HasK) and inspect.getattr_static(m, "k") == 1
    assert type(copy.copy(vars(m))) is dict and type(vars(m).copy()) is dict
    assert set(pickle.loads(pickle.dumps(vars(m)))) == set(vars(m))
    assert isinstance(jax.tree.map(lambda x: x, vars(m))["p"], nnx.Param)


def test_touched_objects_are_looked_at_again():
    m, f = Plain(), nnx.jit(lambda m: m.p * m.k)
    assert [f(m).item() for _ in range(3)] == [1.0] * 3
    object.__setattr__(m, "k", 5)
    nnx.touch(m)
    nnx.touch(m.p)
    assert f(m) == 5.0
    with pytest.raises(TypeError, match="a Pytree or a Variable, got int"):
        nnx.touch(3)


def test_class_of_a_variable_may_be_set():
    m = known()
    m.p.__class__ = nnx.BatchStat
    assert list(nnx.state(m, nnx.BatchStat)) == ["p"] and not nnx.state(m, nnx.Param)


class Same(nnx.Variable):
    def __eq__(self, other):
        return True

    __hash__ = None


def test_variables_with_an_equality_of_their_own_are_told_apart():
    m = nnx.Dict(table=nnx.data({"a": Same(1.0), "b": nnx.Param(1.0)}))
    for _ in range(3):
        nnx.split(m)
    m.table["a"] = Same(2.0)
    assert nnx.state(m)["table"]["a"].get_value() == 2.0
