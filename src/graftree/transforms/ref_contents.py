"""Array refs through JAX transforms that may run a function more than once.

JAX rematerializes writes to a ref together with the rest. So the function gets the
content of the refs, makes refs of its own, and returns the last content, which is
written to the caller's refs once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from graftree import _jax


class _Slot:
    """Where a ref was in a pytree; has no leaves.

    Attributes:
        number: Of the ref.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slot) and self.number == other.number

    def __hash__(self) -> int:
        return hash((_Slot, self.number))


jax.tree_util.register_static(_Slot)


def by_content(
    function: Callable[..., Any],
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A JAX transform of a function whose arguments may have refs.

    Args:
        function: Gets refs of its own.
        transform: Gets and returns a function of pytrees without refs.

    Returns:
        A function with the arguments of ``function``, which writes to their refs.
    """

    def run(contents: list[Any], taken: Any) -> tuple[Any, list[Any]]:
        refs = [*map(_jax.new_ref, contents)]

        def fill(x: Any) -> Any:
            return refs[x.number] if isinstance(x, _Slot) else x

        filled = jax.tree.map(fill, taken, is_leaf=lambda x: isinstance(x, _Slot))
        out = function(*filled)
        return out, [ref[...] for ref in refs]

    transformed = transform(run)

    def outer(*arguments: Any) -> Any:
        # One ref at two places is one ref inside, too.
        refs = {id(x): x for x in jax.tree.leaves(arguments) if _jax.is_ref(x)}
        slots = {key: _Slot(number) for number, key in enumerate(refs)}
        taken = jax.tree.map(lambda x: slots.get(id(x), x), arguments)
        out, contents = transformed([ref[...] for ref in refs.values()], taken)
        for ref, content in zip(refs.values(), contents, strict=True):
            if _jax.is_differentiated(content) and not _jax.is_differentiated(ref):
                # The function cut it off, or JAX would have refused its write.
                content = jax.lax.stop_gradient(content)
            ref[...] = content
        return out

    return outer
