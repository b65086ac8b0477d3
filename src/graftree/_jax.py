"""Wraps JAX API that is private, experimental or differs between versions.

The API of its registries of pytrees is beside it, in `_jax_registries.py`.

Supported: JAX 0.10.2 to 0.12. Everything else in the package uses documented JAX.

`_jax_names` looks up names that no documentation promises; if a JAX lacks one, or it
works differently there, it says once what is off.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import traceback
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core
import numpy as np

from graftree import _jax_names, _python

Ref = jax.Ref
new_ref = jax.new_ref
Tracer = jax.core.Tracer
# Its flags are not declared.
config: Any = jax.config

# ---------------------------------------------------------------------------- traces


def _tells_apart(token: Callable[[], Any]) -> bool:
    """Whether tokens of different traces differ, and those of one trace don't."""
    tokens = [token()]

    def outer() -> None:
        tokens.append(token())
        jax.vmap(lambda _: tokens.append(token()))(np.zeros(1))
        tokens.append(token())

    jax.make_jaxpr(outer)()
    tokens.append(token())
    top, in_jit, in_vmap, in_jit_again, top_again = tokens
    distinct = {id(top), id(in_jit), id(in_vmap)}
    return top is top_again and in_jit is in_jit_again and len(distinct) == 3


def _by_attribute(state: Any) -> Callable[[], Any]:
    # It is the weak reference that JAX itself keeps on each trace, so that to hold the
    # token does not keep the trace (and its tracers) alive. In C.
    return functools.partial(getattr, state, "value")


class _Token:
    """Stands for a trace while somebody holds it and may compare it."""

    def __init__(self, state: Any) -> None:
        self.state = state


def _by_states(get: Callable[[], Any]) -> Callable[[], Any]:
    """Makes tokens of states that equal each other while they stand for one trace."""
    tokens = list[weakref.ref[_Token]]()  # of all threads: outside of traces it is one

    def token() -> Any:
        state = get()
        for alive in [reference() for reference in [*tokens]]:
            if alive is not None and alive.state == state:
                return alive
        new = _Token(state)
        tokens.append(weakref.ref(new, tokens.remove))
        return new

    return token


def _find_token() -> Callable[[], Any]:
    ways = {
        "jax._src.core:trace_state": _by_attribute,
        "jax.extend.core:get_opaque_trace_state": _by_states,
    }
    for name, make in ways.items():
        with contextlib.suppress(Exception):  # any error is possible
            token = make(_jax_names.find(name))
            if _tells_apart(token):
                return token
        _jax_names.tell(name)
    raise ImportError(
        f"This version of graftree can't tell the traces of JAX {jax.__version__} "
        "apart, so updates could be lost. Install a newer graftree, or an older JAX."
    )


# A token of the innermost JAX trace of this thread, compared by identity. Every object
# that is made or written asks for it.
current_trace = _find_token()

# The token while nothing is traced.
with jax.core.eval_context():
    no_trace = current_trace()


def is_tracing() -> bool:
    """Whether a JAX transform is tracing in this thread."""
    return current_trace() is not no_trace


def _chain(find_top_trace: Any) -> list[Any]:
    trace, chain = find_top_trace(()), list[Any]()
    while trace is not None:
        chain.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return chain


def _kinds_of_traces(find_top_trace: Any) -> tuple[Any, type]:
    """Returns it with the type of the traces that record programs.

    It tells three traces apart, of which one records and one runs.
    """
    chains = list[list[type]]()

    def note(_: Any) -> None:
        chains.append([*map(type, _chain(find_top_trace))])

    jax.make_jaxpr(jax.vmap(note))(np.zeros(1))
    [[_, recording, running]] = chains
    if recording is running or [running] != [*map(type, _chain(find_top_trace))]:
        raise _jax_names.ChangedError
    return find_top_trace, recording


@_jax_names.by("jax.extend.core:find_top_trace", prepare=_kinds_of_traces)
def _traces(find_top_trace: Any, recording: type) -> list[tuple[Any, bool]] | None:
    """Lists the traces around this call, innermost first; whether each records.

    ``None`` if that is unknown.
    """
    return [(x, type(x) is recording) for x in _chain(find_top_trace)] or None


def is_staging() -> bool | None:
    """Whether the innermost trace records a program, as jit does; ``None``: unknown."""
    traces = _traces()
    if traces is None:
        return None if is_tracing() else False
    return traces[0][1]


