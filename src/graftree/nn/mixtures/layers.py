"""The layer that sends each token to a few of many experts.

    routing = router(x)                         each token chooses its experts
    rows = x[token of each choice]              sorted by expert: one row per choice
    outputs = experts(rows, group_sizes)        each row by its expert alone
    y[token] = sum of weight * output           over the choices of the token

No token is dropped, and no expert computes for a token that did not choose it.

Where a mesh divides tokens, each device sorts its own. Where it divides experts, each
device computes the choices that fall on its experts, and the parts of ``y`` are added
up. If one axis of the mesh divides both, the tokens are first gathered along it, and
the sums are scattered. That sends each token to each device of the axis once, which
drops none; an all-to-all sends less only if it may drop tokens, or on more devices than
a token has experts where JAX has ``ragged_all_to_all`` (not on CPUs).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from graftree import errors
from graftree.annotations import Array, ArrayLike, Bool, Inexact, Num
from graftree.core import paths
from graftree.core.graph import flattening, traversals
from graftree.core.modules.modules import EqualLayers, Module
from graftree.core.objects import attributes
from graftree.core.text import descriptions
from graftree.nn import compute_dtypes
from graftree.nn.mixtures.routers import Load, RouterLoad, Routing
from graftree.nn.support import arguments, arithmetic, eager, groups, meshes
from graftree.transforms import maps
from graftree.transforms.lifting import prefixes


class MixtureOfExperts(Module):
    """Sends each token to the experts that a router chooses, and adds their outputs.

    Computes ``sum(weight * expert(x))`` over the chosen experts of each token, plus
    ``shared_experts(x)``, if there are any. No token is dropped: the cost is that of
    the chosen experts, however many there are.

    Under ``nnx.capture(model, nnx.RouterLoad)`` it records its `Load` as ``load``, for
    the losses in ``nnx.mixtures``.

    Args:
        router: A `Router`, or another function of tokens that returns a `Routing`.
        experts: `GatedExperts`, or another Module called as ``experts(rows,
            group_sizes)``, as made of `GroupedLinear`s; the first axis of each of its
            Params has an entry per expert. Or an `nnx.Stack` of experts of any kind,
            functions of ``[rows, features]`` that treat each row by itself; then rows
            go through a loop of blocks.
        shared_experts: A Module that all tokens go through; ``None``: there is none.
        expert_axis: The axis of the mesh that divides the experts; ``None``, or without
            such an axis in ``jax.set_mesh``: they are not divided.
        token_axes: The axes of the mesh that divide the first axis of the inputs, such
            as ``("data", "expert")``. Axes of the type Explicit need not be named.
        weigh_inputs: Whether the weights multiply the inputs of experts instead of
            their outputs: ``sum(expert(weight * x))``, as in Llama 4.

    Attributes:
        router: The router.
        experts: The experts.
        shared_experts: The Module that all tokens go through, or ``None``.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> layer = nnx.MixtureOfExperts(
        ...     nnx.Router(8, 4, top_k=2, rngs=rngs),
        ...     nnx.GatedExperts(4, 8, 16, rngs=rngs),
        ... )
        >>> layer(jnp.ones((2, 3, 8))).shape
        (2, 3, 8)
        >>> experts = nnx.Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 4, rngs=rngs)
        >>> nnx.MixtureOfExperts(layer.router, experts)(jnp.ones((2, 3, 8))).shape
        (2, 3, 8)

    References:
        Shazeer et al., 2017, "Outrageously Large Neural Networks: The Sparsely-Gated
        Mixture-of-Experts Layer", eq. 1. Gale et al., 2022, "MegaBlocks" (dropless).
    """

    def __init__(
        self,
        router: Callable[..., Routing],
        experts: Any,
        *,
        shared_experts: Callable[..., Any] | None = None,
        expert_axis: str | None = None,
        token_axes: str | Sequence[str] = (),
        weigh_inputs: bool = False,
    ):
        self.router = router
        self.experts = experts
        self.shared_experts = (
            attributes.data(None) if shared_experts is None else shared_experts
        )
        self.expert_axis = expert_axis
        is_one = isinstance(token_axes, str)
        self.token_axes = (token_axes,) if is_one else tuple(token_axes)
        self.weigh_inputs = weigh_inputs

    def __call__(
        self,
        x: Num[ArrayLike, "*batch features"],
        mask: Bool[ArrayLike, "*batch"] | None = None,
    ) -> Inexact[Array, "*batch out_features"]:
        """Applies to each token its experts.

        Args:
            x: Tokens, ``[*batch, features]``.
            mask: Which of them are tokens and not padding, ``[*batch]``; ``None``: all.
                Padding goes to no expert and does not count as load; its outputs are
                zeros, before shared experts.

        Returns:
            An array ``[*batch, out_features]``, in the dtype of the experts' outputs.

        Raises:
            ValueError: If ``mask`` has another shape than the tokens, the router has
                another number of experts than there are, or the devices of
                ``expert_axis`` can't have equally many experts.
            TypeError: If experts of a Stack write Variables.
        """
        x = arguments.as_array(x)
        tokens = x
        if mask is not None:
            mask = jnp.asarray(mask, bool)
            _check_mask(x, mask)
            # Whatever padding is, not a number included, reaches no gradient.
            tokens = jnp.where(mask[..., None], x, 0)
        routing = self.router(tokens)
        num_experts = routing.scores.shape[-1]
        _check_count(self.experts, num_experts)
        self.sow(
            RouterLoad,
            "load",
            Load.of(routing, mask),
            reduce_fn=lambda total, load: load if total is None else total + load,
            init_fn=lambda: None,
            capture_noop=True,
        )
        chosen = routing.experts
        if mask is not None:
            chosen = jnp.where(mask[..., None], chosen, num_experts)
        y = self._mixed(tokens, chosen, routing.weights, num_experts, mask is not None)
        if self.shared_experts is None:
            return y
        return y + self.shared_experts(x)

    def _mixed(
        self,
        x: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        num_experts: int,
        is_masked: bool,
    ) -> jax.Array:
        """Adds up the outputs of experts, wherever they are."""
        division = _Division.of(x, self.expert_axis, self.token_axes)
        mixture = functools.partial(_mixture, weigh_inputs=self.weigh_inputs)
        if division is None:
            return mixture(self.experts, x, chosen, weights, num_experts, is_masked)
        division.check(num_experts)

        def on_each_device(
            experts: Any, x: jax.Array, chosen: jax.Array, weights: jax.Array
        ) -> jax.Array:
            x, chosen, weights = map(division.gathered, (x, chosen, weights))
            chosen, count, is_part = division.own_experts(chosen, num_experts)
            y = mixture(experts, x, chosen, weights, count, is_part or is_masked)
            return division.summed(y)

        def by_expert(path: Any, x: Any) -> PartitionSpec:
            shape = getattr(flattening.raw_of(x), "shape", ())
            is_divided = shape[:1] == (num_experts,)
            return PartitionSpec(*[division.expert_axis] * is_divided)

        experts = division.placed(self.experts, by_expert)
        experts_spec = prefixes.prefix(experts, by_expert, graph=True)
        tokens = PartitionSpec(division.token_axes or None)
        mapped = maps.shard_map(
            on_each_device,
            mesh=division.mesh,
            in_specs=(experts_spec, tokens, tokens, tokens),
            out_specs=tokens,
            axis_names=division.axis_names,
            # Else loops in the experts of users would need first carries cast by
            # `jax.lax.pcast`; and in JAX 0.12.0, `jnp.searchsorted` fails with an
            # AssertionError where only some axes of a mesh are manual.
            check_vma=False,
            graph=True,
            graph_updates=False,
        )
        return mapped(experts, x, chosen, weights)


def _check_mask(x: jax.Array, mask: jax.Array) -> None:
    if mask.shape != x.shape[:-1]:
        raise ValueError(
            errors.message(
                "MixtureOfExperts: the mask must have an entry for each token.",
                where=f"x: {descriptions.describe(x)}\n"
                f"mask: {descriptions.describe(mask)}",
                way_out="Pass a mask of shape x.shape[:-1], True for real tokens.",
            )
        )


def _check_count(experts: Any, num_experts: int) -> None:
    """Refuses experts of another number than the router's."""
    for path, x in traversals.iter_graph(experts, graph=True):
        if compute_dtypes.is_param(x) and x.shape[:1] != (num_experts,):
            raise ValueError(
                errors.message(
                    f"MixtureOfExperts: the router chooses from {num_experts} experts, "
                    "but a Param of the experts has a different first axis.",
                    where=f"experts.{paths.dotted(path)}: {descriptions.describe(x)}",
                    way_out="Make router and experts with the same number; what all "
                    "experts share belongs in shared_experts.",
                )
            )


