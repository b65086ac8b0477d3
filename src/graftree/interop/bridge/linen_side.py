"""Imports Flax, here alone, and converts variables of Linen to Variables and back.

Importing this file imports ``flax.linen``; without Flax that is an ``ImportError``,
which names the package to install.

Linen keeps variables in nested dicts by collection, ``{"params": {"layer": {"kernel":
array}}}``; in a Module the collection is the type of the Variable: `Param`. Linen
keeps further facts about a variable in a *box* around it; Modules keep them as metadata
of the Variable, with the class of the box as ``linen_meta_type``. Both directions keep
all of it, so each undoes the other.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graftree import errors
from graftree.core.states import flat_states
from graftree.core.variables import kinds, partitioning
from graftree.core.variables.variables import Variable

try:
    from flax import core, errors as linen_errors, linen, struct
    from flax.core import meta
    from flax.linen import module as _linen_modules
except ImportError as error:
    raise ImportError(
        "nnx.bridge connects Modules with those of flax.linen, so it needs the "
        "package flax, which can't be imported here.\n"
        "Install it: pip install flax",
        name="flax",
    ) from error

__all__ = ["core", "linen", "linen_errors", "meta", "struct"]


def current_linen_module() -> linen.Module | None:
    """Returns the Linen Module whose method runs, or None."""
    # Flax has no public name for it.
    stack = _linen_modules._context.module_stack
    return stack[-1] if stack else None


def linen_rngs_dict(
    linen_module: linen.Module, add_default: bool = False
) -> dict[str, jax.Array]:
    """Draws a new key from each random stream of a bound Linen Module.

    Args:
        linen_module: A bound Module.
        add_default: Whether to add a constant ``default`` key if there is no such
            stream, for draws whose results are not used.

    Raises:
        ValueError: If the Module is not bound.
    """
    if linen_module.scope is None:
        raise ValueError(
            f"{type(linen_module).__name__} has no random streams before it is bound: "
            "call it inside of `init` or `apply`."
        )
    keys: dict[str, Any] = {
        name: linen_module.make_rng(name) for name in linen_module.scope.rngs
    }
    if add_default:
        keys.setdefault("default", jax.random.key(0))
    return keys


A = TypeVar("A")
B = TypeVar("B")

_BOX_TYPE = "linen_meta_type"


class NNXMeta(struct.PyTreeNode, meta.AxisMetadata[A]):
    """Box in which Linen keeps a Variable that has metadata.

    Attributes:
        var_type: The type of the Variable.
        value: Its value.
        metadata: Its metadata. Transforms of Linen change the names of axes in it, as
            those of ours do: ``out_sharding``, and what ``metadata_params`` names.

    Example:
        >>> kernel = nnx.Param(jnp.ones(2), tag="first")
        >>> box = nnx.bridge.variables.to_linen_var(kernel)
        >>> box.metadata, box.to_nnx_variable().tag
        ({'tag': 'first'}, 'first')
    """

    var_type: type[Variable[Any]] = struct.field(pytree_node=False)
    value: Any = struct.field(pytree_node=True)
    metadata: dict[str, Any] = struct.field(pytree_node=False)

    def unbox(self) -> A:
        """Returns the value."""
        return self.value

    def replace_boxed(self, val: B) -> NNXMeta[B]:
        """Makes a box with another value and the same metadata."""
        return cast(Any, self).replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> NNXMeta[A]:
        """Makes a box with a name for an axis that a transform of Linen has added.

        Args:
            index: The position of the axis.
            params: The transform's ``metadata_params``. Without `nnx.PARTITION_NAME`
                the axis has no name.
        """
        return self._renamed(partitioning.add_axis, index, params)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> NNXMeta[A]:
        """Makes a box without the name of an axis; undoes `add_axis`.

        Args:
            index: The position of the axis.
            params: As for `add_axis`.
        """
        return self._renamed(partitioning.remove_axis, index, params)

    def _renamed(
        self, change: Callable[..., Any], index: int, params: Mapping[Any, Any]
    ) -> NNXMeta[A]:
        variable = self._variable()
        change(variable, index, {partitioning.PARTITION_NAME: None, **params})
        metadata = {key: variable.get_metadata(key) for key in self.metadata}
        is_same = metadata == self.metadata
        return self if is_same else cast(Any, self).replace(metadata=metadata)

    def _variable(self) -> Variable[A]:
        """Makes a Variable with the value and the metadata, without placing it."""
        entries = {"hijax": False, **self.metadata}
        return self.var_type.from_metadata(self.value, entries)

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the PartitionSpec of ``out_sharding``; empty without one."""
        return partitioning.get_var_pspec(self._variable()) or PartitionSpec()

    def to_nnx_variable(self) -> Variable[A]:
        """Makes a new Variable of the type, with the value and the metadata."""
        return _make(self.var_type, self.value, self.metadata)


