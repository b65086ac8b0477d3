"""The one door to JAX API that is private, experimental or differs between versions.

Supported: JAX 0.10.2 to 0.12. Everything else in the package uses documented JAX.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.experimental.checkify as _checkify
import jax.experimental.hijax as _hijax
import jax.experimental.layout
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _tracebacks
from jax._src import tree_util as _tree_util
from jax._src.export import _export
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jaxlib.mlir import ir as _ir
from jaxlib.mlir.dialects import sdy as _sdy

Ref = jax.Ref
new_ref = jax.new_ref
Tracer = jax.core.Tracer
# The type of arrays with values.
Concrete = _array.ArrayImpl
# For `jax.jit(inline=...)`: operations are put into the program that is traced. What
# `True` means in newer versions costs a function, lowered for itself, for each program.
Inline: Any = getattr(jax, "Inline", None)
inlined = True if Inline is None else Inline.JAX_EARLY
checkify = _checkify.checkify
user_checks = _checkify.user_checks


# A token of the innermost JAX trace of this thread, compared by identity. It is the
# weak reference that JAX itself keeps on each trace, so holding the token does not keep
# the trace (and its tracers) alive. Whatever is made or written asks for it: 45 ns,
# where a function in Python takes 130.
current_trace: Callable[[], Any] = functools.partial(
    getattr, _core.trace_state, "value"
)


# The token while nothing is traced.
no_trace = weakref.ref(_core.eval_trace)


# Names the operations traced in a context: what `jax.named_scope` does, without the
# generator around it.
name_scope = _source_info.extend_name_stack

# JAX uses a program only where this context has the value that it was traced with.
traced_apart: Callable[[int], Any] = jax.make_user_context()
# The same for another purpose: the defaults with which layers are made.
built_apart: Callable[[Any], Any] = jax.make_user_context()
# The same for what a trace reads besides its arguments: defaults of a thread and flags,
# as a frozen set of pairs of a name and a value, or ``None`` if there are none.
_PLACE_OF_DEFAULTS = len(_config.trace_context_names())
_defaults = jax.make_user_context()
_flags = jax.make_user_context()


def trace_under_defaults(defaults: frozenset[tuple[str, Any]] | None) -> None:
    """From now on this thread uses only programs that were traced under these."""
    _defaults(defaults).__enter__()


def trace_under_flags(flags: frozenset[tuple[str, Any]] | None) -> None:
    """From now on the process uses only programs that were traced under these."""
    _flags.set_global(flags)


def is_differentiated(x: Any) -> bool:
    """Whether ``x`` carries a derivative: a tracer of JAX's forward mode."""
    return isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer))


def is_data_type(kind: type) -> bool:
    """Whether instances of ``kind`` are arrays: JAX or NumPy arrays, tracers, refs."""
    return issubclass(kind, (jax.Array, np.ndarray, Ref, Tracer))


def is_ref(x: Any) -> bool:
    """Whether ``x`` is an array ref, concrete or traced."""
    # `isinstance(x, Ref)` says the same, and takes 15 times as long for an array.
    return type(x) is Ref or (
        isinstance(x, Tracer) and isinstance(x.aval, _hijax.AbstractRef)
    )


def is_tracing() -> bool:
    """Whether a JAX transform is tracing in this thread."""
    return not isinstance(_core.trace_ctx.trace, _core.EvalTrace)


def is_staging() -> bool:
    """Whether the innermost trace of this thread records a program, as jit does."""
    return isinstance(_core.trace_ctx.trace, _partial_eval.DynamicJaxprTrace)


def _traces_around() -> Iterator[Any]:
    trace = _core.trace_ctx.trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def recording_trace() -> Any:
    """Stands for the innermost trace that records a program; ``None`` for none."""
    kind = _partial_eval.DynamicJaxprTrace
    return next((weakref.ref(x) for x in _traces_around() if isinstance(x, kind)), None)


def runs_eagerly() -> bool:
    """Whether what is called now is no part of a program that JAX compiles."""
    return recording_trace() is None and not jax.config.values["jax_disable_jit"]


def order_of_derivative() -> int:
    """How many times what is called now is differentiated or mapped, at most."""
    return len([*_traces_around()]) - 1


