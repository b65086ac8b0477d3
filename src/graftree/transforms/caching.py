"""Control flow is traced once per user function.

JAX knows a body or a branch again by the identity of the function that it gets, which
is a wrapper here. So the whole of a control-flow call is one function under `jax.jit`,
inlined into what is around it, and it is remembered for as long as the user's functions
live. Under `jax.jit` the wrappers inside may be made afresh: they are traced only when
it is. So they may close over what doesn't change in the loop, and note what the user's
function did; the note leaves as static data of the output.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import jax

from graftree.core.pytrees import Pytree
from graftree.core.variables import Variable


class PerFunction:
    """Compiled functions, remembered weakly by the user's functions in them.

    Args:
        make: Called as ``make(*getters, *key)``. A getter returns one of the functions:
            what is remembered must not keep them alive. It returns what to compile.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]]) -> None:
        self._make = make
        # By the key, then by one function after the other: an entry goes with each.
        self._known: dict[Any, weakref.WeakKeyDictionary[Any, Any]] = {}

    def get(self, functions: tuple[Callable[..., Any], ...], *key: Any) -> Any:
        """The compiled function for these functions of the user.

        Args:
            functions: At least one. Those that can't be referred to weakly are not
                remembered, nor are those that capture objects: what is captured is a
                constant of what is compiled, but objects may change between two calls.
            *key: What else it depends on; hashable.
        """
        *others, last = functions
        known = self._known.setdefault(
            (len(functions), key), weakref.WeakKeyDictionary()
        )
        try:
            for function in others:
                known = known.setdefault(function, weakref.WeakKeyDictionary())
            compiled = known.get(last)
        except TypeError:
            return self._compile([lambda f=f: f for f in functions], key)
        if compiled is None:
            compiled = self._compile([*map(weakref.ref, functions)], key)
            if not any(map(captures_objects, functions)):
                known[last] = compiled
        return compiled

    def _compile(self, getters: Any, key: tuple[Any, ...]) -> Any:
        return jax.jit(self._make(*getters, *key), inline=True)


def captures_objects(function: Any) -> bool:
    """Whether a function is an object, is bound to one, or names one outside of it."""
    if isinstance(function, functools.partial):
        given = (function.args, function.keywords)
        return _contains_object(given) or captures_objects(function.func)
    if _is_object(getattr(function, "__self__", function)):
        return True
    try:
        captured = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not written in Python; a variable not yet set
        return False
    values = (*captured.nonlocals.values(), *captured.globals.values())
    return any(map(_contains_object, values))


def _contains_object(x: Any) -> bool:
    return any(map(_is_object, jax.tree.leaves(x, is_leaf=_is_object)))


def _is_object(x: Any) -> bool:
    return isinstance(x, (Pytree, Variable))
