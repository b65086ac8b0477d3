"""What ``dir`` lists."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import zoo


class Model(zoo.Box):
    setting = 1

    def _helper(self):
        pass


def model():
    return Model(linear=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), _mine=2)


OBJECTS = {
    "class": lambda: Model,
    "module": model,
    "layer": lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    "attention": lambda: nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)),
    "variable class": lambda: nnx.Param,
    "variable": lambda: nnx.Param(jnp.ones(2), tag="x"),
    "state": lambda: nnx.state(model()),
    "graph state": lambda: nnx.unpack(model()),
    "rngs": lambda: nnx.Rngs(0),
    "list": lambda: nnx.List([1]),
    "dict": lambda: nnx.Dict(a=1),
    "namespace": lambda: nnx,
    "sub-module": lambda: nnx.variablelib,
    "layers": lambda: nnx.nn,
    "older forms": lambda: nnx.compat,
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_what_is_listed_exists_and_is_public(make):
    x = make()
    listed = dir(x)
    private = {n for n in listed if n.startswith("_") and not n.startswith("__")}
    assert private <= {"_mine", "_helper"} and all(map(str.isidentifier, listed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What an array of JAX lists as well, and does not have.
        lost = [n for n in listed if n not in dir(jax.Array) and not hasattr(x, n)]
    assert lost in ([], ["__abstractmethods__"])


def test_everything_of_a_users_class_is_listed():
    names = {"setting", "linear", "_mine", "_helper", "train", "set_attributes", "sow"}
    assert names <= set(dir(model()))
    assert names - {"linear", "_mine"} <= set(dir(Model))
    assert {"linear", "items"} <= set(dir(nnx.state(model())))
    assert "linear" in dir(nnx.unpack(model()))


def test_variables_list_their_metadata_and_what_their_value_has():
    assert {"tag", "mean", "T", "at", "get_value"} <= set(
        dir(nnx.Param(jnp.ones(2), ref=True, tag="x"))
    )
    assert "mean" not in dir(nnx.Param("text")) and "upper" in dir(nnx.Param("text"))


def test_the_namespace_lists_its_names_and_sub_modules():
    listed = {name for name in dir(nnx) if not name.startswith("_")}
    modules = {"compat", "variablelib", "graphlib", "debugging", "bridge", "reprlib"}
    assert set(nnx.__all__) | modules <= listed
    assert not listed & {"core", "interop", "annotations", "use_refs"}


def test_sub_modules_list_names_before_they_are_used():
    assert {"Param", "VariableMeta", "is_array_ref"} <= set(dir(nnx.variablelib))
    assert {"linear", "attention", "dtypes"} <= set(dir(nnx.nn))
    assert {"linear", "VariableMeta"} & set(vars(nnx.nn)) == {"linear"}


@pytest.mark.peers
def test_what_the_peer_lists_is_listed():
    peer = pytest.importorskip("flax.nnx")

    def public(x):
        return {name for name in dir(x) if not name.startswith("_")}

    for make in (
        lambda n: n.Linear(2, 3, rngs=n.Rngs(0)),
        lambda n: n.Param(jnp.ones(2)),
        lambda n: n.Rngs(0),
        lambda n: n.Dict(a=1),
        lambda n: n.State({"a": 1}),
    ):
        assert public(make(peer)) <= public(make(nnx))
