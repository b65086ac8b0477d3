"""``find_nans``: finds where a non-finite value first arises, and reports it.

The function is traced, as by `nnx.jit`, and the program runs one operation at a time
(``nan_search.py``). Nothing that the function does reaches the caller's objects. Of all
findings, `NanReport` chooses those that explain the results.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree import _jax, errors
from graftree.core.objects import methods
from graftree.debugging.nan_search import INF, NAN, Finding, Search, Tracked
from graftree.transforms import recordings

_NAME = "debugging.find_nans"


def find_nans(f: Callable[..., Any]) -> Callable[..., NanReport]:
    """Finds where a non-finite value first arises, forward or backward.

    Runs the operations of ``f`` one by one, also those inside ``nnx.jit``, ``grad``,
    ``scan``, ``cond``, ``remat`` and the like, and checks each output. NaN and
    infinities count if a result comes from them: an output of ``f``, or a value that it
    writes to its arguments. So a mask of ``-inf`` is not a finding, nor is NaN that
    ``jnp.where`` leaves out of the forward and the backward pass. An infinity that is
    written in the program counts only as the cause of NaN.

    Operations are rounded one by one; a compiled program may keep more digits.
    Arrays are tracked as wholes: if NaN in one array has two origins, the first counts.
    Loops run compiled, and step by step only if they gave non-finite values. Callbacks
    run too. A kernel or a ``shard_map`` is one operation.

    Args:
        f: A function that can be traced, also one made by ``nnx.jit`` or ``jax.jit``; a
            method; or a Module to call. Arguments that are not arrays or objects, such
            as numbers, are constants.

    Returns:
        A function with the arguments of ``f`` that returns a `NanReport`: false if all
        is well, and a few lines of text. It does not return outputs of ``f`` or write
        to its arguments: random streams, statistics and refs stay as they are.

    Raises:
        ValueError: At a call inside a trace, where arguments have no values.

    Example:
        >>> class Net(nnx.Module):
        ...     def __init__(self):
        ...         self.scale = nnx.Param(jnp.array([1.0, 0.0]))
        ...     def __call__(self, x):
        ...         return jnp.log(self.scale * x).sum()
        >>> report = nnx.debugging.find_nans(lambda net, x: net(x))(Net(), jnp.ones(2))
        >>> print(str(report).splitlines()[0])
        First non-finite value: inf in the output of `log`
        >>> report.first.example
        'log(0) = -inf'
    """

    @functools.wraps(f, updated=())
    def search(*args: Any, **kwargs: Any) -> NanReport:
        function, args, kwargs = recordings.opened(f, args, kwargs)
        with jax.debug_nans(False), jax.debug_infs(False):
            return _search(function, args, kwargs)

    return search


def _search(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NanReport:
    call, interior = recordings.both_sides(_NAME, f, args, kwargs)
    (group,) = call.groups
    # As in the paths of operations, the object of a method goes by its class.
    class_name = type(args[0]).__name__ if args else ""
    named = [
        (leaf, re.sub(r"^self\b", class_name, name))
        for name, value in group.named()
        for leaf in jax.tree.leaves(value)
    ]
    _check_concrete(named)

    # The names of methods and paths are those of this call: code compiled for other
    # calls may be named after the first of several equal objects.
    with methods.observed(lambda _, call: call(), shows_methods=True):
        program = jax.make_jaxpr(interior)(*call.groups)
    search = Search()
    inputs = [search.argument(value, name) for value, name in named]
    results = search.run(program, inputs)
    refs = [search.current(x) for x in inputs if _jax.is_ref(x.value)]
    return NanReport([*results, *refs], search.findings)


def _check_concrete(named: Any) -> None:
    for value, name in named:
        if isinstance(value, (_jax.Tracer, jax.ShapeDtypeStruct)):
            raise ValueError(
                errors.message(
                    "nnx.debugging.find_nans runs a function on numbers, but these "
                    "arguments have none.",
                    where=f"{name}: {value}",
                    way_out="Call it outside of jit, grad and other transforms, with "
                    "arrays: nnx.debugging.find_nans(f)(model, x).",
                )
            )


# The report of a search.


class NanReport:
    """Result of `find_nans`; true if a result has NaN, or an infinity that arose.

    Its text is a few lines.

    Attributes:
        first: The first finding that a result comes from: an argument or an operation
            that gave NaN or an infinity. ``None`` if there is none.
        first_nan: The first finding of NaN, which may be the same; ``None`` if no
            result has NaN.

    Example:
        >>> report = nnx.debugging.find_nans(jnp.sqrt)(jnp.array([4.0, -1.0]))
        >>> isinstance(report, nnx.debugging.NanReport), report.first.operation
        (True, 'sqrt')
        >>> print(report)
        First non-finite value: NaN in the output of `sqrt`
          inputs  float32[2] in [-1, 4], all finite
          output  float32[2]: 1 nan of 2, first nan at [1]
                  sqrt(-1) = nan
    """

    def __init__(self, results: Sequence[Tracked], findings: Sequence[Finding]) -> None:
        reached = {finding for x in results for finding in x.sources.values()}
        in_order = sorted(reached, key=lambda x: x.number)
        alarms = [x for x in in_order if not _is_deliberate(x)]
        self.first_nan = next((x for x in alarms if x.kind == NAN), None)
        roots = [*map(_root, alarms)]
        self.first = min(roots, key=lambda x: x.number, default=None)
        self._deliberate = next(filter(_is_deliberate, in_order), None)
        self._arguments = {x.argument for x in findings if x.source == "argument"}
        lost = (x for x in findings if x.kind == NAN and not x.is_constant)
        self._lost = None if alarms else next(lost, None)

    def __bool__(self) -> bool:
        return self.first is not None

    @property
    def path(self) -> str:
        """Where ``first`` is: the path of the module, or of the argument."""
        return "" if self.first is None else _path_of(self.first)

    def __repr__(self) -> str:
        if self.first is None:
            return "\n".join(self._when_finite())
        name = "NaN" if self.first.kind == NAN else "inf"
        lines = self._describe(self.first, f"First non-finite value: {name}")
        nan = self.first_nan
        if nan is not None and nan is not self.first:
            lines += self._describe(nan, "First NaN:")
        elif nan is None:
            lines.append("No result has NaN.")
        return "\n".join(lines)

    def _when_finite(self) -> list[str]:
        lines = ["All results are finite."]
        if self._deliberate is not None:
            lines = [
                "No result contains NaN or a newly created infinity. One contains:"
            ]
            lines.append(f"  inf, {_in_a_line(self._deliberate)}")
        if self._lost is not None:
            lines.append(f"NaN, which reached no result, {_in_a_line(self._lost)}")
        return lines

    def _describe(self, finding: Finding, title: str) -> list[str]:
        if finding.source == "argument":
            lines = [f"{title} {_in_a_line(finding)}", f"  it is   {finding.output}"]
            others = len(self._arguments) - 1
            if others:
                noun = "arguments are" if others > 1 else "argument is"
                lines.append(f"  {others} other {noun} not finite either")
            return lines
        if finding.is_constant:
            return [f"{title}, {_in_a_line(finding)}"]
        return [f"{title} in the output of `{finding.operation}`"] + _facts(finding)


_MOST_INPUTS = 4

# Operations that run programs of their own, which the search does not enter.
_CLOSED = frozenset(
    "shard_map pallas_call pure_callback io_callback ffi_call custom_partitioning "
    "run_state scan".split()
)


def _facts(finding: Finding) -> list[str]:
    """Lists where an operation is, its inputs and its output."""
    inputs = [*finding.inputs[:_MOST_INPUTS]]
    if len(finding.inputs) > _MOST_INPUTS:
        inputs.append(f"and {len(finding.inputs) - _MOST_INPUTS} more")
    lines = [("at", _where(finding)), ("in", finding.line)]
    lines += [("inputs" if i == 0 else "", text) for i, text in enumerate(inputs)]
    lines += [("output", finding.output), ("", finding.example)]
    cause = finding.cause
    if cause is not None and cause.is_constant:
        lines.append(("inf is", _in_a_line(cause)))
    if finding.operation in _CLOSED:
        lines.append(("inside", f"a {finding.operation}: not searched"))
    return [f"  {label:7} {text}" for label, text in lines if text]


def _where(finding: Finding) -> str:
    path = _path_of(finding)
    if finding.name_stack.is_backward:
        path = f"{path} (backward)".lstrip()
    return ", ".join(filter(None, (path, *finding.within)))


def _in_a_line(finding: Finding) -> str:
    if finding.source == "argument":
        return f"in the argument `{finding.argument}`"
    origin = f"in the output of `{finding.operation}`"
    origin = "a constant of the program" if finding.is_constant else origin
    return ", ".join(filter(None, [origin, _where(finding), finding.line]))


def _is_deliberate(finding: Finding) -> bool:
    return finding.is_constant and finding.kind == INF


def _root(finding: Finding) -> Finding:
    """Returns the finding that one comes from: itself, or that of its infinities."""
    cause = finding.cause
    return finding if cause is None or cause.is_constant else cause


def _path_of(finding: Finding) -> str:
    """Finds the path of the module that a finding is in, or of the argument."""
    return finding.argument or finding.name_stack.path("self")
