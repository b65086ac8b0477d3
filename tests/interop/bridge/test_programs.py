"""Programs and names of the bridge are, and give, what they are with Flax NNX."""

import inspect
import types
import typing

import pytest

import graftree as nnx
from tests.interop.bridge import (
    comparing,
    programs_modules,
    programs_to_linen,
    programs_to_nnx,
)

pytestmark = [
    pytest.mark.peers,
    # Flax warns about its own deprecations.
    pytest.mark.filterwarnings("ignore"),
]

EVERY = 3  # in `make test`; the rest is in `make test-all`
PROGRAMS = [
    pytest.param(
        program,
        id=f"{program.__module__.rpartition('_')[2]}-{program.__name__}",
        marks=() if number % EVERY == 0 else pytest.mark.long,
    )
    for file in (programs_to_nnx, programs_to_linen, programs_modules)
    for number, program in enumerate(comparing.programs_of(file))
]


@pytest.fixture(scope="module")
def peer():
    return pytest.importorskip("flax.nnx")


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_give_what_they_give_with_the_peer(program, peer):
    assert not comparing.compare(program, peer)


def test_there_are_programs():
    assert len(PROGRAMS) > 80


# ------------------------------------------------------------------------------- names

PATHS = ["bridge", "bridge.wrappers", "bridge.variables", "bridge.module"]
PATHS += ["bridge.interop", "proxy_caller"]


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
def test_names_of_the_peer_are_there_with_its_parameters(peer, path):
    theirs, ours = follow(peer, path), follow(nnx, path)
    assert not [name for name in own_names(theirs) if not hasattr(ours, name)]
    pairs = {}
    for name in own_names(theirs):
        pair = getattr(theirs, name), getattr(ours, name)
        if inspect.isclass(pair[0]):
            for method in public_methods(pair[0]):
                pairs[f"{name}.{method}"] = [getattr(cls, method) for cls in pair]
        elif callable(pair[0]):
            pairs[name] = pair
    assert pairs
    for name, pair in pairs.items():
        of_theirs, of_ours = map(names_of_parameters, pair)
        assert of_theirs == of_ours, name
