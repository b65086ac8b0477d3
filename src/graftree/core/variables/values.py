"""How Variables read, write, check and copy their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np

from graftree import _jax, errors
from graftree.core import ownership, pickling
from graftree.core.text import descriptions
from graftree.core.variables import sharding

_is_array_type: dict[type, bool] = {}


def is_array(value: Any) -> bool:
    """Whether a value is a JAX array or a tracer of one."""
    kind = type(value)
    is_array_type = _is_array_type.get(kind)
    if is_array_type is None:
        # A traced ref has the type of a traced array, so tracers are asked one by one.
        if issubclass(kind, _jax.Tracer):
            return not _jax.is_ref(value)
        is_array_type = _is_array_type[kind] = issubclass(kind, jax.Array)
    return is_array_type


def as_jax(value: Any) -> Any:
    """Makes arrays of NumPy, which others may write, JAX's; all else stays."""
    if isinstance(value, (np.ndarray, np.generic)) and any(
        jax.numpy.issubdtype(value.dtype, kind) for kind in (np.number, np.bool_)
    ):
        return jax.numpy.array(value)
    return value


def contains_ref(value: Any) -> bool:
    """Whether there is a ref in a value."""
    if is_array(value):
        return False
    kind = type(value)
    # Not left to JAX, which wants the keys of a dict to be sortable.
    if kind is dict:
        return any(map(contains_ref, value.values()))
    if kind is list or kind is tuple:
        return any(map(contains_ref, value))
    return any(map(_jax.is_ref, jax.tree.leaves(value)))


def copy_containers(value: Any) -> Any:
    """Copies lists, dicts and tuples, including subclasses; their items are shared."""
    kind = type(value)
    if kind is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if kind is list:
        return [copy_containers(item) for item in value]
    if kind is tuple:
        return tuple([copy_containers(item) for item in value])
    if isinstance(value, (dict, tuple)):
        items, treedef = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
        if len(items) != 1 or items[0] is not value:
            return treedef.unflatten(map(copy_containers, items))
    return value


# Types that stand for an array in the states of abstract or sharded models.
_STAND_INS = (jax.ShapeDtypeStruct, jax.sharding.PartitionSpec, jax.sharding.Sharding)


def is_stand_in(value: Any) -> bool:
    """Whether a value stands for an array, and so can't be in a ref."""
    return isinstance(value, _STAND_INS)


_CHANGEABLE = (list, dict, set, np.ndarray)
_CHANGING = frozenset(
    "append extend insert remove pop clear reverse sort update setdefault popitem add "
    "discard difference_update intersection_update symmetric_difference_update fill "
    "put partition resize itemset".split()
)


def changes_in_place(value: Any, name: str) -> bool:
    """Whether the method of this name changes the value."""
    return name in _CHANGING and isinstance(value, _CHANGEABLE)


def checked(method: Callable[..., Any], check: Callable[[], None]) -> Any:
    """Makes a method check first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        check()
        return method(*args, **kwargs)

    return call


def stored(value: Any, *, ref: bool) -> Any:
    """Returns the raw value that a Variable stores: the value, or a new ref of it."""
    if _jax.is_ref(value):
        value = value[...]
    if not ref or is_stand_in(value):
        return value
    return jax.new_ref(value)


def read_ref(ref: Any, index: Any) -> Any:
    """Reads a part of a ref's value, at any index that arrays take."""
    return ref[index] if _is_ref_index(index, ref.shape) else ref[...][index]


def write_ref(ref: Any, index: Any, value: Any) -> None:
    """Writes into a ref as ``array.at[index].set(value)`` writes into an array."""
    if _jax.is_ref(value):
        value = value[...]
    if not _is_ref_index(index, ref.shape):
        ref[...] = ref[...].at[index].set(value)
    elif is_array(value) and _is_part(value, ref, index):
        ref[index] = value
    else:
        ref[index] = ref[index].at[...].set(value)


def _is_ref_index(index: Any, shape: tuple[int, ...]) -> bool:
    """Whether refs take an index as arrays do: numbers and slices within bounds.

    Beyond those, refs accept other indices than arrays do and, out of bounds, write
    other elements.
    """
    if index is Ellipsis:
        return True
    items = index if isinstance(index, tuple) else (index,)
    if len(items) > len(shape) or not all(map(_is_within, items, shape)):
        return False
    # Under jit, JAX fails on a number next to a slice with a step.
    slices = [item for item in items if isinstance(item, slice)]
    is_mixed = 0 < len(slices) < len(items)
    return not is_mixed or all(item.step in (None, 1) for item in slices)


def _is_within(item: Any, size: int) -> bool:
    if not isinstance(item, slice):
        return type(item) is int and -size <= item < size
    kinds = {*map(type, (item.start, item.stop, item.step))}
    if not kinds <= {int, type(None)} or item.step == 0:
        return False
    numbers = range(*item.indices(size))
    return len(numbers) > 0 and numbers.step > 0


