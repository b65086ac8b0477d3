"""The dtype in which layers compute."""

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn.support import computation


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int32)), jnp.bfloat16),
        (([1, 2], None, np.ones(2, np.float16)), jnp.float16),
    ],
)
def test_inferred_dtype_is_the_promoted_inexact_one(args, expected):
    assert computation.canonicalize_dtype(*args) == expected


def test_promote_dtype_converts_all_and_keeps_none():
    result = computation.promote_dtype([1, None, jnp.ones(2, jnp.bfloat16)])
    assert isinstance(result, tuple)
    assert result[1] is None
    assert [x.dtype for x in (result[0], result[2])] == [jnp.bfloat16] * 2


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, "float16"])
def test_promotion_gives_the_peers_dtypes(peer, dtype):
    kinds = [jnp.int8, jnp.bfloat16, jnp.float16, jnp.float32, bool]
    for a in kinds:
        for b in kinds:
            args = (jnp.ones(1, a), None, jnp.ones(1, b), 2.0)
            ours = computation.promote_dtype(args, dtype=dtype)
            theirs = peer.nn.dtypes.promote_dtype(args, dtype=dtype)
            assert [getattr(x, "dtype", x) for x in ours] == [
                getattr(x, "dtype", x) for x in theirs
            ]


def test_a_layer_without_values_says_what_to_do():
    layer = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    for dtype in (None, jnp.float32):
        layer.dtype = dtype
        with pytest.raises(
            TypeError, match=r"(?s)abstract.*float32\[2,3\].*load_state"
        ):
            layer(jnp.ones((1, 2)))
