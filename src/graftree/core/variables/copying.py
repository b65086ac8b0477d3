"""How Variables are copied and pickled: by their parts, under names of older programs.

    _raw_value      the value; in a pickle of a ref-backed Variable the array in its ref
    _trace_state    the trace that owns it, for a copy the current one
    _var_metadata   its metadata, as a dict

A subclass may add attributes in slots or in a ``__dict__``, and may have a
``__getstate__``, ``__setstate__`` or ``__reduce__`` of its own, which copies use, too.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self

import jax

from graftree import _jax
from graftree.core import ownership, pickling
from graftree.core.variables import values

_PROTOCOL = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
_SLOTS = ("_raw_value", "__nnx_metadata__")


class Copyable:
    """What copy and pickle ask of Variables."""

    __slots__ = ()

    if TYPE_CHECKING:  # What a Variable has.
        _raw_value: Any
        _var_metadata: MutableMapping[str, Any]

    def __getstate__(self) -> dict[str, Any]:
        """The parts of the Variable, for a copy or a pickle."""
        raw = self._raw_value
        return _parts(self, raw[...] if _jax.is_ref(raw) else raw)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Takes over what `__getstate__` returned."""
        has_ref = state["_var_metadata"]["ref"]
        raw = values.stored(state["_raw_value"], ref=has_ref)
        _take(self, {**state, "_raw_value": raw})

    def __copy__(self) -> Self:
        if _has_protocol(type(self)):
            return pickling.copied(self)
        copied = object.__new__(type(self))
        _take(copied, _parts(self, self._raw_value))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if _has_protocol(type(self)):
            return pickling.copied(self, memo)
        # Known before its parts are copied: they may refer back to the Variable.
        memo[id(self)] = copied = object.__new__(type(self))
        raw = self._raw_value
        parts = _parts(self, None)
        _take(copied, parts)
        is_ref = _jax.is_ref(raw)
        own = jax.new_ref(raw[...]) if is_ref else copy.deepcopy(raw, memo)
        del parts["_trace_state"]
        _take(copied, copy.deepcopy(parts, memo) | {"_raw_value": own})
        return copied


def _has_protocol(cls: type[Copyable]) -> bool:
    """Whether a class says itself how its Variables are pickled."""
    return any(getattr(cls, name) is not getattr(Copyable, name) for name in _PROTOCOL)


def _parts(variable: Copyable, raw: Any) -> dict[str, Any]:
    beside = pickling.slots_of(variable)
    with contextlib.suppress(AttributeError):  # most classes have none
        # Not `vars`, which would be that of the value.
        beside |= object.__getattribute__(variable, "__dict__")
    return {
        **{name: value for name, value in beside.items() if name not in _SLOTS},
        "_raw_value": raw,
        "_trace_state": ownership.TraceState(),
        "_var_metadata": dict(variable._var_metadata),
    }


def _take(variable: Copyable, parts: Mapping[str, Any]) -> None:
    for name, value in parts.items():
        object.__setattr__(variable, name, value)
