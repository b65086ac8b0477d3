"""Older names of functions, which still work, with a warning."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def deprecated(new_fn: F) -> F:
    """Wraps a function for use under an older name.

    Args:
        new_fn: The function to call instead.

    Returns:
        A function with the name, signature and docstring of ``new_fn``, which it calls
        after a ``DeprecationWarning`` at the line of the caller.

    Example:
        >>> import warnings
        >>> old_split = nnx.deprecations.deprecated(nnx.split)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     graphdef, state = old_split(nnx.Param(1))
        >>> print(caught[0].message)
        This function is deprecated. Use split instead.
    """
    name = new_fn.__qualname__

    @functools.wraps(new_fn)
    def older(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"This function is deprecated. Use {name} instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        return new_fn(*args, **kwargs)

    note = f".. deprecated::\n   Use :func:`{name}` instead."
    older.__doc__ = f"{note}\n\n{inspect.getdoc(new_fn) or ''}".rstrip()
    return cast(F, older)
