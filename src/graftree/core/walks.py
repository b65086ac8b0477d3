"""Walks over nested values: objects, containers, states.

A function lists the values below a value and decides which to pass over, so each walk
of the package is one of these functions. No recursion, whose depth Python limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Path = tuple[Any, ...]

# ``children_of(value, path)`` gives the keys and values below a value, in order;
# ``None`` leaves out the value itself.
ChildrenOf = Callable[[Any, Path], Sequence[tuple[Any, Any]] | None]


def walk(
    root: Any,
    children_of: ChildrenOf,
    start: Path = (),
    *,
    children_first: bool = False,
) -> Iterator[tuple[Path, Any]]:
    """Lists a value and all below it, depth first.

    Args:
        root: The value.
        children_of: Lists the values in a value. It is called once for each, in the
            order of the walk, before the value is listed.
        start: The path of the root.
        children_first: Whether a value comes after all those below it.

    Yields:
        Pairs of a path and a value.

    Example:
        >>> from graftree.core import walks
        >>> def children_of(x, path):
        ...     return [*enumerate(x)] if isinstance(x, list) else ()
        >>> [*walks.walk([1, [2]], children_of)]
        [((), [1, [2]]), ((0,), 1), ((1,), [2]), ((1, 0), 2)]
    """
    children = children_of(root, start)
    if children is None:
        return
    if not children_first:
        yield start, root
    # The path and the value of each node above, and the rest of its children.
    pending = [(start, root, iter(children))]
    while pending:
        path, x, remaining = pending[-1]
        for key, child in remaining:
            child_path = (*path, key)
            children = children_of(child, child_path)
            if children is None:
                continue
            if not children_first:
                yield child_path, child
            elif not children:
                yield child_path, child
                continue
            if children:
                pending.append((child_path, child, iter(children)))
                break
        else:
            pending.pop()
            if children_first:
                yield path, x


class Once(dict[int, Any]):
    """Remembers objects that it was given, by identity, and keeps them alive.

    Example:
        >>> from graftree.core import walks
        >>> a, b = [1], [1]
        >>> once = walks.Once()
        >>> once(a), once(b), once(a)
        (True, True, False)
    """

    def __call__(self, x: Any) -> bool:
        """Whether ``x`` comes for the first time."""
        if id(x) in self:
            return False
        self[id(x)] = x
        return True


class Above(dict[int, tuple[Path, Any]]):
    """Finds cycles: remembers the path at which a value came last.

    Example:
        >>> from graftree.core import walks
        >>> above, a = walks.Above(), [1]
        >>> above(a, ("x",)), above(a, ("y",)), above(a, ("y", 0))
        (None, None, ('y',))
    """

    def __call__(self, x: Any, path: Path) -> Path | None:
        """Returns the path of ``x`` above ``path``, if it contains itself."""
        last, _ = self.get(id(x), (None, x))
        if last is not None and path[: len(last)] == last:
            return last
        self[id(x)] = path, x
        return None


class ByType(dict[type, bool]):
    """What is so of the values of a type: asked once, then looked up in C.

    Args:
        ask: A function of the type, which may take longer than all else in a walk.

    Example:
        >>> from graftree.core import walks
        >>> is_number = walks.ByType(lambda kind: issubclass(kind, (int, float)))
        >>> is_number[type(1.0)], is_number[type("a")]
        (True, False)
    """

    def __init__(self, ask: Callable[[type], bool]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, kind: type) -> bool:
        answer = self[kind] = self._ask(kind)
        return answer
