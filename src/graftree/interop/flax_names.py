"""Serves the sub-module paths and older names that programs for Flax NNX use.

`install` puts the paths of `name_tables.MODULES` into ``sys.modules``, so that ``import
graftree.variablelib``, ``from graftree.nn.linear import Conv`` and
``nnx.variablelib.Variable`` work. Names are looked up when first used, so that the
tables cost next to nothing. `beside` gives the modules beside ``flax.nnx``, for
machines without Flax.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import machinery
from typing import Any

from graftree import namespaces
from graftree.core.modules.refs import with_vars
from graftree.core.states.pure_dicts import as_pure
from graftree.core.variables.variables import Variable
from graftree.interop import name_tables as tables, older_functions
from graftree.sharding.placement import as_abstract

_PATHS = frozenset({*tables.MODULES, *tables.ALIASES, *tables.SAME})


def has_path(path: str) -> bool:
    """Whether programs for Flax NNX may import ``graftree.<path>``.

    Args:
        path: A dotted path below the public namespace.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.has_path("nn.linear"), flax_names.has_path("nn.conv")
        (True, False)
    """
    return path in _PATHS


def has_beside(path: str) -> bool:
    """Returns whether `beside` has a module for ``flax.<path>``.

    Args:
        path: A dotted path below ``flax``, or the package of one.

    Example:
        >>> from graftree.interop import flax_names
        >>> [flax_names.has_beside(path) for path in ("training", "struct", "linen")]
        [True, True, False]
    """
    return path in (*tables.BESIDE, *tables.BESIDE_SAME, *_packages(tables.BESIDE))


@functools.cache
def beside(path: str) -> types.ModuleType:
    """Returns the stand-in for the module ``flax.<path>`` where there is no Flax.

    Args:
        path: A dotted path below ``flax``, or the package of one.

    Returns:
        A module, always the same, that finds its names when they are first used. It is
        not in ``sys.modules``.

    Raises:
        ModuleNotFoundError: If there is none; names the path.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.beside("training").train_state.TrainState.__name__
        'TrainState'
    """
    if path in tables.BESIDE_SAME:
        return importlib.import_module(_full(path))
    if not has_beside(path):
        raise ModuleNotFoundError(
            f"No module named 'flax.{path}': Graftree has no counterpart for it."
        )
    origins = _origins(tables.BESIDE.get(path, {}))
    module = _make_module(
        f"flax.{path}", f"What programs use of ``flax.{path}``.", origins
    )
    children = _names_below(path, tables.BESIDE)
    if children:
        module.__path__ = []
    for name in children:  # which are as empty as this one
        setattr(module, name, beside(f"{path}.{name}"))
    setattr(module, "__dir__", lambda: [*origins, *children])  # noqa: B010
    return module


def _make_module(
    name: str, doc: str, origins: Mapping[str, tuple[str, str]]
) -> types.ModuleType:
    """Makes a module that finds its names when they are first used."""
    module = types.ModuleType(name, doc)
    setattr(module, "__all__", [*origins])  # noqa: B010
    setattr(module, "__getattr__", _finder(module, origins))  # noqa: B010
    return module


def _names_below(path: str, paths: Iterable[str]) -> list[str]:
    """Returns the last names of the paths directly below a path, sorted."""
    splits = [other.rpartition(".") for other in paths]
    return sorted(name for package, _, name in splits if package == path)


def _packages(paths: Iterable[str]) -> set[str]:
    """Returns the paths that others are below."""
    return {path.rpartition(".")[0] for path in paths}


def top_level_paths() -> frozenset[str]:
    """Returns the paths that lie directly below the public namespace."""
    return frozenset(_names_below(tables.PUBLIC, _PATHS))


@functools.cache
def names_beyond() -> frozenset[str]:
    """The names of the public namespace that Flax NNX lacks.

    Returns:
        Those that no path of Flax has, and the modules for which it has no path.

    Example:
        >>> from graftree.interop import flax_names
        >>> {"MaxPool", "checkpoints"} <= flax_names.names_beyond()
        True
    """
    namespace = vars(sys.modules[_full(tables.PUBLIC)])
    theirs = {name for files in tables.MODULES.values() for name in _origins(files)}
    theirs |= tables.OF_NAMESPACE | top_level_paths()
    modules = {k for k, v in namespace.items() if isinstance(v, types.ModuleType)}
    theirs -= modules - top_level_paths()
    return frozenset(namespace["__all__"]) - theirs


def list_below(path: str) -> list[tuple[str, bool]]:
    """Lists the paths directly below a path: their names, and whether more are below.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.list_below("training")
        [('ema', False), ('metrics', False), ('optimizer', False)]
    """
    packages, prefix = _packages(_PATHS), f"{path}." if path else ""
    return [(name, prefix + name in packages) for name in _names_below(path, _PATHS)]


def is_table(name: str) -> bool:
    """Whether a module of this name comes from the table: it has no file of its own.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.is_table("graftree.statelib")
        True
    """
    top, _, path = name.partition(".")
    return (
        top == "graftree"
        and path in tables.MODULES
        and path not in tables.MODULES[path]
    )


def install() -> None:
    """Makes all paths of the table importable; the public namespace calls it once.

    Example:
        >>> from graftree.variablelib import Param
        >>> Param is nnx.Param
        True
    """
    packages = _packages(tables.MODULES)
    for path, files in tables.MODULES.items():
        origins = _origins(files)
        if path in files:
            module = importlib.import_module(_full(path))
            setattr(module, "__getattr__", _finder(module, origins))  # noqa: B010
        else:
            module = _make_module(
                _full(path), f"Names of ``flax.nnx.{path}``.", origins
            )
            module.__file__ = __file__
            module.__spec__ = machinery.ModuleSpec(_full(path), None, origin=__file__)
            if path in packages:
                module.__path__ = []
            _register(path, module)
        setattr(module, "__dir__", _lister(path, module, origins))  # noqa: B010
    for path, target in tables.ALIASES.items():
        _register(path, importlib.import_module(_full(target)))
    for path in ("compat", "nn", "transforms"):
        module = sys.modules[_full(path)]
        setattr(module, "__dir__", _lister(path, module, {}))  # noqa: B010


def _full(path: str) -> str:
    return f"graftree.{path}" if path else "graftree"


def _origins(files: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Maps each name to its file and its name there."""
    origins = {}
    for file, names in files.items():
        for name in names.split():
            new, _, old = name.partition("=")
            origins[new] = (_full(file), old or new)
    return origins


