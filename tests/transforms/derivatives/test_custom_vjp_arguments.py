"""Arguments of custom_vjp: those without gradient, and those that are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.modes import GRAPH, GRAPH_UPDATES


class Foo(nnx.Module):
    def __init__(self, x=1.0, y=2.0):
        self.x = nnx.Param(jnp.array(x))
        self.y = nnx.Param(jnp.array(y))


class Counted(nnx.Module):
    def __init__(self):
        self.x = nnx.Param(jnp.array(2.0))
        self.count = nnx.BatchStat(jnp.array(0))


def define(fun, bwd, mode, fwd=None, nondiff_argnums=()):
    """A custom_vjp whose fwd rule calls it and keeps its arguments as the residual."""
    f = nnx.custom_vjp(fun, nondiff_argnums=nondiff_argnums, **mode)
    f.defvjp(fwd or (lambda *args: (f(*args), args)), bwd)
    return f


# -------------------------------------------------------------------- nondiff_argnums


def test_static_and_traced_values_may_be_without_gradient(mode):
    def fun(x, scale, function, power, array):
        assert isinstance(power, int)
        return scale * function(x) ** power + array.sum()

    def fwd(*args):
        return fun(*args), args[0]

    def bwd(function, power, array, x, g):
        assert function is jnp.sin and power == 3 and array.shape == (2,)
        return (g[1] if mode == GRAPH_UPDATES else g) * array[0], None

    f = define(fun, bwd, mode, fwd=fwd, nondiff_argnums=(2, 3, -1))

    def slope(array):
        return nnx.grad(lambda x: f(x, 1.0, jnp.sin, 3, array), **mode)(1.0)

    assert slope(jnp.array([4.0, 5.0])) == 4.0
    assert jax.jit(slope)(jnp.array([4.0, 5.0])) == 4.0
    np.testing.assert_array_equal(jax.vmap(slope)(jnp.eye(2)), [1.0, 0.0])


def test_objects_without_gradient_are_updated(value_mode):
    def fun(x, model):
        model.count[...] += 1
        return x * model.x

    def bwd(model, residual, g):
        return (g * model.x * 10,)

    f = define(fun, bwd, value_mode, nondiff_argnums=(1,))
    for wrap in (lambda g: g, lambda g: nnx.jit(g, **value_mode)):
        model = Counted()
        assert wrap(nnx.grad(f, **value_mode))(1.0, model) == 20.0
        assert model.count[...] == 1


def test_refs_are_written(mode):
    def fun(model, x):
        model.n[...] += 1.0
        return x * 2

    def bwd(*given):
        return (None, 3.0) if mode == GRAPH_UPDATES else (3.0,)

    nondiff = (nnx.DiffState(0, nnx.Param),) if mode == GRAPH_UPDATES else (0,)
    f = nnx.custom_vjp(fun, nondiff_argnums=nondiff, **mode)
    f.defvjp(lambda model, x: (f(model, x), None), bwd)
    model = nnx.Dict(n=nnx.BatchStat(jnp.array(0.0), ref=True))
    grad = nnx.grad(f, argnums=1, **mode)
    inner = nnx.grad(nnx.jit(f, **mode), argnums=1, **mode)
    for i, function in enumerate([f, grad, nnx.jit(grad, **mode), inner]):
        assert function(model, 2.0) == (3.0 if i else 4.0)
        assert model.n[...] == i + 1


def test_integers_are_not_for_objects_with_graph_updates():
    f = define(
        lambda a, b: b * 1, lambda *_: (1.0,), GRAPH_UPDATES, nondiff_argnums=(0,)
    )
    for obj in (Foo(), nnx.Param(jnp.array(1.0)), [Foo()]):
        with pytest.raises(TypeError, match="integers to nondiff_argnums for graph"):
            f(obj, 1.0)


def test_wrong_nondiff_argnums_are_refused(mode):
    def make(*nondiff_argnums):
        return define(lambda x: x, lambda *_: (), mode, None, nondiff_argnums)

    with pytest.raises(ValueError, match="argnum 0 is repeated in nondiff_argnums"):
        make(0, 0)
    with pytest.raises(TypeError, match="nondiff_argnums=3 of nnx.custom_vjp"):
        make(3)(1.0)
    if mode != GRAPH_UPDATES:
        message = "`nondiff_argnums` cannot contain `DiffState` objects"
        with pytest.raises(ValueError, match=message):
            make(nnx.DiffState(0, nnx.Param))


# ------------------------------------------------------------------------ all arguments


def test_keywords_are_positions_and_defaults_are_arguments(mode):
    bwd = lambda residual, g: (7.0, 8.0)  # noqa: E731
    f = define(lambda x, y=3.0: x * y, bwd, mode)
    assert f(y=4.0, x=2.0) == 8.0 and f(2.0) == 6.0
    assert nnx.grad(lambda x: f(x=x), **mode)(2.0) == 7.0
    assert nnx.grad(lambda x: f(x), **mode)(2.0) == 7.0
    keyword_only = define(lambda x, *, y: x, bwd, mode)
    with pytest.raises(TypeError, match="could not be resolved to positions"):
        keyword_only(1.0, y=2.0)


def test_variables_in_two_arguments(mode):
    v = nnx.Param(jnp.array(3.0))
    f = define(lambda a, b: a * b, lambda residual, g: residual, mode)
    if mode == GRAPH_UPDATES:
        assert f(v, v) == 9.0
    else:
        message = r"(?s)Duplicate Param.*\.args\[0\]\n.*\.args\[1\]\n.*nnx.custom_vjp"
        with pytest.raises(ValueError, match=message):
            f(v, v)


def test_shared_variables_in_one_argument():
    foo = Foo()
    foo.y = foo.x

    def bwd(residual, g):
        found = nnx.clone(residual[0])
        found.x[...] = 5 * g
        return (found,)

    grads = nnx.grad(define(lambda foo: foo.x * foo.y, bwd, GRAPH), **GRAPH)(foo)
    assert grads.x is grads.y and grads.x[...] == 5.0


def test_filters_must_agree_on_shared_variables():
    foo = Foo()
    nondiff = (nnx.DiffState(0, nnx.PathContains("x")),)
    f = define(lambda a, b: a.x * b.y, lambda *_: None, GRAPH_UPDATES, None, nondiff)
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        f(foo, foo)


def test_it_serves_methods(mode):
    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(3.0))

        @nnx.custom_vjp(**mode)
        def __call__(self, x):
            return self.w * x

    def bwd(residual, g):
        return None, 5.0 * residual[1]

    Scale.__call__.defvjp(lambda self, x: (self(x), (self, x)), bwd)
    assert Scale()(2.0) == 6.0
    assert nnx.grad(lambda m, x: m(x), argnums=1, **mode)(Scale(), 2.0) == 10.0
    assert Scale.__call__.__name__ == "__call__"


# ------------------------------------------------------------------------------- misuse


def test_it_needs_rules(mode):
    f = nnx.custom_vjp(lambda x: x, **mode)
    kind = ValueError if mode == GRAPH_UPDATES else AttributeError
    with pytest.raises(kind, match="No VJP defined for custom_vjp function <lambda>"):
        f(1.0)
    with pytest.raises(
        ValueError, match="nnx.custom_vjp does not support bound methods"
    ):
        nnx.custom_vjp(functools.partial(nnx.Linear(1, 1, rngs=nnx.Rngs(0)).__call__))


def test_rules_must_return_what_is_expected(mode):
    def use(found, fwd=None):
        f = define(lambda foo, x: foo.x * x, lambda residual, g: found, mode, fwd)
        return nnx.grad(f, argnums=1, **mode)(Foo(), 2.0)

    assert use((None, 5.0)) == 5.0
    with pytest.raises(TypeError, match="fwd rule must produce a pair"):
        use((None, 5.0), fwd=lambda foo, x: x)
    for found in (5.0, (5.0,), (None, 5.0, 6.0)):
        with pytest.raises(TypeError, match="bwd rule <lambda> must produce a tuple"):
            use(found)
    wrong = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="argument 0"):
        use((nnx.state(wrong) if mode == GRAPH_UPDATES else wrong, 5.0))


def test_states_must_have_the_differentiable_leaves():
    def use(found):
        nondiff = (nnx.DiffState(0, nnx.PathContains("x")),)
        f = define(
            lambda foo: foo.x * 1, lambda *_: (found,), GRAPH_UPDATES, None, nondiff
        )
        return nnx.grad(f)(Foo())

    assert use(nnx.State({"x": jnp.array(5.0)}))["x"][...] == 5.0
    with pytest.raises(ValueError, match="Expected State or Variable, got Foo"):
        use(Foo())
    with pytest.raises(TypeError, match="(?s)argument 0:.*unexpected: y"):
        use(nnx.state(Foo()))
    with pytest.raises(TypeError, match="(?s)argument 0:.*missing: x"):
        use(nnx.State({}))


# -------------------------------------------------------------------------------- peers


@pytest.mark.peers
def test_rules_get_what_they_get_from_the_peer(mode):
    peer = pytest.importorskip("flax.nnx")

    def run(nnx):
        seen = []

        class Model(nnx.Module):
            def __init__(self):
                self.x = nnx.Param(jnp.array(2.0))
                self.stat = nnx.BatchStat(jnp.array(1.0))

        def fun(model, x):
            model.stat[...] = model.x * x
            return {"a": jnp.sin(model.x), "b": x}

        def bwd(residual, g, **keywords):
            seen.append(jax.tree.leaves((g, keywords)))
            model, x = residual
            if mode == GRAPH_UPDATES:
                return jax.tree.map(lambda g: 3 * g, g[0][0]), x * 7
            return jax.tree.map(lambda x: 3 * x, nnx.clone(model)), x * 7

        f = nnx.custom_vjp(fun, **mode)
        f.defvjp(lambda model, x: (f(model, x), (model, x)), bwd)

        def loss(model, x):
            out = f(model, x)
            return out["a"] * 5 + out["b"] * 6 + model.stat * 7

        model = Model()
        grads = nnx.grad(loss, argnums=(0, 1), **mode)(model, 4.0)
        return seen, jax.tree.leaves(grads), model.stat[...]

    ours, theirs = run(nnx), run(peer)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
