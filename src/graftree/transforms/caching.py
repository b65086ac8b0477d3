"""Control flow is traced once per user function.

JAX knows a body or a branch again by the identity of the function that it gets, which
is a wrapper here. So the whole of a control-flow call is one function under ``jax.jit``,
inlined into what is around it, and this function is remembered for as long as the
user's functions live. Under ``jax.jit`` the wrappers inside may be made afresh: they are
traced only when it is. So they may close over what doesn't change in the loop, and note
what the user's function did; the note leaves as static data of the output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax


class PerFunction:
    """Compiled functions, remembered weakly by the user's functions in them.

    Args:
        make: Called as ``make(*getters, *key)``. A getter returns one of the functions:
            what is remembered must not keep them alive. It returns what to compile.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]]) -> None:
        self._make = make
        self._known: dict[Any, Callable[..., Any]] = {}

    def get(self, functions: tuple[Callable[..., Any], ...], *key: Any) -> Any:
        """The compiled function for these functions of the user.

        Args:
            functions: Those that can't be referred to weakly are not remembered.
            *key: What else it depends on; hashable.
        """
        try:
            getters = tuple(map(weakref.ref, functions))
            known = self._known.get((getters, key))
        except TypeError:
            return self._compile([lambda f=f: f for f in functions], key)
        if known is None:
            known = self._known[getters, key] = self._compile(getters, key)
            for function in functions:
                forget = weakref.finalize(
                    function, self._known.pop, (getters, key), None
                )
                forget.atexit = False
        return known

    def _compile(self, getters: Any, key: tuple[Any, ...]) -> Any:
        return jax.jit(self._make(*getters, *key), inline=True)
