"""Modules of a few functions: `compat`, `deprecations`, `ids`, `proxy_caller`."""

import functools
import inspect
import pickle
import warnings

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import ids, proxy_caller

# ------------------------------------------------- compat: graph mode, whatever is set


def test_each_is_the_public_function():
    partials = {name: getattr(nnx.compat, name) for name in dir(nnx.compat)}
    partials = {k: f for k, f in partials.items() if type(f) is functools.partial}
    assert len(partials) > 30
    for name, function in partials.items():
        assert function.func is getattr(nnx, name, getattr(nnx.rnglib, name, None))


@pytest.mark.parametrize("decorate", [nnx.compat.jit, nnx.compat.jit()])
def test_jit_propagates_structure_with_and_without_parentheses(decorate):
    model = nnx.Module()
    model.a = model.b = nnx.Param(jnp.ones(2))
    model.me = model

    @decorate
    def add(model):
        model.c = nnx.Param(model.a + model.b)

    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        add(model)
        grads = nnx.compat.grad(lambda model: (model.a * model.b).sum())(model)
    assert model.c.tolist() == grads["a"].tolist() == [2, 2]


# ------------------------------------------------------------------------ deprecations


def double(x, *, times=1):
    """Doubles a number."""
    return x * 2**times


class Model:
    def run(self):
        return "ran"


def test_every_call_does_the_same_and_warns_at_the_line_of_the_caller():
    older = nnx.deprecations.deprecated(double)
    message = "This function is deprecated. Use double instead."
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=message) as caught:
            assert older(3, times=2) == 12
        assert caught[0].filename == __file__


def test_an_older_name_looks_like_the_new_function_with_a_note():
    older = nnx.deprecations.deprecated(double)
    assert older.__name__ == "double"
    assert inspect.signature(older) == inspect.signature(double)
    first, *_, last = older.__doc__.splitlines()
    assert (first, last) == (".. deprecated::", "Doubles a number.")


def test_methods_are_named_with_their_class():
    older = nnx.deprecations.deprecated(Model.run)
    with pytest.warns(DeprecationWarning, match=r"Use Model\.run instead"):
        assert older(Model()) == "ran"
    # It has no docstring of its own.
    assert older.__doc__.endswith("Use :func:`Model.run` instead.")


OLDER_SPELLINGS = {
    "sharding": lambda: nnx.Param(jnp.ones(2), sharding=(), eager_sharding=False),
    "sharding_names": lambda: nnx.Param(1.0).set_metadata(sharding_names=()),
    "flat_state": lambda: nnx.State({}).flat_state(),
}


@pytest.mark.parametrize("spelling", OLDER_SPELLINGS)
def test_documented_older_spellings_warn_only_those_who_ask(spelling):
    # Issue 12. Python's own filters: a DeprecationWarning counts in the program only.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("error", category=DeprecationWarning, module=__name__)
        OLDER_SPELLINGS[spelling]()
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match=spelling):
            OLDER_SPELLINGS[spelling]()


# ----------------------------------------------------------------------- numbers, calls


def test_equal_numbers_are_equal_and_pickling_keeps_them():
    number = ids.uuid()
    assert pickle.loads(pickle.dumps(number)) == number
    assert ids.UUID(3) == ids.UUID(3) != ids.UUID(4)
    assert len({ids.UUID(3), ids.UUID(3)}) == 1


def test_accesses_are_recorded_for_later():
    accessor = proxy_caller.DelayedAccessor().layers[0]
    assert accessor.actions == (proxy_caller.GetAttr("layers"), proxy_caller.GetItem(0))
    same = proxy_caller.DelayedAccessor().layers[0]
    assert accessor == same != proxy_caller.DelayedAccessor()
    proxy = proxy_caller.CallableProxy(lambda accessor, *args: accessor("ab")(*args))
    assert proxy.replace("a", "b") == "bb" and proxy[1].upper() == "B"