def flatten_one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a registered pytree as (key entry, child), and how to rebuild it.

    Returns:
        The children in JAX's order, and a treedef whose ``unflatten`` takes the list
        of children and gives a new node.
    """
    # JAX asks for the node first, then for its children: they may be the node itself.
    asked = itertools.count()
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda _: next(asked) > 0
    )
    return [(path[0], child) for path, child in flat], treedef


# Frames that say nothing to the user: operations are not located there, in programs,
# profiles and errors, and tracebacks leave them out, like those of JAX. Layers are
# shown, as those of other libraries are: their lines say what is computed.
for _part in ("_jax.py", "core", "debugging", "interop", "nn/support", "transforms"):
    _path = os.path.join(os.path.dirname(__file__), *_part.split("/"))
    _source_info.register_exclusion(_path)
    _tracebacks.register_exclusion(_path)


def hide_frames(error: Exception) -> None:
    """Leaves out the frames registered above; call it where no frame is a user's.

    JAX does so below its own functions, the innermost of which called the user's.
    """
    mode = _tracebacks._filtering_mode()
    if mode == "quiet_remove_frames" and error.__traceback__ is not None:
        error.with_traceback(_tracebacks.filter_traceback(error.__traceback__))
    elif mode == "tracebackhide":
        _tracebacks._add_tracebackhide_to_hidden_frames(error.__traceback__)


class _HiddenFrames:
    """A context that hides frames in errors, with its own."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, Exception):
            hide_frames(error)


hidden_frames = _HiddenFrames()


def prefix_error(
    prefix: Any, full: Any, is_leaf: Callable[[Any], bool], name: str
) -> str:
    """Where a tree, called ``name``, is no prefix of another one."""
    first, *_ = _tree_util.prefix_errors(prefix, full, is_leaf)
    return str(first(name))


def is_pytree_type(kind: type) -> bool:
    """Whether exactly this type is registered as a pytree node."""
    return jax.tree_util.default_registry.is_node(kind)


def register_leafless(kind: type) -> None:
    """Registers a class whose instances are leafless pytrees, rebuilt by calling it."""
    jax.tree_util.register_pytree_node(
        kind, lambda _: ((), None), lambda _aux, _children: kind()
    )


# For each pytree type that JAX was told of: its name, and what writes its static data.
written_nodes: dict[Any, Any] = _export.serialization_registry


def write_nodes(kind: type, name: str, write: Callable[[Any], bytes]) -> None:
    """Says how exported functions name a pytree type, and write its static data."""
    written_nodes[kind] = name, write


def read_nodes(
    name: str, read: Callable[[bytes], Any], rebuild: Callable[[Any, Any], Any]
) -> None:
    """Says how nodes of a name are read: static data, then with their children."""
    known: Any = _export.deserialization_registry
    known[name] = object, read, rebuild


def rebuild_node(kind: type, static: Any, children: Any) -> Any:
    """The node of a pytree type with this static data and these children."""
    return _tree_util._registry[kind].from_iter(static, children)


def is_format(x: Any) -> bool:
    """Whether ``x`` is a `Format`: a memory layout together with a sharding."""
    return isinstance(x, jax.experimental.layout.Format)


def same_type(a: Any, b: Any) -> bool:
    """Whether two arrays have equal shape, dtype and sharding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        # The sharding of a tracer is known in its type only (explicit mesh axes).
        return jax.typeof(a).sharding == jax.typeof(b).sharding
    return a.sharding == b.sharding


def varying(kind: Any) -> frozenset[Any]:
    """The axes of `shard_map` along which values of a type may differ."""
    return kind.manual_axis_type.varying


def as_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """The same array, of the type of those that may differ along these axes, too."""
    missing = tuple(axes - varying(jax.typeof(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def copy_array(x: jax.Array) -> jax.Array:
    """A copy in a buffer of its own: same value, dtype, weak type and sharding."""
    return jax.numpy.array(x, copy=True) if isinstance(x, Tracer) else x.copy()


def as_weak(x: jax.Array) -> jax.Array:
    """The same array with a weak type: in arithmetic the other one's dtype counts."""
    weak: Any = _lax._convert_element_type(x, weak_type=True)
    return weak


# Values that lie where others do. The `shard_alike` of JAX 0.10 was a mere hint.
_alike = _core.Primitive("placed_alike")
_alike.def_impl(lambda new, old: new)
_alike.def_abstract_eval(lambda new, old: new)


def placed_alike(new: Any, old: Any) -> Any:
    """The first of two arrays of one shape, which the compiler places like the other.

    The place is known if ``old`` is an argument of the program, as the program is
    lowered for arguments that lie there. The compiler is free to put an output
    elsewhere: it follows what the output is computed from.
    """
    return _alike.bind(new, old)


