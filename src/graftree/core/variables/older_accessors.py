"""Accessors of Variables from older releases; they work, and most of them warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graftree import _jax


class OlderAccessors:
    """Values and metadata under the names that they used to have."""

    __slots__ = ()

    if TYPE_CHECKING:  # What a Variable has.
        hijax: bool
        get_value: Callable[[], Any]
        set_value: Callable[[Any], None]
        get_raw_value: Callable[[], Any]
        set_raw_value: Callable[[Any], None]
        get_metadata: Callable[[str, Any], Any]

    @property
    def value(self) -> Any:
        """The value (deprecated: use ``variable[...]`` or `get_value`).

        Raises:
            NotImplementedError: If the Variable was made with ``hijax=True``.
        """
        if self.hijax:
            raise NotImplementedError(
                "`.value` is not implemented for Variables with hijax=True: use "
                "variable[...] for arrays, or variable.get_value()."
            )
        _warn("'.value' access", stacklevel=3)
        return self.get_value()

    @value.setter
    def value(self, value: Any) -> None:
        _warn("'.value' setter", stacklevel=3)
        self.set_value(value)

    @property
    def raw_value(self) -> Any:
        """The raw value (deprecated: use `get_raw_value`)."""
        _warn("'.raw_value' access", stacklevel=3)
        return self.get_raw_value()

    @raw_value.setter
    def raw_value(self, value: Any) -> None:
        _warn("'.raw_value' setter", stacklevel=3)
        self.set_raw_value(value)

    @property
    def sharding_names(self) -> Any:
        """The annotation (deprecated: read the metadata ``out_sharding``)."""
        _warn("'.sharding_names'", stacklevel=3)
        return self.get_metadata("out_sharding", None)

    @property
    def has_ref(self) -> bool:
        """Whether the value is in a ``jax.Ref``."""
        return _jax.is_ref(self.get_raw_value())

    @property
    def is_hijax(self) -> bool:
        """Whether writes inside plain JAX transforms propagate or raise."""
        return self.hijax or self.has_ref


def _warn(what: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"{what} is now deprecated. Use variable[...] for arrays, or "
        "variable.get_value() and variable.set_value(x).",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
