"""The defaults of new Variables, and the deprecation of their older accessors."""

from __future__ import annotations

import warnings

from graftree import config


class _use_hijax(config.ScopedDefault):  # noqa: N801
    flag = "flax_hijax_variable"


class _use_ref(config.ScopedDefault):  # noqa: N801
    flag = "flax_array_ref"


_SCOPES: dict[str, type[config.ScopedDefault]] = {"hijax": _use_hijax, "ref": _use_ref}


def current(name: str) -> bool:
    """The default of ``hijax`` or ``ref`` now in force in this thread."""
    return _SCOPES[name].current_value()


def warn_deprecated_value(what: str, *, stacklevel: int) -> None:
    """Warns that an accessor of older releases is used."""
    warnings.warn(
        f"{what} is now deprecated. Use variable[...] for arrays, or "
        "variable.get_value() and variable.set_value(x).",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )

