"""Values and objects as tables show them: shapes, names, the Variables of each.

`outline` turns a value into nested dicts, lists and texts: shapes in place of arrays,
names in place of objects; `write` lists these line by line, as YAML does. The text is
markup of rich: dtypes are dim. An `ObjectInfo` has the Variables of an object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftree.annotations import Key, Path
from graftree.core import paths
from graftree.core.graph import nodes, traversals
from graftree.core.modules.containers import Dict, List
from graftree.core.objects.attributes import DataObject
from graftree.core.rng.streams import RngState
from graftree.core.text import descriptions, representations
from graftree.core.variables.variables import Variable


@dataclasses.dataclass(frozen=True)
class ArrayRepr:
    """Shape and dtype of an array.

    Attributes:
        shape: The shape.
        dtype: The dtype.

    Example:
        >>> print(nnx.summary.ArrayRepr.from_array(jnp.ones((2, 3))))
        float32[2,3]
    """

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def from_array(cls, x: Any) -> ArrayRepr:
        """Takes the shape and dtype of an array, or of a value like one."""
        return cls(tuple(x.shape), x.dtype)

    def __str__(self) -> str:
        return descriptions.describe(self)


def is_array(x: Any) -> bool:
    """Whether a value is an array, or stands for one."""
    is_other = isinstance(x, (type, np.generic, Variable, DataObject))
    return not is_other and descriptions.has_form(x)


def outline(x: Any) -> Any:
    """Turns a value into shapes and texts, in dicts, lists and tuples."""
    if x is None or isinstance(x, (str, ArrayRepr)):
        return x
    if isinstance(x, type):
        return f"type[{x.__name__}]"
    if is_array(x):
        return ArrayRepr.from_array(x)
    if isinstance(x, Variable):
        return {"value": outline(x.get_raw_value())}
    if isinstance(x, (Mapping, Dict)):
        return {str(key): outline(value) for key, value in x.items()}
    if isinstance(x, List) or type(x) in (list, tuple):
        return (tuple if type(x) is tuple else list)(map(outline, x))
    if isinstance(x, DataObject):
        return f"{type(x).__name__}(...)"
    if nodes.is_node(x):
        return _outline_node(x)
    return " ".join(descriptions.safe_repr(x).split())  # on one line


def _outline_node(x: Any) -> Any:
    outlined = {child.key: outline(child.value) for child in nodes.children(x)}
    if [*outlined] == [*range(len(outlined))]:
        return [*outlined.values()]
    return {str(key): value for key, value in outlined.items()}


def outline_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Writes the arguments of a call, as a table shows them."""
    if len(args) == 1 and not kwargs:
        return write("None" if args[0] is None else outline(args[0]))
    lines = _list_lines(map(outline, args))
    named = {name: outline(value) for name, value in kwargs.items()}
    return "\n".join([*lines, *_mapping_lines(named)])


def write(outlined: Any) -> str:
    """Writes an outline as markup; a bare ``None`` is empty."""
    return "" if outlined is None else "\n".join(_lines(outlined))


def _lines(x: Any) -> list[str]:
    if isinstance(x, dict):
        return _mapping_lines(x) if x else ["{}"]
    if isinstance(x, (list, tuple)):
        return _list_lines(x) if x else ["[]"]
    if isinstance(x, ArrayRepr):
        return [f"[dim]{x.dtype}[/dim]{descriptions.describe_shape(x.shape)}"]
    return [escape(str(x).replace("\n", "\\n"))]


def escape(text: str) -> str:
    """Escapes a text that may look like markup."""
    from rich import markup

    return markup.escape(text)


def _list_lines(items: Iterable[Any]) -> list[str]:
    lines = []
    for item in items:
        first, *rest = _lines(item)
        lines += [f"- {first}", *[f"  {line}" for line in rest]]
    return lines


def _mapping_lines(x: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in sorted(x):
        value, key = x[name], escape(name)
        inner = _lines(value)
        if isinstance(value, (dict, list, tuple)) and value:
            # The dashes of a list already set it apart.
            indent = "  " if isinstance(value, dict) else ""
            lines += [f"{key}:", *[indent + line for line in inner]]
        else:
            lines.append(f"{key}: {inner[0]}".rstrip())
    return lines


# The contents of the objects of a model: their Variables, and their sizes.


class ObjectInfo(NamedTuple):
    """Variables of an object, as a table shows them.

    Attributes:
        path: The first path to the object.
        stats: The sizes of all Variables in it, by type.
        variable_groups: Its own Variables by type, and by the names of its attributes.
        name: The name of its class; for a function, its own.

    Example:
        >>> stats = {nnx.Param: nnx.summary.SizeBytes(6, 24)}
        >>> nnx.summary.ObjectInfo(("linear",), stats, {}).path
        ('linear',)
    """

    path: Path
    stats: dict[type, Any]
    variable_groups: dict[type, dict[Key, Variable]]
    name: str = ""


def first_paths(root: Any) -> list[tuple[Path, Any]]:
    """Lists an object and those in it with the first path to each, parents first.

    This includes functions that are items of a container, as in a `Sequential`.
    """
    return paths.sorted_by_path(
        (path, x)
        for path, x in traversals.iter_graph(root, graph=True)
        if isinstance(x, DataObject) or not path or _is_layer(path[-1], x)
    )


def _is_layer(key: Key, x: Any) -> bool:
    """Whether an item of a container is a function."""
    return isinstance(key, int) and not nodes.is_node(x) and callable(x)


def of_all(root: Any) -> dict[int, ObjectInfo]:
    """Describes the objects of a model by ``id``; the first path to each counts.

    A shared Variable belongs only to its first owner.
    """
    objects = dict(first_paths(root))
    infos = {path: ObjectInfo(path, {}, {}, _name(x)) for path, x in objects.items()}
    for path, x in traversals.iter_graph(root, graph=True):
        if isinstance(x, Variable):
            _count(x, path, infos)
    return {id(objects[path]): info for path, info in infos.items()}


def _name(x: Any) -> str:
    is_object = isinstance(x, DataObject) or nodes.is_node(x)
    function_name = "" if is_object else descriptions.callable_name(x)
    return function_name or type(x).__name__


def _count(variable: Variable, path: Path, infos: Mapping[Path, ObjectInfo]) -> None:
    variable_type = type(variable)
    variable_type = RngState if issubclass(variable_type, RngState) else variable_type
    size = representations.size_of(variable.get_raw_value())
    owners = [infos.get(path[:end]) for end in range(len(path))]
    for info in owners:
        if info is not None and size.elements:  # containers have none
            total = info.stats.get(variable_type, representations.Size())
            info.stats[variable_type] = representations.total([total, size])
    if owners and owners[-1] is not None:
        owners[-1].variable_groups.setdefault(variable_type, {})[path[-1]] = variable
