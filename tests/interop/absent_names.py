"""The one table of public names that Flax NNX has and Graftree lacks, with reasons.

`tests/interop/test_names.py` compares: a name that is missing and not here fails,
and so does one that is here and not missing. It holds for Flax 0.12.8 to 0.12.12.
"""

_OWN_CROSSING = (
    "steps of Flax's own way into a trace and back; nnx.split, merge, prefix"
)
_CALLABLES = "what Flax hands to JAX, a class for each transform; ours are closures"
_ALIASES = "aliases of types within its files"
_PRINTING = "what its printing keeps; nnx.display and repr do the same"
_KINDS = "how it describes nodes; get_node_impl and register_..._node_type are here"
_HIJAX = "primitives of its hijax Variables; ours are refs of JAX"
_FROZEN = "of flax.core, and to be imported from there"
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
    _IMPORTED: {"nn.activations": "Array", "training.metrics": "Pytree"},
}

_SHARDINGS = "prefixes in the form that Flax hands to jax.jit; in_shardings is given"
_INDEXES = "Flax numbers outer objects in a GraphDef, for its own contexts"
_STAGES = "makes or calls a stage without its function"
_RULES = "how Flax hands rules to jax.custom_vjp; nondiff_argnums is what was given"

# Of returned objects (see `returned_objects.py`): reason: {object: names}.
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
