"""Calls of functions that compute next to nothing, with the MLP or its parts.

Each operation is written for plain JAX and for objects, see `groups.Made`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons, steps
from benchmarks.gauges import Operation
from benchmarks.groups import Made


def _inputs() -> jax.Array:
    return perceptrons.batch()["x"]


def _called(model: Any, x: jax.Array) -> Any:
    return model(x)


# -------------------------------------------------------------- the model as an object


def raw(depth: int) -> Operation:
    """Forward call in plain JAX: ``jax.jit`` on a flat list of arrays."""
    leaves, treedef = jax.tree.flatten(perceptrons.parameters(depth))

    @jax.jit
    def function(leaves, x):
        return perceptrons.apply(jax.tree.unflatten(treedef, leaves), x)

    return partial(function, leaves, _inputs())


def nnx(nnx: Any, depth: int, **mode: bool) -> Operation:
    """Forward call of an object, for Graftree or Flax NNX, in one of three modes."""
    function = nnx.jit(lambda model, x: model(x), **mode)
    return partial(function, perceptrons.nnx_model(nnx, depth), _inputs())


def equinox(equinox: Any, depth: int) -> Operation:
    """Forward call of an Equinox module."""
    function = equinox.filter_jit(lambda model, x: model(x))
    return partial(function, perceptrons.equinox_model(equinox, depth), _inputs())


# ----------------------------------- a pytree as the argument of jax.jit, flattened


def _plain(function: Any, *args: Any) -> Operation:
    return partial(jax.jit(lambda *args: function(*args)), *args)


def _raw_model(depth: int) -> Operation:
    return _plain(perceptrons.apply, perceptrons.parameters(depth), _inputs())


PLAIN_MODEL = Made(
    _raw_model,
    lambda nnx, depth: _plain(_called, perceptrons.nnx_model(nnx, depth), _inputs()),
    lambda equinox, depth: _plain(
        _called, perceptrons.equinox_model(equinox, depth), _inputs()
    ),
)


def _zero(tree: Any) -> float:
    return 0.0


PLAIN_STATE = Made(
    lambda count: _plain(_zero, {i: jnp.ones(2) for i in range(count)}),
    lambda nnx, count: _plain(
        _zero, nnx.State({i: nnx.Param(jnp.ones(2)) for i in range(count)})
    ),
)


# ------------------------------------------ nnx.jit with States and tuples of objects


def _state_call(nnx: Any, depth: int, **mode: bool) -> Operation:
    """The MLP, merged from a State in the function."""
    graphdef, state = nnx.split(perceptrons.nnx_model(nnx, depth))
    function = nnx.jit(lambda state, x: nnx.merge(graphdef, state)(x), **mode)
    return partial(function, state, _inputs())


def _state_step(nnx: Any, depth: int, **mode: bool) -> Operation:
    state = nnx.state(perceptrons.nnx_model(nnx, depth))
    return _in_a_loop(nnx.jit(_decayed, **mode), state)


def _decayed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 0.999, tree)


def _in_a_loop(step: Any, latest: Any) -> Operation:
    """New parameters from those of the call before."""

    def operation():
        nonlocal latest
        latest = step(latest)
        return jax.tree.leaves(latest)

    return operation


def _raw_pair(depth: int) -> Any:
    params = perceptrons.parameters(depth)
    return params, steps.ADAM.init(params)


def _pair(nnx: Any, depth: int) -> Any:
    model = perceptrons.nnx_model(nnx, depth)
    return model, nnx.Optimizer(model, steps.ADAM, wrt=nnx.Param)


def _pair_call(nnx: Any, depth: int, **mode: bool) -> Operation:
    """The model of a tuple that is one argument."""
    function = nnx.jit(lambda pair, x: pair[0](x), **mode)
    return partial(function, _pair(nnx, depth), _inputs())


STATE = Made(_raw_model, _state_call)
STATE_TO_STATE = Made(
    lambda depth: _in_a_loop(jax.jit(_decayed), perceptrons.parameters(depth)),
    _state_step,
)
PAIR = Made(
    lambda depth: _plain(
        lambda pair, x: perceptrons.apply(pair[0], x), _raw_pair(depth), _inputs()
    ),
    _pair_call,
)
SPLIT_PAIR = Made(
    lambda depth: partial(jax.tree.flatten, _raw_pair(depth)),
    lambda nnx, depth, **_: partial(nnx.split, _pair(nnx, depth)),
)


# ------------------------------------------------------------------- outside of a trace


def _skip(_: Any, x: jax.Array) -> jax.Array:
    return x


def _raw_cond(depth: int, captured: bool) -> Operation:
    params = perceptrons.parameters(depth)
    return partial(jax.lax.cond, True, perceptrons.apply, _skip, params, _inputs())


def _cond(nnx: Any, depth: int, captured: bool, **mode: bool) -> Operation:
    """``nnx.cond`` over an object, as an operand or captured by the branches."""
    model, x = perceptrons.nnx_model(nnx, depth), _inputs()
    if captured:
        return lambda: nnx.cond(True, lambda x: model(x), lambda x: x, x, **mode)
    return partial(nnx.cond, True, _called, _skip, model, x, **mode)


COND = Made(_raw_cond, _cond)

# Making the MLP, with random parameters: eagerly, as one makes a model. Raw JAX draws
# the same kernels with the same initializer; Equinox draws its own.
CONSTRUCTION = Made(
    lambda depth: partial(perceptrons.parameters, depth),
    lambda nnx, depth: partial(perceptrons.nnx_new, nnx, depth),
    lambda equinox, depth: partial(perceptrons.equinox_new, equinox, depth),
)
