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


def attributes_of_layers(rngs: nnx.Rngs) -> None:
    linear = nnx.Linear(3, 4, rngs=rngs)
    assert_type(linear.kernel, nnx.Param[jax.Array])
    assert_type(linear.kernel[...], jax.Array)
    assert_type(linear.bias, nnx.Param[jax.Array] | None)
    assert_type(linear.in_features, int)
    assert_type(nnx.Conv(1, 2, 3, rngs=rngs).kernel, nnx.Param[jax.Array])
    assert_type(nnx.Embed(3, 4, rngs=rngs).embedding, nnx.Param[jax.Array])
    assert_type(nnx.BatchNorm(3, rngs=rngs).mean, nnx.BatchStat[jax.Array])
    assert_type(nnx.LayerNorm(3, rngs=rngs).scale, nnx.Param[jax.Array] | None)
    assert_type(nnx.Dropout(0.5).rngs, nnx.RngStream | None)
    attention = nnx.MultiHeadAttention(2, 4, rngs=rngs)
    assert_type(attention.query, nnx.LinearGeneral)
    assert_type(attention.cached_key, nnx.Cache[jax.Array] | None)
    assert_type(nnx.GRUCell(3, 4, rngs=rngs).dense_h, nnx.Linear)
    assert_type(nnx.LoRA(3, 1, 4, rngs=rngs).lora_a, nnx.Variable[jax.Array])
    assert_type(rngs.params(), jax.Array)
    assert_type(rngs.fork(), nnx.Rngs)


class Containers(nnx.Module):
    def __init__(self, layer: nnx.Linear):
        self.layers = nnx.List([layer, layer])
        self.heads = nnx.Dict(a=layer)
        self.marked = nnx.data([nnx.Param(1.0)])
        self.sizes = nnx.static({"a": 1})
        self.cache: nnx.Cache[jax.Array] | None = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        assert_type(self.layers[0], nnx.Linear)
        assert_type(self.layers[:1], list[nnx.Linear])
        assert_type(self.heads, nnx.Dict[nnx.Linear])
        assert_type(self.heads.a, nnx.Linear)
        assert_type(self.heads["a"], nnx.Linear)
        assert_type(nnx.Dict([("a", self.layers[0])]).a, nnx.Linear)
        assert_type(self.marked, list[nnx.Param[float]])
        assert_type(self.sizes, dict[str, int])
        assert_type(self.perturb("x", x), jax.Array)
        self.heads.b = self.layers[0]
        self.cache = nnx.Cache(x)
        for layer in self.layers:
            x = layer(x)
        return x


@nnx.dataclass
class Fields(nnx.Pytree):
    array: jax.Array = nnx.data()
    size: int = nnx.static(default=1)
    names: dict[str, int] = nnx.static(default_factory=dict)


@nnx.dataclass(kw_only=True)
class KeywordFields(nnx.Module):
    array: jax.Array
    bias: nnx.Param[jax.Array] | None = nnx.data(default=None)


def dataclasses(array: jax.Array) -> None:
    assert_type(Fields(array), Fields)
    assert_type(Fields(array, 2, names={}).size, int)
    assert_type(KeywordFields(array=array), KeywordFields)


def random_streams(rngs: nnx.Rngs) -> None:
    @nnx.split_rngs(splits=5)
    def create(rngs: nnx.Rngs) -> Net:
        return Net(rngs)

    assert_type(create(rngs), Net)
    assert_type(rngs.dropout, nnx.RngStream)
    assert_type(rngs.normal((2, 3)), jax.Array)


def modules_of_flax() -> None:
    print(nnx.variablelib.Variable, nnx.graph.split, nnx.nn, nnx.initializers.zeros)


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


def signatures(model: Net, x: jax.Array) -> None:
    """Transforms keep the signature, as functions and as decorators."""

    def loss(model: Net, x: jax.Array, *, power: int = 2) -> jax.Array:
        return model(x) ** power

    def loss_and_text(model: Net, x: jax.Array) -> tuple[jax.Array, str]:
        return model(x), ""

    @nnx.vmap(in_axes=(None, 0))
    def mapped(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    @nnx.scan
    def scanned(model: Net, x: jax.Array) -> tuple[Net, int]:
        return model, 1

    @nnx.remat(prevent_cse=False)
    def remat(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    @nnx.custom_vjp
    def custom(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    custom.defvjp(lambda model, x: (model(x), x), lambda x, g: (g, x))
    assert_type(custom(model, x), jax.Array)
    assert_type(mapped(model, x), jax.Array)
    assert_type(scanned(model, x), tuple[Net, int])
    assert_type(remat(model, x), jax.Array)
    assert_type(nnx.vmap(loss, in_axes=(None, 0))(model, x, power=3), jax.Array)
    assert_type(nnx.vmap(lambda rngs: Net(rngs))(nnx.Rngs(0)), Net)
    assert_type(nnx.remat(loss)(model, x, power=3), jax.Array)
    assert_type(nnx.pmap(loss)(model, x), jax.Array)
    assert_type(nnx.jit(loss)(model, x, power=3), jax.Array)
    assert_type(nnx.value_and_grad(loss)(model, x, power=3), tuple[jax.Array, Any])
    assert_type(nnx.grad(loss)(model, x, power=3), Any)
    assert_type(nnx.grad(loss_and_text, has_aux=True)(model, x), tuple[Any, str])
    (_, text), _ = nnx.value_and_grad(loss_and_text, has_aux=True)(model, x)
    assert_type(text, str)
    _, pullback = nnx.vjp(loss, model, x)
    pullback(x)
    assert_type(nnx.checkify(loss)(model, x)[1], jax.Array)
    assert_type(nnx.eval_shape(loss, model, x), jax.Array)
    assert_type(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), Net)


class WithMethods(nnx.Module):
    """Decorated methods are methods."""

    @nnx.jit
    def compiled(self, x: jax.Array, power: int = 2) -> jax.Array:
        return x**power

    @nnx.jit(static_argnums=2)
    def static(self, x: jax.Array, power: int = 2) -> jax.Array:
        return x**power

    @nnx.remat
    def remat(self, x: jax.Array) -> jax.Array:
        return x

    def call_all(self, x: jax.Array) -> None:
        assert_type(self.compiled(x, power=3), jax.Array)
        assert_type(self.static(x, 3), jax.Array)
        assert_type(self.remat(x), jax.Array)


def control_flow(model: Net, x: jax.Array) -> None:
    def branch(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + i

    assert_type(nnx.cond(True, branch, branch, model, x), jax.Array)
    assert_type(nnx.switch(1, [branch, branch], model, x), jax.Array)
    assert_type(nnx.fori_loop(0, 3, body, x), jax.Array)
    assert_type(nnx.fori_loop(0, 3, body, 0.0), jax.Array)
    assert_type(nnx.while_loop(lambda x: x.any(), jnp.sin, x), jax.Array)


def training(model: Net, x: jax.Array) -> None:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    loss, grads = nnx.value_and_grad(lambda model: model(x).sum())(model)
    optimizer.update(model, grads)
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy()
    )
    metrics.update(values=loss, logits=model(x), labels=jnp.zeros(1, int))
    assert_type(metrics.loss, nnx.Metric)
    assert_type(metrics.compute(), dict[str, Any])
    assert_type(nnx.metrics.Average().compute(), jax.Array)
