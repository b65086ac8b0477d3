"""Control flow is traced once per user function, as long as what it captures stays.

JAX knows a body or a branch again by the identity of the function that it gets, which
is a wrapper here. So the whole of a control-flow call is one function under `jax.jit`,
inlined into what is around it, and it is remembered for as long as the user's functions
live. Under `jax.jit` the wrappers inside may be made afresh: they are traced only when
it is. So they may close over what doesn't change in the loop, and note what the user's
function did; the note leaves as static data of the output.

What was traced has as constants what the functions captured. So it is used again only
if `captures` can tell that this is as it was; if not, the call is traced anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from graftree.config import Propagation
from graftree.core.pickling import Rebuilt
from graftree.transforms.crossing import captures
from graftree.transforms.crossing.signatures import Signature

# How many traces of the same functions are remembered, for other things captured.
_LIMIT = 8


class PerFunction(Rebuilt):
    """Compiled functions, remembered weakly by the user's functions in them.

    What to compile is made by ``make(*getters, mode, *key)``. A getter returns one of
    the functions: what is remembered must not keep them alive.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]]) -> None:
        self._make = make
        # By the key, then by one function after the other: an entry goes with each.
        self._known: dict[Any, weakref.WeakKeyDictionary[Any, Any]] = {}

    def get(
        self,
        functions: tuple[Callable[..., Any], ...],
        arguments: Signature,
        mode: Propagation,
        *key: Any,
    ) -> Any:
        """The compiled function for these functions of the user.

        With graph updates, the default, a call sees all that its functions can reach as
        it is now. Without, as in the peer, it may go on with what a list or dict of
        constants held before.
        """
        record = captures.record(functions, arguments, strict=mode.structure)
        traces = None if record is None else self._traces(functions, (mode, *key))
        if traces is None:
            return self._compile([lambda f=f: f for f in functions], mode, key)
        for before, compiled in traces:
            if before == record:
                return compiled
        compiled = self._compile([*map(weakref.ref, functions)], mode, key)
        traces[:] = [(record, compiled), *traces[: _LIMIT - 1]]
        return compiled

    def _traces(self, functions: Any, key: Any) -> list[Any] | None:
        """What is known of functions; ``None`` if they can't be referred to weakly."""
        *others, last = functions
        known = self._known.setdefault(
            (len(functions), key), weakref.WeakKeyDictionary()
        )
        try:
            for function in others:
                known = known.setdefault(function, weakref.WeakKeyDictionary())
            return known.setdefault(last, [])
        except TypeError:
            return None

    def _compile(self, getters: Any, mode: Propagation, key: tuple[Any, ...]) -> Any:
        return jax.jit(self._make(*getters, mode, *key), inline=True)
