"""Layers in float64, against formulas in NumPy and SciPy.

Both sides compute in float64, so that they agree to twelve digits: no rounding can hide
a wrong constant, an axis too many or a statistic of too low precision.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

in_float64 = pytest.mark.usefixtures("float64")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def make(name, *args, **options):
    """A layer whose Params are random float64."""
    options = {"param_dtype": jnp.float64, **options}
    layer = nnx.eval_shape(
        lambda: getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))
    )
    for n, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(layer))):
        values = random(*variable.shape, seed=n)
        if isinstance(variable, nnx.BatchStat):
            values = np.float32(np.abs(values))
        variable.set_value(jnp.asarray(values))
    return layer


def value(variable):
    """The numbers of a Variable."""
    return np.asarray(variable[...])


def agree(actual, expected, tolerance=1e-12):
    """Asserts that numbers in float64 are equal up to rounding."""
    assert actual.dtype == jnp.float64 and actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
