"""The operations that are timed: one small MLP, written for each library.

The layers are 8 wide, so that next to nothing is computed and what remains is the cost
of the call. Each function here sets up a model and returns an operation without
arguments. All train-step operations compute the same: mean squared error, its gradient,
one step of Adam.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.timing import Operation

WIDTH = 8
BATCH = 4


def data() -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of the train steps."""
    return jnp.ones((BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH))


def arrays(depth: int) -> list[dict[str, jax.Array]]:
    """The parameters of the MLP as a plain pytree."""
    keys = jax.random.split(jax.random.key(0), depth)
    return [
        {"kernel": jax.random.normal(key, (WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)}
        for key in keys
    ]


# ------------------------------------------------------------------------- train step


def raw_step(depth: int, *, donate: bool = False) -> Operation:
    """Train step in plain JAX: ``jax.jit`` on a flat list of arrays, donated or not."""
    leaves, update = _raw_update(depth)
    x, y = data()
    step = jax.jit(update, donate_argnums=0 if donate else ())

    def operation():
        nonlocal leaves
        leaves, loss = step(leaves, x, y)
        return loss

    return operation


def raw_refs_step(depth: int) -> Operation:
    """Train step in plain JAX: ``jax.jit`` on a flat list of array refs."""
    leaves, update = _raw_update(depth)
    refs = [*map(jax.new_ref, leaves)]
    x, y = data()

    @jax.jit
    def step(refs, x, y):
        leaves, loss = update([ref[...] for ref in refs], x, y)
        for ref, leaf in zip(refs, leaves, strict=True):
            ref[...] = leaf
        return loss

    return lambda: step(refs, x, y)


def _raw_update(depth: int) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Parameters and optimizer state, flat; and the step from these to the next."""
    adam = optax.adam(1e-3)
    params = arrays(depth)
    leaves, treedef = jax.tree.flatten((params, adam.init(params)))

    def loss_of(params, x, y):
        for layer in params:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
        return jnp.mean((x - y) ** 2)

    def update(leaves, x, y):
        params, opt_state = jax.tree.unflatten(treedef, leaves)
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = adam.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves((params, opt_state)), loss

    return leaves, update


def nnx_model(nnx: Any, depth: int) -> Any:
    """The MLP, for Graftree or Flax NNX, whichever ``nnx`` is."""

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)]
            )

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    return MLP(nnx.Rngs(0))


def nnx_step(nnx: Any, depth: int, **mode: bool) -> Operation:
    """Train step on objects, for Graftree or Flax NNX, in one of the three modes."""
    model = nnx_model(nnx, depth)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x, y = data()

    def loss_of(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    @nnx.jit(**mode)
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_of, **mode)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return lambda: step(model, optimizer, x, y)


def refs_step(nnx: Any, depth: int) -> Operation:
    """Train step of a model in array refs, under plain ``jax.jit``."""
    with nnx.var_defaults(ref=True):
        model = nnx_model(nnx, depth)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x, y = data()

    @jax.jit
    def step(model, optimizer, x, y):
        graphdef, params = nnx.split(model)

        def loss_of(params):
            return jnp.mean((nnx.merge(graphdef, params)(x) - y) ** 2)

        frozen = nnx.with_vars(params, ref=False)
        loss, grads = jax.value_and_grad(loss_of)(frozen)
        optimizer.update(model, grads)
        return loss

    return lambda: step(model, optimizer, x, y)


def equinox_step(equinox: Any, depth: int) -> Operation:
    """Train step of Equinox: the model and the optimizer state are values."""
    keys = jax.random.split(jax.random.key(0), depth)
    model = [equinox.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]
    adam = optax.adam(1e-3)
    opt_state = adam.init(equinox.filter(model, equinox.is_array))
    x, y = data()

    def loss_of(model, x, y):
        for layer in model:
            x = jax.nn.relu(jax.vmap(layer)(x))
        return jnp.mean((x - y) ** 2)

    @equinox.filter_jit
    def step(model, opt_state, x, y):
        loss, grads = equinox.filter_value_and_grad(loss_of)(model, x, y)
        updates, opt_state = adam.update(grads, opt_state, model)
        return equinox.apply_updates(model, updates), opt_state, loss

    def operation():
        nonlocal model, opt_state
        model, opt_state, loss = step(model, opt_state, x, y)
        return loss

    return operation


# ------------------------------------------------------------------- functional form


def raw_form(name: str, depth: int) -> Operation:
    """What `jax.tree` does for a plain pytree, where ``name`` does it for an object."""
    tree = arrays(depth)
    leaves, treedef = jax.tree.flatten(tree)
    operations = {
        "split": lambda: jax.tree.flatten(tree),
        "merge": lambda: jax.tree.unflatten(treedef, leaves),
        "state": lambda: jax.tree_util.tree_flatten_with_path(tree),
        "update": lambda: jax.tree.map(lambda _, new: new, tree, tree),
        "clone": lambda: jax.tree.map(lambda leaf: leaf, tree),
    }
    return _without_result(operations[name])


def nnx_form(nnx: Any, name: str, depth: int) -> Operation:
    """One function of the functional form, for Graftree or Flax NNX."""
    model = nnx_model(nnx, depth)
    graphdef, state = nnx.split(model)
    operations = {
        "split": lambda: nnx.split(model),
        "merge": lambda: nnx.merge(graphdef, state),
        "state": lambda: nnx.state(model),
        "update": lambda: nnx.update(model, state),
        "clone": lambda: nnx.clone(model),
    }
    return _without_result(operations[name])


def _without_result(operation: Operation) -> Operation:
    """Nothing is computed, so there is nothing to wait for (and to walk through)."""

    def call():
        operation()

    return call