def is_vanilla_variable(vs: Variable[Any]) -> bool:
    """Returns whether a Variable has no metadata of its own.

    Args:
        vs: The Variable.

    Example:
        >>> [
        ...     nnx.bridge.variables.is_vanilla_variable(variable)
        ...     for variable in (nnx.Param(1), nnx.Param(1, tag="first"))
        ... ]
        [True, False]
    """
    return not vs.get_metadata(exclude_required=True)


def to_linen_var(vs: Variable[Any]) -> Any:
    """Converts a Variable to its entry in a collection of Linen.

    Args:
        vs: The Variable.

    Returns:
        Its value if it has no metadata; else a box: of the class ``linen_meta_type`` in
        its metadata, or an `NNXMeta`.

    Example:
        >>> nnx.bridge.variables.to_linen_var(nnx.Param(1.0))
        1.0
    """
    value = vs.get_value()
    metadata = vs.get_metadata(exclude_required=True)
    box_type = metadata.get(_BOX_TYPE)
    if box_type is not None:
        if hasattr(box_type, "from_nnx_metadata"):
            return box_type.from_nnx_metadata({"value": value, **metadata})
        del metadata[_BOX_TYPE]
        return box_type(value=value, **metadata)
    return NNXMeta(type(vs), value, metadata) if metadata else value


def to_nnx_var(col: str, x: Any) -> Variable[Any]:
    """Converts an entry in a collection of Linen to a Variable.

    Args:
        col: The name of the collection; an unknown one is registered, with a new type.
        x: A value, or a box with one.

    Returns:
        A new Variable of the type of the collection, whose metadata is that of the box.
        It is placed by its ``out_sharding`` where there is a mesh.

    Raises:
        ValueError: If the box is an `NNXMeta` for another type of Variable.

    Example:
        >>> nnx.bridge.variables.to_nnx_var("batch_stats", jnp.zeros(2)).var_type
        <class 'graftree.core.variables.kinds.BatchStat'>
    """
    var_type = kinds.variable_type_from_name(col, allow_register=True)
    if isinstance(x, NNXMeta):
        if x.var_type is not var_type:
            raise ValueError(
                f"The collection {col!r} is for Variables of type {var_type.__name__}, "
                f"but has an NNXMeta of a {x.var_type.__name__}."
            )
        return x.to_nnx_variable()
    if not isinstance(x, meta.AxisMetadata):
        return var_type(x)
    entries = _box_entries(x)
    return _make(var_type, entries.pop("value"), {**entries, _BOX_TYPE: type(x)})


def _make(var_type: Any, value: Any, metadata: dict[str, Any]) -> Any:
    """Makes a Variable with Linen's metadata, where axis names may wait for a mesh."""
    annotation = metadata.get("out_sharding")
    is_placed = (
        annotation is None
        or isinstance(annotation, NamedSharding)
        or metadata.get("mesh") is not None
        or not jax.sharding.get_abstract_mesh().empty
    )
    options = {} if is_placed else {"eager_sharding": False}
    return var_type(value, **{**options, **metadata})


def _box_entries(box: Any) -> dict[str, Any]:
    """Returns the value of a box, and its other attributes as metadata."""
    if hasattr(box, "to_nnx_metadata"):
        # From a copy: the boxes of Flax rename their attributes for it.
        return dict(copy.copy(box).to_nnx_metadata())
    if dataclasses.is_dataclass(box):
        names = [field.name for field in dataclasses.fields(box)]
        return {name: getattr(box, name) for name in names}
    return dict(vars(box))


def unboxed(x: Any) -> Any:
    """Returns the value in a box of Linen, or the value itself."""
    return x.unbox() if isinstance(x, meta.AxisMetadata) else x


def get_col_name(keypath: Sequence[Any]) -> str:
    """Returns the collection that a path into variables of Linen starts with.

    Args:
        keypath: A path as ``jax.tree_util`` gives it.

    Raises:
        ValueError: If it does not start with the key of a dict.

    Example:
        >>> (path, _), *_ = jax.tree.leaves_with_path({"params": {"bias": 1.0}})
        >>> nnx.bridge.variables.get_col_name(path)
        'params'
    """
    if not keypath or not isinstance(keypath[0], jax.tree_util.DictKey):
        raise ValueError(
            "get_col_name expects a path of JAX that starts with a DictKey, "
            f"got {keypath!r}."
        )
    return str(keypath[0].key)


