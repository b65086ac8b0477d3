"""Compiled functions are remembered as long as the user's functions live."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.config import GRAPH, GRAPH_UPDATES
from graftree.transforms.crossing.signatures import Signature
from graftree.transforms.crossing.traces.captures import PerFunction

NOTHING = Signature(jax.tree.structure(()), ())


class Calls:
    """Compiled callers of functions, one after the other, on one argument."""

    def __init__(self):
        def make(*given):
            *getters, _, _ = given

            def call_all(x):
                for getter in getters:
                    x = getter()(x)
                return x

            return call_all

        self.known = PerFunction("made", make)

    def get(self, functions, key="key", mode=GRAPH):
        return self.known.get(functions, NOTHING, mode, key)


@pytest.fixture
def calls():
    return Calls()


def counting():
    """A function, and a list that grows by one with every trace."""
    traces = []

    def double(x):
        traces.append(None)
        return 2 * x

    return double, traces


def test_equal_functions_and_keys_share_what_is_compiled(calls):
    (f, traces), (g, _) = counting(), counting()
    first = calls.get((f, g))
    assert first is calls.get((f, g))
    assert [first(1.0), calls.get((f, g))(2.0)] == [4.0, 8.0]
    assert len(traces) == 1


@pytest.mark.parametrize("mode", [GRAPH, GRAPH_UPDATES])
def test_a_function_of_its_arguments_is_remembered_in_all_modes(calls, mode):
    def closed(x):
        return jnp.sin(x) * FACTOR

    first = calls.get((closed,), mode=mode)
    assert first is calls.get((closed,), mode=mode)


@pytest.mark.parametrize("other", ["order", "key", "count"])
def test_other_functions_or_keys_do_not(calls, other):
    (f, _), (g, _) = counting(), counting()
    given = {"order": ((g, f), "a"), "key": ((f, g), "b"), "count": ((f,), "a")}
    first, second = calls.get((f, g), "a"), calls.get(*given[other])
    assert first is not second
    assert first is calls.get((f, g), "a") and second is calls.get(*given[other])
    assert second(1.0) == (2.0 if other == "count" else 4.0)


def test_functions_are_not_kept_alive(calls):
    (f, _), (g, _) = counting(), counting()
    compiled = calls.get((f, g))
    assert compiled(1.0) == 4.0
    alive, compiled = [*map(weakref.ref, (f, g, compiled))], None
    del f
    gc.collect()
    assert alive[0]() is None and alive[1]() is g
    del g
    gc.collect()
    assert [ref() for ref in alive[:2]] == [None, None]


def test_what_is_compiled_goes_with_any_of_its_functions(calls):
    (stays, _), (goes, _) = counting(), counting()
    for functions in ((stays, goes), (goes, stays), (goes,)):
        calls.get(functions)(1.0)
    gone = weakref.ref(goes)
    remembered = weakref.ref(calls.get((stays, goes)))
    assert remembered() is not None
    del goes, functions
    gc.collect()
    assert gone() is None and remembered() is None


def test_calls_with_short_lived_functions_leave_nothing_behind(calls):
    stays, _ = counting()

    def size():
        gc.collect()
        return len([x for x in gc.get_objects() if isinstance(x, weakref.finalize)])

    calls.get((stays, lambda x: x))
    before = size()
    for _ in range(3):
        calls.get((stays, lambda x: x))
    assert size() == before


def test_few_traces_of_a_function_are_kept(calls):
    def scaled(x):
        return x * FACTOR

    compiled = []
    for number in range(20):
        globals()["FACTOR"] = number
        compiled.append(weakref.ref(calls.get((scaled,))))
        assert compiled[-1]()(2.0) == 2.0 * number
    gc.collect()
    assert 1 < len([ref for ref in compiled if ref() is not None]) < 10


FACTOR = 0


@pytest.mark.parametrize("kind", ["without weak references", "unhashable", "method"])
def test_callable_objects_are_not_remembered(calls, kind):
    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return x + 1

    class Listed(list):
        def __call__(self, x):
            return x + 1

    f = {
        "without weak references": Slotted(),
        "unhashable": Listed(),
        "method": Slotted().__call__,
    }[kind]
    assert calls.get((f, f))(1.0) == 3.0
    assert calls.get((f,)) is not calls.get((f,))


class Scale(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.factor * x

    def method(self, x):
        return self.factor * x


GLOBAL = Scale()


def uses_global(x):
    return GLOBAL(x)


def capturing(scale):
    """Functions of one argument that read the factor of ``scale``."""
    factor, layers = scale.factor, [scale]
    return {
        "object": scale,
        "method": scale.method,
        "partial": functools.partial(Scale.method, scale),
        "partial of a method": functools.partial(scale.method),
        "module in a closure": lambda x: scale(x),
        "list in a closure": lambda x: layers[0](x),
        "variable in a closure": lambda x: factor * x,
    }


@pytest.mark.parametrize("mode", [GRAPH, GRAPH_UPDATES])
@pytest.mark.parametrize("name", [*capturing(GLOBAL), "global"])
def test_captured_objects_are_read_anew_in_every_call(calls, name, mode):
    scale = GLOBAL if name == "global" else Scale()
    f = uses_global if name == "global" else capturing(scale)[name]
    for factor in (2.0, 3.0):
        scale.factor[...] = factor
        assert calls.get((f,), mode=mode)(1.0) == factor


def test_the_call_is_inlined(calls):
    f, _ = counting()
    program = jax.jit(lambda x: calls.get((f,))(x) + 1).lower(1.0).as_text()
    assert "multiply" in program and "call @" not in program


def test_scan_reads_captured_objects_as_they_are_now():
    factor = nnx.Variable(jnp.array(1.0))

    @nnx.scan(out_axes=nnx.Carry)
    def step(total, x):
        return total + factor * x

    assert step(0.0, jnp.arange(3.0)) == 3.0
    factor[...] = 10.0
    assert step(0.0, jnp.arange(3.0)) == 30.0
