"""What calls cost: floating-point operations, as XLA counts them.

The counts are those of the program before XLA optimizes it. So they say what a layer
asks for, not what the machine does. The body of a loop counts once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree._jax import Recorded


@dataclasses.dataclass(frozen=True)
class Costs:
    """The operations of a call, forward, and with its derivative; ``None`` if unasked.

    Attributes:
        flops: Those of the call.
        vjp_flops: Those of the call and its derivative with respect to all that it
            reads: its inputs and the Variables.
    """

    flops: int | None = None
    vjp_flops: int | None = None


class Counter:
    """Counts what calls cost.

    Args:
        flops: Whether to count the operations of a call.
        vjp_flops: Whether to count those with the derivative.
    """

    def __init__(self, flops: bool, vjp_flops: bool) -> None:
        self._flops, self._vjp_flops = flops, vjp_flops
        # Blocks that are alike are counted once.
        self._known: dict[Any, int] = {}

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to count."""
        return self._flops or self._vjp_flops

    @property
    def unknown(self) -> Costs:
        """The costs of a call of which nothing is known."""
        return Costs(0 if self._flops else None, 0 if self._vjp_flops else None)

    def count(self, point: Any, outputs: list[Any]) -> Costs:
        """Counts what was recorded since a point for these outputs."""
        flops = vjp_flops = None
        if self._flops:
            found = _jax.recorded_since(point, outputs)
            flops = self._of("flops", found, lambda x: (x.function, x.inputs))
        if self._vjp_flops:
            smooth = [x for x in outputs if _is_float(x)]
            found = _jax.recorded_since(point, smooth)
            vjp_flops = self._of("vjp_flops", found, _derivative)
        return Costs(flops, vjp_flops)

    def _of(
        self,
        what: str,
        part: Recorded,
        program: Callable[[Recorded], tuple[Callable[..., Any], list[Any]]],
    ) -> int:
        key = what, part.text, tuple(part.are_constants)
        if key not in self._known:
            self._known[key] = _flops(*program(part))
        return self._known[key]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _derivative(part: Recorded) -> tuple[Callable[..., Any], list[Any]]:
    """The part with its derivative, and the types of its inputs and cotangents."""
    chosen = [
        number
        for number, (x, is_constant) in enumerate(
            zip(part.inputs, part.are_constants, strict=True)
        )
        if _is_float(x) and not is_constant
    ]

    def both(inputs: list[Any], cotangents: list[Any]) -> Any:
        def forward(*values: Any) -> Any:
            filled = dict(zip(chosen, values, strict=True))
            return part.function(*[filled.get(i, x) for i, x in enumerate(inputs)])

        out, pull = jax.vjp(forward, *[inputs[number] for number in chosen])
        return out, pull(cotangents)

    return both, [part.inputs, jax.eval_shape(part.function, *part.inputs)]


def _flops(function: Callable[..., Any], inputs: list[Any]) -> int:
    analysis: Any = jax.jit(function).lower(*inputs).cost_analysis()
    if isinstance(analysis, (list, tuple)):  # one entry per device
        analysis = analysis[0] if analysis else None
    # XLA says -1 if it does not know.
    return max(0, int((analysis or {}).get("flops", 0)))
