"""What was learned of a model is no longer used once its structure has changed.

And it goes on being used while only values change: a compiled function is not traced
again. What counts as structure is the same for each way of changing it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo


def model():
    return zoo.Box(
        w=nnx.Param(jnp.ones(2), tag="x"),
        mapping=nnx.Cache({"a": 1}, axes=("x",)),
        array=jnp.ones(2),
        buffer=np.ones(2, np.float32),
        static=1,
        list=nnx.List([jnp.ones(1), "x", nnx.Param(1)]),
        dict=nnx.Dict(a=jnp.ones(1)),
    )


STRUCTURAL = {
    "new attribute": lambda m: setattr(m, "new", 1),
    "static attribute": lambda m: setattr(m, "static", 2),
    "unhashable static attribute": lambda m: setattr(m, "static", [1]),
    "status": lambda m: setattr(m, "static", nnx.data(1)),
    "no array": lambda m: setattr(m, "array", None),
    "array by Variable": lambda m: setattr(m, "array", nnx.Param(1)),
    "Variable by array": lambda m: setattr(m, "w", jnp.ones(1)),
    "Variable by Variable": lambda m: setattr(m, "w", nnx.Param(1)),
    "delete": lambda m: delattr(m, "static"),
    "list append": lambda m: m.list.append(1),
    "list insert": lambda m: m.list.insert(0, 1),
    "list pop": lambda m: m.list.pop(),
    "list reverse": lambda m: m.list.reverse(),
    "list clear": lambda m: m.list.clear(),
    "list static item": lambda m: m.list.__setitem__(1, "y"),
    "dict item": lambda m: m.dict.__setitem__("b", 1),
    "dict delete": lambda m: m.dict.pop("a"),
    "metadata": lambda m: m.w.set_metadata(tag="y"),
    "del metadata": lambda m: m.w.del_metadata("tag"),
    "copy_from": lambda m: m.w.copy_from(nnx.Param(1, tag="y")),
    "update_from_state": lambda m: m.w.update_from_state(nnx.Param(1, tag="y")),
    "nnx.update": lambda m: nnx.update(m, {"new": 1}),
    "nnx.pop": lambda m: nnx.pop(m, nnx.PathContains("w")),
    "set_attributes": lambda m: m.set_attributes(static=3),
    "add_axis": lambda m: nnx.spmd.add_axis(
        m.mapping, 0, {nnx.PARTITION_NAME: "layers", "axes": "y"}
    ),
    "jit": nnx.jit(lambda m: setattr(m, "new", nnx.Param(jnp.ones(1)))),
}
VALUES = {
    "v[...]": lambda m: m.w.__setitem__(..., jnp.zeros(2)),
    "v[0]": lambda m: m.w.__setitem__(0, 1.0),
    "set_value": lambda m: m.w.set_value(jnp.zeros(2)),
    "set_raw_value": lambda m: m.w.set_raw_value(jnp.zeros(2)),
    "v['a']": lambda m: m.mapping.__setitem__("a", 2),
    "array by array": lambda m: setattr(m, "array", jnp.zeros(2)),
    "numpy by array": lambda m: setattr(m, "buffer", jnp.zeros(2)),
    "array by numpy": lambda m: setattr(m, "array", np.zeros(2, np.float32)),
    "list array": lambda m: m.list.__setitem__(0, jnp.zeros(1)),
    "dict array": lambda m: m.dict.__setitem__("a", jnp.zeros(1)),
    "nnx.update": lambda m: nnx.update(m, {"w": jnp.zeros(2)}),
    "update_from_state": lambda m: m.w.update_from_state(
        nnx.Param(jnp.zeros(2), tag="x")
    ),
    "jit": nnx.jit(lambda m: m.w.set_value(m.w * 2)),
    "jit array": nnx.jit(lambda m: setattr(m, "array", m.array * 2)),
    "split": nnx.split,
    "flatten": jax.tree.leaves,
    "repr": repr,
    "view": lambda m: nnx.view(m, raise_if_not_found=False),
}


def learned(m, graph):
    """A function compiled and called thrice, and the structures it was traced with."""
    traced = []
    f = nnx.jit(lambda m: traced.append(nnx.graphdef(m, graph=graph)), graph=graph)
    for _ in range(3):
        f(m), nnx.split(m, graph=graph)
    assert len(traced) == 1
    return f, traced


@pytest.mark.parametrize("name", STRUCTURAL)
def test_structural_changes_are_seen(name, graph):
    m = model()
    f, traced = learned(m, graph)
    before = nnx.graphdef(m, graph=graph)
    STRUCTURAL[name](m)
    f(m)
    after = nnx.graphdef(m, graph=graph)
    assert len(traced) == 2 and before != after
    # Nothing was kept that is not so of a copy, about which nothing is known.
    assert after == nnx.graphdef(nnx.clone(m, graph=graph), graph=graph)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_no_structure(name, graph):
    m = model()
    f, traced = learned(m, graph)
    before = nnx.graphdef(m, graph=graph)
    VALUES[name](m)
    f(m)
    assert len(traced) == 1 and nnx.graphdef(m, graph=graph) == before


def take_raw(v, ref):
    v.set_raw_value(ref)


def take_all(v, ref):
    v.copy_from(nnx.Variable.from_metadata(ref, v.get_metadata()))


@pytest.mark.parametrize(
    ("exchange", "is_ref"), [(take_raw, False), (take_raw, True), (take_all, True)]
)
def test_another_ref_is_written_once_it_was_exchanged(exchange, is_ref):
    v, ref = nnx.Variable(jnp.zeros(2), ref=is_ref), jax.new_ref(jnp.ones(2))
    increment = nnx.jit(lambda v: v.set_value(v + 1))
    for _ in range(3):
        increment(v)
    exchange(v, ref)
    increment(v)
    assert v.get_raw_value() is ref and ref[...].tolist() == [2.0, 2.0]


def test_abstract_variables_get_refs_when_they_are_filled():
    v = nnx.Variable(jax.ShapeDtypeStruct((2,), jnp.float32), ref=True)
    for _ in range(3):
        nnx.split(nnx.Dict(v=v))
    before = nnx.graphdef(nnx.Dict(v=v))
    v.update_from_state(nnx.Variable(jnp.zeros(2)))
    assert isinstance(v.get_raw_value(), jax.Ref)
    assert nnx.graphdef(nnx.Dict(v=v)) != before
