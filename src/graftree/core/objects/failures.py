"""What messages say of objects: where they are, and what their methods were given.

An exception in a method of a Pytree gets one note (`BaseException.add_note`), about the
innermost object:

    at net.blocks[3].attn.query, a Linear
      inputs: float32[2,5]
      Params: kernel float32[3,4], bias float32[4]

The innermost call that is known (``methods.py``) writes it. Which method it was in, and
what called that which is not known, is in Python's own frames: a method has its object
in them. An object that must not be written is named by where a local name of a running
function leads to it, as in ``model.layers[0].weight``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from graftree import _python
from graftree.core import ownership, walks
from graftree.core.objects import bookkeeping, running
from graftree.core.objects.attributes import DataObject
from graftree.core.objects.running import ModuleCall, ModuleStep, NamedArguments
from graftree.core.text import short_forms
from graftree.core.variables.variables import Variable

_MOST = 8


class Note(str):
    """A note of ours; pickled as a string."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str(self),)


def explain(error: Exception, frame: ModuleCall, method: Callable[..., Any]) -> None:
    """Adds the note, if there is none yet."""
    if not any(isinstance(note, Note) for note in getattr(error, "__notes__", ())):
        try:
            note = Note(_describe(error, frame, method))
        except Exception:  # what is wrong here may be the object itself
            note = Note(f"in a method of a {type(frame.module).__name__}")
        error.add_note(note)
        # Before what JAX notes on its traceback, which is longer and says less.
        error.__notes__.insert(0, error.__notes__.pop())


def _describe(error: Exception, frame: ModuleCall, method: Callable[..., Any]) -> str:
    _place_outermost(frame)
    inner = _innermost(error.__traceback__)
    given = _arguments(frame, method)
    if inner is not None and (inner.obj, inner.name) != (frame.module, frame.method):
        frame, given = ModuleCall(inner.name, frame, (inner.obj,)), inner.given()
    kind = type(frame.module).__name__
    is_told = frame.name == kind
    lines = [f"at {frame.name}" + f", {_article(kind)}" * (not is_told)]
    listed = [f"{name}: {describe(x)}" for name, x in given.items()]
    lines += [f"  {line}" for line in listed[:_MOST]]
    held = [
        f"{name} {describe(x)}"
        for name, x in bookkeeping.attribute_items(frame.module)
        if isinstance(x, Variable)
    ]
    if held:
        more = [f"{len(held) - _MOST} more"] * (len(held) > _MOST)
        lines.append("  Variables: " + ", ".join(held[:_MOST] + more))
    return "\n".join(lines)


# Methods among the running functions of Python.


class _RunningMethod(NamedTuple):
    """A running function that is a method of an object."""

    obj: Any
    name: str
    frame: FrameType

    def given(self) -> dict[str, Any]:
        """Its arguments as they are now."""
        code, found = self.frame.f_code, _python.locals_of(self.frame)
        count = code.co_argcount + code.co_kwonlyargcount
        for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS):
            count += bool(code.co_flags & flag)
        return {k: found[k] for k in code.co_varnames[1:count] if k in found}


def _method_in(frame: FrameType) -> _RunningMethod | None:
    code, module = frame.f_code, _python.module_of(frame)
    # Up to Python 3.12, reading the locals of a function keeps them until it returns.
    if code.co_varnames[: min(code.co_argcount, 1)] != ("self",):
        return None
    if module.startswith(("graftree.core.", "jax.")):
        return None  # objects of the core are not layers
    name, obj = code.co_name, _python.locals_of(frame).get("self")
    is_public = name == "__call__" or not name.startswith("_")
    if not (is_public and isinstance(obj, DataObject)):
        return None
    is_its_own = any(name in vars(cls) for cls in type(obj).__mro__)
    return _RunningMethod(obj, name, frame) if is_its_own else None


def _innermost(traceback: TracebackType | None) -> _RunningMethod | None:
    """The innermost method in a traceback."""
    found = None
    while traceback is not None:
        found = _method_in(traceback.tb_frame) or found
        traceback = traceback.tb_next
    return found


def _place_outermost(frame: ModuleCall) -> None:
    """Finds where the outermost object is in one that runs around it, unknown to us."""
    while frame.parent is not None:
        frame = frame.parent
    if isinstance(frame, NamedArguments):
        return
    for around in filter(None, map(_method_in, _python.frames_above(0))):
        if around.obj is not frame.module:
            outer = ModuleCall(around.name, None, (around.obj,))
            place = outer.find(frame.module)
            if place is not None:
                frame.place = place
                frame = outer


def _article(name: str) -> str:
    # An acronym is spelled: an LSTMCell, but a LoRA.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOU"
    return f"{'an' if name[:1] in vowels else 'a'} {name}"


def _arguments(frame: ModuleCall, method: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        signature = inspect.signature(method)
        bound = signature.bind(*frame.given, **frame.kwargs).arguments
    except TypeError:
        return {f"args[{i}]": x for i, x in enumerate(frame.args)} | {**frame.kwargs}
    return dict([*bound.items()][1:])


def describe(x: Any) -> str:
    """Dtype and shape of what is like an array; the contents of small containers."""
    if isinstance(x, Variable):
        return f"{type(x).__name__} {describe(x.get_raw_value())}"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return short_forms.describe(x)
    if isinstance(x, (bool, int, float, complex, str, type(None))):
        text = repr(x)
        return text if len(text) < 40 else f"{text[:36]}..."
    if type(x) in (list, tuple, dict) and 0 < len(x) <= _MOST:
        return _describe_items(x)
    return type(x).__name__


def _describe_items(x: Any) -> str:
    if isinstance(x, dict):
        items = [f"{key!r}: {describe(value)}" for key, value in x.items()]
        return "{" + ", ".join(items) + "}"
    texts = ", ".join(map(describe, x))
    return f"[{texts}]" if isinstance(x, list) else f"({texts}{',' * (len(x) == 1)})"


# Objects by the local names of running functions.

# Functions of these packages hold the object under names that say nothing.
_INTERNAL = ("graftree.core", "graftree.transforms", "jax.", "jax._src")
_MOST_SEEN = 10_000


def _find_name(wanted: Any) -> str:
    """The longest path to an object from a local name; empty if there is none."""
    frames = [*_python.frames_above(1)]
    # What runs a program (runpy, a notebook) holds its names in a dict of its own, and
    # `run_globals['model']` is not a name of the program's.
    namespaces = {id(frame.f_globals) for frame in frames}
    paths = [
        _path_below(value, name, wanted, {*namespaces})
        for frame in frames
        if not _python.module_of(frame).startswith(_INTERNAL)
        for name, value in [*_python.locals_of(frame).items()]
    ]
    return "".join([step.text for step in max(paths, key=len, default=())])


def _path_below(
    root: Any, name: str, wanted: Any, seen: set[int]
) -> tuple[ModuleStep, ...]:
    def below(x: Any, _: Any) -> list[tuple[ModuleStep, Any]] | None:
        if x is not wanted and (id(x) in seen or len(seen) > _MOST_SEEN):
            return None
        seen.add(id(x))
        return running.contents(x, statics=True)

    found = walks.walk(root, below, (ModuleStep(name, name),))
    return next((steps for steps, x in found if x is wanted), ())


ownership.name_objects_by(_find_name)
