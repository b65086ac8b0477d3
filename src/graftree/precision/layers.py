"""What a policy is in one layer: attributes, Params, and the cast of its results.

What a layer has is in its attributes: ``dtype``, in which it computes, and
``param_dtype``, in which its Params are stored. So a policy is nothing but these, and
the cast of the Params; a layer made with these arguments is the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.core.modules import containers
from graftree.core.modules.modules import Module
from graftree.core.objects import methods, pytrees
from graftree.core.variables import kinds
from graftree.core.variables.kinds import Param
from graftree.core.variables.variables import Variable
from graftree.nn import moments, reparametrization
from graftree.precision import policies
from graftree.precision.policies import Policy

_WRAPPERS = (reparametrization.SpectralNorm, reparametrization.WeightNorm)


def is_layer(x: Any) -> bool:
    """Whether it is a module that Params may belong to."""
    return isinstance(x, Module) and not isinstance(
        x, (containers.List, containers.Dict)
    )


def is_param(x: Any) -> bool:
    """Whether it is a Variable that a policy stores in its dtype."""
    return isinstance(x, Variable) and issubclass(kinds.kind_of(x), Param)


def by_kind(layer: Any, policy: Policy) -> Policy:
    """The policy of a layer, where no exception speaks of it: wide for norms."""
    if not isinstance(layer, moments.Norm) or policy.compute is None:
        return policy
    wide = jnp.promote_types(policy.compute, jnp.float32)
    output = None if wide == policy.compute else policy.compute
    return Policy(policy.params, wide, output)


def settings(layer: Any, policy: Policy) -> dict[str, Any]:
    """The attributes of one layer that hold dtypes, and what they become."""
    wanted = {"dtype": policy.compute, "param_dtype": policy.params}
    found: dict[str, Any] = {
        name: policies.scalar_type(dtype)
        for name, dtype in wanted.items()
        if dtype is not None and _has_dtype(layer, name)
    }
    # They store the weights of another layer in their `dtype`, if they have one.
    if isinstance(layer, _WRAPPERS) and "dtype" in found:
        found["dtype"] = None
    if isinstance(layer, reparametrization.SpectralNorm):
        found.pop("param_dtype", None)  # that of its statistics
    return found


def _has_dtype(layer: Any, name: str) -> bool:
    """Whether a module has an attribute that holds a floating dtype, or ``None``."""
    if name not in vars(layer):
        return False
    value = vars(layer)[name]
    try:
        return value is None or jnp.issubdtype(jnp.dtype(value), jnp.inexact)
    except TypeError:
        return False


def set_attribute(module: Any, name: str, value: Any) -> None:
    """Sets an attribute that holds a dtype, past all code of the class."""
    if vars(module).get(name, Policy) is not value:
        pytrees.store_attribute(module, name, value, False)


def set_output(module: Any, dtype: Any) -> None:
    """Sets to which dtype the results of a module are cast; ``None``: to none."""
    if dtype is not None:
        set_attribute(module, methods.OUTPUT_DTYPE, policies.scalar_type(dtype))
    elif methods.OUTPUT_DTYPE in vars(module):
        delattr(module, methods.OUTPUT_DTYPE)


def cast(variable: Variable[Any], dtype: Any) -> Any:
    """What a Variable stores, in another dtype; the same object if that is nothing."""
    raw = variable.get_raw_value()
    if _jax.is_ref(raw):
        return raw if raw.dtype == dtype else _jax.new_ref(raw[...].astype(dtype))
    if all(_in_dtype(x, dtype) is x for x in jax.tree.leaves(raw)):
        return raw
    return jax.tree.map(lambda x: _in_dtype(x, dtype), raw)


def _in_dtype(x: Any, dtype: Any) -> Any:
    is_array = isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    if not is_array or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
        return x
    return (
        x.update(dtype=dtype)
        if isinstance(x, jax.ShapeDtypeStruct)
        else x.astype(dtype)
    )
