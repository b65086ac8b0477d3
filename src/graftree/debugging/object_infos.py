"""What the objects of a model hold: their Variables, and how large they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from graftree.annotations import Key, Path
from graftree.core.graph import traversals
from graftree.core.objects.attributes import DataObject
from graftree.core.rng.streams import RngState
from graftree.core.text import representations
from graftree.core.text.representations import Size
from graftree.core.variables.variables import Variable


class ObjectInfo(NamedTuple):
    """What a table shows of the Variables of an object.

    Attributes:
        path: The first path to the object.
        stats: The sizes of all Variables in it, by type.
        variable_groups: Its own Variables by type, and by the names of its attributes.

    Example:
        >>> stats = {nnx.Param: nnx.summary.SizeBytes(6, 24)}
        >>> nnx.summary.ObjectInfo(("linear",), stats, {}).path
        ('linear',)
    """

    path: Path
    stats: dict[type, Any]
    variable_groups: dict[type, dict[Key, Variable]]


def first_paths(root: Any) -> list[tuple[Path, Any]]:
    """An object and those in it with the first path to each, parents first."""
    listed = [*traversals.iter_graph(root, graph=True)]
    order = {path: number for number, (path, _) in enumerate(listed)}
    found = [(p, x) for p, x in listed if isinstance(x, DataObject) or not p]
    return sorted(found, key=lambda item: [order[p] for p in _prefixes(item[0])[1:]])


def _prefixes(path: Path) -> list[Path]:
    return [path[:end] for end in range(len(path) + 1)]


def of_all(root: Any) -> dict[int, ObjectInfo]:
    """The objects of a model by ``id``; of a shared one, its first path counts.

    A shared Variable belongs to its first owner alone.
    """
    objects = dict(first_paths(root))
    infos = {path: ObjectInfo(path, {}, {}) for path in objects}
    for path, x in traversals.iter_graph(root, graph=True):
        if isinstance(x, Variable):
            _count(x, path, infos)
    return {id(objects[path]): info for path, info in infos.items()}


def _count(variable: Variable, path: Path, infos: Mapping[Path, ObjectInfo]) -> None:
    kind = type(variable)
    kind = RngState if issubclass(kind, RngState) else kind
    size = representations.size_of(variable.get_raw_value())
    owners = _prefixes(path)[:-1]
    for owner in owners:
        info = infos.get(owner)  # containers have none
        if info is not None and size.elements:
            known = info.stats.get(kind, Size(0, 0))
            info.stats[kind] = Size(*map(sum, zip(known, size, strict=True)))
    if owners and owners[-1] in infos:
        infos[owners[-1]].variable_groups.setdefault(kind, {})[path[-1]] = variable
