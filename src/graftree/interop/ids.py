"""Numbers that identify things within one process.

Every `UUID` from `uuid` has a number of its own, and so does every copy of one: a
copied object is another object.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

# next() on it is one step of the interpreter, so no two threads get the same number.
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True)
class UUID:
    """A number as a name: hashable, equal if the numbers are.

    Args:
        id: The number.

    Example:
        >>> from graftree import ids
        >>> ids.UUID(3), ids.UUID(3) == ids.UUID(4)
        (UUID(3), False)
    """

    id: int

    def __repr__(self) -> str:
        return f"UUID({self.id})"

    def __copy__(self) -> UUID:
        return uuid()

    def __deepcopy__(self, memo: dict[int, Any]) -> UUID:
        return uuid()


def uuid() -> UUID:
    """Returns a number that nothing else in this process has.

    Returns:
        A new `UUID` with a higher number than all before.

    Example:
        >>> from graftree import ids
        >>> first, second = ids.uuid(), ids.uuid()
        >>> first.id < second.id
        True
    """
    return UUID(next(_numbers))
