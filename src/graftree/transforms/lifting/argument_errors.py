"""Errors and warnings of transforms.

Transforms refuse objects at two places, and objects that can't leave a trace. They warn
of changes that don't reach the caller, where nothing else reports them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from graftree import _jax, _python, errors
from graftree.annotations import Path
from graftree.config import Propagation
from graftree.core import paths, walks
from graftree.core.graph import differences, flattening, nodes
from graftree.transforms.lifting.signatures import ARGS, Labels, LeafSpec


def shared_buffer(
    values: Sequence[Any],
    leaf_specs: Sequence[LeafSpec],
    donated: Sequence[bool],
    transform: str,
) -> SharedBufferError | None:
    """Makes the error for leaves that share a buffer which one of them donates."""
    first_positions: dict[Any, int] = {}
    for position, value in enumerate(values):
        for buffer in _buffers(value):
            first = first_positions.setdefault(buffer, position)
            if first != position and (donated[first] or donated[position]):
                pair = [(leaf_specs[i].name, donated[i]) for i in (first, position)]
                return _shared_buffer_error(pair, transform)
    return None


def _buffers(value: Any) -> list[tuple[Any, int]]:
    buffers: list[tuple[Any, int]] = []
    for x in jax.tree.leaves(value):
        if isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer | _jax.Ref):
            with contextlib.suppress(RuntimeError):  # a buffer of it is gone
                buffers += [
                    (shard.device, shard.data.unsafe_buffer_pointer())
                    for shard in x.addressable_shards
                    if x.size
                ]
    return buffers


class SharedBufferError(jax.errors.JaxRuntimeError, ValueError):
    """A buffer is to be donated and has two users; in JAX, one type or the other."""


def _shared_buffer_error(
    arrays: Sequence[tuple[str, bool]], transform: str
) -> SharedBufferError:
    twice = all(is_donated for _, is_donated in arrays)
    shared = "the same buffer twice" if twice else "a buffer that is still needed"
    return SharedBufferError(
        errors.message(
            f"nnx.{transform} can't donate {shared}: two arrays of the arguments share "
            "it.",
            where="\n".join(
                [name + ", donated" * is_donated for name, is_donated in arrays]
            ),
            way_out="Give one of them a copy, x[...] = jnp.copy(x[...]); or, for a "
            "whole model or state, nnx.clone(model, arrays=True). Or make both the "
            "same Variable: model.a = model.b.",
        )
    )


def labeled(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Lists the Variables and refs of labeled trees, with paths as ``.args[0].kernel``.

    Every occurrence is listed; objects are entered once, so that cycles end.
    """
    above = walks.Above()

    def below(x: Any, path: Path) -> list[tuple[Any, Any]]:
        if nodes.is_variable_or_ref(x) or above(x, path) is not None:
            return []
        kind = nodes.kind_of(x)
        if isinstance(kind, nodes.GraphKind):
            children = kind.flatten(x)[0]
            return [
                (paths.key_text(key), y)
                for key, y, is_data in children
                if is_data is not False
            ]
        children = [] if isinstance(kind, nodes.Leaf) else _jax.flatten_one_level(x)[0]
        return [(paths.keystr((entry,)), y) for entry, y in children]

    return [
        ("".join(path), x)
        for label, root in tree.items()
        for path, x in walks.walk(root, below, (f".{label}",))
        if nodes.is_variable_or_ref(x)
    ]


def check_inputs(tree: Any, transform: str, labels: Labels = ARGS) -> None:
    """Refuses arguments in which a Variable or ref occurs twice."""
    args, kwargs = tree
    named = {labels.of(number): x for number, x in enumerate(args)}
    check_none_twice({**named, "kwargs": kwargs}, transform)


def check_none_twice(trees: Mapping[str, Any], transform: str) -> None:
    """Refuses trees, by name, in which a Variable or ref occurs twice."""
    _check(labeled(trees), transform)


def check_arguments(args: Sequence[Any], transform: str) -> None:
    """Refuses a Variable or ref that is in two positional arguments."""
    flat: list[tuple[str, Any]] = []
    for i, x in enumerate(args):
        flat += _each_once(labeled({ARGS.of(i): x}))
    _check(flat, transform)


def check_outputs(
    inputs: Sequence[tuple[str, Any]],
    out: Any,
    mode: Propagation,
    transform: str,
) -> None:
    """Refuses outputs with a Variable of the inputs, or (as trees) with one twice."""
    outputs = labeled({"out": out})
    if mode.sharing:
        outputs = _each_once(outputs)
    _check([*inputs, *outputs], transform)


def check_no_refs(objects: Iterable[Any], out: Any, transform: str) -> None:
    """Refuses new refs in the output of a program that JAX records.

    Where it doesn't, as in ``jax.vmap``, it returns refs like other values.
    """
    if not _jax.is_staging():
        return
    for obj in objects:
        if _jax.is_ref(flattening.raw_of(obj)):
            path = next(path for path, x in labeled({"out": out}) if x is obj)
            raise ValueError(
                f"nnx.{transform} with graph_updates=False returned an array ref at "
                f"{path}, but mutable array references cannot be returned.\nReturn a "
                "copy with arrays, made by nnx.to_arrays, and use nnx.to_refs outside"
                + _other_ways_out(transform)
            )


