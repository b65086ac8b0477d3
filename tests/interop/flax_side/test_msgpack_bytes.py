"""Bytes go both ways between Flax and here."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.interop.flax_side import msgpack_bytes
from tests.interop.flax_side import cases


@pytest.mark.peers
def test_each_reads_what_the_other_wrote():
    serialization = pytest.importorskip("flax.serialization")
    tree = {"layers": [jnp.ones((2, 3)), (1, 2.5)], "leaves": cases.LEAVES}
    for write, read in (
        (serialization, msgpack_bytes),
        (msgpack_bytes, serialization),
    ):
        restored = read.from_bytes(tree, write.to_bytes(tree))
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        for new, old in zip(*map(jax.tree.leaves, (restored, tree)), strict=True):
            assert str(new) == str(old)


@pytest.mark.peers
@pytest.mark.parametrize("tree", [np.arange(9), {"a": np.arange(9), "b": [np.ones(9)]}])
def test_large_arrays_are_in_the_same_pieces(monkeypatch, tree):
    serialization = pytest.importorskip("flax.serialization")
    for module in (serialization, msgpack_bytes):
        monkeypatch.setattr(module, "MAX_CHUNK_SIZE", 16)
    data = msgpack_bytes.msgpack_serialize(tree)
    assert data == serialization.msgpack_serialize(tree)
    restored = msgpack_bytes.msgpack_restore(data)
    jax.tree.map(np.testing.assert_array_equal, restored, tree)


def test_pieces_keep_shape_and_dtype(monkeypatch):
    monkeypatch.setattr(msgpack_bytes, "MAX_CHUNK_SIZE", 20)
    tree = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": jnp.arange(3)}
    restored = msgpack_bytes.msgpack_restore(msgpack_bytes.msgpack_serialize(tree))
    np.testing.assert_array_equal(restored["a"], tree["a"], strict=True)


def test_in_place_leaves_the_tree_as_it_is():
    tree = {"a": jnp.ones(2)}
    msgpack_bytes.msgpack_serialize(tree, in_place=True)
    assert isinstance(tree["a"], jax.Array)


@pytest.mark.parametrize("dtype", ["<U3", "S2", [("x", "i4")]])
def test_dtypes_that_could_not_be_read_back_are_refused(dtype):
    with pytest.raises(ValueError, match="not supported for serialization"):
        msgpack_bytes.to_bytes({"a": np.zeros(2, dtype)})


def test_without_msgpack_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match="pip install msgpack"):
        msgpack_bytes.to_bytes({})


def test_a_state_goes_to_bytes_and_back():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    state = nnx.state(model)
    data = msgpack_bytes.to_bytes(state)
    zeros = jax.tree.map(jnp.zeros_like, state)
    restored = msgpack_bytes.from_bytes(zeros, data)
    assert isinstance(restored["layers"][0]["kernel"], nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_what_a_state_lacks_is_named_by_its_path():
    state = nnx.State({"a": {"b": nnx.Param(jnp.ones(1))}})
    with pytest.raises(ValueError, match=r"\{'b'\}.*at path \./a"):
        msgpack_bytes.from_bytes(state, msgpack_bytes.to_bytes({"a": {}}))