def recording_trace() -> Any:
    """Stands for the innermost trace that records a program; ``None`` for none.

    Where that is unknown, it is a new object each time.
    """
    traces = _traces()
    if traces is None:
        return object() if is_tracing() else None
    recording = [trace for trace, records in traces if records]
    return weakref.ref(recording[0]) if recording else None


def runs_eagerly() -> bool:
    """Whether the current call is not part of a program that JAX compiles."""
    return recording_trace() is None and not config.jax_disable_jit


def order_of_derivative() -> int:
    """Counts how often the current call may be differentiated or mapped, at most.

    Raises:
        TypeError: If that is unknown.
    """
    traces = _traces() if is_tracing() else [None]
    if traces is None:
        raise TypeError("It is unknown which traces there are.")
    return len(traces) - 1


# JAX uses a program only where these contexts have the values that it was traced with.
traced_apart: Callable[[int], Any] = jax.make_user_context()
# The defaults with which layers are made.
built_apart: Callable[[Any], Any] = jax.make_user_context()
# Values that a trace reads besides its arguments: defaults of a thread, and flags.
_defaults: Any = jax.make_user_context()
_flags: Any = jax.make_user_context()


class _OwnSettings(frozenset[tuple[str, Any]]):
    """Settings of ours in JAX's context: pairs of a name and a value."""


def trace_under_defaults(defaults: Iterable[tuple[str, Any]]) -> None:
    """Makes this thread use only programs traced under these from now on."""
    _defaults(_OwnSettings(defaults) or None).__enter__()


def trace_under_flags(flags: Iterable[tuple[str, Any]]) -> None:
    """Makes the process use only programs traced under these from now on."""
    _flags.set_global(_OwnSettings(flags) or None)


def _checked_settings(trace_context: Any, names: Any) -> tuple[Any, Any]:
    settings = trace_context()
    with jax.default_matmul_precision("float32"):
        changed = trace_context()
    hash(settings)
    if type(settings) is not tuple or not changed != settings == trace_context():
        raise _jax_names.ChangedError
    return trace_context, names


@_jax_names.by(
    "jax._src.config:trace_context",
    "jax._src.config:trace_context_names",
    prepare=_checked_settings,
)
def trace_context(context: Any, names: Any) -> tuple[tuple[str, Any], ...]:
    """Lists what a trace depends on besides its arguments; see `settings_in`."""
    return (*zip(names(), context(), strict=True),)


@trace_context.otherwise
def _() -> tuple[tuple[str, Any], ...]:
    return ("user_context", _flags.value), ("user_context", _defaults.value)


def settings_in(context: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a trace's context by name: JAX's settings, the mesh, our settings."""
    # What `jax.make_user_context` adds has one name.
    parts = [x for name, x in context if name == "user_context" and x is not None]
    ours = [pair for x in parts if type(x) is _OwnSettings for pair in x]
    users = tuple([x for x in parts if type(x) is not _OwnSettings])
    return dict(context) | {"user_context": users} | dict(sorted(ours))


@functools.cache
def _kinds_of_derivatives(_: Any) -> frozenset[type]:
    """Returns the types of tracers that carry derivatives, by a setting of JAX."""
    kinds = list[type]()

    def f(x: Any) -> Any:
        kinds.append(type(x))
        return x

    with jax.core.eval_context():
        jax.jvp(f, (1.0,), (1.0,))
        jax.linearize(f, 1.0)
        jax.vjp(f, 1.0)
    return frozenset(kinds)


def is_differentiated(x: Any) -> bool:
    """Whether ``x`` carries a derivative: a tracer of JAX's forward mode."""
    setting = getattr(config, "jax_use_direct_linearize", None)
    return isinstance(x, Tracer) and type(x) in _kinds_of_derivatives(setting)


# ---------------------------------------------------------------------------- arrays


def is_data_type(kind: type) -> bool:
    """Whether instances of ``kind`` are arrays: JAX or NumPy arrays, tracers, refs."""
    return issubclass(kind, (jax.Array, np.ndarray, Ref, Tracer))


def is_ref(x: Any) -> bool:
    """Whether ``x`` is an array ref, concrete or traced."""
    # `isinstance(x, Ref)` says the same, and takes 15 times as long for an array.
    kind = type(x)
    if kind is Ref or not isinstance(x, Tracer):
        return kind is Ref
    is_ref_type = _are_refs.get(type(x.aval))
    if is_ref_type is None:
        is_ref_type = _are_refs[type(x.aval)] = isinstance(x, Ref)
    return is_ref_type


# For each type of the types of tracers.
_are_refs: dict[type, bool] = {}


class _Concrete(dict[type, bool]):
    def __missing__(self, kind: type) -> bool:
        with jax.core.eval_context():
            self[kind] = is_concrete = kind is type(jax.device_put(np.zeros(())))
        return is_concrete


# Whether a type is that of JAX's arrays with values, which are not random keys.
is_concrete: Callable[[type], bool] = _Concrete().__getitem__


def flatten_one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Lists a registered pytree's children as (key entry, child), and a treedef.

    The treedef's ``unflatten`` takes the list of children and gives a new node.
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
_HIDDEN = tuple(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), *part.split("/"))
    for part in "_jax.py core debugging interop memory nn/support transforms".split()
)
_OF_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


