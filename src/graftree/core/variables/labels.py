"""What a Variable is made of, its metadata, and what may be done with both.

A Variable has four slots: the raw value, the metadata, the owning trace and the stamp.
Only the first has a name on the class. The others are reached by the functions at the
end, since any name may be metadata of the user, or be defined in a subclass. What older
subclasses know of is there as well: ``_raw_value``, ``_trace_state``, ``_var_metadata``
and the check ``_check_valid_context``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, ClassVar

from graftree import _jax, errors
from graftree.core import ownership, stamps
from graftree.core.variables import metadata
from graftree.core.variables.metadata import HashableMapping

MISSING: Any = object()


class Labeled:
    """The metadata of a Variable. A change needs the owning trace, and is stamped."""

    __slots__ = ("_raw_value", "metadata", "owner", "stamp")
    required_metadata: ClassVar[frozenset[str]] = metadata.REQUIRED

    # For subclasses that know of these.

    @property
    def _trace_state(self) -> ownership.TraceState:
        """The trace that owns the Variable; another one can be set in it."""
        return _Owner(self)

    @_trace_state.setter
    def _trace_state(self, state: ownership.TraceState) -> None:
        owner_slot.__set__(self, state.jax_trace)

    @property
    def _var_metadata(self) -> MutableMapping[str, Any]:
        """The metadata, as a mapping that can be written."""
        return _Entries(self)

    @_var_metadata.setter
    def _var_metadata(self, entries: Any) -> None:
        replace_metadata(self, HashableMapping(entries))

    def _check_valid_context(self, error_msg: Callable[[], str]) -> None:
        """Raises if the current trace must not write; called before each write."""
        if not is_owned(self):
            raise errors.TraceContextError(error_msg())

    @property
    def var_type(self) -> Any:
        """The class of the Variable; also as ``type``."""
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
        """All metadata as a new dict, or the entry ``name``.

        Args:
            name: The entry to return; ``None`` for all.
            default: Returned if there is no entry ``name``.
            exclude_required: Leaves out ``hijax``, ``ref`` and ``eager_sharding``.

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
            raise TypeError(
                "get_metadata: give `name` or `exclude_required`, not both."
            )
        if default is MISSING:
            return metadata_of(self)[name]
        return metadata_of(self).get(name, default)

    def set_metadata(self, *args: Any, **entries: Any) -> None:
        """Replaces all metadata (one dict), sets one entry (two arguments), or updates.

        Raises:
            TypeError: If the arguments are none of these three forms.
            ValueError: If ``hijax`` or ``ref`` would change.
            TraceContextError: If another trace owns the Variable.
        """
        replace_metadata(self, metadata.changed(metadata_of(self), args, entries))

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

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            old = self._raw_value if name == "_raw_value" else None
            object.__setattr__(self, name, value)
            # Its class, and which ref it holds, are structure.
            if name == "__class__" or _jax.is_ref(old) or _jax.is_ref(value):
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

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tells the ``on_add_axis`` hooks that a transform added a dimension."""
        if "on_add_axis" in metadata_of(self):
            hooks = metadata_of(self)["on_add_axis"]
            metadata.run_hooks(hooks, self, axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tells the ``on_remove_axis`` hooks that a transform removed a dimension."""
        if "on_remove_axis" in metadata_of(self):
            hooks = metadata_of(self)["on_remove_axis"]
            metadata.run_hooks(hooks, self, axis_index, axis_name)


def is_read_only(variable: Labeled) -> bool:
    """Whether the Variable was made read-only, by ``mutable=False``."""
    return not metadata_of(variable).get("mutable", True)


def immutable_error(variable: Labeled, path: str = "") -> errors.ImmutableVariableError:
    """The error for writing a Variable that is read-only, or is so in a trace."""
    kind = type(variable).__name__
    if is_read_only(variable):
        what = f"Cannot write this {kind}: it was made read-only."
        way_out = "Use nnx.with_vars(node, mutable=True) to undo that."
    else:
        what = (
            f"Cannot update a non-ref HijaxVariable ({kind}) inside a JAX transform: "
            "the update would be lost."
        )
        way_out = f"Make it with ref=True: nnx.{kind}(value, hijax=True, ref=True)."
    return errors.ImmutableVariableError(
        errors.message(what, where=f"at {path}" if path else "", way_out=way_out)
    )


