"""The object that is running, and the path to it.

    ModuleCall       one call of a method of a Pytree: a frame on a stack of this thread
    NamedArguments   a frame, too: the source of a transform's new objects

`methods.py` opens a frame around each call, which costs about as much as a call in
Python. The path of the object is looked up only when needed: JAX traces, and operations
get the path as their name; an exception is explained; an observer is called.

An object is looked for below the object that calls it, then below the callers of that.
So a shared module has the path by which it is called now. Objects on the traced
side are new ones; they stand for the arguments of the function and go by their names.

An exception in a method of a Pytree gets one note (`BaseException.add_note`), about the
innermost object:

    at net.blocks[3].attn.query, a Linear
      inputs: float32[2,5]
      Params: kernel float32[3,4], bias float32[4]

The innermost tracked call writes it. Python's own frames show the method it was in, and
the callers that are not tracked: a method has its object in them. An object that must
not be written is named by a path from a local name of a running function, as in
``model.layers[0].weight``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from graftree import _python, config
from graftree.annotations import Key, Path
from graftree.core import hooks, ownership, paths, walks
from graftree.core.objects import attributes, bookkeeping, callables
from graftree.core.text import descriptions
from graftree.core.variables import sharding
from graftree.core.variables.variables import Variable


class ModuleStep(NamedTuple):
    """One step of a path: its key, and how Python writes it."""

    key: Key
    text: str


Steps = tuple[ModuleStep, ...]
Contents = list[tuple[ModuleStep, Any]]


def keys_of(steps: Steps) -> Path:
    """Returns the path of some steps."""
    return tuple([step.key for step in steps])


class ModulePath(NamedTuple):
    """Path of an object: below the object of a frame, or from an outermost one."""

    base: ModuleCall | None
    steps: Steps


_NO_KEYWORDS: Mapping[str, Any] = types.MappingProxyType({})


class ModuleCall:
    """A running call of a method of an object.

    Attributes:
        module: The object.
        method: The name of the method.
        parent: Its caller: another frame, or that of a transform.
        positional: The object and the positional arguments.
        kwargs: The keyword arguments.
        adds_name: Whether the name of the method is part of those of operations.
        packed: The last arguments that it gave to a transform, if any.
        function: The function that it runs; known where observers see the call.
    """

    packed: tuple[Any, ...] | None = None
    function: Any = None

    def __init__(
        self,
        method: str,
        parent: ModuleCall | None,
        positional: tuple[Any, ...],
        kwargs: Mapping[str, Any] = _NO_KEYWORDS,
        adds_name: bool = False,
    ) -> None:
        self.module = positional[0]
        self.method = method
        self.parent = parent
        self.positional = positional
        self.kwargs = kwargs
        self.adds_name = adds_name

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments, without the object."""
        return self.positional[1:]

    @functools.cached_property
    def module_path(self) -> ModulePath:
        """Path of its object, as seen by its caller; may be set if found later."""
        path = find(self.parent, self.module)
        if path is not None:
            return path
        # Made in the call, or by a transform of JAX's own: no path leads to it.
        caller, name = self.parent, type(self.module).__name__
        while isinstance(caller, NamedArguments):
            caller = caller.parent
        text = name if caller is None else f".<{name}>"
        return ModulePath(caller, (ModuleStep(text.lstrip("."), text),))

    @property
    def steps(self) -> Steps:
        """Path of its object from the outermost one, whose name comes first."""
        base, steps = self.module_path
        return steps if base is None else base.steps + steps

    @property
    def name(self) -> str:
        """Path as Python writes it, as in ``net.blocks[3].attn.encode``."""
        text = "".join([step.text for step in self.steps]).lstrip(".")
        return text if self.method == "__call__" else f"{text}.{self.method}"

    @property
    def is_repeated(self) -> bool:
        """Whether this is the caller's own method, usually one of a base class."""
        caller = self.parent
        return (
            caller is not None
            and caller.module is self.module
            and caller.method == self.method
        )

    def find(self, wanted: Any, limit: ModuleCall | None = None) -> ModulePath | None:
        """Finds the path of an object below that of the frame."""
        steps = () if wanted is self.module else self._contents.find(wanted)
        return None if steps is None else ModulePath(self, steps)

    @functools.cached_property
    def _contents(self) -> _ContentPaths:
        # It must not refer to the frame: objects of a trace go with the last frame.
        return _ContentPaths(functools.partial(contents, self.module))


