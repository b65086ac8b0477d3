"""Values that Modules record while they run, and calls that return them.

A Module records with `sow` and `perturb`. During a call, `capture` gives every Module
below its subject a data attribute, one Variable per recorded type, each holding a dict
``name -> value``:

    vars(module)["__captures__"] = (Intermediate({}), Perturbation({}), ...)

Being state like any other, these buffers go through lifted transforms. `sow` and
`perturb` write to the buffer of exactly their type, under the ownership rule of
Variables: a value of an inner trace that never comes back raises instead of leaking.
Invariants:

- A call that raises leaves no buffer behind, nor do copies of Modules it made.
- A nested call on the same Module puts its own buffers in front of those of the outer
  call: a type that both record goes only to the inner call, other types still reach the
  outer one. The outer buffers are back when the inner call ends.
- Two threads that capture the same Module take turns, and a third thread that calls it
  does not see the buffers.

With ``method_outputs=``, an observer (`methods.observed`) also records the output of a
call ``module.f(x)``, in each buffer whose metadata says so. Metadata are structure: so
a compiled function that was traced for such buffers records outputs, and no other one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from graftree import config
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import traversals
from graftree.core.objects import bookkeeping, methods, pytrees, running
from graftree.core.objects.running import ModuleCall
from graftree.core.states import flat_states, states
from graftree.core.variables import kinds, operators, variables
from graftree.core.variables.variables import MISSING, Variable

T = TypeVar("T")

# The attribute that holds the buffers.
BUFFERS = "__captures__"

Buffer = Variable[dict[str, Any]]
_PLAIN = {"hijax": False, "ref": False, "eager_sharding": True}
# The metadata of a buffer that takes the outputs of methods.
_OUTPUTS = {**_PLAIN, "takes_outputs": True}

# Id of a captured Module -> the thread that captures it. The capture keeps it alive.
_capturing_threads: dict[int, int] = {}
# Guards it, and is notified when Modules get free.
_turn = threading.Condition()


def tuple_init() -> tuple[()]:
    """Gives the empty tuple, to which `tuple_reduce` appends.

    Example:
        >>> nnx.module.tuple_init()
        ()
    """
    return ()


def tuple_reduce(xs: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
    """Appends one more value.

    Args:
        xs: The values so far.
        x: The next value.

    Returns:
        A new tuple.

    Example:
        >>> nnx.module.tuple_reduce((1, 2), 3)
        (1, 2, 3)
    """
    return (*xs, x)


class Sower:
    """Methods of a Module that record values: `sow` and `perturb`."""

    __slots__ = ()

    def sow(
        self,
        variable_type: type[Variable[Any]] | str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = tuple_reduce,
        init_fn: Callable[[], Any] = tuple_init,
        capture_noop: bool | None = None,
    ) -> bool:
        """Records a value for the caller of this Module through `capture`.

        Args:
            variable_type: The kind of Variable to record it as, or its registered
                name.
            name: The name to record it under; it may be that of an attribute.
            value: The value, any pytree.
            reduce_fn: ``(recorded so far, value) -> recorded``; appends by default, so
                that each call adds one entry.
            init_fn: Makes the first argument of the first call of ``reduce_fn``.
            capture_noop: Whether to do nothing outside a capture, instead of storing
                the value in an attribute, which is deprecated. ``None`` takes the flag
                ``nnx_sow_capture_noop``.

        Returns:
            Whether the value was stored.

        Raises:
            ValueError: Outside a capture, if the attribute is not a Variable of exactly
                this type.
            TraceContextError: If another trace owns this Module or its buffers.

        Example:
            >>> class Doubling(nnx.Module):
            ...     def __call__(self, x):
            ...         self.sow(nnx.Intermediate, "input", x)
            ...         return 2 * x
            >>> y, seen = nnx.capture(Doubling(), nnx.Intermediate)(3)
            >>> y, seen["input"].get_value()
            (6, (3,))
        """
        add = _make_update(value, reduce_fn, init_fn)
        recorded = _change(self, "sow", variable_type, name, add, capture_noop)
        return recorded is not MISSING

    def perturb(
        self,
        name: str,
        value: T,
        variable_type: type[Variable[Any]] | str = kinds.Perturbation,
        capture_noop: bool | None = None,
    ) -> T:
        """Adds a recorded zero to a value, so that its gradient can be computed.

        The gradient with respect to the recorded perturbation, fed back through
        ``capture(..., init=perturbations)``, is that of ``value``.

        Args:
            name: The name to record the perturbation under.
            value: The value, an array or a pytree of arrays.
            variable_type: The kind of Variable to record it as, or its registered
                name.
            capture_noop: As in `sow`.

        Returns:
            ``value`` plus the perturbation; ``value`` itself if none is recorded.

        Raises:
            ValueError: Outside a capture, if the attribute is not a Variable of this
                type.
            TraceContextError: If another trace owns this Module or its buffers.

        Example:
            >>> class Square(nnx.Module):
            ...     def __call__(self, x):
            ...         return self.perturb("square", x**2)
            >>> x = jnp.array(3.0)
            >>> _, zeros = nnx.capture(Square(), nnx.Perturbation)(x)
            >>> def loss(perturbations):
            ...     return 5 * nnx.capture(Square(), init=perturbations)(x)
            >>> jax.grad(loss)(zeros)["square"][...].item()
            5.0
        """

        def keep(zeros: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, x) if zeros is MISSING else zeros

        x: Any = operators.unwrap(value)
        zeros = _change(self, "perturb", variable_type, name, keep, capture_noop)
        return value if zeros is MISSING else jax.tree.map(operator.add, zeros, x)


# Makes the new record under a name from the old one; `MISSING` if there is none.
_Update = Callable[[Any], Any]


def _make_update(
    value: Any,
    reduce_fn: Callable[[Any, Any], Any] = tuple_reduce,
    init_fn: Callable[[], Any] = tuple_init,
) -> _Update:
    return lambda x: reduce_fn(init_fn() if x is MISSING else x, value)


def _change(
    module: Any,
    method: str,
    variable_type: type[Variable[Any]] | str,
    name: str,
    update: _Update,
    capture_noop: bool | None,
) -> Any:
    """Updates the record under a name, and returns it; `MISSING` if there is none.

    Outside a capture the record is an attribute.
    """
    if isinstance(variable_type, str):
        variable_type = kinds.variable_type_from_name(
            variable_type, allow_register=True
        )
    buffers = _open_buffers(module)
    if buffers is not None:
        return _record(buffers, variable_type, name, update)
    if config.nnx_sow_capture_noop if capture_noop is None else capture_noop:
        return MISSING
    variable = getattr(module, name, MISSING)
    if variable is not MISSING:
        _check_type(variable, variable_type, name, method)
    _warn_outside_capture(method)
    if variable is MISSING:
        new = update(MISSING)
        setattr(module, name, variable_type(new, hijax=False, ref=False))
        return new
    old = variable.get_value()
    new = update(old)
    if new is not old:
        variable.set_value(new)
        variables.note_read(variable)  # a record may be dropped
    return new


def _open_buffers(module: Any) -> tuple[Buffer, ...] | None:
    """Returns the buffers to record to; ``None`` outside a capture.

    A Module with buffers but without an entry in `_capturing_threads` was rebuilt by a
    transform in a capture, so only the thread that traces it has it.
    """
    buffers = vars(module).get(BUFFERS)
    if buffers is None:
        return None
    me = threading.get_ident()
    return buffers if _capturing_threads.get(id(module), me) == me else None


def _record(
    buffers: tuple[Buffer, ...],
    variable_type: type[Variable[Any]],
    name: str,
    update: _Update,
) -> Any:
    """Updates a value in the buffer of its type; `MISSING` if there is none."""
    # Of exactly this type: it does not take in values of subtypes.
    buffer = next((b for b in buffers if type(b) is variable_type), None)
    if buffer is None:
        return MISSING
    entries = buffer.get_raw_value()
    old = entries.get(name, MISSING)
    new = update(old)
    if new is not old:
        # A new dict: an outer trace may hold the old one.
        buffer.set_raw_value({**entries, name: new})
        variables.note_read(buffer)
    return new


def _check_type(variable: Any, expected: type, name: str, method: str) -> None:
    """Raises if an attribute can't be recorded to; `perturb` takes subtypes."""
    kind, takes_subtypes = type(variable), method == "perturb"
    if kind is not expected and not (takes_subtypes and issubclass(kind, expected)):
        is_of_kind = takes_subtypes or issubclass(kind, Variable)
        wanted = f"of type {expected.__name__!r}" if is_of_kind else "a Variable"
        raise ValueError(
            f"Expected {name!r} to be {wanted}, got {kind.__name__!r}.\nUse another "
            f"name, or {method} inside nnx.capture, where any name is allowed."
        )


