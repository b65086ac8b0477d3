"""Compiles eager calls of layers: a program stands in for the body of ``__call__``.

The body of a layer is its mathematics, written with JAX's functions. Called eagerly,
these spend more time in Python than they compute: a product, a bias and a sum are three
programs of 4 us each, and 40 us of Python to find them. Attention runs 13 programs
within 1.5 ms. So `compiled`, a decorator of the body, runs it as one program:

    layer -> GraphDef, leaves -> program(leaves, arrays) -> new values of leaves, output

In the program a barrier keeps each operation apart from the others, and arrays go in
and out in their usual order of axes. So XLA compiles each as it compiles a single one,
and all bits are those of one operation after the other. What the body writes into
Variables of the layer is written after the call, all or nothing; an array that the body
returns as it came, or twice, is the same object outside.

In a trace the body is recorded once for equal layers and shapes, without barriers. So
the second of two equal layers takes a third of the time to trace.

This is speed and nothing else. The body itself runs

- while ``graftree_caches`` is off;
- for layers and settings with code of the user's: functions, hooks of Variables,
  methods of subclasses (`_brings_code`);
- while a function of JAX that runs in the body is replaced, in a trace while any is
  (`jax_functions`);
- in view of observers, if parts of the layer are called that they may see;
- with arguments other than arrays, tuples of arrays, ``None``, booleans, and settings
  by keyword;
- if the program fails, as the body explains the error best.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, config
from graftree.core import ownership
from graftree.core.graph import flattening, graphdefs, kept
from graftree.core.graph.graphdefs import GraphDef, VariableDef
from graftree.core.objects import attributes, running
from graftree.core.variables import metadata, sharding, variables
from graftree.core.variables.variables import Variable
from graftree.nn.support import jax_functions

F = TypeVar("F", bound=Callable[..., Any])

# For `jax.jit(inline=...)`: operations are put into the program that is traced. In
# newer versions `True` costs a function, lowered by itself, for each program.
_EARLY: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def compiled(body: F, *, eager_transforms: bool = False) -> F:
    """Has eager calls of a layer, or of a function of arrays, run as one program.

    Args:
        body: The function. Its first argument may be a Module, which it may read and
            whose Variables it may write; all else is arrays, or settings by keyword.
        eager_transforms: Whether eager derivatives and ``vmap`` are programs too. In
            derivatives the barriers keep only the operations of the body apart, so
            this is for single contractions.
    """
    programs = _Programs(body, eager_transforms)

    @functools.wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        if config.caches.are_used:
            output = programs.run(args, kwargs)
            if output is not _MISS:
                return output
        return body(*args, **kwargs)

    return cast("F", call)


def compiled_contraction(body: F) -> F:
    """`compiled`, even in eager derivatives and ``vmap``."""
    return compiled(body, eager_transforms=True)


# Stands for the output of a call that no program makes.
_MISS: Any = object()
# Stands for an array in a `_BodyCall`.
_ARRAY: Any = object()


class _BodyCall(NamedTuple):
    """The static part of a call.

    Attributes:
        graphdef: Of the layer; ``None`` for a function of arrays.
        arguments: The positional arguments after the layer, `_ARRAY` for each array.
        treedef: The tuples that they are in; ``None`` if there are none.
        names: The names of the keyword arguments.
        settings: The keyword arguments, likewise.
        types: The types of the settings: 1, 1.0 and True are equal.
        is_apart: Whether operations are kept apart.
    """

    graphdef: GraphDef[Any] | None
    arguments: tuple[Any, ...]
    treedef: Any
    names: tuple[str, ...]
    settings: tuple[Any, ...]
    types: tuple[type, ...]
    is_apart: bool

    def filled(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Puts arrays into the arguments: the positional ones, and those by keyword."""
        rest = iter(arrays)
        args = [next(rest) if x is _ARRAY else x for x in self.arguments]
        settings = [next(rest) if x is _ARRAY else x for x in self.settings]
        if self.treedef is not None:
            args = self.treedef.unflatten(args)
        return args, dict(zip(self.names, settings, strict=True))


class _Tracing(threading.local):
    """Whether this thread traces a body whose operations are kept apart."""

    is_apart = False


_tracing = _Tracing()


