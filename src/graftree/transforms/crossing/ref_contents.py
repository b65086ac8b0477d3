"""Array refs where JAX can't use them: by their content, or not at all.

JAX rematerializes writes to a ref together with the rest. So the function gets the
content of the refs, makes refs of its own, and returns the last content, which is
written to the caller's refs once. Where that doesn't help, an error tells the way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from graftree import _jax, errors
from graftree.transforms.crossing import guises
from graftree.transforms.crossing.packing import Values


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a ref was in a pytree: its number."""

    number: int


def by_content(
    function: Callable[..., Any],
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A JAX transform of a function whose arguments may have refs."""

    def run(contents: list[Any], *taken: Any) -> tuple[Any, list[Any]]:
        refs = [*map(_jax.new_ref, contents)]

        def fill(x: Any) -> Any:
            return refs[x.number] if isinstance(x, _Place) else x

        filled = jax.tree.map(fill, taken, is_leaf=lambda x: isinstance(x, _Place))
        out = function(*filled)
        return out, [ref[...] for ref in refs]

    transformed = transform(guises.named_after(function, run, ["refs"]))

    def outer(*arguments: Any) -> Any:
        # One ref at two places is one ref inside, too.
        refs = {id(x): x for x in jax.tree.leaves(arguments) if _jax.is_ref(x)}
        places = {key: _Place(number) for number, key in enumerate(refs)}
        taken = jax.tree.map(lambda x: places.get(id(x), x), arguments)
        out, contents = transformed([ref[...] for ref in refs.values()], *taken)
        for ref, content in zip(refs.values(), contents, strict=True):
            if _jax.is_differentiated(content) and not _jax.is_differentiated(ref):
                # The function cut it off, or JAX would have refused its write.
                content = jax.lax.stop_gradient(content)
            ref[...] = content
        return out

    return outer


NO_GRADIENT = "cannot differentiate with respect to a Ref-typed argument"


def refuse(groups: Iterable[Values], transform: str, reason: str) -> None:
    """Refuses arguments with refs."""
    if not any(_jax.is_ref(value) for group in groups for value in group.values):
        return
    for name in _refs(groups):
        raise TypeError(
            f"nnx.{transform} {reason}: {name}.\n"
            "Pass a copy that has arrays, made by nnx.to_arrays."
        )


# What JAX says: of writes, of `cond` and `switch`, of `scan` in two versions.
_COMPLAINTS = ("array reference", "vmap-of-cond", "over a Ref", "__jax_array__()")


def with_hint(
    mapped: Callable[..., Any], axes: Sequence[int | None]
) -> Callable[..., Any]:
    """Adds paths and the way out to what JAX says of refs in a mapped function."""

    def wrapper(*groups: Values) -> Any:
        try:
            return mapped(*groups)
        except Exception as error:
            if any(words in str(error) for words in _COMPLAINTS):
                pairs = zip(groups, axes, strict=True)
                names = [*_refs(group for group, axis in pairs if axis is None)]
                if "unbatched array reference" in str(error) and names:
                    raise _broadcast_error(names) from error
                error.add_note(
                    "A mapped function can write to an array ref only if the ref is "
                    "mapped, too;\nit can't use refs in `cond` or `switch`, nor scan "
                    "those that are mapped.\nPass a copy that has arrays, made by "
                    "nnx.to_arrays."
                )
            raise

    return wrapper


def _broadcast_error(names: Sequence[str]) -> ValueError:
    return ValueError(
        errors.message(
            "A function mapped by nnx.vmap wrote to an array ref that is not mapped: "
            "each of its calls would write another value.",
            where="refs with the axis None: " + ", ".join(names),
            way_out="Give the object an axis, or pass a copy that has arrays, made by "
            "nnx.to_arrays;\nrandom streams can be split: rngs.split(n).",
        )
    )


def _refs(groups: Iterable[Values]) -> Iterator[str]:
    """The names of the refs in groups."""
    for group in groups:
        for slot, value in group.slots():
            if _jax.is_ref(value):
                yield slot.name