class NamedArguments(ModuleCall):
    """Named objects around calls, usually a transform's arguments on the traced side.

    Args:
        named: Gives the objects, with their names.
        parent: The frame around them.
        key: Identifies the transform: its arguments are not those of another one.
        outer: Gives the same objects on the caller's side, for a frame's call of the
            transform.
    """

    def __init__(
        self,
        named: Callable[[], Contents],
        parent: ModuleCall | None,
        key: Any = None,
        outer: Callable[..., Contents] = lambda *_: [],
    ) -> None:
        super().__init__("", parent, (None,))
        self._named, self._key, self._name_outer = named, key, outer

    @functools.cached_property
    def _contents(self) -> _ContentPaths:
        return _ContentPaths(self._named)

    def find(self, wanted: Any, limit: ModuleCall | None = None) -> ModulePath | None:
        """Finds the path of an object below the arguments, or on the caller's side.

        With a ``limit``, the search ends at that frame.
        """
        steps = self._contents.find(wanted)
        if steps is None:
            return None
        packed = None if self.parent is None else self.parent.packed
        if packed is None or packed[0] is not self._key or self.parent is limit:
            return ModulePath(None, steps)
        for start, obj in next_below(self._name_outer(*packed[1:])):
            if steps[: len(start)] == start:
                path = find(self.parent, obj, limit)
                if path is not None:
                    return ModulePath(path.base, path.steps + steps[len(start) :])
                break
        return ModulePath(None, steps)


class _ContentPaths:
    """Objects below some entries, by identity, with the first path to each."""

    def __init__(self, entries: Callable[[], Contents]) -> None:
        self._entries = entries
        # The objects stay alive, since the `id` of one that is gone may come again.
        self._first_paths: dict[int, tuple[Any, Steps]] = {}
        self._version: int | None = None  # when the entries were listed
        # Objects whose contents were not listed yet, the nearest first.
        self._pending = collections.deque[tuple[Any, Steps]]()

    def find(self, wanted: Any) -> Steps | None:
        """Returns the path to an object, ``None`` if it isn't there."""
        key, first_paths = id(wanted), self._first_paths
        if key not in first_paths and self._version != ownership.versions.latest:
            # It may have been put there since.
            self._version = ownership.versions.latest
            self._pending += self._list((), self._entries())
        while key not in first_paths and self._pending:
            obj, steps = self._pending.popleft()
            self._pending += self._list(steps, contents(obj))
        return first_paths[key][1] if key in first_paths else None

    def _list(self, start: Steps, entries: Contents) -> list[tuple[Any, Steps]]:
        items = []
        for steps, obj in next_below(entries):
            if id(obj) not in self._first_paths:
                self._first_paths[id(obj)] = item = obj, start + steps
                items.append(item)
        return items


def next_below(entries: Contents) -> list[tuple[Steps, Any]]:
    """Lists the nearest objects below some entries, past containers."""
    objects: list[tuple[Steps, Any]] = []
    is_new = walks.Once()
    pending: list[tuple[Steps, Any]] = [((step,), x) for step, x in reversed(entries)]
    while pending:
        steps, x = pending.pop()
        is_object = isinstance(x, attributes.DataObject)
        if is_object:
            objects.append((steps, x))
        # Methods of objects that can't be called are rarely called; their parts' are.
        is_entered = not callable(x) if is_object else type(x) in _CONTAINERS
        if is_entered and is_new(x):
            below = reversed(contents(x))
            pending += [((*steps, step), child) for step, child in below]
    return objects


_CONTAINERS = (list, tuple, dict)


# The most values that a search for names looks at below one. A container with more is
# data, and is passed over: to list a dataset of millions takes longer than the program.
MOST_SEEN = 10_000


