"""What a callable holds is an argument: the function of a transform, or passed to one.

The table: {a model, partials over it, transformed functions of it} as the function, and
{methods, partials, ...} as an argument, in each transform and mode. Each is called
after its weights changed, writes to the object, and is traced once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import graftree as nnx
from tests import comparisons, meshes, modes
from tests.contract.test_transforms.matrix import tracers_in

X = jnp.array([1.0, 2.0])
SPEC = PartitionSpec()
TRACES: list[int] = []


class Scale(nnx.Module):
    """Scales by a weight; counts its calls and its traces."""

    def __init__(self, weight=1.0):
        self.weight = nnx.Param(jnp.array(weight))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        TRACES.append(1)
        self.calls[...] += 1
        return self.weight * x

    def times(self, x):
        return self(x)


class Plain:
    """A callable that JAX takes apart, and nobody tracks."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return self.weight * x


jax.tree_util.register_pytree_node(
    Plain, lambda x: ([x.weight], None), lambda _, parts: Plain(*parts)
)

# The callables over a model, and how many times each one is traced per trace.
CALLABLES = {
    "model": lambda model: model,
    "partial": lambda model: functools.partial(Scale.times, model),
    "by keyword": lambda model: functools.partial(lambda x, m: m(x), m=model),
    "nested": lambda model: functools.partial(
        functools.partial(lambda k, m, x: m(x) * k, 1), model
    ),
    "in a list": lambda model: functools.partial(lambda ms, x: ms[0](x), [model]),
    "partial of the model": lambda model: functools.partial(model),
    "method in a partial": lambda model: functools.partial(
        lambda f, x: f(x), model.times
    ),
    "remat": lambda model: nnx.remat(model),
    "jit": lambda model: nnx.jit(model),
    "custom_vjp": lambda model: with_rules(model, modes.GRAPH),
}
METHODS = {"method": lambda model: model.times, "known": lambda model: model.__call__}


def value_mode(mode):
    """The mode without changes of structure, for those that have no other."""
    return {**mode, "graph_updates": False}


def with_rules(f, mode):
    made = nnx.custom_vjp(f, **mode)
    made.defvjp(lambda *args: (f(*args), None), lambda _, g: (g,))
    return made


# Functions of a callable of one array and a mode, that give a callable of one array.
AS_FUNCTION = {
    "jit": lambda f, mode: nnx.jit(f, **mode),
    "vmap": lambda f, mode: lambda x: nnx.vmap(f, **mode)(x),
    "pmap": lambda f, mode: lambda x: nnx.pmap(f, **mode)(x[None])[0],
    "shard_map": lambda f, mode: nnx.shard_map(
        f, mesh=meshes.mesh_of(x=1), in_specs=SPEC, out_specs=SPEC, **mode
    ),
    "remat": lambda f, mode: nnx.remat(f, **mode),
    "checkify": lambda f, mode: lambda x: nnx.checkify(f, **mode)(x)[1],
    "scan": lambda f, mode: nnx.scan(
        f, in_axes=nnx.Carry, out_axes=nnx.Carry, length=1, **mode
    ),
    "while_loop": lambda f, mode: (
        lambda x: nnx.while_loop(lambda x: x[0] < 1.5, f, x, **mode)
    ),
    "fori_loop": lambda f, mode: (
        lambda x: nnx.fori_loop(
            0, 1, functools.partial(lambda f, i, x: f(x), f), x, **mode
        )
    ),
    "cond": lambda f, mode: lambda x: nnx.cond(True, f, f, x, **mode),
    "switch": lambda f, mode: lambda x: nnx.switch(1, [lambda x: x, f], x, **mode),
    "vjp": lambda f, mode: lambda x: nnx.vjp(f, x, **value_mode(mode))[0],
    "jvp": lambda f, mode: lambda x: nnx.jvp(f, (x,), (x,), **value_mode(mode))[0],
    "custom_vjp": with_rules,
    "jit_partial": lambda f, mode: nnx.jit_partial(f, **value_mode(mode)),
}
TRACED_ONCE = ("jit", "jit_partial")

