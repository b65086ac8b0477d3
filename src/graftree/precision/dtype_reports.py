"""Reports the dtypes of those operations of a program that precision depends on.

A function is traced, and its program read: matrix products, convolutions, and the sums
and maxima of norms and softmax, each with the path of its module. The search enters
calls, loops, branches and rematerialized parts, but not kernels.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from graftree.core.objects import methods
from graftree.core.text import descriptions
from graftree.transforms import recordings
from graftree.transforms.lifting import jaxprs
from graftree.transforms.recordings import NameStack

_NAMES = {
    "dot_general": "dot",
    "ragged_dot": "dot",
    "ragged_dot_general": "dot",
    "conv_general_dilated": "conv",
    "reduce_sum": "sum",
    "reduce_max": "max",
}
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a program, or several equal ones.

    Attributes:
        path: Its module, as in ``net.blocks[3].attn.query``; empty if it is in none.
        direction: ``"forward"``, ``"backward"``, or ``"recomputed"`` where `nnx.remat`
            repeats the forward pass.
        name: ``"dot"``, ``"conv"``, ``"sum"`` or ``"max"``.
        operands: The dtypes of the operands.
        result: The dtype of the result, and of its accumulation as the program has it;
            machines may accumulate half precision in float32.
        count: How often it runs; the body of a while loop, and each branch, count once.
    """

    path: str
    direction: str
    name: str
    operands: tuple[str, ...]
    result: str
    count: int


@dataclasses.dataclass(frozen=True)
class DtypeReport:
    """Operations of a program that precision depends on; prints as a table.

    Attributes:
        operations: In the order of the program.

    Example:
        >>> model = nnx.Linear(2, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        >>> found = nnx.precision.report(model, jnp.ones((4, 2)))
        >>> [(x.path, x.name, x.result) for x in found.operations]
        [('Linear', 'dot', 'bfloat16')]
    """

    operations: tuple[Operation, ...]

    def counts(
        self, name: str = "dot", direction: str | None = None
    ) -> dict[tuple[str, ...], int]:
        """Counts the operations of each combination of dtypes.

        Args:
            name: The operation.
            direction: The direction; ``None``: all.

        Returns:
            A dict from the dtypes of operands and result to a number, such as
            ``{("bfloat16", "bfloat16", "bfloat16"): 73}``.
        """
        counter = collections.Counter[tuple[str, ...]]()
        for x in self.operations:
            if x.name == name and direction in (None, x.direction):
                counter[(*x.operands, x.result)] += x.count
        return dict(counter)

    def __str__(self) -> str:
        if not self.operations:
            return "no dots, convolutions, sums or maxima of floating numbers"
        rows = []
        for x in self.operations:
            operands = " ".join([_SHORT.get(dtype, dtype) for dtype in x.operands])
            dtypes = f"{operands} -> {_SHORT.get(x.result, x.result)}"
            rows.append((x.path or "-", x.direction, x.name, dtypes))
        lines = [
            (*row, str(sum([self.operations[i].count for i in indices])))
            for row, indices in descriptions.groups_of_rows(rows)
        ]
        head = ("module", "pass", "operation", "dtypes", "count")
        return "\n".join(descriptions.aligned([head, *lines]))


def report(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> DtypeReport:
    """Lists the dtypes in which a function multiplies, convolves and sums.

    Nothing is computed, and nothing that the function writes reaches its arguments.

    Args:
        f: A function that can be traced, such as a train step, also one made by
            ``nnx.jit``; a method; or a Module to call.
        *args: Its arguments; arrays may be ``jax.ShapeDtypeStruct``, also those in
            Variables. Arguments that are not arrays or objects are constants.
        **kwargs: Its keyword arguments.

    Returns:
        The operations on floating numbers, forward and backward, by the path of their
        module; print it or query it.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> def step(net, x):
        ...     return nnx.grad(lambda net: net(x).mean())(net)
        >>> print(nnx.precision.report(step, model, jnp.ones((4, 2))))
        module  pass      operation  dtypes          count
        net     forward   dot        f32 f32 -> f32  1
        -       forward   sum        f32 -> f32      1
        net     backward  sum        f32 -> f32      1
        net     backward  dot        f32 f32 -> f32  1
        >>> nnx.precision.report(model, jnp.ones((4, 2))).counts("dot")
        {('float32', 'float32', 'float32'): 1}
    """
    function, args, kwargs = recordings.opened(f, args, kwargs)
    call, interior = recordings.both_sides("precision.report", function, args, kwargs)
    # Otherwise equal layers would have one trace, with the paths of the first.
    with methods.observed(lambda _, call: call()):
        program, _ = jaxprs.opened(jax.make_jaxpr(interior)(*call.groups))
    owner = type(args[0]).__name__ if args else ""
    return DtypeReport(tuple(_alike(_operations(program, NameStack(), 1, owner))))


def _alike(operations: Iterator[Operation]) -> list[Operation]:
    """Merges equal operations into one, in the place of the first."""
    counts = collections.Counter[Operation]()
    for x in operations:
        counts[dataclasses.replace(x, count=0)] += x.count
    return [dataclasses.replace(x, count=count) for x, count in counts.items()]


def _operations(
    program: Any, scope: NameStack, times: int, owner: str
) -> Iterator[Operation]:
    for equation in program.eqns:
        inner_scope, name = scope.of(equation), equation.primitive.name
        result = equation.outvars[0].aval if name in _NAMES else None
        if result is not None and jnp.issubdtype(result.dtype, jnp.inexact):
            yield Operation(
                inner_scope.path(owner),
                inner_scope.direction,
                _NAMES[name],
                tuple([str(x.aval.dtype) for x in equation.invars[:2]]),
                str(result.dtype),
                times,
            )
        inner_times = times * equation.params["length"] if name == "scan" else times
        for subprogram in jaxprs.programs_in(equation):
            yield from _operations(subprogram, inner_scope, inner_times, owner)