def contents(x: Any, *, statics: bool = False) -> Contents:
    """Lists an object's or container's direct contents; with static ones if asked."""
    if isinstance(x, _CONTAINERS) and len(x) > MOST_SEEN:
        return []
    if isinstance(x, dict):
        return [
            (ModuleStep(key, f"[{descriptions.safe_repr(key)}]"), child)
            for key, child in x.items()
        ]
    if isinstance(x, (list, tuple)):
        return [(ModuleStep(i, f"[{i}]"), child) for i, child in enumerate(x)]
    if not isinstance(x, attributes.DataObject):
        return []
    # Static values hold no modules, but may be long.
    layout = bookkeeping.table_of(x).layout(attributes.facts_of(type(x)).naming)
    entries = vars(x)
    return [
        (ModuleStep(key, paths.key_text(key)), entries[name])
        for name, key, is_data in layout
        if (is_data or statics) and name in entries
    ]


def find(
    frame: ModuleCall | None, wanted: Any, limit: ModuleCall | None = None
) -> ModulePath | None:
    """Finds the path of an object as seen from a frame: below it, or its callers.

    With a ``limit``, only the callers below that frame count.
    """
    while frame is not limit and frame is not None:
        path = frame.find(wanted, limit)
        if path is not None:
            return path
        frame = frame.parent
    return None


def path_in_transform(frame: ModuleCall, limit: ModuleCall | None) -> Path:
    """Returns the keys to the object of a frame as a transform sees it.

    They begin at the argument of the function that has the object. If the function
    closes over it instead, they begin at the object whose method called the transform;
    or at the object itself, if that doesn't have it.

    Args:
        frame: A call on the traced side.
        limit: The frame around the transform; ``None`` if there is none.
    """
    base, steps = find(frame.parent, frame.module, limit) or frame.module_path
    keys = keys_of(steps)
    if base is None:
        return keys[1:]
    return path_in_transform(base, limit) + keys if _is_inside(base, limit) else keys


def _is_inside(frame: ModuleCall, limit: ModuleCall | None) -> bool:
    inner: ModuleCall | None = frame
    while inner is not None and inner is not limit:
        inner = inner.parent
    return inner is limit and frame is not limit


def steps_below(root: Any, steps: Steps) -> Steps | None:
    """Returns the part of a path below an object, if it leads through that.

    The first step of the path has the object where it begins for its key.
    """
    start, *rest = steps
    reached = itertools.accumulate(rest, _child, initial=start.key)
    for index, x in enumerate(reached):
        if x is root:
            return tuple(rest[index:])
    above = _ContentPaths(functools.partial(contents, root)).find(start.key)
    return None if above is None else (*above, *rest)


def reach(root: Any, steps: Steps) -> Any:
    """Returns the value at the end of a path from an object, if there is one."""
    return functools.reduce(_child, steps, root)


def _child(x: Any, step: ModuleStep) -> Any:
    return next(
        (child for entry, child in contents(x) if entry.text == step.text), None
    )


# The stack of each thread.