def _hide(register: Callable[[str], None]) -> None:
    for path in _HIDDEN:
        register(path)


_jax_names.by("jax._src.source_info_util:register_exclusion")(_hide)()
_jax_names.by("jax._src.traceback_util:register_exclusion")(_hide)()


def hide_frames(error: Exception) -> None:
    """Leaves out the frames of JAX and ours; call it where no frame is a user's.

    JAX does so below its own functions, of which the innermost called the user's.
    """
    if config.jax_traceback_filtering in ("off", "remove_frames"):
        return
    shown = None
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not frame.f_code.co_filename.startswith((*_HIDDEN, _OF_JAX)):
            shown = types.TracebackType(shown, frame, frame.f_lasti, line)
    error.with_traceback(shown)


class _HiddenFrames(contextlib.AbstractContextManager[Any]):
    """A context that hides frames in errors, with its own."""

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, Exception):
            hide_frames(error)


hidden_frames = _HiddenFrames()


# Where JAX unflattens trees.
_UNFLATTENING = {
    *("jax.tree", "jax.tree_util", "jax._src.tree"),
    *("jax._src.tree_util", "jax._src.flattree"),
}
_ANALYSES = {"eval_shape", "make_jaxpr", "make_jaxpr_f"}


def caller_of_unflatten() -> types.FrameType | None:
    """Finds JAX's function that unflattens a tree, unless on behalf of other code.

    If it calls a function of the user, these are its arguments. Call it in a function
    that an object's own one to unflatten calls.
    """
    for frame in _python.frames_above(2):
        module = _python.module_of(frame)
        if not module.startswith(("jax.", "graftree.core")):
            return None
        if module.startswith("jax.") and module not in _UNFLATTENING:
            return frame
    return None


def is_of_jax(frame: types.FrameType) -> bool:
    """Whether a running function is one of JAX's."""
    return frame.f_code.co_filename.startswith(_OF_JAX)


def is_analysis(frame: types.FrameType) -> bool:
    """Whether a function of JAX only traces others for their shapes or programs."""
    return frame.f_code.co_name in _ANALYSES and is_of_jax(frame)


@_jax_names.by("jax._src.tree_util:prefix_errors")
def prefix_error(
    prefix_errors: Any,
    prefix: Any,
    full: Any,
    is_leaf: Callable[[Any], bool],
    name: str,
) -> str:
    """Returns the error where a tree, ``name``, is not a prefix of another one."""
    first, *_ = prefix_errors(prefix, full, is_leaf)
    return str(first(name))


@prefix_error.otherwise
def _(prefix: Any, full: Any, is_leaf: Callable[[Any], bool], name: str) -> str:
    try:
        jax.tree.map(lambda *_: None, prefix, full, is_leaf=is_leaf)
    except ValueError as error:
        return f"{name}: {error}"
    return name


def is_pytree_type(kind: type) -> bool:
    """Whether exactly this type is registered as a pytree node."""
    return jax.tree_util.default_registry.is_node(kind)


def register_leafless(kind: type) -> None:
    """Registers a class whose instances are leafless pytrees, rebuilt by calling it."""
    jax.tree_util.register_pytree_node(
        kind, lambda _: ((), None), lambda _aux, _children: kind()
    )


@_jax_names.by("jax.experimental.layout:Format")
def is_format(kind: Any, x: Any) -> bool:
    """Whether ``x`` is a `Format`: a memory layout together with a sharding."""
    return isinstance(x, kind)


is_format.otherwise(lambda _: False)


def _checked_checkify(checkify: Any, user_checks: Any) -> tuple[Any, Any]:
    error, out = checkify(jax.lax.sin, errors=user_checks)(0.0)
    if error.get() is not None or out != 0:
        raise _jax_names.ChangedError
    return checkify, user_checks