class _Programs:
    """The programs of one body.

    Args:
        body: The function.
        eager_transforms: See `compiled`.
    """

    def __init__(self, body: Callable[..., Any], eager_transforms: bool) -> None:
        self._body = body
        self._eager_transforms = eager_transforms
        self._watch = jax_functions.Watch()
        self.clear()
        config.caches.add(self)

    def clear(self) -> None:
        """Forgets all programs."""
        self._find = functools.lru_cache(maxsize=1024)(self._new_program)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a program for this call; returns its output, or `_MISS`."""
        if _tracing.is_apart or not _jax.can_call_apart():
            return _MISS
        try:
            graphdef: GraphDef[Any] | None = None
            leaves: Sequence[Any] = ()
            if args and isinstance(args[0], attributes.DataObject):
                if ownership.current() is ownership.no_trace:
                    graphdef, leaves = kept.flatten(args[0], True, "an eager call")
                else:
                    # No read of all of it: a write that the body doesn't see is lost.
                    graphdef, leaves = flattening.flatten_graph(args[0])
                if running.stack.observers and len(graphdef.specs) > 1:
                    return _MISS
                args = args[1:]
            treedef = None
            if tuple in map(type, args):
                flat, treedef = jax.tree.flatten(args, is_leaf=_is_no_tuple)
                args = tuple(flat)
            values = [*map(flattening.raw_of, leaves)]
            arrays, statics = _parted(args, _ARRAYS)
            names: tuple[str, ...] = ()
            settings: tuple[Any, ...] = ()
            if kwargs:
                named, settings = _parted(kwargs.values(), jax.Array)
                names, arrays = tuple(kwargs), arrays + named
            is_apart = self._is_apart([*values, *arrays])
            if is_apart is None:
                return _MISS
            types = tuple(map(type, settings))
            program = self._find(
                _BodyCall(graphdef, statics, treedef, names, settings, types, is_apart)
            )
            holds = self._watch.holds if is_apart else jax_functions.are_as_at_first
            if program is None or not holds():
                return _MISS
            result = program(values, arrays)
            result.write(leaves)
        except Exception:  # the body explains the error best
            return _MISS
        return result.output((*values, *arrays))

    def _is_apart(self, values: Sequence[Any]) -> bool | None:
        """Whether a program for these arrays keeps operations apart.

        ``None`` if there is none for them.
        """
        if _jax.current_trace() is _jax.no_trace:
            # Most often the first, which is done in C.
            are_numbers = all(map(_jax.is_concrete, map(type, values)))
            return True if are_numbers or all(map(_has_value, values)) else None
        are_arrays = all([isinstance(x, (*_ARRAYS, _jax.Ref)) for x in values])
        if not are_arrays or not any([isinstance(x, _jax.Tracer) for x in values]):
            return None
        if _jax.recording_trace() is not None:
            return False
        return True if self._eager_transforms else None

    def _new_program(self, signature: _BodyCall) -> Callable[..., Any] | None:
        """A program for calls of this kind; ``None`` if the body must run itself."""
        graphdef = signature.graphdef
        are_flags = all([type(x) in _FLAGS for x in signature.arguments])
        if not (are_flags and all(map(jax_functions.is_plain, signature.settings))):
            return None
        if graphdef is not None and _brings_code(graphdef):
            return None
        run: Any = functools.partial(self._traced, signature)
        run.__name__ = self._body.__qualname__  # in profiles
        if not signature.is_apart:
            return jax.jit(run, inline=_EARLY)
        apart: Any = functools.partial(_jax.call_apart, run)
        apart.__name__ = run.__name__
        return jax.jit(apart)

    def _traced(self, signature: _BodyCall, values: Any, arrays: Any) -> _BodyResult:
        """Runs the body in a trace."""
        if not _jax.is_tracing():
            raise ValueError("Nothing is traced: jax.disable_jit is on.")
        args, settings = signature.filled(arrays)
        with _keeping_apart(signature.is_apart):
            body = self._body
            if signature.is_apart:
                body = functools.partial(self._watch.call, body)
            if signature.graphdef is None:
                return _BodyResult.of(body(*args, **settings), {}, arrays)
            layer = flattening.unflatten(signature.graphdef, values)
            with _in_place_of_running(layer):
                output = body(layer, *args, **settings)
        graphdef, leaves = flattening.flatten_graph(layer)
        if graphdef != signature.graphdef:
            raise ValueError("The body changes the structure of its layer.")
        pairs = enumerate(zip(map(flattening.raw_of, leaves), values, strict=True))
        changed = {n: now for n, (now, before) in pairs if now is not before}
        return _BodyResult.of(output, changed, (*values, *arrays))


@contextlib.contextmanager
def _keeping_apart(is_apart: bool) -> Iterator[None]:
    """Traces a body; in one whose operations are kept apart, all others are, too."""
    before, _tracing.is_apart = _tracing.is_apart, is_apart
    try:
        yield
    finally:
        _tracing.is_apart = before


@contextlib.contextmanager
def _in_place_of_running(layer: Any) -> Iterator[None]:
    """Names parts of a layer, which stands for the running one, as parts of that."""
    stack = running.stack
    above = stack.top
    stack.top = frame = running.ModuleCall("__call__", above, (layer,))
    frame.module_path = running.ModulePath(above, ())
    try:
        yield
    finally:
        stack.top = above


def _parted(
    arguments: Collection[Any], kinds: Any
) -> tuple[list[Any], tuple[Any, ...]]:
    """Takes the arrays out of arguments, and leaves `_ARRAY` for each."""
    if all(map(_jax.is_concrete, map(type, arguments))):
        return [*arguments], (_ARRAY,) * len(arguments)
    is_array = [isinstance(x, kinds) for x in arguments]
    arrays = [*itertools.compress(arguments, is_array)]
    pairs = zip(arguments, is_array, strict=True)
    return arrays, tuple([_ARRAY if is_one else x for x, is_one in pairs])


def _is_no_tuple(x: Any) -> bool:
    return type(x) is not tuple


# A float, say, may be another one at each call.
_FLAGS = (type(_ARRAY), type(None), bool)


class _BodyResult:
    """The result of a program: new arrays, and the place of each.

    Args:
        arrays: The new values of leaves, then the arrays of the output that were not
            among the inputs.
        changed: The numbers of these leaves.
        sources: For each leaf of the output its number among inputs and arrays.
        treedef: The output's; ``None`` if it is one array.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        changed: tuple[int, ...],
        sources: tuple[int, ...],
        treedef: Any,
    ) -> None:
        self._arrays, self._changed = arrays, changed
        self._sources, self._treedef = sources, treedef

    @classmethod
    def of(
        cls, output: Any, changed: Mapping[int, Any], inputs: Sequence[Any]
    ) -> _BodyResult:
        """Makes the result of a program from its output."""
        arrays = [*changed.values()]
        numbers = {id(x): n for n, x in enumerate(inputs)}
        flat, treedef = jax.tree.flatten(output)
        for x in flat:
            if id(x) not in numbers:
                numbers[id(x)] = len(inputs) + len(arrays)
                arrays.append(x)
        sources = tuple([numbers[id(x)] for x in flat])
        if sources == (len(inputs) + len(changed),) and output is flat[0]:
            treedef = None
        return cls(arrays, tuple(changed), sources, treedef)

    def write(self, leaves: Sequence[Any]) -> None:
        """Writes the new values of leaves, all or none."""
        if self._changed:
            boxes = [leaves[n] for n in self._changed]
            # Placed as the body would do: in a program the compiler places arrays.
            arrays = map(sharding.moved, self._arrays, map(flattening.raw_of, boxes))
            variables.write_all(boxes, [*arrays])

    def output(self, inputs: Sequence[Any]) -> Any:
        """Puts the output together, of new arrays and inputs."""
        if self._treedef is None:
            return self._arrays[-1]
        arrays = (*inputs, *self._arrays)
        return self._treedef.unflatten([arrays[n] for n in self._sources])

    def flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """JAX's children of it, and the static part."""
        return (self._arrays,), (self._changed, self._sources, self._treedef)


