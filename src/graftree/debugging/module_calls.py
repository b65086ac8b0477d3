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
    """Shows the outputs of the modules of a model to a function, in a context.

    It is called after each call of a module, or of another public method on an object,
    whose name then ends the path. Under ``nnx.jit`` and other transforms it is called
    while they are traced, with traced values: compiled functions are traced again in
    the context, and those traced in it are not used after it. Don't keep
    these values; ``jax.debug.callback`` brings them out.

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
    """Finds the path of an object in the model, ``None`` if it is not in it."""
    steps = running.steps_below(model, frame.steps)
    return None if steps is None else running.keys_of(steps)


def _with_method(path: Path, frame: running.ModuleCall) -> Path:
    """Appends the name of a method, other than ``__call__``, to a path."""
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
    """Lists the calls of methods of an object and those in it, as they begin."""
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
    """Records each call the first time that it is made."""

    root: Any
    paths: Mapping[int, Path]

    def __init__(self, original: Any, counter: Counter) -> None:
        self._ids = {path: id(x) for path, x in outlines.first_paths(original)}
        self._counter = counter
        self._marks = Marks()
        self._infos: dict[Any, CallInfo | None] = {}
        self._traces_alone: dict[Any, Callable[[], Computation]] = {}

    def observe(self, frame: running.ModuleCall, call: Callable[[], Any]) -> Any:
        path = self._path_of(frame)
        if path not in self._ids or not methods.is_public(frame.method):
            return call()
        inputs = outlines.outline_arguments(frame.args, frame.kwargs)
        key = path, frame.method, inputs
        if key in self._infos:
            return self._marked(key, call)
        order = len(self._infos)
        self._infos[key] = None
        if self._counter.asked:
            self._traces_alone[key] = _trace_alone(frame)
        output = self._marked(key, call)
        self._infos[key] = CallInfo(
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
        """Finds the path of the object in the model, ``None`` if it is not in it."""
        path = self.paths.get(id(frame.module))
        if path is not None:
            return path
        # Objects in transforms are new ones.
        steps = running.steps_below(self.root, frame.steps)
        if steps is None:
            return None
        return self.paths.get(id(running.reach(self.root, steps)))

    def calls(self, program: Any) -> list[CallInfo]:
        """Lists the calls, with their costs in a program."""
        marked = self._marks.computations(program)
        return [
            dataclasses.replace(
                call, **self._counter.count(self._computation(marked, key))
            )
            for key, call in self._infos.items()
            if call is not None
        ]

    def _computation(
        self, marked: Mapping[Any, Computation], key: Any
    ) -> Computation | None:
        """Returns the computation of a call; ``None`` if it can't be traced."""
        if key in marked or key not in self._traces_alone:
            return marked.get(key)
        try:
            return self._traces_alone[key]()
        except Exception:  # it may need the names of axes that are mapped over
            return None


def _trace_alone(frame: running.ModuleCall) -> Callable[[], Computation]:
    """Gives the computation of a call, traced by itself."""
    marks, method = Marks(), frame.method

    def run(obj: Any, /, *args: Any, **kwargs: Any) -> None:
        marks.call(method, lambda: getattr(obj, method)(*args, **kwargs))

    trace = abstract(run, (frame.module, *frame.args), {**frame.kwargs})
    return lambda: marks.computations(trace())[method]


# The costs of calls.


