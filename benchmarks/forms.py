"""Taking a model apart and putting it together: nothing here computes."""

from typing import Any

import jax

from benchmarks import perceptrons
from benchmarks.gauges import Operation

FORMS = ("split", "merge", "state", "update", "clone", "pop")
TREES = ("jax.tree.flatten", "jax.tree.unflatten")
EQUINOX_NAMES = {"split": "partition", "merge": "combine", **dict.fromkeys(TREES, "")}


def raw(name: str, depth: int) -> Operation:
    """What `jax.tree` does for a plain pytree, where ``name`` does it for an object."""
    tree = perceptrons.parameters(depth)
    leaves, treedef = jax.tree.flatten(tree)

    def pop():
        for layer in tree:
            layer["seen"] = leaves[0]
        return [layer.pop("seen") for layer in tree]

    return {
        "split": lambda: jax.tree.flatten(tree),
        "merge": lambda: jax.tree.unflatten(treedef, leaves),
        "state": lambda: jax.tree_util.tree_flatten_with_path(tree),
        "update": lambda: jax.tree.map(lambda _, new: new, tree, tree),
        "clone": lambda: jax.tree.map(lambda leaf: leaf, tree),
        "pop": pop,
        **_trees(tree),
    }[name]


def nnx(nnx: Any, name: str, depth: int) -> Operation:
    """One function of the functional form, for Graftree or Flax NNX."""
    model = perceptrons.nnx_model(nnx, depth)
    graphdef, state = nnx.split(model)
    seen = [nnx.Intermediate(layer.bias[...]) for layer in model.layers]

    def pop():
        for layer, variable in zip(model.layers, seen, strict=True):
            layer.seen = variable
        return nnx.pop(model, nnx.Intermediate)

    return {
        "split": lambda: nnx.split(model),
        "merge": lambda: nnx.merge(graphdef, state),
        "state": lambda: nnx.state(model),
        "update": lambda: nnx.update(model, state),
        "clone": lambda: nnx.clone(model),
        "pop": pop,
        **_trees(model),
    }[name]


def equinox(equinox: Any, name: str, depth: int) -> Operation:
    """What Equinox has of it, see ``EQUINOX_NAMES``."""
    model = perceptrons.equinox_model(equinox, depth)
    arrays, others = equinox.partition(model, equinox.is_array)
    return {
        "split": lambda: equinox.partition(model, equinox.is_array),
        "merge": lambda: equinox.combine(arrays, others),
        **_trees(model),
    }[name]


def _trees(tree: Any) -> dict[str, Operation]:
    leaves, treedef = jax.tree.flatten(tree)
    return {
        "jax.tree.flatten": lambda: jax.tree.flatten(tree),
        "jax.tree.unflatten": lambda: jax.tree.unflatten(treedef, leaves),
    }
