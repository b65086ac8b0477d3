"""Runs a recorded program one operation at a time, and follows non-finite values.

Each value is `Tracked` with the findings that its NaN and its infinities come from. A
`Finding` is made where they arise:

- NaN, where an operation gives one and had none;
- an infinity, where an operation gives one and had neither infinities nor one that the
  program or its arguments gave it at that place;
- values of either kind in the arguments or constants, when they come in.

A value computed from non-finite ones inherits the earliest finding of its inputs. So
the results decide, at the end, which findings count: NaN behind a mask, or minus
infinity before a softmax, is in none of them.

The search enters calls, branches and rematerialized parts. A loop runs compiled; if its
inputs don't explain its outputs, it runs again step by step, and the search enters the
step that is the cause. Anything it can't enter counts as one operation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.core.text import descriptions
from graftree.transforms.lifting import jaxprs
from graftree.transforms.recordings import NameStack

# The kinds of non-finite numbers.
NAN, INF = "nan", "inf"

# Operations that compute each number of their outputs from one of each input. Those
# that only choose or move numbers are not among them: they make no infinity.
_ELEMENTWISE = frozenset(
    "acos acosh add add_any asin asinh atan2 atanh cbrt convert_element_type cosh "
    "digamma div erf_inv exp exp2 expm1 integer_pow lgamma log log1p logistic mul "
    "nextafter pow reduce_precision rem rsqrt sinh sqrt square sub tan".split()
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Origin of non-finite values: where they arose, or came in.

    Attributes:
        number: Findings are numbered in the order of the operations.
        kind: ``NAN`` or ``INF``.
        source: ``"operation"``, ``"argument"`` or ``"constant"``.
        operation: The name of JAX's operation; for a constant, the one that takes it.
        argument: Where it was in the arguments, as in ``model.layers[0].kernel``.
        name_stack: The modules and transforms that enclose the operation.
        line: The line of the user's program, as in ``train.py:41 loss``.
        within: The steps of loops, and branches, that it is in.
        inputs: The inputs, described.
        output: The output, described.
        example: The first number that is not finite, as in ``log(0) = -inf``.
        cause: The finding of the infinities that NaN was made of.
    """

    number: int
    kind: str
    source: str
    operation: str = ""
    argument: str = ""
    name_stack: NameStack = NameStack()
    line: str = ""
    within: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    output: str = ""
    example: str = ""
    cause: Finding | None = None

    @property
    def is_constant(self) -> bool:
        """Whether it is written in the program."""
        return self.source == "constant"


# For each kind of numbers in a value, the finding that they come from.
Sources = Mapping[str, Finding]


class Tracked(NamedTuple):
    """A value, and where its NaN and its infinities come from.

    Attributes:
        value: An array, a ref or a scalar.
        sources: The finding of each kind that it has.
    """

    value: Any
    sources: Sources


class Context(NamedTuple):
    """Where in the user's program some operations are."""

    name_stack: NameStack = NameStack()
    line: str = ""
    within: tuple[str, ...] = ()

    def of(self, equation: Any, *within: str) -> Context:
        """Returns the context of an equation, and of the programs in it."""
        return Context(
            self.name_stack.of(equation),
            _line_of(equation) or self.line,
            (*self.within, *within),
        )


OUTERMOST = Context()

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


# JAX's form of a frame: file, line, column if it is known, and function.
_FRAME = re.compile(r"(.*?):(\d+)(?::[\d:-]+)? \((.*)\)")
_MOST_FRAMES = 100


def _line_of(equation: Any) -> str:
    """Finds the line of the user's program; JAX's and our own parts have none."""
    # Innermost last, if this JAX has them.
    for frame in reversed(_jax.summary_of(equation, _MOST_FRAMES).split("\n")):
        match = _FRAME.fullmatch(frame)
        if match is not None and not frame.startswith(_PACKAGE):
            file, line, function = match.groups()
            name = function.rsplit(".<locals>.", 1)[-1]
            return f"{os.path.basename(file)}:{line} {name}"
    return ""