# Functions of ``call(f, x)`` and a mode, that give a function of a callable and x.
AS_ARGUMENT = {
    "jit": lambda call, mode: nnx.jit(call, **mode),
    "vmap": lambda call, mode: nnx.vmap(call, in_axes=(None, 0), **mode),
    "pmap": lambda call, mode: (
        lambda f, x: nnx.pmap(call, in_axes=(None, 0), **mode)(f, x[None])[0]
    ),
    "shard_map": lambda call, mode: nnx.shard_map(
        call, mesh=meshes.mesh_of(x=1), in_specs=(SPEC, SPEC), out_specs=SPEC, **mode
    ),
    "remat": lambda call, mode: nnx.remat(call, **mode),
    "checkify": lambda call, mode: lambda f, x: nnx.checkify(call, **mode)(f, x)[1],
    "scan": lambda call, mode: (
        lambda f, x: nnx.scan(
            lambda f, x: (f, call(f, x)),
            in_axes=(nnx.Carry, None),
            out_axes=(nnx.Carry, 0),
            length=1,
            **mode,
        )(f, x)[1][0]
    ),
    "while_loop": lambda call, mode: (
        lambda f, x: nnx.while_loop(
            lambda pair: pair[1][0] < 1.5,
            lambda pair: (pair[0], call(*pair)),
            (f, x),
            **mode,
        )[1]
    ),
    "fori_loop": lambda call, mode: (
        lambda f, x: nnx.fori_loop(
            0, 1, lambda i, pair: (pair[0], call(*pair)), (f, x), **mode
        )[1]
    ),
    "cond": lambda call, mode: lambda f, x: nnx.cond(True, call, call, f, x, **mode),
    "switch": lambda call, mode: lambda f, x: nnx.switch(0, [call], f, x, **mode),
    "vjp": lambda call, mode: (
        lambda f, x: nnx.vjp(
            functools.partial(lambda f, x: call(f, x), f), x, **value_mode(mode)
        )[0]
    ),
    "value_and_grad": lambda call, mode: (
        lambda f, x: nnx.value_and_grad(
            lambda f, x: (call(f, x).sum(), call(f, x) * 1.0),
            has_aux=True,
            argnums=1,
            **mode,
        )(f, x)[0][1]
    ),
}


def check(call, model, count):
    """Calls with other weights each time; checks the results and the writes."""
    del TRACES[:]
    for number in range(2, 2 + count):
        model.weight[...] = jnp.array(float(number))
        before = int(model.calls)
        np.testing.assert_array_equal(call(X), number * np.array([1.0, 2.0]))
        assert int(model.calls) > before
        leaves = [model.weight.get_raw_value(), model.calls.get_raw_value()]
        assert not any(isinstance(x, jax.core.Tracer) for x in leaves)


@pytest.mark.parametrize("name", AS_FUNCTION)
@pytest.mark.parametrize("kind", CALLABLES)
def test_what_the_function_holds_is_an_argument(name, kind, mode):
    if (name, kind) == ("jvp", "custom_vjp"):
        pytest.skip("JAX has no such derivative.")
    model = Scale()
    check(AS_FUNCTION[name](CALLABLES[kind](model), mode), model, 3)
    if name in TRACED_ONCE:
        assert len(TRACES) == 1


@pytest.mark.parametrize("name", ["cond", "switch", "while_loop", "fori_loop"])
def test_methods_as_functions_of_control_flow_are_arguments(name, mode):
    model = Scale()
    check(AS_FUNCTION[name](model.times, mode), model, 2)


@pytest.mark.parametrize("name", AS_ARGUMENT)
@pytest.mark.parametrize("kind", ["method", "known", *CALLABLES])
def test_what_a_callable_argument_holds_is_an_argument(name, kind, mode):
    model = Scale()
    f = (CALLABLES | METHODS)[kind](model)
    transformed = AS_ARGUMENT[name](lambda f, x: f(x), mode)
    check(lambda x: transformed(f, x), model, 2)
    if name == "jit":
        check(lambda x: transformed(f, x), model, 3)
        assert not TRACES