@_jax_names.by(
    "jax.experimental.checkify:checkify",
    "jax.experimental.checkify:user_checks",
    prepare=_checked_checkify,
)
def checkify(function: Any, user_checks: Any) -> tuple[Any, Any]:
    """JAX's function of this name, and its default checks; ``None`` without them."""
    return function, user_checks


@functools.cache
def ad_checkpoint() -> Any:
    """Returns the module ``jax.ad_checkpoint``, which ``import jax`` does not load."""
    return importlib.import_module("jax.ad_checkpoint")


@_jax_names.by("jax.core:ShapedArray.manual_axis_type")
def varying(of_type: Any, kind: Any) -> frozenset[Any]:
    """Names the axes of `shard_map` along which values of a type may differ."""
    return of_type.__get__(kind).varying


varying.otherwise(lambda _: frozenset[Any]())


def as_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Gives an array the type of those that may differ along these axes, too."""
    missing = tuple(axes - varying(jax.typeof(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


# Values that lie where others do. The `shard_alike` of JAX 0.10 was a mere hint.


def _make_alike(primitive: Any, jvps: Any, batchers: Any, register: Any) -> tuple[Any]:
    alike = primitive("placed_alike")
    alike.def_impl(lambda new, old: new)
    alike.def_abstract_eval(lambda new, old: new)
    # Not cacheable: JAX lowers cached code apart, where arguments have no place.
    register(alike, _lower_alike, cacheable=False)
    batchers[alike] = functools.partial(_map_alike, alike)
    # Derivatives are those of the first.
    jvps[alike] = lambda primals, tangents: (alike.bind(*primals), tangents[0])

    def derived(x: Any) -> Any:
        return jax.jvp(lambda x: alike.bind(x, x), (x,), (x,))

    # A program with it may be compiled much later, where nothing could stand in for it.
    jax.jit(jax.vmap(derived)).lower(np.zeros((1, 1), np.float32))
    return (alike,)


@_jax_names.by(
    "jax.extend.core:Primitive",
    "jax.interpreters.ad:primitive_jvps",
    "jax.interpreters.batching:primitive_batchers",
    "jax.interpreters.mlir:register_lowering",
    prepare=_make_alike,
)
def _alike(operation: Any) -> Any:
    """Returns the first of two arrays of one shape, as an operation of a program."""
    return operation


def placed_alike(new: Any, old: Any) -> Any:
    """Returns the first of two arrays of one shape, placed like the other one.

    The place is known if ``old`` is an argument of the program, as the program is
    lowered for arguments that lie there. The compiler is free to put an output
    elsewhere: it follows the inputs of its computation.
    """
    alike = _alike()
    return new if alike is None else alike.bind(new, old)


def _lower_alike(_: Any, new: Any, old: Any) -> list[Any]:
    return [_placed(new, old) or new]


@_jax_names.by(
    "jaxlib.mlir.ir:BlockArgument", "jaxlib.mlir.dialects.sdy:ShardingConstraintOp"
)
def _placed(argument_of: Any, constrain: Any, new: Any, old: Any) -> Any:
    """Gives a value the sharding of a program's argument; ``None`` for others."""
    try:
        argument = argument_of(old)
    except ValueError:  # something that the program computes
        return None
    attributes: Any = argument.owner.owner.attributes
    of_argument = {}
    if "arg_attrs" in attributes:
        of_argument = attributes["arg_attrs"][argument.arg_number]
    if "sdy.sharding" not in of_argument:
        return None
    return constrain(new, of_argument["sdy.sharding"]).result


def _map_alike(alike: Any, values: Any, axes: Any) -> tuple[Any, Any]:
    new, old = values
    axis, other = axes
    if axis is None or other is None:  # only one is mapped
        return new, axis
    return alike.bind(new, jax.numpy.moveaxis(old, other, axis)), axis


def concrete_mesh() -> jax.sharding.Mesh | None:
    """Returns the mesh with devices that ``jax.set_mesh`` has set; in traces, too."""
    try:
        with jax.core.eval_context() if is_tracing() else contextlib.nullcontext():
            mesh: Any = jax.sharding.get_mesh()
    except ValueError:  # in a function whose axes have names
        mesh = _mesh_within()
    return None if mesh is None or mesh.empty else mesh


@_jax_names.by("jax._src.mesh:get_concrete_mesh")
def _mesh_within(get_concrete_mesh: Any) -> Any:
    mesh = get_concrete_mesh()
    if not isinstance(mesh, jax.sharding.Mesh):
        raise _jax_names.ChangedError
    return mesh


