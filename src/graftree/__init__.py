"""Graftree: object-oriented neural networks for JAX, with the API of `flax.nnx`.

    >>> import jax, optax
    >>> import graftree as nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))  # holds its parameters
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    >>> @nnx.jit
    ... def train_step(model, optimizer, x, y):  # changes both in place
    ...     grads = nnx.grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    ...     optimizer.update(model, grads)
    >>> train_step(model, optimizer, jax.numpy.ones((4, 2)), jax.numpy.ones((4, 1)))

A model is a Python class: derive it from `nnx.Module`, and make layers such as
`nnx.Linear` its attributes. Compile and differentiate functions of models with
`nnx.jit` and `nnx.grad`; plain `jax.jit` gets a copy, and what it writes there is lost.
`help(nnx.Module)`, `help(nnx.jit)` and so on explain each name with an example. Tools
are in sub-modules: `nnx.checkpoints`, `nnx.weights`, `nnx.training`, `nnx.surgery`,
`nnx.precision`, `nnx.sharding`, `nnx.memory`, `nnx.decoding` and `nnx.debugging`.
"""

# This file is the public namespace, and the only re-export in the package.

from __future__ import annotations

import typing as _typing
from types import ModuleType as _ModuleType

from graftree import config, debugging, errors
from graftree.config import set_graph_mode, set_graph_updates
from graftree.core.exporting import install as _install_exporting
from graftree.core.filters import (
    All,
    Any,
    Everything,
    Not,
    Nothing,
    OfType,
    PathContains,
    WithTag,
)
from graftree.core.graph.functional import (
    PureState,
    call,
    clone,
    flatten,
    graphdef,
    merge,
    split,
    state,
    unflatten,
    unpack,
)
from graftree.core.graph.graph_states import GraphState
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.graph.traversals import (
    find_duplicates,
    iter_children,
    iter_graph,
    iter_module_children,
    map,
    recursive_map,
)
from graftree.core.graph.updates import pop, set_metadata, update
from graftree.core.modules.capturing import capture
from graftree.core.modules.containers import Dict, List
from graftree.core.modules.modules import (
    M,
    Module,
    iter_modules,
    view,
    view_info,
    with_attributes,
)
from graftree.core.modules.refs import to_arrays, to_refs, with_vars
from graftree.core.objects.attributes import (
    Data,
    Static,
    data,
    dataclass,
    has_data,
    is_data,
    register_data_type,
    static,
)
from graftree.core.objects.pytrees import Object, Pytree, check_pytree, touch
from graftree.core.rng.model_streams import (
    fork_rngs,
    reseed,
    restore_rngs,
    split_rngs,
    with_rngs,
)
from graftree.core.rng.streams import RngCount, RngKey, Rngs, RngState, RngStream
from graftree.core.states.flat_states import FlatState
from graftree.core.states.pure_dicts import (
    as_pure,
    replace_by_pure_dict,
    restore_int_paths,
    to_pure_dict,
)
from graftree.core.states.states import (
    State,
    filter_state,
    from_flat_state,
    map_state,
    merge_state,
    split_state,
    to_flat_state,
)
from graftree.core.variables.kinds import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    register_variable_name,
    variable_name_from_type,
    variable_type_from_name,
)
from graftree.core.variables.metadata import (
    VariableMetadata,
    var_defaults,
    with_metadata,
)
from graftree.core.variables.partitioning import (
    PARTITION_NAME,
    get_named_sharding,
    get_partition_spec,
    with_partitioning,
)
from graftree.core.variables.sharding import (
    logical_axis_rules,
    use_eager_sharding,
    using_eager_sharding,
)
from graftree.core.variables.variables import A, Variable
from graftree.debugging.displays import display
from graftree.debugging.summaries import tabulate
from graftree.interop.flax_names import install as _install
from graftree.interop.flax_names import list_names as _list_names
from graftree.interop.flax_names import look_up as _look_up
from graftree.interop.graph_contexts import (
    MergeContext,
    SplitContext,
    UpdateContext,
    current_update_context,
    merge_context,
    split_context,
    update_context,
)
from graftree.interop.node_states import NodeStates, from_tree, to_tree
from graftree.memory.keeping import name
from graftree.nn import initializers
from graftree.nn.activations import (
    PReLU,
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    identity,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    one_hot,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    standardize,
    swish,
    tanh,
)
from graftree.nn.attention import (
    combine_masks,
    dot_product_attention,
    make_attention_mask,
    make_causal_mask,
)
from graftree.nn.cells import (
    GRUCell,
    LSTMCell,
    OptimizedLSTMCell,
    RNNCellBase,
    SimpleCell,
)
from graftree.nn.conv import Conv, ConvTranspose
from graftree.nn.dropout import Dropout
from graftree.nn.initializers import Initializer
from graftree.nn.linear import Einsum, Embed, Linear, LinearGeneral
from graftree.nn.lora import LoRA, LoRALinear, LoRAParam
from graftree.nn.multi_head_attention import MultiHeadAttention
from graftree.nn.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
)
from graftree.nn.pooling import (
    AvgPool,
    GlobalAvgPool,
    GlobalMaxPool,
    GlobalMinPool,
    MaxPool,
    MinPool,
    avg_pool,
    max_pool,
    min_pool,
    pool,
)
from graftree.nn.recurrent import RNN, Bidirectional, StackedRNN
from graftree.nn.reparametrization import SpectralNorm, WeightNorm
from graftree.nn.rope import RoPE, dot_product_attention_with_rope
from graftree.nn.sequential import Sequential
from graftree.sharding.placement import as_abstract, get_abstract_model
from graftree.surgery.stacks import Stack
from graftree.training import metrics
from graftree.training.ema import EMA
from graftree.training.metrics import Metric, MultiMetric
from graftree.training.optimizers import (
    ModelAndOptimizer,
    OptArray,
    Optimizer,
    OptState,
    OptVariable,
)
from graftree.training.train_states import TrainState
from graftree.transforms.compiled.jit import jit
from graftree.transforms.compiled.partials import cached_partial, jit_partial
from graftree.transforms.control_flow.cond_switch import cond, switch
from graftree.transforms.control_flow.loop_bodies import Carry
from graftree.transforms.control_flow.loops import fori_loop, while_loop
from graftree.transforms.control_flow.scan import scan
from graftree.transforms.crossing.prefixes import (
    DiffState,
    StateAxes,
    StateSharding,
    prefix,
)
from graftree.transforms.derivatives.custom_vjp import custom_vjp
from graftree.transforms.derivatives.grad import grad, remat, value_and_grad
from graftree.transforms.derivatives.vjp_jvp import jvp, vjp
from graftree.transforms.maps import pmap, shard_map, transform_metadata, vmap
from graftree.transforms.recordings import checkify, eval_shape, make_jaxpr

