"""Transforms in transforms, and what is captured; the numbers are JAX's."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import graftree as nnx
from tests import modes
from tests.comparisons import raises, unchanged
from tests.contract.test_transforms.matrix import flat, tracers_in
from tests.zoo import Box, Scale

PAIRS = pytest.mark.parametrize(
    ("outer", "inner"),
    [
        pytest.param(modes.BY_NAME[a], modes.BY_NAME[b], id=f"{a} {b}")
        for a, b in itertools.permutations(modes.BY_NAME, 2)
    ],
)
WEIGHTS = jnp.array([[0.5, -0.3], [0.2, 0.8], [-0.6, 0.4]])
X = jnp.array([0.7, -0.2])
# Of a function ``f(x, layer)`` that is scanned over a stack of layers.
OVER_LAYERS = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}


class Layer(nnx.Module):
    """An element-wise layer that counts its calls."""

    def __init__(self, w):
        self.w = nnx.Param(w)
        self.calls = nnx.BatchStat(jnp.zeros(w.shape[:-1]))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(self.w * x)


def stack():
    return Layer(WEIGHTS)


def single():
    return Layer(WEIGHTS[1])


def tanh_layer(w, x):
    return jnp.tanh(w * x)


def plain(weights, x, layer=tanh_layer):
    """What the stack computes: a plain loop over the rows."""
    for w in weights:
        x = layer(w, x)
    return x.sum()


def scanned(mode, layer_call=lambda layer, x: layer(x)):
    """The loss of a stack of layers, by a scan."""
    forward = nnx.scan(lambda x, layer: layer_call(layer, x), **OVER_LAYERS, **mode)
    return lambda model, x: forward(x, model).sum()


def check_weights(grads, expected):
    weights = grads["w"] if isinstance(grads, nnx.State) else grads.w
    assert np.allclose(weights, expected, atol=1e-6)


def check_gradient(grads, layer):
    """Asserts that they are those of a plain loop over layers."""
    check_weights(grads, jax.grad(lambda w: plain(w, X, layer))(WEIGHTS))


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit], ids=["nnx.jit", "jax.jit"])
def test_jit_of_grad_of_scan_of_remat(jit, mode):
    loss = scanned(mode, nnx.remat(lambda layer, x: layer(x), **mode))
    options = mode if jit is nnx.jit else {}

    @functools.partial(jit, **options)
    def step(model, x):
        return nnx.value_and_grad(loss, **mode)(model, x)

    model = stack()
    value, grads = step(model, X)
    expected, gradient = jax.value_and_grad(plain)(WEIGHTS, X)
    assert np.allclose(value, expected, atol=1e-6)
    check_weights(grads, gradient)
    assert flat(model.calls) == ([1.0] * 3 if jit is nnx.jit else [0.0] * 3)
    assert not tracers_in([model, grads])


def test_vmap_of_grad(mode):
    gradient = nnx.grad(lambda m, x: m(x).sum(), **mode)
    model = stack()
    grads = nnx.vmap(gradient, in_axes=(0, None), **mode)(model, X)
    expected = jax.vmap(jax.grad(lambda w, x: jnp.tanh(w * x).sum()), (0, None))
    check_weights(grads, expected(WEIGHTS, X))
    assert flat(model.calls) == [1.0] * 3


def test_grad_of_vmap_of_scan(mode):
    xs = jnp.stack([X, 2 * X])
    forward = scanned({"graph": mode["graph"], "graph_updates": False})
    batched = nnx.vmap(lambda m, x: forward(nnx.clone(m), x), in_axes=(None, 0), **mode)
    grads = nnx.grad(lambda m: batched(m, xs).sum(), **mode)(stack())
    expected = jax.grad(lambda w: plain(w, X) + plain(w, 2 * X))(WEIGHTS)
    check_weights(grads, expected)


@pytest.mark.parametrize("loop", ["while_loop", "fori_loop"])
def test_scan_inside_a_loop_inside_jit(loop, mode):
    forward = nnx.scan(lambda x, layer: layer(x), **OVER_LAYERS, **mode)

    @nnx.jit(**mode)
    def run(model, x):
        if loop == "while_loop":
            *_, out = nnx.while_loop(
                lambda value: value[0] < 4,
                lambda value: (value[0] + 1, value[1], forward(value[2], value[1])),
                (0, model, x),
                **mode,
            )
        else:
            _, out = nnx.fori_loop(
                0, 4, lambda i, v: (v[0], forward(v[1], v[0])), (model, x), **mode
            )
        return out

    model, x = stack(), np.asarray(X)
    out = run(model, X)
    for w in np.tile(WEIGHTS, (4, 1)):
        x = np.tanh(w * x)
    assert np.allclose(out, x, atol=1e-6)
    assert flat(model.calls) == [4.0] * 3


def test_cond_inside_scan_inside_grad(mode):
    def choose(layer, x):
        double = lambda m, x: 2 * x  # noqa: E731
        return nnx.cond(layer.w[0] > 0, Layer.__call__, double, layer, x, **mode)

    model = stack()
    grads = nnx.grad(scanned(mode, choose), **mode)(model, X)
    chosen = lambda w, x: jnp.where(w[0] > 0, jnp.tanh(w * x), 2 * x)  # noqa: E731
    check_gradient(grads, chosen)
    assert flat(model.calls) == [1.0, 1.0, 0.0]


def test_switch_inside_vmap_inside_jit(mode):
    branches = [lambda m, x: m(x), lambda m, x: -x]

    @nnx.jit(**mode)
    @nnx.vmap(in_axes=(0, 0, None), **mode)
    def run(index, model, x):
        return nnx.switch(index, branches, model, x, **mode)

    model = stack()
    out = run(jnp.array([0, 1, 0]), model, X)
    expected = np.tanh(np.asarray(WEIGHTS) * np.asarray(X))
    expected[1] = -X
    assert np.allclose(out, expected, atol=1e-6)
    assert flat(model.calls) == [1.0, 0.0, 1.0]


def test_checkify_around_jit_around_grad(mode):
    loss = nnx.jit(nnx.grad(lambda m, x: jnp.log(m(x)).sum(), **mode), **mode)
    model = single()
    error, _ = nnx.checkify(loss, errors=checkify.float_checks, **mode)(model, X)
    with pytest.raises(ValueError, match="nan generated by primitive: log"):
        error.throw()
    assert flat(model.calls) == [1.0]


# -------------------------------------------------------------- rules for the gradient


def doubled(mode):
    """``sin(w * x)`` of a layer, with twice its gradient."""
    has_updates = mode.get("graph_updates", False)
    weights_only = (nnx.DiffState(0, nnx.Param),) if has_updates else ()

    @nnx.custom_vjp(nondiff_argnums=weights_only, **mode)
    def f(layer, x):
        return jnp.sin(layer.w * x)

    def forward(layer, x):
        return f(layer, x), (layer.w[...], x)

    def backward(residual, g):
        tangent, x_tangent = doubled_backward(residual, g[1] if has_updates else g)
        if has_updates:
            return nnx.State({"w": nnx.Param(tangent)}), x_tangent
        return Layer(tangent), x_tangent

    f.defvjp(forward, backward)
    return f


def doubled_backward(residual, g):
    w, x = residual
    return 2 * jnp.cos(w * x) * x * g, 2 * jnp.cos(w * x) * w * g


@jax.custom_vjp
def doubled_plain(w, x):
    return jnp.sin(w * x)


doubled_plain.defvjp(lambda w, x: (doubled_plain(w, x), (w, x)), doubled_backward)


@pytest.mark.parametrize("is_remat", [False, True])
def test_custom_vjp_inside_scan_inside_jit(is_remat, mode):
    f = nnx.remat(doubled(mode), **mode) if is_remat else doubled(mode)
    grads = nnx.jit(nnx.grad(scanned(mode, f), **mode), **mode)(stack(), X)
    check_gradient(grads, doubled_plain)


def test_vjp_and_jvp_inside_jit_agree_with_each_other(mode):
    inner = mode if not mode.get("graph_updates") else modes.GRAPH

    @nnx.jit(**mode)
    def both(model, x):
        f = lambda m, x: (m.w * x).sum() ** 2  # noqa: E731
        out, backward = nnx.vjp(f, model, x, **inner)
        tangents = jax.tree.map(jnp.ones_like, (model, x))
        same, tangent = nnx.jvp(f, (model, x), tangents, **inner)
        _, g = backward(jnp.ones_like(out))
        return out, same, tangent, g

    out, same, tangent, g = both(single(), X)
    w, x = np.asarray(WEIGHTS[1]), np.asarray(X)
    value, slope = (w * x).sum() ** 2, 2 * (w * x).sum()
    expected = [value, value, slope * (w + x).sum()]
    assert np.allclose([out, same, tangent], expected, atol=1e-5)
    assert np.allclose(g, slope * w, atol=1e-5)


def test_second_derivatives_through_remat(mode):
    f = nnx.remat(lambda m, x: (m.w * x**3).sum(), **mode)
    first = nnx.grad(f, argnums=1, **mode)
    second = nnx.grad(lambda m, x: first(m, x).sum(), argnums=1, **mode)
    expected = np.asarray(WEIGHTS[1]) * 6 * np.asarray(X)
    assert np.allclose(second(single(), X), expected, atol=1e-5)


# -------------------------------------------------------------- modes inside each other


def count(model):
    model.calls[...] += 1
    model.calls.set_metadata(tag="y")
    model.k = 5


@PAIRS
def test_values_cross_modes_nested_in_each_other(outer, inner):
    inside = nnx.jit(count, **inner)
    model = stack()
    nnx.jit(lambda m: (count(m), inside(m))[0], **outer)(model)
    assert flat(model.calls) == [2.0] * 3 and model.calls.tag == "y"
    assert hasattr(model, "k") is (outer == modes.GRAPH_UPDATES)


@PAIRS
def test_structure_stops_at_the_first_mode_that_drops_it(outer, inner):
    def add(m):
        m.new = nnx.Param(jnp.ones(1))

    model = stack()
    with unchanged(model):
        nnx.jit(lambda m: nnx.jit(add, **inner)(m), **outer)(model)


def test_compat_has_graph_updates_inside_any_mode(value_mode):
    @nnx.jit(**value_mode)
    def step(model, x):
        loss = lambda m, x: m(x).sum()  # noqa: E731
        value, grads = nnx.compat.value_and_grad(loss)(model, x)
        assert isinstance(grads, nnx.State) and list(grads) == ["w"]
        return value, grads

    model = single()
    value, grads = step(model, X)
    expected, gradient = jax.value_and_grad(lambda w: jnp.tanh(w * X).sum())(WEIGHTS[1])
    assert np.allclose(value, expected, atol=1e-6)
    check_weights(grads, gradient)
    assert flat(model.calls) == [1.0]


def test_captured_layers_are_used_at_any_depth(mode):
    model, outer = stack(), Box(w=nnx.Param(jnp.array(3.0)))
    scaled = nnx.remat(lambda layer, x: outer.w * jnp.tanh(layer.w * x), **mode)
    with unchanged(outer):
        grads = nnx.jit(nnx.grad(scanned(mode, scaled), **mode), **mode)(model, X)
    check_gradient(grads, lambda w, x: 3 * jnp.tanh(w * x))


def test_writes_to_captured_layers_raise_at_any_depth(mode):
    model, outer = stack(), stack()

    def broken(layer, x):
        outer.calls[...] += 1
        return layer(x)

    loss = nnx.grad(scanned(mode, nnx.remat(broken, **mode)), **mode)
    refused = raises(nnx.errors.TraceContextError, "Cannot mutate BatchStat")
    with unchanged(model, outer), refused:
        nnx.jit(loss, **mode)(model, X)


# --------------------------------------------------------------------- what is captured


@dataclasses.dataclass(frozen=True)
class Callable:
    name: str
    number: float = dataclasses.field(compare=False, default=1.0)

    def __call__(self, x):
        return self.number * x


class Holder:
    model = None


MODEL = Scale(1.0)
NUMBER = 1.0
ARRAY = jnp.array(1.0)
COUNTS = np.ones(())


def helper(x):
    return MODEL(x)


def by_default(x, m=MODEL):
    return m(x)


def by_keyword(x, *, m=MODEL):
    return m(x)


def passed_on(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def set_all(value):
    """Gives everything that the functions below name a new value."""
    global NUMBER, ARRAY
    NUMBER, ARRAY = value, jnp.array(value)
    MODEL.w[...] = value
    HOLDER.model = Scale(value)
    Holder.model = Scale(value)
    TABLE["model"] = Scale(value)
    COUNTS[...] = value


HOLDER = types.SimpleNamespace(model=None)
TABLE = {}

# Functions that multiply by what `set_all` has set, made anew or not in each call.
WAYS = {
    "model": lambda: lambda x: MODEL(x),
    "helper": lambda: passed_on_to_helper,
    "default": lambda: by_default,
    "keyword default": lambda: by_keyword,
    "decorator": lambda: decorated,
    "inner lambda": lambda: with_inner_lambda,
    "namespace": lambda: lambda x: HOLDER.model(x),
    "class attribute": lambda: lambda x: Holder.model(x),
    "dict": lambda: lambda x: TABLE["model"](x),
    "number": lambda: by_number,
    "array": lambda: by_array,
    "NumPy in place": lambda: by_numpy,
    "callable objects": lambda: Callable("same", NUMBER),
    "bound method": lambda: HOLDER.model.__call__,
    "partial": lambda: functools.partial(Scale.__call__, HOLDER.model),
    "method of an operand": lambda: by_operand,
}


def passed_on_to_helper(x):
    return helper(x)


decorated = passed_on(passed_on_to_helper)


def with_inner_lambda(x):
    return (lambda y: MODEL(y))(x)


def by_number(x):
    return x * NUMBER


def by_array(x):
    return x * ARRAY


def by_numpy(x):
    return x * COUNTS


class Operand(nnx.Module):
    def __call__(self, x):
        return x * NUMBER


def by_operand(x, operand=Operand()):  # noqa: B008
    return operand(x)


def same(x):
    return x


CARRIED = {"length": 1, "in_axes": nnx.Carry, "out_axes": nnx.Carry}
CONTROL_FLOW = {
    "cond": lambda f, x: nnx.cond(True, f, same, x),
    "switch": lambda f, x: nnx.switch(1, [same, f], x),
    "while_loop": lambda f, x: nnx.while_loop(is_small, f, x),
    "fori_loop": lambda f, x: nnx.fori_loop(0, 1, functools.partial(second, f), x),
    "scan": lambda f, x: nnx.scan(f, **CARRIED)(x),
}


def second(f, _, x):
    return f(x)


def is_small(x):
    return x < 2.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", CONTROL_FLOW)
def test_a_call_sees_the_present_state_of_what_it_names(transform, way):
    if (transform, way) == ("scan", "bound method"):
        return  # refused: its updates would be lost
    for value in (2.0, 5.0, 2.0, 3.0):
        set_all(value)
        assert CONTROL_FLOW[transform](WAYS[way](), jnp.array(1.0)) == value


def test_a_scan_sees_what_is_made_after_it_was_decorated():
    @nnx.scan(**CARRIED)
    def step(x):
        return later(x)

    later = Scale(2.0)
    assert step(jnp.array(1.0)) == 2.0
    later.w[...] = 3.0
    assert step(jnp.array(1.0)) == 3.0


def test_a_method_of_an_operand_sees_present_globals():
    for value in (2.0, 5.0):
        set_all(value)
        out = nnx.cond(True, call_operand, ignore_operand, Operand(), jnp.array(1.0))
        assert out == value


def call_operand(operand, x):
    return operand(x)


def ignore_operand(operand, x):
    return x


def test_eager_remat_sees_the_present_state(mode):
    remat = nnx.remat(lambda m, x: MODEL(x) + m.w, **mode)
    grad = nnx.value_and_grad(lambda m: remat(m, 1.0), **mode)
    for value in (2.0, 5.0):
        set_all(value)
        assert remat(Scale(0.0), jnp.array(1.0)) == value
        assert grad(Scale(0.0))[0] == value


def test_no_trace_meets_the_tracers_of_another(mode):
    holder, model = types.SimpleNamespace(), Scale(3.0)

    def on(x):
        return holder.model.w * x

    @nnx.jit(**mode)
    def step(model, x):
        holder.model = model
        return nnx.cond(x > 0, on, same, x, **mode)

    assert step(model, jnp.array(1.0)) == 3.0
    model.name = "new structure, so traced again"
    assert step(model, jnp.array(1.0)) == 3.0


def test_branches_leave_no_tracer_behind(mode):
    with jax.check_tracer_leaks():
        out = nnx.cond(True, lambda m: m.w * 2, lambda m: m.w * 1, Scale(1.0), **mode)
        branches = [lambda m: m(1.0), lambda m: m(2.0)]
        again = nnx.switch(jnp.array(1), branches, Scale(1.0), **mode)
    assert out == again == 2.0


@pytest.mark.parametrize("transform", [*CONTROL_FLOW, "remat"])
def test_a_function_put_in_the_place_of_one_of_jax_is_called(transform, monkeypatch):
    call = CONTROL_FLOW.get(transform, lambda f, x: nnx.remat(f)(x))

    def doubled(x):
        return jnp.sin(x) + 2.0

    before = call(doubled, jnp.array(1.0))
    calls, sin = [], jnp.sin
    with monkeypatch.context() as patched:
        patched.setattr(jnp, "sin", lambda x: calls.append(1) or sin(x) + 1.0)
        for number in range(1, 4):
            assert call(doubled, jnp.array(1.0)) == pytest.approx(before + 1.0)
            assert len(calls) >= number
    assert call(doubled, jnp.array(1.0)) == before
