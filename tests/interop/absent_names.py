"""The one table of public names that Flax NNX has and Graftree lacks, with reasons.

`tests/interop/test_names.py` compares: a name that is missing and not here fails,
and so does one that is here and not missing. It holds for Flax 0.12.8 to 0.12.12.
"""

import warnings

import jax.numpy as jnp
import optax

from tests import catalog, modes

_OWN_CROSSING = "Flax's own way into a trace and back; nnx.split, merge, prefix"
_CALLABLES = "what Flax hands to JAX, a class for each transform; ours are closures"
_ALIASES = "aliases of types within its files"
_PRINTING = "what its printing keeps; nnx.display and repr do the same"
_KINDS = "how it describes nodes; get_node_impl and register_..._node_type are here"
_HIJAX = "primitives of its hijax Variables; ours are refs of JAX"
_FROZEN = "of flax.core, and to be imported from there"
_COUNTING = "who counts; `uuid` does"
_IMPORTED = "another file's name, which our file of this path does not import"

# Of sub-modules: reason: {path: names}.
OF_MODULES = {
    _OWN_CROSSING: {
        "extract": "ExtractIndex GraphDefState Mask Opaque OrderedDict Updates"
        " apply_updates broadcast_prefix2 check_consistent_aliasing2 check_prefix"
        " check_same_variables copy_var_structure default_split_fn extract find"
        " from_tree2 get_updates insert is_tree_node labeled mask_at merge_tree_node"
        " replace_at slice_at snapshot to_masked to_tree2 treemap_copy_args"
        " update_carry_variables",
        "graphlib": "REPEATED StaticCache",
        "transforms.autodiff": "labeled",
        "transforms.compilation": "labeled",
        "transforms.iteration": "Broadcasted labeled",
        "transforms.transforms": "LiftedModule ValueMetadata labeled",
    },
    _CALLABLES: {
        "transforms.autodiff": "BwdFn CustomVjpFnWrapper FwdFn GradFn SimpleBwdFn"
        " SimpleCustomVjpFn SimpleFwdFn SimpleGradFn SimpleJvpFn SimpleRematFn"
        " SimpleVjpFn",
        "transforms.compilation": "JitFn ShardMapFn SimpleJitFn SimpleJitPartialFn"
        " SimpleShardMapFn",
        "transforms.iteration": "ForiLoopBodyFn PmapFn ScanFn SimpleForiLoopBodyFn"
        " SimplePmapFn SimpleScanFn SimpleVmapFn SimpleWhileLoopBodyFn"
        " SimpleWhileLoopCondFn VmapFn WhileLoopBodyFn WhileLoopCondFn",
        "transforms.transforms": "CheckifyFn SimpleCheckifyFn SimpleCondFn"
        " SimpleEvalShapeFn SimpleMakeJaxprFn",
    },
    _KINDS: {
        "graphlib": "GenericPytree GraphNodeImpl IndexesPytreeDef JAX_PYTREE_REGISTRY"
        " LEAF_ATTR LeafAttr NODE_ATTR NodeAttr NodeImplBase PYTREE_NODE_IMPL"
        " PytreeNodeImpl",
        "pytreelib": "DataAnnotation StaticAnnotation",
    },
    _PRINTING: {
        "pytreelib": "ArrayRepr BUILDING_DOCS MutableArrayRepr OBJECT_CONTEXT"
        " ObjectContext VariableRepr",
        "reprlib": "REPR_CONTEXT ReprContext flax_config",
        "statelib": "NestedStateRepr",
        "summary": "NoneDumper SimpleObjectRepr in_ipython",
        "visualization": "in_ipython",
    },
    _HIJAX: {
        "variablelib": "GetVariable HijaxVariableMeta NewVariable SetVariable"
        " VARIABLE_CONTEXT VariableContext VariableEffect VariableQDD get_variable_p"
        " new_variable_p set_variable_p variable_effect"
    },
    _ALIASES: {
        "bridge.module": "CollectionFilter",
        "extract": "KeepFn KeyPath",
        "graphlib": "AttrType GraphFlatState LeafType Names NodeDefType NodeImpl",
        "module": "StateMapping",
        "rnglib": "AxesValue Counts KeylessInitializer OutShardingType RngValue"
        " SplitPattern StreamBackup",
        "statelib": "ExtractValueFn SetValueFn",
        "traversals": "IsLeafCallable",
        "summary": "NodeStats",
        "transforms.iteration": "AxisFn Leaves",
        "transforms.transforms": "Leaves",
    },
    _FROZEN: {
        "bridge.module": "FrozenDict",
        "bridge.wrappers": "FrozenDict",
        "nn.linear": "FrozenDict",
        "transforms.iteration": "FrozenDict",
    },
    _COUNTING: {"ids": "UUIDManager"},
    _IMPORTED: {"training.metrics": "Pytree Variable"},
}

_SHARDINGS = "prefixes in the form that Flax hands to jax.jit; in_shardings is given"
_INDEXES = "Flax numbers outer objects in a GraphDef, for its own contexts"
_STAGES = "makes or calls a stage without its function"
_RULES = "how Flax hands rules to jax.custom_vjp; nondiff_argnums is what was given"

