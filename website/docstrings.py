"""What mkdocstrings does with our docstrings and signatures."""

import builtins
import enum
import importlib
import re
from typing import Any

import griffe

import graftree

# A default shows as users write it: `ones`, not `initializers.ones`.
MODULE_OF_OURS = re.compile(r"^(?!jax|jnp|np|nnx)[a-z_]+\.(?=\w+$)")
PUBLIC = (graftree, graftree.metrics, graftree.errors, builtins, enum)
# `*positional`: arguments that a function takes only to refuse them in words.
REFUSED = "positional"

# What a reader sees of a default that only the code needs; None: it is required.
SENTINELS = {
    "NO_METADATA": "{}",
    "_NO_METADATA": "{}",
    "MISSING": "...",
    "_MISSING": "...",
    "REQUIRED": None,
}


class AsUsersSeeThem(griffe.Extension):
    """Examples as code, base classes and defaults under their public names."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames ``Example:`` to what griffe knows, ``Examples:``."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.M)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Drops modules of the package from defaults, and the names of sentinels."""
        for parameter in [*func.parameters]:
            if parameter.name == REFUSED:
                del func.parameters[REFUSED]
                continue
            default = MODULE_OF_OURS.sub("", str(parameter.default))
            if default in SENTINELS:
                parameter.default = SENTINELS[default]
            elif isinstance(parameter.default, griffe.Expr):
                parameter.default = default

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Puts the nearest public class in place of bases that users never see."""
        kind = getattr(importlib.import_module(cls.module.path), cls.name, None)
        if isinstance(kind, type):
            public = [x.__name__ for x in kind.__mro__[1:-1] if _is_public(x)]
            shown = [x for x in cls.bases if str(x).partition("[")[0] in public]
            cls.bases = shown or [*public[:1]]


def _is_public(kind: type) -> bool:
    name = kind.__name__
    return any(getattr(module, name, None) is kind for module in PUBLIC)
