"""An older name does the same, warns, and looks like the new one."""

import inspect
import warnings

import jax.numpy as jnp
import pytest

import graftree as nnx


def double(x, *, times=1):
    """Doubles a number."""
    return x * 2**times


class Model:
    def run(self):
        return "ran"


def test_the_older_name_does_the_same():
    older = nnx.deprecations.deprecated(double)
    with pytest.deprecated_call():
        assert older(3, times=2) == 12


def test_every_call_warns_at_the_line_of_the_caller():
    older = nnx.deprecations.deprecated(double)
    message = "This function is deprecated. Use double instead."
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=message) as caught:
            older(3)
        assert caught[0].filename == __file__


def test_name_and_signature_are_those_of_the_new_function():
    older = nnx.deprecations.deprecated(double)
    assert older.__name__ == "double"
    assert inspect.signature(older) == inspect.signature(double)


def test_the_docstring_begins_with_the_deprecation():
    older = nnx.deprecations.deprecated(double)
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