def _as_function(program: Any) -> Callable[[list[Any]], list[Any]]:
    """Compiles a program, closed over its constants, as a function."""
    jaxpr, constants = jaxprs.opened(program)
    return jax.jit(lambda values: jax.core.eval_jaxpr(jaxpr, constants, *values))


class Search:
    """One run of a program.

    Attributes:
        findings: All that was found, in order, whether or not it reached a result.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        # Programs share the refs that they write. They are kept, so that no other
        # object gets the same number.
        self._refs: dict[int, Tracked] = {}
        self._copies: dict[int, Any] = {}

    # Values that come in.

    def argument(self, value: Any, name: str) -> Tracked:
        """Tracks an argument of the whole program."""
        return self._incoming(value, "argument", describe, argument=name)

    def _constant(self, value: Any) -> Tracked:
        return self._incoming(value, "constant", lambda x, _: form_of(x))

    def _incoming(
        self, value: Any, source: str, in_words: Callable[..., str], **facts: Any
    ) -> Tracked:
        if _jax.is_ref(value):
            # The caller's ref is not written.
            value = self._copies.setdefault(id(value), _jax.new_ref(value[...]))
        sources = {
            kind: self.note(kind, source, output=in_words(value, kind), **facts)
            for kind in kinds_in(value)
        }
        return self._track(value, sources)

    def note(self, kind: str, source: str, **facts: Any) -> Finding:
        """Adds a finding."""
        finding = Finding(len(self.findings), kind, source, **facts)
        self.findings.append(finding)
        return finding

    def _track(self, value: Any, sources: Sources) -> Tracked:
        tracked = Tracked(value, sources)
        if _jax.is_ref(value):
            self._refs[id(value)] = tracked
        return tracked

    def current(self, tracked: Tracked) -> Tracked:
        """Returns the current state of a value; a ref may have been written."""
        return self._refs[id(tracked.value)] if _jax.is_ref(tracked.value) else tracked

    # Programs.

    def run(
        self, program: Any, inputs: Sequence[Tracked], context: Context = OUTERMOST
    ) -> list[Tracked]:
        """Runs a program, and returns its outputs."""
        opened, constants = jaxprs.opened(program)
        operands = [*map(self._constant, constants), *inputs]
        values = dict(zip([*opened.constvars, *opened.invars], operands, strict=True))

        def read(variable: Any) -> Tracked:
            if isinstance(variable, jaxprs.Literal):
                return self._constant(variable.val)
            return self.current(values[variable])

        last_uses = _last_uses(opened)
        for equation, unused in zip(opened.eqns, last_uses, strict=True):
            outputs = self._run_equation(
                equation, [*map(read, equation.invars)], context
            )
            values |= zip(equation.outvars, outputs, strict=True)
            for variable in unused:
                del values[variable]
        return [*map(read, opened.outvars)]

    def _run_equation(
        self, equation: Any, inputs: list[Tracked], context: Context
    ) -> list[Tracked]:
        name = equation.primitive.name
        program = jaxprs.called_program(equation)
        if program is not None:
            return self.run(program, inputs, context.of(equation))
        if name == "cond":
            return self._run_branch(equation, inputs, context)
        if name in ("scan", "while"):
            return self._run_loop(equation, inputs, context)
        outputs = jaxprs.evaluate(equation, _values(inputs))
        return self._check(equation, inputs, outputs, context)

    def _run_branch(
        self, equation: Any, inputs: list[Tracked], context: Context
    ) -> list[Tracked]:
        index, *rest = inputs
        branch = int(jax.device_get(index.value))
        inner = context.of(equation, f"branch {branch} of cond")
        return self.run(equation.params["branches"][branch], rest, inner)

    # Loops.

    def _run_loop(
        self, equation: Any, inputs: list[Tracked], context: Context
    ) -> list[Tracked]:
        is_scan = equation.primitive.name == "scan"
        evaluate = functools.partial(jaxprs.evaluate, equation)
        scanned = inputs[sum(jaxprs.scan_counts(equation.params)) :] if is_scan else []
        if _refs(scanned):
            # Only JAX can take slices of refs.
            return self._check(equation, inputs, evaluate(_values(inputs)), context)
        if equation.params.get("length") == 0:
            return self._inherit(inputs, evaluate(_values(inputs)))
        steps = self._scan if is_scan else self._while
        return self._run_compiled(
            inputs, evaluate, lambda: steps(equation, inputs, context)
        )

    def _scan(
        self, equation: Any, inputs: list[Tracked], context: Context
    ) -> list[Tracked]:
        params = equation.params
        length, body = params["length"], params["jaxpr"]
        constants, carried = jaxprs.scan_counts(params)
        start = constants + carried
        fixed, carry = inputs[:constants], inputs[constants:start]
        scanned = inputs[start:]
        step = _as_function(body)
        stacked: dict[int, list[Tracked]] = {}
        for i in reversed(range(length)) if params["reverse"] else range(length):
            inner = context.of(equation, f"iteration {i} of {length} of scan")
            slices = [_slice(x, i) for x in scanned]
            outputs = self._step(body, step, [*fixed, *carry, *slices], inner)
            carry, stacked[i] = outputs[:carried], outputs[carried:]
        columns = zip(*[stacked[i] for i in range(length)], strict=True)
        return carry + [*map(_stack, columns)]

    def _while(
        self, equation: Any, inputs: list[Tracked], context: Context
    ) -> list[Tracked]:
        params = equation.params
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        tested, fixed, carry = inputs[:first], inputs[first:second], inputs[second:]
        test = _as_function(params["cond_jaxpr"])
        body = params["body_jaxpr"]
        step = _as_function(body)
        i = 0
        while test(_values([*tested, *carry]))[0]:
            inner = context.of(equation, f"iteration {i} of while")
            carry = self._step(body, step, [*fixed, *carry], inner)
            i += 1
        return carry

    def _step(
        self, body: Any, step: Any, inputs: list[Tracked], context: Context
    ) -> list[Tracked]:
        """Runs one step of a loop; a closer look runs it by operations."""
        inputs = [*map(self.current, inputs)]
        return self._run_compiled(inputs, step, lambda: self.run(body, inputs, context))

    def _run_compiled(
        self,
        inputs: list[Tracked],
        compiled: Callable[[list[Any]], list[Any]],
        look_closer: Callable[[], list[Tracked]],
    ) -> list[Tracked]:
        """Runs a compiled part; looks closer if its outputs need explaining."""
        saved = [(ref, ref[...]) for ref in _refs(inputs)]
        outputs = compiled(_values(inputs))
        if self._explains(inputs, outputs):
            return self._inherit(inputs, outputs)
        for ref, content in saved:
            ref[...] = content
        return look_closer()

    def _explains(self, inputs: list[Tracked], outputs: list[Any]) -> bool:
        """Whether all non-finite numbers in some outputs may come from the inputs."""
        kinds = {kind for x in [*outputs, *_refs(inputs)] for kind in kinds_in(x)}
        return all(any(_is_reason(x, kind) for x in inputs) for kind in kinds)

    def _inherit(self, inputs: list[Tracked], outputs: list[Any]) -> list[Tracked]:
        """Gives the outputs of a loop the findings of its inputs."""
        earliest = _earliest(inputs)
        return self._track_all(inputs, outputs, lambda value: _within(earliest, value))

    def _check(
        self, equation: Any, inputs: list[Tracked], outputs: list[Any], context: Context
    ) -> list[Tracked]:
        """Gives the outputs of an operation the findings that they come from."""
        judge = _Judge(self, equation, inputs, context)
        return self._track_all(inputs, outputs, judge.sources)

    def _track_all(
        self,
        inputs: list[Tracked],
        outputs: list[Any],
        sources: Callable[[Any], Sources],
    ) -> list[Tracked]:
        """Gives the outputs their findings, and the refs those of their new content."""
        for ref in _refs(inputs):
            self._track(ref, sources(ref))
        return [self._track(value, sources(value)) for value in outputs]


@dataclasses.dataclass(frozen=True)
class _Judge:
    """Finds the origins of non-finite numbers in the outputs of one operation."""

    search: Search
    equation: Any
    inputs: list[Tracked]
    context: Context

    def sources(self, value: Any) -> Sources:
        """Finds where the NaN and the infinities in an output come from."""
        judges = {NAN: self._nan, INF: self._inf}
        return {kind: judges[kind](value) for kind in kinds_in(value)}

    def _nan(self, value: Any) -> Finding:
        source = self._source(NAN)
        return source or self._arisen(NAN, value, cause=self._source(INF))

    def _inf(self, value: Any) -> Finding:
        source = self._source(INF)
        if source is None:
            return self._arisen(INF, value)
        if source.source != "operation" and self._is_elementwise(value):
            if arising(value, _values(self.inputs)):
                return self._arisen(INF, value)
        return source

    def _source(self, kind: str) -> Finding | None:
        """Returns the finding of the inputs; reports a constant as used here."""
        source = _earliest(self.inputs).get(kind)
        if source is None or not source.is_constant or source.operation:
            return source
        facts = self._facts() | {"output": source.output}
        return self.search.note(kind, "constant", **facts)

    def _is_elementwise(self, value: Any) -> bool:
        return self.equation.primitive.name in _ELEMENTWISE and all(
            jnp.ndim(x) in (0, jnp.ndim(value)) for x in _values(self.inputs)
        )

    def _facts(self) -> dict[str, Any]:
        name = self.equation.primitive.name
        return {"operation": name, **self.context.of(self.equation)._asdict()}

    def _arisen(self, kind: str, value: Any, **facts: Any) -> Finding:
        return self.search.note(
            kind,
            "operation",
            inputs=tuple(map(describe, _values(self.inputs))),
            output=describe(value, kind),
            example=self._example(value, kind),
            **self._facts(),
            **facts,
        )

    def _example(self, value: Any, kind: str) -> str:
        """Writes the first number of a kind, and the numbers it was made from."""
        if not self._is_elementwise(value):
            return ""
        index = first_index(value, kind)
        *numbers, out = [number_at(x, index) for x in [*_values(self.inputs), value]]
        numbers += [f"y={y}" for y in [self.equation.params.get("y")] if y is not None]
        name = self.equation.primitive.name
        return f"{name}({', '.join(numbers)}) = {out}"


def _is_reason(tracked: Tracked, kind: str) -> bool:
    # An infinity that is written in the program doesn't explain others.
    source = tracked.sources.get(kind)
    return source is not None and (kind == NAN or not source.is_constant)


def _earliest(inputs: Iterable[Tracked]) -> dict[str, Finding]:
    """Picks the first finding of each kind; a constant only if there is no other."""
    findings = [finding for x in inputs for finding in x.sources.values()]
    findings.sort(key=lambda x: (x.is_constant, x.number), reverse=True)
    return {x.kind: x for x in findings}


def _within(sources: Sources, value: Any) -> Sources:
    """Picks the findings that explain numbers in a value."""
    return {kind: sources[kind] for kind in kinds_in(value) if kind in sources}


def _slice(tracked: Tracked, i: int) -> Tracked:
    """Takes a slice of an array, with the findings of the numbers in it."""
    value = jax.lax.index_in_dim(tracked.value, i, keepdims=False)
    return Tracked(value, _within(tracked.sources, value))


def _stack(column: Sequence[Tracked]) -> Tracked:
    return Tracked(jnp.stack(_values(column)), _earliest(column))


def _values(inputs: Iterable[Tracked]) -> list[Any]:
    return [x.value for x in inputs]


def _refs(inputs: Iterable[Tracked]) -> list[Any]:
    return [*filter(_jax.is_ref, _values(inputs))]


def _last_uses(program: Any) -> list[list[Any]]:
    """Lists, for each equation, the variables that are not used after it."""
    used = {v for v in program.outvars if not isinstance(v, jaxprs.Literal)}
    unused: list[list[Any]] = []
    for equation in reversed(program.eqns):
        inputs = {v for v in equation.invars if not isinstance(v, jaxprs.Literal)}
        unused.append([v for v in {*inputs, *equation.outvars} if v not in used])
        used |= inputs
    return unused[::-1]


# Which numbers of an array are not finite, and where; and their words.


def kinds_in(x: Any) -> list[str]:
    """Lists the kinds of non-finite numbers in an array."""
    x = _content(x)
    if not is_inexact(x):
        return []
    if isinstance(x, jax.Array) and not _is_on_host(x):
        has_kinds = jax.device_get(_has_kinds(x))
    else:
        # No program to compile, for each shape.
        numbers = np.asarray(x)
        if np.isfinite(numbers).all():
            return []
        has_kinds = np.isnan(numbers).any(), np.isinf(numbers).any()
    return [*itertools.compress((NAN, INF), has_kinds)]


@jax.jit
def _has_kinds(x: Any) -> Any:
    return jnp.isnan(x).any(), jnp.isinf(x).any()


def _content(x: Any) -> Any:
    return x[...] if _jax.is_ref(x) else x


def _is_on_host(x: jax.Array) -> bool:
    return x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices())


def is_inexact(x: Any) -> bool:
    """Whether it has floating or complex numbers."""
    return jnp.issubdtype(_dtype(x), jnp.inexact)


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None) or np.asarray(x).dtype


def arising(out: Any, inputs: list[Any]) -> bool:
    """Whether a number of an output is infinite where all of the inputs are finite.

    The inputs have the shape of the output, or none.
    """
    is_new = jnp.isinf(out)
    for x in filter(is_inexact, inputs):
        is_new &= jnp.isfinite(x)
    return bool(is_new.any())


def form_of(x: Any) -> str:
    """Writes the dtype and the shape of an array, as in ``float32[2,3]``."""
    x = _content(x)
    return descriptions.describe_form(_dtype(x), np.shape(x))


def describe(x: Any, kind: str = "") -> str:
    """Describes an array: its form, its range, and its non-finite numbers.

    Gives the first place of one kind, NaN or infinities.
    """
    form, numbers = form_of(x), _numbers(x)
    if numbers is None or not numbers.size:
        return form
    if not numbers.ndim:
        return f"{form} {_text(numbers[()])}"
    finite = numbers[np.isfinite(numbers)]
    if finite.size == numbers.size:
        remark = ", all finite" if is_inexact(x) else ""
        return f"{form} in [{_text(finite.min())}, {_text(finite.max())}]{remark}"
    counts = {
        "nan": np.isnan(numbers).sum(),
        "+inf": np.isposinf(numbers).sum(),
        "-inf": np.isneginf(numbers).sum(),
    }
    text = ", ".join([f"{count:,} {name}" for name, count in counts.items() if count])
    first = f", first {kind} at {[*first_index(x, kind)]}" if kind else ""
    return f"{form}: {text} of {numbers.size:,}{first}"


def first_index(x: Any, kind: str) -> tuple[int, ...]:
    """Finds the index of the first NaN, or of the first infinity."""
    numbers = np.asarray(_numbers(x))
    mask = np.isnan(numbers) if kind == NAN else np.isinf(numbers)
    return tuple(map(int, np.unravel_index(np.argmax(mask), mask.shape)))


def number_at(x: Any, index: tuple[int, ...]) -> str:
    """Writes the number at an index; axes of size one, and missing ones, broadcast."""
    numbers = np.asarray(_numbers(x))
    broadcast = np.minimum(index[: numbers.ndim], np.subtract(numbers.shape, 1))
    return _text(numbers[tuple(broadcast.astype(int))])


def _numbers(x: Any) -> np.ndarray | None:
    """Reads the numbers of an array, absolute if complex; ``None`` without any."""
    x = _content(x)
    is_here = getattr(x, "is_fully_addressable", True)
    if not is_here or not jnp.issubdtype(_dtype(x), jnp.number):
        return None
    numbers = np.asarray(x)
    if np.iscomplexobj(numbers):
        return np.abs(numbers)
    # NumPy does little with the smallest types of others.
    is_of_numpy = numbers.dtype.kind in "iuf" and numbers.dtype.itemsize > 2
    return numbers if is_of_numpy else numbers.astype(np.float32)


def _text(number: Any) -> str:
    return f"{number:.4g}" if abs(number) < 1e6 else f"{number:.3g}"
