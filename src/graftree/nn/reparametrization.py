"""Wrappers that normalize the weights of a layer before each call.

``SpectralNorm`` divides matrices by their largest singular value, ``WeightNorm`` gives
weight vectors a length that is learned separately.

**Both overwrite the weights**: from the first call on, in training and in evaluation,
the layer holds the normalized ones, and the original magnitude is gone. Keep a copy
(``nnx.clone``) where that matters.

Everything is checked and computed before anything is written; if a call of the layer
fails, weights and statistics stay as they were.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Axes, Dtype, Filter, Initializer, Path, PromoteDtypeFn
from graftree.core import filters, paths
from graftree.core.graph import functional, traversals
from graftree.core.modules.modules import EqualLayers, Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.states import states
from graftree.core.text.descriptions import describe_shape
from graftree.core.variables import kinds, variables
from graftree.core.variables.kinds import BatchStat, Param
from graftree.core.variables.variables import Variable
from graftree.nn import initializers
from graftree.nn.support import arguments, arithmetic, eager, meshes

_U_INIT = initializers.normal(stddev=0.01)
_KERNELS = filters.PathContains("kernel")


class SpectralNorm(Module):
    """Divides the matrices of a layer by their largest singular value, at each call.

    The singular value ``sigma`` of ``W`` is estimated by power iteration, which resumes
    where the last call left off: ``n_steps`` times

        v = l2(u W^T),  u = l2(v W)    with l2(a) = a / sqrt(sum(a^2) + epsilon)

    and then ``sigma = v W u^T``. Derivatives see only the last formula, with ``u`` and
    ``v`` as constants.

    Every Param with at least two axes is such a matrix; if it has more, all but the
    last count as one.

    **Each call overwrites the weights of the layer**, in evaluation as well. So from
    the second call on ``sigma`` is about one, unless training has moved the weights.

    Args:
        layer_instance: The layer; it is kept and changed, not copied.
        n_steps: Steps of power iteration per call; less than one switches it off.
        epsilon: Added to squared lengths.
        dtype: The dtype to which new weights are rounded; they are stored in the dtype
            of the Param. ``None``: that of the Param.
        param_dtype: The dtype in which the statistics are stored.
        error_on_non_matrix: Whether Params with more than two axes are an error.
        update_stats: Whether calls store ``u`` and ``sigma``.
        rngs: Gives one key to each ``u``, in the order of the paths of the Params.

    Attributes:
        layer_instance: The layer.
        use_running_average: Whether calls leave the statistics as they are; ``train()``
            and ``eval()`` set it.
        batch_stats: The statistics, BatchStats by path: for each Param
            ``(*path, "u")``, ``[1, last axis]``, initially random, and
            ``(*path, "sigma")``, ``[]``.

    Raises:
        ValueError: If a Param has more than two axes, and that is an error; or if the
            layer has a `Stack`, whose arrays each hold the weights of several layers.
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.diag(jnp.array([4.0, 2.0]))
        >>> model = nnx.SpectralNorm(layer, n_steps=20, rngs=nnx.Rngs(1))
        >>> model(jnp.ones((1, 2))).round(3)
        Array([[1. , 0.5]], dtype=float32)
        >>> model.batch_stats["kernel", "sigma"][...].round(3)
        Array(4., dtype=float32)

    References:
        Miyato et al., 2018, "Spectral Normalization for Generative Adversarial
        Networks", eq. 8 and algorithm 1.
    """

    def __init__(
        self,
        layer_instance: Module,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: Rngs,
    ):
        _check_no_stack("SpectralNorm", layer_instance)
        self.layer_instance = layer_instance
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats
        stats = {}
        for path, param in self._matrices():
            shape = (1, param.shape[-1])
            u = _U_INIT(arguments.draw_key(rngs), shape, param_dtype)
            stats[(*path, "u")] = BatchStat(u)
            stats[(*path, "sigma")] = BatchStat(jnp.ones((), param_dtype))
        self.batch_stats = attributes.data(stats)

    def __call__(self, x: Any, update_stats: bool | None = None, **kwargs: Any) -> Any:
        """Normalizes the weights of the layer, then calls it.

        Args:
            x: The inputs of the layer.
            update_stats: Whether to store ``u`` and ``sigma``, if not ``None``.
            **kwargs: Keyword arguments of the layer.

        Returns:
            The result of the layer.

        Raises:
            RuntimeError: If the layer has a matrix that it lacked when wrapped.
            ValueError: If a Param has more than two axes, and that is an error.
            TraceContextError: If another trace owns the weights or the statistics.
        """
        if update_stats is None:
            update_stats = not self.use_running_average
        matrices = self._matrices()
        _check_known([(*path, "u") for path, _ in matrices], self.batch_stats)
        news: list[tuple[Variable[Any], jax.Array]] = []
        for path, param in matrices:
            stats = [self.batch_stats[(*path, name)] for name in ("u", "sigma")]
            weights, *statistics = _with_unit_norm(
                param[...],
                stats[0][...],
                n_steps=self.n_steps,
                epsilon=self.epsilon,
                dtype=self.dtype,
            )
            if update_stats:
                news.extend(zip(stats, statistics, strict=True))
            news.append((param, weights))
        news = [(variable, new.astype(variable.dtype)) for variable, new in news]
        return _call_with(news, self.layer_instance, x, **kwargs)

    def _matrices(self) -> list[tuple[Path, Variable[Any]]]:
        """Lists the Params to normalize with their paths, in order."""
        if self.n_steps < 1:
            return []
        matrices = []
        for path, param in _variables(self.layer_instance, Variable):
            if not issubclass(kinds.kind_of(param), Param):  # frozen ones are
                continue
            ndim = getattr(param.get_value(), "ndim", 0)
            if ndim > 2 and self.error_on_non_matrix:
                raise ValueError(
                    f"The parameter {path} {describe_shape(param.shape)} of the "
                    f"layer_instance is {ndim}D but error_on_non_matrix is True.\nPass "
                    "error_on_non_matrix=False to take all axes but the last as one."
                )
            if ndim >= 2:
                matrices.append((path, param))
        return matrices


@eager.compiled
def _with_unit_norm(
    weights: jax.Array,
    u: jax.Array,
    *,
    n_steps: int,
    epsilon: float,
    dtype: Dtype | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One call's new weights, ``u`` and ``sigma`` of one Param."""
    matrix = meshes.whole(_widened(weights)).reshape(-1, weights.shape[-1])
    # All but the last line of the iteration take them as constants.
    constant, u = jax.lax.stop_gradient((matrix, _widened(u)))
    v = u
    for _ in range(n_steps):
        v = _unit(jnp.matmul(u, constant.T), epsilon)
        u = _unit(jnp.matmul(v, constant), epsilon)
    sigma = jnp.matmul(jnp.matmul(v, matrix), u.T)[0, 0]
    weights = arithmetic.over(weights, jnp.where(sigma != 0, sigma, 1.0))
    dtype = arguments.canonicalize_dtype(weights, dtype=dtype)
    return weights.astype(dtype), u, jax.lax.stop_gradient(sigma)


