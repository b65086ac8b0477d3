"""Variables: typed mutable boxes for values in objects.

A `Variable` has four slots: its raw value (an array, an array ref, or any pytree), its
metadata, the trace that owns it, and a version. It is the only thing that can change
in a transform without changing structure. Invariants:

- only the owning trace writes (ref-backed Variables excepted: their writes are effects
  that JAX itself tracks), and no one writes a read-only one;
- writing the value is not a structural change and moves no version; replacing metadata
  is and does;
- as a JAX pytree it has one child, the raw value; class and metadata are static.

Any name may be metadata of the user, or be defined in a subclass. So all slots but the
raw value have no name on the class, or a dunder name, and the rest of the package uses
functions below the class. The operators are in `operators.py`.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, ClassVar, Generic, TypeVar, overload

import jax

from graftree import _jax, errors
from graftree.core import hooks, ownership
from graftree.core.hashable_mappings import HashableMapping, Snapshot
from graftree.core.text import descriptions, representations
from graftree.core.variables import metadata as variable_metadata, sharding, values
from graftree.core.variables.operators import ValueOperators, unwrap

A = TypeVar("A")
MISSING: Any = object()
_KEY = jax.tree_util.GetAttrKey("value")


class _Slots(descriptions.PrintedVariable):
    """Slots of a Variable."""

    __slots__ = ("__nnx_metadata__", "_raw_value", "owner", "version")


_metadata, _raw, _owner, _version = map(vars(_Slots).__getitem__, _Slots.__slots__)
del _Slots.owner, _Slots.version  # `_register` needs the others by name

# The metadata as it is stored: immutable, not a copy.
metadata_of: Callable[[Variable[Any]], HashableMapping] = _metadata.__get__
# Without the call of `get_raw_value`.
raw_value_of: Callable[[Variable[Any]], Any] = _raw.__get__
owner_of: Callable[[Variable[Any]], Any] = _owner.__get__
version_of: Callable[[Variable[Any]], int] = _version.__get__

# An assignment would go through `Variable.__setattr__`, and cost five times as much.
_set_raw: Callable[[Any, Any], None] = _raw.__set__
_set_metadata, _set_owner, _set_version = (
    slot.__set__ for slot in (_metadata, _owner, _version)
)


class VariableMeta(type):
    """Gives subclasses no ``__dict__``, and registers each as a JAX pytree."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        leaf: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Any:
        namespace.setdefault("__slots__", ())
        cls = super().__new__(mcs, name, bases, namespace, **options)
        _register(cls, leaf)
        return cls

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        variable_metadata.hooks_of.cache_clear()

    __dir__ = representations.names_of_class


# By class, a function of the raw value; JAX gets its result instead.
leaf_functions: dict[type, Callable[[Any], Any]] = {}


def _register(cls: Any, leaf: Callable[[Any], Any] | None) -> None:
    def flatten(variable: Any) -> Any:
        if ownership.unread and ownership.current() is not ownership.no_trace:
            note_read(variable)
        entries, value = variable.__nnx_metadata__, variable._raw_value
        if leaf is not None:
            value = leaf(value)
        return (value,), entries if entries.is_fixed else entries.snapshot()

    def with_keys(variable: Any) -> Any:
        (value,), entries = flatten(variable)
        return ((_KEY, value),), entries

    if leaf is not None:
        leaf_functions[cls] = leaf
    unflatten = partial(_unflatten, cls)
    jax.tree_util.register_pytree_with_keys(cls, with_keys, unflatten, flatten)
    hooks.class_defined.call(cls)


def _unflatten(cls: Any, entries: HashableMapping, children: Any) -> Any:
    owner = hooks.owner_when_unflattened.call()
    if entries.get("hijax") and _jax.is_tracing():
        # Nobody's: a write into this copy would not reach the caller.
        owner = None
    return rebuild(cls, children[0], entries, owner)


