"""The functions of JAX that layers call, and tools that replace them for a while.

Libraries that quantize, count or record put functions of their own in place of JAX's:
under the name, as in ``jax.lax.dot_general = ...``, or as the code of the function
itself. So a layer looks a function up when it calls it, also the default of an argument
(`current`). A compiled call of a layer runs no function of JAX any more, so it asks
whether one was replaced that ran when it was traced (`Watch`). In a trace, where a call
takes longer than to look at all of them, it asks whether any is (`are_as_at_first`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import pathlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _python
from graftree.core.hashable_mappings import HashableMapping

# The module that JAX's initializers draw from.
_normal: Any = jax.nn.initializers.lecun_normal()
_draws = _normal.__globals__.get("random", jax.random)
# The public functions of JAX, as they are when this module is imported.
_NAMESPACES: tuple[dict[str, Any], ...] = tuple(
    map(vars, (jax.lax, jnp, jax.nn, jax.random, _draws))
)
_FUNCTIONS: list[dict[str, Any]] = [
    {name: x for name, x in namespace.items() if callable(x)}
    for namespace in _NAMESPACES
]
# The number of a function's namespace, and its name there; first in `jax.lax`.
_HOMES = {
    id(x): (index, name)
    for index, functions in reversed([*enumerate(_FUNCTIONS)])
    for name, x in functions.items()
}
_CODES = {
    x: x.__code__
    for x in itertools.chain.from_iterable(map(dict.values, _FUNCTIONS))
    if inspect.isfunction(x)
}
# By identity: the hash of a code goes through all that is in it.
_BY_CODE: dict[int, list[Any]] = {}
for _function, _code in _CODES.items():
    _BY_CODE.setdefault(id(_code), []).append(_function)
_code_of = operator.attrgetter("__code__")


def current(function: Any) -> Any:
    """Looks up what JAX now has under the name of a function; others stay.

    The defaults of layers, such as ``dot_general=jax.lax.dot_general``, are functions
    that JAX had when the layer's class was made.
    """
    home = _HOMES.get(id(function))
    if home is None:
        return function
    index, name = home
    _looked_up[index].add(name)
    return _NAMESPACES[index][name]


# The names that `current` has looked up.
_looked_up: list[set[str]] = [set() for _ in _NAMESPACES]


# Which functions only compute.


def is_ours(x: Any) -> bool:
    """Whether a class or function of this package is found under its name."""
    return str(x.__module__).startswith("graftree.") and _is_global(x)


def is_plain(setting: Any) -> bool:
    """Whether equal settings mean the same, and run no code but JAX's and ours."""
    if isinstance(setting, tuple):
        return all(map(is_plain, setting))
    kind = type(setting)
    if kind.__hash__ is None or issubclass(kind, np.generic):
        return False  # numbers of NumPy have a dtype of their own
    if isinstance(setting, HashableMapping):
        return all(map(is_plain, setting.values()))
    if isinstance(setting, type):
        return _package_of(setting) in (*_PACKAGES, "graftree")
    if callable(setting):
        return _only_computes(setting)
    return _package_of(kind) in _PACKAGES


_PACKAGES = ("builtins", "jax", "jaxlib", "numpy", "ml_dtypes")


def _package_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _only_computes(function: Any) -> bool:
    """Whether a function is one of JAX or of this package, or made by one of these."""
    module = str(getattr(function, "__module__", ""))
    if inspect.isfunction(function):
        module = str(function.__globals__.get("__name__", ""))
    if module.partition(".")[0] not in ("jax", "graftree"):
        return False
    if inspect.isfunction(function):
        return all(map(is_plain, _python.contents_of(function)))
    return _is_global(function)


def _is_global(x: Any) -> bool:
    module = sys.modules.get(str(x.__module__))
    return getattr(module, getattr(x, "__name__", ""), None) is x


# Which functions of JAX are replaced.


def are_as_at_first() -> bool:
    """Whether no public function of JAX is replaced; it takes 30 us to look at all."""
    return [*map(_code_of, _CODES)] == _FIRST_CODES and all(
        pick(namespace) == functions for pick, namespace, functions in _FIRST
    )


_FIRST_CODES = [*_CODES.values()]
_FIRST = [
    (operator.itemgetter(*functions), namespace, tuple(functions.values()))
    for functions, namespace in zip(_FUNCTIONS, _NAMESPACES, strict=True)
]


class Watch:
    """Sees whether a function of JAX is replaced that ran in some calls.

    By name it watches those that code of ours has read; by code those that ran, at any
    depth. It takes 1 us to look at these.
    """

    def __init__(self) -> None:
        self._names: list[set[str]] = [set() for _ in _NAMESPACES]
        self._functions: set[Any] = set()
        self._lock = threading.Lock()
        self._settle()

    def holds(self) -> bool:
        """Whether these functions are those that JAX had at first."""
        picks, functions, codes = self._now
        for pick, namespace, names in picks:
            if pick(namespace) != names:
                return False
        return [*map(_code_of, functions)] == codes

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function, and watches the functions of JAX that run in it.

        Raises:
            ValueError: If one of these is replaced now.
        """
        output, codes = _python.recorded(functools.partial(function, *args, **kwargs))
        with self._lock:
            if codes is None:
                self._names = [{*functions} for functions in _FUNCTIONS]
                self._functions = {*_CODES}
            else:
                self._add(codes)
            self._settle()
        if not self.holds() or not _replacements().isdisjoint(codes or ()):
            raise ValueError("A function of JAX is replaced.")
        return output

    def _add(self, codes: Mapping[int, Any]) -> None:
        self._functions |= {x for number in codes for x in _BY_CODE.get(number, ())}
        in_package = [x for x in codes.values() if x.co_filename.startswith(_PACKAGE)]
        names = [_names_in(in_package)] * 4
        names.append(_names_in(codes.values()))
        self._names = [
            watched | (read & functions.keys()) | looked_up
            for watched, read, functions, looked_up in zip(
                self._names, names, _FUNCTIONS, _looked_up, strict=True
            )
        ]

    def _settle(self) -> None:
        """Prepares the comparison, which runs in C."""
        picks = []
        rows = zip(self._names, _NAMESPACES, _FUNCTIONS, strict=True)
        for names, namespace, functions in rows:
            if not names:
                continue
            # With another name: of a single one, `itemgetter` gives no tuple.
            pick = operator.itemgetter("__name__", *sorted(names))
            module = {"__name__": namespace["__name__"]}
            picks.append((pick, namespace, pick({**functions, **module})))
        functions = tuple(self._functions)
        self._now = picks, functions, [_CODES[x] for x in functions]


def _replacements() -> set[int]:
    """Finds the codes, by identity, that are now in functions of JAX for others."""
    codes = [*map(_code_of, _CODES)]
    are_other = map(operator.is_not, codes, _CODES.values())
    return {id(code) for code in itertools.compress(codes, are_other)}


def _names_in(codes: Collection[Any]) -> set[str]:
    return set[str]().union(*[code.co_names for code in codes])


_PACKAGE = str(pathlib.Path(__file__).parents[2])
