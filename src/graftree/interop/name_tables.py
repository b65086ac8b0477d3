"""Tables of `flax_names.py`: the names that programs for Flax NNX use, with paths.

`MODULES` has the names in ``graftree.<path>``, and the file of this package that each
one comes from; `ALIASES` gives a module a second path. Always:

- a path is listed when a program uses it, and a name when its feature exists;
- the objects are those of the public namespace, never copies.

`BESIDE` does the same for the modules beside ``flax.nnx``, on machines without Flax.
"""

from __future__ import annotations

from collections.abc import Mapping

# The public namespace, as a place where names come from.
PUBLIC = ""

# Path: {file: names}; "new=old" is a name that has another one in its file. A path that
# is one of its own files is a real module, which gets the names it lacks.
MODULES: Mapping[str, Mapping[str, str]] = {
    # Objects.
    "variablelib": {
        PUBLIC: "A Variable Param BatchStat Cache Intermediate Perturbation"
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
        PUBLIC: "Pytree Object Data Static data static dataclass is_data has_data"
        " register_data_type check_pytree"
        " Variable config",
        "core.objects.pytrees": "ObjectMeta PytreeMeta PytreeState",
        "core.objects.attributes": "DATA_REGISTRY",
        "interop.flax_side.type_aliases": "AttributeStatus MISSING Missing SizeBytes",
    },
    "module": {
        PUBLIC: "M Module capture view view_info with_attributes iter_children"
        " iter_module_children iter_modules"
        " Pytree State split_state config",
        "core.modules.modules": "ModuleMeta first_from",
        "core.modules.capturing": "tuple_init tuple_reduce",
        "annotations": "Key PathParts=Path",
        "core.objects.pytrees": "PytreeMeta",
    },
    "helpers": {
        PUBLIC: "Dict List Sequential TrainState GraphDef Module Rngs State Variable",
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
        "debugging.summaries": "tabulate",
        "debugging.module_calls": "CallInfo filter_rng_streams",
        "debugging.outlines": "ArrayRepr ObjectInfo",
        "interop.flax_side.type_aliases": "SizeBytes",
    },
    "ids": {"interop.older_functions": "UUID uuid"},
    "deprecations": {"interop.older_functions": "deprecated"},
    "tracers": {"core.ownership": "TraceState current_jax_trace=current"},
    # The functional form.
    "graphlib": {
        PUBLIC: "GraphDef GraphState PureState State FlatState Variable"
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
        "core.hashable_mappings": "HashableMapping",
        "interop.graph_contexts": "ArrayRefOutput GRAPH_CONTEXT GraphContext"
        " NO_UPDATE NoUpdate Repeated"
        " UpdateContextManager=update_context",
        "interop.older_functions": "graph_pop static_cache deprecated GRAPH_REGISTRY"
        " PYTREE_REGISTRY",
        "annotations": "Key PathParts=Path",
        "core.graph.functional": "ApplyCaller CallableProxy DelayedAccessor",
        "_jax": "is_array_ref=is_ref",
        "interop.flax_side.type_aliases": "is_key_like Leaf Index",
        "config": "BaseConfigContext=ScopedDefault",
    },
    "statelib": {
        PUBLIC: "State FlatState split_state filter_state merge_state map_state"
        " to_flat_state from_flat_state to_pure_dict replace_by_pure_dict"
        " restore_int_paths",
        "core.states.states": "diff",
        "core.states.flat_states": "create_path_filters",
        "annotations": "Key PathParts=Path",
    },
    "filterlib": {
        PUBLIC: "All Any Everything Not Nothing OfType PathContains WithTag",
        "core.filters": "PathIn filters_to_predicates to_predicate",
        "annotations": "Filter FilterLiteral Predicate Key PathParts=Path",
        "interop.older_functions": "HasTag",
    },
    "rnglib": {
        PUBLIC: "Rngs RngStream RngState RngKey RngCount split_rngs fork_rngs"
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
        "transforms.lifting.prefixes": "PrefixMapping TreeState",
        "interop.node_states": "NodeStates to_tree from_tree"
        " check_consistent_aliasing clear_non_graph_nodes",
        PUBLIC: "Pytree State prefix",
        "annotations": "PathParts=Path",
        "interop.flax_side.type_aliases": "Leaf Missing Index",
        "interop.older_functions": "check_no_aliases broadcast_prefix"
        " broadcast_prefix_map variable_changed filter_kwargs",
    },
    "transforms.autodiff": {
        "transforms.derivatives.grad": "grad value_and_grad",
        "transforms.derivatives.vjp_jvp": "vjp jvp",
        "transforms.derivatives.custom_vjp": "custom_vjp CustomVjp"
        " SimpleCustomVjp=CustomVjp",
        PUBLIC: "DiffState remat State",
        "interop.flax_side.type_aliases": "MISSING Missing",
        "transforms.lifting.decorators": "resolve_kwargs=to_positions",
    },
    "transforms.iteration": {
        PUBLIC: "Carry StateAxes fori_loop pmap scan transform_metadata vmap"
        " while_loop"
        " Module State",
        "interop.flax_side.type_aliases": "Leaf Index Missing PytreeDeque",
        "transforms.lifting.decorators": "resolve_kwargs=to_positions",
    },
    "transforms.compilation": {
        PUBLIC: "jit jit_partial shard_map StateSharding",
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
        "interop.node_states": "merge_inputs split_inputs",
        "interop.flax_side.type_aliases": "MISSING Missing",
    },
    "transforms.transforms": {
        PUBLIC: "checkify cond eval_shape make_jaxpr switch Module",
        "transforms.control_flow.cond_switch": "_get_simple_cond_fn=branch_of",
        "transforms.lifting.decorators": "resolve_kwargs=to_positions"
        " _resolve_bound_callable=split_bound",
        "interop.flax_side.type_aliases": "Leaf Index MISSING Missing",
        "core.graph.functional": "CallableProxy DelayedAccessor",
    },
    "spmd": {
        PUBLIC: "PARTITION_NAME with_partitioning get_partition_spec"
        " get_named_sharding as_abstract get_abstract_model abstract_with_sharding"
        " eval_shape",
        "core.variables.partitioning": "add_axis remove_axis get_var_pspec",
        "annotations": "Sharding",
        "interop.older_functions": "deprecated",
    },
    # Layers.
    "nn.activations": {
        "nn.activations": "PReLU",
        PUBLIC: "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity"
        " leaky_relu log_sigmoid log_softmax logsumexp one_hot relu relu6 selu sigmoid"
        " silu soft_sign softmax softplus standardize swish tanh",
    },
    "nn.attention": {
        "nn.attention": "dot_product_attention dot_product_attention_weights"
        " make_attention_mask make_causal_mask combine_masks",
        PUBLIC: "MultiHeadAttention RoPE dot_product_attention_with_rope"
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
        PUBLIC: "Conv ConvTranspose",
        "nn.support.arguments": "canonicalize_padding",
        "interop.older_functions": "_conv_dimension_numbers=conv_dimension_numbers",
        "annotations": "Array LaxPadding PaddingLike ConvGeneralDilatedT EinsumT",
        "core.modules.modules": "first_from",
        "interop.flax_side.type_aliases": "Axis",
    },
    "nn.lora": {
        "nn.lora": "LoRA LoRALinear LoRAParam default_a_initializer"
        " default_b_initializer",
        PUBLIC: "Linear",
        "interop.flax_side.type_aliases": "Axis",
        "annotations": "Array",
    },
    "nn.normalization": {
        "nn.normalization": "BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm",
        "interop.norm_functions": "_canonicalize_axes=canonicalize_axes"
        " _compute_stats=compute_stats _normalize=normalize",
        PUBLIC: "SpectralNorm WeightNorm Module",
        "annotations": "Array",
        "core.modules.modules": "first_from",
    },
    "nn.recurrent": {
        "nn.recurrent": "RNN RNNBase RNNCellBase Bidirectional flip_sequences",
        PUBLIC: "GRUCell LSTMCell OptimizedLSTMCell SimpleCell Linear",
        "nn.cells": "modified_orthogonal",
        "nn.linear": "default_bias_init default_kernel_init",
        "annotations": "Array Dtype Initializer Shape PromoteDtypeFn",
    },
    "nn.stochastic": {
        PUBLIC: "Dropout Module",
        "core.modules.modules": "first_from",
    },
    # Training.
    "training.optimizer": {
        PUBLIC: "Optimizer ModelAndOptimizer OptArray OptState OptVariable"
        " Param Pytree Variable",
        "training.optimizers": "to_opt_state",
        "interop.flax_side.type_aliases": "MISSING",
    },
    # The bridge to Linen, whose files need Flax.
    "bridge": {
        "interop.bridge.wrappers": "ToNNX lazy_init ToLinen to_linen",
        "interop.bridge.linen_style": "Functional functional Module compact"
        " linen_in_bridge_mdl nnx_in_bridge_mdl",
        "interop.bridge.linen_side": "NNXMeta with_partitioning",
        "interop.bridge.binding": "AttrPriority Scope current_context current_module",
    },
    "bridge.wrappers": {
        "interop.bridge.wrappers": "ToNNX lazy_init ToLinen to_linen to_linen_class",
        "interop.bridge.linen_style": "Functional functional",
        "interop.bridge.linen_side": "current_linen_module linen_rngs_dict",
        PUBLIC: "Module Pytree Rngs State",
    },
    "bridge.variables": {
        "interop.bridge.linen_side": "NNXMeta get_col_name is_vanilla_variable"
        " linen_vars_to_nnx_attrs nnx_attrs_to_linen_vars sort_variable_types"
        " to_linen_var to_nnx_var with_partitioning",
        "annotations": "LogicalNames",
    },
    "bridge.module": {
        "interop.bridge.linen_style": "Module ModuleMeta=LinenStyleMeta compact",
        "interop.bridge.binding": "MODULE_CONTEXT AttrPriority ModuleBase"
        " ModuleContext ModuleStackEntry ModuleState Scope current_context"
        " current_module has_setup",
        PUBLIC: "Pytree register_data_type",
    },
    "bridge.interop": {
        "interop.bridge.linen_style": "linen_in_bridge_mdl nnx_in_bridge_mdl",
        PUBLIC: "nnx_eval_shape=eval_shape nnx_jit=jit",
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

# Names that are gone, and their replacements.
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
    "graph": "graphlib",
    "initializers": "nn.initializers",
    "metrics": "training.metrics",
    "object": "pytreelib",
    "optimizer": "training.optimizer",
    "proxy_caller": "core.graph.functional",
    "wrappers": "bridge.wrappers",
}

# Modules of this package that are where Flax NNX has them.
SAME = frozenset(
    "nn nn.initializers training training.ema training.metrics transforms".split()
)

# Modules that programs import beside ``flax.nnx``, by the path below ``flax``, for
# machines without Flax.
BESIDE: Mapping[str, Mapping[str, str]] = {
    "struct": {
        "interop.flax_side.pytree_dataclasses": "dataclass field PyTreeNode",
    },
    "traverse_util": {
        "interop.flax_side.frozen_dicts": "flatten_dict unflatten_dict empty_node"
        " path_aware_map",
    },
    "serialization": {
        "interop.flax_side.state_dicts": "to_state_dict from_state_dict"
        " register_serialization_state current_path to_bytes from_bytes"
        " msgpack_serialize msgpack_restore MAX_CHUNK_SIZE",
    },
    "core": {
        "interop.flax_side.frozen_dicts": "FrozenDict freeze unfreeze copy pop"
        " pretty_repr",
    },
    "core.frozen_dict": {
        "interop.flax_side.frozen_dicts": "FrozenDict freeze unfreeze copy pop"
        " pretty_repr FrozenKeysView FrozenValuesView",
    },
    "core.spmd": {
        "core.variables.sharding": "logical_axis_rules set_logical_axis_rules"
        " get_logical_axis_rules composite_rules",
        "interop.flax_side.type_aliases": "from_sharding_rules get_pspec",
        "annotations": "LogicalRules Sharding",
    },
    "typing": {
        "annotations": "Array Axes Collection ConvGeneralDilatedT DotGeneralT Dtype"
        " EinsumT Initializer Key LaxPadding LogicalNames LogicalRules PRNGKey"
        " PaddingLike PathParts=Path PrecisionLike PromoteDtypeFn Shape ShapeDtype"
        " Sharding VariableDict",
        "interop.flax_side.type_aliases": "Axis FrozenVariableDict Leaf MISSING Missing"
        " PytreeDeque SizeBytes is_key_like",
        "interop.flax_side.frozen_dicts": "FrozenDict",
        "core.hashable_mappings": "HashableMapping",
        "config": "BaseConfigContext=ScopedDefault",
    },
    "training.train_state": {
        "interop.flax_side.training_loops": "TrainState",
    },
    "jax_utils": {
        "interop.flax_side.training_loops": "prefetch_to_device replicate unreplicate",
    },
    "metrics.tensorboard": {"interop.flax_side.training_loops": "SummaryWriter"},
    "ids": {"interop.older_functions": "uuid FlaxId=UUID"},
    "version": {"dropin": "__version__=FLAX_VERSION"},
    "configurations": {PUBLIC: "config"},
}

# Paths below ``flax`` that are modules of this package.
BESIDE_SAME = ("config", "errors")

# Names of ``flax.nnx``, of this release or older ones, that no path above has. A public
# name that is neither here nor there is ours alone.
OF_NAMESPACE = frozenset(
    "EMA Metric MultiMetric avg_pool logical_axis_rules max_pool min_pool pool"
    " to_arrays to_refs".split()
)

# Things with other names in PyTorch, Keras and Linen: the name here, the names there,
# and after a colon the differences.
_LAST = 'channels come last, and the default padding is "SAME"'
_POOL = "channels come last, and the default of `strides` is one"
_ONE = "it returns one value per channel; for more, use nnx.AvgPool or nnx.MaxPool"
_CARRY = (
    "inputs are [batch, time, features]; `return_carry=True` also returns the last "
    "carry; nnx.StackedRNN has several layers, both directions and dropout"
)
_LAYER = "nnx.Sequential takes functions as layers"
_BY_FORM: Mapping[str, str] = {
    "nnx.Module": "Model Layer: sizes are arguments of __init__",
    "nnx.Param(value)": "Parameter",
    "nnx.Variable(value)": "Buffer: gradients and optimizers of nnx.Param skip it",
    "nnx.List(layers)": "ModuleList ParameterList",
    "nnx.Dict(name=layer)": "ModuleDict ParameterDict",
    "nnx.Linear(in_features, out_features, rngs=rngs)": "Dense: "
    "apply the activation separately, as in nnx.relu(x)",
    "nnx.LinearGeneral(in_features, out_features, rngs=rngs)": "DenseGeneral",
    "nnx.Einsum('bi,io->bo', (in_features, out_features), rngs=rngs)": "EinsumDense",
    "nnx.Conv(in_features, out_features, (3,), rngs=rngs)": f"Conv1d Conv1D: {_LAST}",
    "nnx.Conv(in_features, out_features, (3, 3), rngs=rngs)": f"Conv2d Conv2D: {_LAST}",
    "nnx.Conv(in_features, out_features, (3, 3, 3), rngs=rngs)": "Conv3d Conv3D: "
    f"{_LAST}",
    "nnx.ConvTranspose(in_features, out_features, (3, 3), rngs=rngs)": "ConvTranspose1d"
    " ConvTranspose2d ConvTranspose3d Conv1DTranspose Conv2DTranspose Conv3DTranspose: "
    f"{_LAST}",
    "nnx.Embed(num_embeddings, features, rngs=rngs)": "Embedding",
    "nnx.MultiHeadAttention(num_heads, in_features, decode=False, rngs=rngs)": ""
    "MultiheadAttention MultiHeadDotProductAttention: inputs are [batch, length, "
    "features], and a mask is True where a query may attend",
    "nnx.RNN(nnx.OptimizedLSTMCell(in_features, hidden_features, rngs=rngs))": "LSTM: "
    f"{_CARRY}",
    "nnx.RNN(nnx.GRUCell(in_features, hidden_features, rngs=rngs))": f"GRU: {_CARRY}",
    "nnx.RNN(nnx.SimpleCell(in_features, hidden_features, rngs=rngs))": "SimpleRNN: "
    f"{_CARRY}",
    "nnx.BatchNorm(features, momentum=0.9, rngs=rngs)": "BatchNorm1d BatchNorm2d "
    "BatchNorm3d SyncBatchNorm BatchNormalization: channels come last; 0.9 is "
    "PyTorch's momentum of 0.1 (the default is 0.99), and epsilon is 1e-5",
    "nnx.LayerNorm(features, rngs=rngs)": "LayerNormalization: epsilon is 1e-6",
    "nnx.RMSNorm(features, rngs=rngs)": "RMSNormalization: epsilon is 1e-6",
    "nnx.GroupNorm(features, num_groups, rngs=rngs)": "GroupNormalization: channels "
    "come last, and epsilon is 1e-6",
    "nnx.InstanceNorm(features, rngs=rngs)": "InstanceNorm1d InstanceNorm2d "
    "InstanceNorm3d: channels come last, and epsilon is 1e-6",
    "nnx.Dropout(0.5, broadcast_dims=(1, 2), rngs=rngs)": "Dropout1d Dropout2d "
    "Dropout3d SpatialDropout1D SpatialDropout2D SpatialDropout3D: channels come last, "
    "and whole channels are dropped",
    "nnx.MaxPool((2, 2), strides=(2, 2))": "MaxPool1d MaxPool2d MaxPool3d MaxPooling1D "
    f"MaxPooling2D MaxPooling3D: {_POOL}",
    "nnx.AvgPool((2, 2), strides=(2, 2))": "AvgPool1d AvgPool2d AvgPool3d "
    f"AveragePooling1D AveragePooling2D AveragePooling3D: {_POOL}",
    "nnx.GlobalAvgPool()": "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d "
    "GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D: "
    f"{_ONE}",
    "nnx.GlobalMaxPool()": "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
    f"GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D: {_ONE}",
    'lambda x: jax.image.resize(x, (len(x), 64, 64, x.shape[-1]), "bilinear")': ""
    f"Upsample UpSampling2D Resizing: channels come last; {_LAYER}",
    "lambda x: x.reshape(len(x), -1)": "Flatten: channels come last, so the order of "
    f"features differs from PyTorch's; {_LAYER}",
    "lambda x: x.reshape(len(x), 2, -1)": f"Unflatten Reshape: {_LAYER}",
    "lambda x: x": f"Identity Lambda: {_LAYER}",
    "nnx.relu": "ReLU",
    "nnx.gelu": "GELU: the default is the tanh approximation; `approximate=False` is "
    "exact",
    "nnx.silu": "SiLU Swish",
    "nnx.tanh": "Tanh",
    "nnx.sigmoid": "Sigmoid",
    "nnx.softplus": "Softplus",
    "nnx.softmax": "Softmax: it uses the last axis, unless you pass another",
    "nnx.log_softmax": "LogSoftmax: it uses the last axis, unless you pass another",
    "nnx.leaky_relu": "LeakyReLU: its slope is 0.01, in Keras 0.3",
    "nnx.elu": "ELU",
    "optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()": ""
    "CrossEntropyLoss SparseCategoricalCrossentropy NLLLoss: it takes logits, with the "
    "classes last",
    "optax.sigmoid_binary_cross_entropy(logits, targets).mean()": "BCEWithLogitsLoss "
    "BCELoss BinaryCrossentropy: it takes logits, not probabilities",
    "optax.squared_error(predictions, targets).mean()": "MSELoss: to average over "
    "batches, use nnx.metrics.MeanSquaredError",
    "jnp.abs(predictions - targets).mean()": "L1Loss: to average over batches, use "
    "nnx.metrics.MeanAbsoluteError",
    "optax.huber_loss(predictions, targets).mean()": "HuberLoss SmoothL1Loss",
    "nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)": "optim Adam AdamW SGD: "
    "any Optax optimizer works",
    "for x, y in batches: train_step(model, optimizer, x, y)": "DataLoader: batches "
    "can be any iterable of NumPy arrays, such as a PyTorch DataLoader or Grain",
}
# For each of those names, the name here.
HINTS: Mapping[str, str] = {
    name: f"Use {form} instead{colon}{difference}."
    for form, text in _BY_FORM.items()
    for names, colon, difference in [text.partition(": ")]
    for name in names.split()
}
