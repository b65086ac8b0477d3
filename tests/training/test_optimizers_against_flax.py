"""Optimizer against its peer: the same params, gradients and Optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import graftree as nnx

pytestmark = [
    pytest.mark.peers,
    # Optax and Flax warn about their own deprecations.
    pytest.mark.filterwarnings("ignore"),
]


def is_kernel(params):
    """A mask, for States of Variables and of arrays alike."""
    return jax.tree.map_with_path(
        lambda path, _: path[-1].key == "kernel", params, is_leaf=is_variable
    )


def is_variable(x):
    return hasattr(x, "get_metadata")


def kind_of(params):
    return jax.tree.map(lambda chosen: "a" if chosen else "b", is_kernel(params))


TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "novograd": lambda: optax.novograd(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 10)),
    "masked": lambda: optax.masked(optax.adam(0.1), is_kernel),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, kind_of
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.0, 10)
    ),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "add_noise_key": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
    "plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "lbfgs": lambda: optax.lbfgs(linesearch=None),
}


def train(library, tx):
    """Params and optimizer state after a few steps with fixed gradients."""
    kernel, *rest = np.random.default_rng(0).normal(size=(3, 3, 3)).astype(np.float32)
    numbers = kernel, *(x[0] for x in rest)
    kernel, bias, scale = map(library.Param, map(jnp.array, numbers))
    dense = library.Dict(kernel=kernel, bias=bias)
    model = library.Dict(dense=dense, scale=library.Dict(kernel=scale))
    optimizer = library.Optimizer(model, tx, wrt=library.Param)
    for _ in range(3):
        grads = jax.tree.map(lambda w: jnp.sin(3 * w) + w, library.state(model))
        optimizer.update(model, grads, value=jnp.array(1.0))
    return jax.tree.leaves_with_path((model, library.state(optimizer)))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_training_gives_the_state_of_the_peer(name):
    flax_nnx = pytest.importorskip("flax.nnx")
    with jax.numpy_rank_promotion("allow"):
        ours = train(nnx, TRANSFORMATIONS[name]())
        theirs = train(flax_nnx, TRANSFORMATIONS[name]())
    for (our_path, our_leaf), (path, leaf) in zip(ours, theirs, strict=True):
        assert jax.tree_util.keystr(our_path) == jax.tree_util.keystr(path)
        assert our_leaf.dtype == leaf.dtype
        np.testing.assert_array_equal(data(our_leaf), data(leaf))


def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
