"""What a function reaches besides its arguments, and whether it may change unseen."""

import dataclasses
import enum
import functools
import math
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.config import GRAPH_UPDATES
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.rows import Row
from graftree.transforms.crossing.traces import captures

ROW = Row.uniform("cond", GRAPH_UPDATES)


def record(*functions, args=(), strict=True):
    signature = Call(functions[0], ROW, args, {}).packed.signature
    return captures.record(functions, signature, strict=strict)


class Size(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 1.0


class Static(nnx.Module):
    def __init__(self, value):
        self.value = nnx.static(value)

    def __call__(self, x):
        return x


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def helper(x):
    return jnp.sin(x) * math.pi


FACTOR = 2.0
NUMPY, DRAWING = np, np.random
OWN, BELOW = types.ModuleType("own"), types.ModuleType("own.below")
vars(OWN).update(below=BELOW, scale=3.0, helper=helper, np=np, jnp=jnp)
vars(BELOW).update(scale=4.0, holder=types.SimpleNamespace(k=1))

CLOSED = {
    "arguments only": lambda x: x + 1,
    "modules": lambda x: jnp.tanh(jax.nn.relu(x)) + np.float32(1) + nnx.relu(x),
    "a helper": lambda x: helper(x),
    "a global number": lambda x: x * FACTOR,
    "a constant default": lambda x, y=(1, "a", None, 2.5): x,
    "a function inside": lambda x: [(lambda y: y * FACTOR)(x) for _ in range(2)],
    "NumPy under another name": lambda x: NUMPY.sin(x) * NUMPY.linalg.norm(x),
    "a number of a module": lambda x: x * OWN.scale + OWN.below.scale,
    "a function of a module": lambda x: OWN.helper(OWN.jnp.sin(x)),
    "a module in a function inside": lambda x: (lambda y: y * OWN.scale)(x),
    "built-ins": lambda x: sum([len(x), max(x)], start=float(isinstance(x, tuple))),
    "a decorated function": decorated(helper),
    "a partial": functools.partial(helper),
    "a compiled function": jax.jit(helper),
    "a function of JAX": jnp.sin,
}


@pytest.mark.parametrize("name", CLOSED)
def test_what_is_closed_has_an_equal_record_each_time(name):
    first = record(CLOSED[name])
    assert first is not None and first == record(CLOSED[name])


def open_functions():
    holder, array, listed = types.SimpleNamespace(k=1), np.ones(2), [1.0]
    module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    count = 0

    def counts(x):
        nonlocal count
        count += 1
        return x

    def with_attribute(x):
        return x

    with_attribute.k = 1

    def imports_numpy(x):
        import numpy

        return x * numpy.random.rand()

    def writes_to_module(x):
        OWN.scale = 2.0
        return x

    class Callable:
        def __call__(self, x):
            return x

    return {
        "an object": lambda x: module(x),
        "a Variable": lambda x: module.kernel * x,
        "a default": lambda x, m=module: m(x),
        "a keyword default": lambda x, *, m=module: m(x),
        "a namespace": lambda x: holder.k * x,
        "a NumPy array": lambda x: array * x,
        "a list": lambda x: listed[0] * x,
        "a name it assigns": counts,
        "attributes of its own": with_attribute,
        "a callable object": Callable(),
        "a method of an object": functools.partial(Callable().__call__),
        "an enum": lambda x: x * Size.ONE,
        "a function in a tuple": (lambda pair: lambda x: pair[0](x))(
            (lambda x: holder.k * x,)
        ),
        "a lambda inside": lambda x: (lambda y: module(y))(x),
        "random numbers of NumPy": lambda x: x * np.random.rand(),
        "random numbers under another name": lambda x: x * NUMPY.random.rand(),
        "random numbers of a module": lambda x: x * DRAWING.rand(),
        "NumPy as a whole": lambda x: helper(NUMPY) * x,
        "an import of NumPy": imports_numpy,
        "printing": lambda x: print(x),
        "a function of an unknown module": lambda x: operator.add(x, x),
        "a module as a whole": lambda x: helper(OWN) * x,
        "a module in a name": lambda x: next(m.scale * x for m in [OWN]),
        "a module below as a whole": lambda x: helper(OWN.below) * x,
        "an attribute by its name": lambda x: getattr(OWN, "scale") * x,  # noqa: B009
        "an object of a module": lambda x: OWN.below.holder.k * x,
        "what a module lacks": lambda x: OWN.lacking * x,
        "NumPy of a module": lambda x: x * OWN.np.random.rand(),
        "a module that it writes to": writes_to_module,
        "a name that is not set": lambda x: NOT_SET * x,  # noqa: F821
        "a decorated function": decorated(lambda x: holder.k * x),
    }


OPEN = open_functions()


@pytest.mark.parametrize("name", OPEN)
def test_what_is_open_has_no_record(name):
    assert record(OPEN[name]) is None


def test_a_record_tells_equal_values_of_other_types_apart(monkeypatch):
    seen = []
    for value in (1, True, 1.0, np.int8(1), -0.0, 0.0, "1", b"1", jnp.ones(())):
        monkeypatch.setitem(globals(), "FACTOR", value)
        now = record(CLOSED["a global number"])
        assert now == record(CLOSED["a global number"]) and now not in seen
        seen.append(now)


def test_a_record_follows_what_a_name_stands_for(monkeypatch):
    before = record(CLOSED["a helper"])
    monkeypatch.setitem(globals(), "helper", lambda x: jnp.cos(x))
    assert record(CLOSED["a helper"]) != before


@pytest.mark.parametrize("place", [OWN, BELOW])
def test_a_record_follows_what_a_module_holds(place, monkeypatch):
    before = record(CLOSED["a number of a module"])
    monkeypatch.setattr(place, "scale", 5.0)
    assert record(CLOSED["a number of a module"]) != before


def test_a_record_depends_on_what_is_in_force():
    before = record(helper)
    with nnx.set_graph_mode(False):
        assert record(helper) != before
    with nnx.logical_axis_rules([("a", "b")]):
        assert record(helper) != before
    assert record(helper) == before


def test_functions_that_name_each_other_have_a_record():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert record(even) is not None


@pytest.mark.parametrize(
    ("value", "is_closed"),
    [
        (1, True),
        ("name", True),
        (helper, True),
        ((helper, 2), True),
        (OPEN["a namespace"], False),
        (Config(), False),
        (types.SimpleNamespace(), False),
    ],
)
def test_static_values_of_the_arguments_are_followed(value, is_closed):
    found = record(lambda m: m.value, args=(Static(value),))
    assert (found is not None) == is_closed


def test_methods_of_the_arguments_are_followed(monkeypatch):
    class Net(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return super().__getattribute__("linear")(x) * FACTOR

    def call(net, x):
        return net(x)

    before = record(call, args=(Net(), 1.0))
    assert before is not None
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert record(call, args=(Net(), 1.0)) != before
    monkeypatch.setitem(globals(), "FACTOR", nnx.Param(3.0))
    assert record(call, args=(Net(), 1.0)) is None


@pytest.mark.parametrize("kind", ["callable object", "static method"])
def test_all_that_a_class_has_is_followed(kind):
    holder = types.SimpleNamespace(k=1)

    class Callable:
        def __call__(self, x):
            return holder.k

    class Net(nnx.Module):
        if kind == "callable object":
            __call__ = Callable()
        else:
            __call__ = staticmethod(lambda x: holder.k)

    assert record(lambda net: net(1.0), args=(Net(),)) is None


def test_without_strictness_a_function_may_count_its_traces():
    assert record(OPEN["a name it assigns"], strict=False) is not None
    assert record(OPEN["a list"], strict=False) is not None
    for name in ("an object", "a Variable", "a namespace", "a NumPy array"):
        assert record(OPEN[name], strict=False) is None
