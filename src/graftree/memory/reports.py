"""Values kept for the backward pass of a gradient, by the paths of modules.

A function is traced together with the first half of its derivative. The program shows
which operation made the arrays that the second half gets from it, and in which module.
The search enters calls and loops.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from graftree.core.objects import methods
from graftree.core.text import descriptions
from graftree.memory import keeping
from graftree.transforms import recordings
from graftree.transforms.derivatives import grad
from graftree.transforms.lifting import debug_info, jaxprs
from graftree.transforms.lifting.prefixes import DiffState


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """An array that is kept for the backward pass.

    Attributes:
        path: The module in which it was computed, as in ``model.blocks[3].mlp``; the
            path of an argument; empty in no module.
        why: ``"argument"``, ``"constant"``, ``"named 'hidden'"``, ``"output"`` of the
            module, or the operation that computed it, such as ``"sin"``.
        shape: Its shape; in a loop it has a first axis for the steps.
        dtype: Its dtype.
        bytes: Its size, on all devices together.
        is_offloaded: Whether it is in the memory of the host.

    Example:
        >>> report = nnx.memory.saved(jnp.sin, 2.0)
        >>> [(x.why, x.shape, x.bytes) for x in report.values]
        [('cos', (), 4)]
    """

    path: str
    why: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    is_offloaded: bool


@dataclasses.dataclass(frozen=True)
class SavedReport:
    """Values kept for the backward pass; prints as a table.

    Attributes:
        values: The arrays, in the order of the program: arguments first.

    Example:
        >>> report = nnx.memory.saved(lambda w, x: jnp.sin(w * x), 2.0, jnp.ones(3))
        >>> [(x.path, x.why, x.bytes) for x in report.values]
        [('x', 'argument', 12), ('', 'cos', 12)]
        >>> report.bytes
        12
    """

    values: tuple[SavedValue, ...]

    @property
    def bytes(self) -> int:
        """Bytes kept besides arguments and constants, which exist anyway.

        Arrays in the memory of the host do not count.
        """
        return sum(
            [x.bytes for x in self.values if not (_exists_anyway(x) or x.is_offloaded)]
        )

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are kept in the memory of the host."""
        return sum([x.bytes for x in self.values if x.is_offloaded])

    def __str__(self) -> str:
        computed = [x for x in self.values if not _exists_anyway(x)]
        cells = [
            (
                x.path or "-",
                x.why,
                descriptions.describe(x),
                "host" if x.is_offloaded else "device",
            )
            for x in computed
        ]
        rows = []
        for row, indices in descriptions.groups_of_rows(cells):
            size = sum([computed[i].bytes for i in indices])
            rows.append((*row, str(len(indices)), f"{size:,}"))
        existing = sum([x.bytes for x in self.values if _exists_anyway(x)])
        total = [("total", "", "", "", str(len(computed)), f"{self.bytes:,}")]
        if self.offloaded_bytes:
            size = f"{self.offloaded_bytes:,}"
            total.insert(0, ("total on the host", "", "", "", "", size))
        head = ("module", "kept", "type", "memory", "count", "bytes")
        lines = descriptions.aligned([head, *rows, *total])
        return "\n".join([*lines, f"and {existing:,} bytes of arguments and constants"])


# Values that exist in any case.
_EXISTING = ("argument", "constant")


def _exists_anyway(value: SavedValue) -> bool:
    return value.why in _EXISTING


_HOST = jax.memory.Space.Host


