"""Calls of methods: named by path, seen and replaced, listed, with their costs.

    CallInfo        the facts about one call, a row of a table
    abstract        a call whose arrays are only shapes, to be traced
    Marks           finds calls in the program that JAX records of them
    Computation     the program of such a call
    Counter         counts its operations

`record` traces a call of the model and lists the calls below it, by the paths of their
objects; nothing is run. The cost of a call is counted in the finished program, where it
is marked. A call that is mapped or differentiated is not there as such, so it is traced
once more, by itself.

The operations are those of the program before XLA optimizes it: the work that a layer
asks for, not that of the machine. The body of a loop counts once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp

from graftree import _jax, errors
from graftree.annotations import Filter, Path
from graftree.core import filters
from graftree.core.objects import methods, running
from graftree.core.objects.attributes import DataObject
from graftree.core.rng.streams import Rngs, RngStream
from graftree.debugging import outlines
from graftree.memory import keeping
from graftree.transforms import recordings
from graftree.transforms.lifting import jaxprs

F = TypeVar("F", bound=Callable[..., Any])


def named(method: F) -> F:
    """Names the operations of a method after the path of its object and the method.

    A call ``model(x)`` is known by the path of the object: in the names of operations
    and so in profiles, to `intercept`, and in the policies of `nnx.remat`. With this
    decorator, so are the calls of another method: its name ends the path, and the calls
    inside it have their whole path too.

    Args:
        method: A function in the body of a class. Put this decorator below those that
            return something other than a function, such as ``nnx.jit`` or ``property``.

    Returns:
        The stand-in for the function in the class, with all of its attributes.

    Raises:
        TypeError: If it is not a plain function, or a generator or coroutine function.

    Example:
        >>> class Coder(nnx.Module):
        ...     @nnx.debugging.named
        ...     def encode(self, x):
        ...         return jnp.sin(x)
        >>> program = jax.jit(lambda x: Coder().encode(x)).lower(1.0)
        >>> "Coder/encode/sin" in program.compile().as_text()
        True
    """
    return methods.named(method)


@contextlib.contextmanager
def intercept(
    model: Any,
    filter: Filter,
    f: Callable[[Path, Any, tuple[Any, ...], Any], Any],
) -> Iterator[None]:
    """A context in which a function sees the outputs of the modules of a model.

    It is called after each call of a module, or of another public method on an object,
    whose name then ends the path. Under ``nnx.jit`` and other transforms it is called
    while they are traced, with traced values: compiled functions are traced again in
    the context, and those traced in it are not used outside. Don't keep
    such values; ``jax.debug.callback`` brings them out.

    It does not see copies of the model that plain JAX or `merge` make, methods bound
    before the context, and calls that return before they run, such as coroutines.

    Args:
        model: A Module, or another Pytree that holds modules.
        filter: Which modules, by path and object, such as ``nnx.Linear`` or ``...``.
        f: Called as ``f(path, module, args, output)``: the keys from ``model`` to the
            module, the module, its positional arguments (including keywords that have a
            position) and its output. Unless ``f`` returns ``None``, its result replaces
            the output.

    Raises:
        TypeError: If ``model`` is not a Pytree, or the filter is not a filter.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> means = {}
        >>> def note(path, module, args, output):
        ...     means[path] = output.mean()
        >>> with nnx.debugging.intercept(model, nnx.Linear, note):
        ...     y = model(jnp.ones((1, 2)))
        >>> list(means)
        [('layers', 0)]
    """
    if not isinstance(model, DataObject):
        raise TypeError(
            f"intercept expects a Module or another Pytree, got {type(model).__name__}."
        )
    is_wanted = filters.to_predicate(filter)

    def observer(frame: running.ModuleCall, call: Callable[[], Any]) -> Any:
        output = call()
        if isinstance(frame.module, (Rngs, RngStream)):
            return output
        path = errors.fenced(_path_below, model, frame)
        if path is None or not is_wanted(path, frame.module):
            return output
        path = _with_method(path, frame)
        replaced = f(path, frame.module, _positional(frame), output)
        return output if replaced is None else replaced

    with methods.observed(observer, model, shows_methods=True):
        yield


def _path_below(model: Any, frame: running.ModuleCall) -> Path | None:
    """The path of an object in the model, ``None`` if it is not in it."""
    steps = running.steps_below(model, frame.steps)
    return None if steps is None else running.keys_of(steps)


def _with_method(path: Path, frame: running.ModuleCall) -> Path:
    """The path of an object, and the name of a method other than ``__call__``."""
    return path if frame.method == "__call__" else (*path, frame.method)


def _positional(frame: running.ModuleCall) -> tuple[Any, ...]:
    if not frame.kwargs:
        return frame.args
    method = getattr(frame.module, frame.method)
    return inspect.signature(method).bind(*frame.args, **frame.kwargs).args


@dataclasses.dataclass(frozen=True)
class CallInfo:
    """A call of a method: a row of a table.

    Attributes:
        call_order: How many calls began before it.
        object_id: The ``id`` of the object in the model.
        type: Its class.
        path: The keys from the model to it; a method other than ``__call__`` ends it.
        inputs_repr: The inputs, as the table shows them.
        outputs: The output, with an `ArrayRepr` for each array.
        flops: The floating-point operations of the call; ``None`` if not counted.
        vjp_flops: Those of the call and its derivative; ``None`` if not counted.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> calls = []
        >>> def keep(call):
        ...     calls.append(call)
        ...     return True
        >>> text = nnx.tabulate(model, jnp.ones((1, 2)), row_filter=keep)
        >>> for call in calls:
        ...     print(call.path, call.type.__name__, call.outputs)
        () Sequential float32[1,3]
        ('layers', 0) Linear float32[1,3]
    """

    call_order: int
    object_id: int
    type: type
    path: Path
    inputs_repr: str
    outputs: Any
    flops: int | None = None
    vjp_flops: int | None = None


def filter_rng_streams(row: CallInfo) -> bool:
    """Whether a call is not a draw from a stream of random keys.

    Args:
        row: A call.

    Example:
        >>> model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        >>> calls = []
        >>> def keep(call):
        ...     calls.append(call.path)
        ...     return nnx.summary.filter_rng_streams(call)
        >>> text = nnx.tabulate(model, jnp.ones(2), row_filter=keep)
        >>> calls, "RngStream" in text
        ([(), ('rngs',)], False)
    """
    return not issubclass(row.type, RngStream)


def abstract(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    """Gives the program of a call, to be traced on fresh objects with only shapes.

    Anything that is neither an array nor an object stays as it is.
    """
    call, interior = recordings.both_sides("tabulate", f, args, kwargs)
    leaves, treedef = jax.tree.flatten(call.groups)
    refs = {i for i, x in enumerate(leaves) if _jax.is_ref(x)}
    shapes = {i: content_type(x) for i, x in enumerate(leaves) if outlines.is_array(x)}
    others = [None if i in shapes else x for i, x in enumerate(leaves)]

    def traced(arrays: dict[int, Any]) -> None:
        values = [arrays.get(i, x) for i, x in enumerate(others)]
        values = [jax.new_ref(x) if i in refs else x for i, x in enumerate(values)]
        interior(*jax.tree.unflatten(treedef, values))

    return lambda: jax.make_jaxpr(traced)(shapes)


def record(
    obj: Any,
    method: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    counter: Counter,
) -> list[CallInfo]:
    """The calls of methods of an object and those in it, in the order they begin."""
    recorder = _CallLog(obj, counter)

    def run(root: Any, /, *args: Any, **kwargs: Any) -> None:
        recorder.root = root
        recorder.paths = {id(x): path for path, x in outlines.first_paths(root)}

        def call(root: Any, /, *args: Any, **kwargs: Any) -> Any:
            return getattr(root, method)(*args, **kwargs)

        everything = {"shows_methods": True, "shows_draws": True}
        with methods.observed(recorder.observe, root, **everything):
            methods.TrackedMethod(call, method)(root, *args, **kwargs)

    return recorder.calls(abstract(run, (obj, *args), kwargs)())


class _CallLog:
    """Notes each call the first time that it is made."""

    root: Any
    paths: Mapping[int, Path]

    def __init__(self, original: Any, counter: Counter) -> None:
        self._ids = {path: id(x) for path, x in outlines.first_paths(original)}
        self._counter = counter
        self._marks = Marks()
        self._known: dict[Any, CallInfo | None] = {}
        self._apart: dict[Any, Callable[[], Computation]] = {}

    def observe(self, frame: running.ModuleCall, call: Callable[[], Any]) -> Any:
        path = self._path_of(frame)
        if path not in self._ids or not methods.is_public(frame.method):
            return call()
        inputs = outlines.outline_arguments(frame.args, frame.kwargs)
        key = path, frame.method, inputs
        if key in self._known:
            return self._marked(key, call)
        order = len(self._known)
        self._known[key] = None
        if self._counter.asked:
            self._apart[key] = _apart(frame)
        output = self._marked(key, call)
        self._known[key] = CallInfo(
            order,
            self._ids[path],
            type(frame.module),
            _with_method(path, frame),
            inputs,
            outlines.outline(output),
        )
        return output

    def _marked(self, key: Any, call: Callable[[], Any]) -> Any:
        return self._marks.call(key, call) if self._counter.asked else call()

    def _path_of(self, frame: running.ModuleCall) -> Path | None:
        """The path of the object in the model, ``None`` if it is not in it."""
        known = self.paths.get(id(frame.module))
        if known is not None:
            return known
        # Objects inside transforms are new ones.
        steps = running.steps_below(self.root, frame.steps)
        if steps is None:
            return None
        return self.paths.get(id(running.reach(self.root, steps)))

    def calls(self, program: Any) -> list[CallInfo]:
        """The calls, with their costs in a program."""
        parts = self._marks.parts(program)
        return [
            dataclasses.replace(call, **self._counter.count(self._part(parts, key)))
            for key, call in self._known.items()
            if call is not None
        ]

    def _part(self, parts: Mapping[Any, Computation], key: Any) -> Computation | None:
        """The computation of a call, if it is known."""
        if key in parts or key not in self._apart:
            return parts.get(key)
        try:
            return self._apart[key]()
        except Exception:  # it may need the names of axes that are mapped over
            return None


def _apart(frame: running.ModuleCall) -> Callable[[], Computation]:
    """Gives the computation of a call, traced by itself."""
    marks, method = Marks(), frame.method

    def run(obj: Any, /, *args: Any, **kwargs: Any) -> None:
        marks.call(method, lambda: getattr(obj, method)(*args, **kwargs))

    trace = abstract(run, (frame.module, *frame.args), {**frame.kwargs})
    return lambda: marks.parts(trace())[method]


# The costs of calls.


@dataclasses.dataclass(frozen=True)
class Computation:
    """The computation of a call, as a program.

    Attributes:
        program: It has no constants.
        held: How many of its inputs, the first ones, are arrays held by the program
            around it.
    """

    program: Any
    held: int

    @classmethod
    def of(
        cls, equations: list[Any], outputs: list[Any], constants: Set[Any]
    ) -> Computation:
        """The computation of some variables, as far as these equations make them."""
        needed = jaxprs.needed_in(jaxprs.part([], equations, outputs))
        made = {x for equation in needed for x in equation.outvars}
        read = [x for equation in needed for x in equation.invars]
        given = dict.fromkeys([x for x in read if isinstance(x, jaxprs.Var)])
        held = [x for x in given if x in constants]
        inputs = [x for x in given if x not in made and x not in constants]
        outputs = [x for x in outputs if _is_among(x, made)]
        return cls(jaxprs.part([*held, *inputs], needed, outputs), len(held))

    @property
    def smooth(self) -> Computation:
        """The computation of those outputs that have a derivative."""
        outputs = [x for x in self.program.outvars if _is_float(x.aval)]
        held = {*self.program.invars[: self.held]}
        return Computation.of(self.program.eqns, outputs, held)

    @property
    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the inputs."""
        return [*map(content_type, self.program.invars)]

    def __call__(self, *values: Any) -> list[Any]:
        given = [
            jax.new_ref(value) if _is_ref(x.aval) else value
            for x, value in zip(self.program.invars, values, strict=True)
        ]
        return jax.core.eval_jaxpr(self.program, (), *given)


