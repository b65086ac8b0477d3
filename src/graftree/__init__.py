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
`nnx.jit` and `nnx.grad`; plain `jax.jit` gets a copy, and its writes there are lost.
`help(nnx.Module)`, `help(nnx.jit)` and so on explain each name with an example. Tools
are in sub-modules: `nnx.checkpoints`, `nnx.weights`, `nnx.training`, `nnx.surgery`,
`nnx.precision`, `nnx.sharding`, `nnx.memory`, `nnx.decoding`, `nnx.forecast` and
`nnx.debugging`.
"""

# This file is the public namespace, and the only re-export in the package.

import sys as _sys
import typing as _typing
from types import ModuleType as _ModuleType

from jax.nn import (
    celu as celu,
    elu as elu,
    gelu as gelu,
    glu as glu,
    hard_sigmoid as hard_sigmoid,
    hard_silu as hard_silu,
    hard_swish as hard_swish,
    hard_tanh as hard_tanh,
    identity as identity,
    leaky_relu as leaky_relu,
    log_sigmoid as log_sigmoid,
    log_softmax as log_softmax,
    logsumexp as logsumexp,
    one_hot as one_hot,
    relu as relu,
    relu6 as relu6,
    selu as selu,
    sigmoid as sigmoid,
    silu as silu,
    soft_sign as soft_sign,
    softmax as softmax,
    softplus as softplus,
    standardize as standardize,
    swish as swish,
)
from jax.numpy import tanh as tanh

from graftree import (
    config as config,
    debugging as debugging,
    errors as errors,
    namespaces as _namespaces,
)
from graftree.config import (
    set_graph_mode as set_graph_mode,
    set_graph_updates as set_graph_updates,
)
from graftree.core.exporting import install as _install_exporting
from graftree.core.filters import (
    All as All,
    Any as Any,
    Everything as Everything,
    Not as Not,
    Nothing as Nothing,
    OfType as OfType,
    PathContains as PathContains,
    WithTag as WithTag,
)
from graftree.core.graph.functional import (
    PureState as PureState,
    call as call,
    clone as clone,
    flatten as flatten,
    graphdef as graphdef,
    merge as merge,
    split as split,
    state as state,
    unflatten as unflatten,
    unpack as unpack,
)
from graftree.core.graph.graphdefs import GraphDef as GraphDef, GraphState as GraphState
from graftree.core.graph.traversals import (
    find_duplicates as find_duplicates,
    iter_children as iter_children,
    iter_graph as iter_graph,
    iter_module_children as iter_module_children,
    map as map,
    recursive_map as recursive_map,
)
from graftree.core.graph.updates import (
    pop as pop,
    set_metadata as set_metadata,
    update as update,
)
from graftree.core.modules.capturing import capture as capture
from graftree.core.modules.containers import Dict as Dict, List as List
from graftree.core.modules.modules import (
    M as M,
    Module as Module,
    iter_modules as iter_modules,
    view as view,
    view_info as view_info,
    with_attributes as with_attributes,
)
from graftree.core.modules.refs import (
    to_arrays as to_arrays,
    to_refs as to_refs,
    with_vars as with_vars,
)
from graftree.core.objects.attributes import (
    Data as Data,
    Static as Static,
    data as data,
    dataclass as dataclass,
    has_data as has_data,
    is_data as is_data,
    register_data_type as register_data_type,
    static as static,
)
from graftree.core.objects.pytrees import (
    Object as Object,
    Pytree as Pytree,
    check_pytree as check_pytree,
    touch as touch,
)
from graftree.core.rng.model_streams import (
    fork_rngs as fork_rngs,
    reseed as reseed,
    restore_rngs as restore_rngs,
    split_rngs as split_rngs,
    with_rngs as with_rngs,
)
from graftree.core.rng.streams import (
    RngCount as RngCount,
    RngKey as RngKey,
    Rngs as Rngs,
    RngState as RngState,
    RngStream as RngStream,
)
from graftree.core.states.flat_states import FlatState as FlatState
from graftree.core.states.pure_dicts import (
    as_pure as as_pure,
    replace_by_pure_dict as replace_by_pure_dict,
    restore_int_paths as restore_int_paths,
    to_pure_dict as to_pure_dict,
)
from graftree.core.states.states import (
    State as State,
    filter_state as filter_state,
    from_flat_state as from_flat_state,
    map_state as map_state,
    merge_state as merge_state,
    split_state as split_state,
    to_flat_state as to_flat_state,
)
from graftree.core.variables.kinds import (
    BatchStat as BatchStat,
    Cache as Cache,
    Intermediate as Intermediate,
    Param as Param,
    Perturbation as Perturbation,
    register_variable_name as register_variable_name,
    variable_name_from_type as variable_name_from_type,
    variable_type_from_name as variable_type_from_name,
)
from graftree.core.variables.metadata import (
    VariableMetadata as VariableMetadata,
    var_defaults as var_defaults,
    with_metadata as with_metadata,
)
from graftree.core.variables.partitioning import (
    PARTITION_NAME as PARTITION_NAME,
    get_named_sharding as get_named_sharding,
    get_partition_spec as get_partition_spec,
    with_partitioning as with_partitioning,
)
from graftree.core.variables.sharding import (
    logical_axis_rules as logical_axis_rules,
    use_eager_sharding as use_eager_sharding,
    using_eager_sharding as using_eager_sharding,
)
from graftree.core.variables.variables import A as A, Variable as Variable
from graftree.debugging.displays import display as display
from graftree.debugging.summaries import tabulate as tabulate
from graftree.interop.flax_names import (
    install as _install,
    list_names as _list_names,
    look_up as _look_up,
)
from graftree.interop.graph_contexts import (
    MergeContext as MergeContext,
    SplitContext as SplitContext,
    UpdateContext as UpdateContext,
    current_update_context as current_update_context,
    merge_context as merge_context,
    split_context as split_context,
    update_context as update_context,
)
from graftree.interop.node_states import (
    NodeStates as NodeStates,
    from_tree as from_tree,
    to_tree as to_tree,
)
from graftree.memory.keeping import name as name
from graftree.nn import initializers as initializers, mixtures as mixtures
from graftree.nn.activations import PReLU as PReLU
from graftree.nn.attention import (
    combine_masks as combine_masks,
    dot_product_attention as dot_product_attention,
    make_attention_mask as make_attention_mask,
    make_causal_mask as make_causal_mask,
)
from graftree.nn.cells import (
    GRUCell as GRUCell,
    LSTMCell as LSTMCell,
    OptimizedLSTMCell as OptimizedLSTMCell,
    RNNCellBase as RNNCellBase,
    SimpleCell as SimpleCell,
)
from graftree.nn.conv import Conv as Conv, ConvTranspose as ConvTranspose
from graftree.nn.dropout import Dropout as Dropout
from graftree.nn.initializers import Initializer as Initializer
from graftree.nn.latent_attention import (
    MultiHeadLatentAttention as MultiHeadLatentAttention,
)
from graftree.nn.linear import (
    Einsum as Einsum,
    Embed as Embed,
    Linear as Linear,
    LinearGeneral as LinearGeneral,
)
from graftree.nn.lora import (
    LoRA as LoRA,
    LoRALinear as LoRALinear,
    LoRAParam as LoRAParam,
)
from graftree.nn.mixtures.experts import (
    GatedExperts as GatedExperts,
    GroupedLinear as GroupedLinear,
)
from graftree.nn.mixtures.layers import MixtureOfExperts as MixtureOfExperts
from graftree.nn.mixtures.routers import Router as Router, RouterLoad as RouterLoad
from graftree.nn.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from graftree.nn.normalization import (
    BatchNorm as BatchNorm,
    GroupNorm as GroupNorm,
    InstanceNorm as InstanceNorm,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from graftree.nn.pooling import (
    AvgPool as AvgPool,
    GlobalAvgPool as GlobalAvgPool,
    GlobalMaxPool as GlobalMaxPool,
    GlobalMinPool as GlobalMinPool,
    MaxPool as MaxPool,
    MinPool as MinPool,
    avg_pool as avg_pool,
    max_pool as max_pool,
    min_pool as min_pool,
    pool as pool,
)
from graftree.nn.position_biases import (
    ALiBi as ALiBi,
    RelativePositionBias as RelativePositionBias,
)
from graftree.nn.recurrent import (
    RNN as RNN,
    Bidirectional as Bidirectional,
    StackedRNN as StackedRNN,
)
from graftree.nn.reparametrization import (
    SpectralNorm as SpectralNorm,
    WeightNorm as WeightNorm,
)
from graftree.nn.rope import (
    RoPE as RoPE,
    dot_product_attention_with_rope as dot_product_attention_with_rope,
)
from graftree.nn.sequential import Sequential as Sequential
from graftree.sharding.placement import (
    as_abstract as as_abstract,
    get_abstract_model as get_abstract_model,
)
from graftree.surgery.stacks import Stack as Stack
from graftree.training import metrics as metrics
from graftree.training.ema import EMA as EMA
from graftree.training.metrics import Metric as Metric, MultiMetric as MultiMetric
from graftree.training.optimizers import (
    ModelAndOptimizer as ModelAndOptimizer,
    OptArray as OptArray,
    Optimizer as Optimizer,
    OptState as OptState,
    OptVariable as OptVariable,
)
from graftree.training.train_states import TrainState as TrainState
from graftree.transforms.compiled.jit import (
    cached_partial as cached_partial,
    jit as jit,
    jit_partial as jit_partial,
)
from graftree.transforms.control_flow.cond_switch import cond as cond, switch as switch
from graftree.transforms.control_flow.loop_bodies import Carry as Carry
from graftree.transforms.control_flow.loops import (
    fori_loop as fori_loop,
    scan as scan,
    while_loop as while_loop,
)
from graftree.transforms.derivatives.custom_vjp import custom_vjp as custom_vjp
from graftree.transforms.derivatives.grad import (
    grad as grad,
    remat as remat,
    value_and_grad as value_and_grad,
)
from graftree.transforms.derivatives.vjp_jvp import jvp as jvp, vjp as vjp
from graftree.transforms.lifting.prefixes import (
    DiffState as DiffState,
    StateAxes as StateAxes,
    StateSharding as StateSharding,
    prefix as prefix,
)
from graftree.transforms.maps import (
    pmap as pmap,
    shard_map as shard_map,
    transform_metadata as transform_metadata,
    vmap as vmap,
)
from graftree.transforms.recordings import (
    checkify as checkify,
    eval_shape as eval_shape,
    make_jaxpr as make_jaxpr,
)

__version__ = "0.2.0"

# The older name of `state`.
variables = state

# Modules that are public. The other names are those above, each imported as itself: so
# type checkers know that it is passed on.
_MODULES = (
    *("checkpoints", "config", "debugging", "decoding", "errors", "initializers"),
    *("forecast", "memory", "metrics", "mixtures", "precision", "sharding", "surgery"),
    "training",
    "weights",
)

# Sub-module paths of Flax NNX; names not listed above are looked up there too.
_install()
_install_exporting()
if not _typing.TYPE_CHECKING:
    __all__ = [*_MODULES, *_namespaces.public_names(_sys.modules[__name__])]
    __getattr__ = _look_up
    __dir__ = _list_names
else:
    # At run time when first used.
    from graftree import (
        checkpoints as checkpoints,
        decoding as decoding,
        forecast as forecast,
        memory as memory,
        precision as precision,
        sharding as sharding,
        surgery as surgery,
        training as training,
        weights as weights,
    )

    # For a type checker, a name that is neither above nor here is misspelt
    compat = deprecations = extract = filterlib = graph = graphlib = _ModuleType("")
    helpers = ids = module = nn = object = optimizer = pytreelib = reprlib = compat
    rnglib = spmd = statelib = tracers = transforms = traversals = compat
    bridge = proxy_caller = variablelib = visualization = wrappers = summary = compat
