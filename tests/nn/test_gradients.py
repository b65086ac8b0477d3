"""Derivatives of all layers against central differences, in float64.

A layer is a function of its Params and inputs. Each of these arrays is moved along a
direction of its own; how fast the output then changes is one number per array, which
the gradient and the difference of two calls must agree on. `make test` differentiates
one layer of each family, and the norms with a mask; `make test-all` each layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog

STEP = 1e-5
# Cells are in test_cells.py; SpectralNorm, which leaves out how its power iteration
# depends on the weights, is in test_reparametrization.py.
WITHOUT = "SpectralNorm LSTMCell OptimizedLSTMCell SimpleCell GRUCell".split()

BY_NAME = catalog.BY_NAME
ROWS = [row for row in catalog.LAYERS if row.name not in WITHOUT]
VARIANTS = [
    ("AvgPool", {"strides": 2, "padding": "SAME"}),
    ("Conv", {"padding": "CIRCULAR", "strides": 2, "kernel_dilation": 2}),
    ("Conv", {"padding": "REFLECT", "input_dilation": 2}),
    ("Conv", {"padding": "CAUSAL", "feature_group_count": 1}),
    ("Conv", {"padding": [(1, 2)], "mask": np.arange(36).reshape(3, 3, 4) % 2}),
    ("ConvTranspose", {"padding": "CIRCULAR"}),
    ("ConvTranspose", {"padding": "VALID", "transpose_kernel": True}),
    ("BatchNorm", {"use_running_average": True}),
    ("BatchNorm", {"use_fast_variance": False}),
    ("LayerNorm", {"use_fast_variance": False, "reduction_axes": (0, 1)}),
    ("GroupNorm", {"reduction_axes": (0, 2)}),
    ("Dropout", {"broadcast_dims": (0,)}),
]
CASES = [
    *(pytest.param(x, {}, id=x.name, marks=catalog.unless_family(x)) for x in ROWS),
    *(pytest.param(BY_NAME[name], x, id=f"{name}-{x}") for name, x in VARIANTS),
]


def random(*shape, seed=0):
    # NumPy's numbers: those of JAX take a program per shape, and most of the time.
    return np.random.default_rng(seed).normal(size=shape)


def fill(tree, seed):
    """Arrays for shapes: any numbers, one key for all streams, counts of zero."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([array(x, seed + n) for n, x in enumerate(leaves)])


def array(abstract, seed):
    if jnp.issubdtype(abstract.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(abstract.dtype, jnp.floating):
        return jnp.asarray(random(*abstract.shape, seed=seed))
    numbers = np.arange(np.prod(abstract.shape, dtype=int)) % 2
    return jnp.asarray(numbers.reshape(abstract.shape), abstract.dtype)


def function_of_steps(call, arrays):
    """The output of a call as a function of how far each array is moved."""
    directions = [random(*x.shape, seed=100 + i) for i, x in enumerate(arrays)]

    def function(steps):
        moved = [
            x + step * v for x, step, v in zip(arrays, steps, directions, strict=True)
        ]
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(call(moved)))

    return function


def check(call, arrays):
    function = function_of_steps(call, arrays)

    @jax.jit
    def derivatives_and_differences():
        steps = STEP * jnp.eye(len(arrays))
        values = jax.lax.map(function, jnp.concatenate([steps, -steps]))
        ahead, behind = jnp.split(values, 2)
        return jax.grad(function)(0 * steps[0]), (ahead - behind) / (2 * STEP)

    derivatives, differences = map(np.asarray, derivatives_and_differences())
    assert derivatives.dtype == differences.dtype == float and len(arrays) > 0
    assert np.isfinite(derivatives).all() and (derivatives != 0).all()
    np.testing.assert_allclose(derivatives, differences, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("row", "options"), CASES)
def test_gradient_equals_central_differences(float64, row, options):
    if row.name == "Embed":
        options = options | {"dtype": float}  # its own is that of its Param
    layer = nnx.eval_shape(lambda: row.make(**options))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    params, treedef = jax.tree.flatten(fill(params, seed=0))
    rest = fill(rest, seed=50)
    if "var" in rest:
        rest["var"].set_value(jnp.abs(rest["var"][...]))
    inputs = jax.eval_shape(lambda: row.inputs(dtype=float))
    inputs, inputs_treedef = jax.tree.flatten(fill(inputs, seed=60))
    is_differentiable = jnp.issubdtype(inputs[0].dtype, jnp.floating)

    def call(arrays):
        given = arrays[len(params) :] if is_differentiable else inputs
        layer = nnx.merge(graphdef, treedef.unflatten(arrays[: len(params)]), rest)
        layer = nnx.clone(layer)  # its own statistics and counts, which it may write
        return row(layer, *inputs_treedef.unflatten(given))

    check(call, params + inputs * is_differentiable)


def test_gradient_of_attend_equals_central_differences(float64):
    layer = BY_NAME["Embed"].make(dtype=float)

    def call(arrays):
        model = nnx.clone(layer)
        model.embedding.set_value(arrays[0])
        return model.attend(arrays[1])

    check(call, [random(6, 3), random(2, 3)])


@pytest.mark.parametrize("fast", [True, False])
def test_gradient_of_masked_norms_equals_central_differences(float64, fast):
    options = {"use_fast_variance": fast, "rngs": nnx.Rngs(0)}
    mask = jnp.array([True, True, False, True, True])[:, None]
    norms = (
        nnx.BatchNorm(4, **options),
        nnx.LayerNorm(4, reduction_axes=(1, 2), **options),
        nnx.GroupNorm(4, 2, **options),
        nnx.InstanceNorm(4, **options),
    )

    def call(arrays):
        return [nnx.clone(norm)(arrays[0], mask=mask) for norm in norms]

    check(call, [random(2, 5, 4)])
