"""The static half of a Variable: its metadata, and what may be done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from graftree import errors
from graftree.core import metadata, stamps
from graftree.core.metadata import HashableMapping

MISSING: Any = object()


class Labeled:
    """The metadata of a Variable. A change needs the owning trace, and is stamped."""

    __slots__ = ("_metadata", "stamp")
    required_metadata: ClassVar[frozenset[str]] = metadata.REQUIRED
    stamp: int

    def check_owned(self, path: str = "") -> None:
        """Raises if another trace owns the Variable."""
        raise NotImplementedError

    @property
    def var_type(self) -> Any:
        """The class of the Variable; also as ``type``."""
        return type(self)

    type = var_type

    @property
    def hijax(self) -> bool:
        """Whether the Variable was made with ``hijax=True``."""
        return self._metadata["hijax"]

    @property
    def ref(self) -> bool:
        """Whether the value is stored in a ``jax.Ref``."""
        return self._metadata["ref"]

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
            return {k: v for k, v in self._metadata.items() if k not in hidden}
        if exclude_required is not None:
            raise TypeError(
                "get_metadata: give `name` or `exclude_required`, not both."
            )
        if default is MISSING:
            return self._metadata[name]
        return self._metadata.get(name, default)

    def set_metadata(self, *args: Any, **entries: Any) -> None:
        """Replaces all metadata (one dict), sets one entry (two arguments), or updates.

        Raises:
            TypeError: If the arguments are none of these three forms.
            ValueError: If ``hijax`` or ``ref`` would change.
            TraceContextError: If another trace owns the Variable.
        """
        replace_metadata(self, metadata.changed(self._metadata, args, entries))

    def has_metadata(self, name: str) -> bool:
        """Whether there is a metadata entry ``name``."""
        return name in self._metadata

    def del_metadata(self, name: str) -> None:
        """Removes the metadata entry ``name``.

        Raises:
            ValueError: For ``hijax`` and ``ref``.
            KeyError: If there is no such entry.
        """
        if name in ("hijax", "ref"):
            raise ValueError(f"Cannot delete `{name}` metadata: every Variable has it.")
        entries = dict(self._metadata)
        del entries[name]
        replace_metadata(self, HashableMapping(entries))

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
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
        if "on_add_axis" in self._metadata:
            hooks = self._metadata["on_add_axis"]
            metadata.run_hooks(hooks, self, axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tells the ``on_remove_axis`` hooks that a transform removed a dimension."""
        if "on_remove_axis" in self._metadata:
            hooks = self._metadata["on_remove_axis"]
            metadata.run_hooks(hooks, self, axis_index, axis_name)


def is_read_only(variable: Labeled) -> bool:
    """Whether the Variable was made read-only, by ``mutable=False``."""
    return not variable._metadata.get("mutable", True)


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


# Where these are: `Labeled.__setattr__`, which explains wrong assignments, is slow.
metadata_slot: Any = Labeled.__dict__["_metadata"]
stamp_slot: Any = Labeled.__dict__["stamp"]

# The metadata as it is stored: immutable, not a copy.
metadata_of: Callable[[Labeled], HashableMapping] = metadata_slot.__get__


def replace_metadata(variable: Labeled, entries: HashableMapping) -> None:
    """Replaces all metadata.

    Raises:
        TraceContextError: If another trace owns the Variable.
    """
    variable.check_owned()
    metadata_slot.__set__(variable, entries)
    stamps.touch(variable)


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
