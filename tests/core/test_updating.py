"""update and pop: planned whole, then carried out."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core import nodes


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.array(1.0))
        self.b = nnx.Param(jnp.array(2.0))
        self.static = 1
        self.items = nnx.data([jnp.array(3.0)])


def test_failed_update_changes_nothing():
    model = Model()
    for wrong in ({"b": 5.0, "static": jnp.ones(1)}, {"a": 5.0, "items": {7: 1.0}}):
        with pytest.raises((ValueError, IndexError)):
            nnx.update(model, {"a": jnp.array(9.0), **wrong})
        assert (model.a[...], model.b[...], model.static) == (1.0, 2.0, 1)


def test_update_of_a_captured_model_changes_nothing():
    model = Model()

    def f(x):
        inner = nnx.Dict(model=model, own=nnx.Param(x))
        nnx.update(inner, {"own": x * 2, "model": {"a": x}})

    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(f)(1.0)
    assert model.a[...] == 1.0 and not isinstance(model.a[...], jax.core.Tracer)


@pytest.mark.parametrize("is_ref", [False, True])
def test_variables_take_values_and_metadata(is_ref):
    model = {
        "a": nnx.Param(jnp.zeros(2), tag="old"),
        "b": nnx.Param(jnp.zeros(2), ref=is_ref),
    }
    kept = [*model.values()]
    given = {"a": nnx.BatchStat(jnp.ones(2), tag="new"), "b": jnp.full(2, 2.0)}
    nnx.update(model, given)
    assert [*model.values()] == kept and type(model["a"]) is nnx.Param
    assert model["a"].tag == "new" and model["b"].ref is is_ref
    assert [float(model[key][0]) for key in "ab"] == [1.0, 2.0]


def test_an_error_names_the_path_of_the_variable():
    model = nnx.Dict(a=nnx.List([nnx.Param(1.0), nnx.Param(2.0, mutable=False)]))
    with pytest.raises(nnx.errors.ImmutableVariableError, match="a/1"):
        nnx.update(model, {"a": {0: 3.0, 1: 4.0}})
    assert model.a[0].get_raw_value() == 1.0


@pytest.mark.parametrize(
    ("node", "keys"),
    [
        (nnx.List([nnx.Param(1.0), nnx.Param(2.0)]), [0, 1, "_length"]),
        ({0: nnx.Param(1.0), 1: nnx.Param(2.0)}, [0, 1]),
        ([nnx.Param(1.0), nnx.Param(2.0)], [0, 1]),
    ],
    ids=["List", "dict", "list"],
)
def test_indices_may_be_strings(node, keys):
    nnx.update(node, {"1": 5.0, 0: 4.0})
    assert [node[0].get_value(), node[1].get_value()] == [4.0, 5.0]
    assert [child.key for child in nodes.children(node)] == keys


def test_strings_that_are_no_index_of_the_node_stay_strings():
    mixed, module = {0: nnx.Param(1.0)}, nnx.Dict(a=1)
    nnx.update(mixed, {"7": 2.0})
    nnx.update(module, {"7": 2.0})
    assert list(mixed) == [0, "7"] and module["7"] == 2.0


def test_attributes_of_classes_that_are_no_pytrees_are_known_by_their_values():
    node = nnx.Object()
    node.items, node.k = [nnx.Param(1.0)], 1
    variable = node.items[0]
    nnx.update(node, {"items": {0: 2.0}, "k": 3})
    assert node.items[0] is variable and variable.get_value() == 2.0 and node.k == 3


def test_failed_pop_removes_nothing():
    model = nnx.List([nnx.Param(jnp.array(1.0))])
    outer = nnx.Dict(a=nnx.Param(jnp.array(2.0)), b=model)
    with pytest.raises(ValueError, match="b/0"):
        nnx.pop(outer, nnx.Param)
    assert hasattr(outer, "a") and len(model) == 1


def test_static_values_are_not_popped():
    node = nnx.Object()
    node.items, node.k, node.x = [1, 2], 3, nnx.data(jnp.ones(1))
    assert list(nnx.pop(node, ...)) == ["x"]
    assert node.items == [1, 2] and node.k == 3


def test_static_attributes_stay_static():
    model = Model()
    nnx.update(model, {"static": 5})
    assert model.static == 5 and model._pytree__nodes["static"] is False


def test_gradients_in_the_form_of_the_model_are_a_state():
    model, grads = Model(), jax.tree.map(lambda x: x * 10, Model())
    nnx.update(model, grads)
    assert (model.a[...], model.b[...], model.items[0]) == (10.0, 20.0, 30.0)


@pytest.mark.parametrize("value", [jnp.ones(2), 3, "x"])
def test_what_is_no_node_can_not_be_updated(value):
    with pytest.raises((RuntimeError, TypeError), match="Unsupported type"):
        nnx.update(value, {})


def test_new_variables_are_copies():
    given = nnx.Param(jnp.array(1.0))
    model = Model()
    nnx.update(model, {"new": given})
    assert model.new is not given and model.new[...] == 1.0


def test_update_that_does_not_fit_a_ref_changes_nothing():
    node = {"a": nnx.Param(jnp.zeros(2)), "b": nnx.Param(jnp.zeros(2), ref=True)}
    with pytest.raises(ValueError, match="Invalid shape"):
        nnx.update(node, {"a": jnp.ones(2), "b": jnp.ones(3)})
    assert node["a"][...].tolist() == node["b"][...].tolist() == [0.0, 0.0]