class Variable(
    _Slots,
    ValueOperators[A],
    values.Copyable,
    representations.Representable,
    Generic[A],
    metaclass=VariableMeta,
):
    """A typed mutable box for a value that belongs to the state of a model.

    Args:
        value: Any value: an array, a NumPy array, a scalar, a pytree, ``None``, or the
            `VariableMetadata` that `with_metadata` makes. It is stored as it is.
        hijax: Whether writes inside a plain JAX transform must not be lost: without a
            ref, they are an error. ``None`` takes the default of `var_defaults`.
        ref: Whether to store the value in a ``jax.Ref``, so that plain JAX transforms
            change it in place. ``None`` takes the default of `var_defaults`.
        eager_sharding: Whether an ``out_sharding`` annotation places the value now.
            ``None`` takes the default of `use_eager_sharding`.
        **metadata: Further static entries, readable as attributes. Older releases said
            ``use_ref`` for ``ref``, and ``is_hijax`` for ``hijax`` with ``ref``.

    Raises:
        ValueError: If the value contains a ref, or its annotation does not fit it.
        TypeError: If ``ref`` is set and the value is neither an array nor a scalar.

    Example:
        >>> count = nnx.Variable(jnp.array(1), tag="steps")
        >>> count[...] += 1
        >>> count[...]
        Array(2, dtype=int32, weak_type=True)
        >>> count.tag
        'steps'
    """

    __slots__ = ("__weakref__",)
    required_metadata: ClassVar[frozenset[str]] = variable_metadata.REQUIRED

    def __init__(
        self,
        value: A | variable_metadata.VariableMetadata,
        *,
        hijax: bool | None = None,
        ref: bool | None = None,
        eager_sharding: bool | None = None,
        **metadata: Any,
    ) -> None:
        flags = {"hijax": hijax, "ref": ref, "eager_sharding": eager_sharding}
        raw: Any = value
        if isinstance(value, variable_metadata.VariableMetadata):
            raw, flags, metadata = variable_metadata.absorb(value, flags, metadata)
        if values.contains_ref(raw):
            raise ValueError(
                "Cannot pass a Ref directly into Variable constructor.\n"
                "Pass the array and ref=True: Variable(array, ref=True)."
            )
        entries = variable_metadata.complete(type(self), flags, metadata)
        _set_raw(self, raw)
        _set_metadata(self, entries)
        _set_owner(self, ownership.current())
        _set_version(self, 0)
        if "on_create_value" in entries:
            raw = variable_metadata.run_hooks(entries["on_create_value"], self, raw)
        raw = self.create_value(raw)
        if entries["eager_sharding"] and "out_sharding" in entries:
            raw = sharding.place(raw, entries)
        _set_raw(self, values.stored(raw, ref=entries["ref"]))

    # Reading and writing the value.

    def create_value(self, value: A) -> A:
        """Gets the value as the Variable is made; override to change it."""
        return value

    @overload
    def get_value(self, *, index: EllipsisType = ...) -> A: ...
    @overload
    def get_value(self: Variable[jax.Array], *, index: Any) -> jax.Array: ...
    @overload
    def get_value(self, *, index: Any) -> Any: ...
    def get_value(self, *, index: Any = MISSING) -> Any:
        """Returns the value: containers are copied, refs are read.

        Args:
            index: Returns only ``value[index]``; ``...`` is a whole array.

        Returns:
            The value; arrays are the stored objects, not copies.

        Raises:
            TypeError: If ``index`` is given and the value cannot be indexed.
        """
        raw = self._raw_value
        if values.is_array(raw):
            value = raw if index is MISSING or index is Ellipsis else raw[index]
        elif _jax.is_ref(raw):
            value = values.read_ref(raw, ... if index is MISSING else index)
        else:
            value = values.copy_containers(raw)
            if index is not MISSING and not (
                index is Ellipsis and isinstance(value, jax.ShapeDtypeStruct)
            ):
                value = value[index]
        hooks = metadata_of(self).get("on_get_value")
        if hooks is not None:
            return variable_metadata.run_hooks(hooks, self, value)
        return value

    def set_value(self, value: Any, *, index: Any = MISSING) -> None:
        """Replaces the value, or the part of it at ``index``.

        Args:
            value: The new value. Without ``index`` it may have any type, shape and
                dtype, unless the Variable holds a ref. With ``index`` it is written
                into the array, which keeps its shape, dtype and sharding.
            index: Where to write, as in ``array.at[index].set(value)``.

        Raises:
            TraceContextError: If another trace owns the Variable.
            ValueError: If a ref would get another shape.
        """
        check_write(self)
        value = values.copy_containers(value)
        hooks = metadata_of(self).get("on_set_value")
        if hooks is not None:
            value = variable_metadata.run_hooks(hooks, self, value)
        raw = self._raw_value
        if _jax.is_ref(raw):
            if index is MISSING:
                values.check_fits(raw, unwrap(value))
                index = ...
            values.write_ref(raw, index, unwrap(value))
        elif index is MISSING:
            _replace_raw(self, value)
        elif values.is_array(raw) or isinstance(raw, jax.ShapeDtypeStruct):
            _set_raw(self, values.write_at(raw, index, unwrap(value)))
        else:
            raw[index] = value

    def get_raw_value(self) -> Any:
        """Returns the stored value: runs no hooks, and returns a ref as a ref."""
        return self._raw_value

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool = False) -> None:
        """Stores ``value`` as it is, without hooks; replaces a ref.

        Raises:
            TraceContextError: If another trace owns the Variable.
        """
        check_write(self)
        _replace_raw(self, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set_value(value, index=key)

    def __delitem__(self, key: Any) -> None:
        value: Any = self.get_value()
        del value[key]
        self.set_value(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        value: Any = self.get_value()
        return value.shape

    # Metadata.

    @property
    def var_type(self) -> Any:
        """Class of the Variable; also as ``type``."""
        return type(self)

    type = var_type

    @property
    def hijax(self) -> bool:
        """Whether the Variable was made with ``hijax=True``."""
        return metadata_of(self)["hijax"]

    @property
    def ref(self) -> bool:
        """Whether the value is stored in a ``jax.Ref``."""
        return metadata_of(self)["ref"]

    def get_metadata(
        self,
        name: str | None = None,
        default: Any = MISSING,
        *,
        exclude_required: bool | None = None,
    ) -> Any:
        """Returns all metadata as a new dict, or one entry.

        Args:
            name: The entry to return; ``None`` for all.
            default: The value to return if there is no entry ``name``.
            exclude_required: Whether to leave out ``hijax``, ``ref`` and
                ``eager_sharding``.

        Raises:
            KeyError: If the entry is missing and there is no default.
            TypeError: If ``name`` and ``exclude_required`` are both given, or
                ``default`` without ``name``.
        """
        if name is None:
            if default is not MISSING:
                raise TypeError("get_metadata: `default` needs `name`.")
            hidden = self.required_metadata if exclude_required else ()
            return {k: v for k, v in metadata_of(self).items() if k not in hidden}
        if exclude_required is not None:
            raise TypeError("get_metadata: `name` or `exclude_required`, but not both.")
        if default is MISSING:
            return metadata_of(self)[name]
        return metadata_of(self).get(name, default)

    def set_metadata(self, *args: Any, **entries: Any) -> None:
        """Replaces all metadata (one dict), sets one entry (two arguments), or updates.

        Raises:
            TypeError: If the arguments have none of these three forms.
            ValueError: If ``hijax`` or ``ref`` would change.
            TraceContextError: If another trace owns the Variable.
        """
        changed = variable_metadata.changed(metadata_of(self), args, entries)
        replace_metadata(self, changed)

    def has_metadata(self, name: str) -> bool:
        """Whether there is a metadata entry ``name``."""
        return name in metadata_of(self)

    def del_metadata(self, name: str) -> None:
        """Removes the metadata entry ``name``.

        Raises:
            ValueError: For ``hijax`` and ``ref``.
            KeyError: If there is no such entry.
        """
        if name in ("hijax", "ref"):
            raise ValueError(f"Cannot delete `{name}` metadata: every Variable has it.")
        entries = dict(metadata_of(self))
        del entries[name]
        replace_metadata(self, HashableMapping(entries))

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Runs the ``on_add_axis`` hooks: a transform added a dimension."""
        hooks = metadata_of(self).get("on_add_axis", ())
        variable_metadata.run_hooks(hooks, self, axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Runs the ``on_remove_axis`` hooks: a transform removed a dimension."""
        hooks = metadata_of(self).get("on_remove_axis", ())
        variable_metadata.run_hooks(hooks, self, axis_index, axis_name)

    # Copies and updates.

    def copy(
        self, value: Any = MISSING, *, _copy_ref: bool = True, **updates: Any
    ) -> Variable[A]:
        """Copies the Variable: arrays are shared, containers copied.

        Args:
            value: The value of the copy, by default that of the Variable. A ref is
                copied into a new ref.
            **updates: Metadata entries to change; ``ref`` converts the storage.

        Returns:
            The copy, owned by the current trace. No hook and no `create_value` runs.

        Raises:
            TypeError: If ``raw_value`` is given.
        """
        if "raw_value" in updates:
            raise TypeError("copy: pass the new value as `value`, not as `raw_value`.")
        entries = variable_metadata.updated(metadata_of(self), updates)
        raw = self._raw_value if value is MISSING else value
        if _copy_ref or entries["ref"] is not _jax.is_ref(raw):
            raw = values.stored(raw, ref=entries["ref"])
        return rebuild(type(self), values.copy_containers(raw), entries)

    replace = copy
    to_state = copy

    @classmethod
    def from_metadata(cls, value: Any, attributes: Mapping[str, Any]) -> Variable[Any]:
        """Creates a Variable with this value and metadata, without ``__init__``.

        Raises:
            KeyError: If ``attributes`` lacks ``hijax``.
        """
        entries = {"hijax": attributes["hijax"], "ref": False, "eager_sharding": True}
        entries.update(attributes)
        if entries["ref"] is not _jax.is_ref(value):
            value = values.stored(value, ref=entries["ref"])
        return rebuild(cls, value, HashableMapping(entries))

    def copy_from(self, other: Variable[A]) -> None:
        """Takes over the raw value and the metadata of a Variable of the same class.

        Raises:
            ValueError: If the classes differ.
        """
        if other is self:
            return
        if type(self) is not type(other):
            raise ValueError(
                f"Cannot copy from an incompatible container: expected "
                f"{type(self).__name__}, got {type(other).__name__}."
            )
        check_write(self)
        _replace_raw(self, other._raw_value)
        replace_metadata(self, metadata_of(other))

    def update_from_state(self, variable_state: Variable[A]) -> None:
        """Takes over the value and metadata of another Variable, of any type.

        A ref stays the same ref; ``hijax``, ``ref`` and ``mutable`` stay as they are.
        """
        check_write(self, variable_state._raw_value)
        store(self, variable_state._raw_value)
        take_metadata(self, variable_state)

    # The rest of the object protocol.

    def __getattr__(self, name: str) -> Any:
        # Unset while copy and pickle probe a half-made object.
        if name == "_raw_value":
            raise AttributeError(name)
        entries = metadata_of(self)
        if name in entries:
            return entries[name]
        raw = self._raw_value
        # Views of refs, such as `.at` and (of tracers) `.T`, would not be arrays.
        if _jax.is_ref(raw) and (name == "at" or not hasattr(_jax.Ref, name)):
            raw = raw[...]
        member = getattr(raw, name)
        is_write = values.changes_in_place(raw, name)
        return (
            values.checked(member, partial(check_write, self)) if is_write else member
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_raw_value":
            _replace_raw(self, value)
            return
        try:
            object.__setattr__(self, name, value)
            if name == "__class__":  # which is structure
                touch(self)
        except AttributeError as error:
            if hasattr(type(self), name):
                raise
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}. Variables keep such "
                f"entries as metadata: use variable.set_metadata({name}=value)."
            ) from error

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"Cannot delete {name!r} of a {type(self).__name__}: "
            f"use variable.del_metadata({name!r})."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function: Any = self.get_value()
        return function(*args, **kwargs)

    def __jax_array__(self) -> Any:
        return self.get_value()

    def __nnx_repr__(self) -> Iterable[Any]:
        return representations.variable_repr(self, metadata_of(self))

    __dir__ = representations.names_of_variable

    # For older programs.

    @property
    def _trace_state(self) -> ownership.TraceState:
        """Trace that owns the Variable; another one can be set in it."""
        return ownership.Owner(
            lambda: ownership.token_of(owner_of(self)), partial(_set_owner, self)
        )

    @_trace_state.setter
    def _trace_state(self, state: ownership.TraceState) -> None:
        _set_owner(self, state.jax_trace)

    @property
    def _var_metadata(self) -> MutableMapping[str, Any]:
        """Metadata, as a mapping that any trace can write, like a dict."""
        read, write = metadata_of, _store_metadata
        return variable_metadata.Entries(partial(read, self), partial(write, self))

    @_var_metadata.setter
    def _var_metadata(self, entries: Any) -> None:
        replace_metadata(self, HashableMapping(entries))

    def _check_valid_context(self, error_msg: Callable[[], str]) -> None:
        """Raises if the current trace must not write; called first, if overridden."""
        if not is_owned(self):
            raise errors.TraceContextError(error_msg())


_check_trace = Variable._check_valid_context
# Whether a value is a Variable; in C, for JAX, which asks each node and leaf.
is_variable: Callable[[Any], bool] = Variable.__instancecheck__


def touch(variable: Variable[Any]) -> None:
    """Applies `ownership.touch` to a Variable."""
    ownership.touch_slot(_set_version, variable)


def rebuild(
    cls: type[Variable[Any]], raw: Any, entries: HashableMapping, owner: Any = MISSING
) -> Any:
    """Makes a Variable of its parts, by default the current trace's; runs nothing."""
    variable = object.__new__(cls)
    _set_raw(variable, raw)
    _set_metadata(variable, entries.live if type(entries) is Snapshot else entries)
    _set_owner(variable, ownership.current() if owner is MISSING else owner)
    _set_version(variable, 0)
    return variable


# Permission to write.


def is_owned(variable: Variable[Any]) -> bool:
    """Whether the current trace may write the Variable."""
    return ownership.is_current(owner_of(variable)) or _jax.is_ref(variable._raw_value)


def may_write(variable: Variable[Any]) -> bool:
    """Whether the value of a Variable may be written now."""
    return is_owned(variable) and metadata_of(variable).get("mutable", True)


def check_owned(variable: Variable[Any], path: str = "") -> None:
    """Raises if another trace owns the Variable: nothing in it may change then.

    A class may have its own ``_check_valid_context``, which is called instead.
    """
    if type(variable)._check_valid_context is not _check_trace:
        variable._check_valid_context(lambda: str(ownership.variable_error(variable)))
    elif owner_of(variable) is not ownership.current() and not is_owned(variable):
        if metadata_of(variable)["hijax"]:
            raise ownership.lost_update_error(variable, path)
        raise ownership.variable_error(variable, path)


def take_over(variable: Variable[Any]) -> None:
    """Treats an argument that JAX rebuilt as one of the program's own objects."""
    _set_owner(variable, ownership.token_of(owner_of(variable)))


def note_read(variable: Variable[Any]) -> None:
    """Tells the owner that a Variable is taken apart."""
    owner = owner_of(variable)
    if type(owner) is ownership.RebuiltArguments:
        owner.note_read(variable)


def check_write(variable: Variable[Any], raw: Any = MISSING, path: str = "") -> None:
    """Raises if the value can't be written now: `check_owned`, or it is read-only.

    With a raw value, even if that can't be in the ref of the Variable, which keeps its
    shape and dtype.
    """
    if not metadata_of(variable).get("mutable", True):
        raise ownership.read_only_error(variable, path)
    check_owned(variable, path)
    is_ref = _jax.is_ref(variable._raw_value)
    if raw is not MISSING and is_ref:
        values.check_fits(variable._raw_value, raw, path)
    owner = owner_of(variable)
    if type(owner) is ownership.RebuiltArguments and not is_ref:
        owner.note_write(variable)


# Writing.


def store(variable: Variable[Any], raw: Any) -> None:
    """Stores a raw value that `check_write` allows; into the ref, if there is one."""
    current = variable._raw_value
    if raw is current:
        return
    if _jax.is_ref(current):
        values.write_ref(current, ..., raw)
    elif metadata_of(variable)["ref"]:
        # An abstract Variable gets its ref together with its first array.
        _replace_raw(variable, values.stored(raw, ref=True))
    else:
        _set_raw(variable, values.stored(raw, ref=False))


def _replace_raw(variable: Variable[Any], raw: Any) -> None:
    """Stores a raw value; another ref is a new structure, so a new version."""
    old = variable._raw_value
    _set_raw(variable, raw)
    if raw is not old and (_jax.is_ref(raw) or _jax.is_ref(old)):
        touch(variable)


def replace_metadata(variable: Variable[Any], entries: HashableMapping) -> None:
    """Replaces all metadata, if the current trace owns the Variable."""
    check_owned(variable)
    _store_metadata(variable, entries)


def _store_metadata(variable: Variable[Any], entries: HashableMapping) -> None:
    _set_metadata(variable, entries.live if type(entries) is Snapshot else entries)
    touch(variable)


def take_metadata(variable: Variable[Any], other: Variable[Any]) -> None:
    """Takes over another Variable's metadata, except for entries on how it is kept."""
    other_metadata, current = metadata_of(other), metadata_of(variable)
    if other_metadata is not current:
        entries = variable_metadata.taken_over(current, other_metadata)
        if entries != current:
            replace_metadata(variable, entries)


# Many at once.


def read_all(boxes: Sequence[Variable[Any]]) -> list[Any]:
    """Returns the raw values of many Variables."""
    return [x._raw_value for x in boxes]


def write_all(
    boxes: Sequence[Variable[Any]],
    raw_values: Sequence[Any],
    path_at: Callable[[int], str] | None = None,
) -> None:
    """Writes raw values into many Variables: all, or it raises and writes none.

    Args:
        boxes: The Variables.
        raw_values: The value of each.
        path_at: Gives the path of the n-th Variable, for the message.
    """
    if may_replace_all(boxes, raw_values):
        replace_all(boxes, raw_values)
        return
    for index, (variable, raw) in enumerate(zip(boxes, raw_values, strict=True)):
        check_write(variable, raw, "" if path_at is None else path_at(index))
    store_all(boxes, raw_values)


def store_all(boxes: Sequence[Variable[Any]], raw_values: Sequence[Any]) -> None:
    """Applies `store` to each of many Variables."""
    for variable, raw in zip(boxes, raw_values, strict=True):
        store(variable, raw)


def may_replace_all(boxes: Sequence[Variable[Any]], raw_values: Sequence[Any]) -> bool:
    """Whether `replace_all` is allowed now: all may be written, and none is a ref."""
    current = itertools.repeat(ownership.current())
    if not all(map(operator.is_, map(owner_of, boxes), current)):
        return False
    kinds = {*map(type, boxes)}
    if any([kind._check_valid_context is not _check_trace for kind in kinds]):
        return False
    # The Variables of a model usually share a few entries, and a few types of values.
    distinct = {id(x): x for x in map(metadata_of, boxes)}.values()
    if any([x.get("ref") or not x.get("mutable", True) for x in distinct]):
        return False
    types = {*map(type, map(raw_value_of, boxes)), *map(type, raw_values)}
    return not any([issubclass(kind, (_jax.Ref, _jax.Tracer)) for kind in types])


def replace_all(boxes: Sequence[Variable[Any]], raw_values: Sequence[Any]) -> None:
    """Does as `store_all` where `may_replace_all` holds."""
    # A loop would cost four times as much, which counts in the cost of a whole call.
    collections.deque(map(_set_raw, boxes, raw_values), maxlen=0)
