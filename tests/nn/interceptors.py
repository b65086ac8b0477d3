"""Functions put in the place of JAX's, for a while, as libraries that quantize do."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

PLACES = {"jax.lax": jax.lax, "jnp": jnp, "jax.nn": jax.nn, "jax.random": jax.random}
running: dict[str, Callable[..., Any]] = {}
"""What runs in the place of a function whose code was exchanged, by its name."""


def has_code(path: str) -> bool:
    """Whether the code of this function can be exchanged."""
    return isinstance(_find(path)[2], types.FunctionType)


@contextlib.contextmanager
def replaced(
    path: str, by: Callable[[Callable[..., Any]], Callable[..., Any]], kind: str
) -> Iterator[None]:
    """Puts ``by(original)`` in the place of a function of JAX.

    Args:
        path: Where the function is: ``jnp.einsum``.
        by: Makes what is called from now on.
        kind: ``name``: under the name, so that who has the function already calls the
            original; ``code``: in the function itself.
    """
    module, name, function = _find(path)
    if kind == "name":
        setattr(module, name, by(function))
        try:
            yield
        finally:
            setattr(module, name, function)
        return
    code = function.__code__
    original = types.FunctionType(code, function.__globals__, name)
    original.__defaults__ = function.__defaults__
    original.__kwdefaults__ = function.__kwdefaults__
    running[path] = by(original)
    function.__code__ = _forwarder(path)
    try:
        yield
    finally:
        function.__code__ = code


def _find(path: str) -> tuple[Any, str, Any]:
    place, name = path.rsplit(".", 1)
    return PLACES[place], name, getattr(PLACES[place], name)


def _forwarder(path: str) -> types.CodeType:
    """Code that needs nothing from where it is put."""
    names: dict[str, Any] = {}
    exec(
        "def forward(*args, **options):\n"
        "    from tests.nn import interceptors\n"
        f"    return interceptors.running[{path!r}](*args, **options)",
        names,
    )
    return names["forward"].__code__
