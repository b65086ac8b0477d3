"""What a callable holds is an argument: the function of a transform, or passed to one.

{A model, partials over it, transformed functions of it} are the function, and these and
methods an argument, in each transform and mode. Each is called after its weights
changed, and writes to the object.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, meshes, modes
from tests.contract.test_transforms import matrix
from tests.contract.test_transforms.matrix import tracers_in

X = jnp.array([1.0, 2.0])
SPEC = jax.sharding.PartitionSpec()
TRACES: list[int] = []


class Scale(nnx.Module):
    """Scales by a weight; counts its calls and its traces."""

    def __init__(self, weight=1.0):
        self.weight = nnx.Param(jnp.array(weight))
        self.calls = nnx.Variable(jnp.zeros(self.weight.shape))

    def __call__(self, x):
        TRACES.append(1)
        self.calls[...] += 1
        return self.weight * x

    def times(self, x):
        return self(x)


def with_rules(f, mode):
    made = nnx.custom_vjp(f, **mode)
    made.defvjp(lambda *args: (f(*args), None), lambda _, g: (g,))
    return made


# The callables over a model.
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


# Functions of a callable of one array and a mode, that give a callable of one array.
AS_FUNCTION = {
    "jit": lambda f, mode: nnx.jit(f, **mode),
    "vmap": lambda f, mode: nnx.vmap(f, **mode),
    "pmap": lambda f, mode: nnx.pmap(f, **mode),
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


def check(call, model, count):
    """Calls with other weights each time; checks the results and the writes."""
    del TRACES[:]
    for number in range(2, 2 + count):
        model.weight[...] = jnp.array(float(number))
        before = model.calls[...]
        np.testing.assert_array_equal(call(X), number * X)
        assert model.calls > before and not tracers_in(model)


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


@matrix.cases(lambda row: row.transform != "eval_shape")
@pytest.mark.parametrize("kind", [*METHODS, *CALLABLES])
def test_what_a_callable_argument_holds_is_an_argument(case, kind):
    if (case.row.transform, kind) == ("jvp", "custom_vjp"):
        pytest.skip("JAX has no such derivative.")
    model = Scale([1.0, 1.0])
    f = (CALLABLES | METHODS)[kind](model)
    for number in (2.0, 3.0):
        model.weight[...] = jnp.full(2, number)
        before = model.calls[...]
        out = case(lambda f, x: f(x), f)
        if case.row.has_output:
            assert matrix.flat(out) == matrix.flat(number * matrix.X)
        assert (model.calls[...] > before).all() == case.keeps_values
        assert not tracers_in(model)


def test_what_a_pytree_holds_is_an_argument(mode):
    @jax.tree_util.register_pytree_node_class
    class Plain:
        """A callable that JAX takes apart, and nobody tracks."""

        def __init__(self, weight):
            self.weight = weight

        def __call__(self, x):
            return self.weight * x

        def tree_flatten(self):
            return [self.weight], None

        @classmethod
        def tree_unflatten(cls, _, parts):
            return cls(*parts)

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


@pytest.mark.parametrize("name", ["jit", "remat", "cond"])
def test_a_function_that_fails_changes_nothing(name, mode):
    model = Scale()

    def fail(model, x):
        model(x)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        AS_FUNCTION[name](functools.partial(fail, model), mode)(X)
    assert model.calls == 0 and not tracers_in(model)


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