def _nameless(name: str) -> Any:
    """A slot, without its name on the class."""
    slot = Labeled.__dict__[name]
    delattr(Labeled, name)
    return slot


# To be used where an assignment would go through `Labeled.__setattr__`, which explains
# wrong ones, and costs five times as much.
raw_slot: Any = Labeled.__dict__["_raw_value"]
metadata_slot: Any = _nameless("metadata")
owner_slot: Any = _nameless("owner")
stamp_slot: Any = _nameless("stamp")

# The metadata as it is stored: immutable, not a copy.
metadata_of: Callable[[Labeled], HashableMapping] = metadata_slot.__get__
owner_of: Callable[[Labeled], Any] = owner_slot.__get__
stamp_of: Callable[[Labeled], int] = stamp_slot.__get__


def touch(variable: Labeled) -> None:
    """`stamps.touch` for a Variable."""
    stamps.touch_slot(stamp_slot.__set__, variable)


class _Owner(ownership.TraceState):
    """The trace that owns a Variable; setting another one writes it there."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Labeled) -> None:
        self._variable = variable

    @property
    def jax_trace(self) -> Any:
        return owner_of(self._variable)

    @jax_trace.setter
    def jax_trace(self, token: Any) -> None:
        owner_slot.__set__(self._variable, token)


_jax.register_leafless(_Owner)


class _Entries(MutableMapping[str, Any]):
    """The metadata of a Variable; what is written here is written there."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Labeled) -> None:
        self._variable = variable

    def __getitem__(self, key: str) -> Any:
        return metadata_of(self._variable)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        entries = metadata_of(self._variable).with_entry(key, value)
        replace_metadata(self._variable, entries)

    def __delitem__(self, key: str) -> None:
        self[key]  # a KeyError if it is missing
        replace_metadata(self._variable, metadata_of(self._variable).without(key))

    def __iter__(self) -> Iterator[str]:
        return iter(metadata_of(self._variable))

    def __len__(self) -> int:
        return len(metadata_of(self._variable))

    def __repr__(self) -> str:
        return repr(dict(self))


# Who may write.


def is_owned(variable: Labeled) -> bool:
    """Whether the current trace may write the Variable."""
    if owner_of(variable) is ownership.current():
        return True
    return _jax.is_ref(variable._raw_value)


def check_owned(variable: Labeled, path: str = "") -> None:
    """Raises if another trace owns the Variable: nothing in it may change then.

    Raises:
        TraceContextError: Names the type, and the path if given.
        ImmutableVariableError: In its place, for ``hijax=True``.
    """
    if not is_owned(variable):
        is_hijax = metadata_of(variable)["hijax"]
        make = immutable_error if is_hijax else ownership.variable_error
        raise make(variable, path)


def check_writable(variable: Labeled, path: str = "") -> None:
    """Raises if the value must not be written now: `check_owned`, or read-only.

    Raises:
        ImmutableVariableError: If the Variable was made read-only.
    """
    if is_read_only(variable):
        raise immutable_error(variable, path)
    if type(variable) in own_checks or owner_of(variable) is not ownership.current():
        _check_context(variable, path)


# The classes with a `_check_valid_context` of their own, which is asked in our place.
own_checks: set[type] = set()


def _check_context(variable: Labeled, path: str = "") -> None:
    if type(variable) in own_checks:
        variable._check_valid_context(lambda: str(ownership.variable_error(variable)))
    else:
        check_owned(variable, path)


def replace_metadata(variable: Labeled, entries: HashableMapping) -> None:
    """Replaces all metadata.

    Raises:
        TraceContextError: If another trace owns the Variable.
    """
    _check_context(variable)
    metadata_slot.__set__(variable, entries)
    touch(variable)


def take_metadata(variable: Labeled, other: Labeled) -> None:
    """Takes over the metadata of another Variable, but for what says how it is kept.

    Raises:
        TraceContextError: If another trace owns the Variable.
    """
    given, own = metadata_of(other), metadata_of(variable)
    if given is not own:
        entries = metadata.taken_over(own, given)
        if entries != own:
            replace_metadata(variable, entries)