def sort_variable_types(types: Iterable[type]) -> list[type]:
    """Sorts types of Variables so that none comes before one derived from it.

    Used as filters in this order, each finds its own Variables. Types that don't derive
    from each other stay in order.

    Args:
        types: The types.

    Example:
        >>> sorted_types = nnx.bridge.variables.sort_variable_types(
        ...     [nnx.Variable, nnx.Param, nnx.LoRAParam]
        ... )
        >>> [t.__name__ for t in sorted_types]
        ['LoRAParam', 'Param', 'Variable']
    """
    return sorted(types, key=lambda t: -len(t.__mro__))


def linen_vars_to_nnx_attrs(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the variables of a Linen Module to attributes of a Module.

    Args:
        variables: Collections by name, each a nested mapping.

    Returns:
        Nested dicts of new Variables, the collections merged.

    Raises:
        ValueError: If two collections have a variable at the same path, or one a
            variable where the other has a mapping.

    Example:
        >>> variables = {"params": {"bias": 1.0}, "batch_stats": {"mean": 0.0}}
        >>> attributes = nnx.bridge.variables.linen_vars_to_nnx_attrs(variables)
        >>> {name: type(variable).__name__ for name, variable in attributes.items()}
        {'bias': 'Param', 'mean': 'BatchStat'}
    """
    attributes: dict[str, Any] = {}
    for path, variable in flat_variables(variables):
        node = attributes
        for depth, key in enumerate(path[:-1], start=1):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise duplicate_error(path[:depth], variable, node)
        if path[-1] in node:
            raise duplicate_error(path, variable, node[path[-1]])
        node[path[-1]] = variable
    return attributes


def flat_variables(
    variables: Mapping[str, Any],
) -> list[tuple[tuple[Any, ...], Variable[Any]]]:
    """Converts variables of Linen to new Variables, with their paths in the Module."""
    return [
        (path, to_nnx_var(col, x))
        for col, tree in variables.items()
        for path, x in flat_states.leaves(tree)
    ]


def duplicate_error(path: tuple[Any, ...], first: Any, second: Any) -> ValueError:
    """Makes the error for two things at the same path of a Module."""
    return ValueError(
        errors.message(
            f"Found duplicate variable path {path}: a Linen Module may use a name once "
            "in each collection, a Module once altogether.",
            where="\n".join(_kind(x) for x in (first, second)),
            way_out="Rename one of the two in the Linen Module.",
        )
    )


def _kind(x: Any) -> str:
    if isinstance(x, Variable):
        return f"a variable of the collection {collection_of(x)!r}"
    return f"a {type(x).__name__} with the names {sorted(map(str, x))}"


def collection_of(variable: Variable[Any]) -> str:
    """Returns the collection of a Variable; an unknown type is registered by name."""
    return kinds.variable_name_from_type(type(variable), allow_register=True)


def nnx_attrs_to_linen_vars(nnx_attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Converts the attributes of a Module to variables of a Linen Module.

    Args:
        nnx_attrs: Nested mappings of Variables, or a State. A type of Variable without
            a name is registered under the name of its class.

    Returns:
        Nested dicts by collection, of values and boxes (see `to_linen_var`).

    Raises:
        ValueError: If there is anything but Variables.

    Example:
        >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> collections = nnx.bridge.variables.nnx_attrs_to_linen_vars(nnx.state(model))
        >>> jax.tree.map(jnp.shape, collections)
        {'params': {'kernel': (2, 1)}}
    """
    linen_variables: dict[tuple[Any, ...], Any] = {}
    for path, variable in flat_states.leaves(nnx_attrs):
        if not isinstance(variable, Variable):
            raise ValueError(
                f"Cannot infer collection name from value: {variable!r}\nat the path "
                f"{path}. The type of a Variable says its collection; only nested "
                "mappings of Variables can become variables of Linen."
            )
        linen_variables[collection_of(variable), *path] = to_linen_var(variable)
    return flat_states.unflatten_mapping(linen_variables)


def with_partitioning(
    fn: Callable[..., Any], names: tuple[str | None, ...], mesh: Mesh | None = None
) -> Callable[..., Any]:
    """Wraps an initializer so that its Variables become ``nn.Partitioned`` in Linen.

    Args:
        fn: The initializer.
        names: The name of a mesh axis for each dimension, or None.
        mesh: The mesh, where it is not set by ``jax.set_mesh``.

    Returns:
        A function with the arguments of ``fn``, for `Param` and other Variables. Their
        metadata has ``out_sharding`` and ``mesh``.

    Example:
        >>> init = nnx.bridge.with_partitioning(nnx.initializers.ones, ("data", None))
        >>> boxed = init(jax.random.key(0), (2, 3))
        >>> kernel = nnx.Param(boxed, eager_sharding=False)
        >>> nnx.bridge.variables.to_linen_var(kernel).names
        ('data', None)
    """
    box_type = {_BOX_TYPE: linen.Partitioned}
    return partitioning.with_partitioning(fn, names, mesh=mesh, **box_type)