def _unit(a: jax.Array, epsilon: float) -> jax.Array:
    """``a``, brought to a length of one."""
    return a * jax.lax.rsqrt((a * a).sum() + epsilon)


class WeightNorm(Module):
    """Gives the weight vectors of a layer a learned length, at each call.

    Computes ``scale * w / sqrt(sum(w^2) + epsilon)`` for each vector ``w`` of a kernel,
    which extends over all axes but ``feature_axes``: direction and length are learned
    separately.

    **Each call overwrites the weights of the layer**, in evaluation as well. The
    original length of a vector is lost; ``scales`` start as ones.

    Args:
        layer_instance: The layer; it is kept and changed, not copied.
        feature_axes: The axes along which vectors differ; ``None``: each kernel
            is one vector.
        use_scale: Whether the lengths are learned; otherwise they are one.
        scale_init: Initializer of the scales.
        epsilon: Added to squared lengths.
        dtype: The dtype in which the new weights are stored. ``None``: that of the old
            ones.
        param_dtype: The dtype in which the scales are stored.
        variable_filter: Which Variables of the layer to normalize.
        promote_dtype: Called as ``promote_dtype((weights,), dtype=dtype)`` with the new
            weights, in float32 or wider.
        rngs: Source of the keys for ``scale_init``. Nothing is drawn and its counts
            stay: keys are derived from the next one and the path of the kernel, so two
            equal layers wrapped one right after the other get the same scales.

    Attributes:
        layer_instance: The layer.
        scales: Params by the path of the kernel in the layer, each with the sizes of
            ``feature_axes``; or ``None``.

    Raises:
        ValueError: If a feature axis does not exist, which is also an IndexError; or if
            the layer has a `Stack`, whose arrays each hold the weights of several
            layers.
        AttributeError: If scales are wanted and ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([[3.0, 0.0], [4.0, 7.0]])
        >>> model = nnx.WeightNorm(layer, rngs=nnx.Rngs(1))
        >>> model(jnp.eye(2)).round(3)
        Array([[0.6, 0. ],
               [0.8, 1. ]], dtype=float32)
        >>> model.scales["kernel",][...] *= 2
        >>> model(jnp.eye(2)).round(3)
        Array([[1.2, 0. ],
               [1.6, 2. ]], dtype=float32)

    References:
        Salimans and Kingma, 2016, "Weight Normalization: A Simple Reparameterization
        to Accelerate Training of Deep Neural Networks", eq. 2.
    """

    def __init__(
        self,
        layer_instance: Module,
        *,
        feature_axes: Axes | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        variable_filter: Filter = _KERNELS,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
    ):
        _check_no_stack("WeightNorm", layer_instance)
        self.layer_instance = layer_instance
        self.feature_axes = () if feature_axes is None else feature_axes
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.variable_filter = filters.to_predicate(variable_filter)
        self.promote_dtype = promote_dtype
        self.scales = attributes.data(self._new_scales(rngs) if use_scale else None)

    def _new_scales(self, rngs: Rngs) -> dict[Path, Param[Any]]:
        """Makes one scale per kernel, without drawing from ``rngs``."""
        key = arguments.draw_key(functional.clone(rngs))
        scales = {}
        for path, kernel in self._kernels():
            axes = arguments.canonical_axes(self.feature_axes, len(kernel.shape))
            shape = tuple(kernel.shape[axis] for axis in axes)
            # A number that no stream counts up to: its keys are for others.
            key_of_path = jax.random.fold_in(key, zlib.crc32(repr(path).encode()))
            scales[path] = Param(self.scale_init(key_of_path, shape, self.param_dtype))
        return scales

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Normalizes the weights of the layer, then calls it.

        Args:
            x: The inputs of the layer.
            *args: Further arguments of the layer.
            **kwargs: Keyword arguments of the layer.

        Returns:
            The result of the layer.

        Raises:
            RuntimeError: If the layer has a kernel that it lacked when wrapped.
            TraceContextError: If another trace owns the weights.
        """
        kernels = self._kernels()
        scales = self.scales if self.use_scale else None
        if scales is not None:
            _check_known([path for path, _ in kernels], scales)
        news = []
        for path, kernel in kernels:
            scale = None if scales is None else scales[path][...]
            weights = kernel[...]
            new = _with_unit_vectors(
                weights,
                scale,
                feature_axes=arguments.canonical_axes(self.feature_axes, weights.ndim),
                epsilon=self.epsilon,
                dtype=self.dtype,
                promote_dtype=self.promote_dtype,
            )
            news.append((kernel, new))
        return _call_with(news, self.layer_instance, x, *args, **kwargs)

    def _kernels(self) -> list[tuple[Path, Variable[Any]]]:
        """Lists the Variables to normalize with their paths, in order."""
        return _variables(self.layer_instance, self.variable_filter)


@eager.compiled
def _with_unit_vectors(
    old: jax.Array,
    scale: jax.Array | None,
    *,
    feature_axes: tuple[int, ...],
    epsilon: float,
    dtype: Dtype | None,
    promote_dtype: PromoteDtypeFn,
) -> jax.Array:
    """Normalizes one kernel and scales its vectors."""
    others = tuple(axis for axis in range(old.ndim) if axis not in feature_axes)
    new = _widened(old)
    square = (new * new).sum(others, keepdims=True)
    new = new * jax.lax.rsqrt(square + epsilon)
    if scale is not None:
        shape = arguments.shape_along(feature_axes, old.shape)
        (lengths,) = meshes.beside(new, feature_axes, (scale,))
        new = arithmetic.times(new, jnp.reshape(lengths, shape))
    (new,) = promote_dtype((new,), dtype=dtype)
    # Weights keep their dtype, whatever the dtype of the scale.
    return new.astype(arguments.canonicalize_dtype(old, dtype=dtype))


def _variables(layer: Module, filter_: Filter) -> list[tuple[Path, Variable[Any]]]:
    """Lists the Variables of a layer that a filter matches, sorted by their paths."""
    flat = states.to_flat_state(functional.state(layer, filter_))
    return [(path, leaf) for path, leaf in flat if isinstance(leaf, Variable)]


def _check_no_stack(name: str, layer: Any) -> None:
    """Raises if layers are stacked: their weights would be normalized as one."""
    for path, part in traversals.iter_nodes(layer, graph=True):
        if isinstance(part, EqualLayers):
            raise ValueError(
                errors.message(
                    f"{name} can't wrap a Stack: each of its arrays holds the weights "
                    "of several layers, which would be normalized as one.",
                    where=paths.below("layer_instance", path),
                    way_out=f"Wrap each layer: nnx.Stack(lambda rngs: nnx.{name}("
                    "make(rngs), rngs=rngs), ...).",
                )
            )


def _widened(x: jax.Array) -> jax.Array:
    """``x`` in float32 or wider: half precision can't hold sums and a small epsilon."""
    return x.astype(arithmetic.wide_dtype(x.dtype, jnp.float32))


def _check_known(needed: Sequence[Path], prepared: dict[Path, Any]) -> None:
    """Raises unless the wrapper has prepared something for all these paths."""
    for path in needed:
        if path not in prepared:
            raise RuntimeError(
                "Parameters of the layer_instance should not change, but since the "
                f"layer was wrapped {path} is new.\n"
                "Wrap the layer again when it is complete."
            )


def _call_with(
    news: Sequence[tuple[Variable[Any], jax.Array]],
    layer: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Writes new values, all or none, and calls the layer.

    If the call fails, the Variables get their values back.
    """
    boxes = [variable for variable, _ in news]
    for variable in boxes:
        variables.check_write(variable)
    with arguments.undone_on_failure(*boxes):
        for variable, new in news:
            # An array ref keeps its dtype, and takes no other.
            variable.set_value(new.astype(variable.dtype) if variable.ref else new)
        return layer(*args, **kwargs)