def _is_part(value: Any, ref: Any, index: Any) -> bool:
    """Whether an array has the shape and dtype of the part of a ref at an index."""
    shape = ref.shape
    if index is not Ellipsis:
        # NumPy knows the shape of a part; this array has one element.
        shape = np.broadcast_to(False, shape)[index].shape
    return value.shape == shape and value.dtype == ref.dtype


def check_fits(ref: Any, value: Any, path: str = "") -> None:
    """Raises if a value can't become that of a ref, which keeps its shape and dtype.

    A scalar fills the ref. For different dtypes, JAX does the same as when it writes
    into an array: it converts, warns if that loses something, or raises.
    """
    if is_stand_in(value):
        raise TypeError(f"A {type(value).__name__} can't be written into an array ref.")
    array = value if is_array(value) or _jax.is_ref(value) else jax.typeof(value)
    if array.shape not in ((), ref.shape):
        raise _misfit("shape", ref, array, path)
    if array.dtype != ref.dtype:
        try:
            jax.eval_shape(
                lambda x, new: x.at[...].set(new), _abstract(ref), _abstract(array)
            )
        except (TypeError, ValueError) as error:
            raise _misfit("dtype", ref, array, path) from error


def _misfit(aspect: str, ref: Any, array: Any, path: str) -> ValueError:
    return ValueError(
        errors.message(
            f"Invalid {aspect}: a ref cannot change its {aspect}.",
            where=f"{f'at {path}: ' if path else ''}the ref holds "
            f"{descriptions.describe(ref)}, "
            f"the value is {descriptions.describe(array)}",
            way_out="Convert the value, or make a new ref: nnx.to_arrays(node).",
        )
    )


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    is_weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=is_weak)


def write_at(raw: Any, index: Any, value: Any) -> Any:
    """Replaces a part of an array, which keeps its shape, dtype and sharding.

    An abstract array becomes a concrete one if all of it is replaced.
    """
    if isinstance(raw, jax.ShapeDtypeStruct):
        return _concrete(raw, index, value)
    if index is Ellipsis and is_array(value):
        if have_same_type(raw, value):
            return value
        value = sharding.moved(value, raw)
        if have_same_type(raw, value):
            return value
    return raw.at[index].set(value)


def _concrete(abstract: jax.ShapeDtypeStruct, index: Any, value: Any) -> Any:
    if index is not Ellipsis:
        raise TypeError(
            f"The value {descriptions.describe(abstract)} is abstract: it has no "
            "elements yet.\n"
            "Assign the whole value, variable[...] = array, before parts of it."
        )
    value = jax.numpy.asarray(value, abstract.dtype)
    return jax.numpy.broadcast_to(value, abstract.shape)


def have_same_type(a: Any, b: Any) -> bool:
    """Whether two arrays have equal shape, dtype and sharding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, _jax.Tracer) or isinstance(b, _jax.Tracer):
        # The sharding of a tracer is known only in its type (explicit mesh axes).
        return jax.typeof(a).sharding == jax.typeof(b).sharding
    return a.sharding == b.sharding


# Copies and pickles: by the parts of a Variable, under names of older programs.

_PROTOCOL = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
_SLOTS = ("_raw_value", "__nnx_metadata__")


class Copyable:
    """Parts of Variables, for copy and pickle.

        _raw_value      the value; in a pickle of a ref-backed Variable that of its ref
        _trace_state    the trace that owns it, for a copy the current one
        _var_metadata   its metadata, as a dict

    A subclass may add attributes in slots or in a ``__dict__``, and may have a
    ``__getstate__``, ``__setstate__`` or ``__reduce__`` of its own, which copies use.
    """

    __slots__ = ()

    def __getstate__(self: Any) -> dict[str, Any]:
        """Returns the parts of the Variable, for a copy or a pickle."""
        raw = self._raw_value
        return _parts(self, raw[...] if _jax.is_ref(raw) else raw)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Takes over the result of `__getstate__`."""
        has_ref = state["_var_metadata"]["ref"]
        raw = stored(state["_raw_value"], ref=has_ref)
        _take(self, {**state, "_raw_value": raw})

    def __copy__(self: Any) -> Any:
        if _has_protocol(type(self)):
            return pickling.copied(self)
        copied = object.__new__(type(self))
        _take(copied, _parts(self, self._raw_value))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return pickling.copied(self, memo)


def _has_protocol(cls: type[Copyable]) -> bool:
    """Whether a class defines how its Variables are pickled."""
    return any(getattr(cls, name) is not getattr(Copyable, name) for name in _PROTOCOL)


def _parts(variable: Any, raw: Any) -> dict[str, Any]:
    parts = pickling.slots_of(variable, besides=_SLOTS)
    if type(variable).__dictoffset__:  # most classes have none
        # Not `vars`, which would be that of the value.
        parts |= object.__getattribute__(variable, "__dict__")
    parts["_raw_value"] = raw
    parts["_trace_state"] = ownership.snapshot()
    parts["_var_metadata"] = variable.__nnx_metadata__.as_dict()
    return parts


def _take(variable: Copyable, parts: Mapping[str, Any]) -> None:
    for name, value in parts.items():
        object.__setattr__(variable, name, value)
