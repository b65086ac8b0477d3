"""Changes that don't reach the caller are told by a warning."""

import warnings

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.errors import LostUpdateWarning


class Model(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.array = nnx.data(jnp.zeros(2))
        self.rate = 0.5
        self.parts = nnx.data([])


def set_array(model):
    model.array = model.array + 1


def set_static(model):
    model.rate = 0.1


def add_variable(model):
    model.extra = nnx.Param(jnp.ones(1))


def replace_variable(model):
    model.weight = nnx.Param(jnp.zeros(2))


def delete(model):
    del model.array


def extend_list(model):
    model.parts.append(nnx.Param(jnp.ones(1)))


def contain_itself(model):
    model.myself = model


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (set_array, "array: one .* before, another one now"),
        (set_static, "rate: 0.5 before, .* now"),
        (add_variable, "extra: nothing before, one Param now"),
        (replace_variable, "weight: one Param before, another one now"),
        (delete, "array: one .* before, nothing now"),
        (extend_list, "parts/0: nothing before, .* now"),
        (contain_itself, "myself: nothing before, a known object.* now"),
    ],
)
def test_changes_of_structure_are_named(value_mode, change, name):
    with pytest.warns(LostUpdateWarning, match=rf"(?s)nnx\.jit.* Model.*  {name}"):
        nnx.jit(change, **value_mode)(Model())


def test_what_reaches_the_caller_gives_no_warning(value_mode):
    @nnx.jit(**value_mode)
    def step(model, batch):
        model.weight[...] += 1
        model.weight.set_metadata(tag="seen")
        model.parts = list(model.parts)
        model.rate = 0.5
        batch["new"] = model.array
        return nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(Model(), {"x": 1.0})


def test_graph_updates_lose_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.jit(add_variable)(Model())


def test_writes_to_broadcast_variables_of_a_scan_are_named():
    def step(x, model):
        model.weight[...] += x
        return x

    scan = nnx.scan(step, in_axes=(0, None), out_axes=0)
    with pytest.warns(LostUpdateWarning, match=r"args\[1\]\.weight"):
        scan(jnp.arange(3.0), Model())


def test_broadcasts_by_filters_are_meant():
    def step(x, model):
        model.weight[...] += x
        return x

    axes = (0, nnx.StateAxes({...: None}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.scan(step, in_axes=axes, out_axes=0)(jnp.arange(3.0), Model())