def _register(path: str, module: types.ModuleType) -> None:
    sys.modules[_full(path)] = module
    package, _, name = path.rpartition(".")
    if package:  # for the namespace itself, `look_up` answers
        setattr(sys.modules[_full(package)], name, module)


def _finder(
    module: types.ModuleType, origins: Mapping[str, tuple[str, str]]
) -> Callable[[str], Any]:
    """Makes the ``__getattr__`` of a module with these names."""

    def find(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"Module {module.__name__} has no attribute {name!r}.")
        file, old = origins[name]
        value = getattr(importlib.import_module(file), old)
        setattr(module, name, value)  # the next access is a plain one
        return value

    return find


def _lister(
    path: str, module: types.ModuleType, origins: Mapping[str, Any]
) -> Callable[[], list[str]]:
    """Makes the ``__dir__`` of a module with these names, without files and imports."""

    def names() -> list[str]:
        namespace = vars(module)
        more = [
            name for name in namespace if name[:2] == "__" or has_path(f"{path}.{name}")
        ]
        return sorted({*namespaces.public_names(module), *more, *origins})

    return names


# Keywords that `vars_as` took before it was called `with_vars`.
_OLDER_KEYWORDS = {"is_hijax": "hijax", "has_ref": "ref", "is_mutable": "mutable"}


@functools.wraps(with_vars)
def _vars_as(node: Any, /, **options: Any) -> Any:
    current = {_OLDER_KEYWORDS.get(key, key): value for key, value in options.items()}
    return with_vars(node, **current)


_older = _origins(tables.OLDER)
DEPRECATED = {
    "abstract_with_sharding": older_functions.deprecated(as_abstract),
    "pure": older_functions.deprecated(as_pure),
    "vars_as": older_functions.deprecated(_vars_as),
}


def list_names() -> list[str]:
    """Lists the public namespace's names for users: for ``dir``, and so for Tab.

    Returns:
        The public names, the sub-modules of the table, and the names that every module
        has; no older names.

    Example:
        >>> from graftree.interop import flax_names
        >>> {"Linear", "variablelib"} <= set(flax_names.list_names())
        True
    """
    namespace = vars(sys.modules[_full(tables.PUBLIC)])
    of_modules = [name for name in namespace if name.startswith("__")]
    return sorted({*namespace["__all__"], *top_level_paths(), *of_modules})


def look_up(name: str) -> Any:
    """Finds names that the public namespace does not list: sub-modules, older names.

    Args:
        name: The part after ``nnx.``.

    Returns:
        A module of the table, or the object that an older name stands for.

    Raises:
        AttributeError: If there is neither; names the attribute.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.look_up("variablelib") is nnx.variablelib
        True
    """
    if name in tables.MODULES or name in tables.ALIASES:
        return sys.modules[_full(name)]
    if name in vars(sys.modules["graftree"])["__all__"]:
        return importlib.import_module(_full(name))  # a chapter, when first used
    if name == "VariableState":
        warnings.warn(
            "nnx.VariableState is deprecated: States hold Variables. Use nnx.Variable.",
            DeprecationWarning,
            stacklevel=2,
        )
        return Variable
    if name in DEPRECATED:
        return DEPRECATED[name]
    if name in _older:
        file, current = _older[name]
        return getattr(importlib.import_module(file), current)
    gone = tables.GONE.get(name)
    hint = f"Use {gone} instead." if gone else tables.HINTS.get(name, "")
    # Given its name and the module, Python adds a suggestion for a misspelling.
    raise AttributeError(
        f"Module graftree has no attribute {name!r}. {hint}".rstrip(),
        name=name,
        obj=sys.modules["graftree"],
    )
