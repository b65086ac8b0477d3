"""Outside of a trace, control flow sees the present state of all that it names.

Issue 12, defects §1 and §8: what was traced once went on with what it had captured.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.zoo import Scale


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