# Called with a class, a function that makes an object of it, and the arguments of that;
# gives the object, which it may have changed before anyone else has it.
Maker = Callable[[type, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]


class _CallStack(threading.local):
    top: ModuleCall | None = None
    # Observers of `methods.observed`; whether they see all public methods, and calls of
    # random streams; and their `methods.TraceNamespace`.
    observers: tuple[Callable[..., Any], ...] = ()
    shows_methods: bool = False
    shows_draws: bool = False
    trace_namespace: Any = None
    # Makes objects in this thread, in place of their metaclass.
    maker: Maker | None = None


stack = _CallStack()


@contextlib.contextmanager
def made_by(maker: Maker) -> Iterator[None]:
    """Makes a function the maker of this thread's Pytrees, in place of another one."""
    former, stack.maker = stack.maker, maker
    try:
        yield
    finally:
        stack.maker = former


def scope(frame: ModuleCall) -> contextlib.AbstractContextManager[Any]:
    """Names the operations that JAX traces in a call after where its object is."""
    if frame.is_repeated or not config.graftree_named_scopes:
        return contextlib.nullcontext()
    texts = [step.text for step in frame.module_path.steps]
    if frame.adds_name:
        texts.append(f".{frame.method}")
    parts = ["/" + text[1:] if text[0] == "." else text for text in texts]
    name = "".join(parts).lstrip("/")
    return jax.named_scope(name) if name else contextlib.nullcontext()


def note_arguments(
    key: Any, args: Any, kwargs: Any, functions: callables.Functions | None
) -> None:
    """Notes the running method's arguments to a transform; see `NamedArguments`.

    The functions, if given, hold objects, too.
    """
    top = stack.top
    if top is not None:
        held = () if functions is None else functions.functions
        top.packed = key, args, kwargs, held
    if stack.trace_namespace is not None:
        stack.trace_namespace.note_transform(args, kwargs)


# Gives arguments their names: those of the parameters of a function.
Names = Callable[[Any, Any], list[tuple[str, Any]]]


@contextlib.contextmanager
def inside(
    key: Any, names: Names, args: Any, kwargs: Any, functions: Any = ()
) -> Iterator[None]:
    """Names the fresh objects that a transform gives to its function, or in it."""

    def named(args: Any, kwargs: Any, functions: Any) -> Contents:
        pairs = [
            (type(x).__name__ if name == "self" else name, x)
            for name, x in names(args, kwargs)
        ]
        objects = [x for f in functions for x in callables.objects_in(f)]
        kinds = [type(x).__name__ for x in objects]
        entries = [(ModuleStep(text, text), x) for text, x in pairs]
        return entries + [
            # Objects of one type have one name, but not one key.
            (ModuleStep(f"{name} {index}", name), x)
            for index, (name, x) in enumerate(zip(kinds, objects, strict=True))
        ]

    caller = stack.top
    entries = functools.partial(named, args, kwargs, functions)
    stack.top = NamedArguments(entries, caller, key, named)
    if stack.trace_namespace is not None:
        stack.trace_namespace.note_trace()
    try:
        yield
    except Exception as error:
        sharding.explain(error)
        raise
    finally:
        stack.top = caller


_MOST = 8


class Note(str):
    """Note that we add to an exception; pickled as a string."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str(self),)


def explain(error: Exception, frame: ModuleCall, method: Callable[..., Any]) -> None:
    """Adds our note to an exception, if it has none yet."""
    sharding.explain(error)
    if not any(isinstance(note, Note) for note in getattr(error, "__notes__", ())):
        try:
            note = Note(_describe(error, frame, method))
        except Exception:  # the object itself may be the cause
            note = Note(f"in a method of a {type(frame.module).__name__}")
        error.add_note(note)
        # Before JAX's note on its traceback, which is longer and says less.
        error.__notes__.insert(0, error.__notes__.pop())


def _describe(error: Exception, frame: ModuleCall, method: Callable[..., Any]) -> str:
    _find_outermost(frame)
    calls = [_method_in(x) for x, _ in traceback.walk_tb(error.__traceback__)]
    inner = next(filter(None, reversed(calls)), None)
    arguments = _arguments(frame, method)
    if inner and (inner.module, inner.method) != (frame.module, frame.method):
        inner.parent = frame
        frame, arguments = inner, inner.kwargs
    kind = type(frame.module).__name__
    has_path = frame.name != kind
    lines = [f"at {frame.name}" + f", {_article(kind)}" * has_path]
    texts = [f"{name}: {describe(x)}" for name, x in arguments.items()]
    lines += [f"  {line}" for line in texts[:_MOST]]
    held_variables = [
        f"{name} {describe(x)}"
        for name, x in bookkeeping.attribute_items(frame.module)
        if isinstance(x, Variable)
    ]
    if held_variables:
        more = [f"{len(held_variables) - _MOST} more"] * (len(held_variables) > _MOST)
        lines.append("  Variables: " + ", ".join(held_variables[:_MOST] + more))
    return "\n".join(lines)


# Methods among the running functions of Python.


def _method_in(frame: types.FrameType) -> ModuleCall | None:
    """Returns the method call that a Python frame is, with its arguments by name."""
    code, module = frame.f_code, _python.module_of(frame)
    # Up to Python 3.12, reading the locals of a function keeps them until it returns.
    if code.co_varnames[: min(code.co_argcount, 1)] != ("self",):
        return None
    if module.startswith(("graftree.core.", "jax.")):
        return None  # objects of the core are not layers
    name, obj = code.co_name, _python.locals_of(frame).get("self")
    is_public = name == "__call__" or not name.startswith("_")
    if not (is_public and isinstance(obj, attributes.DataObject)):
        return None
    if not any(name in vars(cls) for cls in type(obj).__mro__):
        return None
    names, rest, keywords, values = inspect.getargvalues(frame)
    arguments = {k: values[k] for k in (*names[1:], rest, keywords) if k in values}
    return ModuleCall(name, None, (obj,), arguments)


def _find_outermost(frame: ModuleCall) -> None:
    """Finds the outermost object in one that runs around it without our tracking."""
    while frame.parent is not None:
        frame = frame.parent
    if isinstance(frame, NamedArguments):
        return
    for outer in filter(None, map(_method_in, _python.frames_above(0))):
        if outer.module is not frame.module:
            path = outer.find(frame.module)
            if path is not None:
                frame.module_path = path
                frame = outer


def _article(name: str) -> str:
    # An acronym is spelled: an LSTMCell, but a LoRA.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOU"
    return f"{'an' if name[:1] in vowels else 'a'} {name}"


def _arguments(frame: ModuleCall, method: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        signature = inspect.signature(method)
        bound = signature.bind(*frame.positional, **frame.kwargs).arguments
    except TypeError:
        return {f"args[{i}]": x for i, x in enumerate(frame.args)} | {**frame.kwargs}
    return dict([*bound.items()][1:])


def describe(x: Any) -> str:
    """Dtype and shape of a value like an array; the contents of small containers."""
    if isinstance(x, Variable):
        return f"{type(x).__name__} {describe(x.get_raw_value())}"
    if descriptions.has_form(x):
        return descriptions.describe(x)
    if isinstance(x, (bool, int, float, complex, str, type(None))):
        text = repr(x)
        return text if len(text) < 40 else f"{text[:36]}..."
    is_small = type(x) in _CONTAINERS and 0 < len(x) <= _MOST
    frame, entries = descriptions.contents(x) if is_small else (None, [])
    if frame is None:
        return type(x).__name__
    texts = [f"{entry.key}{frame.kv_sep}{describe(entry.value)}" for entry in entries]
    return frame.start + ", ".join(texts) + frame.end


# Objects by the local names of running functions.

# Functions of these packages hold the object under names that the program doesn't know.
_INTERNAL = ("graftree.", "jax.", "jax._src")


def _find_name(wanted: Any) -> str:
    """Finds the longest path to an object from a local name; empty if there is none."""
    frames = [*_python.frames_above(1)]
    # The runner of a program (runpy, a notebook) holds its names in a dict of its own,
    # and `run_globals['model']` is not a name of the program.
    namespaces = {id(frame.f_globals) for frame in frames}
    paths = [
        _path_below(value, name, wanted, {*namespaces})
        for frame in frames
        if not _python.module_of(frame).startswith(_INTERNAL)
        for name, value in [*_python.locals_of(frame).items()]
    ]
    return "".join([step.text for step in max(paths, key=len, default=())])


def _path_below(root: Any, name: str, wanted: Any, visited: set[int]) -> Steps:
    def children_of(x: Any, _: Any) -> Contents | None:
        if x is not wanted and (id(x) in visited or len(visited) > MOST_SEEN):
            return None
        visited.add(id(x))
        return contents(x, statics=True)

    items = walks.walk(root, children_of, (ModuleStep(name, name),))
    return next((steps for steps, x in items if x is wanted), ())


hooks.path_of_object.fill(_find_name)