__version__ = "0.1.0"

# The older name of `state`.
variables = state

__all__ = [
    "config",
    "checkpoints",
    "debugging",
    "decoding",
    "errors",
    "memory",
    "precision",
    "sharding",
    "surgery",
    "training",
    "weights",
    "set_graph_mode",
    "set_graph_updates",
    "A",
    "Variable",
    "Param",
    "BatchStat",
    "Cache",
    "Intermediate",
    "Perturbation",
    "VariableMetadata",
    "with_metadata",
    "register_variable_name",
    "variable_name_from_type",
    "variable_type_from_name",
    "logical_axis_rules",
    "use_eager_sharding",
    "using_eager_sharding",
    "PARTITION_NAME",
    "get_named_sharding",
    "get_partition_spec",
    "with_partitioning",
    "Data",
    "Static",
    "data",
    "static",
    "is_data",
    "has_data",
    "register_data_type",
    "Object",
    "Pytree",
    "check_pytree",
    "touch",
    "dataclass",
    "M",
    "Module",
    "Dict",
    "List",
    "capture",
    "view",
    "view_info",
    "with_attributes",
    "All",
    "Any",
    "Everything",
    "Not",
    "Nothing",
    "OfType",
    "PathContains",
    "WithTag",
    "State",
    "filter_state",
    "from_flat_state",
    "map_state",
    "merge_state",
    "split_state",
    "to_flat_state",
    "FlatState",
    "replace_by_pure_dict",
    "restore_int_paths",
    "to_pure_dict",
    "GraphDef",
    "GraphState",
    "PureState",
    "as_pure",
    "call",
    "clone",
    "flatten",
    "graphdef",
    "merge",
    "pop",
    "set_metadata",
    "split",
    "state",
    "unflatten",
    "unpack",
    "update",
    "find_duplicates",
    "iter_children",
    "iter_graph",
    "iter_module_children",
    "iter_modules",
    "map",
    "recursive_map",
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "fork_rngs",
    "split_rngs",
    "with_rngs",
    "reseed",
    "restore_rngs",
    "var_defaults",
    "with_vars",
    "to_arrays",
    "to_refs",
    "jit",
    "jit_partial",
    "cached_partial",
    "MergeContext",
    "SplitContext",
    "UpdateContext",
    "current_update_context",
    "merge_context",
    "split_context",
    "update_context",
    "NodeStates",
    "from_tree",
    "to_tree",
    "grad",
    "value_and_grad",
    "DiffState",
    "vjp",
    "jvp",
    "custom_vjp",
    "scan",
    "Carry",
    "while_loop",
    "fori_loop",
    "cond",
    "switch",
    "remat",
    "name",
    "checkify",
    "eval_shape",
    "make_jaxpr",
    "as_abstract",
    "get_abstract_model",
    "StateAxes",
    "StateSharding",
    "prefix",
    "shard_map",
    "transform_metadata",
    "vmap",
    "pmap",
    "Linear",
    "LinearGeneral",
    "Einsum",
    "Conv",
    "ConvTranspose",
    "Embed",
    "LoRA",
    "LoRALinear",
    "LoRAParam",
    "BatchNorm",
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "SpectralNorm",
    "WeightNorm",
    "Dropout",
    "MultiHeadAttention",
    "RoPE",
    "dot_product_attention",
    "dot_product_attention_with_rope",
    "make_attention_mask",
    "make_causal_mask",
    "combine_masks",
    "RNNCellBase",
    "LSTMCell",
    "OptimizedLSTMCell",
    "SimpleCell",
    "GRUCell",
    "RNN",
    "Bidirectional",
    "StackedRNN",
    "avg_pool",
    "max_pool",
    "min_pool",
    "pool",
    "AvgPool",
    "MaxPool",
    "MinPool",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GlobalMinPool",
    "Sequential",
    "Stack",
    "Initializer",
    "PReLU",
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "identity",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "one_hot",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "standardize",
    "swish",
    "tanh",
    "ModelAndOptimizer",
    "OptArray",
    "OptState",
    "OptVariable",
    "Optimizer",
    "Metric",
    "MultiMetric",
    "EMA",
    "TrainState",
    "display",
    "tabulate",
    "initializers",
    "metrics",
    "variables",
]

# Sub-module paths of Flax NNX; what is not listed above is looked up there too.
_install()
_install_exporting()
if not _typing.TYPE_CHECKING:
    __getattr__ = _look_up
    __dir__ = _list_names
else:
    # At run time when first used.
    from graftree import (
        checkpoints,
        decoding,
        memory,
        precision,
        sharding,
        surgery,
        training,
        weights,
    )

    # For a type checker, a name that is neither above nor here is misspelt
    compat = deprecations = extract = filterlib = graph = graphlib = _ModuleType("")
    helpers = ids = module = nn = object = optimizer = pytreelib = reprlib = compat
    rnglib = spmd = statelib = tracers = transforms = traversals = compat
    bridge = proxy_caller = variablelib = visualization = wrappers = summary = compat
