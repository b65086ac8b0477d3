"""Checkpoints of a model with a List of blocks, for one with a Stack, and back.

Model and optimizer have the same arrays in both, at other paths:

    blocks[0] blocks[1] ... .mlp.up.kernel     one array per layer
    blocks.layers          .mlp.up.kernel      one array, layers along its first axis

This is on arrays by path, and not on the objects (`nnx.surgery.stack`), since an
optimizer holds no blocks, but the moments of their parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import graftree as nnx

Path = tuple[Any, ...]

BLOCKS, LAYERS = "blocks", "layers"


def fill(target: Any, saved: Any) -> None:
    """Copies the values of an object to one that has the other form.

    Args:
        target: A pytree of objects; its arrays stay where they are.
        saved: The same, with Lists for Stacks, or Stacks for Lists.
    """
    values = {path: variable[...] for path, variable in _variables(saved)}
    for path, variable in _variables(target):
        sources, make = _recipe(values, path)
        place = variable[...].sharding
        variable[...] = jax.jit(make, out_shardings=place)(*sources)


def _variables(node: Any) -> list[tuple[Path, nnx.Variable]]:
    return nnx.to_flat_state(nnx.state(node))


def _recipe(
    values: Mapping[Path, jax.Array], path: Path
) -> tuple[list[jax.Array], Callable[..., jax.Array]]:
    """The arrays that the one at a path is made of, and how."""
    if path in values:
        return [values[path]], lambda x: x
    at = path.index(BLOCKS) + 1
    before, layer, behind = path[:at], path[at], path[at + 1 :]
    if layer != LAYERS:
        return [values[(*before, LAYERS, *behind)]], lambda x: x[layer]
    layers: list[jax.Array] = []
    while (found := (*before, len(layers), *behind)) in values:
        layers.append(values[found])
    return layers, lambda *layers: jnp.stack(layers)
