"""Checkpoints of Flax NNX are read, and ours are read there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from graftree import checkpoints

peer = pytest.importorskip("flax.nnx")
orbax = pytest.importorskip("orbax.checkpoint")

pytestmark = pytest.mark.peers


def make(library, seed=0):
    """A model and an optimizer with moments, of either library."""

    class Block(library.Module):
        def __init__(self, rngs):
            self.linear = library.Linear(4, 4, rngs=rngs)
            self.norm = library.BatchNorm(4, rngs=rngs)
            self.dropout = library.Dropout(0.5, rngs=rngs)

    class Model(library.Module):
        def __init__(self, rngs):
            self.first = library.Sequential(
                library.Linear(3, 4, rngs=rngs), Block(rngs)
            )
            self.blocks = library.List([Block(rngs) for _ in range(2)])

    model = Model(library.Rngs(seed))
    optimizer = library.Optimizer(model, optax.adam(1e-2), wrt=library.Param)
    grads = jax.tree.map(jnp.ones_like, library.state(model, library.Param))
    optimizer.update(model, grads)
    return model, optimizer


def numbers(library, obj):
    """The leaves of an object, or of a state of it, by path."""
    found = {}
    for path, leaf in library.to_flat_state(library.state(obj)):
        value = leaf.get_value()
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        found[tuple(map(str, path))] = np.asarray(value).tobytes()
    return found


@pytest.fixture(scope="module")
def theirs():
    return make(peer)


def save_standard(folder, item):
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, item)


def save_pytree(folder, item):
    orbax.PyTreeCheckpointer().save(folder, item)


WRITERS = {
    "State": lambda folder, model: save_standard(folder, peer.state(model)),
    "pure dict": lambda folder, model: save_standard(
        folder, peer.to_pure_dict(peer.state(model))
    ),
    "State, PyTree": lambda folder, model: save_pytree(folder, peer.state(model)),
    "Module with a list": save_pytree,
}


@pytest.mark.parametrize("name", WRITERS)
def test_model_of_the_peer_is_read(tmp_path, theirs, name):
    WRITERS[name](tmp_path / "a", theirs[0])
    restored = checkpoints.restore(tmp_path / "a", make(nnx, seed=1)[0])
    assert numbers(nnx, restored) == numbers(peer, theirs[0])


def test_module_of_the_peer_is_read(tmp_path, theirs):
    save_standard(tmp_path / "a", theirs[0].blocks[0])
    restored = checkpoints.restore(tmp_path / "a", make(nnx, seed=1)[0].blocks[0])
    assert numbers(nnx, restored) == numbers(peer, theirs[0].blocks[0])


def test_model_and_optimizer_of_the_peer_are_read(tmp_path, theirs):
    save_standard(tmp_path / "a", peer.state(theirs))
    restored = checkpoints.restore(tmp_path / "a", make(nnx, seed=1))
    assert numbers(nnx, restored) == numbers(peer, theirs)


def test_steps_of_a_manager_are_read(tmp_path, theirs):
    with orbax.CheckpointManager(tmp_path) as manager:
        args = {
            name: orbax.args.StandardSave(peer.state(obj))
            for name, obj in zip(("model", "optimizer"), theirs, strict=True)
        }
        manager.save(3, args=orbax.args.Composite(**args))
        manager.wait_until_finished()
    model, optimizer = make(nnx, seed=1)
    series = checkpoints.Checkpoints(tmp_path)
    assert series.restore_latest(model=model, optimizer=optimizer) == 3
    assert numbers(nnx, (model, optimizer)) == numbers(peer, theirs)
    again = dict(zip(("model", "optimizer"), make(nnx, seed=2), strict=True))
    again = checkpoints.restore(tmp_path / "3", again)
    assert numbers(nnx, again["model"]) == numbers(peer, theirs[0])


def test_what_only_the_file_has_is_left_there_in_so_many_words(tmp_path):
    save_pytree(tmp_path / "a", {"text": "x", "step": 3, "x": np.ones(2)})
    like = {"step": jnp.int32(0), "x": np.zeros(2)}
    with pytest.raises(ValueError, match="unexpected: text"):
        checkpoints.restore(tmp_path / "a", like)
    restored = checkpoints.restore(tmp_path / "a", like, unexpected="text")
    assert restored["step"].dtype == jnp.int32 and restored["step"] == 3
    assert type(restored["x"]) is np.ndarray


def test_only_item_of_a_manager_is_read(tmp_path, theirs):
    with orbax.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=orbax.args.StandardSave(peer.state(theirs[0])))
        manager.wait_until_finished()
    restored = checkpoints.restore(tmp_path / "3", make(nnx, seed=1)[0])
    assert numbers(nnx, restored) == numbers(peer, theirs[0])


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
    assert numbers(peer, state) == numbers(nnx, ours)


def test_manager_reads_our_steps(tmp_path):
    model, optimizer = make(nnx)
    with checkpoints.Checkpoints(tmp_path) as series:
        series.save(7, model=model, optimizer=optimizer, metrics=nnx.metrics.Average())
    target = orbax.args.StandardRestore(peer.state(make(peer, 1)[0]))
    with orbax.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [7]
        read = manager.restore(7, args=orbax.args.Composite(model=target))
    assert numbers(peer, read["model"]) == numbers(nnx, model)