def _each_once(flat: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Each object with its first path, in the order of the first paths."""
    first_paths: dict[int, tuple[str, Any]] = {}
    for path, leaf in flat:
        first_paths.setdefault(id(leaf), (path, leaf))
    return [*first_paths.values()]


def _check(flat: Iterable[tuple[str, Any]], transform: str) -> None:
    duplicate = nodes.find_duplicate(flat)
    if duplicate is not None:
        obj, first, second = duplicate
        raise ValueError(
            nodes.duplicate_report(obj, first, second)
            + f"\nnnx.{transform} with graph_updates=False does not support Variable "
            "aliasing.\nRemove the duplicates, or pass a copy made by nnx.clone()"
            + _other_ways_out(transform)
        )


def _other_ways_out(transform: str) -> str:
    if transform not in nodes.IN_COMPAT:  # it has no graph updates
        return "."
    return (
        f",\nor use nnx.{transform}(..., graph=True, graph_updates=True),\n"
        f"or use nnx.compat.{transform}."
    )


def check_consistent(
    transform: str, occurrences: Iterable[tuple[tuple[Any, ...], Any, Any]]
) -> None:
    """Refuses a Variable that occurs twice with different prefixes."""
    occurrences_by_id: dict[int, list[tuple[str, Any]]] = {}
    for path, leaf, prefix in occurrences:
        same_leaf = occurrences_by_id.setdefault(id(leaf), [])
        same_leaf.append((paths.to_string(path, "<root>"), prefix))
        if same_leaf[0][1] != prefix:
            lines = "\n".join(f"  {path}: {value}" for path, value in same_leaf)
            raise ValueError(
                "Inconsistent aliasing detected. The following nodes have different "
                f"prefixes in nnx.{transform}:\nNode: {type(leaf).__name__}\n"
                f"{lines}\nGive both paths the same prefix, or pass nnx.clone() of "
                "one of them."
            )


def captured_error(variable: Any, out: Any, transform: str) -> ValueError:
    """Makes the error for returning a Variable of an outer trace."""
    path = next(path for path, leaf in labeled({"out": out}) if leaf is variable)
    return ValueError(
        f"Cannot return captured Variable of type {type(variable).__name__} from "
        f"nnx.{transform}. Found at path: {path}\n"
        "Pass it as an argument, or return its value."
    )


def extracted_error(obj: Any, transform: str) -> ValueError:
    """Makes the error for an object of an outer trace in the output or arguments."""
    return ValueError(
        f"Cannot extract graph node from different trace level: a "
        f"{type(obj).__name__} that nnx.{transform} did not get as an argument is in "
        "its output or was put into an argument.\n"
        "Pass it as an argument, or return a copy made by nnx.clone()."
    )


def changed_class_error(variable: Any, old_class: type, argument: str) -> ValueError:
    """Makes the error for a Variable whose class a function changed.

    Args:
        variable: The Variable.
        old_class: The class that it had.
        argument: The name of the transform, a colon, and that of the argument.
    """
    return ValueError(
        f"Cannot change the class of a Variable inside nnx.{argument} was a "
        f"{old_class.__name__}, and is now a {type(variable).__name__}.\n"
        "Do it before the call, e.g. nnx.surgery.freeze(model), or where the model is "
        "made."
    )


# Warnings.


def pytrees_in(tree: Any) -> list[Any]:
    """Lists the distinct objects with a structure of their own in arguments.

    Containers around them don't count: values put into these are never seen outside.
    """
    leaves = jax.tree.leaves(tree, is_leaf=nodes.is_graph_node)
    pytrees = {id(x): x for x in leaves if nodes.is_node_module(x)}
    return [*pytrees.values()]


def warn_of_lost_structure(
    transform: str, before: Sequence[Any], now: Sequence[Any]
) -> None:
    """Warns about objects whose structure has changed."""
    for old, new in zip(before, now, strict=True):
        changes = differences.between(
            *[
                differences.facts(graphdef, leaves=leaves)
                for graphdef, leaves in map(flattening.flatten_graph, (old, new))
            ]
        )
        if changes:
            lines = "\n  ".join(differences.in_words(changes, "before", "now"))
            _python.warn_user(
                f"nnx.{transform} without graph updates drops a change to a "
                f"{type(new).__name__}. Only the values of Variables reach the caller."
                f"\n  {lines}\nPass graph=True, graph_updates=True, or keep what "
                "changes in a Variable.",
                errors.LostUpdateWarning,
            )


def warn_of_broadcasts(names: Iterable[str]) -> None:
    """Warns about writes to Variables that are the same for all steps of a scan."""
    _python.warn_user(
        f"nnx.scan with graph updates drops writes to broadcast Variables: "
        f"{', '.join(names)}.\nCarry them, give them an axis, or, if you mean it, "
        "assign None in an nnx.StateAxes.",
        errors.LostUpdateWarning,
    )