def test_what_a_pytree_holds_is_an_argument(mode):
    plain = Plain(jnp.array(1.0))
    call = nnx.jit(plain, **mode)
    for number in (2.0, 3.0):
        plain.weight = jnp.array(number)
        assert call(X).tolist() == [number, 2 * number]
    assert call.jitted_fn._cache_size() == 1


def test_arguments_keep_their_positions():
    model = Scale(2.0)
    f = functools.partial(lambda m, x, n, y: m(x) * n + y, model)
    jitted = nnx.jit(f, static_argnums=1, donate_argnums=2)
    assert jitted(X, 3, jnp.ones(2)).tolist() == [7.0, 13.0]
    rows = jnp.stack([X, X])
    assert nnx.vmap(f, in_axes=(0, None, None))(rows, 3, 1).tolist() == [[7, 13]] * 2
    held = functools.partial(lambda m, x: m(x).sum(), model)
    assert nnx.grad(held)(X).tolist() == [2.0, 2.0]
    names = nnx.jit(f, static_argnames="n")(x=X, n=3, y=1)
    assert names.tolist() == [7.0, 13.0]


def test_what_a_function_holds_is_not_donated():
    model, other = Scale(2.0), Scale(3.0)
    held = functools.partial(lambda m, o, x: m(x) + o(x), model)
    step = nnx.jit(held, donate_argnums=0)
    kept = model.weight.get_raw_value()
    assert step(other, X).tolist() == [5.0, 10.0]
    assert not kept.is_deleted() and step(other, X).tolist() == [5.0, 10.0]


def test_a_function_may_share_objects_with_the_arguments(mode):
    model = Scale()
    f = functools.partial(lambda m, n, x: (m.weight[...] + n.weight[...]) * x, model)
    for transformed in (nnx.jit(f, **mode), nnx.remat(f, **mode)):
        assert transformed(model, X).tolist() == [2.0, 4.0]


def test_branches_may_share_objects(mode):
    class Pair(nnx.Module):
        def __init__(self):
            self.scale = Scale(3.0)

        def __call__(self, x):
            return self.scale(x)

    pair = Pair()
    assert nnx.cond(True, pair, pair.scale, X, **mode).tolist() == [3.0, 6.0]
    assert nnx.cond(False, pair, pair.scale, X, **mode).tolist() == [3.0, 6.0]
    assert int(pair.scale.calls) == 2


def test_derivatives_by_a_callable_have_its_form(mode):
    model = Scale(2.0)
    options = {"allow_int": True, **mode}

    def weight_of(node):
        return node["weight"] if mode == modes.GRAPH_UPDATES else node.weight

    by_method = nnx.grad(lambda f, x: f(x).sum(), **options)(model.times, X)
    assert by_method.__func__ is Scale.times
    assert float(weight_of(by_method.__self__)[...]) == 3.0
    held = functools.partial(lambda m, x, k: m(x) * k, model, k=2)
    by_partial = nnx.grad(lambda f, x: f(x).sum(), **options)(held, X)
    assert float(weight_of(by_partial.args[0])[...]) == 6.0
    assert by_partial.keywords == {"k": 2}


def test_pullbacks_and_tangents_of_methods():
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    y, pull_back = nnx.vjp(lambda f, x: f(x), model.__call__, X, graph=False)
    assert pull_back(jnp.ones(1))[0].__self__.kernel[..., 0].tolist() == [1.0, 2.0]
    primals, tangents = (model.__call__, X), (model.__call__, X)
    _, tangent = nnx.jvp(lambda f, x: f(x), primals, tangents, graph=False)
    np.testing.assert_allclose(tangent, 2 * y, rtol=1e-6)


@pytest.mark.parametrize("name", ["jit", "remat", "vmap", "scan", "cond"])
def test_a_function_that_fails_changes_nothing(name, mode):
    model = Scale()

    def fail(model, x):
        model(x)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        AS_FUNCTION[name](functools.partial(fail, model), mode)(X)
    assert int(model.calls) == 0 and not tracers_in(model)