# Sorting.


def _mixture(
    experts: Any,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    num_experts: int,
    is_partial: bool,
    weigh_inputs: bool,
) -> jax.Array:
    """Adds up the weighted outputs of the chosen experts of each token.

    Args:
        experts: ``(rows, group_sizes) -> outputs``, or equal layers.
        x: ``[*batch, features]``.
        chosen: ``[*batch, top_k]``; the choice of no expert here is ``num_experts``.
        weights: ``[*batch, top_k]``.
        num_experts: The number of experts here.
        is_partial: Whether there may be choices of none.
        weigh_inputs: Whether inputs are weighted instead of outputs.
    """
    *batch, top_k = chosen.shape
    x, weights = x.reshape(-1, x.shape[-1]), weights.reshape(-1, top_k)
    tokens, rank, sizes = _sorted(chosen.reshape(-1, top_k), num_experts=num_experts)
    rows = _rows_of(x, tokens, sizes, is_partial=is_partial)
    if weigh_inputs:
        rows, weights = _weighted(rows, rank, weights), jnp.ones_like(weights)
    outputs = _outputs(experts, rows, sizes)
    y = _combined(outputs, rank, sizes, weights, is_partial=is_partial)
    return y.reshape(*batch, y.shape[-1])


@eager.compiled
def _sorted(chosen: jax.Array, *, num_experts: int) -> tuple[jax.Array, ...]:
    """Sorts choices by expert.

    Args:
        chosen: ``[tokens, top_k]``.
        num_experts: The number of experts.

    Returns:
        The token of each row; where each choice is among the rows, ``[choices]``; and
        how many rows each expert has.
    """
    count, top_k = chosen.shape
    choices = chosen.reshape(-1)
    numbers = jnp.arange(choices.shape[0], dtype=jnp.int32)
    order = jnp.argsort(choices, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True)
    sizes = jnp.zeros(num_experts, jnp.int32).at[choices].add(1, mode="drop")
    if num_experts < top_k:  # a token chooses each expert once
        order = order[: count * num_experts]
    return order // top_k, rank, sizes