# Of returned objects (see `made`): reason: {object: names}.
OF_OBJECTS = {
    _SHARDINGS: {
        "jit (graph)": "jax_in_shardings jax_out_shardings kwarg_shardings",
        "cached_partial": "jax_in_shardings jax_out_shardings kwarg_shardings",
    },
    _STAGES: {
        "jit.lower (graph)": "from_flat_info",
        "jit.compile (graph)": "call",
        "jit.compile (tree)": "call",
    },
    _RULES: {
        "custom_vjp (graph)": "ctxtag diff_filter jax_nondiff_argnums",
        "custom_vjp (tree)": "custom_vjp_fn",
    },
    _INDEXES: {
        "GraphDef": "with_matching_outer_index with_no_outer_index"
        " with_same_outer_index",
        "split_context.split": "with_matching_outer_index with_no_outer_index"
        " with_same_outer_index",
        "update_context": "flatten_end static_cache unflatten_end",
        "split_context": "is_inner",  # once the context has ended
    },
}


def listed(table):
    """The names of a table by module or object."""
    found = {}
    for entries in table.values():
        for where, names in entries.items():
            found.setdefault(where, set()).update(names.split())
    return found


# ---------------------------------------------------------------- what the peer returns


def call(m, x):
    return m(x)


def made(nnx):
    """For each description the object that a library returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _transformed(nnx) | _functional(nnx) | _layers(nnx) | _training(nnx)


def _transformed(nnx):
    linear, x = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), jnp.ones((1, 1))
    found = {}
    for mode, options in {"graph": modes.GRAPH_UPDATES, "tree": modes.TREE}.items():
        jitted = nnx.jit(call, **options)
        traced = jitted.trace(linear, x)
        lowered = traced.lower()
        rules = nnx.custom_vjp(call, nondiff_argnums=(1,), **options)
        rules.defvjp(lambda m, x: (x, 1), lambda r, g: (1,))
        found |= {
            f"jit ({mode})": jitted,
            f"jit.trace ({mode})": traced,
            f"jit.lower ({mode})": lowered,
            f"jit.compile ({mode})": lowered.compile(),
            f"custom_vjp ({mode})": rules,
        }
    found["cached_partial"] = nnx.cached_partial(nnx.jit(call), linear)
    found["jit_partial"] = nnx.jit_partial(call, linear, graph_updates=False)
    for name in ("grad", "value_and_grad", "vmap", "pmap", "remat", "checkify"):
        found[name] = getattr(nnx, name)(call)
    return found


def _functional(nnx):
    linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(linear)
    flat = nnx.to_flat_state(state)
    with nnx.update_context("tag") as update, nnx.split_context("tag") as split:
        inner = split.split(linear)
    by_type = [graphdef, state, flat, nnx.Variable(jnp.ones(1))]
    by_type += [nnx.Param(jnp.ones(1), tag="x"), nnx.Rngs(0, params=1)]
    by_type += [nnx.Rngs(0, params=1).params, nnx.List([1]), nnx.Dict(a=1)]
    by_type += [nnx.Sequential(), nnx.StateAxes({nnx.Param: 0, ...: None})]
    by_type += [nnx.StateSharding({...: None}), nnx.DiffState(0, nnx.Param)]
    by_type += [nnx.to_tree(linear), nnx.VariableMetadata(1), nnx.All(nnx.Param)]
    by_type += [nnx.Not(nnx.Param), nnx.WithTag("a"), nnx.PathContains("a")]
    by_type += [nnx.OfType(nnx.Param)]
    return {type(x).__name__: x for x in by_type} | {
        "ref": nnx.Param(jnp.ones(1), ref=True),
        "update_context": update,
        "update_context (manager)": nnx.update_context("tag"),
        "split_context": split,
        "split_context.split": inner[0],
        "Carry": nnx.Carry,
        "view": nnx.view(nnx.Dropout(0.5), deterministic=True),
        "eval_shape": nnx.eval_shape(lambda: linear),
        "initializer": nnx.initializers.lecun_normal(),
        "with_metadata": nnx.with_metadata(nnx.initializers.ones, tag="x"),
    }


def _layers(nnx):
    """The layers of Flax 0.12.8, of which only the attributes matter."""
    rows = [row for row in catalog.LAYERS if not row.is_ours and row.name != "RoPE"]
    return {row.name: nnx.eval_shape(lambda row=row: row.make(nnx)) for row in rows}


def _training(nnx):
    linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(linear)
    return {
        "Optimizer": nnx.Optimizer(linear, optax.adam(0.1), wrt=nnx.Param),
        "ModelAndOptimizer": nnx.ModelAndOptimizer(linear, optax.adam(0.1)),
        "TrainState": nnx.TrainState.create(graphdef, params=state, tx=optax.sgd(0.1)),
        "Average": nnx.metrics.Average(),
        "Accuracy": nnx.metrics.Accuracy(),
        "Welford": nnx.metrics.Welford(),
        "MultiMetric": nnx.MultiMetric(a=nnx.metrics.Average()),
    }
