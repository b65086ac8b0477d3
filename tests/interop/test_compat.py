"""In tree mode every function of ``nnx.compat`` still works on graphs."""

import functools

import jax.numpy as jnp
import pytest

import graftree as nnx

GRAPH = (
    "split state clone graphdef flatten iter_graph iter_modules iter_children"
    " recursive_map view view_info reseed backup_keys"
).split()
UPDATES = "split_rngs fork_rngs jit grad value_and_grad".split()


@pytest.fixture(autouse=True)
def tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


@pytest.fixture
def tied():
    """A model that holds the same Param at two places, and itself."""
    model = nnx.Module()
    model.a = model.b = nnx.Param(jnp.ones(2))
    model.me = model
    return model


@pytest.mark.parametrize("name", GRAPH)
def test_functions_have_graph_mode_on(name):
    assert getattr(nnx.compat, name).keywords == {"graph": True}


@pytest.mark.parametrize("name", UPDATES)
def test_transforms_have_graph_updates_on(name):
    keywords = getattr(nnx.compat, name).keywords
    assert keywords == {"graph": True, "graph_updates": True}


@pytest.mark.parametrize("name", GRAPH + UPDATES)
def test_each_is_the_public_function_with_other_defaults(name):
    function = getattr(nnx.compat, name)
    assert isinstance(function, functools.partial)
    public = getattr(nnx, name, None) or getattr(nnx.rnglib, name)
    assert function.func is public


def test_split_keeps_sharing(tied):
    graphdef, state = nnx.compat.split(tied)
    assert list(state) == ["a"]
    merged = nnx.merge(graphdef, state)
    assert merged.a is merged.b
    assert merged.me is merged


def test_the_keyword_of_the_caller_wins(tied):
    del tied.me
    with pytest.raises(ValueError, match="does not support shared references"):
        nnx.compat.split(tied, graph=False)


@pytest.mark.parametrize("decorate", [nnx.compat.jit, nnx.compat.jit()])
def test_jit_propagates_structure_with_and_without_parentheses(decorate, tied):
    @decorate
    def add(model):
        model.c = nnx.Param(model.a + 1)

    add(tied)
    assert tied.c.tolist() == [2, 2]


def test_grad_takes_shared_references(tied):
    grads = nnx.compat.grad(lambda model: (model.a * model.b).sum())(tied)
    assert grads["a"].tolist() == [2, 2]
