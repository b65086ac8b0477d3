"""Calls that return what Modules record: `capture`.

`recorders.py` says what a Module does with the buffers that it is given; this file
hands them out for the time of a call and turns their contents into States. What always
holds:

- A call that raises leaves no buffer behind, neither do copies of Modules it made.
- A nested call on the same Module puts its own buffers in front of those of the outer
  call: a type that both record goes to the inner call only, other types still reach
  the outer one. The outer buffers are back when the inner call ends.
- Two threads that capture the same Module take turns, and a third thread that calls it
  does not see the buffers.

With ``method_outputs=`` a call ``module.f(x)`` records its output, too. So for the time
of the call each Module is given another class: a subclass of its own, made here, that
overrides each method with one that also records. The wrappers have to sit on a class,
since Python looks up ``__call__`` there, and since a class, unlike wrappers in an
instance, survives the flattening of lifted transforms. The class of the user stays as
it is for everyone else, also in other threads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import traversals
from graftree.core.modules import recorders
from graftree.core.modules.recorders import Recorder
from graftree.core.objects import bookkeeping, pytrees
from graftree.core.states import nested, states
from graftree.core.variables.variables import Variable


class _Request(NamedTuple):
    """What one use of `capture` asks for."""

    returned: tuple[type[Variable[Any]], ...]
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
            the first of ``var_types``, and a decorator is returned.
        *var_types: The types of Variables to return; a subclass does not match.
        init: Values to start recording from, by path and Variable type, e.g. the
            perturbations of an earlier call. They are returned only if their type is in
            ``var_types``.
        method_outputs: The type as which the output of every method called on a nested
            Module (``__call__`` and public names) is recorded, under the name of the
            method. The outermost method is left out if ``fn`` is a bound method.

    Returns:
        A function with the arguments of ``fn``. It returns what ``fn`` returns; with
        ``var_types`` a tuple of that and one State per type, nested by Module path. A
        shared Module records under the first of its paths.

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
        return functools.partial(
            _decorate, (fn, *var_types), init=init, method_outputs=method_outputs
        )
    return _decorate(var_types, fn, init=init, method_outputs=method_outputs)


def _is_variable_type(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, Variable)


def _decorate(
    var_types: tuple[type[Variable[Any]], ...],
    fn: Any,
    *,
    init: Mapping[Any, Any] | None,
    method_outputs: type[Variable[Any]] | None,
) -> Callable[..., Any]:
    _check_request(fn, var_types, method_outputs)
    request = _Request(var_types, init, method_outputs)

    module: Any = fn  # which has a `__call__`, if it is one

    # Without `updated`, the attributes of a callable object would be copied, too.
    @functools.wraps(module.__call__ if isinstance(fn, Recorder) else fn, updated=())
    def captured(*args: Any, **kwargs: Any) -> Any:
        with _recording(_subject(fn, args, kwargs), request) as recorded:
            recorded.result = fn(*args, **kwargs)
        if not var_types:
            return recorded.result
        captures = [_to_state(recorded.buffers, var_type) for var_type in var_types]
        return (recorded.result, *captures)

    return captured


def _check_request(fn: Any, var_types: Sequence[Any], method_outputs: Any) -> None:
    if not callable(fn):
        raise TypeError(
            f"nnx.capture expects a Module, a method or a function, got {fn!r} of type "
            f"{type(fn).__name__}."
        )
    requested = var_types if method_outputs is None else (*var_types, method_outputs)
    for var_type in requested:
        if not _is_variable_type(var_type):
            raise TypeError(
                "nnx.capture expects Variable types, such as nnx.Intermediate, got "
                f"{var_type!r}."
            )


def _subject(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The node whose Modules record in the call ``fn(*args, **kwargs)``."""
    if isinstance(fn, Recorder):
        return fn
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Recorder):
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


class _Recorded:
    """The result of a call and the buffers it filled, by the path of their Module."""

    def __init__(self) -> None:
        self.result: Any = None
        self.buffers: list[tuple[Path, tuple[recorders.Buffer, ...]]] = []


# Guards `recorders.capturing_threads`, and is notified when Modules get free.
_turn = threading.Condition()


@contextlib.contextmanager
def _recording(subject: Any, request: _Request) -> Iterator[_Recorded]:
    recorded = _Recorded()
    with _turn:
        modules, claimed = _claim(subject)
    before = [
        (module, vars(module).get(recorders.BUFFERS), type(module))
        for _, module in modules
    ]
    try:
        _attach(modules, request, recorded)
        yield recorded
    finally:
        for module, outer_buffers, cls in before:
            _restore(module, outer_buffers, cls)
        with _turn:
            for module in claimed:
                del recorders.capturing_threads[id(module)]
            _turn.notify_all()
        # In an outer call such copies may be there to record for it.
        if all(outer_buffers is None for _, outer_buffers, _ in before):
            _clean_copies(subject, recorded.result)


def _claim(subject: Any) -> tuple[list[tuple[Path, Any]], list[Any]]:
    """Waits until no other thread captures a Module of ``subject``; then they are ours.

    Returns:
        The Modules with their paths, and those of them that no outer call had claimed.
    """
    threads, me = recorders.capturing_threads, threading.get_ident()
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
    # call reject what they don't support.
    return [
        (path, value)
        for path, value in traversals.iter_graph(node, graph=True)
        if isinstance(value, Recorder)
    ]


