"""Linear, LinearGeneral, Einsum, Embed: formulas, arguments, hooks, refusals."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import exact, meshes, tables
from tests.programs import in_one_program
from tests.random_arrays import random


def general(*args, **options):
    return nnx.LinearGeneral(*args, rngs=nnx.Rngs(0), **options)


def einsum(*args, **options):
    return nnx.Einsum(*args, rngs=nnx.Rngs(0), **options)


# ----------------------------------------------------------------------------- Linear


def test_bias_is_added_to_what_a_contraction_of_the_users_own_gives():
    class Scaled:
        """A product with its scale beside it, as of a quantized kernel."""

        def __init__(self, product):
            self.product, self.ndim = product, product.ndim

        def __add__(self, other):
            return 10 * self.product + other

    def contract(*args, **options):
        return Scaled(jax.lax.dot_general(*args, **options))

    layer = nnx.Linear(3, 4, dot_general=contract, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(4.0)
    x = random(2, 3)
    expected = 10 * np.float64(x) @ np.float64(layer.kernel[...]) + np.arange(4)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.any_arguments
def test_inputs_with_a_shape_that_jax_does_not_know_are_left_to_the_hooks():
    quantized = types.SimpleNamespace(shape=(2, 3), values=random(2, 3))

    def promote(args, *, dtype):
        x, *others = args
        return x.values, *others

    layer = nnx.Linear(3, 4, promote_dtype=promote, rngs=nnx.Rngs(0))
    plain = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(quantized), plain(quantized.values))


# ---------------------------------------------------------------------- LinearGeneral


def test_initializers_get_the_flattened_shapes():
    shapes = []

    def init(key, shape, dtype):
        shapes.append(shape)
        return jnp.ones(shape, dtype)

    options = {"kernel_init": init, "bias_init": init, "batch_axis": {0: 6}}
    general((2, 3), (4, 5), axis=(1, 2), **options)
    assert shapes == [(36, 20), (120,)]
    init = nnx.with_metadata(nnx.initializers.lecun_normal(), tag="kernel")
    kernel = general(2, (3, 4), kernel_init=init).kernel
    assert (kernel.shape, kernel.tag) == ((2, 3, 4), "kernel")


@tables.cases(
    "args, options, error, message",
    (((2, 3), 4), {}, ValueError, r"the same length. Got \(2, 3\) and \(-1,\)"),
    *(
        ((2, 4), {"batch_axis": axes}, ValueError, "leading dimensions starting from 0")
        for axes in ({1: 3}, {-1: 3}, {0: 3, 2: 4})
    ),
    (((2, 2), 4), {"axis": (1, 1)}, TypeError, None),
    (((2, 2), 4), {"axis": (-1, 1)}, TypeError, None),
)
def test_axes_that_do_not_fit_are_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        general(*args, **options)(random(3, 2))


def test_arguments_are_kept_as_tuples_and_an_immutable_mapping():
    layer = general([2], np.int64(4), axis=[-1], batch_axis={0: 3})
    assert (layer.in_features, layer.out_features, layer.axis) == ((2,), (4,), (-1,))
    assert dict(layer.batch_axis) == {0: 3}
    with pytest.raises(TypeError):
        layer.batch_axis[1] = 2


# ----------------------------------------------------------------------------- Einsum


def test_equation_is_kept_without_spaces_and_the_call_may_give_another():
    layer, x = einsum("a b , b c -> a c", (3, 4), 4), random(2, 3)
    assert layer.einsum_str == "ab,bc->ac"
    np.testing.assert_allclose(layer(x, "ab,bc->c a"), layer(x).T, rtol=1e-6)
    np.testing.assert_array_equal(einsum(None, (3, 4), 4)(x, "ab,bc->ac"), layer(x))


@tables.cases(
    "equation, message",
    ("ab,bc", 'must be explicit and include "->"'),
    ("ab->a", "exactly two operands.*instead of 0"),
    ("ab,bc,cd->ad", "exactly two operands.*instead of 2"),
)
def test_equations_of_another_form_are_refused(equation, message):
    with pytest.raises(ValueError, match=message):
        einsum(equation, (3, 4))
    with pytest.raises(ValueError, match=message):
        einsum("ab,bc->ac", (3, 4))(random(2, 3), equation)
    with pytest.raises(ValueError, match="No `einsum_str` argument was provided"):
        einsum(None, (3, 4))(random(2, 3))


# ------------------------------------------------------------------------------ Embed


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.int32])
def test_any_integers_of_any_shape_are_looked_up(dtype):
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    inputs = np.array([[0, 4, 2], [1, 1, 3]], dtype)
    expected = np.asarray(layer.embedding[...])[inputs]
    np.testing.assert_array_equal(layer(inputs), expected)
    assert nnx.eval_shape(layer, jnp.ones((2, 0, 4), dtype)).shape == (2, 0, 4, 3)
    assert nnx.eval_shape(layer, jnp.array(1, dtype)).shape == (3,)
    assert jax.eval_shape(layer.attend, jnp.ones(3)).shape == (5,)


def test_negative_numbers_wrap_and_numbers_outside_give_nan():
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    table = np.asarray(layer.embedding[...])
    y = np.asarray(layer(jnp.array([-1, -5, -6, 5])))
    np.testing.assert_array_equal(y[:2], table[[4, 0]])
    assert np.isnan(y[2:]).all()


def test_a_single_row_is_given_for_every_number():
    layer = nnx.Embed(1, 3, rngs=nnx.Rngs(0))
    row = np.asarray(layer.embedding[...])[0]
    y = layer(jnp.array([[0, 7], [-3, 1]]))
    np.testing.assert_array_equal(y, np.broadcast_to(row, (2, 2, 3)))


@pytest.mark.parametrize("spec", [("x", None), ("x", "y")])
def test_out_sharding_shards_a_single_row_too(spec):
    layer, x, spec = nnx.Embed(1, 4, rngs=nnx.Rngs(0)), jnp.arange(8), jax.P(*spec)
    expected = layer(x)
    with jax.set_mesh(meshes.mesh_of("Explicit", x=2, y=2)):
        y = jax.jit(lambda m, x: m(x, out_sharding=spec))(layer, x)
        assert jax.typeof(y).sharding.spec == spec
        np.testing.assert_array_equal(y, expected)


# ----------------------------------------------------------------------- contractions

# Equation, shapes of inputs, kernel and bias, and that in which the bias is added.
EINSUM = [
    ("ab,bc->ac", (2, 3), (3, 4), (4,), (4,)),
    ("ab,bc->ca", (2, 3), (3, 4), (4,), (4, 1)),
    ("a b, b c -> a c", (2, 3), (3, 4), 4, (4,)),
    ("nta,hab->nthb", (2, 5, 3), (6, 3, 4), (6, 4), (6, 4)),
    ("nta,hab->nbht", (2, 5, 3), (6, 3, 4), (4, 6), (4, 6, 1)),
    ("hab,ha->hb", (6, 3, 4), (6, 3), (6,), (6, 1)),
    ("...b,bc->...c", (2, 5, 3), (3, 4), (4,), (4,)),
    ("...b,bc->c...", (2, 5, 3), (3, 4), (4,), (4, 1, 1)),
    ("d...ab,bc...->ad...c", (7, 5, 2, 3), (3, 4, 5), (5, 4), (5, 4)),
    ("...b,...bc->...c", (2, 5, 3), (5, 3, 4), (5, 4), (5, 4)),
]
# Arguments, options, shape of the inputs, equation, shape in which the bias is added.
GENERAL = [
    ((2, 4), {}, (3, 2), "na,ab->nb", (4,)),
    *(
        (((2, 3), (4, 5)), {"axis": axis}, (7, 2, 3), "nab,abcd->ncd", (4, 5))
        for axis in [(-2, -1), (1, 2), (-1, -2), (2, -2)]
    ),
    (((7, 3), 4), {"axis": (0, 2)}, (7, 2, 3), "nab,nbc->ac", (4,)),
    (
        (3, (4, 5)),
        {"axis": -1, "batch_axis": {0: 7, 1: 2}},
        (7, 2, 6, 3),
        "nmta,nmacd->nmtcd",
        (7, 2, 1, 4, 5),
    ),
    (
        ((4, 3), (2, 6)),
        {"axis": (-1, 2), "batch_axis": {0: 5}},
        (5, 7, 4, 3),
        "ntab,nabcd->ntcd",
        (5, 1, 2, 6),
    ),
]
# The name, and what GENERAL has.
CONTRACTIONS = [
    *(
        ("Linear", (3, 4), {}, (*batch, 3), "...a,ab->...b", (4,))
        for batch in [(), (5,), (2, 0), (2, 3, 4)]
    ),
    *(("LinearGeneral", *row) for row in GENERAL),
    *(
        ("Einsum", (equation, kernel, bias), {}, shape, equation, spread)
        for equation, shape, kernel, bias, spread in EINSUM
    ),
]


@exact.in_float64
@tables.cases("name, args, options, shape, equation, spread", *CONTRACTIONS)
def test_contraction_is_product_plus_bias(name, args, options, shape, equation, spread):
    layer, x = exact.make(name, *args, **options), exact.random(*shape)
    expected = np.einsum(equation, x, exact.value(layer.kernel))
    exact.agree(
        in_one_program(layer, x), expected + exact.value(layer.bias).reshape(spread)
    )


@exact.in_float64
def test_embed_multiplies_with_its_rows():
    layer, query = exact.make("Embed", 7, 3), exact.random(2, 4, 3)
    exact.agree(
        in_one_program(layer.attend, query), query @ exact.value(layer.embedding).T
    )
    exact.agree(layer(jnp.array([[6, 0]])), exact.value(layer.embedding)[[[6, 0]]])
