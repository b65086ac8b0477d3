"""Values that are equal and yet not the same are told apart, wherever one is a key.

Issue 12, §2 and §4: ``1``, ``True`` and ``1.0`` shared one compilation, and a static
attribute that was set to an equal value of another type kept the old one.

`tests/contract/test_transforms/test_static_values.py` has what holds for arguments by
position and by name, and for attributes and metadata under `nnx.jit`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo
from tests.differential import bodies, vocabulary
from tests.differential.vocabulary import code, exact
from tests.modes import GRAPH_UPDATES

# Each line holds values that are equal, or nearly.
LINES = [
    [eval(text, {**vars(vocabulary), "np": np}) for text in line]
    for line in bodies.ALIKE
]
ALIKE = pytest.mark.parametrize("values", LINES, ids=range(len(LINES)))
# Some of each kind, for rules that are tested with every transform.
SOME = [value for line in LINES for value in line[:2]]


def model_of(kind=None):
    return zoo.Box(p=nnx.Param(jnp.ones(())), kind=kind)


def tag(model):
    return code(model.p.get_metadata("tag"))


def check(call, values):
    """Asserts that a call with each value, forth and back, gives the value's number."""
    for value in [*values, *values[::-1]]:
        assert float(call(value)) == code(value), exact(value)


# What gives, of a function of a model, one that calls it through a transform.
INSIDE = {
    "cond": lambda f, mode: lambda model: nnx.cond(True, f, f, model, **mode),
    "jit of remat": lambda f, mode: nnx.jit(nnx.remat(f, **mode), **mode),
}
MAPS = {
    "grad": lambda f, mode: lambda model: nnx.value_and_grad(f, **mode)(model)[0],
    "vmap": lambda f, mode: nnx.vmap(
        f, in_axes=None, out_axes=None, axis_size=2, **mode
    ),
}
OUTSIDE = {"remat": lambda f, mode: nnx.remat(f, **mode), **MAPS, **INSIDE}


@ALIKE
def test_static_arguments_are_told_apart(values):
    check(nnx.jit(lambda *kinds: code(kinds[0]), static_argnums=(0,)), values)


@pytest.mark.parametrize("transform", OUTSIDE)
def test_static_attributes_set_outside_are_told_apart(mode, transform):
    model = model_of()
    f = OUTSIDE[transform](lambda model: jnp.float32(code(model.kind)), mode)

    def call(value):
        model.kind = value
        return f(model)

    check(call, SOME)


@pytest.mark.parametrize("transform", INSIDE)
def test_static_attributes_set_inside_arrive(transform):
    model = model_of()

    def call(value):
        def write(model):
            model.kind = value
            return jnp.float32(0)

        INSIDE[transform](write, GRAPH_UPDATES)(model)
        return code(model.kind)

    check(call, SOME)


@pytest.mark.parametrize("transform", MAPS)
def test_metadata_is_told_apart_inside_and_outside(mode, transform):
    model = model_of()
    read = MAPS[transform](lambda model: jnp.float32(tag(model)), mode)

    def inside(value):
        def write(model):
            model.p.set_metadata(tag=value)
            return jnp.float32(0)

        MAPS[transform](write, mode)(model)
        return tag(model)

    def outside(value):
        model.p.set_metadata(tag=value)
        return read(model)

    check(inside, SOME)
    check(outside, SOME)


@ALIKE
def test_jax_jit_tells_static_attributes_and_metadata_apart(values):
    jitted = jax.jit(lambda model: jnp.float32(code(model.kind) + tag(model)))

    def call(value):
        model = model_of(value)
        model.p.set_metadata(tag=value)
        return jitted(model) / 2

    check(call, values)


@ALIKE
def test_remembered_structure_is_that_of_now(values):
    model = model_of()
    for value in [*values, *values[::-1]]:
        model.kind = value
        model.p.set_metadata(tag=value)
        for copy in (nnx.clone(model), nnx.merge(*nnx.split(model))):
            assert code(copy.kind) == tag(copy) == code(value)
        assert tag(nnx.state(model)) == code(value)


@ALIKE
def test_graphdefs_differ_where_static_values_do(values):
    graphdefs = [(value, nnx.graphdef(model_of(value))) for value in values]
    for one, other in itertools.product(graphdefs, repeat=2):
        if one is other or exact(one[0]) != exact(other[0]):
            assert (one[1] == other[1]) == (one is other), (one[0], other[0])