def _is_among(x: Any, variables: Set[Any]) -> bool:
    return isinstance(x, jaxprs.Var) and x in variables


def _is_ref(kind: Any) -> bool:
    return hasattr(kind, "inner_aval")


def content_type(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a value or a variable of a program; for a ref, of its content."""
    kind: Any = x.aval if isinstance(x, jaxprs.Var) else jax.typeof(x)
    kind = kind.inner_aval if _is_ref(kind) else kind
    is_weak = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=is_weak)


# The mark in the scopes of a program, and the name of outputs.
_MARK, _OUTPUT = "call of graftree ", "output of a call"
_numbers = itertools.count()


class Marks:
    """Marks calls while JAX traces them, and finds them in the finished program.

    The operations of a call are in a scope of their own, and its outputs have a name.
    Callers don't see this: the call returns the same as without it.
    """

    def __init__(self) -> None:
        # For each mark, the call and the number of its outputs that have a name.
        self._calls: dict[str, tuple[Hashable, int]] = {}
        # JAX drops values that nothing uses.
        self._named: list[Any] = []

    def call(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """The output of a call."""
        mark = f"{_MARK}{next(_numbers)}"
        self._calls[mark] = key, 0
        with jax.named_scope(mark):
            output = call()
            arrays = [x for x in jax.tree.leaves(output) if _is_traced_array(x)]
            # A call that computes nothing is found by the name of a number.
            with_name = _jax.ad_checkpoint().checkpoint_name
            named = [with_name(x, _OUTPUT) for x in [*arrays, 0]]
        self._calls[mark] = key, len(named)
        self._named += named
        return output

    def parts(self, program: Any) -> dict[Hashable, Computation]:
        """The computations of calls, by their keys: of each the first in the program.

        Differentiated or mapped calls are left out: they differ from the original. JAX
        may also have taken them apart, so that not all outputs are there.
        """
        found: dict[Hashable, Computation] = {}
        jaxpr, _ = jaxprs.opened(program)
        pending = [(jaxpr, frozenset(jaxpr.constvars))]
        while pending:
            jaxpr, constants = pending.pop(0)
            for mark, (equations, outputs) in _marked(jaxpr.eqns).items():
                key, count = self._calls.get(mark, (None, None))
                if key not in found and len(outputs) == count:
                    found[key] = Computation.of(equations, outputs, constants)
            pending += [
                (inner, _constants_of(inner, equation, constants))
                for equation in jaxpr.eqns
                if _is_as_traced(equation)
                for inner in jaxprs.programs_in(equation)
            ]
        return found


def _is_traced_array(x: Any) -> bool:
    return isinstance(x, _jax.Tracer) and not _jax.is_ref(x)


def _marked(equations: list[Any]) -> dict[str, tuple[list[Any], list[Any]]]:
    """The equations of calls among these, and their outputs, by mark."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for equation in equations:
        marks = _marks_of(equation)
        for mark in marks:
            found.setdefault(mark, ([], []))[0].append(equation)
        is_output = keeping.given_name(equation) == _OUTPUT
        if is_output and marks and _is_as_traced(equation):
            found[marks[-1]][1].append(equation.invars[0])
    return found


def _is_as_traced(equation: Any) -> bool:
    """Whether an equation is as traced: no transform has changed it."""
    return not any(is_transform for _, is_transform in _jax.scopes_of(equation))


def _marks_of(equation: Any) -> list[str]:
    """The calls that an equation belongs to, without those inside a transform."""
    scopes = _jax.scopes_of(equation)
    outside = itertools.takewhile(lambda scope: not scope[1], scopes)
    return [name for name, _ in outside if name.startswith(_MARK)]


def _constants_of(
    inner: Any, equation: Any, constants: frozenset[Any]
) -> frozenset[Any]:
    """The variables of a program in an equation that are constants."""
    # Other inputs of an equation, such as the number of a branch, come first.
    pairs = zip(reversed(inner.invars), reversed(equation.invars), strict=False)
    given = [x for x, outer in pairs if _is_among(outer, constants)]
    return frozenset([*inner.constvars, *given])


class Counter:
    """Counts the costs of calls.

    Args:
        flops: Whether to count the operations of a call.
        vjp_flops: Whether to count those of the call and its derivative with respect to
            everything it reads: its inputs and the Variables.

    Attributes:
        asked: The names of the costs, as in `CallInfo`.
    """

    def __init__(self, flops: bool, vjp_flops: bool) -> None:
        self.asked = ["flops"] * flops + ["vjp_flops"] * vjp_flops
        # Equal blocks are counted once.
        self._known: dict[Any, int] = {}

    def count(self, part: Computation | None) -> dict[str, int]:
        """The cost of a call, by name; zero if nothing is known of it."""
        return {name: self._of(name, part) for name in self.asked}

    def _of(self, name: str, part: Computation | None) -> int:
        if part is None:
            return 0
        key = name, str(part.program), part.held
        if key not in self._known:
            try:
                program = (part, part.inputs) if name == "flops" else _derivative(part)
                self._known[key] = _flops(*program)
            except Exception:  # it has no derivative, or needs the axes around it
                self._known[key] = 0
        return self._known[key]


def _is_float(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.inexact)


def _derivative(part: Computation) -> tuple[Callable[..., Any], list[Any]]:
    """The part with its derivative, and the types of its inputs and cotangents."""
    part = part.smooth
    numbered = [*enumerate(part.inputs)][part.held :]
    chosen = [i for i, x in numbered if _is_float(x)]

    def both(inputs: list[Any], cotangents: list[Any]) -> Any:
        def forward(*values: Any) -> Any:
            filled = dict(zip(chosen, values, strict=True))
            return part(*[filled.get(i, x) for i, x in enumerate(inputs)])

        out, pull = jax.vjp(forward, *[inputs[number] for number in chosen])
        return out, pull(cotangents)

    return both, [part.inputs, jax.eval_shape(part, *part.inputs)]


def _flops(function: Callable[..., Any], inputs: list[Any]) -> int:
    analysis = jax.jit(function).lower(*inputs).cost_analysis() or {}
    # XLA returns -1 if it does not know.
    return max(0, int(analysis.get("flops", 0)))
