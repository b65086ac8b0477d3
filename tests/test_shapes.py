"""The plugin that checks shapes at run time finds annotations that are not true."""

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from tests import shapes


@shapes.checked
def largest(
    x: Float[Array, "rows columns"], floor: Float[Array, " columns"] | None = None
) -> Float[Array, " columns"]:
    if x.size == 0:
        raise ValueError("nothing to compare")
    return x.max(axis=0) if floor is None else jnp.maximum(x, floor[None])


def test_true_annotations_change_nothing():
    assert largest(jnp.ones((2, 3))).shape == (3,)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("x", [jnp.ones(3)]),
        ("x", [jnp.ones((2, 3), jnp.int32)]),
        ("floor", [jnp.ones((2, 3)), jnp.ones(1)]),
        ("return", [jnp.ones((2, 3)), jnp.ones(3)]),
    ],
)
def test_wrong_rank_dtype_or_size_fails_and_names_the_parameter(name, arguments):
    with pytest.raises(AssertionError, match=f"largest: `{name}` is (float|int)32"):
        largest(*arguments)


def test_error_of_the_function_itself_passes():
    with pytest.raises(ValueError, match="nothing to compare"):
        largest(jnp.ones((0, 3)))


def test_layers_and_functions_are_found():
    found = {f.__qualname__ for m in shapes.modules() for _, f in shapes.functions(m)}
    assert {"Linear.__call__", "dot_product_attention", "Average.update"} <= found
