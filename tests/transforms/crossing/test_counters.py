"""A static attribute that makes all traces is told of, once."""

import logging

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import zoo


def counting():
    return zoo.Box(inner=nnx.Dict(step=0), scale=nnx.Param(jnp.ones(())))


def train(model, x):
    return model.scale * x


@pytest.fixture
def told():
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("graftree")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_a_static_attribute_that_counts_is_told_of_once(mode, told):
    step, model = nnx.jit(train, **mode), counting()
    for count in range(6):
        assert len(told) == (count > 2)
        model.inner.step = count
        step(model, 1.0)
    for words in ("train", "model.inner.step, the latest being 0, 1, 2", "Variable"):
        assert words in told[0]


def test_static_arguments_are_meant_so(mode, told):
    step = nnx.jit(lambda x, n: x * n, static_argnames="n", **mode)
    for count in range(5):
        step(jnp.ones(2), n=count)
    assert told == []


def test_nothing_is_told_of_shapes_settings_or_changes_of_several_kinds(mode, told):
    step, model = nnx.jit(train, **mode), counting()
    for count in range(5):
        step(model, jnp.ones(count))
    for count in range(5):
        model.inner.step, model.inner.other = count, -count
        step(model, 1.0)
    for count in range(5):
        model.inner = nnx.Dict({f"step{count}": 1})
        step(model, 1.0)
    assert told == []


def test_values_that_come_back_are_not_told_of(told):
    step, model = nnx.jit(train), counting()
    for count in range(8):
        model.inner.step = count % 2
        step(model, 1.0)
    assert told == []