@eager.compiled
def _rows_of(
    x: jax.Array, tokens: jax.Array, sizes: jax.Array, *, is_partial: bool
) -> jax.Array:
    """The rows of these tokens; zeros for those of no expert."""
    rows = x[tokens]
    return _where_used(rows, sizes) if is_partial else rows


@eager.compiled
def _weighted(rows: jax.Array, rank: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiplies each row by the weight of its choice."""
    options = {"mode": "drop", "unique_indices": True}
    of_rows = jnp.zeros(rows.shape[0], weights.dtype)
    of_rows = of_rows.at[rank].set(weights.reshape(-1), **options)
    return (rows * of_rows[:, None]).astype(rows.dtype)


@eager.compiled
def _combined(
    outputs: jax.Array,
    rank: jax.Array,
    sizes: jax.Array,
    weights: jax.Array,
    *,
    is_partial: bool,
) -> jax.Array:
    """Weights the outputs for each token, and adds them up, ``[tokens, features]``."""
    if is_partial:
        outputs = _where_used(outputs, sizes)
    wide = arithmetic.wide_dtype(outputs.dtype, weights.dtype)
    options = {"mode": "fill", "fill_value": 0, "unique_indices": True}
    each = outputs.at[rank].get(**options).reshape(*weights.shape, outputs.shape[-1])
    weighted = weights[..., None].astype(wide) * each.astype(wide)
    return weighted.sum(axis=1).astype(outputs.dtype)


def _where_used(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Zeros in place of rows of no expert, which may be anything, in gradients too."""
    is_used = jnp.arange(rows.shape[0], dtype=jnp.int32) < sizes.sum()
    return jnp.where(is_used[:, None], rows, 0)


def _outputs(experts: Any, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    if not isinstance(experts, EqualLayers):
        return experts(rows, sizes)
    graphdef, leaves = flattening.flatten_graph(experts.layers)

    def apply(values: Any, block: jax.Array) -> jax.Array:
        expert = flattening.unflatten(graphdef, values)
        outputs = expert(block)
        after = flattening.flatten_graph(expert)
        _check_unchanged(graphdef, values, *after)
        return outputs

    values = [flattening.raw_of(leaf) for leaf in leaves]
    return groups.in_blocks(apply, values, rows, sizes)


def _check_unchanged(
    graphdef: Any, values: Sequence[Any], new_graphdef: Any, leaves: Sequence[Any]
) -> None:
    """Refuses experts that write, as each is called for any number of blocks."""
    written = [
        leaf
        for leaf, value in zip(leaves, values, strict=False)
        if flattening.raw_of(leaf) is not value
    ]
    if written or new_graphdef != graphdef:
        names = ", ".join(sorted({type(x).__name__ for x in written}))
        raise TypeError(
            errors.message(
                "MixtureOfExperts: experts of a Stack can't change themselves.",
                where=f"written: {names or 'attributes'}",
                way_out="Draw random numbers and keep statistics outside of experts, "
                "e.g. with nnx.Dropout after the mixture.",
            )
        )


# Devices.


class _Division:
    """How a mesh divides tokens and experts.

    Args:
        mesh: The mesh.
        token_axes: Its axes that divide the first axis of the inputs.
        expert_axis: The axis that divides the experts, or ``None``.
    """

    def __init__(
        self, mesh: Any, token_axes: tuple[str, ...], expert_axis: str | None
    ) -> None:
        self.mesh = mesh
        self.token_axes = token_axes
        self.expert_axis = expert_axis
        used = {*token_axes, expert_axis} - {None}
        explicit = {*mesh.explicit_axes}
        self.axis_names = frozenset(used | explicit if used & explicit else used)
        self._is_exchange = expert_axis in token_axes

    @classmethod
    def of(
        cls, x: jax.Array, expert_axis: str | None, token_axes: tuple[str, ...]
    ) -> _Division | None:
        """Reads what divides these tokens; ``None`` if nothing does."""
        sharding = meshes.sharding_of(x)
        mesh: Any = jax.sharding.get_abstract_mesh()
        if sharding is not None:
            mesh = sharding.mesh
            entry = sharding.spec[0] if x.ndim > 1 else None
            names = (entry,) if isinstance(entry, str) else entry or ()
            token_axes = (*names, *[a for a in token_axes if a not in names])
        free = [a for a in mesh.axis_names if a not in mesh.manual_axes]
        token_axes = tuple([a for a in token_axes if a in free])
        size = math.prod([mesh.shape[a] for a in token_axes])
        if x.ndim == 1 or x.shape[0] % size:
            token_axes = ()
        expert_axis = expert_axis if expert_axis in free else None
        if not token_axes and expert_axis is None:
            return None
        return cls(mesh, token_axes, expert_axis)

    def check(self, num_experts: int) -> None:
        """Refuses experts that the devices can't have equally many of."""
        if self.expert_axis and num_experts % self.mesh.shape[self.expert_axis]:
            raise ValueError(
                errors.message(
                    "MixtureOfExperts: the devices of expert_axis must have equally "
                    "many experts.",
                    where=f"{num_experts} experts, {self.expert_axis!r} has "
                    f"{self.mesh.shape[self.expert_axis]} devices",
                    way_out="Choose a mesh whose axis divides the number of experts.",
                )
            )

    def placed(self, experts: Any, spec_of: Callable[[Any, Any], Any]) -> Any:
        """Experts whose arrays lie as their specs say, where that is part of types."""
        if not self.mesh.explicit_axes:
            return experts
        graphdef, leaves = flattening.flatten_graph(experts)
        arrays = [
            jax.sharding.reshard(
                flattening.raw_of(leaf), NamedSharding(self.mesh, spec_of((), leaf))
            )
            for leaf in leaves
        ]
        return flattening.unflatten(graphdef, arrays)

    def gathered(self, x: jax.Array) -> jax.Array:
        """The tokens of all devices between which experts are divided."""
        if not self._is_exchange:
            return x
        return jax.lax.all_gather(x, self.expert_axis, tiled=True)

    def own_experts(
        self, chosen: jax.Array, num_experts: int
    ) -> tuple[jax.Array, int, bool]:
        """The choices by number among the experts of this device, and how many it has.

        Choices of experts elsewhere get the number after the last.
        """
        if self.expert_axis is None:
            return chosen, num_experts, False
        count = num_experts // self.mesh.shape[self.expert_axis]
        own = chosen - count * jax.lax.axis_index(self.expert_axis)
        return jnp.where((own < 0) | (own >= count), count, own), count, True

    def summed(self, y: jax.Array) -> jax.Array:
        """The sum of the parts that devices have computed, of their own tokens."""
        if self.expert_axis is None:
            return y
        if not self._is_exchange:
            return jax.lax.psum(y, self.expert_axis)
        return jax.lax.psum_scatter(y, self.expert_axis, tiled=True)
