"""Names of parameters: what a program passes by keyword there, it may pass here."""

import inspect
import types
import warnings

import jax
import pytest

import graftree as nnx

_GIVEN_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_NAMED = (*_GIVEN_BY_POSITION, inspect.Parameter.KEYWORD_ONLY)

# What differs on purpose. Everything here says why.
EXCEPTIONS = {
    # Made by `split` and `update_context`, not by users; these are their insides.
    "GraphState",
    "UpdateContext",
    # Taken as **kwargs, and given on to the layer that asks for it.
    "Sequential.__call__",
}


def parameters(function, kinds):
    listed = inspect.signature(function).parameters.values()
    return [p.name for p in listed if p.kind in kinds and p.name not in ("self", "cls")]


def methods(name, theirs, ours):
    """The constructor and the public methods that both classes have."""
    if "__init__" in vars(theirs):
        yield name, theirs.__init__, ours.__init__
    for method in dir(theirs):
        is_public = not method.startswith("_") or method == "__call__"
        # There the functions of jax.random show through, with a `key` nobody passes.
        if name.startswith("Rng") and hasattr(jax.random, method):
            continue
        pair = [
            getattr(cls, method, None) if is_public else None for cls in (theirs, ours)
        ]
        if all(map(inspect.isroutine, pair)):
            yield f"{name}.{method}", *pair


def shared(flax):
    """All shared public functions and methods: name, theirs, ours."""
    for name in dir(flax):
        theirs, ours = getattr(flax, name), getattr(nnx, name, None)
        if name.startswith("_") or ours is None:
            continue
        if inspect.isclass(theirs) and inspect.isclass(ours):
            yield from methods(name, theirs, ours)
        elif callable(theirs) and not isinstance(theirs, types.ModuleType):
            yield name, theirs, ours


def differing(pairs):
    """Says of each function which parameters are missing, or stand elsewhere."""
    for name, theirs, ours in pairs:
        try:
            expected = parameters(theirs, _NAMED)
            in_order = parameters(theirs, _GIVEN_BY_POSITION)
            given = parameters(ours, _NAMED)
        except (TypeError, ValueError):  # classes of typing show no signature
            continue
        missing = [parameter for parameter in expected if parameter not in given]
        if missing or given[: len(in_order)] != in_order:
            yield name, missing or given


@pytest.mark.peers
def test_parameters_have_the_names_and_order_of_flax():
    flax = pytest.importorskip("flax.nnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that warn when they are read
        found = dict(differing(shared(flax)))
    assert {name: found[name] for name in found.keys() - EXCEPTIONS} == {}


# Insides of the contexts: no program has a use for them.
WITHOUT = {
    "GraphDef": [f"with_{kind}_outer_index" for kind in ("matching", "no", "same")],
    "UpdateContext": ["flatten_end", "unflatten_end"],
}


@pytest.mark.peers
def test_classes_have_the_public_attributes_of_flax():
    flax = pytest.importorskip("flax.nnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = {
            name: (theirs, getattr(nnx, name, None))
            for name in dir(flax)
            if inspect.isclass(theirs := getattr(flax, name))
        }
    missing = {
        name: [
            attribute
            for attribute in dir(theirs)
            if not attribute.startswith("_") and not hasattr(ours, attribute)
        ]
        for name, (theirs, ours) in pairs.items()
        if ours is not None
    }
    assert {name: lost for name, lost in missing.items() if lost} == WITHOUT
