"""What a type checker sees in user code; pyright and mypy read this, nothing runs it.

Each ``assert_type`` is a promise: if an annotation of the package gets less exact, the
type checker fails here.
"""

# pyright: basic

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import graftree as nnx


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2, 1, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.scale


def constructors(rngs: nnx.Rngs, x: jax.Array) -> None:
    net = Net(rngs)
    assert_type(net, Net)
    assert_type(net(x), jax.Array)
    assert_type(net.linear, nnx.Linear)
    assert_type(nnx.Linear(3, 4, rngs=rngs), nnx.Linear)
    assert_type(nnx.Linear(3, 4, rngs=rngs)(x), jax.Array)
    assert_type(nnx.Rngs(0), nnx.Rngs)
    assert_type(nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param), nnx.Optimizer[Net])
    assert_type(nnx.metrics.Average(), nnx.metrics.Average)


def variables(array: jax.Array) -> None:
    param = nnx.Param(array)
    assert_type(param, nnx.Param[jax.Array])
    assert_type(param.get_value(), jax.Array)
    assert_type(nnx.Variable(1.5).get_value(), float)
    assert_type(nnx.Param({"a": array})[...], dict[str, jax.Array])
    assert_type(param[...], jax.Array)
    assert_type(param[0], jax.Array)
    param[...] = param[...] + 1
    param[0] = 1.0
    param[...] += 1


def operators(param: nnx.Param[jax.Array], array: jax.Array) -> None:
    assert_type(param + 1, jax.Array)
    assert_type(1 - param, jax.Array)
    assert_type(array * param, jax.Array)
    assert_type(array @ param, jax.Array)
    assert_type(param @ array, jax.Array)
    assert_type(param / param, jax.Array)
    assert_type(-param, jax.Array)
    assert_type(param == 1, jax.Array)
    assert_type(param < array, jax.Array)
    assert_type(float(param), float)
    assert_type(nnx.Variable(1) + 1, Any)


def functional_form(model: Net) -> None:
    assert_type(nnx.clone(model), Net)
    assert_type(nnx.graphdef(model), nnx.GraphDef[Net])
    assert_type(nnx.state(model), nnx.State)
    assert_type(nnx.state(model, nnx.Param), nnx.State)
    graphdef, state = nnx.split(model)
    assert_type(graphdef, nnx.GraphDef[Net])
    assert_type(state, nnx.State)
    assert_type(nnx.merge(graphdef, state), Net)
    _, params, rest = nnx.split(model, nnx.Param, ...)
    assert_type(params, nnx.State)
    assert_type(rest, nnx.State)
    _, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    assert_type(rest, nnx.State)
    a, b = nnx.state(model, nnx.Param, ...)
    assert_type(b, nnx.State)


def transforms(model: Net, x: jax.Array) -> None:
    def predict(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    @nnx.jit
    def decorated(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    @nnx.jit(static_argnums=1)
    def with_options(model: Net, factor: int) -> jax.Array:
        return model(x) * factor

    assert_type(nnx.jit(predict)(model, x), jax.Array)
    assert_type(decorated(model, x), jax.Array)
    assert_type(with_options(model, 2), jax.Array)
    assert_type(decorated.eval_shape(model, x), jax.Array)
    assert_type(decorated.lower(model, x).compile()(model, x), jax.Array)
    assert_type(nnx.jit_partial(predict, model, graph=False)(x), jax.Array)
    assert_type(nnx.cached_partial(decorated, model)(x), jax.Array)


def training(model: Net, x: jax.Array) -> None:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    loss, grads = nnx.value_and_grad(lambda model: model(x).sum())(model)
    optimizer.update(model, grads)
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy()
    )
    metrics.update(values=loss, logits=model(x), labels=jnp.zeros(1, int))
