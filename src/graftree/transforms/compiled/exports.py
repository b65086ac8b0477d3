"""What ``jax.export`` gets of a function made by `jit`: a function of pytrees.

An exported function returns its output and does nothing else, so one that changes its
arguments is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from graftree import errors
from graftree.transforms.crossing import outside
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.packing import Packed
from graftree.transforms.crossing.signatures import Signature


def trace(
    name: str,
    jitted: Callable[..., Any],
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], Call],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Traces a function of pytrees, by ``jax.jit``.

    Args:
        name: What the function is called.
        jitted: Computes a result of groups of leaves.
        prepare: Packs a call: positional and keyword arguments.
        args: Shapes and dtypes of the arguments that are not static.
        kwargs: The same of keyword arguments.

    Raises:
        ValueError: If the function changes its arguments.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        call = prepare(args, kwargs)
        result = jitted(*call.groups)
        _check_unchanged(name, call.packed, result)
        return call.commit(result)

    function.__name__ = function.__qualname__ = name
    return jax.jit(function).trace(*args, **kwargs)


def check_arrays(name: str, signature: Signature) -> None:
    """Refuses arguments that are array refs, or have some."""
    found = [slot.name for slot in signature.slots if slot.is_ref]
    if found:
        raise TypeError(
            errors.message(
                f"{name} takes array refs, which exported functions can't take.",
                where="\n".join(found),
                way_out="Export it for arrays: for nnx.to_arrays(model).",
            )
        )


def _check_unchanged(name: str, packed: Packed, result: Any) -> None:
    """Refuses results that an exported function would lose."""
    returned, *_ = outside.in_order(result)
    slots = packed.signature.slots
    changed = {p for p in returned.changed if p not in returned.kept}
    changed |= {position for position, _ in returned.metadata}
    lines = [f"{slots[position].name} changes" for position in sorted(changed)]
    if returned.structure is not None and not returned.keeps_structure:
        lines.append("attributes of the arguments change")
    if lines:
        raise ValueError(
            errors.message(
                f"{name} changes its arguments, which an exported function can't: "
                "it only returns its output.",
                where="\n".join(lines),
                way_out="If that is Dropout or BatchNorm in training, call "
                "model.eval() before. To draw noise on purpose,\nmake the streams in "
                "the function, of a key that it takes: nnx.Rngs(key). Else return what "
                "changes:\nexport jax.jit of a function that merges the model from its "
                "state, and returns nnx.state(model), too.",
            )
        )
