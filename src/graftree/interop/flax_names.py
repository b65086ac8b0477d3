"""The one table of the sub-module paths that programs written for Flax NNX use.

`MODULES` says what ``graftree.<path>`` has, and from which file of this package each
name comes; `ALIASES` gives a module a second path. `install` puts both into
``sys.modules``, so that ``import graftree.variablelib``,
``from graftree.nn.linear import Conv`` and ``nnx.variablelib.Variable`` work. What
always holds:

- the objects are those of the public namespace, never copies;
- names are looked up when first used, so that the table costs next to nothing;
- a path is listed when a program uses it, and a name when its feature exists.

`BESIDE` says the same of the modules beside ``flax.nnx``, for machines without Flax,
and `beside` gives them.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from importlib import machinery
from typing import Any

from graftree.core.modules.refs import with_vars
from graftree.core.states.pure_dicts import as_pure
from graftree.core.variables.variables import Variable
from graftree.interop import deprecations, foreign_names
from graftree.transforms.shape_eval import as_abstract

# The public namespace, as a place where names come from.
_PUBLIC = ""

# Path: {file: names}; "new=old" is a name that has another one in its file. A path that
# is one of its own files is a real module, which gets the names it lacks.
MODULES: Mapping[str, Mapping[str, str]] = {
    # Objects.
    "variablelib": {
        _PUBLIC: "A Variable Param BatchStat Cache Intermediate Perturbation"
        " VariableMetadata with_metadata register_variable_name"
        " variable_name_from_type variable_type_from_name"
        " use_eager_sharding using_eager_sharding var_defaults"
        " config",
        "core.variables.variables": "VariableMeta VariableState=Variable",
        "core.variables.kinds": "VariableTypeCache=TYPES",
        "core.modules.refs": "HijaxVariable AbstractVariable=HijaxVariable",
        "core.variables.metadata": "GetValueHook SetValueHook CreateValueHook"
        " AddAxisHook RemoveAxisHook VarDefaults VarDefaultsContext",
        "_jax": "Ref is_array_ref=is_ref",
        "interop.flax_side.type_aliases": "MISSING Missing SizeBytes",
        "config": "BaseConfigContext=ScopedDefault",
    },
    "pytreelib": {
        _PUBLIC: "Pytree Object Data Static data static dataclass is_data has_data"
        " register_data_type check_pytree"
        " Variable config",
        "core.objects.pytrees": "ObjectMeta PytreeMeta PytreeState",
        "core.objects.attributes": "DATA_REGISTRY",
        "interop.flax_side.type_aliases": "AttributeStatus MISSING Missing SizeBytes",
    },
    "module": {
        _PUBLIC: "M Module capture view view_info with_attributes iter_children"
        " iter_module_children iter_modules"
        " Pytree State split_state config",
        "core.modules.modules": "ModuleMeta first_from",
        "core.modules.capturing": "tuple_init tuple_reduce",
        "annotations": "Key PathParts=Path",
        "core.objects.pytrees": "PytreeMeta",
    },
    "helpers": {
        _PUBLIC: "Dict List Sequential TrainState GraphDef Module Rngs State Variable",
        "nn.sequential": "has_keyword_arg",
        "interop.flax_side.type_aliases": "ModuleDefApply",
        "core.graph.functional": "ApplyCaller",
    },
    "reprlib": {
        "core.text.representations": "Representable MappingReprMixin"
        " SequenceReprMixin PrettyMapping PrettySequence",
        "core.text.descriptions": "Attr Object",
        "core.text.writing": "colorized get_repr COLOR Color NO_COLOR supports_color",
    },
    "visualization": {"debugging.displays": "display render_object_constructor"},
    "summary": {
        "debugging.tables": "tabulate",
        "debugging.calls": "CallInfo filter_rng_streams",
        "debugging.object_infos": "ObjectInfo",
        "debugging.outlines": "ArrayRepr",
        "interop.flax_side.type_aliases": "SizeBytes",
    },
    "tracers": {"core.ownership": "TraceState current_jax_trace=current"},
    # The functional form.
    "graphlib": {
        _PUBLIC: "GraphDef GraphState PureState State FlatState Variable"
        " split merge update state variables graphdef unpack flatten unflatten clone"
        " pop call as_pure set_metadata find_duplicates map recursive_map iter_graph"
        " iter_children iter_module_children SplitContext split_context MergeContext"
        " merge_context UpdateContext update_context current_update_context"
        " set_graph_mode set_graph_updates cached_partial with_vars pure vars_as"
        " map_state config",
        "core.graph.graphdefs": "ArrayRefDef NodeDef NodeRef Static TreeNodeDef"
        " VariableDef",
        "core.graph.flattening": "IndexMap RefMap PythonRefMap=RefMap",
        "core.graph.nodes": "DataElem StaticElem get_node_impl get_node_impl_for_type"
        " is_graph_node is_node is_node_leaf is_node_module is_node_type"
        " is_pytree_node register_graph_node_type register_pytree_node_type",
        "core.paths": "jax_to_nnx_path=from_jax",
        "core.imprints": "HashableMapping",
        "interop.graph_contexts.contexts": "ArrayRefOutput GRAPH_CONTEXT GraphContext"
        " NO_UPDATE NoUpdate Repeated"
        " UpdateContextManager=update_context",
        "interop.older_functions": "graph_pop static_cache",
        "annotations": "Key PathParts=Path",
        "core.graph.functional": "ApplyCaller CallableProxy DelayedAccessor",
        "interop.helpers": "GRAPH_REGISTRY PYTREE_REGISTRY",
        "interop.deprecations": "deprecated",
        "_jax": "is_array_ref=is_ref",
        "interop.flax_side.type_aliases": "is_key_like Leaf Index",
        "config": "BaseConfigContext=ScopedDefault",
    },
    "statelib": {
        _PUBLIC: "State FlatState split_state filter_state merge_state map_state"
        " to_flat_state from_flat_state to_pure_dict replace_by_pure_dict"
        " restore_int_paths",
        "core.states.states": "diff",
        "core.states.flat_states": "create_path_filters",
        "annotations": "Key PathParts=Path",
    },
    "filterlib": {
        _PUBLIC: "All Any Everything Not Nothing OfType PathContains WithTag",
        "core.filters": "PathIn filters_to_predicates to_predicate",
        "annotations": "Filter FilterLiteral Predicate Key PathParts=Path",
        "interop.helpers": "HasTag",
    },
    "rnglib": {
        _PUBLIC: "Rngs RngStream RngState RngKey RngCount split_rngs fork_rngs"
        " with_rngs reseed restore_rngs"
        " Pytree Variable",
        "core.rng.streams": "NotKey",
        "core.rng.model_streams": "SplitBackups backup_keys",
        "annotations": "Key",
        "interop.flax_side.type_aliases": "MISSING Missing",
    },
    "traversals": {
        "core.states.flat_states": "empty_node flatten_mapping flatten_to_sequence"
        " unflatten_mapping",
    },
    # Transforms.
    "extract": {
        "transforms.crossing.prefixes": "PrefixMapping TreeState",
        "interop.graph_contexts.node_states": "NodeStates to_tree from_tree"
        " check_consistent_aliasing clear_non_graph_nodes",
        _PUBLIC: "Pytree State prefix",
        "annotations": "PathParts=Path",
        "interop.flax_side.type_aliases": "Leaf Missing Index",
        "interop.helpers": "check_no_aliases broadcast_prefix broadcast_prefix_map"
        " variable_changed filter_kwargs",
    },
    "transforms.autodiff": {
        "transforms.derivatives.grad": "grad value_and_grad",
        "transforms.derivatives.vjp_jvp": "vjp jvp",
        "transforms.derivatives.custom_vjp": "custom_vjp CustomVjp"
        " SimpleCustomVjp=CustomVjp",
        _PUBLIC: "DiffState remat State",
        "interop.flax_side.type_aliases": "MISSING Missing",
        "transforms.crossing.decorators": "resolve_kwargs=to_positions",
    },
    "transforms.iteration": {
        _PUBLIC: "Carry StateAxes fori_loop pmap scan transform_metadata vmap"
        " while_loop"
        " Module State",
        "interop.flax_side.type_aliases": "Leaf Index Missing PytreeDeque",
        "transforms.crossing.decorators": "resolve_kwargs=to_positions",
    },
    "transforms.compilation": {
        _PUBLIC: "jit jit_partial shard_map StateSharding",
        "transforms.compiled.jit": "JitWrapped SimpleJitWrapped=JitWrapped"
        " SimpleJitPartialWrapped=JitWrapped",
        "transforms.compiled.stages": "Compiled Lowered Stage Traced"
        " SimpleCompiled=Compiled SimpleLowered=Lowered SimpleTraced=Traced"
        " SimplePartialCompiled=Compiled"
        " SimplePartialLowered=Lowered SimplePartialTraced=Traced",
        "interop.flax_side.type_aliases": "MISSING Missing",
        "annotations": "PathParts=Path",
    },
    "transforms.general": {
        "interop.graph_contexts.node_states": "merge_inputs split_inputs",
        "interop.flax_side.type_aliases": "MISSING Missing",
    },
    "transforms.transforms": {
        _PUBLIC: "checkify cond eval_shape make_jaxpr switch Module",
        "transforms.control_flow.cond_switch": "_get_simple_cond_fn=branch_of",
        "transforms.crossing.decorators": "resolve_kwargs=to_positions",
        "interop.flax_side.type_aliases": "Leaf Index MISSING Missing",
        "core.graph.functional": "CallableProxy DelayedAccessor",
    },
    "spmd": {
        _PUBLIC: "PARTITION_NAME with_partitioning get_partition_spec"
        " get_named_sharding as_abstract get_abstract_model abstract_with_sharding"
        " eval_shape",
        "core.variables.partitioning": "add_axis remove_axis get_var_pspec",
        "annotations": "Sharding",
        "interop.deprecations": "deprecated",
    },
    # Layers.
    "nn.attention": {
        "nn.attention": "dot_product_attention dot_product_attention_weights"
        " make_attention_mask make_causal_mask combine_masks",
        _PUBLIC: "MultiHeadAttention RoPE dot_product_attention_with_rope"
        " LayerNorm LinearGeneral",
        "annotations": "Array Initializer DotGeneralT",
        "nn.linear": "default_kernel_init",
        "core.modules.modules": "first_from",
    },
    "nn.dtypes": {
        "nn.support.arguments": "canonicalize_dtype promote_dtype",
        "annotations": "Dtype",
    },
    "nn.linear": {
        "nn.linear": "Linear LinearGeneral Einsum Embed default_bias_init"
        " default_embed_init default_kernel_init",
        _PUBLIC: "Conv ConvTranspose",
        "nn.support.arguments": "canonicalize_padding",
        "interop.older_functions": "_conv_dimension_numbers=conv_dimension_numbers",
        "annotations": "Array LaxPadding PaddingLike ConvGeneralDilatedT EinsumT",
        "core.modules.modules": "first_from",
        "interop.flax_side.type_aliases": "Axis",
    },
    "nn.lora": {
        "nn.lora": "LoRA LoRALinear LoRAParam default_a_initializer"
        " default_b_initializer",
        _PUBLIC: "Linear",
        "interop.flax_side.type_aliases": "Axis",
        "annotations": "Array",
    },
    "nn.normalization": {
        "nn.normalization": "BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm",
        _PUBLIC: "SpectralNorm WeightNorm Module",
        "annotations": "Array",
        "core.modules.modules": "first_from",
    },
    "nn.recurrent": {
        "nn.recurrent": "RNN RNNBase RNNCellBase Bidirectional flip_sequences",
        _PUBLIC: "GRUCell LSTMCell OptimizedLSTMCell SimpleCell Linear",
        "nn.cells": "modified_orthogonal",
        "nn.linear": "default_bias_init default_kernel_init",
        "annotations": "Array Dtype Initializer Shape PromoteDtypeFn",
    },
    "nn.stochastic": {
        _PUBLIC: "Dropout Module",
        "core.modules.modules": "first_from",
    },
    # Training.
    "training.optimizer": {
        _PUBLIC: "Optimizer ModelAndOptimizer OptArray OptState OptVariable"
        " Param Pytree Variable",
        "training.optimizers": "to_opt_state",
        "interop.flax_side.type_aliases": "MISSING",
    },
    # The bridge to Linen, whose files need Flax.
    "bridge": {
        "interop.bridge.to_nnx": "ToNNX lazy_init",
        "interop.bridge.to_linen": "ToLinen to_linen",
        "interop.bridge.functional": "Functional functional",
        "interop.bridge.variables": "NNXMeta with_partitioning",
        "interop.bridge.modules": "Module compact",
        "interop.bridge.contexts": "AttrPriority Scope current_context current_module",
        "interop.bridge.foreign_modules": "linen_in_bridge_mdl nnx_in_bridge_mdl",
    },
    "bridge.wrappers": {
        "interop.bridge.to_nnx": "ToNNX lazy_init",
        "interop.bridge.to_linen": "ToLinen to_linen to_linen_class",
        "interop.bridge.functional": "Functional functional",
        "interop.bridge.linen_side": "current_linen_module linen_rngs_dict",
        _PUBLIC: "Module Pytree Rngs State",
    },
    "bridge.variables": {
        "interop.bridge.variables": "NNXMeta get_col_name is_vanilla_variable"
        " linen_vars_to_nnx_attrs nnx_attrs_to_linen_vars sort_variable_types"
        " to_linen_var to_nnx_var with_partitioning",
        "annotations": "LogicalNames",
    },
    "bridge.module": {
        "interop.bridge.modules": "Module ModuleBase ModuleMeta compact",
        "interop.bridge.binding": "ModuleState has_setup",
        "interop.bridge.contexts": "MODULE_CONTEXT AttrPriority ModuleContext"
        " ModuleStackEntry Scope current_context current_module",
        _PUBLIC: "Pytree register_data_type",
    },
    "bridge.interop": {
        "interop.bridge.foreign_modules": "linen_in_bridge_mdl nnx_in_bridge_mdl",
        _PUBLIC: "nnx_eval_shape=eval_shape nnx_jit=jit",
    },
}

# Names that the public namespace had in earlier releases.
OLDER: Mapping[str, str] = {
    "core.variables.metadata": "use_refs using_refs use_hijax using_hijax",
    "core.modules.refs": "to_hijax to_lojax as_ref_vars as_array_vars as_hijax_vars"
    " as_pytree_vars as_mutable_vars as_immutable_vars",
    "_jax": "ArrayRef=Ref array_ref=new_ref is_array_ref=is_ref",
    "core.modules.modules": "set_mode=view set_mode_info=view_info",
    "core.variables.kinds": "register_variable_name_type_pair=register_variable_name",
    "interop.older_functions": "train_mode eval_mode with_sharding_constraint",
}

# Names that are gone, and what to write today.
GONE: Mapping[str, str] = {
    **{
        name: f"nnx.{name.lower()}" for name in ("Jit", "Pmap", "Remat", "Scan", "Vmap")
    },
    "BatchStats": "nnx.BatchStat",
    "GraphNode": "nnx.Pytree",
    "Intermediates": "nnx.Intermediate",
    "ModuleDef": "nnx.GraphDef",
    "freeze": "nnx.to_arrays",
    "mutable": "nnx.to_refs",
    "mutable_array": "nnx.array_ref",
}

# Second paths of modules of this package.
ALIASES: Mapping[str, str] = {
    "bridge.initializers": "nn.initializers",
    "compat": "interop.compat",
    "deprecations": "interop.deprecations",
    "graph": "graphlib",
    "ids": "interop.ids",
    "initializers": "nn.initializers",
    "metrics": "training.metrics",
    "object": "pytreelib",
    "optimizer": "training.optimizer",
    "proxy_caller": "core.graph.functional",
    "wrappers": "bridge.wrappers",
}

# Modules of this package that are where Flax NNX has them.
SAME = frozenset(
    "nn nn.activations nn.initializers training training.ema training.metrics"
    " transforms".split()
)

# What programs import beside ``flax.nnx``, by the path below ``flax``, for machines
# without Flax.
BESIDE: Mapping[str, Mapping[str, str]] = {
    "struct": {
        "interop.flax_side.pytree_dataclasses": "dataclass field PyTreeNode",
    },
    "traverse_util": {
        "interop.flax_side.nested_dicts": "flatten_dict unflatten_dict empty_node"
        " path_aware_map ModelParamTraversal TraverseTree",
    },
    "serialization": {
        "interop.flax_side.state_dicts": "to_state_dict from_state_dict"
        " register_serialization_state is_serializable current_path",
        "interop.flax_side.msgpack_bytes": "to_bytes from_bytes msgpack_serialize"
        " msgpack_restore MAX_CHUNK_SIZE",
    },
    "core": {
        "interop.flax_side.frozen_dicts": "FrozenDict freeze unfreeze copy pop"
        " pretty_repr",
        "interop.flax_side.partition_boxes": "AxisMetadata map_axis_meta unbox",
    },
    "core.frozen_dict": {
        "interop.flax_side.frozen_dicts": "FrozenDict freeze unfreeze copy pop"
        " pretty_repr FrozenKeysView FrozenValuesView",
    },
    "core.meta": {
        "interop.flax_side.partition_boxes": "AxisMetadata Partitioned PARTITION_NAME"
        " add_axis remove_axis is_axis_metadata map_axis_meta unbox replace_boxed"
        " get_partition_spec get_sharding with_partitioning get_global_mesh"
        " global_mesh_defined",
    },
    "core.spmd": {
        "interop.flax_side.axis_rules": "logical_axis_rules set_logical_axis_rules"
        " get_logical_axis_rules composite_rules from_sharding_rules get_pspec"
        " apply_rules shard_value",
        "annotations": "LogicalRules Sharding",
    },
    "typing": {
        "annotations": "Array Axes Collection ConvGeneralDilatedT DotGeneralT Dtype"
        " EinsumT Initializer Key LaxPadding LogicalNames LogicalRules PRNGKey"
        " PaddingLike PathParts=Path PrecisionLike PromoteDtypeFn Shape ShapeDtype"
        " Sharding VariableDict",
        "interop.flax_side.type_aliases": "ArrayPytree Axis AxisName FrozenVariableDict"
        " In InOutAxis InOutScanAxis Leaf LogicalPartitionSpec"
        " LogicalPartitionSpecPytree MISSING Missing MutableCollection"
        " MutableVariableDict Out PRNGFoldable PartitionSpecPytree Path PytreeDeque"
        " RNGSequences ScanAxis SizeBytes has_shape_dtype is_key_like",
        "interop.flax_side.frozen_dicts": "FrozenDict",
        "core.imprints": "HashableMapping",
        "config": "BaseConfigContext=ScopedDefault",
    },
    "training.train_state": {
        "interop.flax_side.train_states": "TrainState OVERWRITE_WITH_GRADIENT",
    },
    "jax_utils": {
        "interop.flax_side.device_copies": "prefetch_to_device replicate unreplicate",
    },
    "metrics.tensorboard": {"interop.flax_side.summary_writers": "SummaryWriter"},
    "ids": {"interop.ids": "uuid FlaxId=UUID"},
    "version": {"dropin": "__version__=FLAX_VERSION"},
    "configurations": {_PUBLIC: "config"},
}

# Paths below ``flax`` that are modules of this package.
BESIDE_SAME = ("config", "errors")

# Sub-modules that Flax NNX lacks, imported when they are first used.
LATER = (
    "checkpoints",
    "decoding",
    "memory",
    "precision",
    "sharding",
    "surgery",
    "weights",
)

# Names of the public namespace that Flax NNX lacks.
BEYOND = frozenset(
    "AvgPool GlobalAvgPool GlobalMaxPool GlobalMinPool MaxPool MinPool config"
    " Stack debugging errors name touch".split()
).union(LATER)


def has_path(path: str) -> bool:
    """Whether programs for Flax NNX may import ``graftree.<path>``.

    Args:
        path: A dotted path below the public namespace.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.has_path("nn.linear"), flax_names.has_path("nn.conv")
        (True, False)
    """
    return path in MODULES or path in ALIASES or path in SAME


def has_beside(path: str) -> bool:
    """Tells whether `beside` has a module for ``flax.<path>``.

    Args:
        path: A dotted path below ``flax``, or the package of one.

    Example:
        >>> from graftree.interop import flax_names
        >>> [flax_names.has_beside(path) for path in ("training", "struct", "linen")]
        [True, True, False]
    """
    return path in (*BESIDE, *BESIDE_SAME) or bool(_children(path))


def _children(path: str) -> set[str]:
    """The last names of the paths below a path."""
    below = [other.removeprefix(f"{path}.") for other in BESIDE]
    return {name for name in below if "." not in name and f"{path}.{name}" in BESIDE}


@functools.cache
def beside(path: str) -> types.ModuleType:
    """Gives what stands for the module ``flax.<path>`` where there is no Flax.

    Args:
        path: A dotted path below ``flax``, or the package of one.

    Returns:
        A module, always the same, that finds its names when they are first used. It is
        not in ``sys.modules``.

    Raises:
        ModuleNotFoundError: If there is none; names the path.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.beside("training").train_state.TrainState.__name__
        'TrainState'
    """
    if path in BESIDE_SAME:
        return importlib.import_module(_full(path))
    if not has_beside(path):
        raise ModuleNotFoundError(
            f"No module named 'flax.{path}': Graftree has no counterpart for it."
        )
    module = types.ModuleType(f"flax.{path}", f"What programs use of ``flax.{path}``.")
    origins, children = _origins(BESIDE.get(path, {})), _children(path)
    find = _finder(module, origins)

    def find_or_descend(name: str) -> Any:
        return beside(f"{path}.{name}") if name in children else find(name)

    setattr(module, "__getattr__", find_or_descend)  # noqa: B010
    setattr(module, "__all__", [*origins])  # noqa: B010
    setattr(module, "__dir__", lambda: [*origins, *children])  # noqa: B010
    if children:
        setattr(module, "__path__", [])  # noqa: B010
    return module


def top_level_paths() -> frozenset[str]:
    """The paths that lie directly below the public namespace."""
    return frozenset(name for name, _ in list_below(_PUBLIC))


def list_below(path: str) -> list[tuple[str, bool]]:
    """Lists the paths directly below a path: their names, and whether more are below.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.list_below("training")
        [('ema', False), ('metrics', False), ('optimizer', False)]
    """
    paths = {*MODULES, *ALIASES, *SAME}
    packages = {other.rpartition(".")[0] for other in paths}
    return sorted(
        (name, other in packages)
        for other, (package, _, name) in ((x, x.rpartition(".")) for x in paths)
        if package == path
    )


def is_table(name: str) -> bool:
    """Whether a module of this name has no file of its own, but was made of the table.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.is_table("graftree.statelib")
        True
    """
    top, _, path = name.partition(".")
    return top == "graftree" and path in MODULES and path not in MODULES[path]


def install() -> None:
    """Makes all paths of the table importable; the public namespace calls it once.

    Example:
        >>> from graftree.variablelib import Param
        >>> Param is nnx.Param
        True
    """
    for path, files in MODULES.items():
        origins = _origins(files)
        if path in files:
            module = importlib.import_module(_full(path))
        else:
            module = types.ModuleType(_full(path), f"Names of ``flax.nnx.{path}``.")
            setattr(module, "__all__", [*origins])  # noqa: B010
            module.__file__ = __file__
            module.__spec__ = machinery.ModuleSpec(_full(path), None, origin=__file__)
            if any(below.startswith(f"{path}.") for below in MODULES):
                module.__path__ = []  # a package: there are paths below it
            _register(path, module)
        setattr(module, "__getattr__", _finder(module, origins))  # noqa: B010
        setattr(module, "__dir__", _lister(path, module, origins))  # noqa: B010
    for path, target in ALIASES.items():
        _register(path, importlib.import_module(_full(target)))
    for path in ("compat", "nn", "training", "transforms"):
        module = sys.modules[_full(path)]
        setattr(module, "__dir__", _lister(path, module, {}))  # noqa: B010


def _full(path: str) -> str:
    return f"graftree.{path}" if path else "graftree"


def _origins(files: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """For each name the file that it comes from, and its name there."""
    origins = {}
    for file, names in files.items():
        for name in names.split():
            new, _, old = name.partition("=")
            origins[new] = (_full(file), old or new)
    return origins


def _register(path: str, module: types.ModuleType) -> None:
    sys.modules[_full(path)] = module
    package, _, name = path.rpartition(".")
    if package:  # for the namespace itself, `look_up` answers
        setattr(sys.modules[_full(package)], name, module)


def _finder(
    module: types.ModuleType, origins: Mapping[str, tuple[str, str]]
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module with these names."""

    def find(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"Module {module.__name__} has no attribute {name!r}.")
        file, old = origins[name]
        value = getattr(importlib.import_module(file), old)
        setattr(module, name, value)  # the next access is a plain one
        return value

    return find


