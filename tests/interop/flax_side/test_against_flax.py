"""The modules beside ``flax.nnx`` do what those of Flax do, call by call."""

import importlib
import types

import pytest

from graftree.interop import flax_names
from tests.interop.flax_side import cases


def namespace(module_of):
    """The modules by name, as attributes of attributes."""
    root = types.SimpleNamespace(training=types.SimpleNamespace())
    for path in cases.PATHS:
        parent, _, name = path.rpartition(".")
        if parent != "core":
            setattr(getattr(root, parent) if parent else root, name, module_of(path))
    return root


def text(value):
    """What two results are compared by; of an error its built-in type."""
    if isinstance(value, Exception):
        return next(cls for cls in type(value).__mro__ if cls.__module__ == "builtins")
    if isinstance(value, (list, tuple)):
        return [text(one) for one in value]
    if isinstance(value, dict):
        return {key: text(one) for key, one in value.items()}
    return repr(value).replace("_EmptyNode", "EmptyNode")


@pytest.mark.peers
@pytest.mark.parametrize("group", cases.GROUPS, ids=lambda group: group.__name__)
def test_results_are_those_of_flax(group):
    pytest.importorskip("flax")
    theirs = group(namespace(lambda path: importlib.import_module(f"flax.{path}")))
    ours = group(namespace(flax_names.beside))
    different = {
        name: (text(ours[name]), text(theirs[name]))
        for name in theirs
        if text(ours[name]) != text(theirs[name])
    }
    assert different == {}
    assert len(theirs) > 5
