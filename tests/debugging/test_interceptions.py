"""`nnx.debugging.intercept`: what modules return, seen or replaced."""

import asyncio
import functools
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.core.objects import methods  # no tool watches less than intercept
from tests.comparisons import raises
from tests.threads import run_in_threads


def model():
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
    return nnx.Sequential(first, nnx.relu, last)


def recorder(calls):
    def record(path, module, args, output):
        calls.append((path, type(module).__name__, args, output))

    return record


def test_outputs_are_seen_with_path_and_arguments():
    net, x, calls = model(), jnp.ones((4, 2)), []
    with nnx.debugging.intercept(net, ..., recorder(calls)):
        y = net(x)
    assert [call[:2] for call in calls] == [
        (("layers", 0), "Linear"),
        (("layers", 2), "Linear"),
        ((), "Sequential"),
    ]
    assert calls[0][2] == (x,) and calls[-1][3] is y


def test_filters_choose_modules():
    net, calls = model(), []
    with nnx.debugging.intercept(net, nnx.PathContains(2), recorder(calls)):
        net(jnp.ones((4, 2)))
    assert [path for path, *_ in calls] == [("layers", 2)]


def test_outputs_are_replaced(mode):
    net, x = model(), jnp.ones((4, 2))
    f = nnx.jit(lambda net, x: net(x), **mode)
    before = f(net, x)
    f(net, x)
    with nnx.debugging.intercept(net, nnx.Linear, lambda *args: args[-1] * 0 + 7):
        np.testing.assert_array_equal(net(x), jnp.full((4, 1), 7.0))
        np.testing.assert_array_equal(f(net, x), jnp.full((4, 1), 7.0))
    np.testing.assert_array_equal(f(net, x), before)


def test_equal_stacks_under_one_transform_are_all_seen():
    class Towers(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))
            keys = jax.random.split(jax.random.key(0), 3)
            self.left, self.right = make(keys), make(keys)

        def __call__(self, x):
            over_layers = nnx.scan(lambda x, layer: layer(x), out_axes=nnx.Carry)
            return over_layers(over_layers(x, self.left), self.right)

    net, x = Towers(), jnp.ones((1, 2))
    for call in (net, functools.partial(nnx.jit(Towers.__call__), net)):
        calls = []
        with nnx.debugging.intercept(net, nnx.Linear, recorder(calls)):
            call(x)
        assert {path for path, *_ in calls} == {("left",), ("right",)}


def test_a_loop_in_the_context_is_traced_once():
    net, x, calls = model(), jnp.ones((4, 2)), []
    f = nnx.jit(lambda net, x: net(x))
    with nnx.debugging.intercept(net, nnx.Linear, recorder(calls)):
        for _ in range(4):
            f(net, x)
        net(x)
        f(net, x)
    assert len(calls) == 4


def test_other_models_are_left_alone():
    net, other, calls = model(), model(), []
    with nnx.debugging.intercept(net, ..., recorder(calls)):
        other(jnp.ones((4, 2)))
    assert calls == []


def test_methods_end_the_path_and_keywords_have_positions():
    class Scale(nnx.Module):
        def apply(self, x, by=1):
            return x * by

    scale, calls = Scale(), []
    with nnx.debugging.intercept(scale, ..., recorder(calls)):
        scale.apply(2, by=3)
    assert calls == [(("apply",), "Scale", (2, 3), 6)]


def test_methods_that_jax_compiled_are_seen():
    class Scale(nnx.Module):
        @jax.jit
        def __call__(self, x):
            return x * 2

        @jax.jit
        def apply(self, x):
            return x * 3

    scale, calls = Scale(), []
    with nnx.debugging.intercept(scale, ..., recorder(calls)):
        scale(1), scale.apply(1)
    assert [(path, y) for path, _, _, y in calls] == [((), 2), (("apply",), 3)]


def test_contexts_nest_and_end_with_an_exception():
    net, x = model(), jnp.ones((1, 2))
    inner, outer = [], []
    contexts = [nnx.debugging.intercept(net, ..., recorder(x)) for x in (outer, inner)]
    with pytest.raises(RuntimeError), contexts[0], contexts[1]:
        net(x)
        raise RuntimeError
    net(x)
    assert len(inner) == len(outer) == 3