# The work of an eager call of a function, as one program.


class _ApartTrace(jax.core.Trace):
    """Hands each operation to another trace, apart from the others.

    An operation, or a whole program where a function of JAX is compiled, gets barriers
    around it, and arrays in the usual order of axes, as if it ran by itself.
    """

    def __init__(self, set_trace: Any, outer: Any, in_order: Any) -> None:
        super().__init__()
        self._outer = functools.partial(set_trace, outer)
        self._in_order = in_order

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with self._outer():
            # Otherwise XLA would compute with constants beforehand.
            args = [x if isinstance(x, Tracer) else _barrier(x) for x in args]
            results = primitive.bind(*args, **params)
            return _barrier(jax.tree.map(self._in_order, results))

    def process_custom_jvp_call(self, *args: Any, **_: Any) -> Any:
        _, function, _, inputs = args
        return function.call_wrapped(*inputs)

    def stage_value(self, val: Any) -> Any:
        return val


_barrier = jax.lax.optimization_barrier


def _in_order(constrain: Any, layout: Any, x: Any) -> Any:
    """Gives an array the order of programs' arguments; XLA would choose one."""
    if x.ndim < 2 or jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return constrain(x, layout(tuple(range(x.ndim))))


def _called_apart(
    set_trace: Any,
    take_trace: Any,
    constrain: Any,
    layout: Any,
    function: Callable[..., Any],
    *arrays: Any,
) -> Any:
    in_order = functools.partial(_in_order, constrain, layout)
    with take_trace() as outer, set_trace(_ApartTrace(set_trace, outer, in_order)):
        return function(*arrays)


def _checked_apart(*ways: Any) -> tuple[Any, ...]:
    call = functools.partial(_called_apart, *ways, jax.lax.neg)
    operations = [str(x.primitive) for x in jax.make_jaxpr(call)(np.ones((1, 1))).eqns]
    if operations != ["neg", "layout_constraint", "optimization_barrier"]:
        raise _jax_names.ChangedError
    return ways


@_jax_names.by(
    "jax.extend.core:set_current_trace",
    "jax.extend.core:take_current_trace",
    "jax.experimental.layout:with_layout_constraint",
    "jax.experimental.layout:Layout",
    prepare=_checked_apart,
)
def _ways_to_trace(*ways: Any) -> tuple[Any, ...]:
    return ways


@functools.cache
def can_call_apart() -> bool:
    """Whether this version of JAX lets `call_apart` do its work."""
    return _ways_to_trace() is not None


def call_apart(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a function in a trace, so that XLA sees its operations one by one.

    The program computes the same as an eager call, bit by bit.
    """
    return _called_apart(*_ways_to_trace(), function, *arrays)


# Programs as JAX records them; `jaxprs` reads their public parts.


def _kind_of_transforms(transform: Any, current: Any) -> tuple[type]:
    with transform("a"), jax.named_scope("b"):
        first, second = current().stack[-2:]
    if (first.name, second.name) != ("a", "b") or type(first) is type(second):
        raise _jax_names.ChangedError
    return (type(first),)


@_jax_names.by(
    "jax.extend.source_info_util:transform_name_stack",
    "jax.extend.source_info_util:current_name_stack",
    prepare=_kind_of_transforms,
)
def scopes_of(of_transforms: type, equation: Any) -> list[tuple[str, bool]]:
    """Returns an equation's name stack: names, and whether each is a transform's."""
    stack = equation.source_info.name_stack.stack
    return [(entry.name, isinstance(entry, of_transforms)) for entry in stack]


@scopes_of.otherwise
def _(_: Any) -> list[tuple[str, bool]]:
    return []


@_jax_names.by("jax.extend.core:JaxprEqn.ctx")
def context_of(slot: Any, equation: Any) -> Any:
    """Returns the settings of JAX under which an equation was recorded.

    Where they are unknown, it is a new object each time.
    """
    return slot.__get__(equation)


context_of.otherwise(lambda _: object())


@_jax_names.by("jax.extend.source_info_util:summarize")
def summary_of(summarize: Any, equation: Any, most: int) -> str:
    """Returns the lines that recorded an equation, innermost last, without JAX's."""
    summary = summarize(equation.source_info, num_frames=most)
    if not isinstance(summary, str):
        raise _jax_names.ChangedError
    return summary


summary_of.otherwise(lambda *_: "")
