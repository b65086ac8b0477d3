"""Makes eager calls of layers fast: by `fast`, a decorator of functions of arrays.

The mathematics of a layer is a function of arrays, written with JAX's functions. Called
eagerly, these spend more time in Python than they compute: a product, a bias and a sum
are three programs of 4 us each, and 40 us of Python to find them. Attention runs 13
programs within 1.5 ms.

`fast` turns such a function into one program, in which a barrier keeps each operation
apart from the others, and arrays go in and out in their usual order of axes. So XLA
compiles each as it compiles a single one, and all bits are those of one operation after
the other. It does nothing else: without it, as while ``graftree_caches`` is off, layers
are as correct, but slower. In a trace, where JAX records operations, the function runs
as it is, or is recorded once for equal shapes.

Libraries that quantize, count or record put functions of their own in place of JAX's,
for a while. So a layer looks a function up when it calls it, also the default of an
argument (`current`), and a function is fast only while JAX's functions are its own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, config

F = TypeVar("F", bound=Callable[..., Any])

# For `jax.jit(inline=...)`: operations are put into the program that is traced. In
# newer versions `True` costs a function, lowered by itself, for each program.
_EARLY: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def fast(calls: str = "any", *, eager_transforms: bool = False) -> Callable[[F], F]:
    """Makes a function of arrays fast when it is called eagerly.

    The function takes arrays, or ``None``, by position, and nothing but settings by
    keyword. Among these may be functions of JAX that are defaults of layers, and those
    `known` to only compute; with a function of the user's own it is called as it is.

    Args:
        calls: Which functions of JAX run in it: a key of `_CALLS`.
        eager_transforms: Whether eager derivatives and ``vmap`` are programs too. In
            derivatives the barriers keep only the operations of the function apart, so
            this is for single contractions.
    """
    is_original = _watched(_CALLS[calls])

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        eager = jax.jit(_apart(function), static_argnames=names)
        traced = jax.jit(function, static_argnames=names, inline=_EARLY)

        def find(arrays: Sequence[Any], settings: Mapping[str, Any]) -> Any:
            """The program for a call; ``None`` if the function is called itself."""
            if not _jax.can_call_apart():
                return None
            if _jax.current_trace() is _jax.no_trace:
                program = eager if all(map(_has_values, arrays)) else None
            elif not _are_traced(arrays):
                program = None
            elif _jax.recording_trace() is not None:
                program = traced
            else:
                program = eager if eager_transforms else None
            if program is None or not is_original():
                return None
            return program if all(map(_is_plain, settings.values())) else None

        @functools.wraps(function)
        def call(*arrays: Any, **settings: Any) -> Any:
            program = find(arrays, settings) if config.caches.are_used else None
            if program is not None:
                try:
                    return program(*arrays, **settings)
                except Exception:  # the function itself explains the error best
                    pass
            now = {name: current(x) for name, x in settings.items()}
            return function(*arrays, **now)

        return cast("F", call)

    return decorate


def _has_values(x: Any) -> bool:
    if x is None or _jax.is_concrete(type(x)):
        return True
    is_array = isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer)
    return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _are_traced(arrays: Sequence[Any]) -> bool:
    are_arrays = all(x is None or _jax.is_data_type(type(x)) for x in arrays)
    return are_arrays and any(isinstance(x, _jax.Tracer) for x in arrays)


def _is_plain(setting: Any) -> bool:
    """Whether equal settings mean the same, and functions only compute."""
    if isinstance(setting, tuple):
        return all(map(_is_plain, setting))
    if type(setting).__hash__ is None or isinstance(setting, np.generic):
        return False  # numbers of NumPy have a dtype of their own
    is_function = callable(setting) and not isinstance(setting, type)
    return not is_function or id(setting) in _known


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arrays: Any, **settings: Any) -> Any:
        return _jax.call_apart(functools.partial(function, **settings), *arrays)

    return run


# The defaults of arguments of layers, and their places in JAX.
_DEFAULTS: tuple[tuple[Any, Any, str], ...] = (
    (jax.lax.dot_general, jax.lax, "dot_general"),
    (jax.lax.conv_general_dilated, jax.lax, "conv_general_dilated"),
    (jnp.einsum, jnp, "einsum"),
    (jnp.multiply, jnp, "multiply"),
    (jnp.tanh, jnp, "tanh"),
    (jax.nn.sigmoid, jax.nn, "sigmoid"),
)


# By identity: others may have no hash, or be equal to everything.
_known = {id(default): default for default, _, _ in _DEFAULTS}


def known(function: F) -> F:
    """Lets a function be a setting of fast functions: it only computes."""
    _known[id(function)] = function
    return function


def current(function: Any) -> Any:
    """The function that JAX has now for a default; any other one as it is."""
    for default, module, name in _DEFAULTS:
        if function is default:
            return getattr(module, name)
    return function


_DRAWING: Any = jax.nn.initializers.lecun_normal()
_PLACES: dict[str, Any] = {
    "lax": jax.lax,
    "numpy": jax.numpy,
    "nn": jax.nn,
    "random": jax.random,
    # The module that the initializers of JAX draw from.
    "draws": _DRAWING.__globals__.get("random", jax.random),
}
_code_of = operator.attrgetter("__code__")

# The functions of JAX that run in what is fast, at any depth, by their places. It takes
# 1 us to look at some of them before each call, and 20 us to look at all 700.
_CALLS = {
    "contraction": {
        "lax": "add conv_dimension_numbers conv_general_dilated conv_transpose "
        "convert_element_type dot dot_general dtype padtype_to_pads reshape rev",
        "numpy": "add array asarray einsum issubdtype pad reshape result_type sum",
    },
    "norm": {
        "lax": "add broadcast_in_dim broadcast_shapes convert_element_type div dtype "
        "expand_dims imag max mul pmean psum real reduce reduce_sum reshape rsqrt "
        "select square stop_gradient sub",
        "numpy": "any array asarray astype broadcast_to iscomplexobj issubdtype "
        "maximum mean promote_types reshape result_type square sum where",
    },
    "draw": {
        "lax": "broadcast_in_dim",
        "numpy": "ones sqrt zeros",
        "draws": "truncated_normal",
    },
    "any": {
        place: " ".join([name for name, x in vars(module).items() if callable(x)])
        for place, module in _PLACES.items()
    },
}


def _watched(calls: Mapping[str, str]) -> Callable[[], bool]:
    """Makes a check that these functions of JAX are still those it had at our import.

    Args:
        calls: Their names, by place.
    """
    chosen = []
    for place, names in calls.items():
        entries = vars(_PLACES[place])
        found = [name for name in names.split() if name in entries]
        # With another one: for a single name, `itemgetter` gives no tuple.
        chosen.append((operator.itemgetter("__name__", *found), entries))

    def functions_now() -> list[tuple[Any, ...]]:
        return [pick(entries) for pick, entries in chosen]

    functions = functions_now()
    written = {*filter(inspect.isfunction, itertools.chain(*functions))}
    codes = [*map(_code_of, written)]

    def holds() -> bool:
        # Compared in C: 20 us for all of them.
        return functions_now() == functions and [*map(_code_of, written)] == codes

    return holds