def _lower_alike(_: Any, new: Any, old: Any) -> list[Any]:
    place = _place_of(old)
    return [new if place is None else _sdy.ShardingConstraintOp(new, place).result]


def _place_of(value: Any) -> Any:
    """The sharding of an argument of the program, ``None`` if there is none."""
    try:
        argument = _ir.BlockArgument(value)
    except ValueError:  # something that the program computes
        return None
    attributes: Any = argument.owner.owner.attributes
    of_argument = {}
    if "arg_attrs" in attributes:
        of_argument = attributes["arg_attrs"][argument.arg_number]
    is_placed = "sdy.sharding" in of_argument
    return of_argument["sdy.sharding"] if is_placed else None


def _map_alike(values: Any, axes: Any) -> tuple[Any, Any]:
    new, old = values
    axis, other = axes
    if axis is None or other is None:  # of one there are many: nothing to be like
        return new, axis
    return _alike.bind(new, jax.numpy.moveaxis(old, other, axis)), axis


# Not cacheable: what is cached is lowered apart, where arguments have no place.
_mlir.register_lowering(_alike, _lower_alike, cacheable=False)
_batching.primitive_batchers[_alike] = _map_alike
# Derivatives are those of the first.
_ad.primitive_jvps[_alike] = lambda primals, tangents: (
    _alike.bind(*primals),
    tangents[0],
)


def key_implementation(dtype: Any) -> Any:
    """How arrays of random keys of a dtype work, as ``jax.random`` takes it."""
    return dtype._impl


def concrete_mesh() -> jax.sharding.Mesh | None:
    """The mesh with devices that ``jax.set_mesh`` has set; inside traces, too."""
    mesh = _mesh.get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


# What JAX traces under, as a key.
context_of_traces: Callable[[], tuple[Any, ...]] = _config.trace_context


def trace_context() -> dict[str, Any]:
    """What JAX traces under, by name: its configuration, the mesh, our defaults."""
    context: Any = _config.trace_context_names(), _config.trace_context()
    names, values = map(list, context)
    ours = slice(_PLACE_OF_DEFAULTS, _PLACE_OF_DEFAULTS + 2)
    defaults, flags = values[ours]
    del names[ours], values[ours]
    theirs = dict(zip(names, values, strict=True))
    return theirs | dict(sorted([*(flags or ()), *(defaults or ())]))


_PLACES = {"lax": jax.lax, "numpy": jax.numpy, "nn": jax.nn, "random": jax.random}
_code_of = operator.attrgetter("__code__")


def as_imported(*names: str) -> Callable[[], bool]:
    """Tells whether JAX's functions are those it had when this package was imported.

    Libraries that quantize or record put functions of their own in place of JAX's,
    or other code into these, for a while.

    Args:
        *names: Which functions count, as ``lax.add``; all 700 if none is named.
    """
    if 0 < len(names) < 4:
        return _few_as_imported(*names)
    chosen: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
    for place, entries in ((name, vars(module)) for name, module in _PLACES.items()):
        found = [
            name
            for name, x in entries.items()
            if callable(x) and (not names or f"{place}.{name}" in names)
        ]
        if found:
            chosen.append((operator.itemgetter(*found, found[0]), entries))

    def attributes_now() -> list[Any]:
        return [pick(entries) for pick, entries in chosen]

    attributes = attributes_now()
    written = [x for x in itertools.chain(*attributes) if inspect.isfunction(x)]
    codes = [*map(_code_of, written)]

    def holds() -> bool:
        # Compared in C: 20 us for all, 1 us for some.
        return attributes_now() == attributes and [*map(_code_of, written)] == codes

    return holds


def _few_as_imported(*names: str) -> Callable[[], bool]:
    watched = [
        (vars(_PLACES[place]), name, function, getattr(function, "__code__", None))
        for place, name in (path.split(".") for path in names)
        for function in [getattr(_PLACES[place], name)]
    ]

    def holds() -> bool:
        # 0.1 us for each; an eager operation takes 4.
        for entries, name, function, code in watched:
            if entries[name] is not function:
                return False
            if getattr(function, "__code__", None) is not code:
                return False
        return True

    return holds


is_as_imported = as_imported()


def environment() -> dict[str, str]:
    """The variables of the environment that JAX reads when it is imported."""
    return {name: os.environ[name] for name in os.environ if name.startswith("JAX_")}


