"""Changes that don't reach the caller are told by a warning."""

import warnings

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.errors import LostUpdateWarning
from tests import zoo


def make():
    return zoo.Box(
        weight=nnx.Param(jnp.ones(2)), array=jnp.zeros(2), rate=0.5, parts=nnx.data([])
    )


CHANGES = {
    "array: one .* before, another one now": lambda m: setattr(m, "array", m.array + 1),
    "rate: 0.5 before, .* now": lambda m: setattr(m, "rate", 0.1),
    "extra: nothing before, one Param now": lambda m: setattr(
        m, "extra", nnx.Param(jnp.ones(1))
    ),
    "weight: one Param before, another one now": lambda m: setattr(
        m, "weight", nnx.Param(jnp.zeros(2))
    ),
    "array: one .* before, nothing now": lambda m: delattr(m, "array"),
    "parts/0: nothing before, .* now": lambda m: m.parts.append(nnx.Param(jnp.ones(1))),
    "myself: nothing before, a known object.* now": lambda m: setattr(m, "myself", m),
}


@pytest.mark.parametrize("told", CHANGES)
def test_changes_of_structure_are_named(told, value_mode):
    with pytest.warns(LostUpdateWarning, match=rf"(?s)nnx\.jit.* Box.*  {told}"):
        nnx.jit(CHANGES[told], **value_mode)(make())


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_reaches_the_caller_gives_no_warning(value_mode, no_warning):
    @nnx.jit(**value_mode)
    def step(model, batch):
        model.weight[...] += 1
        model.weight.set_metadata(tag="seen")
        model.parts = list(model.parts)
        model.rate = 0.5
        batch["new"] = model.array
        return zoo.Scale()

    step(make(), {"x": 1.0})


def test_graph_updates_lose_nothing(no_warning):
    nnx.jit(lambda m: setattr(m, "extra", nnx.Param(jnp.ones(1))))(make())


def add(x, model):
    model.weight[...] += x
    return x


def test_writes_to_broadcast_variables_of_a_scan_are_named():
    scan = nnx.scan(add, in_axes=(0, None), out_axes=0)
    with pytest.warns(LostUpdateWarning, match=r"args\[1\]\.weight"):
        scan(jnp.arange(3.0), make())


def test_broadcasts_by_filters_are_meant(no_warning):
    axes = (0, nnx.StateAxes({...: None}))
    nnx.scan(add, in_axes=axes, out_axes=0)(jnp.arange(3.0), make())
