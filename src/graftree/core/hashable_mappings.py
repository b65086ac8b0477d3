"""Mappings of static values that are compared by content, and hashed.

Metadata of Variables and the names of axes are such mappings. Where one is kept to be
compared later, as in a skeleton, a value may have changed in place by then, so what is
kept is its `snapshot`: the mapping itself, if none of its values ever changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from graftree.core import fingerprints
from graftree.core.fingerprints import StaticMapping


class HashableMapping(StaticMapping):
    """An immutable mapping that compares by content and can be hashed.

    Hashing needs hashable values. Values that are arrays compare element-wise, others
    by type and value: ``1`` is not ``True`` here.

    Example:
        >>> from graftree.core.hashable_mappings import HashableMapping
        >>> HashableMapping({"a": 1, "b": 2}) == HashableMapping({"b": 2, "a": 1})
        True
    """

    __slots__ = ("__weakref__", "_entries", "_hash", "get", "is_fixed")

    def __init__(self, entries: Mapping[Any, Any], /) -> None:
        self._entries = dict(entries)
        self._hash: int | None = None
        # Whether a check has shown that no value changes in place.
        self.is_fixed = False
        # The dict's own, in C: each read and write of a Variable calls it.
        self.get = self._entries.get

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._entries.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, HashableMapping):
            return NotImplemented
        mine, theirs = self._entries, other._entries
        return mine.keys() == theirs.keys() and all(
            fingerprints.is_same(value, theirs[key]) for key, value in mine.items()
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries!r})"

    def __reduce__(self) -> Any:
        return type(self), (self._entries,)

    def as_dict(self) -> dict[Any, Any]:
        """Copies the entries to a new dict, in C."""
        return self._entries.copy()

    def may_change(self) -> bool:
        """Whether the fingerprint of one of its values may change."""
        if not self.is_fixed:
            values = tuple(self._entries.values())
            self.is_fixed = not fingerprints.any_may_change(values)
        return not self.is_fixed

    def snapshot(self) -> HashableMapping:
        """Returns the mapping as it is now: itself, if no value of it can change."""
        return Snapshot(self) if self.may_change() else self

    def with_entry(self, key: str, value: Any) -> Self:
        """Returns a mapping of the same type in which ``key`` has this value."""
        return type(self)({**self._entries, key: value})

    def without(self, key: str) -> Self:
        """Returns a mapping of the same type that lacks ``key``."""
        return type(self)({k: v for k, v in self._entries.items() if k != key})


class Snapshot(HashableMapping):
    """Mapping as it was at one time, although its values change in place.

    Equal to a mapping, or a snapshot, whose values are or were equal to these.

    Args:
        live: The mapping.

    Attributes:
        live: The same.
    """

    __slots__ = ("_content", "live")

    def __init__(self, live: HashableMapping, /) -> None:
        super().__init__(live)
        self.live = live
        self._content = fingerprints.fingerprint(live)

    def __hash__(self) -> int:
        hash(self.live)  # an error if a value has no hash; it may have changed by now
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, HashableMapping):
            return NotImplemented
        theirs = (
            other._content
            if isinstance(other, Snapshot)
            else fingerprints.fingerprint(other)
        )
        return self._content == theirs and all(
            fingerprints.have_same_content(value, other[key])
            for key, value in self.items()
        )

    def __reduce__(self) -> Any:
        return Snapshot, (self.live,)

    def may_change(self) -> bool:
        """Whether a value of the mapping may change; these are what they were."""
        return self.live.may_change()

    def snapshot(self) -> HashableMapping:
        """Returns the mapping as it is now."""
        return self.live.snapshot()