def follow_environment(before: dict[str, str]) -> None:
    """Gives JAX what the environment says now and did not when JAX was imported."""
    for name, text in environment().items():
        option = name.lower()
        if before.get(name) == text or option not in jax.config.values:
            continue
        current = jax.config.values[option]
        value: Any = text
        if isinstance(current, bool):
            value = text.lower() in ("y", "yes", "t", "true", "on", "1")
        elif isinstance(current, (int, float)):
            value = type(current)(text)
        jax.config.update(option, value)


# Programs while JAX records them.


class Recorded(NamedTuple):
    """A part of a program.

    Attributes:
        function: Computes its outputs from its inputs.
        inputs: The types of these.
        are_constants: Which of the inputs are arrays that the program holds.
        text: The same for parts that do the same.
    """

    function: Callable[..., list[Any]]
    inputs: list[Any]
    are_constants: list[bool]
    text: str


def recording_point() -> tuple[Any, int] | None:
    """Where the innermost trace is in the program that it records, if it does."""
    trace = _core.trace_ctx.trace
    if not isinstance(trace, _partial_eval.DynamicJaxprTrace):
        return None
    return trace, len(trace.frame.tracing_eqns)


def recorded_since(point: tuple[Any, int], outputs: list[Any]) -> Recorded:
    """What computes some arrays, as far as it was recorded since a point."""
    trace, start = point
    wanted = [x.val for x in outputs if isinstance(x, Tracer) and x._trace is trace]
    equations, needed = _recorded_for(wanted, trace, start)
    made = {x for equation in equations for x in equation.outvars}
    read = [x for equation in equations for x in equation.invars]
    given = needed - made
    inputs = [*dict.fromkeys([x for x in read if isinstance(x, _core.Var)])]
    inputs = [x for x in inputs if x in given]
    out = [x for x in wanted if x in made]
    return _recorded(inputs, out, equations, trace.frame)


def _recorded_for(wanted: list[Any], trace: Any, start: int) -> Any:
    """The equations that some values need, and all that these read."""
    needed = {x for x in wanted if isinstance(x, _core.Var)}
    equations = []
    for entry in reversed(trace.frame.tracing_eqns[start:]):
        # What is not needed has been dropped: its weak reference is dead.
        found = entry() if isinstance(entry, weakref.ref) else entry
        if found is None or not (found.effects or needed & {*found.outvars}):
            continue
        read = [x.val for x in found.in_tracers]
        needed |= {x for x in read if isinstance(x, _core.Var)}
        parts = found.primitive, found.params, found.effects, found.source_info
        equations.append(_core.JaxprEqn(read, found.outvars, *parts, found.ctx))
    equations.reverse()
    return equations, needed


def recorded_for(outputs: list[Any]) -> list[Any]:
    """The equations that the innermost trace has recorded for some arrays."""
    point = recording_point()
    if point is None:
        return []
    trace, _ = point
    wanted = [x.val for x in outputs if isinstance(x, Tracer) and x._trace is trace]
    return _recorded_for(wanted, trace, 0)[0]


def _recorded(inputs: Any, out: Any, equations: Any, frame: Any) -> Recorded:
    effects = _partial_eval.make_jaxpr_effects((), inputs, out, equations)
    unnamed = frame.debug_info._replace(arg_names=None, result_paths=None)
    program = _core.Jaxpr((), inputs, out, equations, effects, unnamed)

    def function(*values: Any) -> list[Any]:
        given = [
            new_ref(value) if isinstance(x.aval, _hijax.AbstractRef) else value
            for x, value in zip(inputs, values, strict=True)
        ]
        return _core.eval_jaxpr(program, (), *given)

    types = [getattr(x.aval, "inner_aval", x.aval) for x in inputs]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
    are_constants = [x in frame.constvar_to_val for x in inputs]
    return Recorded(function, shapes, are_constants, str(program))


# What runs when a function is called eagerly.


class Step(NamedTuple):
    """An operation, or a whole program where a function of JAX is compiled.

    Attributes:
        program: Computes a list of outputs from the inputs.
        inputs: Stand-ins, which other steps have for outputs, or values.
        outputs: Stand-ins.
    """

    program: Callable[..., list[Any]]
    inputs: list[Any]
    outputs: list[Any]


