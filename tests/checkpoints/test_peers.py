"""Checkpoints of Flax NNX are read, and ours are read there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from graftree import checkpoints
from tests.checkpoints.saved_objects import contents

peer = pytest.importorskip("flax.nnx")
orbax = pytest.importorskip("orbax.checkpoint")

pytestmark = pytest.mark.peers


def make(library, seed=0):
    """A model and an optimizer with moments, of either library."""

    class Block(library.Module):
        def __init__(self, rngs):
            self.linear = library.Linear(2, 2, rngs=rngs)
            self.norm = library.BatchNorm(2, rngs=rngs)
            self.dropout = library.Dropout(0.5, rngs=rngs)

    class Model(library.Module):
        def __init__(self, rngs):
            linear = library.Linear(2, 2, rngs=rngs)
            self.first = library.Sequential(linear, Block(rngs))
            self.blocks = library.List([Block(rngs) for _ in range(2)])

    model = Model(library.Rngs(seed))
    optimizer = library.Optimizer(model, optax.adam(1e-2), wrt=library.Param)
    grads = jax.tree.map(jnp.ones_like, library.state(model, library.Param))
    optimizer.update(model, grads)
    return model, optimizer


@pytest.fixture(scope="module")
def theirs():
    return make(peer)


def save_standard(folder, item):
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, item)


def save_by_manager(folder, args):
    with orbax.CheckpointManager(folder.parent) as manager:
        manager.save(int(folder.name), args=args)


def save_pytree(folder, item):
    orbax.PyTreeCheckpointer().save(folder, item)


def standard(item):
    return orbax.args.StandardSave(peer.state(item))


def itself(x):
    return x


def model_of(model, optimizer):
    return model


# The way to save it, the form of it that is saved, and what of a model and optimizer.
SAVED = {
    "State": (save_standard, peer.state, model_of),
    "pure dict": (save_standard, lambda x: peer.to_pure_dict(peer.state(x)), model_of),
    "State, PyTree": (save_pytree, peer.state, model_of),
    "Module with a list": (save_pytree, itself, model_of),
    "Module": (save_standard, itself, lambda model, _: model.blocks[0]),
    "model and optimizer": (save_standard, peer.state, lambda *both: both),
    "only item of a manager": (save_by_manager, standard, model_of),
}


@pytest.mark.parametrize("name", SAVED)
def test_objects_of_the_peer_are_read(tmp_path, theirs, name):
    save, form, part = SAVED[name]
    save(tmp_path / "3", form(part(*theirs)))
    restored = checkpoints.restore(tmp_path / "3", part(*make(nnx, seed=1)))
    assert contents(restored) == contents(part(*theirs), peer)


def test_steps_of_a_manager_are_read(tmp_path, theirs):
    args = dict(zip(("model", "optimizer"), map(standard, theirs), strict=True))
    save_by_manager(tmp_path / "3", orbax.args.Composite(**args))
    model, optimizer = make(nnx, seed=1)
    series = checkpoints.Checkpoints(tmp_path)
    assert series.restore_latest(model=model, optimizer=optimizer) == 3
    assert contents((model, optimizer)) == contents(theirs, peer)
    again = dict(zip(args, make(nnx, seed=2), strict=True))
    again = checkpoints.restore(tmp_path / "3", again)
    assert contents(again["model"]) == contents(theirs[0], peer)


def test_what_only_the_file_has_is_left_there_in_so_many_words(tmp_path):
    save_pytree(tmp_path / "a", {"text": "x", "step": 3, "x": np.ones(2)})
    like = {"step": jnp.int32(0), "x": np.zeros(2)}
    with pytest.raises(ValueError, match="unexpected: text"):
        checkpoints.restore(tmp_path / "a", like)
    restored = checkpoints.restore(tmp_path / "a", like, unexpected="text")
    assert restored["step"].dtype == jnp.int32 and restored["step"] == 3
    assert type(restored["x"]) is np.ndarray


@pytest.mark.parametrize("is_abstract", [False, True])
def test_peer_reads_ours(tmp_path, is_abstract):
    ours = make(nnx)
    checkpoints.save(tmp_path / "a", ours)
    target = peer.eval_shape(lambda: make(peer, 1)) if is_abstract else make(peer, 1)
    if is_abstract:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda x: x.update(sharding=one), peer.state(target))
    with orbax.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "a", peer.state(target))
    assert contents(state, peer) == contents(ours)


def test_manager_reads_our_steps(tmp_path):
    model, optimizer = make(nnx)
    with checkpoints.Checkpoints(tmp_path) as series:
        series.save(7, model=model, optimizer=optimizer, metrics=nnx.metrics.Average())
    target = orbax.args.StandardRestore(peer.state(make(peer, 1)[0]))
    with orbax.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [7]
        read = manager.restore(7, args=orbax.args.Composite(model=target))
    assert contents(read["model"], peer) == contents(model)
