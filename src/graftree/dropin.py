"""Runs a program written for Flax NNX on Graftree: ``python -m graftree.dropin``.

After `install` the name ``flax`` means this package: ``flax.nnx`` is the public
namespace with all its older sub-module paths, ``flax.errors`` and ``flax.config`` are
ours. Importing what Graftree has no counterpart for raises an ``ImportError`` that says
so. Flax itself is never imported, and need not be installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

from graftree.interop import flax_names

FLAX_VERSION = "0.12.12"
"""The release of Flax whose API this is; programs read it as ``flax.__version__``."""

_NAMESPACE = "flax.nnx"
_TARGETS = {
    _NAMESPACE: "graftree",
    "flax.config": "graftree.config",
    "flax.errors": "graftree.errors",
}


def install() -> None:
    """Makes ``import flax`` import Graftree for the rest of this process.

    Raises:
        RuntimeError: If Flax itself has already been imported.

    Example:
        >>> from graftree import dropin
        >>> dropin.FLAX_VERSION
        '0.12.12'
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "flax" in sys.modules:
        raise RuntimeError(
            "Flax is imported already, so its name can't mean Graftree any more.\n"
            "Call graftree.dropin.install() before anything imports flax."
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``flax`` and all below it, before a Flax on the path is found."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "flax":
            return None
        is_known = _target(fullname) or flax_names.has_beside(_below(fullname))
        if fullname != "flax" and not is_known:
            # Without `name`, or `from flax import linen` shows its own message.
            raise ModuleNotFoundError(_missing(fullname))
        # A package, so that the import system asks for what is below it.
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name == "flax":
            module.__doc__ = "Graftree under the name of Flax."
            setattr(module, "__version__", FLAX_VERSION)  # noqa: B010
            setattr(module, "__getattr__", _attribute)  # noqa: B010
        else:
            # The import system takes what it finds here: our own module, unchanged.
            target = _target(name)
            sys.modules[name] = (
                importlib.import_module(target)
                if target is not None
                else flax_names.beside(_below(name))
            )


def _target(name: str) -> str | None:
    """The module of this package that a name below ``flax`` means, if any."""
    if name in _TARGETS:
        return _TARGETS[name]
    path = name.removeprefix(_NAMESPACE + ".")
    known = path != name and flax_names.has_path(path)
    return f"graftree.{path}" if known else None


def _below(name: str) -> str:
    return name.removeprefix("flax.")


def _attribute(name: str) -> Any:
    try:
        return importlib.import_module(f"flax.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(str(error)) from None


def _missing(name: str) -> str:
    return (
        f"No module named {name!r}: Graftree has no counterpart for it.\n"
        f"It has {_NAMESPACE}, its sub-modules and {', '.join(flax_names.BESIDE)}.\n"
        "Run the program without graftree.dropin, or replace this import."
    )


def main(arguments: Sequence[str]) -> None:
    """Runs a program with its arguments, as ``python script.py ...`` would.

    Args:
        arguments: The path of the program, followed by the program's own arguments.

    Raises:
        SystemExit: If no program is given.

    Example:
        >>> from graftree import dropin
        >>> dropin.main([])
        Traceback (most recent call last):
        SystemExit: usage: python -m graftree.dropin script.py [arguments]
    """
    if not arguments:
        raise SystemExit("usage: python -m graftree.dropin script.py [arguments]")
    install()
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = str(pathlib.Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # Not this copy of the module, which a program could not reach by its name.
    importlib.import_module("graftree.dropin").main(sys.argv[1:])