def test_contexts_for_a_model_and_a_part_of_it_nest():
    net, inner, outer = model(), [], []
    part = net.layers[2]
    with (
        nnx.debugging.intercept(net, nnx.Linear, recorder(outer)),
        nnx.debugging.intercept(part, nnx.Linear, recorder(inner)),
    ):
        net(jnp.ones((1, 2)))
    assert [path for path, *_ in inner] == [()]
    assert [path for path, *_ in outer] == [("layers", 0), ("layers", 2)]


def test_what_is_no_model_or_filter_is_refused():
    wrong = ((jnp.ones(2), ...), "expects a Module"), ((model(), 3.5), "filter")
    for given, said in wrong:
        with pytest.raises(TypeError, match=said):
            with nnx.debugging.intercept(*given, print):
                pass


# ------------------------------------------------------- what is traced in a context


AXES = {"in_axes": (nnx.Carry, None), "out_axes": nnx.Carry}
SCAN = nnx.scan(lambda x, net: net(x), length=2, **AXES)


INNER = nnx.jit(lambda net, x: net(x))


def nothing(net, x):
    return x[:, :1] * 0


PARTS = {
    "nnx.jit": nnx.jit(lambda net, x: net(x)),
    "nnx.remat": nnx.remat(lambda net, x: net(x)),
    "nnx.vmap": nnx.vmap(lambda net, x: net(x), in_axes=(None, 0)),
    "nnx.grad": nnx.grad(lambda net, x: net(x).sum(), argnums=1),
    "nnx.cond": lambda net, x: nnx.cond(True, lambda m, x: m(x), nothing, net, x),
    "nnx.jit in nnx.jit": nnx.jit(lambda net, x: INNER(net, x)),
}


def closed_over(transform):
    """A function of plain JAX, compiled once for a model that it closes over."""
    known = {}

    def call(net, x):
        if id(net) not in known:
            known[id(net)] = net, transform(lambda x: net(x))
        return known[id(net)][1](x)

    return call


JAX_PARTS = {
    "jax.jit": closed_over(jax.jit),
    "jax.jit in nnx.jit": nnx.jit(lambda net, x: jax.jit(lambda x: net(x))(x)),
    "jax.checkpoint": closed_over(jax.checkpoint),
    "nnx.jit in jax.jit": closed_over(
        lambda f: jax.jit(lambda x: nnx.jit(lambda x: f(x))(x))
    ),
    "nnx.vmap in jax.jit": closed_over(
        lambda f: jax.jit(nnx.vmap(lambda x: f(x[None])[0]))
    ),
}
EVERY_PART = PARTS | JAX_PARTS


def times(factor):
    return lambda path, module, args, output: output * factor


@pytest.mark.parametrize("part", EVERY_PART)
def test_what_is_traced_in_a_context_is_used_in_no_other(part):
    call, x = EVERY_PART[part], jnp.ones((4, 2))
    net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    plain = call(net, x)
    for factor in (2, 3, 2):
        with nnx.debugging.intercept(net, nnx.Linear, times(factor)):
            for _ in range(2):
                np.testing.assert_allclose(call(net, x), factor * plain, rtol=1e-6)
            with nnx.debugging.intercept(net, nnx.Linear, times(7)):
                np.testing.assert_allclose(call(net, x), 7 * factor * plain, rtol=1e-6)
            np.testing.assert_allclose(call(net, x), factor * plain, rtol=1e-6)
        np.testing.assert_array_equal(call(net, x), plain)


def test_what_an_observer_of_less_did_not_see_is_traced_again():
    coder, x, calls = Coder(), jnp.ones((1, 2)), []
    compiled = jax.jit(lambda x: coder.negated(x))
    with methods.observed(lambda _, call: call()):
        compiled(x)
    with nnx.debugging.intercept(coder, ..., recorder(calls)):
        compiled(x)
    assert [path for path, *_ in calls] == [("negated",)]