def _attach(
    modules: Sequence[tuple[Path, Any]], request: _Request, recorded: _Recorded
) -> None:
    init = _init_by_path(request.init)
    _warn_if_unused(init.keys() - {path for path, _ in modules})
    for path, module in modules:
        entries: dict[type[Variable[Any]], dict[str, Any]]
        entries = {var_type: {} for var_type in request.returned}
        if request.method_outputs is not None:
            entries.setdefault(request.method_outputs, {})
        entries |= init.get(path, {})
        buffers = tuple(
            recorders.make_buffer(var_type, values)
            for var_type, values in entries.items()
        )
        recorded.buffers.append((path, buffers))
        outer_buffers = vars(module).get(recorders.BUFFERS, ())
        further = [buffer for buffer in outer_buffers if type(buffer) not in entries]
        if request.method_outputs is not None:
            cls = _recording_class(type(module), request.method_outputs)
            object.__setattr__(module, "__class__", cls)
        # Last, since it stamps the Module.
        pytrees.store_attribute(module, recorders.BUFFERS, (*buffers, *further), True)


def _init_by_path(
    init: Mapping[Any, Any] | None,
) -> dict[Path, dict[type[Variable[Any]], dict[str, Any]]]:
    by_path: dict[Path, dict[type[Variable[Any]], dict[str, Any]]] = {}
    for (*path, name), value in nested.flatten_mapping(init or {}).items():
        if isinstance(value, Variable):
            of_type = by_path.setdefault(tuple(path), {}).setdefault(type(value), {})
            of_type[name] = value.get_value()
    return by_path


def _warn_if_unused(unknown: set[Path]) -> None:
    if unknown:
        places = sorted(paths.to_string(path, root="<root>") for path in unknown)
        warnings.warn(
            f"nnx.capture ignores the values in `init` at {places}: there is no Module "
            "at these paths.",
            UserWarning,
            stacklevel=6,
        )


def _restore(
    module: Any, outer_buffers: tuple[recorders.Buffer, ...] | None, cls: type
) -> None:
    if type(module) is not cls:
        object.__setattr__(module, "__class__", cls)
    if outer_buffers is not None:
        pytrees.store_attribute(module, recorders.BUFFERS, outer_buffers, True)
    elif recorders.BUFFERS in vars(module):
        pytrees.Pytree.__delattr__(module, recorders.BUFFERS)


def _clean_copies(subject: Any, result: Any) -> None:
    """Takes the buffers off copies of captured Modules that the call made."""
    results = result if isinstance(result, (tuple, list)) else [result]
    returned = [value for value in results if isinstance(value, Recorder)]
    for _, module in _modules_in([subject, *returned]):
        if id(module) not in recorders.capturing_threads:
            _restore(module, None, _user_class(type(module)))


def _to_state(
    recorded: Sequence[tuple[Path, tuple[recorders.Buffer, ...]]],
    var_type: type[Variable[Any]],
) -> states.State:
    flat: dict[Path, Variable[Any]] = {}
    for path, buffers in recorded:
        buffer = recorders.find_buffer(buffers, var_type)
        for name, value in buffer.get_raw_value().items() if buffer else ():
            flat[(*path, name)] = var_type(value, hijax=False, ref=False)
    for path in flat:
        above = [path[:end] for end in range(1, len(path)) if path[:end] in flat]
        if above:
            raise ValueError(
                f"nnx.capture: {var_type.__name__} was recorded under the name "
                f"{paths.to_string(above[0])!r}, and also by the Module there, at "
                f"{paths.to_string(path)!r}.\nRecord it under another name."
            )
    return states.from_flat_state(paths.sorted_by_path(flat.items()))


# Classes whose methods record what they return.


class _OutputRecorder:
    """What all classes that record outputs have in their MRO, before the user's class.

    It is not a base of theirs: an object may change its class only to one whose first
    base is the class it has.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        # In the place of such hooks in the user's classes: they must not learn of this
        # subclass, and may want arguments.
        pytrees.Pytree.__init_subclass__.__func__(cls, **options)


class _OutputRecorderMeta(type):
    """Puts `_OutputRecorder` into the MRO."""

    def mro(cls) -> list[type]:
        rest = [base for base in super().mro()[1:] if base is not _OutputRecorder]
        return [cls, _OutputRecorder, *rest]


@functools.cache
def _recording_class(cls: type, output_type: type[Variable[Any]]) -> type:
    """A subclass of ``cls`` whose methods record their outputs as ``output_type``."""
    names = _method_names(cls)
    output_types = getattr(cls, "_output_types", ())
    if not names or output_type in output_types:
        return cls
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_output_types": (*output_types, output_type),
    }
    for name in names:
        namespace[name] = _recording_method(cls, name, output_type)
    return _recording_metaclass(type(cls))(cls.__name__, (cls,), namespace)


@functools.cache
def _recording_metaclass(metaclass: type) -> type:
    if issubclass(metaclass, _OutputRecorderMeta):
        return metaclass
    return type(metaclass.__name__, (_OutputRecorderMeta, metaclass), {})


def _user_class(cls: type) -> type:
    """The class that `_recording_class` was called with, at first."""
    return next(base for base in cls.__mro__ if not issubclass(base, _OutputRecorder))


def _method_names(cls: type) -> list[str]:
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base not in recorders.machinery:
            for name, attribute in vars(base).items():
                found.setdefault(name, attribute)
    return [
        name
        for name, attribute in found.items()
        if (name == "__call__" or not name.startswith("_")) and _is_method(attribute)
    ]


def _is_method(attribute: Any) -> bool:
    # Not functions only: a lifted transform may have been applied to the method.
    return (
        callable(attribute)
        and hasattr(attribute, "__get__")
        and not isinstance(attribute, (staticmethod, classmethod, type))
    )


def _recording_method(
    cls: type, name: str, output_type: type[Variable[Any]]
) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inspect.getattr_static(cls, name).__get__(self, cls)(*args, **kwargs)
        buffers = recorders.open_buffers(self)
        if buffers is not None:
            recorders.record(buffers, output_type, name, output)
        return output

    return functools.update_wrapper(method, getattr(cls, name), updated=())
