"""What `jax.jit` gets of an object that comes again: all its arrays at once."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.tree_util import dispatch_registry

import graftree as nnx


class Net(nnx.Module):
    def __init__(self, **attributes):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.factor = 2
        for name, value in attributes.items():
            setattr(self, name, value)


@jax.jit
def total(model):
    found = [x for x in jax.tree.leaves(model) if not isinstance(x, nnx.Rngs)]
    numbers = [x for x in found if jnp.issubdtype(jnp.asarray(x).dtype, jnp.number)]
    return sum(jnp.sum(x) for x in numbers)


def called(model):
    """A model that has been called twice."""
    for _ in range(2):
        total(model)
    return model


def is_known(model):
    """Whether `jax.jit` gets all arrays of a model at once."""
    _, static = dispatch_registry.flatten(model)[1].node_data()
    return type(static[0]) is int and isinstance(static[1], nnx.GraphDef)


def tied():
    model: Any = Net()
    model.again = model.linear.kernel
    model.layer = model.linear
    return model


KNOWN = pytest.mark.caches("it asks whether the object is known")
MODELS = {
    "layers": lambda: Net(layers=nnx.List([Net(), Net()])),
    "shared": tied,
    "numbers": lambda: Net(items=nnx.data([1, nnx.Param(2.0), {"b": 3.0, "a": 4}])),
    "arrays": lambda: Net(x=jnp.ones(3), y=np.ones(2), z=nnx.data(5)),
    "values": lambda: Net(cache=nnx.Cache({"k": jnp.ones(2), "e": (1.0, None)})),
    "keys": lambda: Net(drop=nnx.Dropout(0.5, rngs=nnx.Rngs(1))),
    "nested": lambda: Net(box=nnx.Param(nnx.Param(jnp.ones(2), tag="a"))),
    "optimizer": lambda: Net(
        tree=nnx.data({"m": {"w": nnx.Param(1.0)}, "v": [nnx.Param(2.0)]})
    ),
}


@KNOWN
@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_jax_has_of_it(name):
    model = called(MODELS[name]())
    assert is_known(model)
    leaves, treedef = dispatch_registry.flatten(model)
    made = treedef.unflatten(leaves)
    assert jax.tree.structure(made) == jax.tree.structure(model)
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(model), strict=True)
    assert all(jnp.all(jnp.asarray(a == b)) for a, b in pairs)


CHANGES = {
    "value": lambda m: m.linear.bias.set_value(jnp.full(2, 7.0)),
    "value of another form": lambda m: m.linear.bias.set_value({"a": jnp.ones(3)}),
    "no value": lambda m: m.linear.bias.set_value(None),
    "static": lambda m: setattr(m, "factor", 3),
    "equal static": lambda m: setattr(m, "factor", 2.0),
    "static in vars": lambda m: vars(m).update(factor=5),
    "variable": lambda m: setattr(m.linear, "bias", nnx.Param(jnp.ones(5))),
    "attribute": lambda m: setattr(m, "extra", nnx.Param(jnp.ones(5))),
    "no attribute": lambda m: delattr(m.linear, "bias"),
    "array": lambda m: setattr(m, "x", jnp.ones(4)),
    "item": lambda m: m.items.append(nnx.Param(3.0)),
    "number": lambda m: m.items.__setitem__(0, 9),
    "metadata": lambda m: m.linear.bias.set_metadata(tag=1),
    "class": lambda m: setattr(m.linear.bias, "__class__", nnx.BatchStat),
    "layer": lambda m: setattr(m, "linear", nnx.Linear(2, 3, rngs=nnx.Rngs(1))),
    "setup": lambda m: setattr(vars(m)["_pytree__state"], "is_setup", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name):
    model = Net(x=jnp.ones(3), items=nnx.data([1, nnx.Param(2.0)]))
    give = jax.jit(lambda m: m)
    for change in (lambda m: None, CHANGES[name]):
        change(model)
        for _ in range(4):
            given = give(model)
            assert jax.tree.structure(given) == jax.tree.structure(model)
            jax.tree.map(np.testing.assert_array_equal, given, model)


def test_models_that_are_alike_share_what_was_compiled():
    traced = []

    @jax.jit
    def f(model):
        traced.append(model)
        return model.linear.kernel[...]

    for model in (Net(), Net()):
        kernel = model.linear.kernel[...]
        assert all(jnp.array_equal(f(model), kernel) for _ in range(4))
    assert len(traced) == 1


@KNOWN
def test_modes_in_turns_are_known():
    model = Net(drop=nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    for _ in range(4):
        for mode in (model.train, model.eval):
            mode()
            total(model)
    model.train()
    assert is_known(model)


def test_an_object_that_changes_each_time_is_taken_apart_as_it_is():
    model = Net()
    for number in range(40):
        model.linear.bias = nnx.Param(jnp.full(2, float(number)))
        model.factor = 1
        kernel = jnp.sum(model.linear.kernel[...])
        np.testing.assert_allclose(total(model), kernel + 2 * number, rtol=1e-5)
    assert not is_known(model)


def test_nothing_is_known_of_objects_inside_a_trace():
    seen = []

    @jax.jit
    def f(model):
        inner = [total(model) for _ in range(3)]
        seen.append(is_known(model))
        return inner

    f(Net())
    assert seen == [False]


def test_types_that_jax_takes_apart_in_another_way_are_left_to_it():
    class Pair:
        def __init__(self):
            self.shown, self.hidden = jnp.ones(()), jnp.ones(())

    def rebuild(_, children):
        pair = Pair()
        (pair.hidden,) = children
        return pair

    jax.tree_util.register_pytree_node(Pair, lambda p: ((p.hidden,), None), rebuild)
    nnx.graphlib.register_graph_node_type(
        Pair,
        lambda p: ([("shown", nnx.Param(p.shown))], None),
        setattr,
        delattr,
        lambda _: Pair(),
        lambda p: None,
        lambda p, items: None,
    )
    model = nnx.Dict(pair=nnx.data(Pair()))
    f = jax.jit(lambda m: m["pair"].hidden)
    for number in range(5):
        model["pair"].hidden = jnp.asarray(float(number))
        assert f(model) == number


@KNOWN
def test_objects_without_versions_are_taken_apart():
    class Own(Net):
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    model = called(nnx.List([Own(), Net()]))
    assert not is_known(model) and not is_known(model[0]) and is_known(model[1])
    model[0].factor = 5
    assert jax.tree.structure(jax.jit(lambda m: m)(model)) == jax.tree.structure(model)


@KNOWN
def test_what_is_known_keeps_no_model():
    model: Any = Net(layers=nnx.List([Net()]))
    assert is_known(called(model))
    gone = weakref.ref(model), weakref.ref(model.layers[0])
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