class _EagerTrace(_core.Trace):
    """Notes the steps of an eager call, knowing only the types of its arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        found, effects = primitive.abstract_eval(*map(jax.typeof, args), **params)
        if effects:
            raise NotImplementedError(f"{primitive} does more than to compute.")
        types = found if primitive.multiple_results else [found]
        outputs = [Tracer(self, kind) for kind in types]
        program = functools.partial(_evaluate_alone, primitive, params)
        self.steps.append(Step(jax.jit(program), [*args], outputs))
        return outputs if primitive.multiple_results else outputs[0]

    def process_custom_jvp_call(self, *args: Any, **_: Any) -> Any:
        _, function, _, inputs = args
        return function.call_wrapped(*inputs)

    def stage_value(self, val: Any) -> Any:
        return val


def _evaluate_alone(primitive: Any, params: Any, *values: Any) -> list[Any]:
    out = primitive.bind(*values, **params)
    return [*out] if primitive.multiple_results else [out]


def eager_steps(
    function: Callable[..., Any], types: list[Any]
) -> tuple[list[Any], list[Step], Any]:
    """The steps of an eager call with arrays of some types.

    Returns:
        Stand-ins for the arguments; the steps; the stand-in for the result.

    Raises:
        Exception: If the function looks at values, or does more than to compute; and
            whatever it raises.
    """
    trace = _EagerTrace()
    given = [Tracer(trace, kind) for kind in types]
    with _core.set_current_trace(trace):
        result = function(*given)
    return given, trace.steps, result


def compiles_eagerly() -> bool:
    """Whether eager calls run programs as they are: not to find errors, or not at all.

    While JAX looks for NaNs, or compiles nothing, its own functions say where.
    """
    return not (
        _config.debug_nans.value
        or _config.debug_infs.value
        or _config.disable_jit.value
        or _config.debug_key_reuse.value
    )


# Programs as JAX records them; what is public of them is read by `jaxprs`.


def evaluate(equation: Any, values: list[Any]) -> list[Any]:
    """The outputs of one equation for concrete inputs."""
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        out = primitive.bind(*values, **params)
    return [*out] if primitive.multiple_results else [out]


def as_function(program: Any) -> Callable[..., list[Any]]:
    """A program, closed over its constants, as a compiled function."""
    return jax.jit(_core.jaxpr_as_fun(program))


def scopes_of(equation: Any) -> list[tuple[str, bool]]:
    """The name stack of an equation: names, and whether each is that of a transform."""
    return [
        (entry.name, isinstance(entry, _source_info.Transform))
        for entry in equation.source_info.name_stack.stack
    ]


def frames_of(equation: Any) -> list[tuple[str, int, str]]:
    """File, line and function that recorded an equation, innermost first; not JAX's."""
    return [
        (frame.file_name, frame.start_line, frame.function_name)
        for frame in _source_info.user_frames(equation.source_info.traceback)
    ]


# Programs that are one operation to whoever looks at a model.
_KERNELS = ("pallas_call", "core_map", "run_state")


def programs_in(equation: Any) -> list[Any]:
    """All programs in the parameters of an equation, without their constants."""
    if equation.primitive.name in _KERNELS:
        return []
    return [*_core.jaxprs_in_params(equation.params)]


# Values that `jax.checkpoint` keeps.

# What a policy may answer for a value, besides a boolean.
RECOMPUTE: Any = _partial_eval.Recompute
# In the memory of the host: JAX takes all other kinds of memory for the device's.
OFFLOAD: Any = _partial_eval.Offloadable(src="device", dst="pinned_host")


def is_naming(primitive: Any) -> bool:
    """Whether a primitive is that of ``jax.ad_checkpoint.checkpoint_name``."""
    return primitive is _ad_checkpoint.name_p


def given_name(equation: Any) -> str | None:
    """The name that an equation gives to a value, if it does that."""
    if is_naming(equation.primitive):
        return equation.params["name"]
    # With the option jax_remat3.
    prim = equation.params.get("_prim")
    is_name = type(prim).__name__.startswith("CheckpointName")
    return prim.params["name"] if prim is not None and is_name else None


def kinds_of_memory() -> list[str]:
    """The memories of the devices that a program is for, as far as that is known."""
    mesh, chosen = concrete_mesh(), jax.config.values["jax_default_device"]
    if mesh is not None:
        chosen = mesh.devices.flat[0]
    elif not isinstance(chosen, jax.Device):
        chosen = jax.local_devices(backend=chosen)[0]
    return [memory.kind for memory in chosen.addressable_memories()]


def is_on_host(aval: Any) -> bool:
    """Whether an array of a type is in the memory of the host, by the program."""
    return getattr(aval, "memory_space", None) == _core.MemorySpace.Host