jax.tree_util.register_pytree_node(
    _BodyResult,
    _BodyResult.flatten,
    lambda static, children: _BodyResult(*children, *static),
)


_ARRAYS = (jax.Array, np.ndarray)


def _has_value(x: Any) -> bool:
    """Whether it is an array of numbers, or of random keys, and no tracer."""
    if _jax.is_concrete(type(x)):
        return True
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "biufc"
    is_array = isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer)
    return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# What a program can't see of a layer.


@functools.lru_cache
def _brings_code(graphdef: GraphDef[Any]) -> bool:
    """Whether reading or writing a layer, or its settings, may run code of the user's.

    Also if it holds refs, which a program can't take out of a trace.
    """
    objects = [spec.type for spec in graphdef.specs if spec.index is not None]
    fields = [field for spec in graphdef.specs for field in spec.fields]
    boxes = [field for field in fields if type(field) is VariableDef]
    statics = [field.value for field in fields if type(field) is graphdefs.Static]
    return not (
        all(map(_is_plain_class, objects))
        and all(map(_is_plain_box, boxes))
        and all(map(jax_functions.is_plain, statics))
        and not any([type(field) is graphdefs.ArrayRefDef for field in fields])
    )


@functools.lru_cache
def _is_plain_class(cls: type) -> bool:
    """Whether a class is one of this package, or a subclass that replaces no name."""
    is_ours = [jax_functions.is_ours(base) for base in cls.__mro__]
    first = is_ours.index(True) if True in is_ours else len(is_ours)
    names = {name for base in cls.__mro__[first:] for name in _names_in(base)}
    added = {name for base in cls.__mro__[:first] for name in vars(base)}
    return first < len(is_ours) and not (added - _HARMLESS) & names


def _names_in(cls: type) -> set[str]:
    return {*vars(cls), *vars(cls).get("__annotations__", ()), "__getattr__"}


# Every class has its own ones; bodies of layers use none of them.
_HARMLESS = frozenset(
    [
        *vars(type("", (), {})),
        *("__init__", "__call__", "__annotations__", "__annotate_func__"),
        *("__annotations_cache__", "__static_attributes__", "__firstlineno__"),
        *("__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl"),
    ]
)


def _is_plain_box(definition: VariableDef) -> bool:
    """Whether a Variable is read and written without code of the user's."""
    entries, kind = definition.metadata, definition.type
    has_code = not entries.keys().isdisjoint(metadata.HOOKS)
    is_mutable = entries.get("mutable", True)
    if has_code or not is_mutable or entries["ref"] or entries["hijax"]:
        return False
    return all([getattr(kind, name) is x for name, x in _ACCESS.items()])


_ACCESS = {
    name: getattr(Variable, name)
    for name in "get_value set_value __getitem__ __setitem__ __getattribute__ "
    "_check_valid_context".split()
}
