"""``nnx.nn.dtypes`` (contract, section 3)."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

dtypes = nnx.nn.dtypes

INFERRED = [
    ((jnp.ones(1, jnp.int32),), jnp.float32),
    ((jnp.ones(1, bool),), jnp.float32),
    ((jnp.ones(1, jnp.bfloat16), 2.0), jnp.bfloat16),
    ((jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.float16)), jnp.float32),
    ((jnp.ones(1, jnp.complex64), jnp.ones(1)), jnp.complex64),
    ((None, jnp.ones(1, jnp.float16), None), jnp.float16),
    (([1.0, 2.0], 3), jnp.float32),
]


@pytest.mark.parametrize(("args", "expected"), INFERRED)
def test_dtype_is_inferred_from_what_is_there(args, expected):
    assert dtypes.canonicalize_dtype(*args) == expected
    promoted = dtypes.promote_dtype(args)
    assert isinstance(promoted, tuple)
    for given, x in zip(args, promoted, strict=True):
        assert x is None if given is None else x.dtype == expected


def test_integers_stay_if_they_may():
    integers = jnp.ones(1, jnp.int32)
    assert dtypes.canonicalize_dtype(integers, inexact=False) == jnp.int32
    (x,) = dtypes.promote_dtype((integers,), inexact=False)
    assert x.dtype == jnp.int32
    assert dtypes.canonicalize_dtype(1, dtype=jnp.int8, inexact=False) is jnp.int8


@pytest.mark.parametrize("dtype", [jnp.float16, "bfloat16", np.dtype("float32")])
def test_a_given_dtype_is_the_answer_itself(dtype):
    assert dtypes.canonicalize_dtype(jnp.ones(1), dtype=dtype) is dtype
    (x,) = dtypes.promote_dtype((jnp.ones(1),), dtype=dtype)
    assert x.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", [jnp.int32, "int8", bool])
def test_a_given_dtype_must_be_inexact(dtype):
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        dtypes.canonicalize_dtype(jnp.ones(1), dtype=dtype)
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        dtypes.promote_dtype((jnp.ones(1),), dtype=dtype)


@pytest.mark.parametrize("args", [(), (None,), (None, None)])
def test_nothing_to_infer_from_is_a_value_error(args):
    with pytest.raises(ValueError):
        dtypes.canonicalize_dtype(*args)
    with pytest.raises(ValueError):
        dtypes.promote_dtype(args)


def test_promote_dtype_takes_one_positional_argument():
    (args, *options) = inspect.signature(dtypes.promote_dtype).parameters.values()
    assert args.kind is inspect.Parameter.POSITIONAL_ONLY
    assert {o.kind for o in options} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
        dtypes.promote_dtype(1.0, 2.0)
