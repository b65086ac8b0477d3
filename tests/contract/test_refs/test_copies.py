"""Models in array refs are copied, saved and restored; a copy has refs of its own."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.zoo import Box


def model_in_refs():
    w = nnx.Param(jnp.array([1.0, 2.0]), ref=True, tag="x")
    return Box(w=w, w_tied=w, arrays=nnx.Variable(jnp.array(4.0)))


def cloudpickled(x):
    cloudpickle = pytest.importorskip("cloudpickle")
    return pickle.loads(cloudpickle.dumps(x))


MAKERS = {
    "deepcopy": copy.deepcopy,
    "deepcopy in a dict": lambda x: copy.deepcopy({"a": x})["a"],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": cloudpickled,
    "clone": nnx.clone,
    "clone arrays": lambda x: nnx.clone(x, arrays=True),
    "merge copy": lambda x: nnx.merge(*nnx.split(x), copy=True),
}
COPIES = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@jax.jit
def add_one(variable):
    variable[...] += 1


@COPIES
def test_a_copy_of_a_model_has_refs_of_its_own(make):
    model = model_in_refs()
    copied = make(model)
    assert type(copied) is Box and copied.w_tied is copied.w is not model.w
    assert copied.w.ref and copied.w.get_metadata() == model.w.get_metadata()
    assert isinstance(copied.w.get_raw_value(), jax.Ref)
    assert not copied.arrays.ref
    add_one(copied.w)
    assert copied.w[...].tolist() == [2.0, 3.0]
    assert model.w[...].tolist() == [1.0, 2.0]


# JAX 0.12 can't write to bare refs that it unpickled.
@pytest.mark.parametrize(
    "make", [copy.deepcopy, nnx.clone, lambda x: nnx.clone(x, arrays=True)]
)
def test_bare_refs_are_copied_too(make):
    model = nnx.Dict(bare=jax.new_ref(jnp.array(3.0)))
    copied = make(model)
    add_one(copied.bare)
    assert copied.bare[...] == 4 and model.bare[...] == 3


@COPIES
def test_a_copy_of_a_variable_has_a_ref_of_its_own(make):
    variable = model_in_refs().w
    copied = make(variable)
    add_one(copied)
    assert type(copied) is nnx.Param and copied.tag == "x" and copied.ref
    assert isinstance(copied.get_raw_value(), jax.Ref)
    assert copied[...].tolist() == [2.0, 3.0] and variable[...].tolist() == [1.0, 2.0]


def test_a_shallow_copy_shares_the_ref():
    variable = model_in_refs().w
    assert copy.copy(variable).get_raw_value() is variable.get_raw_value()


def test_the_older_copies_of_a_state_are_of_their_own():
    state = nnx.state(model_in_refs(), nnx.Param)
    copied = copy.deepcopy(state)
    add_one(copied["w"])
    assert copied["w"][...].tolist() == [2.0, 3.0]
    assert state["w"][...].tolist() == [1.0, 2.0]


def test_pure_dicts_have_arrays():
    pure = nnx.to_pure_dict(nnx.state(model_in_refs(), nnx.Param))
    assert isinstance(pure["w"], jax.Array)
    model = model_in_refs()
    ref = model.w.get_raw_value()
    nnx.update(model, {"w": jnp.zeros(2)})
    assert model.w.get_raw_value() is ref and ref[...].tolist() == [0.0, 0.0]


def test_a_state_of_arrays_is_saved_by_orbax_and_restored_into_the_refs(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with nnx.var_defaults(ref=True):
        model, other = [nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    ref = other.kernel.get_raw_value()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_arrays(nnx.state(model)))
        checkpointer.wait_until_finished()
        target = nnx.to_arrays(nnx.state(other))
        nnx.update(other, checkpointer.restore(tmp_path / "state", target))
    assert other.kernel.get_raw_value() is ref
    np.testing.assert_array_equal(ref[...], model.kernel[...])


def test_orbax_refuses_refs(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="Unsupported type"):
            checkpointer.save(tmp_path / "state", nnx.state(model_in_refs(), nnx.Param))


# ------------------------------------------------------------------------------ streams


def streams():
    with nnx.var_defaults(ref=True):
        return nnx.Rngs(0, params=1)


@pytest.mark.parametrize("split", [nnx.split_rngs, nnx.fork_rngs])
def test_streams_in_refs_are_not_split_in_place(split):
    rngs = streams()
    key = rngs.params.key.get_raw_value()
    size = {"splits": 3} if split is nnx.split_rngs else {"split": 3}
    with pytest.raises(ValueError, match="held by refs"):
        split(rngs, **size)
    assert rngs.params.key.get_raw_value() is key and rngs.params.count[...] == 0


@pytest.mark.parametrize("split", [nnx.split_rngs, nnx.fork_rngs])
def test_streams_in_refs_are_split_into_new_ones(split):
    rngs = streams()
    size = {"splits": 3} if split is nnx.split_rngs else {"split": 3}
    new = split(rngs, **size, graph_updates=False)
    expected = split(nnx.Rngs(0, params=1), **size, graph_updates=False)
    assert new.params.key.shape == (3,) and rngs.params.key.shape == ()
    np.testing.assert_array_equal(
        jax.random.key_data(new.params.key[...]),
        jax.random.key_data(expected.params.key[...]),
    )
    assert rngs.params.count[...] == 1


def test_a_single_fork_of_streams_in_refs_draws_on():
    rngs = streams()
    forked = rngs.fork()
    assert (forked.params() != rngs.params()).all() and rngs.params.count[...] == 2


def test_reseeding_writes_into_the_refs():
    rngs = streams()
    key = rngs.params.key.get_raw_value()
    rngs.params()
    nnx.reseed(rngs, params=5)
    assert rngs.params.key.get_raw_value() is key
    assert rngs.params.count[...] == 0
    assert rngs.params.key[...] == nnx.Rngs(params=5).params()
