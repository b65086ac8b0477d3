"""``checkify``: run-time checks in functions over objects, as a returned error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from graftree import _jax, config
from graftree.transforms.crossing import decorators, inside, outside
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.rows import Keywords, Row

P = ParamSpec("P")
R = TypeVar("R")


def checkify(
    f: Callable[P, R],
    errors: Any = _jax.user_checks,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[P, tuple[Any, R]]:
    """Makes a function return its failed checks, with ``jax.experimental.checkify``.

    Updates of the arguments reach the caller's objects whether or not a check failed.

    Args:
        f: The function. With graph updates it takes keyword arguments, too.
        errors: What is checked, such as ``jax.experimental.checkify.float_checks``; by
            default the calls of ``jax.experimental.checkify.check``.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A function that returns ``(error, output)``. ``error.throw()`` raises if a check
        failed; ``error.get()`` is the message, or ``None``.

    Raises:
        ValueError: If ``f`` is a method bound to a Module; at a call, for aliases that
            the mode doesn't allow.
        TypeError: At a call without graph updates, for keyword arguments.
        NotImplementedError: If JAX lacks its function, or that works otherwise.

    Example:
        >>> from jax.experimental import checkify
        >>> def invert(v):
        ...     checkify.check(jnp.all(v[...] != 0), "zero in the input")
        ...     v[...] = 1 / v[...]
        >>> error, _ = nnx.checkify(invert)(nnx.Variable(jnp.array([1.0, 0.0])))
        >>> print(error.get())
        zero in the input (`check` failed)
    """
    mode = config.propagation(graph, graph_updates)
    decorators.check_not_bound(f, "checkify")
    jax_checkify = _jax.checkify()
    if jax_checkify is None:
        raise NotImplementedError(
            "nnx.checkify calls jax.experimental.checkify.checkify, which JAX "
            f"{jax.__version__} lacks, or which works otherwise there.\n"
            "Install a newer graftree, or an older JAX."
        )
    row = Row.uniform(
        "checkify",
        mode,
        keywords=(Keywords.REFUSED, Keywords.STAY),
        returns_captured=True,
    )
    checked = outside.returning_arrays(
        jax_checkify(inside.interior(f, row), errors=errors)
    )

    @decorators.wraps(f)
    def with_error(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with _jax.hidden_frames:
            call = Call(f, row, args, kwargs)
            error, result = checked(*call.groups)
            return error, call.commit(result)

    return with_error
