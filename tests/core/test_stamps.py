"""Stamps: every structural change moves one, values never do."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.core import stamps
from graftree.core.objects import bookkeeping
from graftree.core.variables import variables


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), tag="x")
        self.mapping = nnx.Cache({"a": 1})
        self.array = jnp.ones(2)
        self.buffer = np.ones(2)
        self.static = 1
        self.list = nnx.List([jnp.ones(1), "x", nnx.Param(1)])
        self.dict = nnx.Dict(a=jnp.ones(1))


def stamp_of(obj):
    if isinstance(obj, nnx.Variable):
        return variables.stamp_of(obj)
    return bookkeeping.state_of(obj).stamp


def all_stamps(model):
    nodes = [x for _, x in nnx.iter_graph(model)]
    return {
        id(x): stamp_of(x) for x in nodes if isinstance(x, (nnx.Pytree, nnx.Variable))
    }


STRUCTURAL = {
    "new attribute": (lambda m: setattr(m, "new", 1), lambda m: m),
    "static attribute": (lambda m: setattr(m, "static", 2), lambda m: m),
    "equal static attribute": (lambda m: setattr(m, "static", [1]), lambda m: m),
    "status": (lambda m: setattr(m, "static", nnx.data(1)), lambda m: m),
    "other data": (lambda m: setattr(m, "array", "y"), lambda m: m),
    "array by Variable": (lambda m: setattr(m, "array", nnx.Param(1)), lambda m: m),
    "Variable by array": (lambda m: setattr(m, "w", jnp.ones(1)), lambda m: m),
    "Variable by Variable": (lambda m: setattr(m, "w", nnx.Param(1)), lambda m: m),
    "delete": (lambda m: delattr(m, "static"), lambda m: m),
    "list append": (lambda m: m.list.append(1), lambda m: m.list),
    "list insert": (lambda m: m.list.insert(0, 1), lambda m: m.list),
    "list pop": (lambda m: m.list.pop(), lambda m: m.list),
    "list reverse": (lambda m: m.list.reverse(), lambda m: m.list),
    "list clear": (lambda m: m.list.clear(), lambda m: m.list),
    "list static item": (lambda m: m.list.__setitem__(1, "y"), lambda m: m.list),
    "dict item": (lambda m: m.dict.__setitem__("b", 1), lambda m: m.dict),
    "dict delete": (lambda m: m.dict.pop("a"), lambda m: m.dict),
    "metadata": (lambda m: m.w.set_metadata(tag="y"), lambda m: m.w),
    "del metadata": (lambda m: m.w.del_metadata("tag"), lambda m: m.w),
    "copy_from": (lambda m: m.w.copy_from(nnx.Param(1, tag="y")), lambda m: m.w),
    "update_from_state": (
        lambda m: m.w.update_from_state(nnx.Param(1, tag="y")),
        lambda m: m.w,
    ),
    "nnx.update": (lambda m: nnx.update(m, {"new": 1}), lambda m: m),
    "nnx.pop": (lambda m: nnx.pop(m, nnx.PathContains("w")), lambda m: m),
    "set_attributes": (lambda m: m.set_attributes(static=3), lambda m: m),
    "jit": (nnx.jit(lambda m: setattr(m, "new", nnx.Param(jnp.ones(1)))), lambda m: m),
}

VALUES = {
    "v[...]": lambda m: m.w.__setitem__(..., jnp.zeros(2)),
    "v[0]": lambda m: m.w.__setitem__(0, 1.0),
    "set_value": lambda m: m.w.set_value(jnp.zeros(3)),
    "set_raw_value": lambda m: m.w.set_raw_value("text"),
    "v['a']": lambda m: m.mapping.__setitem__("b", 2),
    "array by array": lambda m: setattr(m, "array", jnp.zeros(3)),
    "numpy by array": lambda m: setattr(m, "buffer", jnp.zeros(3)),
    "array by numpy": lambda m: setattr(m, "array", np.zeros(3)),
    "list array": lambda m: m.list.__setitem__(0, jnp.zeros(1)),
    "dict array": lambda m: m.dict.__setitem__("a", jnp.zeros(1)),
    "nnx.update": lambda m: nnx.update(m, {"w": jnp.zeros(2)}),
    "update_from_state": lambda m: m.w.update_from_state(nnx.Param(1, tag="x")),
    "jit": nnx.jit(lambda m: m.w.set_value(m.w * 2)),
    "jit array": nnx.jit(lambda m: setattr(m, "array", m.array * 2)),
    "split": lambda m: nnx.split(m),
    "flatten": jax.tree.leaves,
    "repr": repr,
    "view": lambda m: nnx.view(m, raise_if_not_found=False),
}


@pytest.mark.parametrize("name", STRUCTURAL)
def test_structural_changes_move_the_stamp_of_what_changed(name):
    change, changed = STRUCTURAL[name]
    model = Model()
    before, clock = stamp_of(changed(model)), stamps.clock.now
    change(model)
    assert stamp_of(changed(model)) > max(before, clock) and stamps.clock.now > clock


@pytest.mark.parametrize("name", VALUES)
def test_values_move_no_stamp_of_the_model(name):
    model = Model()
    before = all_stamps(model)
    VALUES[name](model)
    assert all_stamps(model) == before


def test_plain_writes_do_not_move_the_clock():
    model = Model()
    clock = stamps.clock.now
    for name in (
        "v[...]",
        "v[0]",
        "set_value",
        "array by array",
        "flatten",
        "nnx.update",
    ):
        VALUES[name](model)
    assert stamps.clock.now == clock


def test_no_number_is_given_twice():
    objects = [type("Stamped", (), {"stamp": 0})() for _ in range(400)]
    threads = [
        threading.Thread(target=lambda part=part: [stamps.touch(x) for x in part])
        for part in (objects[i::4] for i in range(4))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({x.stamp for x in objects}) == 400