def saved(
    f: Callable[..., Any],
    /,
    *args: Any,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> SavedReport:
    """Lists the values that a function keeps for its gradient, with their modules.

    The list is that of ``jax.ad_checkpoint.print_saved_residuals``, with the paths of
    modules. Nothing is computed. The list is JAX's request; a compiler may get by with
    less, or copy.

    Args:
        f: The function to differentiate, as for `nnx.grad`; a Module, or its method;
            may return any arrays.
        *args: Its arguments; arrays may be ``jax.ShapeDtypeStruct``.
        argnums: The arguments to differentiate, as for `nnx.grad`.
        has_aux: Whether ``f`` returns a pair whose second entry is not differentiated.
        **kwargs: Its keyword arguments.

    Returns:
        A `SavedReport`, which prints as a table.

    Raises:
        ValueError: As for `nnx.grad`.

    Example:
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.up = nnx.Linear(4, 16, use_bias=False, rngs=rngs)
        ...         self.down = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        ...     def __call__(self, x):
        ...         return self.down(jnp.sin(nnx.name(self.up(x), "hidden")))
        >>> policy = nnx.memory.save("hidden")
        >>> def loss_fn(model, x):
        ...     for block in model:
        ...         x = nnx.remat(Block.__call__, policy=policy)(block, x)
        ...     return x.mean()
        >>> model = nnx.List([Block(nnx.Rngs(0)) for _ in range(3)])
        >>> print(nnx.memory.saved(loss_fn, model, jnp.ones((8, 4))))
        module           kept            type           memory  count  bytes
        model[0-2]       named 'hidden'  float32[8,16]  device  3      1,536
        model[0-1].down  dot_general     float32[8,4]   device  2      256
        total                                                   5      1,792
        and 1,408 bytes of arguments and constants
    """
    f, args, kwargs = recordings.opened(f, args, kwargs)
    call, inner = grad.both_sides("memory.saved", f, argnums, has_aux, args, kwargs)

    def forward(fixed: Any, chosen: Any) -> Any:
        out, backward, rest = jax.vjp(lambda x: inner(fixed, x), chosen, has_aux=True)
        return (out, rest), jax.tree.leaves(backward)

    traced = debug_info.named_after(f, forward)
    # Otherwise equal layers would have one trace, with the paths of the first.
    with methods.observed(lambda _, call: call(), shows_methods=True):
        closed, form = jax.make_jaxpr(traced, return_shape=True)(*call.groups)
    program, _ = jaxprs.opened(closed)
    owner = type(args[0]).__name__ if args else ""
    residuals = program.outvars[len(program.outvars) - len(jax.tree.leaves(form[1])) :]
    names = getattr(getattr(program, "debug_info", None), "arg_names", None) or ()
    paths = [re.sub(r"^self\b", owner, x) for x in names]
    arguments = dict(zip(program.invars, paths, strict=False))
    root = _Subprogram(program, recordings.NameStack(), owner)
    # Each variable once; numbers in the program itself are free.
    distinct = dict.fromkeys(x for x in residuals if not isinstance(x, jaxprs.Literal))
    values = [_value(root, x, arguments) for x in distinct]
    return SavedReport(tuple(sorted(values, key=lambda x: not _exists_anyway(x))))


def _value(root: _Subprogram, variable: Any, arguments: dict[Any, str]) -> SavedValue:
    origin, aval = root.origin(variable), variable.aval
    path, why = origin.path, origin.why
    if origin.variable in arguments:
        path = arguments[origin.variable]
    if why in _EXISTING and origin.variable is not variable:
        why = f"copy of {why}"
    size = math.prod(aval.shape) * aval.dtype.itemsize
    is_offloaded = getattr(aval, "memory_space", None) == _HOST
    return SavedValue(path, why, tuple(aval.shape), aval.dtype, size, is_offloaded)


class _Origin(NamedTuple):
    """Operation that a value comes from."""

    variable: Any
    path: str
    why: str


# In these, each output is the input at the same position.
_ALIASES = ("reduce_precision", "device_put", "copy", "copy_p", "optimization_barrier")


class _Subprogram:
    """A program, or a part of one that it calls.

    Args:
        program: The program.
        name_stack: Where the call is.
        owner: The name of the object whose method was traced.
        caller: The program that calls it.
        operands: Its inputs there; ``None`` for values that a loop carries.
    """

    def __init__(
        self,
        program: Any,
        name_stack: recordings.NameStack,
        owner: str,
        caller: _Subprogram | None = None,
        operands: Sequence[Any] = (),
    ) -> None:
        self._name_stack, self._owner, self._caller = name_stack, owner, caller
        self._operands = dict(zip(program.invars, operands, strict=False))
        self._constants = {*program.constvars}
        self._outputs = {
            x: (equation, position)
            for equation in program.eqns
            for position, x in enumerate(equation.outvars)
        }

    def origin(self, variable: Any) -> _Origin:
        """Finds the origin of a value."""
        if isinstance(variable, jaxprs.Literal) or variable in self._constants:
            return _Origin(variable, self._path(self._name_stack), "constant")
        if variable in self._outputs:
            return self._origin_in(variable, *self._outputs[variable])
        operand = self._operands.get(variable)
        if self._caller is None:
            return _Origin(variable, "", "argument")
        if operand is None:
            return _Origin(variable, self._path(self._name_stack), "carry")
        return self._caller.origin(operand)

    def _origin_in(self, variable: Any, equation: Any, position: int) -> _Origin:
        """Finds the origin of an output of an equation."""
        primitive, name_stack = equation.primitive.name, self._name_stack.of(equation)
        name = keeping.given_name(equation)
        if name is not None:
            why = "output" if isinstance(name, keeping.Output) else f"named {name!r}"
            return _Origin(variable, self._path(name_stack), why)
        if primitive in _ALIASES:
            return self.origin(equation.invars[position])
        inner = jaxprs.programs_in(equation)
        if len(inner) != 1 or len(inner[0].outvars) != len(equation.outvars):
            return _Origin(variable, self._path(name_stack), primitive)
        operands = [*equation.invars]
        if primitive == "scan":
            constants, carried = jaxprs.scan_counts(equation.params)
            operands[constants : constants + carried] = [None] * carried
        body = _Subprogram(inner[0], name_stack, self._owner, self, operands)
        return body.origin(inner[0].outvars[position])

    def _path(self, name_stack: recordings.NameStack) -> str:
        return name_stack.path(self._owner)