def _warn_outside_capture(method: str) -> None:
    warnings.warn(
        f"Calling Module.{method}() outside of nnx.capture() is deprecated: it stores "
        "an attribute in the Module. Call the Module through nnx.capture(module, "
        f"<Variable type>), or pass capture_noop=True to {method}().",
        DeprecationWarning,
        stacklevel=4,
    )


# Capturing.


class _Request(NamedTuple):
    """What one use of `capture` asks for."""

    kinds: tuple[type[Variable[Any]], ...]
    init: Mapping[Any, Any] | None
    method_outputs: type[Variable[Any]] | None


def capture(
    fn: Any,
    *var_types: type[Variable[Any]],
    init: Mapping[Any, Any] | None = None,
    method_outputs: type[Variable[Any]] | None = None,
) -> Callable[..., Any]:
    """Makes a function that returns what Modules record while it runs.

    Args:
        fn: A Module, a bound method of one, or a function whose first argument is a
            Module or a node that contains some. If it is a Variable type, it counts as
            the first of ``var_types``, and the result is a decorator.
        *var_types: The types of Variables to return; a subclass does not match.
        init: Values to start recording from, by path and Variable type, e.g. the
            perturbations of an earlier call. They are returned only if their type is in
            ``var_types``.
        method_outputs: Records the output of every method called on a nested Module
            (``__call__`` and public names) as this type, under the name of the method.
            The outermost method is left out if ``fn`` is a bound method.

    Returns:
        A function with the arguments of ``fn``. It returns what ``fn`` returns; with
        ``var_types``, a tuple of that and one State per type, nested by Module path. A
        shared Module records under its first path.

    Raises:
        TypeError: If ``fn`` is not callable, or one of ``var_types`` is not a Variable
            type; in a call, if there is no first argument.
        TraceContextError: In a call, if another trace owns one of the Modules.
        ValueError: In a call, if a recorded name is also the name of a Module that
            recorded something of the same type.

    Example:
        >>> class Block(nnx.Module):
        ...     def __call__(self, x):
        ...         self.sow(nnx.Intermediate, "square", x**2)
        ...         return x + 1
        >>> model = nnx.Sequential(Block(), Block())
        >>> y, seen = nnx.capture(model, nnx.Intermediate)(1)
        >>> y, [seen["layers"][i]["square"].get_value() for i in (0, 1)]
        (3, [(1,), (4,)])
    """
    if _is_variable_type(fn):
        options = {"init": init, "method_outputs": method_outputs}
        return lambda f: capture(f, fn, *var_types, **options)
    kinds = var_types if method_outputs is None else (*var_types, method_outputs)
    if not callable(fn):
        raise TypeError(
            f"nnx.capture expects a Module, a method or a function, got {fn!r} of type "
            f"{type(fn).__name__}."
        )
    for kind in kinds:
        if not _is_variable_type(kind):
            raise TypeError(
                "nnx.capture expects Variable types, such as nnx.Intermediate, got "
                f"{kind!r}."
            )
    request = _Request(kinds, init, method_outputs)
    module: Any = fn  # which has a `__call__`, if it is one

    # Without `updated`, the attributes of a callable object would be copied, too.
    @functools.wraps(module.__call__ if isinstance(fn, Sower) else fn, updated=())
    def captured(*args: Any, **kwargs: Any) -> Any:
        subject = _subject(fn, args, kwargs)
        with _recording_outputs(fn) if method_outputs else contextlib.nullcontext():
            result, recorded = _call(subject, request, lambda: fn(*args, **kwargs))
        if not var_types:
            return result
        return (result, *[_to_state(recorded, var_type) for var_type in var_types])

    return captured


