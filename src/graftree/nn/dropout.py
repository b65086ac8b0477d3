"""Dropout: random zeros while training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.annotations import Array, Num
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs, RngStream
from graftree.nn.support import arguments, eager


class Dropout(Module):
    """Sets a random part of its inputs to zero and scales up the rest.

    Each entry becomes zero with probability ``rate`` and is otherwise divided by
    ``1 - rate``, which keeps its mean. If ``deterministic``, inputs pass through
    untouched.

    Args:
        rate: The probability of a zero, in ``[0, 1]``.
        broadcast_dims: Axes along which one random choice is shared.
        deterministic: Whether to drop nothing; ``None``: each call must say.
        rng_collection: The stream to draw from.
        rngs: Forked to make the layer's own stream: the stream ``rng_collection`` of an
            Rngs, or an RngStream. ``None``: each call must give one.

    Attributes:
        rngs: The layer's own RngStream, or ``None``.

    Raises:
        ValueError: If ``rate`` is not in ``[0, 1]``.
        KeyError: If ``rngs`` has neither the stream ``rng_collection`` nor ``default``.
        TypeError: If ``rngs`` is something else.

    Example:
        >>> layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones(8))
        Array([2., 0., 2., 0., 2., 2., 2., 0.], dtype=float32)
        >>> nnx.view(layer, deterministic=True)(jnp.ones(2))
        Array([1., 1.], dtype=float32)

    References:
        Srivastava et al., 2014, "Dropout: A Simple Way to Prevent Neural Networks from
        Overfitting".
    """

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: Rngs | RngStream | None = None,
    ):
        if not 0 <= rate <= 1:
            raise ValueError(
                f"The rate of Dropout must be in the range [0, 1], got {rate}."
            )
        self.rate = rate
        self.broadcast_dims = broadcast_dims
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        if isinstance(rngs, Rngs):
            rngs = rngs[rng_collection]
        if not isinstance(rngs, RngStream | None):
            raise TypeError(
                f"rngs must be a Rngs, RngStream or None, but got {type(rngs)}."
            )
        self.rngs = attributes.data(None) if rngs is None else rngs.fork()

    @eager.compiled
    def __call__(
        self,
        inputs: Num[Array, "*shape"],
        *,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | Array | None = None,
    ) -> Num[Array, "*shape"]:
        """Drops entries of ``inputs``.

        Args:
            inputs: An array of any shape.
            deterministic: Overrides the attribute, if not ``None``.
            rngs: Where this call's key comes from: the stream ``rng_collection`` of an
                Rngs, an RngStream, or the key itself. ``None``: the layer's own stream.

        Returns:
            ``inputs`` itself, if nothing is dropped. Otherwise a new array of the same
            shape, sharding and dtype; for integers, the default float.

        Raises:
            ValueError: If neither the call nor the attribute says whether to be
                deterministic; or if a key is needed and there are no ``rngs``.
            TypeError: If ``rngs`` is something else, or ``inputs`` is not numeric.
            IndexError: If ``inputs`` lacks one of the ``broadcast_dims``.
            KeyError: If ``rngs`` lacks the stream.
        """
        if arguments.setting(self, "deterministic", deterministic) or self.rate == 0:
            return inputs
        inputs = arguments.as_array(inputs)
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        jnp.result_type(inputs, float)  # refuses random keys, before it draws one
        shared = arguments.canonical_axes(self.broadcast_dims, inputs.ndim)
        shape = [1 if axis in shared else n for axis, n in enumerate(inputs.shape)]
        keep_rate = float(1 - self.rate)
        is_kept = jax.random.bernoulli(
            self._draw_key(rngs),
            keep_rate,
            shape,
            out_sharding=_mask_sharding(inputs, shared),
        )
        return jnp.where(is_kept, inputs / keep_rate, 0.0)

    def _draw_key(self, rngs: Any) -> jax.Array:
        """Draws the key of a call: from its argument, else from the layer's stream."""
        rngs = self.rngs if rngs is None else rngs
        if isinstance(rngs, Rngs):
            return rngs[self.rng_collection]()
        if isinstance(rngs, RngStream):
            return rngs()
        if isinstance(rngs, jax.Array):
            return rngs
        if rngs is None:
            raise ValueError(
                "`deterministic` is False, but no `rngs` argument was provided to "
                "Dropout, as argument of the call or as attribute.\n"
                "Pass `rngs=nnx.Rngs(...)` to the constructor or to the call."
            )
        raise TypeError(
            f"rngs must be a Rngs, RngStream or jax.Array, but got {type(rngs)}."
        )

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets how the view's layer works.

        Args:
            deterministic: Whether inputs pass through untouched.
        """
        if deterministic is not None:
            self.deterministic = deterministic


def _mask_sharding(
    inputs: jax.Array, shared: Sequence[int]
) -> jax.sharding.NamedSharding | None:
    """Chooses the sharding of a mask; ``None`` if JAX can't draw with one.

    The mask has size one along the shared axes.
    """
    sharding = jax.typeof(inputs).sharding
    if not sharding.mesh.explicit_axes:
        return None
    # Eager, outside `jax.set_mesh`, JAX can't make an array on several devices.
    is_eager = not isinstance(inputs, _jax.Tracer)
    if is_eager and jax.sharding.get_abstract_mesh().empty:
        return None
    spec = [None if axis in shared else s for axis, s in enumerate(sharding.spec)]
    return sharding.update(spec=jax.sharding.PartitionSpec(*spec))
