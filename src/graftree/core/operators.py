"""Lets a Variable stand for its value in expressions.

Every operator unwraps both sides and applies the operator to the values; the result is
a plain value, never a Variable. In-place operators are refused, since they would
rebind the name to that plain value.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "matmul": operator.matmul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "divmod": divmod,
    "pow": operator.pow,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "xor": operator.xor,
    "or": operator.or_,
}
_COMPARISONS = {
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "int": int,
    "float": float,
    "complex": complex,
    "bool": bool,
    "index": operator.index,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "len": len,
    "iter": iter,
}
_SYMBOLS = {
    "iadd": "+=",
    "isub": "-=",
    "imul": "*=",
    "imatmul": "@=",
    "itruediv": "/=",
    "ifloordiv": "//=",
    "imod": "%=",
    "ipow": "**=",
    "ilshift": "<<=",
    "irshift": ">>=",
    "iand": "&=",
    "ixor": "^=",
    "ior": "|=",
}


class ValueOperators:
    """The operators of Python, applied to ``self.get_value()``."""

    __slots__ = ()

    # NumPy arrays on the left side leave the operator to the Variable.
    __array_priority__ = 100

    def __round__(self, ndigits: int = 0) -> Any:
        return round(self.get_value(), ndigits)  # type: ignore[attr-defined]

    def __contains__(self, item: Any) -> bool:
        return item in self.get_value()  # type: ignore[attr-defined]

    def __format__(self, spec: str) -> str:
        return format(self.get_value(), spec) if spec else str(self)  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.get_value(), dtype)  # type: ignore[attr-defined]
        return value.copy() if copy else value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get_value())  # type: ignore[attr-defined]


class _Comparisons:
    """Tells that a Variable was compared: then ``latest`` is a new number.

    Python compares the members of two dicts by identity first, and calls ``==`` for
    those that differ. So whoever compares dicts of Variables can tell which it was.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest = 0


comparisons = _Comparisons()
_numbers = itertools.count(1)


def _is_equal(self: Any, other: Any) -> Any:
    comparisons.latest = next(_numbers)
    return operator.eq(self.get_value(), _unwrap(other))


def _unwrap(value: Any) -> Any:
    return value.get_value() if isinstance(value, ValueOperators) else value  # type: ignore[attr-defined]


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.get_value(), _unwrap(other))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(_unwrap(other), self.get_value())


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(self.get_value())


def _refused(symbol: str) -> Callable[[Any, Any], Any]:
    def refuse(self: Any, other: Any) -> Any:
        raise NotImplementedError(
            f"`variable {symbol} x` would replace the {type(self).__name__} by a plain "
            f"value. Use `variable[...] {symbol} x` to update it in place."
        )

    return refuse


def _install() -> None:
    methods: dict[str, Callable[..., Any]] = {}
    for name, function in _BINARY.items():
        methods[f"__{name}__"] = _binary(function)
        methods[f"__r{name}__"] = _reflected(function)
    for name, function in _COMPARISONS.items():
        methods[f"__{name}__"] = _binary(function)
    methods["__eq__"] = _is_equal
    for name, function in _UNARY.items():
        methods[f"__{name}__"] = _unary(function)
    for name, symbol in _SYMBOLS.items():
        methods[f"__{name}__"] = _refused(symbol)
    for name, method in methods.items():
        method.__name__ = name
        method.__qualname__ = f"ValueOperators.{name}"
        setattr(ValueOperators, name, method)
    # Equality is by value, and values change.
    ValueOperators.__hash__ = None  # type: ignore[assignment]


_install()
