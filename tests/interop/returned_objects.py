"""Objects that Flax NNX and Graftree give for the same calls, to be compared."""

import warnings

import jax.numpy as jnp
import optax

from tests import catalog, modes


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
    return {
        "GraphDef": graphdef,
        "State": state,
        "FlatState": flat,
        "Variable": nnx.Variable(jnp.ones(1)),
        "Param": nnx.Param(jnp.ones(1), tag="x"),
        "ref": nnx.Param(jnp.ones(1), ref=True),
        "Rngs": nnx.Rngs(0, params=1),
        "RngStream": nnx.Rngs(0, params=1).params,
        "List": nnx.List([1]),
        "Sequential": nnx.Sequential(),
        "Dict": nnx.Dict(a=1),
        "update_context": update,
        "update_context (manager)": nnx.update_context("tag"),
        "split_context": split,
        "split_context.split": inner[0],
        "StateAxes": nnx.StateAxes({nnx.Param: 0, ...: None}),
        "StateSharding": nnx.StateSharding({...: None}),
        "DiffState": nnx.DiffState(0, nnx.Param),
        "Carry": nnx.Carry,
        "NodeStates": nnx.to_tree(linear),
        "VariableMetadata": nnx.VariableMetadata(1),
        "All": nnx.All(nnx.Param),
        "Not": nnx.Not(nnx.Param),
        "WithTag": nnx.WithTag("a"),
        "PathContains": nnx.PathContains("a"),
        "OfType": nnx.OfType(nnx.Param),
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
