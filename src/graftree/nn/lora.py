"""Low-rank adaptation: a small trainable change to a large frozen map.

``LoRA`` is the change by itself, or wrapped around any module; ``LoRALinear`` is a
`Linear` that has one. Since ``lora_b`` starts as zeros, neither changes anything until
it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Array,
    ArrayLike,
    Dtype,
    Inexact,
    Initializer,
    Num,
    PromoteDtypeFn,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.variables.kinds import Param
from graftree.core.variables.variables import A, Variable
from graftree.nn import initializers, linear
from graftree.nn.support import arguments, meshes

default_a_initializer = initializers.he_uniform()
"""The initializer of ``lora_a``: uniform, variance ``2 / fan_in``."""
default_b_initializer = initializers.zeros
"""The initializer of ``lora_b``."""


class LoRAParam(Param[A]):
    """A parameter of a low-rank adaptation, which filters can select by its type.

    It is also a Param, so list it before ``nnx.Param`` where filters make groups.

    Example:
        >>> model = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
        >>> graphdef, adapted, frozen = nnx.split(model, nnx.LoRAParam, nnx.Param)
        >>> list(adapted.lora), list(frozen)
        (['lora_a', 'lora_b'], ['bias', 'kernel'])
    """


class LoRA(Module):
    """A low-rank map, added to the outputs of a module.

    Computes ``x @ lora_a @ lora_b``, plus ``base_module(x)`` if there is one.

    Args:
        in_features: Size of the last axis of the inputs.
        lora_rank: The rank: size of the axis between the two matrices.
        out_features: Size of the last axis of the outputs.
        base_module: The module to adapt, a function of the inputs; kept, not copied.
            ``None``: there is none.
        dtype: The dtype of the computation, and of the inputs that the base module
            gets; ``None``: inferred from inputs and parameters.
        param_dtype: The dtype in which the parameters are stored.
        a_initializer: Initializer of ``lora_a``.
        b_initializer: Initializer of ``lora_b``.
        lora_param_type: The class of the two Variables.
        promote_dtype: Called as ``promote_dtype((x, lora_a, lora_b), dtype=dtype)``.
        rngs: Gives one key to ``lora_a``, then one to ``lora_b``.
        a_metadata: Metadata of ``lora_a``.
        b_metadata: Metadata of ``lora_b``.

    Attributes:
        lora_a: LoRAParam, ``[in_features, lora_rank]``.
        lora_b: LoRAParam, ``[lora_rank, out_features]``, initially zeros.
        base_module: The module to adapt, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> model = nnx.LoRA(3, 2, 4, base_module=base, rngs=nnx.Rngs(1))
        >>> x = jnp.ones((1, 3))
        >>> bool((model(x) == base(x)).all())
        True
        >>> model.lora_a[...] = jnp.ones((3, 2))
        >>> model.lora_b[...] = jnp.full((2, 4), 0.5)
        >>> model(x) - base(x)
        Array([[3., 3., 3., 3.]], dtype=float32)

    References:
        Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models", eq. 3.
    """

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Callable[..., Any] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        a_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        b_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        sizes = {"in_features": in_features, "out_features": out_features}
        arguments.check_sizes(self, **sizes, lora_rank=lora_rank)
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.lora_param_type = lora_param_type
        self.base_module = attributes.data(None) if base_module is None else base_module
        self.promote_dtype = promote_dtype

        a_shape, b_shape = (in_features, lora_rank), (lora_rank, out_features)
        a = a_initializer(arguments.draw_key(rngs), a_shape, param_dtype)
        self.lora_a: Variable[jax.Array] = lora_param_type(a, **a_metadata)
        b = b_initializer(arguments.draw_key(rngs), b_shape, param_dtype)
        self.lora_b: Variable[jax.Array] = lora_param_type(b, **b_metadata)

    def __call__(
        self, x: Num[ArrayLike, "*batch in_features"], **kwargs: Any
    ) -> Inexact[Array, "*batch out_features"]:
        """Maps the last axis of ``x``.

        Args:
            x: ``[*batch, in_features]``; any number of leading axes, or none.
            **kwargs: Passed on to the base module, if there is one. An ``out_sharding``
                among them also applies to the low-rank map.

        Returns:
            An array ``[*batch, out_features]``.

        Raises:
            ValueError: If the base module is not callable, or if ``dtype`` is neither
                floating nor complex.
            TypeError: If the last axis of ``x`` has the wrong size, or ``x`` is not
                numeric.
        """
        base = self.base_module
        if base is not None and not callable(base):
            raise ValueError(
                f"The `base_module` of LoRA must be callable, got {type(base)}."
            )
        operands = (arguments.as_array(x), self.lora_a[...], self.lora_b[...])
        inputs, *factors = self.promote_dtype(operands, dtype=self.dtype)
        a, b = meshes.beside(inputs, (-1,), factors)
        axes = (((inputs.ndim - 1,), (0,)), ((), ()))
        sharding = kwargs.get("out_sharding")
        between = along_batch(sharding, inputs.ndim)
        hidden = jax.lax.dot_general(inputs, a, axes, out_sharding=between)
        outputs = jax.lax.dot_general(hidden, b, axes, out_sharding=sharding)
        return outputs if base is None else outputs + base(inputs, **kwargs)


def along_batch(sharding: Any, ndim: int) -> Any:
    """Drops the last axis from a sharding of outputs."""
    if sharding is None:
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = along_batch(sharding.spec, ndim)
        return jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.sharding.PartitionSpec(*sharding[: ndim - 1])


class LoRALinear(linear.Linear):
    """A `Linear` with a low-rank adaptation.

    Computes ``inputs @ kernel + bias + inputs @ lora.lora_a @ lora.lora_b``. Kernel and
    bias are those of a Linear with the same arguments, so its state fits: train a
    Linear, ``nnx.update`` the LoRALinear with it, and then train the `LoRAParam`s.

    Args:
        in_features: Size of the last axis of the inputs.
        out_features: Size of the last axis of the outputs.
        lora_rank: The rank of the adaptation.
        lora_dtype: The dtype in which the adaptation computes; ``None``: that of the
            Linear.
        lora_param_dtype: The dtype in which its parameters are stored.
        a_initializer: Initializer of ``lora_a``.
        b_initializer: Initializer of ``lora_b``.
        lora_param_type: The class of the two Variables.
        lora_promote_dtype: The argument ``promote_dtype`` of the `LoRA`.
        rngs: Gives keys to kernel and bias as for `Linear`, then two to the `LoRA`.
        a_metadata: Metadata of ``lora_a``.
        b_metadata: Metadata of ``lora_b``.
        **kwargs: The other arguments of `Linear`.

    Attributes:
        kernel: Param, ``[in_features, out_features]``.
        bias: Param, ``[out_features]``, or ``None``.
        lora: The `LoRA`, without a base module.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> model = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(1))
        >>> nnx.update(model, nnx.state(linear))
        >>> x = jnp.ones((1, 3))
        >>> bool((model(x) == linear(x)).all())
        True

    References:
        Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models", eq. 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: Dtype | None = None,
        lora_param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        lora_promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        a_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        b_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            dtype=self.dtype if lora_dtype is None else lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            promote_dtype=lora_promote_dtype,
            rngs=rngs,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(
        self, x: Num[ArrayLike, "*batch in_features"], out_sharding: Any = None
    ) -> Inexact[Array, "*batch out_features"]:
        """Maps the last axis of ``x``.

        Args:
            x: ``[*batch, in_features]``; any number of leading axes, or none.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            An array ``[*batch, out_features]``.

        Raises:
            TypeError: If the last axis of ``x`` has the wrong size, or ``x`` is not
                numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        options = arguments.if_set(out_sharding=out_sharding)
        return super().__call__(x, **options) + self.lora(x, **options)
