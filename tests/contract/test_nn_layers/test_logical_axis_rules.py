"""``nnx.logical_axis_rules`` (contract, section 13)."""

import concurrent.futures

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx

RULES = (("in", "x"), ("out", ("y",)), ("none", None))


@pytest.fixture
def mesh():
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"), axis_types=axis_types)):
        yield


def kernel(names=("in", "out"), **metadata):
    """A kernel with an axis of each name; made by a layer, as users do."""
    options = {"kernel_metadata": {"out_sharding": names, **metadata}}
    return nnx.Linear(8, 8, **options, rngs=nnx.Rngs(0)).kernel


def spec(variable):
    entries = tuple(variable[...].sharding.spec)
    return P(*entries, *(None,) * (2 - len(entries)))


def test_context_yields_nothing():
    with nnx.logical_axis_rules(RULES) as value:
        assert value is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("in", "out"), P("x", "y")),
        (("none", "in"), P(None, "x")),
        (("y", None), P("y", None)),
        (P("out", "in"), P("y", "x")),
    ],
)
def test_logical_names_are_placed_as_the_rules_say(mesh, names, expected):
    with nnx.logical_axis_rules(RULES):
        variable = kernel(names)
    assert spec(variable) == expected


def test_stored_names_stay_logical(mesh):
    with nnx.logical_axis_rules(RULES):
        variable = kernel()
    assert tuple(variable.out_sharding) == ("in", "out")
    assert variable.sharding.spec == variable[...].sharding.spec


def test_inner_rules_replace_the_outer_ones_and_end(mesh):
    with nnx.logical_axis_rules(RULES):
        with nnx.logical_axis_rules((("in", "y"), ("out", None))):
            assert spec(kernel()) == P("y", None)
        assert spec(kernel()) == P("x", "y")


def test_rules_end_with_an_error(mesh):
    with pytest.raises(KeyError), nnx.logical_axis_rules((("x", "y"),)):
        raise KeyError
    assert spec(kernel(("x", None))) == P("x", None)


def test_rules_are_those_of_the_thread():
    def other_rules():
        with nnx.logical_axis_rules((("in", None), ("out", "x"))):
            return other.submit(rules_in_force).result()

    def rules_in_force():
        with jax.set_mesh(jax.make_mesh((2,), ("in",))):
            return spec(kernel(("in", None)))

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other_rules() == P("in", None)


def test_rules_of_a_variable_add_to_those_of_the_context(mesh):
    with nnx.logical_axis_rules((("in", "x"),)):
        variable = kernel(sharding_rules=(("out", "y"), ("in", "x")))
    assert spec(variable) == P("x", "y")


def test_contradicting_rules_are_named(mesh):
    message = "(?s)Inconsistent logical axis annotations for.*in.*"
    with nnx.logical_axis_rules((("in", "x"),)):
        with pytest.raises(ValueError, match=message) as caught:
            kernel(sharding_rules=(("in", "y"),))
    assert "'x'" in str(caught.value) and "'y'" in str(caught.value)


def test_state_of_an_optimizer_is_placed_like_its_params(mesh):
    with nnx.logical_axis_rules(RULES):
        metadata = {"out_sharding": ("in", "out")}
        layer = nnx.Linear(8, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.adam(0.1), wrt=nnx.Param)
        grads = nnx.grad(lambda m: m(jnp.ones((1, 8))).sum())(layer)
        optimizer.update(layer, grads)
    moments = optimizer.opt_state[0]
    for variable in (moments.mu["kernel"], moments.nu["kernel"], layer.kernel):
        assert spec(variable) == P("x", "y")
