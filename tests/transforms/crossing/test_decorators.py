"""Forms of decoration, methods, keyword arguments (contract, 1.6 and 1.7)."""

import functools

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.transforms.crossing import decorators

TRANSFORMS = ["jit", "grad", "value_and_grad"]


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.w * x


class Plain(nnx.Pytree):
    def __call__(self, x):
        return x * 2


@pytest.fixture(params=TRANSFORMS)
def transform(request):
    return getattr(nnx, request.param)


def test_other_callables_are_taken(transform):
    for f in (Plain().__call__, Model(), functools.partial(lambda x: x * 2.0)):
        out = transform(f)(3.0)
        assert (out[1] if isinstance(out, tuple) else out) in (2.0, 6.0)


def test_transforms_are_used_with_and_without_options(transform):
    def f(x):
        return x * 2.0

    for wrapped in (transform(f), transform()(f), transform(graph=False)(f)):
        assert wrapped(3.0) in (6.0, 2.0, (6.0, 2.0))


def test_name_and_docstring_are_kept(transform):
    def loss(model):
        """Says how bad it is."""
        return model

    wrapped = transform(loss)
    assert (wrapped.__name__, wrapped.__doc__) == ("loss", "Says how bad it is.")
    assert wrapped.__wrapped__ is loss


def test_methods_are_decorated_in_the_class():
    class Jitted(Model):
        @nnx.jit
        def twice(self, x):
            self.w[...] += 1
            return self.w * x

        @nnx.grad
        def slope(self, x):
            return self.w * x

    model = Jitted()
    assert model.twice(2.0) == 6.0 and model.w[...] == 3.0
    assert model.slope(5.0)["w"][...] == 5.0
    assert Jitted.twice is Jitted.__dict__["twice"]
    assert model.twice.func is Jitted.twice


def test_init_can_be_jitted():
    class Made(nnx.Module):
        @nnx.jit(static_argnums=1)
        def __init__(self, size, scale):
            traces.append(None)
            assert isinstance(size, int)
            self.w = nnx.Param(jnp.ones(size) * scale)
            self.alias = self.w

    traces = []
    first, second = Made(3, 2.0), Made(3, 4.0)
    assert first.w[...].tolist() == [2.0, 2.0, 2.0] and second.w is second.alias
    assert len(traces) == 1


def test_classes_can_be_jitted():
    model = nnx.jit(Model)()
    assert type(model) is Model and model.w[...] == 2.0
    model.w[...] += 1


# ------------------------------------------------------------------ keywords


def test_keywords_become_positions_with_defaults():
    def f(a, b=2, *, c=3): ...

    with pytest.raises(
        TypeError, match="keyword arguments could not be resolved to pos"
    ):
        decorators.to_positions(f, (1,), {"c": 5})
    assert decorators.to_positions(lambda a, b=2: 0, (), {"a": 1}) == (1, 2)
    assert decorators.to_positions(f, (1,), {}) == (1,)


def test_partials_are_not_resolved():
    f = functools.partial(lambda a, b: a, b=1)
    with pytest.raises(TypeError, match="keyword arguments could not be resolved"):
        decorators.to_positions(f, (), {"a": 1})


def test_jit_keeps_keywords(mode):
    @nnx.jit(**mode)
    def f(*, model, x=1.0):
        model.w[...] += x

    model = Model()
    f(model=model, x=3.0)
    f(model=model)
    assert model.w[...] == 6.0


def test_grad_takes_keywords(mode):
    grads = nnx.grad(lambda model, x: model(x), **mode)(Model(), x=3.0)
    assert jax.tree.leaves(grads) == [3.0]
