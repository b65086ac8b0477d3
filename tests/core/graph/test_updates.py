"""update and pop: planned whole, then carried out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo

ONES, ZEROS = jnp.ones(2), jnp.zeros(2)


def param(value):
    return nnx.Param(jnp.array(value))


@pytest.mark.parametrize(
    "wrong", [{"b": 5.0, "static": jnp.ones(1)}, {"items": {7: 1.0}}]
)
def test_failed_update_changes_nothing(wrong):
    node = zoo.Box(a=param(1.0), b=param(2.0), static=1, items=nnx.data([ONES]))
    with pytest.raises((ValueError, IndexError)):
        nnx.update(node, {"a": jnp.array(9.0), **wrong})
    assert (node.a[...], node.b[...], node.static) == (1.0, 2.0, 1)


def test_update_of_a_captured_model_changes_nothing():
    node = zoo.Scale(1.0)

    def f(x):
        inner = nnx.Dict(model=node, own=nnx.Param(x))
        nnx.update(inner, {"own": x * 2, "model": {"w": x}})

    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(f)(1.0)
    assert node.w[...] == 1.0 and not isinstance(node.w[...], jax.core.Tracer)


@pytest.mark.parametrize(
    "container", [nnx.List, list, lambda items: dict(enumerate(items))]
)
def test_indices_may_be_strings(container):
    node = container([nnx.Param(1.0), nnx.Param(2.0)])
    nnx.update(node, {"1": 5.0, 0: 4.0})
    assert [node[0].get_value(), node[1].get_value()] == [4.0, 5.0]
    assert list(nnx.state(node)) == [0, 1] and len(node) == 2


def test_strings_that_are_no_index_of_the_node_stay_strings():
    mixed, node = {0: nnx.Param(1.0)}, nnx.Dict(a=1)
    nnx.update(mixed, {"7": 2.0})
    nnx.update(node, {"7": 2.0})
    assert list(mixed) == [0, "7"] and node["7"] == 2.0


def test_attributes_of_classes_that_are_no_pytrees_are_known_by_their_values():
    variable = nnx.Param(1.0)
    node = zoo.Hidden(items=[variable], k=1)
    nnx.update(node, {"items": {0: 2.0}, "k": 3})
    assert node.items[0] is variable and variable.get_value() == 2.0 and node.k == 3


# ------------------------------------------------- issue 12: partial checkpoints


@pytest.mark.parametrize(
    "held",
    [ZEROS, np.zeros(2), jax.ShapeDtypeStruct((2,), jnp.float32)],
    ids=["jax", "numpy", "abstract"],
)
def test_an_array_in_a_box_of_a_checkpoint_is_taken_out(held):
    model = nnx.Dict(layers=nnx.List([nnx.Dict(w=nnx.Param(held))]))
    given = {"layers": {"0": {"w": {"value": ONES}}}}
    for state in (given, nnx.State(given)):
        nnx.update(model, state)
        assert model.layers[0].w[...].tolist() == [1.0, 1.0]
    merged = nnx.merge(nnx.graphdef(model), given)
    assert merged.layers[0].w[...].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("is_ref", [False, True])
def test_mappings_for_arrays_are_listed_and_nothing_changes(is_ref):
    stat = nnx.BatchStat(jnp.zeros((2, 3)), ref=is_ref)
    model = nnx.Dict(a=nnx.Param(ZEROS), b=nnx.List([stat]), c=nnx.Param(np.zeros(1)))
    given = {"a": ONES, "b": {0: {"x": 1, "y": 2}}, "c": {"value": {"z": 3}}}
    with pytest.raises(ValueError, match="can't take the place of an array") as caught:
        nnx.update(model, given)
    where = "b/0: the BatchStat holds float32[2,3], got a dict with the keys 'x', 'y'"
    for part in (where, "c: the Param holds", "Pass the array at that path"):
        assert part in str(caught.value)
    assert model.a[...].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("wrap", [lambda x: x, nnx.Param], ids=["raw", "Variable"])
@pytest.mark.parametrize("held", [ZEROS, jax.ShapeDtypeStruct((2,), "float32")])
def test_numpy_arrays_become_arrays_of_jax(wrap, held):
    model, given = nnx.Dict(a=nnx.Param(held)), np.ones(2, np.float64)
    nnx.update(model, {"a": wrap(given)})
    value = model.a.get_raw_value()
    assert isinstance(value, jax.Array) and value.dtype == jnp.float32
    given[:] = 5.0
    assert value.tolist() == [1.0, 1.0]


def test_numpy_arrays_stay_where_they_are_held_or_are_no_numbers():
    model = nnx.Dict(a=nnx.Param(np.zeros(2)), b=nnx.Param(ZEROS))
    given = {"a": np.ones(2), "b": np.array(["x", "y"])}
    nnx.update(model, given)
    assert all(model[key].get_raw_value() is given[key] for key in "ab")


BOXED = {
    "number": (3, {"value": 3}, 3),
    "None": (None, {"value": None}, None),
    "list": ([1.0], {"value": [1.0]}, [1.0]),
    "mapping": ({"a": 1}, {"value": {"a": 2}}, {"a": 2}),
    # No box: the key is one of the value.
    "own key": ({"value": 1}, {"value": 3}, {"value": 3}),
    "anything": (None, {"value": 2}, {"value": 2}),
}


@pytest.mark.parametrize(("held", "given", "expected"), BOXED.values(), ids=BOXED)
def test_boxes_of_values_that_are_no_arrays_are_taken_out(held, given, expected):
    model = {"x": nnx.Variable(held)}
    nnx.update(model, {"x": given})
    assert model["x"].get_raw_value() == expected


def test_the_bookkeeping_of_saved_modules_is_passed_over():
    def bias():
        return nnx.Dict(b=nnx.Param(ZEROS))

    saved = {"_pytree__state": None, "b": {"value": ONES}}
    model, state = bias(), nnx.state(bias())
    nnx.update(model, saved)
    nnx.replace_by_pure_dict(state, {"_pytree__state": None, "b": ONES})
    for found in (model.b, state["b"], nnx.merge(nnx.graphdef(model), saved).b):
        assert found[...].tolist() == [1.0, 1.0]
    for wrong in ({"_pytree__state": 1}, {"_pytree__nodes": {"b": True}}):
        with pytest.raises(ValueError, match="bookkeeping of the Dict"):
            nnx.update(model, wrong)
    assert list(nnx.state(model)) == ["b"]


def test_boxes_in_values_that_are_mappings_are_taken_out():
    held = {"a": jnp.zeros(1), "b": {0: jnp.zeros(1)}}
    model = {"x": nnx.Variable(held)}
    given = {"a": {"value": jnp.ones(1)}, "b": {"0": jnp.ones(1)}}
    for state in ({"x": given}, {"x": {"value": given}}, nnx.State({"x": given})):
        nnx.update(model, state)
        found = model["x"].get_raw_value()
        assert jax.tree.structure(found) == jax.tree.structure(held)
        assert found["b"][0].tolist() == [1.0]
    with pytest.raises(ValueError, match=r"x/a: the Variable holds float32\[1\]"):
        nnx.update(model, {"x": {"a": {"c": jnp.ones(1)}}})


REFUSED = {
    "a mapping can't take the place": (nnx.Variable(3), {"a": 1, "b": 2}),
    "got a Dict with the keys 'w'": (nnx.Param(ZEROS), nnx.Dict(w=nnx.Param(ONES))),
    r"x: the attribute holds float32\[2\]": (ZEROS, {"a": ONES}),
}


@pytest.mark.parametrize("phrase", REFUSED)
def test_mappings_for_what_is_none_are_refused(phrase):
    held, given = REFUSED[phrase]
    model = zoo.Box(x=held)
    with pytest.raises(ValueError, match=phrase):
        nnx.update(model, {"x": given})
    assert model.x is held and np.max(jax.tree.leaves(held)[0]) in (0, 3)


def test_boxes_for_array_attributes_are_taken_out():
    node = zoo.Hidden(x=ZEROS)
    nnx.update(node, {"x": {"value": ONES}})
    assert node.x.tolist() == [1.0, 1.0]


def test_a_flat_state_of_a_variable_is_its_value():
    variable = nnx.Param(ZEROS)
    for path in ((), ("value",)):
        flat = nnx.FlatState([(path, ONES)], sort=True)
        nnx.update(variable, flat)
        assert variable[...].tolist() == [1.0, 1.0]
        variable[...] = 0.0
