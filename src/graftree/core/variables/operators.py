"""Lets a Variable stand for its value in expressions.

Every operator unwraps both sides and applies the operator to the values; the result is
a plain value, never a Variable. In-place operators are refused, since they would
rebind the name to that plain value. Older names for the value still work, and most of
them warn.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar, overload

import jax
import numpy as np

from graftree import _jax

A = TypeVar("A")

# By name, as in ``__add__``; those of an operator that has an in-place form, with it.
_IN_PLACE = {
    **{"add": "+=", "sub": "-=", "mul": "*=", "matmul": "@=", "pow": "**="},
    **{"truediv": "/=", "floordiv": "//=", "mod": "%="},
    **{"lshift": "<<=", "rshift": ">>=", "and": "&=", "xor": "^=", "or": "|="},
}
_COMPARISONS = ("ne", "lt", "le", "gt", "ge")
_UNARY = (
    *(operator.neg, operator.pos, abs, operator.invert, operator.index),
    *(int, float, complex, math.trunc, math.floor, math.ceil, len, iter),
)


class ValueOperators(Generic[A]):
    """Python's operators, applied to ``self.get_value()``; older accessors."""

    __slots__ = ()

    # NumPy arrays on the left side leave the operator to the Variable.
    __array_priority__ = 100

    @overload
    def __getitem__(self, key: types.EllipsisType) -> A: ...
    @overload
    def __getitem__(self: ValueOperators[jax.Array], key: Any) -> jax.Array: ...
    @overload
    def __getitem__(self, key: Any) -> Any: ...
    def __getitem__(self: Any, key: Any) -> Any:
        return self.get_value(index=key)

    def __round__(self: Any, ndigits: int = 0) -> Any:
        return round(self.get_value(), ndigits)

    def __contains__(self: Any, item: Any) -> bool:
        return item in self.get_value()

    def __format__(self: Any, spec: str) -> str:
        return format(self.get_value(), spec) if spec else str(self)

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.get_value(), dtype)
        return value.copy() if copy else value

    # For older programs.

    @property
    def value(self: Any) -> Any:
        """Value (deprecated: use ``variable[...]`` or `get_value`).

        Raises:
            NotImplementedError: If the Variable was made with ``hijax=True``.
        """
        if self.hijax:
            raise NotImplementedError(
                "`.value` is not implemented for Variables with hijax=True: use "
                "variable[...] for arrays, or variable.get_value()."
            )
        _warn("'.value' access")
        return self.get_value()

    @value.setter
    def value(self: Any, value: Any) -> None:
        _warn("'.value' setter", stacklevel=4)
        self.set_value(value)

    @property
    def raw_value(self: Any) -> Any:
        """Raw value (deprecated: use `get_raw_value`)."""
        _warn("'.raw_value' access")
        return self.get_raw_value()

    @raw_value.setter
    def raw_value(self: Any, value: Any) -> None:
        _warn("'.raw_value' setter", stacklevel=4)
        self.set_raw_value(value)

    @property
    def sharding_names(self: Any) -> Any:
        """Annotation (deprecated: read the metadata ``out_sharding``)."""
        _warn("'.sharding_names'")
        return self.get_metadata("out_sharding", None)

    @property
    def has_ref(self: Any) -> bool:
        """Whether the value is in a ``jax.Ref``."""
        return _jax.is_ref(self.get_raw_value())

    @property
    def is_hijax(self: Any) -> bool:
        """Whether writes within plain JAX transforms propagate or raise."""
        return self.hijax or self.has_ref

    if TYPE_CHECKING:
        get_value: Callable[..., Any]  # that of Variable

        # `_install` adds these below. Operators on an array give arrays.

        @overload
        def __add__(self: ValueOperators[jax.Array], other: Any, /) -> jax.Array: ...
        @overload
        def __add__(self, other: Any, /) -> Any: ...
        def __add__(self, other: Any, /) -> Any: ...

        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__
        __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __add__
        __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __add__
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __add__
        __and__ = __rand__ = __xor__ = __rxor__ = __or__ = __ror__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = __add__

        @overload
        def __eq__(self: ValueOperators[jax.Array], other: Any, /) -> jax.Array: ...
        @overload
        def __eq__(self, other: Any, /) -> Any: ...
        def __eq__(self, other: Any, /) -> Any: ...

        __ne__ = __eq__

        def __divmod__(self, other: Any, /) -> Any: ...

        __rdivmod__ = __divmod__

        @overload
        def __neg__(self: ValueOperators[jax.Array]) -> jax.Array: ...
        @overload
        def __neg__(self) -> Any: ...
        def __neg__(self) -> Any: ...

        __pos__ = __abs__ = __invert__ = __neg__

        def __int__(self) -> int: ...
        def __index__(self) -> int: ...
        def __len__(self) -> int: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __float__(self) -> float: ...
        def __complex__(self) -> complex: ...
        def __bool__(self) -> bool: ...
        def __trunc__(self) -> Any: ...

        __floor__ = __ceil__ = __trunc__

        # In-place operators are refused.
        def __iadd__(self, other: Never, /) -> Never: ...

        __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = __iadd__
        __imod__ = __ipow__ = __ilshift__ = __irshift__ = __iadd__
        __iand__ = __ixor__ = __ior__ = __iadd__


def _warn(older_name: str, stacklevel: int = 3) -> None:
    warnings.warn(
        f"{older_name} is now deprecated. Use variable[...] for arrays, or "
        "variable.get_value() and variable.set_value(x).",
        DeprecationWarning,
        stacklevel=stacklevel,  # a setter is called by `Variable.__setattr__`
    )


# Its ``latest`` becomes a new number when a Variable is compared. Python compares the
# members of two dicts by identity first, and calls ``==`` for those that differ. So
# code that compares dicts of Variables can tell which it was.
comparisons = types.SimpleNamespace(latest=0)
_numbers = itertools.count(1)


def _is_equal(self: Any, other: Any) -> Any:
    comparisons.latest = next(_numbers)
    return operator.eq(self.get_value(), unwrap(other))


def _is_true(self: Any) -> bool:
    value = self.get_value()
    try:
        return bool(value)
    except (TypeError, ValueError) as error:
        if getattr(value, "ndim", 0):
            error.add_note(
                "A Variable is as true as its value. To ask whether there is one, "
                "write `if layer.bias is not None`."
            )
        raise


def unwrap(value: Any) -> Any:
    """Returns the value of a Variable; any other value as it is."""
    return value.get_value() if isinstance(value, ValueOperators) else value


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.get_value(), unwrap(other))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(unwrap(other), self.get_value())


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
    binary = {name: getattr(operator, f"__{name}__") for name in _IN_PLACE}
    methods: dict[str, Callable[..., Any]] = {"eq": _is_equal, "bool": _is_true}
    for name, function in (binary | {"divmod": divmod}).items():
        methods[name] = _binary(function)
        methods[f"r{name}"] = _reflected(function)
    for name, symbol in _IN_PLACE.items():
        methods[f"i{name}"] = _refused(symbol)
    for name in _COMPARISONS:
        methods[name] = _binary(getattr(operator, name))
    for function in _UNARY:
        methods[function.__name__] = _unary(function)
    for name, method in methods.items():
        method.__name__ = f"__{name}__"
        method.__qualname__ = f"ValueOperators.__{name}__"
        setattr(ValueOperators, method.__name__, method)
    # Equality is by value, and values change.
    ValueOperators.__hash__ = None


_install()
