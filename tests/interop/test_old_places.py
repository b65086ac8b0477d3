"""Pickles made when `core` and `transforms` were flat folders still load (issue 13).

What is in ``old_places/`` was written at that time: pickles, and ``names.txt`` with the
modules and names of everything public, and of what is in the pickles besides.
"""

import importlib
import pathlib
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.interop import old_places

FOLDER = pathlib.Path(__file__).parent / "old_places"
LINES = (FOLDER / "names.txt").read_text().splitlines()


def load(name):
    return pickle.loads((FOLDER / f"{name}.pickle").read_bytes())


def test_names_are_found_where_they_were():
    def is_found(module, name):
        found = getattr(importlib.import_module(module), name, None)
        return getattr(found, "__qualname__", None) == name

    names = [
        (module, name)
        for module, _, names in (line.partition(": ") for line in LINES)
        for name in names.split()
    ]
    assert len(names) > 190
    assert not [place for place in names if not is_found(*place)]


def test_every_place_of_the_table_exists():
    places = {place for listed in old_places.MOVED.values() for place in listed.split()}
    for place in places:
        importlib.import_module(f"graftree.{place}")


def test_models_load():
    model = load("list")
    assert type(model) is nnx.List
    assert type(model[0]) is nnx.Dict
    np.testing.assert_array_equal(model[1][...], jnp.arange(3.0))


def test_a_split_model_is_merged():
    model = nnx.merge(*load("split"))
    assert [type(x) for x in model] == [nnx.Linear, nnx.BatchNorm]
    assert model[0](jnp.ones((1, 2))).shape == (1, 3)


def test_filters_and_metrics_load():
    both, axes, *_ = load("filters")
    assert both(("b",), nnx.Param(0)) and not both(("a",), nnx.Param(0))
    assert type(axes) is nnx.StateAxes
    metric = load("metrics")
    metric.update(logits=jnp.ones((2, 3)), labels=jnp.zeros(2, int), loss=1.0, values=1)
    assert metric.compute()["loss"] == 1


def test_names_that_never_were_are_not_found():
    with pytest.raises(AttributeError, match="core.skeletons has no attribute 'Nothi"):
        importlib.import_module("graftree.core.skeletons").Nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("graftree.core.nothing")
