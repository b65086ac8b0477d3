"""Chains of modules as deep as Flax takes them apart (issue 12, section 13)."""

import copy

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.zoo import Box


def chain(length):
    model = None
    for _ in range(length):
        model = Box(weight=nnx.Param(jnp.array(1.0)), inner=nnx.data(model))
    return model


def write(model):
    model.weight[...] += 1


@pytest.fixture(scope="module")
def deep():
    # Python's limit is 1000 frames, of which pytest takes some.
    return chain(700)


OPERATIONS = {
    "split": lambda m: nnx.split(m)[1],
    "merge": lambda m: nnx.merge(*nnx.split(m)),
    "merge of a pure dict": lambda m: nnx.merge(
        nnx.graphdef(m), nnx.to_pure_dict(nnx.state(m))
    ),
    "state": lambda m: nnx.state(m, nnx.Param),
    "flat state": lambda m: nnx.from_flat_state(nnx.to_flat_state(nnx.state(m))),
    "update": lambda m: nnx.update(m, nnx.state(m)),
    "clone": nnx.clone,
    "clone again": lambda m: (nnx.clone(m), nnx.clone(m)),
    "iter_graph": lambda m: list(nnx.iter_graph(m)),
    "iter_graph of a tree": lambda m: list(nnx.iter_graph(m, graph=False)),
    "train": lambda m: m.train(),
    "pop": lambda m: nnx.pop(m, nnx.Cache),
    "jax.jit": jax.jit(lambda m: m.weight * 2),
    "jit": nnx.jit(write),
    "jit without graph updates": nnx.jit(write, graph_updates=False),
    "jit of a tree": nnx.jit(write, graph=False),
    "grad": nnx.grad(lambda m: m.weight[...] ** 2),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_deep_chain_is_taken_apart(operation, deep):
    for _ in range(2):  # the second time plans and memos are made
        OPERATIONS[operation](deep)


@pytest.mark.parametrize("operation", [repr, copy.deepcopy, nnx.view])
def test_what_python_walks_itself_takes_less_deep_chains(operation):
    assert operation(chain(80)) is not None