def _is_variable_type(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, Variable)


def _subject(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Finds the node whose Modules record in the call ``fn(*args, **kwargs)``."""
    if isinstance(fn, Sower):
        return fn
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Sower):
        return owner
    if isinstance(fn, functools.partial):
        return _subject(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    if args:
        return args[0]
    first = next(iter(inspect.signature(fn).parameters), "")
    if first in kwargs:
        return kwargs[first]
    raise TypeError(
        f"{getattr(fn, '__name__', fn)} was called through nnx.capture without its "
        "first argument, which must be a Module or a node that contains some."
    )


# The buffers that a call fills, by the path of their Module.
_Recorded = Sequence[tuple[Path, tuple[Buffer, ...]]]


def _call(
    subject: Any, request: _Request, function: Callable[[], Any]
) -> tuple[Any, _Recorded]:
    """Calls, and returns also the records of the Modules in its subject."""
    with _turn:
        modules, claimed = _claim(subject)
    outer = [(module, vars(module).get(BUFFERS)) for _, module in modules]
    result = None
    try:
        recorded = _attach(modules, request)
        result = function()
        return result, recorded
    finally:
        for module, outer_buffers in outer:
            _restore(module, outer_buffers)
        with _turn:
            for module in claimed:
                del _capturing_threads[id(module)]
            _turn.notify_all()
        # In an outer call such copies may have to record for it.
        if all(outer_buffers is None for _, outer_buffers in outer):
            _clean_copies(subject, result)


def _claim(subject: Any) -> tuple[list[tuple[Path, Any]], list[Any]]:
    """Waits until no other thread captures a Module of ``subject``; then they are ours.

    Returns:
        The Modules with their paths, and those of them that no outer call had claimed.
    """
    threads, me = _capturing_threads, threading.get_ident()
    while True:
        modules = _modules_in(subject)
        for _, module in modules:
            bookkeeping.check_owned(module)
        if all(threads.get(id(module), me) == me for _, module in modules):
            claimed = [module for _, module in modules if id(module) not in threads]
            threads.update((id(module), me) for module in claimed)
            return modules, claimed
        _turn.wait()


def _modules_in(node: Any) -> list[tuple[Path, Any]]:
    # Graph mode on purpose: recording works in all modes, and the transforms in the
    # call reject anything they don't support.
    return [
        (path, value)
        for path, value in traversals.iter_graph(node, graph=True)
        if isinstance(value, Sower)
    ]


def _attach(modules: Sequence[tuple[Path, Any]], request: _Request) -> _Recorded:
    recorded = []
    init = _init_by_path(request.init)
    if unknown := init.keys() - {path for path, _ in modules}:
        shown = sorted(paths.to_string(path, root="<root>") for path in unknown)
        warnings.warn(
            f"nnx.capture ignores the values in `init` at {shown}: there is no Module "
            "at these paths.",
            UserWarning,
            stacklevel=4,
        )
    for path, module in modules:
        entries = {kind: dict[str, Any]() for kind in request.kinds}
        entries |= init.get(path, {})
        # Not by the constructor: neither hooks nor the `ref` default are for the dicts.
        outer_buffers = vars(module).get(BUFFERS, ())
        with_outputs = [request.method_outputs]
        with_outputs += map(type, filter(_takes_outputs, outer_buffers))
        buffers = tuple(
            [
                kind.from_metadata(
                    content, _OUTPUTS if kind in with_outputs else _PLAIN
                )
                for kind, content in entries.items()
            ]
        )
        recorded.append((path, buffers))
        further = [buffer for buffer in outer_buffers if type(buffer) not in entries]
        # Last, since it gives a new version to the Module.
        pytrees.store_attribute(module, BUFFERS, (*buffers, *further), True)
    return recorded


def _init_by_path(
    init: Mapping[Any, Any] | None,
) -> dict[Path, dict[type[Variable[Any]], dict[str, Any]]]:
    by_path: dict[Path, dict[type[Variable[Any]], dict[str, Any]]] = {}
    for (*path, name), value in flat_states.flatten_mapping(init or {}).items():
        if isinstance(value, Variable):
            of_type = by_path.setdefault(tuple(path), {}).setdefault(type(value), {})
            of_type[name] = value.get_value()
    return by_path


def _restore(module: Any, outer_buffers: tuple[Buffer, ...] | None) -> None:
    if outer_buffers is not None:
        pytrees.store_attribute(module, BUFFERS, outer_buffers, True)
    elif BUFFERS in vars(module):
        pytrees.Pytree.__delattr__(module, BUFFERS)


def _clean_copies(subject: Any, result: Any) -> None:
    """Takes the buffers off copies of captured Modules that the call made."""
    results = result if isinstance(result, (tuple, list)) else [result]
    returned = [value for value in results if isinstance(value, Sower)]
    for _, module in _modules_in([subject, *returned]):
        if id(module) not in _capturing_threads:
            _restore(module, None)


def _to_state(recorded: _Recorded, var_type: type[Variable[Any]]) -> states.State:
    flat = {
        (*path, name): var_type(value, hijax=False, ref=False)
        for path, buffers in recorded
        for buffer in buffers
        if type(buffer) is var_type
        for name, value in buffer.get_raw_value().items()
    }
    for path in flat:
        above = [path[:end] for end in range(1, len(path)) if path[:end] in flat]
        if above:
            raise ValueError(
                f"nnx.capture: {var_type.__name__} was recorded under the name "
                f"{paths.to_string(above[0])!r}, and also by the Module there, at "
                f"{paths.to_string(path)!r}.\nRecord it under another name."
            )
    return states.from_flat_state(paths.sorted_by_path(flat.items()))


# Outputs of methods.


# The calls of bound methods that captures of this thread make, which don't record: for
# each the object, the function, and the frame around the call.
class _UnrecordedCalls(threading.local):
    calls: tuple[tuple[Any, Any, Any], ...] = ()


_entries = _UnrecordedCalls()


@contextlib.contextmanager
def _recording_outputs(fn: Any) -> Iterator[None]:
    """Records outputs in this thread, but not that of a bound method ``fn`` itself."""
    owner = None
    while isinstance(fn, functools.partial):
        owner, fn = next(iter(fn.args), None), fn.func
    if inspect.ismethod(fn):
        owner, fn = fn.__self__, fn.__func__
    entry = owner, methods.function_of(fn), running.stack.top
    former, _entries.calls = _entries.calls, (*_entries.calls, entry)
    is_new = _record_output not in running.stack.observers
    shown = methods.observed(_record_output, shows_methods=True, keeps_apart=False)
    try:
        with shown if is_new else contextlib.nullcontext():
            yield
    finally:
        _entries.calls = former


def _record_output(frame: ModuleCall, call: Callable[[], Any]) -> Any:
    """Observes calls: records their outputs where a capture asks for it."""
    output, module = call(), frame.module
    buffers = [*filter(_takes_outputs, _open_buffers(module) or ())]
    if not buffers or not methods.is_public(frame.method) or not methods.is_own(frame):
        return output
    for owner, function, parent in _entries.calls:
        is_entry = owner is module and function is frame.function
        if is_entry and parent is frame.parent:
            return output
    for buffer in buffers:
        _record((buffer,), type(buffer), frame.method, _make_update(output))
    return output


def _takes_outputs(buffer: Buffer) -> bool:
    return "takes_outputs" in variables.metadata_of(buffer)


def method_names(cls: type) -> list[str]:
    """Names the public methods of a class beyond those of Modules and containers."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        of_core = base.__module__.startswith(("graftree.core.", "collections."))
        if not of_core and base.__module__ != "builtins":
            members |= vars(base)
    return [x for x in members if methods.is_public(x) and _is_method(members[x])]


def _is_method(attribute: Any) -> bool:
    # Not functions only: a lifted transform may have been applied to the method.
    return (
        callable(attribute)
        and hasattr(attribute, "__get__")
        and not isinstance(attribute, (staticmethod, classmethod, type))
    )
