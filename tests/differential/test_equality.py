"""Values that are equal and yet not the same are told apart, wherever one is a key.

Issue 12, §2 and §4: ``1``, ``True`` and ``1.0`` shared one compilation, and a static
attribute that was set to an equal value of another type kept the old one.

What `tests/contract/test_transforms/test_static_values.py` has with other values is
left to `make test-all`.
"""

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
CALLS = {
    "jit": lambda f, mode: nnx.jit(f, **mode),
    "remat": lambda f, mode: nnx.remat(f, **mode),
    "grad": lambda f, mode: lambda model: nnx.value_and_grad(f, **mode)(model)[0],
    "vmap": lambda f, mode: nnx.vmap(
        f, in_axes=None, out_axes=None, axis_size=2, **mode
    ),
    "cond": lambda f, mode: lambda model: nnx.cond(True, f, f, model, **mode),
    "jit of remat": lambda f, mode: nnx.jit(nnx.remat(f, **mode), **mode),
}


def parameters(name, values, known):
    """The values of a parameter; what the contract knows is for `make test-all`."""
    marked = [
        pytest.param(value, marks=pytest.mark.long if value in known else ())
        for value in values
    ]
    return pytest.mark.parametrize(name, marked)


@ALIKE
@parameters("how", ["position", "name", "tuple", "plain"], known=["position", "name"])
def test_static_arguments_are_told_apart(values, how):
    def f(model, kind):
        return jnp.float32(code(kind))

    jitted = nnx.jit(f, static_argnums=1)
    calls = {
        "position": lambda value: jitted(model_of(), value),
        "name": lambda value: jitted(model_of(), kind=value),
        "tuple": nnx.jit(lambda *kinds: code(kinds[0]), static_argnums=(0,)),
        "plain": lambda value: jitted(1.0, value),
    }
    check(calls[how], values)


@parameters("transform", CALLS, known=["jit"])
def test_static_attributes_set_outside_are_told_apart(mode, transform):
    model = model_of()
    f = CALLS[transform](lambda model: jnp.float32(code(model.kind)), mode)

    def call(value):
        model.kind = value
        return f(model)

    check(call, SOME)


@parameters("transform", CALLS, known=["jit", "remat", "grad", "vmap"])
def test_static_attributes_set_inside_arrive(transform):
    model = model_of()

    def call(value):
        def write(model):
            model.kind = value
            return jnp.float32(0)

        CALLS[transform](write, GRAPH_UPDATES)(model)
        return code(model.kind)

    check(call, SOME)


@parameters("transform", ["jit", "grad", "vmap"], known=["jit"])
def test_metadata_is_told_apart_inside_and_outside(mode, transform):
    model = model_of()
    read = CALLS[transform](lambda model: jnp.float32(tag(model)), mode)

    def inside(value):
        def write(model):
            model.p.set_metadata(tag=value)
            return jnp.float32(0)

        CALLS[transform](write, mode)(model)
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
@pytest.mark.parametrize(
    "copy",
    [nnx.clone, lambda model: nnx.merge(*nnx.split(model))],
    ids=["clone", "split"],
)
def test_remembered_structure_is_that_of_now(values, copy):
    model = model_of()

    def attribute(value):
        model.kind = value
        return code(copy(model).kind)

    def metadata(value):
        model.p.set_metadata(tag=value)
        return tag(copy(model)), tag(nnx.state(model))

    check(attribute, values)
    assert all(metadata(v) == (code(v), code(v)) for v in [*values, *values[::-1]])


@ALIKE
def test_graphdefs_differ_where_static_values_do(values):
    graphdefs = [nnx.graphdef(model_of(value)) for value in values]
    for i, one in enumerate(values):
        for j, other in enumerate(values):
            if i == j or exact(one) != exact(other):
                assert (graphdefs[i] == graphdefs[j]) == (i == j), (one, other)
