"""What a transform takes as its function (contract, sections 1.6 and 1.7).

Also which objects plain JAX takes."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, modes, zoo
from tests.contract.test_transforms.matrix import MESH, SPEC, X, cases, flat, tracers_in


class Scale(nnx.Module):
    """Counts its calls."""

    def __init__(self, w=2.0):
        self.w = nnx.Param(jnp.full(2, w))
        self.calls = nnx.BatchStat(jnp.zeros(2))

    def __call__(self, x):
        self.calls[...] += 1
        return self.w * x


class Reader(Scale):
    """A Module that writes nothing."""

    def __call__(self, x):
        return self.w * x


class Tool(nnx.Pytree):
    """A Pytree that is no Module."""

    def __init__(self):
        self.w = nnx.data(jnp.full(2, 2.0))

    def __call__(self, x):
        return self.w * x


# Options with which each decorates a function of one array.
FORMS = {
    "jit": {},
    "grad": {},
    "value_and_grad": {},
    "custom_vjp": {},
    "remat": {},
    "shard_map": {"mesh": MESH, "in_specs": SPEC, "out_specs": SPEC},
    "vmap": {},
    "pmap": {},
    "scan": {"in_axes": 0, "out_axes": 0},
    "make_jaxpr": modes.GRAPH,
    "transform_metadata": {"partition": "p"},
    "vjp": modes.GRAPH,
    "jvp": modes.GRAPH,
}
# How each transform is made of a function; those with arguments call it at once.
MAKERS = {
    **{name: functools.partial(getattr(nnx, name), **FORMS[name]) for name in FORMS},
    "vjp": lambda f: nnx.vjp(f, X, **modes.GRAPH),
    "jvp": lambda f: nnx.jvp(f, (X,), (X,), **modes.GRAPH),
    "eval_shape": lambda f: nnx.eval_shape(f, X),
    "checkify": nnx.checkify,
}
del MAKERS["transform_metadata"]
BOUND = {
    "method": lambda m: m.__call__,
    "partial": lambda m: functools.partial(m.__call__),
    "nested partial": lambda m: functools.partial(
        functools.partial(m.__call__, x=X), x=X
    ),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", BOUND)
def test_methods_bound_to_a_module_are_refused(kind, name):
    facts = "bound methods", f"nnx.{name}", "Scale.__call__", "instance"
    with comparisons.raises(ValueError, *facts):
        MAKERS[name](BOUND[kind](Scale()))


@pytest.mark.parametrize("name", MAKERS)
def test_methods_bound_to_another_pytree_are_functions(name):
    MAKERS[name](Tool().__call__)


@pytest.mark.parametrize("name", MAKERS)
def test_modules_and_classes_are_functions(name):
    if name not in ("vjp", "jvp", "eval_shape"):
        MAKERS[name](Scale())
        MAKERS[name](Scale)


@pytest.mark.parametrize("kind", [Tool, Reader])
def test_control_flow_takes_bound_methods(mode, kind):
    tool = kind()
    assert flat(nnx.cond(True, tool.__call__, tool.__call__, X, **mode)) == [20, 40]
    assert flat(nnx.switch(0, [tool.__call__] * 2, X, **mode)) == [20, 40]
    out = nnx.while_loop(lambda x: x[0] < 30, tool.__call__, X, **mode)
    assert flat(out) == [40, 80]


@pytest.mark.parametrize("kind", [Tool, Reader])
def test_transform_metadata_takes_bound_methods(kind, graph):
    named = nnx.transform_metadata(kind().__call__, partition="x", graph=graph)
    assert flat(jax.vmap(named)(jnp.stack([X, X]))) == [20, 40, 20, 40]


def test_instances_are_arguments(mode):
    model = Scale()
    model_of = lambda x: model.w * x  # noqa: E731
    assert flat(nnx.jit(model_of, **mode)(X)) == [20, 40]
    call = nnx.jit(model, **mode)
    for number in (1, 2, 3):
        assert flat(call(X)) == [20 * number, 40 * number]
        assert flat(model.calls) == [number, number]
        model.w[...] += 2


def test_classes_give_instances(mode):
    model = nnx.jit(Scale, **mode)(3.0)
    assert type(model) is Scale and flat(model(X)) == [30, 60]
    assert flat(model.calls) == [1, 1]


# -------------------------------------------------------------------- decorated methods


@pytest.mark.parametrize("name", "jit remat vmap pmap scan shard_map".split())
def test_decorated_methods_update_their_instance(name, mode):
    class Decorated(Scale):
        __call__ = getattr(nnx, name)(**FORMS[name], **mode)(Scale.__call__)

    model = Decorated()
    for _ in range(2):
        assert flat(model(X)) == [20, 40]
    assert flat(model.calls) == [2, 2]
    assert Decorated.__call__.__name__ == "__call__"


def test_gradients_of_decorated_methods(mode):
    class Decorated(Scale):
        @nnx.grad(argnums=1, **mode)
        def slope(self, x):
            self.calls[...] += 1
            return (self.w * x**2).sum()

    model = Decorated()
    assert flat(model.slope(X)) == [40, 80] and flat(model.calls) == [1, 1]


def test_scanned_methods_carry(mode):
    class Decorated(Scale):
        carry = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, **mode)
        __call__ = carry(Scale.__call__)

    model = Decorated()
    assert model(jnp.array(1.0)) == 4.0 and flat(model.calls) == [1, 1]


def test_static_arguments_of_methods_count_self():
    class Decorated(Scale):
        @nnx.jit(static_argnums=(1,))
        def power(self, n, x):
            assert isinstance(n, int)
            return self.w * x**n

    assert flat(Decorated().power(2, X)) == [200, 800]


def test_jitted_methods_are_descriptors():
    class Decorated(Scale):
        f = nnx.jit(Scale.__call__)

    model = Decorated()
    assert Decorated.f is vars(Decorated)["f"]
    assert isinstance(model.f, functools.partial)
    assert flat(Decorated.f(model, X)) == flat(model.f(X)) == [20, 40]


def test_constructors_can_be_decorated():
    traces = []

    class Made(nnx.Module):
        @nnx.jit(static_argnums=(1,))
        def __init__(self, size, key):
            traces.append(size)
            self.size = size
            self.w = nnx.Param(jax.random.normal(key, (size,)))
            self.same = self.w
            self.inner = Scale()

    made = [Made(3, jax.random.key(seed)) for seed in range(2)]
    for seed, m in enumerate(made):
        assert isinstance(m.size, int) and m.same is m.w
        expected = jax.random.normal(jax.random.key(seed), (3,))
        assert np.allclose(m.w[...], expected)
        m.w[...] += 1
        m.inner(X)
    assert traces == [3]


def test_constructors_can_be_mapped():
    axes = nnx.StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})

    class Stack(nnx.Module):
        @nnx.split_rngs(splits=5)
        @nnx.vmap(in_axes=(axes, axes))
        def __init__(self, rngs):
            self.w = nnx.Param(rngs.params.normal((2,)))

    stack = Stack(nnx.Rngs(0))
    assert stack.w.shape == (5, 2)
    assert len({tuple(row) for row in stack.w[...].tolist()}) == 5


# ----------------------------------------------------------------------- decorator form

# Arguments of a function of one array, where they are not ``(X,)``.
ARGUMENTS = {"jvp": ((X,), (X,))}


@pytest.mark.parametrize("name", FORMS)
def test_options_may_come_before_the_function(name):
    def f(x):
        """Says what it does."""
        return x.sum() if name in ("grad", "value_and_grad") else x * 2

    transform, args = getattr(nnx, name), ARGUMENTS.get(name, (X,))
    direct, late = transform(f, **FORMS[name]), transform(**FORMS[name])(f)
    if name == "custom_vjp":
        for made in (direct, late):
            made.defvjp(lambda x: (f(x), None), lambda residual, g: (g,))
    first, second = (jax.tree.leaves(made(*args))[:1] for made in (direct, late))
    assert name == "make_jaxpr" or [*map(flat, first)] == [*map(flat, second)]
    assert late.__name__ == "f" and late.__doc__ == "Says what it does."
    assert late.__wrapped__ is f


@cases(without=("transform_metadata",))
def test_modes_are_options_of_every_transform(case):
    parameters = inspect.signature(getattr(nnx, case.row.transform)).parameters
    for name in ("graph", "graph_updates"):
        assert parameters[name].default is None
        is_keyword = parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert is_keyword or case.row.transform == "checkify"
    assert "graph_updates" not in inspect.signature(nnx.transform_metadata).parameters


# -------------------------------------------------------------------- keyword arguments

BY_POSITION = {
    "grad": lambda f, mode: nnx.grad(f, argnums=(0, 1), **mode),
    "value_and_grad": lambda f, mode: nnx.value_and_grad(f, argnums=(0, 1), **mode),
    "vmap": lambda f, mode: nnx.vmap(f, in_axes=(0, None), **mode),
    "remat": lambda f, mode: nnx.remat(f, **mode),
    "scan": lambda f, mode: nnx.scan(f, in_axes=(0, None), out_axes=0, **mode),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_keywords_become_positions_with_graph_updates(name):
    f = BY_POSITION[name](lambda x, y=X: (x * y).sum(), modes.GRAPH_UPDATES)
    by_position = f(X, X)
    for out in (f(X, y=X), f(y=X, x=X), f(x=X)):
        same = jax.tree.map(lambda a, b: flat(a) == flat(b), out, by_position)
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("name", BY_POSITION)
def test_keywords_that_have_no_position_are_refused(name):
    f = BY_POSITION[name](lambda x, *, y: (x * y).sum(), modes.GRAPH_UPDATES)
    message = "keyword arguments could not be resolved to positions"
    with pytest.raises(TypeError, match=message):
        f(X, y=X)
    partial = functools.partial(lambda x, y: (x * y).sum())
    with pytest.raises(TypeError, match=message):
        BY_POSITION[name](partial, modes.GRAPH_UPDATES)(X, y=X)


def test_keywords_are_passed_on_without_graph_updates(value_mode):
    f = lambda x, *, y: (x * y).sum()  # noqa: E731
    assert flat(nnx.grad(f, **value_mode)(X, y=X)) == flat(X)
    assert nnx.remat(f, **value_mode)(X, y=X) == 500
    assert flat(nnx.vmap(f, **value_mode)(X, y=X)) == [100, 400]
    assert nnx.jit(f, **value_mode)(X, y=X) == 500


def test_scan_and_checkify_take_no_keywords_without_graph_updates(value_mode):
    scan = functools.partial(nnx.scan, in_axes=0, out_axes=0)
    for transform in (scan, nnx.checkify):
        with pytest.raises(TypeError):
            transform(lambda x: x, **value_mode)(x=X)


def test_rules_and_metadata_bind_keywords_to_positions(mode):
    f = nnx.custom_vjp(lambda x, y: x * y, **mode)
    f.defvjp(lambda x, y: (f(x, y), None), lambda residual, g: (g, g))
    assert flat(f(X, y=X)) == [100, 400]
    g = nnx.transform_metadata(lambda x, y: x * y, partition="p", graph=mode["graph"])
    assert flat(g(X, y=X)) == [100, 400]


# ------------------------------------------------------------- transforms of JAX itself

ROWS = jnp.array([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])


def linear():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def expected(model, x=ROWS):
    return np.asarray(x) @ np.asarray(model.kernel) + np.asarray(model.bias)


# ------------------------------------------------------------------ models as arguments


def test_jit_takes_and_returns_models():
    model = linear()
    assert np.allclose(jax.jit(lambda m, x: m(x))(model, ROWS), expected(model))
    doubled = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(model)
    assert type(doubled) is nnx.Linear and doubled.in_features == 2
    assert np.array_equal(doubled.kernel[...], 2 * model.kernel[...])


def test_jit_traces_once_for_equal_models():
    traces = []
    f = jax.jit(lambda m, x: (traces.append(None), m(x))[1])
    for seed in range(3):
        f(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)), ROWS)
    assert len(traces) == 1
    f(nnx.Linear(2, 2, rngs=nnx.Rngs(0), use_bias=False), ROWS)
    assert len(traces) == 2


def test_grad_is_a_model():
    model = linear()
    grads = jax.grad(lambda m: m(ROWS).sum())(model)
    assert type(grads) is nnx.Linear
    assert np.allclose(grads.kernel[...], np.asarray(ROWS).sum(0)[:, None] * np.ones(2))
    assert flat(grads.bias) == [3.0, 3.0]


def test_vmap_makes_and_applies_stacked_models():
    keys = jax.random.split(jax.random.key(0), 4)
    models = jax.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(params=key)))(keys)
    assert models.kernel.shape == (4, 2, 2)
    y = jax.vmap(lambda m, x: m(x), in_axes=(0, None))(models, ROWS)
    for i in range(4):
        one = nnx.Linear(2, 2, rngs=nnx.Rngs(params=keys[i]))
        assert np.allclose(y[i], expected(one), atol=1e-6)


def test_scan_carries_and_scans_models():
    def step(carry, layer):
        model, x = carry
        return (model, jnp.tanh(layer(x)) + model.bias[None]), x

    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *[linear() for _ in range(3)])
    (model, y), _ = jax.lax.scan(step, (linear(), ROWS), layers)
    x = np.asarray(ROWS)
    for _ in range(3):
        x = np.tanh(expected(linear(), x))
    assert type(model) is nnx.Linear and np.allclose(y, x, atol=1e-6)


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, functools.partial(jax.vmap, in_axes=0)]
)
def test_writes_to_arguments_stay_inside(transform):
    def f(m):
        m.a[...] = m.a * 2
        m.k = 5
        m.new = m.a[...]
        return m.a[...]

    model = zoo.Parts()
    with comparisons.unchanged(model):
        assert flat(transform(f)(model)) == [2.0, 4.0]


def test_arguments_returned_are_new_objects():
    model = zoo.Parts()
    out = jax.jit(lambda m: m)(model)
    assert out is not model and out.a is not model.a and out.a.tag == "x"
    out.a[...] += 1
    assert flat(model.a) == [1.0, 2.0]


# -------------------------------------------------- merge: dropout and normalization


@pytest.fixture(scope="module")
def eager():
    """The losses, running means and counts after one and more eager calls."""
    net = zoo.Block()
    calls = [
        (net(ROWS).sum(), net.norm.mean[...], net.dropout.rngs.count[...])
        for _ in range(3)
    ]
    return [*zip(*calls, strict=True)]


@pytest.fixture
def split_net():
    return nnx.split(zoo.Block(), nnx.Param, ...)


def run(graphdef, params, rest, x=ROWS, loss=jnp.sum):
    """The loss, and the new state beside the Params, of a model that is made anew."""
    net = nnx.merge(graphdef, params, rest, copy=True)
    return loss(net(x)), nnx.split(net, nnx.Param, ...)[2]


def check(eager, values, new_rest, old_rest):
    """Asserts that losses and state are those of eager calls."""
    losses, means, counts = eager
    steps = len(values)
    assert np.allclose(values, losses[:steps], atol=1e-5)
    assert np.allclose(new_rest["norm"]["mean"][...], means[steps - 1], atol=1e-6)
    assert new_rest["dropout"]["rngs"]["count"][...] == counts[steps - 1] == steps
    assert old_rest["dropout"]["rngs"]["count"][...] == 0


def test_merged_model_is_written_under_grad(split_net, eager):
    graphdef, params, rest = split_net
    loss = lambda params: run(graphdef, params, rest)  # noqa: E731
    (value, new_rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    check(eager, [value], new_rest, rest)
    assert not tracers_in([params, rest, grads, new_rest])


def test_merged_model_is_written_under_scan(split_net, eager):
    graphdef, params, rest = split_net
    step = lambda rest, x: run(graphdef, params, rest, x)[::-1]  # noqa: E731
    new_rest, values = jax.lax.scan(step, rest, jnp.stack([ROWS] * 3))
    check(eager, values, new_rest, rest)


def test_merged_model_trains_as_the_object_does(split_net):
    graphdef, params, rest = split_net
    mean_square = lambda y: (y**2).mean()  # noqa: E731

    def descend(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    @jax.jit
    def step(params, rest):
        loss = lambda params: run(graphdef, params, rest, ROWS, mean_square)  # noqa: E731
        grads, new_rest = jax.grad(loss, has_aux=True)(params)
        return descend(params, grads), new_rest

    @nnx.jit
    def step_of_object(net):
        grads = nnx.grad(lambda net: mean_square(net(ROWS)))(net)
        nnx.update(net, descend(nnx.state(net, nnx.Param), grads))

    net = zoo.Block()
    for _ in range(3):
        params, rest = step(params, rest)
        step_of_object(net)
    merged = nnx.merge(graphdef, params, rest)
    assert np.allclose(merged.linear.kernel[...], net.linear.kernel[...], atol=1e-5)
    assert np.allclose(merged.norm.var[...], net.norm.var[...], atol=1e-5)
