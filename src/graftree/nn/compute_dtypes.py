"""The compute dtype of a layer: what its results have, if its inputs have it too.

A policy, an argument ``dtype=``, or the Params decide it. All three can change after a
layer is made, so nothing keeps the answer: caches and first carries ask when they are
made.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.core.graph import traversals
from graftree.core.modules.modules import Module
from graftree.core.objects import methods
from graftree.core.variables import kinds
from graftree.core.variables.variables import Variable
from graftree.nn import moments, reparametrization

# The static attribute of a module whose own Params a policy has it read in a dtype.
PARAMS_DTYPE = "_params_dtype"


def compute_dtype(layer: Any) -> np.dtype[Any]:
    """Finds the dtype in which a layer computes: the word ``compute`` of a policy.

    That is its attribute ``dtype``, which an argument or a policy sets, or else the
    promoted dtype of its Params. Parts of a module count in the same way, and for a
    normalization layer the dtype that it returns. Inputs of a wider dtype make the
    results of a layer without ``dtype`` wider.

    Ask where memory for results is made, such as a cache; for a model whose layers
    differ, ask the layer that fills it.

    Args:
        layer: A Module, or another object or container of layers.

    Returns:
        The dtype. If parts differ, it is their promoted dtype.

    Raises:
        ValueError: If there is neither a ``dtype`` nor a floating Param.

    Example:
        >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.precision.compute_dtype(layer)
        dtype('float32')
        >>> applied = nnx.precision.set_policy(layer, "params=f32, compute=bf16")
        >>> nnx.precision.compute_dtype(layer)
        dtype(bfloat16)
    """
    dtype = _returned(layer)
    dtypes = _of_params(layer) if dtype is None else [dtype]
    if not dtypes:
        raise ValueError(
            errors.message(
                f"compute_dtype: a {type(layer).__name__} has neither an attribute "
                "`dtype` nor floating Params.",
                way_out="Ask a layer that has one of them, or write the dtype.",
            )
        )
    return jnp.dtype(jnp.result_type(*dtypes))


def is_param(x: Any) -> bool:
    """Whether it is a Param, frozen or not."""
    return isinstance(x, Variable) and issubclass(kinds.kind_of(x), kinds.Param)


def set_dtype(layer: Any) -> np.dtype[Any] | None:
    """Reads the inexact dtype that an argument or a policy has set in a layer."""
    attributes = vars(layer) if isinstance(layer, Module) else {}
    dtype = attributes.get(PARAMS_DTYPE, attributes.get("dtype"))
    try:
        is_set = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    except TypeError:  # an attribute of that name that holds something else
        return None
    return jnp.dtype(dtype) if is_set else None


def _returned(layer: Any) -> np.dtype[Any] | None:
    """Reads the dtype set for a layer's results; a norm may compute in a wider one."""
    is_norm = isinstance(layer, moments.Norm)
    output = vars(layer).get(methods.OUTPUT_DTYPE) if is_norm else None
    return set_dtype(layer) if output is None else jnp.dtype(output)


def _of_params(layer: Any) -> list[np.dtype[Any]]:
    """For each floating Param, the dtype set in the layer that it is in, or its own."""
    objects = [*traversals.iter_graph(layer, graph=True)]
    modules = {path: x for path, x in objects if isinstance(x, Module)}
    dtypes = []
    for path, param in objects:
        if not is_param(param):
            continue
        above = [path[:end] for end in reversed(range(len(path)))]
        owners = [modules[path] for path in above if path in modules]
        # Its scales end up in the weights of another layer, in the dtype of these.
        if owners and isinstance(owners[0], reparametrization.WeightNorm):
            continue
        set_above = [dtype for x in owners if (dtype := _returned(x)) is not None]
        dtypes += set_above[:1] or _floating(param)
    return dtypes


def _floating(param: Variable[Any]) -> list[np.dtype[Any]]:
    """Lists the dtypes of the floating and complex arrays that a Param holds."""
    leaves = jax.tree.leaves(param.get_raw_value())
    dtypes = [leaf.dtype for leaf in leaves if hasattr(leaf, "dtype")]
    return [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]


def params_dtype(layer: Any) -> np.dtype[Any] | None:
    """Promotes the dtypes in which floating Params are stored; ``None`` without any.

    That may be another one than ``param_dtype``, with which they were made.
    """
    objects = traversals.iter_graph(layer, graph=True)
    dtypes = [dtype for _, x in objects if is_param(x) for dtype in _floating(x)]
    return jnp.dtype(jnp.result_type(*dtypes)) if dtypes else None
