"""Which methods of a model run on given inputs, found without running anything.

    AbstractCall    a call whose arrays are only shapes; it can be traced
    CallInfo        what is known of one call, a row of a table

`record` traces a call of the model and lists the calls below it, by the paths of their
objects. What a call costs is counted in the finished program, where it is marked. Of
what is mapped or differentiated there the call itself is not in it; so it is traced
once more, by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.annotations import Path
from graftree.core.graph import functional
from graftree.core.objects import methods, running
from graftree.core.objects.attributes import DataObject
from graftree.core.objects.running import Frame
from graftree.core.rng.streams import RngStream
from graftree.core.variables.variables import Variable
from graftree.debugging import costs, object_infos, outlines
from graftree.debugging.costs import Costs, Counter, Marks, Part


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
        flops: The floating-point operations of the call, ``None`` if unasked.
        vjp_flops: Those of the call and its derivative, ``None`` if unasked.

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
    flops: int | None
    vjp_flops: int | None


def filter_rng_streams(row: CallInfo) -> bool:
    """Whether a call is no draw from a stream of random keys.

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


class AbstractCall:
    """A call of a method whose arrays are only shapes.

    Args:
        obj: The object.
        method: The name of the method.
        args: The positional arguments.
        kwargs: The keyword arguments. What is neither an array nor an object in the
            arguments stays what it is.
    """

    def __init__(
        self, obj: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.method = method
        self._given, self._treedef = jax.tree.flatten(
            (args, kwargs), is_leaf=_is_object
        )
        objects = [x for x in self._given if _is_object(x)]
        self._graphdef, state = functional.split([obj, *objects], graph=True)
        leaves, self._state = jax.tree.flatten(state)
        self._refs = [_jax.is_ref(x) for x in leaves]
        # Arrays among the arguments come after those in objects.
        self._leaves = [
            costs.content_type(x) if outlines.is_array(x) else x
            for x in [*leaves, *self._given]
        ]
        self._given = [None if outlines.is_array(x) else x for x in self._given]

    def trace(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """The program of ``run(object, args, kwargs)`` on fresh objects."""
        arrays = {
            number: x
            for number, x in enumerate(self._leaves)
            if isinstance(x, jax.ShapeDtypeStruct)
        }

        def traced(arrays: dict[int, Any]) -> None:
            run(*self._fill([arrays.get(i, x) for i, x in enumerate(self._leaves)]))

        return jax.make_jaxpr(traced)(arrays)

    def _fill(self, values: list[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        count = len(self._refs)
        leaves = [
            jax.new_ref(x) if is_ref else x
            for x, is_ref in zip(values[:count], self._refs, strict=True)
        ]
        state = jax.tree.unflatten(self._state, leaves)
        obj, *objects = functional.merge(self._graphdef, state)
        given = [
            objects.pop(0) if _is_object(x) else value
            for x, value in zip(self._given, values[count:], strict=True)
        ]
        return obj, *jax.tree.unflatten(self._treedef, given)


def _is_object(x: Any) -> bool:
    return isinstance(x, (DataObject, Variable))


def record(
    obj: Any,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counter: Counter,
) -> list[CallInfo]:
    """The calls of methods of an object and those in it, in the order they begin."""
    recorder = _Recorder(obj, counter)

    def run(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.root = root
        recorder.paths = {id(x): path for path, x in object_infos.first_paths(root)}

        def call(root: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(root, method)(*args, **kwargs)

        everything = {"shows_methods": True, "shows_draws": True}
        with methods.observed(recorder.observe, root, **everything):
            methods.Known(call, method)(root, *args, **kwargs)

    return recorder.calls(AbstractCall(obj, method, args, kwargs).trace(run))


class _Recorder:
    """Notes each call the first time that it is made."""

    root: Any
    paths: Mapping[int, Path]

    def __init__(self, original: Any, counter: Counter) -> None:
        self._ids = {path: id(x) for path, x in object_infos.first_paths(original)}
        self._counter = counter
        self._marks = Marks()
        self._known: dict[Any, CallInfo | None] = {}
        self._apart: dict[Any, AbstractCall] = {}

    def observe(self, frame: Frame, call: Callable[[], Any]) -> Any:
        path = self._path_of(frame)
        if path not in self._ids or not methods.is_public(frame.method):
            return call()
        inputs = outlines.outline_arguments(frame.args, frame.kwargs)
        key = path, frame.method, inputs
        if key in self._known:
            return self._marked(key, call)
        order = len(self._known)
        self._known[key] = None
        if self._counter.is_asked:
            self._apart[key] = AbstractCall(
                frame.module, frame.method, frame.args, frame.kwargs
            )
        output = self._marked(key, call)
        self._known[key] = CallInfo(
            order,
            self._ids[path],
            type(frame.module),
            path if frame.method == "__call__" else (*path, frame.method),
            inputs,
            outlines.outline(output),
            None,
            None,
        )
        return output

    def _marked(self, key: Any, call: Callable[[], Any]) -> Any:
        return self._marks.call(key, call) if self._counter.is_asked else call()

    def _path_of(self, frame: Frame) -> Path | None:
        """The path of the object in the model, ``None`` if it is not in it."""
        known = self.paths.get(id(frame.module))
        if known is not None:
            return known
        # Objects inside transforms are fresh ones.
        steps = running.steps_below(self.root, frame.steps)
        if steps is None:
            return None
        return self.paths.get(id(running.reach(self.root, steps)))

    def calls(self, program: Any) -> list[CallInfo]:
        """The calls, with what they cost in a program."""
        parts = self._marks.parts(program)
        return [
            dataclasses.replace(call, **dataclasses.asdict(self._count(parts, key)))
            for key, call in self._known.items()
            if call is not None
        ]

    def _count(self, parts: Mapping[Any, Part], key: Any) -> Costs:
        if key not in self._apart:
            return Costs()
        try:
            part = parts[key] if key in parts else _part_of(self._apart[key])
        except Exception:  # it may need the names of axes that are mapped over
            return self._counter.unknown
        return self._counter.count(part)


def _part_of(call: AbstractCall) -> Part:
    """What a call computes, traced by itself."""
    marks = Marks()

    def run(obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        marks.call(call, lambda: getattr(obj, call.method)(*args, **kwargs))

    return marks.parts(call.trace(run))[call]
