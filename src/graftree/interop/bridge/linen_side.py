"""The one door to Flax, which only the bridge needs.

Importing this file imports ``flax.linen``; without Flax that is an ``ImportError`` that
says what to install.
"""

from __future__ import annotations

from typing import Any

import jax

try:
    from flax import core, linen, struct
    from flax import errors as linen_errors
    from flax.core import meta
    from flax.linen import module as _linen_modules
except ImportError as error:
    raise ImportError(
        "nnx.bridge connects Modules with those of flax.linen, and so needs the "
        "package flax, which can't be imported here.\n"
        "Install it: pip install flax",
        name="flax",
    ) from error

__all__ = ["core", "linen", "linen_errors", "meta", "struct"]


def current_linen_module() -> linen.Module | None:
    """The Linen Module whose method runs now; None outside of all."""
    # Flax has no public name for it.
    stack = _linen_modules._context.module_stack
    return stack[-1] if stack else None


def linen_rngs_dict(
    linen_module: linen.Module, add_default: bool = False
) -> dict[str, jax.Array]:
    """A new key from each random stream that a bound Linen Module was given.

    Args:
        linen_module: A bound Module.
        add_default: Whether to add a constant ``default`` key if there is no such
            stream, for draws whose results are not used.

    Raises:
        ValueError: If the Module is not bound.
    """
    if linen_module.scope is None:
        raise ValueError(
            f"{type(linen_module).__name__} has no random streams before it is bound: "
            "call it inside of `init` or `apply`."
        )
    keys: dict[str, Any] = {
        name: linen_module.make_rng(name) for name in linen_module.scope.rngs
    }
    if add_default:
        keys.setdefault("default", jax.random.key(0))
    return keys
