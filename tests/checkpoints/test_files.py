"""`nnx.checkpoints.save` and `restore`: one object in one folder."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from graftree import checkpoints, errors


class Model(nnx.Module):
    """Every kind of leaf there is."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.tied = self.linear.kernel
        self.nothing = nnx.Param(None)
        self.tree = nnx.Variable({"x": rngs.normal((2,)), "y": [rngs.normal((3,))]})
        self.number = nnx.Variable(3.5)
        self.raw = rngs.normal((2,))
        self.tiny = nnx.Variable(rngs.normal((4,)).astype(jnp.float8_e4m3fn))
        self.half = nnx.Variable(rngs.normal((4,)).astype(jnp.bfloat16))
        self.empty = nnx.Param(jnp.zeros((0, 3)))
        self.array = nnx.Variable(np.asarray(rngs.normal((3,))))
        self.weak = nnx.Variable(jnp.asarray(2.0))
        self.ref = nnx.Variable(rngs.normal((3,)), ref=True)
        self.keys = nnx.Variable(jax.random.split(jax.random.key(1, impl="rbg"), 2))


def numbers(obj):
    """The dtype and the content of each leaf."""
    found = []
    for leaf in jax.tree.leaves(nnx.as_pure(nnx.to_arrays(nnx.state(obj)))):
        dtype = getattr(leaf, "dtype", type(leaf))
        if isinstance(leaf, jax.Array) and jnp.issubdtype(dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.append((str(dtype), np.shape(leaf), np.asarray(leaf).tobytes()))
    return found


def adam(seed):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model))
    return model, optimizer


def train_state(seed):
    _, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(seed)))
    return nnx.TrainState.create(GRAPHDEF, params=params, tx=ADAM)


GRAPHDEF, ADAM = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), optax.adam(1e-3)
OBJECTS = {
    "Module": lambda seed: Model(nnx.Rngs(seed)),
    "State": lambda seed: nnx.state(Model(nnx.Rngs(seed))),
    "model and Optimizer": adam,
    "Rngs": lambda seed: nnx.Rngs(seed, params=seed + 1),
    "metric": lambda seed: nnx.MultiMetric(loss=nnx.metrics.Average()),
    "EMA": lambda seed: nnx.EMA(nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), 0.9),
    "Variable": lambda seed: nnx.Param(jnp.full(3, seed)),
    "nothing": lambda seed: nnx.List([]),
    "dict": lambda seed: {"rngs": nnx.Rngs(seed), "step": seed, "x": [jnp.ones(seed)]},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_restored_object_has_every_value_and_the_other_stays(tmp_path, name):
    saved, like = OBJECTS[name](1), OBJECTS[name](1 if name == "dict" else 2)
    before = numbers(like)
    checkpoints.save(tmp_path / "a", saved)
    restored = checkpoints.restore(tmp_path / "a", like)
    assert type(restored) is type(saved)
    assert numbers(restored) == numbers(saved)
    assert numbers(like) == before


def test_failed_checks_are_listed_together(tmp_path):
    checkpoints.save(tmp_path / "a", {"a": jnp.ones(2), "b": jnp.ones(2), "c": 1})
    like = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16), "d": jnp.ones(1)}
    with pytest.raises(ValueError) as caught:
        checkpoints.restore(tmp_path / "a", like)
    for path in ("a", "b", "c", "d"):
        assert f"{path}" in str(caught.value)


def test_existing_folder_is_refused_without_overwrite(tmp_path):
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError, match="overwrite=True"):
        checkpoints.save(tmp_path / "a", nnx.Rngs(1))
    checkpoints.save(tmp_path / "a", nnx.Rngs(1), overwrite=True)
    assert numbers(checkpoints.restore(tmp_path / "a", nnx.Rngs(0))) == numbers(
        nnx.Rngs(1)
    )
    assert os.listdir(tmp_path) == ["a"]


def test_missing_folder_is_one_clear_error(tmp_path):
    with pytest.raises(errors.CheckpointError, match="There is no checkpoint at"):
        checkpoints.restore(pathlib.Path(tmp_path / "a"), nnx.Rngs(0))
