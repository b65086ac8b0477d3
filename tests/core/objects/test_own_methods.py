"""Callables as attributes: a method of the object is its own, also when rebuilt."""

import copy
import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx


class Power(nnx.Module):
    """Its attributes are callables over itself."""

    def __init__(self, weight=3.0):
        self.f = self.square
        self.weight = nnx.Param(jnp.array(weight))
        self.cube = functools.partial(self.power, n=3)
        self.compiled = self.twice

    def square(self):
        return self.weight[...] ** 2

    def power(self, n):
        return self.weight[...] ** n

    @nnx.jit
    def twice(self):
        return 2 * self.weight[...]

    def grow(self):
        self.weight[...] += 1


class Plain(nnx.Module):
    """One that a pickle can name."""

    def __init__(self, weight=3.0):
        self.weight = nnx.Param(jnp.array(weight))
        self.f = self.square

    def square(self):
        return self.weight[...] ** 2


def own(model):
    return model.f.__self__, model.cube.func.__self__, *model.compiled.args


COPIES = {
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "merge": lambda x: nnx.merge(*nnx.split(x)),
    "merge of a tree": lambda x: nnx.merge(*nnx.split(x, graph=False)),
    "tree.map": lambda x: jax.tree.map(lambda y: y, x),
    "recursive_map": lambda x: nnx.recursive_map(lambda _, y: y, x),
    "view": nnx.view,
    "eval_shape": lambda x: nnx.eval_shape(lambda x: nnx.clone(x), x),
    "vmap": lambda _: nnx.vmap(lambda w: Power(w))(jnp.ones(2)),
    "jax.jit": lambda x: jax.jit(lambda x: x)(x),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_methods_of_its_own(name):
    model = Power()
    copied = COPIES[name](model)
    assert copied is not model
    assert all(x is copied for x in own(copied))
    assert all(x is model for x in own(model))


def test_pickles_have_methods_of_their_own():
    model = Plain()
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.f.__self__ is loaded and loaded.f() == 9.0
    for graph in (False, True):
        graphdef = nnx.graphdef(model, graph=graph)
        assert pickle.loads(pickle.dumps(graphdef)) == graphdef


def test_objects_with_own_methods_have_one_structure():
    first, second = nnx.graphdef(Power()), nnx.graphdef(Power())
    assert first == second and hash(first) == hash(second)
    assert jax.tree.structure(Power()) == jax.tree.structure(Power())
    assert len(jax.tree.leaves(Power())) == 1


def test_transforms_see_present_weights(mode):
    model = Power()
    call = nnx.jit(lambda m: m.f() + m.cube() + m.compiled(), **mode)
    for w in (1.0, 2.0, 3.0, 4.0):
        model.weight[...] = jnp.array(w)
        assert call(model) == w**2 + w**3 + 2 * w
    assert call(Power(2.0)) == 16.0 and call.jitted_fn._cache_size() == 1


def test_writes_of_own_methods_reach_the_caller(mode):
    model = Power()
    model.f = model.grow
    for number in (1, 2, 3):
        nnx.jit(lambda m: m.f(), **mode)(model)
        assert model.weight[...] == 3.0 + number
    assert model.f.__self__ is model


def test_an_own_method_is_kept_where_nothing_changes():
    model = Power()
    before = model.f
    nnx.jit(lambda m: m.grow())(model)
    assert model.f is before


def test_an_own_method_may_be_replaced():
    model = Power()
    call = nnx.jit(lambda m: m.f())
    assert [call(model), call(model)] == [9.0, 9.0]
    model.f = model.cube
    assert call(model) == 27.0
    model.f = model.square
    assert call(model) == 9.0 and call.jitted_fn._cache_size() == 2


class Holder(nnx.Module):
    """Takes a function of itself and of a layer to the value of an attribute."""

    def __init__(self, value):
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.f = value(self)

    def method(self):
        """Does nothing."""


HIDDEN = {
    "method": lambda x: x.layer.__call__,
    "partial": lambda x: functools.partial(nnx.Linear.__call__, x.layer),
    "in a list": lambda x: [x.layer.__call__],
    "own in a dict": lambda x: {"a": x.method},
    "both": lambda x: functools.partial(x.method, x.layer),
}
FINE = {
    "own": lambda x: x.method,
    "static": lambda x: nnx.static(x.layer.__call__),
    "function": lambda x: functools.partial(nnx.Linear.__call__, use=2),
    "rope": lambda x: functools.partial(
        nnx.dot_product_attention_with_rope,
        rope=nnx.RoPE(embedding_size=4, max_seq_len=3),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_weights_hidden_in_a_callable_are_told_where_it_is_assigned(name):
    with pytest.warns(nnx.errors.ConstantStateWarning, match=r"Holder\.f") as caught:
        Holder(HIDDEN[name])
    assert "self.f = " in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", FINE)
def test_other_callables_are_static_without_a_word(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(nnx.to_flat_state(nnx.state(Holder(FINE[name])))) == 2
