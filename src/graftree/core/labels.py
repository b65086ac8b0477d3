"""The static half of a Variable: its metadata, and what may be done with it."""

from __future__ import annotations

from typing import Any, ClassVar

from graftree.core import metadata, stamps
from graftree.core.metadata import HashableMapping

MISSING: Any = object()


class Labeled:
    """The metadata of a Variable. A change needs the owning trace, and is stamped."""

    __slots__ = ("_metadata", "stamp")
    required_metadata: ClassVar[frozenset[str]] = metadata.REQUIRED
    stamp: int

    def check_writable(self) -> None:
        """Raises if the Variable must not be changed now."""
        raise NotImplementedError

    def get_hooks(self, name: str) -> Any:
        """The hooks of a name, or ``None``."""
        return self._metadata.get(name)

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


def metadata_of(variable: Labeled) -> HashableMapping:
    """The metadata as it is stored: immutable, not a copy."""
    return variable._metadata


def replace_metadata(variable: Labeled, entries: HashableMapping) -> None:
    """Replaces all metadata.

    Raises:
        TraceContextError: If another trace owns the Variable.
    """
    variable.check_writable()
    object.__setattr__(variable, "_metadata", entries)
    stamps.touch(variable)
