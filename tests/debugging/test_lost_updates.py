"""What is written under a transform of JAX and not returned is warned of, once."""

import functools
import gc
import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import graftree as nnx
from tests import zoo
from tests.transforms.lifting.test_costs import python_calls

X = jnp.ones((2, 3))


class Net(nnx.Module):
    def __init__(self, rate=0.0):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.count = nnx.Variable(jnp.array(0))
        self.calls = jnp.array(0.0)
        if rate:
            self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(1))

    def __call__(self, x):
        self.count[...] += 1
        y = self.linear(x)
        return self.dropout(y).sum() if hasattr(self, "dropout") else y.sum()


class Plain(zoo.Box):
    def __call__(self, x):
        for layer in vars(self).values():
            if isinstance(layer, nnx.Module):
                x = layer(x)
        return x.sum()


@pytest.fixture
def lost():
    """The texts of the warnings so far; garbage collection has no part in it."""
    gc.disable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", nnx.errors.LostUpdateWarning)
        yield lambda: [str(warning.message) for warning in caught]
    gc.enable()


def call(net, x):
    return net(x)


def over_a_device(f):
    mesh = jax.make_mesh((1,), ("data",))
    spec = PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


TRANSFORMS = {
    "jit": jax.jit,
    "grad": functools.partial(jax.grad, allow_int=True),
    "vmap": lambda f: lambda net, x: jax.vmap(f, (None, 0))(net, x[None]),
    "checkpoint": jax.checkpoint,
    "linearize": lambda f: lambda net, x: jax.vjp(f, net, x),
    "cond": lambda f: lambda net, x: jax.lax.cond(True, f, f, net, x),
    "map": lambda f: (
        lambda net, x: jax.lax.map(
            lambda given: f(*given),
            (jax.tree.map(lambda leaf: leaf[None], net), x[None]),
        )
    ),
    "shard_map": over_a_device,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_lost_write_is_reported(name, lost):
    TRANSFORMS[name](call)(Net(), X)
    line = inspect.getsourcelines(Net.__call__)[1] + 1
    (text, *same) = lost()
    assert set(same) <= {text}
    assert f"written at {__file__}:{line}" in text
    assert "count\n" in text
    assert "nnx.jit" in text


def test_names_function_path_and_line_of_an_optimizer(lost):
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    @jax.jit
    def train_step(model, optimizer):
        grads = nnx.grad(lambda model: model(X).sum())(model)
        optimizer.update(model, grads)

    train_step(model, optimizer)
    (text,) = lost()
    assert text.startswith("`train_step` writes to its arguments")
    assert "model.bias, model.kernel, optimizer." in text
    assert "more" in text


def test_the_compiled_function_warns_once(lost):
    step = jax.jit(lambda net, x: net(x))
    net = Net()
    for _ in range(3):
        step(net, X)
    assert len(lost()) == 1


def test_attributes(lost):
    def step(net):
        net.calls = net.calls + 1
        net.note = "a static attribute is no update"

    jax.jit(step)(Net())
    (text,) = lost()
    assert "net.calls\n" in text


def test_what_is_written_after_it_was_returned_in_part(lost):
    def step(net):
        values = nnx.to_pure_dict(nnx.state(net))
        net.count[...] += 1
        return values

    jax.jit(step)(Net())
    assert len(lost()) == 1


def test_running_averages_and_counts_in_training(lost):
    net = Plain(norm=nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    jax.grad(call)(net, X)
    assert "net.norm.mean, net.norm.var" in lost()[0]
    drawing = Plain(dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    jax.jit(call)(drawing, X)
    assert "net.dropout.rngs.count" in lost()[1]


def test_inside_of_our_own_transforms(lost):
    @nnx.jit
    def step(net):
        return jax.grad(call, allow_int=True)(net, X)

    step(Net())
    assert len(lost()) == 1


# No false alarms.


OUTPUTS = {
    "object": lambda net: net,
    "state": nnx.state,
    "split": lambda net: nnx.split(net)[1],
    "variable": lambda net: net.count,
    "pure dict": lambda net: nnx.to_pure_dict(nnx.state(net, nnx.Variable)),
}


@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_returned(transform, form, lost):
    transform(lambda net, x: (net(x), OUTPUTS[form](net)))(Net(), X)
    assert not lost()


def functional(net, x):
    graphdef, state = nnx.split(net)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def carried(net, x):
    return jax.lax.scan(lambda net, x: (net, net(x)), net, x[None])


def copied(net, x):
    return jax.jit(lambda net, x: jax.tree.map(lambda leaf: leaf, net)(x))(net, x)


def cloned(net, x):
    return jax.jit(lambda net, x: nnx.clone(net)(x))(net, x)


def made_inside(net, x):
    return jax.jit(lambda x: Net()(x))(x)


def made_by_a_transform(net, x):
    def run(keys):
        return jax.vmap(lambda _: Net())(keys).count.get_value()

    def use(x):
        nets = jax.vmap(lambda _: Net())(jnp.arange(2))
        nets.count[...] += 1
        return x

    return jax.jit(run)(jnp.arange(2)), jax.jit(use)(x)


def shapes(net, x):
    return jax.eval_shape(call, net, x), jax.make_jaxpr(call)(net, x)


def with_our_jit(net, x):
    return nnx.jit(call)(net, x), nnx.grad(call)(net, x)


def evaluated(net, x):
    net = Plain(norm=nnx.BatchNorm(3, rngs=nnx.Rngs(0)), drop=nnx.Dropout(0.5))
    net.eval()
    return jax.jit(call)(net, x)


def switched_inside(net, x):
    def predict(net, x):
        net.eval()
        return net(x)

    net = Plain(norm=nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    return jax.jit(predict)(net, x)


def bare_streams(net, x):
    return jax.jit(lambda rngs: rngs.normal((2,)))(nnx.Rngs(0))


def refs(net, x):
    count = nnx.Variable(jnp.array(0), ref=True)

    @jax.jit
    def step(count):
        count[...] += 1

    step(count)
    return count


def sown(net, x):
    class Sows(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x, capture_noop=True)
            return x

    return jax.jit(call)(Sows(), x)


def averaged(net, x):
    ema = nnx.EMA(net, 0.9, only=nnx.Param)

    @jax.jit
    def step(ema, net):
        ema.update(net)
        return ema

    return step(ema, net)


def custom(net, x):
    @jax.custom_vjp
    def f(net, x):
        return net.linear(x).sum()

    f.defvjp(lambda net, x: (f(net, x), (net, x)), lambda kept, g: (kept[0], kept[1]))
    return jax.jit(f)(net, x)


CORRECT = [
    *(functional, carried, copied, cloned, made_inside, made_by_a_transform, shapes),
    *(with_our_jit, evaluated, switched_inside, bare_streams, refs, sown, averaged),
    custom,
]


@pytest.mark.parametrize("program", CORRECT, ids=lambda f: f.__name__)
def test_correct_programs_are_not_warned_of(program, lost):
    program(Net(), X)
    assert not lost()


def test_a_function_that_fails_is_not_warned_of(lost):
    def fails(net, x):
        net(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        jax.jit(fails)(Net(), X)
    assert not lost()


def test_arguments_that_leak_cost_nothing_outside_of_a_trace(lost):
    leaked, net = [], Net()
    steps = functools.partial(python_calls, jax.tree.flatten, net)
    before = steps(), steps()
    jax.jit(lambda net: (leaked.append(net), net(X))[1])(net)
    assert steps() == before[1]
    assert not lost()
    leaked.clear()


def test_nothing_is_kept_alive():
    with jax.checking_leaks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.jit(call)(Net(0.5), X)


@pytest.mark.parametrize("name", ["extra", "bias"])
def test_a_call_of_the_layer_is_no_read_of_what_was_written(lost, name):
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    layer.extra = nnx.Variable(jnp.zeros(3))

    @jax.jit
    def step(layer):
        getattr(layer, name)[...] += 1
        return layer(X)

    step(layer)
    assert len(lost()) == 1
