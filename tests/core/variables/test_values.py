"""What Variables do with the values they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.core.variables import values


def test_arrays_are_jax_arrays_and_their_tracers():
    assert values.is_array(jnp.ones(2))
    assert not values.is_array(np.ones(2))
    seen = []
    jax.make_jaxpr(lambda x: seen.append(values.is_array(x)))(1.0)
    assert seen == [True]


def test_refs_are_no_arrays_also_when_traced():
    seen = []
    ref = jax.new_ref(jnp.ones(2))
    jax.jit(lambda x: seen.append(values.is_array(x)))(ref)
    assert not values.is_array(ref)
    assert seen == [False]


def test_refs_are_found_in_containers():
    ref = jax.new_ref(jnp.ones(2))
    assert values.contains_ref({"a": [1, (ref,)], 2: None})
    assert not values.contains_ref({"a": [1, (jnp.ones(2),)], 2: None})


def test_containers_are_copied_and_their_leaves_shared():
    leaf = jnp.ones(2)
    given = {"b": [leaf], "a": (1,)}
    copied = values.copy_containers(given)
    assert list(copied) == ["b", "a"]
    assert copied["b"] is not given["b"]
    assert copied["b"][0] is leaf


def test_unwrap_reads_variables_only():
    assert values.unwrap(nnx.Param(3)) == 3
    assert values.unwrap(3) == 3


def test_writing_everything_rebinds_only_if_the_type_stays():
    old, new = jnp.zeros(2), jnp.ones(2)
    assert values.write_at(old, ..., new) is new
    assert values.write_at(old, ..., jnp.ones(2, jnp.int32)).dtype == jnp.float32


@pytest.mark.parametrize("value", [jnp.ones(2), jax.new_ref(jnp.ones(2)), 1.0])
def test_stored_in_a_ref_of_its_own_or_without_one(value):
    ref = values.stored(value, ref=True)
    assert isinstance(ref, jax.Ref) and ref is not value
    assert not isinstance(values.stored(value, ref=False), jax.Ref)


def test_stored_value_is_the_value_itself_without_a_ref():
    for value in (jnp.ones(2), {"a": 1}, None):
        assert values.stored(value, ref=False) is value


@pytest.mark.parametrize(
    "value",
    [
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.sharding.PartitionSpec("x"),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    ],
)
def test_stand_ins_for_arrays_are_never_in_a_ref(value):
    assert values.is_stand_in(value) and values.stored(value, ref=True) is value


def is_written(array, value):
    """Whether JAX writes the value, and doesn't warn; the check is to say the same."""
    try:
        array.at[...].set(value)
    except (TypeError, ValueError, FutureWarning):
        return False
    return True


@pytest.mark.parametrize(
    "stored",
    [
        jnp.ones(2),
        jnp.array([1, 2]),
        jnp.array(True),
        jnp.float32(1),
        jnp.uint32(1),
        jnp.bfloat16(1),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
@pytest.mark.parametrize(
    "value",
    [
        1, 1.5, True, None, "text", np.float64(2), np.ones(2), jnp.ones(2),
        jnp.ones(3), jnp.ones((1, 2)), jnp.float32(1), jnp.int8(1), jnp.array(1.0),
        jnp.bfloat16(1), jax.ShapeDtypeStruct((2,), jnp.float32),
    ],
    ids=str,
)  # fmt: skip
def test_what_fits_a_ref_is_what_fits_an_array(stored, value):
    ref = jax.new_ref(stored)
    if is_written(stored, value):
        values.check_fits(ref, value)
    else:
        with pytest.raises((TypeError, ValueError, FutureWarning)):
            values.check_fits(ref, value)


def test_what_does_not_fit_is_described():
    ref = jax.new_ref(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="Invalid shape") as caught:
        values.check_fits(ref, jnp.ones(2, jnp.int32), "layers/0/kernel")
    assert "at layers/0/kernel" in str(caught.value)
    assert "float32[2,3]" in str(caught.value) and "int32[2]" in str(caught.value)


@pytest.mark.parametrize(
    "index",
    [
        ..., 0, -1, (0, -1), slice(1, None), (..., 0), np.array([0, 2]), (), None,
        (None, 0), (slice(None), None), (..., None), np.array([True, False, True]),
        np.arange(12).reshape(3, 4) > 4, slice(None, None, -1), (0, slice(3, 0, -1)),
        True,
    ],
    ids=str,
)  # fmt: skip
def test_refs_take_every_index_of_arrays(index):
    array = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    ref = jax.new_ref(array)
    assert np.array_equal(values.read_ref(ref, index), array[index])
    expected = array.copy()
    expected[index] = -array[index]
    values.write_ref(ref, index, jnp.asarray(-array[index]))
    assert np.array_equal(ref[...], expected)