def test_changes_of_structure_follow_the_mode(mode):
    model = Scale()

    def grow(model, x):
        model.extra = nnx.Param(x)

    if mode == modes.GRAPH_UPDATES:
        nnx.jit(functools.partial(grow, model), **mode)(X)
        assert model.extra[...].tolist() == [1.0, 2.0]
    else:
        with pytest.warns(nnx.errors.LostUpdateWarning):
            nnx.jit(functools.partial(grow, model), **mode)(X)
        assert not hasattr(model, "extra")


def test_callables_may_be_returned(mode):
    model = Scale(2.0)
    made = nnx.jit(lambda w: Scale(w).times, **mode)(3.0)
    assert made(X).tolist() == [3.0, 6.0]
    if mode == modes.GRAPH_UPDATES:
        assert nnx.jit(lambda f: f, **mode)(model.times).__self__ is model


def test_inner_transforms_of_held_functions_see_the_trace(mode):
    class Net(nnx.Module):
        def __init__(self):
            self.scale = Scale(2.0)
            self.mapped = Scale(3.0)

        def __call__(self, x):
            x = nnx.remat(self.scale, **mode)(x)
            return nnx.vmap(self.mapped, **mode)(x)

    net = Net()
    step = nnx.jit(net, **mode)
    for number in (1, 2):
        assert step(X).tolist() == [6.0 * number, 12.0 * number]
        assert int(net.scale.calls) == int(net.mapped.calls) == number
        net.scale.weight[...] *= 2


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("jit", "nnx.jit(Scale.times)(instance, ...)"),
        ("vmap", "nnx.vmap(Scale.times, in_axes=(None, 0))(instance, ...)"),
        ("scan", "nnx.scan(Scale.times, in_axes=(None, nnx.Carry, 0))(instance, ...)"),
        ("grad", "nnx.grad(Scale.times, argnums=1)(instance, ...)"),
        ("vjp", "nnx.vjp(Scale.times, instance, ...)"),
        ("eval_shape", "nnx.eval_shape(Scale.times, instance, ...)"),
    ],
)
def test_bound_methods_are_refused_with_a_line_that_works(name, line):
    options = {"graph": False} if name == "vjp" else {}
    partial = "functools.partial(Scale.times, instance)"
    with comparisons.raises(ValueError, "bound methods", line, partial):
        getattr(nnx, name)(Scale().times, **options)


def test_static_methods_are_refused_and_the_way_out_works():
    model = Scale(2.0)
    with comparisons.raises(TypeError, "Data can't be static", "ordinary argument"):
        nnx.jit(lambda f, x: f(x), static_argnums=0)(model.times, X)
    assert nnx.jit(lambda f, x: f(x))(model.times, X).tolist() == [2.0, 4.0]


def test_another_call_of_the_same_form_is_not_traced_again():
    call = nnx.jit(lambda f, x: f(x))
    del TRACES[:]
    for weight in (2.0, 3.0):
        assert call(Scale(weight).times, X).tolist() == [weight, 2 * weight]
    assert len(TRACES) == 1


def test_numbers_and_flags_in_a_partial_stay_as_they_are():
    model = Scale(2.0)

    def f(m, flag, mask, x, *, times):
        assert flag and isinstance(mask, np.ndarray)
        for _ in range(times):
            x = m(x)
        return x

    held = functools.partial(f, model, True, np.array([True]), times=2)
    for transform in (nnx.jit, nnx.remat, nnx.vmap):
        assert transform(held)(X).tolist() == [4.0, 8.0]
    with comparisons.raises(TypeError):
        nnx.jit(lambda x: x)(functools.partial(f, flag=True))


def test_why_a_function_that_holds_objects_was_traced_again():
    model = Scale()
    step = nnx.jit(functools.partial(Scale.times, model))
    step(X)
    model.note = "new"
    step(X)
    text = str(nnx.debugging.explain_recompile(step))
    assert "fun.args[0]" in text and "note" in text


def test_stages_and_exports_of_a_model_as_the_function():
    model = Scale(2.0)
    compiled = nnx.jit(model).lower(X).compile()
    model.weight[...] = jnp.array(5.0)
    assert compiled(X).tolist() == [5.0, 10.0] and int(model.calls) == 1
    assert nnx.jit(model).eval_shape(X).shape == (2,)
