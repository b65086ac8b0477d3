"""Modules of a few functions: ``compat``, ``deprecations``, ``ids``, ``proxy_caller``.

And the bridge, where Flax is not installed.
"""

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import ids, proxy_caller

# ------------------------------------------------- compat: graph mode, whatever is set

GRAPH = (
    "split state clone graphdef flatten iter_graph iter_modules iter_children"
    " recursive_map view view_info reseed backup_keys"
).split()
UPDATES = "split_rngs fork_rngs jit grad value_and_grad".split()


@pytest.fixture
def tied():
    """A model that holds the same Param at two places, and itself; in tree mode."""
    model = nnx.Module()
    model.a = model.b = nnx.Param(jnp.ones(2))
    model.me = model
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield model


@pytest.mark.parametrize("name", GRAPH + UPDATES)
def test_each_is_the_public_function_with_other_defaults(name):
    function = getattr(nnx.compat, name)
    assert isinstance(function, functools.partial)
    public = getattr(nnx, name, None) or getattr(nnx.rnglib, name)
    assert function.func is public
    updates = {"graph_updates": True} if name in UPDATES else {}
    assert function.keywords == {"graph": True, **updates}


def test_split_keeps_sharing(tied):
    graphdef, state = nnx.compat.split(tied)
    assert list(state) == ["a"]
    merged = nnx.merge(graphdef, state)
    assert merged.a is merged.b
    assert merged.me is merged


def test_the_keyword_of_the_caller_wins(tied):
    del tied.me
    with pytest.raises(ValueError, match="does not support shared references"):
        nnx.compat.split(tied, graph=False)


@pytest.mark.parametrize("decorate", [nnx.compat.jit, nnx.compat.jit()])
def test_jit_propagates_structure_with_and_without_parentheses(decorate, tied):
    @decorate
    def add(model):
        model.c = nnx.Param(model.a + 1)

    add(tied)
    assert tied.c.tolist() == [2, 2]


def test_grad_takes_shared_references(tied):
    grads = nnx.compat.grad(lambda model: (model.a * model.b).sum())(tied)
    assert grads["a"].tolist() == [2, 2]


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


def test_a_function_without_docstring_gets_the_note_alone():
    older = nnx.deprecations.deprecated(Model.run)
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


def test_threads_get_different_numbers():
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: ids.uuid(), range(1000)))
    assert len(set(numbers)) == 1000


def test_equal_numbers_are_equal_and_hash_alike():
    assert repr(ids.UUID(3)) == "UUID(3)"
    assert ids.UUID(3) == ids.UUID(3) != ids.UUID(4)
    assert len({ids.UUID(3), ids.UUID(3)}) == 1


def test_copies_have_numbers_of_their_own_and_pickling_keeps_them():
    original = ids.uuid()
    copies = {original, copy.copy(original), copy.deepcopy(original)}
    assert len(copies) == 3
    assert pickle.loads(pickle.dumps(original)) == original


def test_accesses_are_recorded_for_later():
    accessor = proxy_caller.DelayedAccessor().layers[0]
    recorded = proxy_caller.GetAttr("layers"), proxy_caller.GetItem(0)
    assert accessor.actions == recorded
    same = proxy_caller.DelayedAccessor().layers[0]
    assert accessor == same != proxy_caller.DelayedAccessor()
    proxy = proxy_caller.CallableProxy(lambda accessor, *args: accessor("ab")(*args))
    assert proxy.replace("a", "b") == "bb"
    assert proxy[1].upper() == "B"


# --------------------------------------------------------------------- the bridge alone

WITHOUT_FLAX = """if True:
    import sys

    sys.modules["flax"] = None  # as if it were not installed
    import graftree as nnx

    assert nnx.wrappers is nnx.bridge.wrappers
    assert nnx.bridge.initializers is nnx.initializers
    assert not hasattr(nnx.bridge, "nothing")


    def message(use):
        try:
            use()
        except ImportError as error:
            assert error.name == "flax", error
            return str(error)
        raise AssertionError("no error")


    def by_import():
        from graftree.bridge.variables import to_linen_var


    for use in (lambda: nnx.bridge.ToNNX, lambda: nnx.wrappers.to_linen, by_import):
        for _ in range(2):
            text = message(use)
            assert "nnx.bridge" in text and "pip install flax" in text, text
"""


def test_the_bridge_is_an_import_error_that_says_what_to_install():
    subprocess.run([sys.executable, "-c", WITHOUT_FLAX], check=True)
