"""Methods whose calls go by their path and name, as those of ``__call__`` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from graftree.core.objects import methods

F = TypeVar("F", bound=Callable[..., Any])


def named(method: F) -> F:
    """Names what a method computes after the path of its object and itself.

    A call ``model(x)`` is known by the path of the object: in the names of operations
    and so in profiles, to `intercept`, and in the policies of `nnx.remat`. With this
    decorator so are the calls of another method, whose name then ends the path, and
    what they call has its whole path, too.

    Args:
        method: A function in the body of a class. It goes below decorators that give
            something else than a function, such as ``nnx.jit`` or ``property``.

    Returns:
        What stands for the function in the class, and has all of its attributes.

    Raises:
        TypeError: If it is no plain function, or a generator or coroutine function.

    Example:
        >>> class Coder(nnx.Module):
        ...     @nnx.debugging.named
        ...     def encode(self, x):
        ...         return jnp.sin(x)
        >>> program = jax.jit(lambda x: Coder().encode(x)).lower(1.0)
        >>> "Coder/encode/sin" in program.compile().as_text()
        True
    """
    return methods.named(method)