def _lister(
    path: str, module: types.ModuleType, origins: Mapping[str, Any]
) -> Callable[[], list[str]]:
    """The ``__dir__`` of a module with these names: no files of ours, no imports."""

    def is_public(name: str, value: Any) -> bool:
        if isinstance(value, types.ModuleType):
            return has_path(f"{path}.{name}")
        return not name.startswith("_") and name != "annotations"

    def names() -> list[str]:
        own = {n for n, x in vars(module).items() if n[:2] == "__" or is_public(n, x)}
        return sorted(own | {*origins})

    return names


# Keywords that `vars_as` took before it was called `with_vars`.
_OLDER_KEYWORDS = {"is_hijax": "hijax", "has_ref": "ref", "is_mutable": "mutable"}


@functools.wraps(with_vars)
def _vars_as(node: Any, /, **options: Any) -> Any:
    current = {_OLDER_KEYWORDS.get(key, key): value for key, value in options.items()}
    return with_vars(node, **current)


_older = _origins(OLDER)
DEPRECATED = {
    "abstract_with_sharding": deprecations.deprecated(as_abstract),
    "pure": deprecations.deprecated(as_pure),
    "vars_as": deprecations.deprecated(_vars_as),
}


def list_names() -> list[str]:
    """Lists what the public namespace has for users: for ``dir``, and so for Tab.

    Returns:
        The public names, the sub-modules of the table, and the names that every module
        has; no older names.

    Example:
        >>> from graftree.interop import flax_names
        >>> {"Linear", "variablelib"} <= set(flax_names.list_names())
        True
    """
    namespace = vars(sys.modules[_full(_PUBLIC)])
    of_modules = [name for name in namespace if name.startswith("__")]
    return sorted({*namespace["__all__"], *top_level_paths(), *of_modules})


def look_up(name: str) -> Any:
    """Finds what the public namespace does not list: sub-modules and older names.

    Args:
        name: What stands after ``nnx.``.

    Returns:
        A module of the table, or the object that an older name stands for.

    Raises:
        AttributeError: If there is neither; names the attribute.

    Example:
        >>> from graftree.interop import flax_names
        >>> flax_names.look_up("variablelib") is nnx.variablelib
        True
    """
    if name in MODULES or name in ALIASES:
        return sys.modules[_full(name)]
    if name in LATER:
        return importlib.import_module(_full(name))
    if name == "VariableState":
        warnings.warn(
            "nnx.VariableState is deprecated: States hold Variables. Use nnx.Variable.",
            DeprecationWarning,
            stacklevel=2,
        )
        return Variable
    if name in DEPRECATED:
        return DEPRECATED[name]
    if name in _older:
        file, current = _older[name]
        return getattr(importlib.import_module(file), current)
    form = GONE.get(name) or foreign_names.HINTS.get(name)
    hint = f" Write {form} in its place." if form else ""
    # With its name and the module Python adds what it may be a misspelling of.
    raise AttributeError(
        f"Module graftree has no attribute {name!r}.{hint}",
        name=name,
        obj=sys.modules["graftree"],
    )
