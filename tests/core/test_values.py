"""What Variables do with the values they hold."""

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from graftree.core import values


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