def test_contexts_of_two_threads_have_programs_of_their_own():
    call, net, x = JAX_PARTS["jax.jit"], model(), jnp.ones((4, 2))
    plain, results = call(net, x), {}
    both_are_in = threading.Barrier(2)

    def watch(factor):
        with nnx.debugging.intercept(net, nnx.PathContains(2), times(factor)):
            both_are_in.wait()
            results[factor] = call(net, x)
            both_are_in.wait()
            results[factor] -= call(net, x) - results[factor]

    run_in_threads(lambda: watch(2), lambda: watch(3))
    for factor, result in results.items():
        np.testing.assert_allclose(result, factor * plain, rtol=1e-6)


TOOLS = {
    "find_nans": lambda net, x: nnx.debugging.find_nans(PARTS["nnx.jit"])(net, x),
    "tabulate": nnx.tabulate,
    "saved": lambda net, x: nnx.memory.saved(lambda net, x: net(x), net, x),
}


@pytest.mark.parametrize("use", [*PARTS, "scan", "a call", *TOOLS])
def test_contexts_leave_nothing_behind(use):
    # Issue 32: each left its programs in JAX's caches, 400 KB for one Linear.
    size = 2 if use == "scan" else 1
    net, x = nnx.Linear(2, size, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    calls = {
        **PARTS,
        "scan": lambda net, x: SCAN(x, net),
        "a call": lambda net, x: net(x),
        **TOOLS,
    }

    def once():
        if use in TOOLS:
            calls[use](net, x)
            return
        with nnx.debugging.intercept(net, nnx.Linear, times(2)):
            calls[use](net, x)

    def count():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(18):  # as many traces as are remembered of a function
        once()
    before = count()
    for _ in range(10):
        once()
    assert count() - before < 100


# ---------------------------------------------------------------- methods of classes


class Coder(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def encode(self, x):
        return self.layer(x)

    def twice(self, x):
        return self.encode(self.encode(x))

    def negated(self, x):
        return -x

    act = staticmethod(jnp.sin)
    size = property(lambda self: 2)


def test_methods_are_seen_and_classes_stay_as_they_are():
    coder, x, calls = Coder(), jnp.ones((1, 2)), []
    before = dict(vars(Coder)), Coder.encode, type(coder).__getattribute__
    with nnx.debugging.intercept(coder, ..., recorder(calls)):
        coder.twice(coder.act(x))
        assert coder.size == 2
        assert coder.encode.__code__ is vars(Coder)["encode"].__code__
        assert coder.encode.__self__ is coder
        assert (dict(vars(Coder)), Coder.encode) == before[:2]
        Coder.added = lambda self, x: x
        coder.added(x)
    del Coder.added
    names = ["layer", "encode"] * 2 + ["twice", "added"]
    assert [path[-1] for path, *_ in calls] == names
    assert (dict(vars(Coder)), Coder.encode, type(coder).__getattribute__) == before


def test_other_threads_see_methods_as_they_are():
    coder, calls, found = Coder(), [], []

    def use():
        found.append(coder.encode.__func__)
        coder.encode(jnp.ones((1, 2)))

    with nnx.debugging.intercept(coder, ..., recorder(calls)):
        run_in_threads(use)
    assert found == [vars(Coder)["encode"]] and calls == []


def test_calls_of_all_kinds_are_seen():
    class Partial(Coder):
        __call__ = functools.partialmethod(lambda self, times, x: x * times, 3)

    class Patched(Coder):
        def __call__(self, x):
            return x

    class Compiled(Coder):
        @nnx.jit
        def __call__(self, x):
            return x * 3

        @nnx.jit
        def other(self, x):
            return x * 3

    Patched.__call__ = lambda self, x: x * 3
    for cls in (Partial, Patched, Compiled):
        net = cls()
        with nnx.debugging.intercept(net, cls, lambda *given: given[-1] + 1):
            assert net(2) == 7
            assert cls is not Compiled or net.other(2) == 7


def test_what_a_generator_or_coroutine_calls_has_its_path():
    class Lazy(Coder):
        def __call__(self, x):
            yield self.layer(x)

    class Later(Coder):
        async def __call__(self, x):
            return self.layer(x)

    for net, run in ((Lazy(), next), (Later(), asyncio.run)):
        calls = []
        with nnx.debugging.intercept(net, ..., recorder(calls)):
            run(net(jnp.ones((1, 2))))
        assert [path for path, *_ in calls] == [("layer",)]
        with raises(TypeError, f"at {type(net).__name__}.layer"):
            run(net(jnp.ones((1, 5))))