@dataclasses.dataclass(frozen=True)
class Computation:
    """Computation of a call, as a program.

    Attributes:
        program: It has no constants.
        num_constants: How many of its inputs, the first ones, are constants of the
            enclosing program.
    """

    program: Any
    num_constants: int

    @classmethod
    def of(
        cls, equations: list[Any], outputs: list[Any], constants: Set[Any]
    ) -> Computation:
        """Builds the computation of some variables, as far as these equations go."""
        needed = jaxprs.needed_in(jaxprs.part([], equations, outputs))
        computed = {x for equation in needed for x in equation.outvars}
        operands = [x for equation in needed for x in equation.invars]
        variables = dict.fromkeys([x for x in operands if isinstance(x, jaxprs.Var)])
        used = [x for x in variables if x in constants]
        inputs = [x for x in variables if x not in computed and x not in constants]
        outputs = [x for x in outputs if _is_among(x, computed)]
        return cls(jaxprs.part([*used, *inputs], needed, outputs), len(used))

    @property
    def smooth(self) -> Computation:
        """Computation of those outputs that have a derivative."""
        outputs = [x for x in self.program.outvars if _is_float(x.aval)]
        constants = {*self.program.invars[: self.num_constants]}
        return Computation.of(self.program.eqns, outputs, constants)

    @property
    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the inputs."""
        return [*map(content_type, self.program.invars)]

    def __call__(self, *values: Any) -> list[Any]:
        operands = [
            jax.new_ref(value) if _is_ref(x.aval) else value
            for x, value in zip(self.program.invars, values, strict=True)
        ]
        return jax.core.eval_jaxpr(self.program, (), *operands)


def _is_among(x: Any, variables: Set[Any]) -> bool:
    return isinstance(x, jaxprs.Var) and x in variables


def _is_ref(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")


def content_type(x: Any) -> jax.ShapeDtypeStruct:
    """Reads the type of a value or a program's variable; of a ref, its content's."""
    aval: Any = x.aval if isinstance(x, jaxprs.Var) else jax.typeof(x)
    aval = aval.inner_aval if _is_ref(aval) else aval
    is_weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak)


# The mark in the scopes of a program, and the name of outputs.
_MARK, _OUTPUT = "call of graftree ", "output of a call"
_numbers = itertools.count()


class Marks:
    """Marks calls while JAX traces them, and finds them in the finished program.

    The operations of a call are in a scope of their own, and its outputs have a name.
    Callers don't see this: the call returns the same as without it.
    """

    def __init__(self) -> None:
        # For each mark, the call and how many of its outputs have a name.
        self._calls: dict[str, tuple[Hashable, int]] = {}
        # JAX drops values that nothing uses.
        self._named: list[Any] = []

    def call(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """Makes a call, and returns its output."""
        mark = f"{_MARK}{next(_numbers)}"
        self._calls[mark] = key, 0
        with jax.named_scope(mark):
            output = call()
            arrays = [x for x in jax.tree.leaves(output) if _is_traced_array(x)]
            # A number with a name marks a call that computes nothing.
            with_name = _jax.ad_checkpoint().checkpoint_name
            named = [with_name(x, _OUTPUT) for x in [*arrays, 0]]
        self._calls[mark] = key, len(named)
        self._named += named
        return output

    def computations(self, program: Any) -> dict[Hashable, Computation]:
        """Finds the computations of calls, by their keys: of each the first one.

        Differentiated or mapped calls are left out: they differ from the original. JAX
        may also have taken them apart, so that not all outputs are there.
        """
        computations: dict[Hashable, Computation] = {}
        jaxpr, _ = jaxprs.opened(program)
        pending = [(jaxpr, frozenset(jaxpr.constvars))]
        while pending:
            jaxpr, constants = pending.pop(0)
            for mark, (equations, outputs) in _marked(jaxpr.eqns).items():
                key, count = self._calls.get(mark, (None, None))
                if key not in computations and len(outputs) == count:
                    computations[key] = Computation.of(equations, outputs, constants)
            pending += [
                (inner, _constants_of(inner, equation, constants))
                for equation in jaxpr.eqns
                if _is_as_traced(equation)
                for inner in jaxprs.programs_in(equation)
            ]
        return computations


def _is_traced_array(x: Any) -> bool:
    return isinstance(x, _jax.Tracer) and not _jax.is_ref(x)


def _marked(equations: list[Any]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Finds the equations of calls among these, and their outputs, by mark."""
    marked: dict[str, tuple[list[Any], list[Any]]] = {}
    for equation in equations:
        marks = _marks_of(equation)
        for mark in marks:
            marked.setdefault(mark, ([], []))[0].append(equation)
        is_output = keeping.given_name(equation) == _OUTPUT
        if is_output and marks and _is_as_traced(equation):
            marked[marks[-1]][1].append(equation.invars[0])
    return marked


def _is_as_traced(equation: Any) -> bool:
    """Whether an equation is as traced: no transform has changed it."""
    return not any(is_transform for _, is_transform in _jax.scopes_of(equation))


def _marks_of(equation: Any) -> list[str]:
    """Lists the calls that an equation belongs to, up to the first transform."""
    scopes = itertools.takewhile(lambda scope: not scope[1], _jax.scopes_of(equation))
    return [name for name, _ in scopes if name.startswith(_MARK)]


def _constants_of(
    inner: Any, equation: Any, constants: frozenset[Any]
) -> frozenset[Any]:
    """Collects the variables of a program in an equation that are constants."""
    # Other inputs of an equation, such as the number of a branch, come first.
    pairs = zip(reversed(inner.invars), reversed(equation.invars), strict=False)
    passed = [x for x, operand in pairs if _is_among(operand, constants)]
    return frozenset([*inner.constvars, *passed])


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
        self._costs: dict[Any, int] = {}

    def count(self, computation: Computation | None) -> dict[str, int]:
        """Counts the cost of a call, by name; zero without a computation."""
        return {name: self._of(name, computation) for name in self.asked}

    def _of(self, name: str, computation: Computation | None) -> int:
        if computation is None:
            return 0
        key = name, str(computation.program), computation.num_constants
        if key not in self._costs:
            try:
                if name == "flops":
                    self._costs[key] = _flops(computation, computation.inputs)
                else:
                    self._costs[key] = _flops(*_derivative(computation))
            except Exception:  # it has no derivative, or needs enclosing axes
                self._costs[key] = 0
        return self._costs[key]


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _derivative(computation: Computation) -> tuple[Callable[..., Any], list[Any]]:
    """Adds the derivative; returns a function and the types of its arguments."""
    computation = computation.smooth
    inputs = [*enumerate(computation.inputs)][computation.num_constants :]
    chosen = [i for i, x in inputs if _is_float(x)]

    def both(inputs: list[Any], cotangents: list[Any]) -> Any:
        def forward(*values: Any) -> Any:
            filled = dict(zip(chosen, values, strict=True))
            return computation(*[filled.get(i, x) for i, x in enumerate(inputs)])

        out, pull = jax.vjp(forward, *[inputs[i] for i in chosen])
        return out, pull(cotangents)

    types = computation.inputs
    return both, [types, jax.eval_shape(computation, *types)]


def _flops(function: Callable[..., Any], inputs: list[Any]) -> int:
    analysis = jax.jit(function).lower(*inputs).cost_analysis() or {}
    # XLA returns -1 if it does not know.
    return max(0, int(analysis.get("flops", 0)))
