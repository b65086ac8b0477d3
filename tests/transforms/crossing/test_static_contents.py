"""What a static attribute holds keeps no tracer (issue 12, section 13)."""

import types

import jax.numpy as jnp
import pytest

import graftree as nnx


class Logger(nnx.Module):
    def __init__(self, log):
        self.weight = nnx.Param(jnp.array(2.0))
        self.log = nnx.static(log)


# What is held, how a value is put into it, and what it should hold afterwards.
PUT = {
    "list": (lambda: [1], lambda log, x: log.append(x), [1]),
    "dict": (lambda: {"a": 1}, lambda log, x: log.update(a=(x, 2)), {"a": 1}),
    "nested": (lambda: {"a": [1]}, lambda log, x: log["a"].append(x), {"a": [1]}),
    "object": (
        lambda: types.SimpleNamespace(a=1),
        lambda log, x: setattr(log, "a", {"x": x}),
        types.SimpleNamespace(a=1),
    ),
}
TRANSFORMS = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "grad": nnx.grad,
    "cond": lambda f, **mode: lambda m: nnx.cond(jnp.array(True), f, f, m, **mode),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", PUT)
def test_a_tracer_is_taken_out_and_told_with_its_path(kind, transform, mode):
    make, put, expected = PUT[kind]
    model = nnx.Dict(layers=nnx.List([Logger(make())]))

    def f(model):
        layer = model.layers[0]
        put(layer.log, layer.weight * 2)
        return layer.weight * 2

    with pytest.warns(nnx.errors.LostUpdateWarning, match="static attr") as caught:
        out = TRANSFORMS[transform](f, **mode)(model)
    message = str(caught[0].message)
    assert transform == "grad" or out == 4.0
    assert "args[0], at layers/0/log" in message and "nnx.Variable" in message
    assert model.layers[0].log == expected


def test_a_tracer_is_taken_out_also_if_the_function_fails():
    model = Logger([])

    @nnx.jit
    def f(model, x):
        model.log.append(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        f(model, 1.0)
    assert model.log == []


def test_what_is_no_tracer_may_be_logged():
    model = Logger([])
    nnx.jit(lambda model, x: model.log.append(x.shape))(model, jnp.ones(3))
    assert model.log == [(3,)]
