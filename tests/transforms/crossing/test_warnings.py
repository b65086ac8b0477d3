"""What is told and is no error: updates that get lost, and attributes that count."""

import logging
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.errors import LostUpdateWarning
from tests import zoo

# ------------------------------------------------- changes that don't reach the caller


def make():
    return zoo.Box(
        weight=nnx.Param(jnp.ones(2)), array=jnp.zeros(2), rate=0.5, parts=nnx.data([])
    )


def new():
    return nnx.Param(jnp.ones(2))


CHANGES = {
    "array: one .* before, another one now": lambda m: setattr(m, "array", m.array + 1),
    "rate: 0.5 before, .* now": lambda m: setattr(m, "rate", 0.1),
    "extra: nothing before, one Param now": lambda m: setattr(m, "extra", new()),
    "weight: one Param before, another one now": lambda m: setattr(m, "weight", new()),
    "array: one .* before, nothing now": lambda m: delattr(m, "array"),
    "parts/0: nothing before, .* now": lambda m: m.parts.append(new()),
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
    nnx.jit(lambda m: setattr(m, "extra", new()))(make())


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


# ------------------------------ a static attribute that makes all traces, is told once


@pytest.fixture
def told():
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("graftree")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def train(model, x):
    return x


def test_a_static_attribute_that_counts_is_told_of_once(mode, told):
    step, model = nnx.jit(train, **mode), zoo.Box(inner=nnx.Dict(step=0))
    for count in range(6):
        assert len(told) == (count > 2)
        model.inner.step = count
        step(model, 1.0)
    for words in ("train", "model.inner.step, the latest being 0, 1, 2", "Variable"):
        assert words in told[0]


def test_static_arguments_are_meant_so(mode, told):
    step = nnx.jit(lambda x, n: x, static_argnames="n", **mode)
    for count in range(5):
        step(1.0, n=count)
    assert told == []


def test_nothing_is_told_of_shapes_settings_or_changes_of_several_kinds(mode, told):
    step, model = nnx.jit(train, **mode), zoo.Box(inner=nnx.Dict(step=0))
    for count in range(5):
        step(model, np.ones(count))
    for count in range(5):
        model.inner.step, model.inner.other = count, -count
        step(model, 1.0)
    for count in range(5):
        model.inner = nnx.Dict({f"step{count}": 1})
        step(model, 1.0)
    assert told == []


def test_values_that_come_back_are_not_told_of(told):
    step, model = nnx.jit(train), nnx.Dict(step=0)
    for count in range(8):
        model.step = count % 2
        step(model, 1.0)
    assert told == []
