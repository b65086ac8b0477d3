"""Lets a file use a function of one above it, which it can't import.

The lower file calls ``hooks.name.call(...)``, and the higher one fills the hook where
it defines the function, ``hooks.name.fill(function)``. Until then a hook does what it
was made with.

A hook is the last resort. One with a single user is an argument; types that a table
collects derive from a class that collects them; and what belongs together stands in one
file, below both. So each line says why none of these will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from graftree import _jax

P = ParamSpec("P")
R = TypeVar("R")


class Hook(Generic[P, R]):
    """A function that is called here below, and defined there above.

    Args:
        otherwise: What it is until it is filled.

    Attributes:
        call: The function.
    """

    __slots__ = ("call",)

    def __init__(self, otherwise: Callable[P, R]) -> None:
        self.call = otherwise

    def fill(self, function: Callable[P, R]) -> Callable[P, R]:
        """Makes it this function, which is returned: a decorator."""
        self.call = function
        return function


# `__treescope_repr__` of every object: only debugging may import treescope.
# From debugging/displays.
treescope_repr: Hook[[Any, str, Any], Any] = Hook(lambda *_: NotImplemented)

# The path of an object, for an error raised by it: objects know neither those that hold
# them nor the functions that run. From core/objects/running.
path_of_object: Hook[[Any], str] = Hook(lambda _: "")

# The owner of an object that JAX builds: code that warns of lost updates reads all
# kinds of objects, and the functions that run. From debugging/lost_updates.
owner_when_unflattened: Hook[[], Any] = Hook(_jax.current_trace)

# All arrays of an object and its structure at once, for `jax.jit`: a kept GraphDef
# needs all kinds of objects. From core/graph/kept.
flatten_at_once: Hook[[Any], Any] = Hook(lambda _: None)

# Rebuilds what `flatten_at_once` took apart.
# From core/graph/kept.
unflatten_at_once: Hook[[Any, Any], Any] = Hook(lambda *_: None)

# A class of ours was defined, when JAX has to learn how files have its objects: classes
# are written in all layers, also by users. From core/exporting.
class_defined: Hook[[type], None] = Hook(lambda _: None)

# `GraphDef.apply`, a method, which merges, calls and splits.
# From core/graph/functional.
apply_graphdef: Hook[..., Any] = Hook(lambda *_: None)

# `FlatState.to_nested_state`, a method, which gives the State of a nested dict; States
# are made of FlatStates. From core/states/states.
nested_state: Hook[[dict[Any, Any]], Any] = Hook(lambda nested: nested)

# The record of the traces of a function: it compares signatures, to warn.
# From debugging/recompiles.
record_of_traces: Hook[[], Any] = Hook(lambda: None)
