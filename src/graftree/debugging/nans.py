"""``find_nans``: where a value that is not finite first arises.

The function is traced, as by `nnx.jit`, and the program runs one operation at a time
(``nan_search.py``). Nothing that the function does reaches the caller's objects.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax

from graftree import _jax, errors
from graftree.core.objects import methods
from graftree.debugging.nan_reports import NanReport
from graftree.debugging.nan_search import Search
from graftree.transforms import recordings

_NAME = "debugging.find_nans"


def find_nans(f: Callable[..., Any]) -> Callable[..., NanReport]:
    """Tells where a value that is not finite first arises, forward or backward.

    Runs the operations of ``f`` one by one, also those inside ``nnx.jit``, ``grad``,
    ``scan``, ``cond``, ``remat`` and the like, and looks at each output. NaN and
    infinities count if a result comes from them, be it an output of ``f`` or what it
    writes to its arguments. So a mask of ``-inf`` is no finding, nor NaN that
    ``jnp.where`` leaves out of the forward and the backward pass. An infinity that
    stands in the program counts only as the cause of NaN.

    Operations are rounded one by one, where a compiled program may keep more digits.
    Arrays are followed as wholes: of two origins of NaN in one array, the first counts.
    Loops run compiled, and step by step only if they gave values that are not finite.
    Callbacks run, too. What runs inside a kernel or ``shard_map`` is one operation.

    Args:
        f: A function that can be traced, also one made by ``nnx.jit`` or ``jax.jit``; a
            method; or a Module that is called. Arguments that are not arrays or
            objects, such as numbers, are constants.

    Returns:
        A function with the arguments of ``f`` that returns a `NanReport`: false if all
        is well, and a few lines of text. It gives no output of ``f`` and writes to none
        of its arguments: random streams, statistics and refs stay as they are.

    Raises:
        ValueError: At a call inside a trace, where arguments have no values.

    Example:
        >>> class Net(nnx.Module):
        ...     def __init__(self):
        ...         self.scale = nnx.Param(jnp.array([1.0, 0.0]))
        ...     def __call__(self, x):
        ...         return jnp.log(self.scale * x).sum()
        >>> report = nnx.debugging.find_nans(lambda net, x: net(x))(Net(), jnp.ones(2))
        >>> print(str(report).splitlines()[0])
        First non-finite value: inf in the output of `log`
        >>> report.first.example
        'log(0) = -inf'
    """

    @functools.wraps(f, updated=())
    def search(*args: Any, **kwargs: Any) -> NanReport:
        function, args, kwargs = recordings.opened(f, args, kwargs)
        with jax.debug_nans(False), jax.debug_infs(False):
            return _search(function, args, kwargs)

    return search


def _search(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NanReport:
    call, interior = recordings.crossing(_NAME, f, args, kwargs)
    (group,) = call.groups
    # As in the paths of operations, the object of a method goes by its class.
    kind = type(args[0]).__name__ if args else ""
    named = [
        (leaf, re.sub(r"^self\b", kind, slot.name_in_function))
        for slot, value in group.slots()
        for leaf in jax.tree.leaves(value)
    ]
    _check_concrete(named)
    program = jax.make_jaxpr(_showing_paths(interior))(*call.groups)
    search = Search()
    held = [search.argument(value, name) for value, name in named]
    results = search.run(program, held)
    refs = [search.current(x) for x in held if _jax.is_ref(x.value)]
    return NanReport([*results, *refs], search.findings)


def _showing_paths(interior: Callable[..., Any]) -> Callable[..., Any]:
    """What JAX traces, with names after all methods and paths.

    They are those of this call: what is compiled for others may be named after the
    first of several objects that are alike.
    """

    @functools.wraps(interior)
    def traced(*groups: Any) -> Any:
        with methods.observed(lambda _, call: call(), shows_methods=True):
            return interior(*groups)

    return traced


def _check_concrete(named: Any) -> None:
    for value, name in named:
        if isinstance(value, (_jax.Tracer, jax.ShapeDtypeStruct)):
            raise ValueError(
                errors.message(
                    "nnx.debugging.find_nans runs a function on numbers, and these "
                    "arguments have none.",
                    where=f"{name}: {value}",
                    way_out="Call it outside of jit, grad and other transforms, with "
                    "arrays: nnx.debugging.find_nans(f)(model, x).",
                )
            )
