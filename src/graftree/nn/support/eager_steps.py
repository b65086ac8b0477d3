"""Eager calls of functions that take long to find out what they compute.

Some of JAX's functions compute little and think much: eagerly,
``jax.nn.dot_product_attention`` runs 13 small programs within 1.5 ms of Python. Which
programs it runs depends on the types of its arguments and on JAX's settings alone. So
they are noted once for these, and run again without the Python between them. They are
the very programs of the eager call, which gives the same bits that way: in one program,
XLA might compute otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from graftree import _jax
from graftree.nn.support import computation

F = TypeVar("F", bound=Callable[..., Any])

_are_original = computation.watched()

# Each holds its compiled programs, some 13 for attention.
_MOST_KNOWN = 256


class Steps:
    """The programs of an eager call, in the places of whose arrays they work.

    Args:
        function: Computes an array.
        types: Those of its arguments.

    Attributes:
        do_run: Whether no program failed so far, as one that the device lacks.

    Raises:
        Exception: If the steps depend on more than that.
    """

    def __init__(self, function: Callable[..., Any], types: list[Any]) -> None:
        given, steps, result = _jax.eager_steps(function, types)
        constants = {
            id(x): x
            for step in steps
            for x in step.inputs
            if not isinstance(x, _jax.Tracer)
        }
        self._constants = [jax.numpy.asarray(x) for x in constants.values()]
        made = [x for step in steps for x in step.outputs]
        order = [*map(id, given), *constants, *map(id, made)]
        places = {key: place for place, key in enumerate(order)}
        self._blank = [None] * len(made)
        self._result = places[id(result)]
        self._steps: list[tuple[Callable[..., Any], list[int], slice, list[int]]] = []
        live = {self._result}
        for program, inputs, outputs in reversed(steps):
            read = [places[id(x)] for x in inputs]
            # An array goes when nothing needs it any more, as in the eager call.
            start = places[id(outputs[0])]
            written = slice(start, start + len(outputs))
            last = [place for place in {*read} if place not in live]
            live.update(read)
            self._steps.append((program, read, written, last))
        self._steps.reverse()
        self.do_run = True

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        values: list[Any] = [*arrays, *self._constants, *self._blank]
        for program, read, written, last in self._steps:
            values[written] = program(*[values[place] for place in read])
            for place in last:
                values[place] = None
        return values[self._result]


@functools.lru_cache(_MOST_KNOWN)
def _known(
    function: Callable[..., Any], types: tuple[Any, ...], static: Any, _: Any
) -> Steps | None:
    """The steps for some types, static arguments and settings of JAX."""

    def call(*arrays: jax.Array) -> Any:
        left = iter(arrays)
        args = [None if kind is None else next(left) for kind in types]
        return function(*args, **dict(static))

    try:
        return Steps(call, [kind for kind in types if kind is not None])
    except Exception:  # what is wrong, if anything, the call itself says best
        return None


def in_known_steps(function: F) -> F:
    """Makes a function one whose steps are noted, when it is called eagerly.

    It takes arrays, or ``None``, by position, and what is hashable by keyword. In a
    trace, or while a function of JAX is not its own, it is called as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **static: Any) -> Any:
        context = _jax.eager_context()
        if context is not None:
            arrays = [x for x in args if x is not None]
            are_known = all([_jax.is_concrete(type(x)) for x in arrays])
            if are_known and _are_original():
                types = tuple([None if x is None else x.aval for x in args])
                steps = _known(function, types, (*static.items(),), context)
                if steps is not None and steps.do_run:
                    try:
                        return steps(*arrays)
                    except Exception:  # the function may know another way
                        steps.do_run = False
        return function(*args, **static)

    return cast("F", call)
