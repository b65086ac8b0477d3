"""The names of the bridge, and their parameters, are those of Flax NNX."""

import inspect
import types
import typing

import pytest

import graftree as nnx

pytestmark = pytest.mark.peers

PATHS = ["bridge", "bridge.wrappers", "bridge.variables", "bridge.module"]
PATHS += ["bridge.interop", "proxy_caller"]


@pytest.fixture(scope="module")
def peer():
    return pytest.importorskip("flax.nnx")


def follow(root, path):
    for name in path.split("."):
        root = getattr(root, name)
    return root


def own_names(module):
    """The names that a module of the peer does not merely import."""
    for name, value in vars(module).items():
        home = str(getattr(value, "__module__", ""))
        is_own = home.startswith(("flax.nnx.bridge", "flax.nnx.proxy_caller"))
        if is_own and not name.startswith("_") and type(value) is not typing.TypeVar:
            yield name


def public_methods(cls):
    """The methods a class defines itself, ``__init__`` and ``__call__`` among them."""
    for name, value in vars(cls).items():
        is_public = not name.startswith("_") or name in ("__init__", "__call__")
        if is_public and isinstance(value, types.FunctionType):
            yield name


def names_of_parameters(function):
    """The parameters that callers give."""
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if not name.startswith("_")]


@pytest.mark.parametrize("path", PATHS)
def test_all_names_of_the_peer_are_there(peer, path):
    theirs, ours = follow(peer, path), follow(nnx, path)
    assert not [name for name in own_names(theirs) if not hasattr(ours, name)]


@pytest.mark.parametrize("path", PATHS)
def test_parameters_have_the_names_of_the_peer(peer, path):
    theirs, ours = follow(peer, path), follow(nnx, path)
    pairs = {}
    for name in own_names(theirs):
        pair = getattr(theirs, name), getattr(ours, name)
        if inspect.isclass(pair[0]):
            for method in public_methods(pair[0]):
                pairs[f"{name}.{method}"] = [getattr(cls, method) for cls in pair]
        elif callable(pair[0]):
            pairs[name] = pair
    assert pairs
    wrong = {
        name: [names_of_parameters(function) for function in pair]
        for name, pair in pairs.items()
        if names_of_parameters(pair[0]) != names_of_parameters(pair[1])
    }
    assert not wrong


def test_wrappers_has_a_second_path(peer):
    assert nnx.wrappers is nnx.bridge.wrappers
    assert peer.wrappers is peer.bridge.wrappers
    assert nnx.bridge.initializers is nnx.initializers
