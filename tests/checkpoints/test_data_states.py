"""The states of data iterators as JSON."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import errors
from graftree.checkpoints import data_states
from tests.checkpoints.saved_objects import Iterator

STATES = [
    None,
    [True, -1, 2**200, 1.5, "text"],
    {"nested": {"a": [1, {"b": ()}]}, "$odd": 1},
    {1: "one", (2, 3): b"\x00\xff", None: [b""]},
    (1, (2, "three")),
    float("inf"),
    np.random.default_rng(3).bit_generator.state,
    np.random.RandomState(3).get_state(),
]


def stored(folder, states):
    """A folder with the states of several processes."""
    each = [data_states.to_json("data", Iterator(s))["processes"][0] for s in states]
    (folder / "metadata").write_text(json.dumps({"processes": each}, allow_nan=False))
    return folder


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_states_come_back_as_they_were(tmp_path, state):
    back = data_states.from_json("data", stored(tmp_path, [state]), 0, 1)
    assert repr(back) == repr(state)  # types too


@pytest.mark.parametrize("dtype", ["uint32", ">i2", "float16", "complex64", "bool"])
def test_arrays_come_back_with_their_dtype(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = data_states.from_json("data", stored(tmp_path, [array]), 0, 1)
    assert back.dtype == array.dtype and back.flags.writeable
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [1, {2}]}, r"data\['a'\]\[1\] is a builtins.set"),
        ({"a": jnp.ones(1)}, r"data\['a'\] is a jax"),
        (np.array([object()]), "data is a numpy.ndarray"),
        ({object(): 1}, "data, key .* is a builtins.object"),
    ],
)
def test_anything_else_is_refused_by_name(state, where):
    with pytest.raises(TypeError, match=where):
        data_states.to_json("data", Iterator(state))


def test_each_process_gets_its_own_state(tmp_path):
    assert data_states.from_json("data", stored(tmp_path, [10, 20, 30]), 1, 3) == 20


def test_other_process_count_is_one_clear_error(tmp_path):
    folder = stored(tmp_path, [10, 20])
    with pytest.raises(errors.CheckpointError) as caught:
        data_states.from_json("data", folder, 0, 4)
    assert "saved by 2 processes" in str(caught.value)
    assert "there are 4 now" in str(caught.value)


def test_equal_states_serve_any_number_of_processes(tmp_path):
    assert data_states.from_json("data", stored(tmp_path, [10, 10]), 3, 4) == 10


def test_objects_of_ours_are_no_iterators():
    class Model(nnx.Module):
        get_state = set_state = lambda self: None

    assert data_states.is_iterator(Iterator(0))
    assert not data_states.is_iterator(Model()) and not data_states.is_iterator([1])
