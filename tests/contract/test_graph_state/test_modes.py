"""Graph mode and tree mode, and how they are chosen (contract sections 1 and 2)."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.strategies import Block, Hidden, Node, param

TREE_FUNCTIONS = {
    "split": lambda x: nnx.split(x, graph=False),
    "flatten": lambda x: nnx.flatten(x, graph=False),
    "state": lambda x: nnx.state(x, graph=False),
    "graphdef": lambda x: nnx.graphdef(x, graph=False),
    "clone": lambda x: nnx.clone(x, graph=False),
    "iter_graph": lambda x: list(nnx.iter_graph(x, graph=False)),
    "recursive_map": lambda x: nnx.recursive_map(lambda p, v: v, x, graph=False),
}
EACH = pytest.mark.parametrize("name", TREE_FUNCTIONS)
SLASHED = ("iter_graph", "recursive_map")


# -------------------------------------------------------------------------- tree errors


@EACH
@pytest.mark.parametrize(
    "shared", [param(), nnx.Param(jnp.ones(2), ref=True), jax.new_ref(jnp.ones(2))]
)
def test_shared_variables_and_refs_are_refused(name, shared):
    with pytest.raises(ValueError) as error:
        TREE_FUNCTIONS[name]([Block(bias=shared), Block(bias=shared)])
    message = str(error.value)
    assert message.startswith("Duplicate") and repr(shared) in message
    assert "found at paths" in message
    form = "{}/bias" if name in SLASHED else "[{}].bias"
    assert f"- {form.format(0)}\n" in message and f"- {form.format(1)}\n" in message
    assert "does not support shared references" in message
    for way_out in ("Remove", "graph=True", f"nnx.compat.{name}"):
        assert way_out in message


def test_ways_out_that_do_not_exist_are_not_named():
    p = param()
    with pytest.raises(ValueError, match="Duplicate") as error:
        nnx.map(lambda path, v: v, [p, p], graph=False)
    assert "nnx.compat.map" not in str(error.value)
    assert "graph=True" in str(error.value)


@EACH
def test_cycles_are_refused(name):
    m = Block()
    m.me = m
    with pytest.raises(ValueError, match="(?s)Cycle detected.*Block.*found at paths"):
        TREE_FUNCTIONS[name]([m])


@EACH
def test_cycles_do_not_wear_out_the_stack(name):
    m = Block(inner=Block())
    m.inner.up = m
    for _ in range(300):
        with pytest.raises(ValueError, match="Cycle detected"):
            TREE_FUNCTIONS[name]({"a": [m]})


@pytest.mark.parametrize(
    "call", [nnx.split, nnx.state, nnx.clone, lambda x: nnx.pop(x, nnx.Param)]
)
def test_containers_that_contain_themselves_are_refused_in_graph_mode(call):
    mapping = {"a": param()}
    mapping["b"] = (mapping,)
    for _ in range(300):  # JAX would have less of the stack with each
        with pytest.raises(ValueError, match="(?s)Cycle detected.*found at paths"):
            call(mapping)


@EACH
def test_objects_that_are_no_pytrees_are_refused(name):
    with pytest.raises(ValueError, match="pytree=False.*Found at path.*0") as error:
        TREE_FUNCTIONS[name]([Hidden()])
    assert name in str(error.value)
    with pytest.raises(ValueError, match="pytree=False") as error:
        TREE_FUNCTIONS[name](Hidden())
    assert "Found at path" not in str(error.value)


@pytest.mark.parametrize("function", [nnx.iter_children, nnx.iter_module_children])
def test_children_of_an_object_that_is_no_pytree(function):
    with pytest.raises(ValueError, match="pytree=False") as error:
        list(function(Hidden(), graph=False))
    assert function.__name__ in str(error.value)
    assert list(function(Hidden(), graph=True)) == []


@EACH
def test_shared_arrays_and_nodes_without_variables_are_accepted_as_two(name):
    inner, x = Node(), jnp.ones(2)
    TREE_FUNCTIONS[name]([inner, inner, x, x])
    merged = nnx.merge(*nnx.split([inner, inner], graph=False))
    assert merged[0] is not merged[1]
    assert len(nnx.flatten([x, x], graph=False)[1]) == 2


def test_graph_mode_accepts_all_that():
    m, p = Hidden(), param()
    m.me, m.a, m.b = m, p, p
    merged = nnx.merge(*nnx.split(m, graph=True))
    assert merged.me is merged and merged.a is merged.b


# -------------------------------------------------------------------- choosing the mode


def is_graph():
    return bool(nnx.state([1, jnp.ones(1)], nnx.PathContains(0)) == nnx.State({}))


def test_functions_follow_the_mode_in_force():
    assert is_graph()
    with nnx.set_graph_mode(False):
        assert not is_graph()
        assert nnx.state([1], graph=True) == nnx.State({})
    assert is_graph()


@pytest.mark.parametrize("setting", [nnx.set_graph_mode, nnx.set_graph_updates])
def test_instances_know_both_values_and_the_argument_is_positional(setting):
    with setting(True):
        changed = setting(False)
        assert changed.prev_value is True and changed.new_value is False
    with pytest.raises(TypeError):
        setting(value=True)


def test_config_sets_the_default():
    try:
        nnx.config.update("nnx_graph_mode", False)
        assert not is_graph()
        with nnx.set_graph_mode(True):
            assert is_graph()
    finally:
        nnx.config.update("nnx_graph_mode", True)
    with pytest.raises(LookupError):
        nnx.config.update("nnx_graph_mood", True)


def test_environment_variables_set_the_defaults():
    names = "config.nnx_graph_mode, config.nnx_graph_updates"
    command = [sys.executable, "-c", f"from graftree import config; print({names})"]
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}

    def run(**variables):
        options = {"env": env | variables, "capture_output": True, "text": True}
        return subprocess.run(command, **options)

    assert run(NNX_GRAPH_MODE="oFf", NNX_GRAPH_UPDATES="Y").stdout == "False True\n"
    failed = run(NNX_GRAPH_MODE="maybe")
    assert "ValueError" in failed.stderr and "NNX_GRAPH_MODE" in failed.stderr
