"""Routers: which experts a token goes to, and how evenly they are used.

    logits = x @ kernel + bias                          [*batch, num_experts]
    scores = score_fn(logits)                           softmax or sigmoid
    experts = the top_k largest of scores + correction  [*batch, top_k]
    weights = scale * scores[experts] / their sum

A softmax over the logits of the chosen experts alone is the softmax over all, divided
by the sum of the chosen: so one formula serves both orders.

What the losses of a router need are sums over tokens (`Load`). They are recorded for
``nnx.capture``, and add up over calls, parts of a batch and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Array, ArrayLike, Dtype, Inexact, Initializer, Num
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.variables.kinds import Param
from graftree.core.variables.variables import A, Variable
from graftree.nn import linear
from graftree.nn.support import arguments, arithmetic, eager, jax_functions, meshes


class Routing(NamedTuple):
    """Where the tokens of a batch go.

    Attributes:
        experts: The chosen experts, ``[*batch, top_k]``, integers.
        weights: The weights of their outputs, ``[*batch, top_k]``.
        scores: The scores of all experts, ``[*batch, num_experts]``.
        logits: The logits of all experts, ``[*batch, num_experts]``.

    Example:
        >>> router = nnx.Router(8, 4, top_k=2, rngs=nnx.Rngs(0))
        >>> routing = router(jnp.ones((3, 8)))
        >>> routing.experts.shape, routing.weights.sum(-1)
        ((3, 2), Array([1., 1., 1.], dtype=float32))
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array
    logits: jax.Array


class Router(Module):
    """Chooses ``top_k`` of ``num_experts`` for each token, and weights for them.

    The experts with the largest ``score_fn(x @ kernel + bias)`` are chosen. Their
    weights are these scores, divided by their sum unless ``normalize`` is off, and
    times ``scale``. All is computed in float32 or wider.

    With several groups of experts, a token chooses only from the experts of its best
    ``top_groups`` groups; a group counts as much as its two best experts together. The
    correction, which is added to scores for the choice only, is a Variable and not a
    Param: `balance` changes it.

    Args:
        in_features: Size of the last axis of the inputs.
        num_experts: The number of experts.
        top_k: How many of them each token goes to.
        score_fn: Makes scores of logits: ``nnx.softmax`` or ``nnx.sigmoid``.
        normalize: Whether the weights of a token are divided by their sum.
        scale: A factor of the weights.
        use_bias: Whether there is a bias.
        use_correction: Whether there is a correction of the choice.
        num_groups: The number of groups, which have consecutive experts.
        top_groups: How many of them each token may choose from.
        jitter: Inputs are multiplied by random numbers from ``1 - jitter`` to
            ``1 + jitter``, unless ``deterministic``.
        deterministic: Whether there is no jitter; ``model.eval()`` sets it.
        dtype: The dtype of the computation, if wider than float32.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of ``kernel``.
        bias_init: Initializer of ``bias``.
        rngs: Gives one key to ``kernel``, then one to ``bias``. With jitter, its stream
            ``jitter``, or else ``default``, is forked.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[in_features, num_experts]``.
        bias: Param, ``[num_experts]``, or ``None``.
        correction: Variable, ``[num_experts]``, initially zeros, or ``None``.

    Raises:
        ValueError: If ``top_k`` or ``top_groups`` is more than there is, if the groups
            are not equally large or have too few experts, or if ``jitter`` is not in
            ``[0, 1)``.
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> mixtral = nnx.Router(8, 4, top_k=2, rngs=nnx.Rngs(0))
        >>> deepseek = nnx.Router(
        ...     8, 16, top_k=4, score_fn=nnx.sigmoid, scale=2.5, num_groups=4,
        ...     top_groups=2, use_correction=True, rngs=nnx.Rngs(0),
        ... )
        >>> deepseek(jnp.ones((3, 8))).weights.sum(-1)
        Array([2.5, 2.5, 2.5], dtype=float32)

    References:
        Jiang et al., 2024, "Mixtral of Experts", section 2.1. DeepSeek-AI, 2024,
        "DeepSeek-V3 Technical Report", eq. 12 to 16. Fedus et al., 2021, "Switch
        Transformers", section 2.4 (float32, jitter).
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        *,
        top_k: int,
        score_fn: Callable[[Any], Any] = jax.nn.softmax,
        normalize: bool = True,
        scale: float = 1.0,
        use_bias: bool = False,
        use_correction: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        jitter: float = 0.0,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = linear.default_kernel_init,
        bias_init: Initializer = linear.default_bias_init,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(self, in_features=in_features, num_experts=num_experts)
        _check_choice(num_experts, top_k, num_groups, top_groups)
        if not 0 <= jitter < 1:
            raise ValueError(f"The jitter of a Router must be in [0, 1), got {jitter}.")
        self.kernel = arguments.make_param(
            kernel_init, rngs, (in_features, num_experts), param_dtype, kernel_metadata
        )
        self.bias: Param[jax.Array] | None = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (num_experts,), param_dtype, bias_metadata
            )
        self.correction: Variable[jax.Array] | None = attributes.data(None)
        if use_correction:
            self.correction = Variable(jnp.zeros(num_experts))
        self.top_k = top_k
        self.score_fn = score_fn
        self.normalize = normalize
        self.scale = scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.jitter = jitter
        self.deterministic = deterministic
        self.rngs: RngStream | None = attributes.data(None)
        if jitter:
            self.rngs = rngs["jitter"].fork()
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.kernel.shape[-1]

    @eager.compiled
    def __call__(self, x: Num[ArrayLike, "*batch in_features"]) -> Routing:
        """Chooses experts.

        Args:
            x: Tokens, ``[*batch, in_features]``.

        Returns:
            The choice, with weights, scores and logits in float32 or wider.

        Raises:
            TypeError: If the last axis of ``x`` has the wrong size, or ``x`` is not
                numeric.
        """
        inputs = arguments.as_array(x)
        params = self.kernel[...], arguments.read(self.bias)
        dtype = arguments.canonicalize_dtype(inputs, *params, dtype=self.dtype)
        wide = arithmetic.wide_dtype(dtype, jnp.float32)
        operands: Any = arguments.promote_dtype((inputs, *params), dtype=wide)
        tokens = operands[0]
        kernel, bias = meshes.beside(tokens, (-1,), operands[1:])
        if self.rngs is not None and not self.deterministic:
            low, high = 1 - self.jitter, 1 + self.jitter
            tokens *= jax.random.uniform(
                self.rngs(), tokens.shape, tokens.dtype, low, high
            )
        contracted = (((tokens.ndim - 1,), (0,)), ((), ()))
        dot_general = jax_functions.current(jax.lax.dot_general)
        logits = dot_general(tokens, kernel, contracted, precision=self.precision)
        logits = linear.add_bias(logits, bias)
        scores = self.score_fn(logits)
        experts = self._choose(scores)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalize:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
        return Routing(experts, weights * self.scale, scores, logits)

    def _choose(self, scores: jax.Array) -> jax.Array:
        """Finds the ``top_k`` experts of each token, the best first."""
        if self.correction is not None:
            correction = self.correction[...].astype(scores.dtype)
            (correction,) = meshes.beside(scores, (-1,), (correction,))
            scores = linear.add_bias(scores, correction)
        if self.num_groups > 1:
            scores = _in_best_groups(scores, self.num_groups, self.top_groups)
        return _largest(jax.lax.stop_gradient(scores), self.top_k)

    def balance(self, load: Load, rate: float = 1e-3) -> None:
        """Makes experts that get few tokens likelier to be chosen, without a loss.

        Adds ``rate`` to the correction of each expert that was chosen less often than
        the mean, and subtracts it where it was chosen more often. Call it after a step
        of training.

        Args:
            load: The load of this router; for a Stack of routers with a first axis of
                layers, as it is recorded.
            rate: The change of the correction.

        Raises:
            ValueError: If the router has no correction.

        Example:
            >>> router = nnx.Router(
            ...     8, 4, top_k=1, use_correction=True, rngs=nnx.Rngs(0)
            ... )
            >>> load = nnx.mixtures.Load.of(router(jnp.ones((3, 8))))
            >>> router.balance(load)
            >>> (load.choices > 0) == (router.correction[...] < 0)
            Array([ True,  True,  True,  True], dtype=bool)

        References:
            Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
            Mixture-of-Experts", algorithm 1.
        """
        if self.correction is None:
            raise ValueError(
                errors.message(
                    "Router.balance: this Router has no correction to change.",
                    way_out="Make it with use_correction=True.",
                )
            )
        mean = load.choices.mean(axis=-1, keepdims=True)
        change = rate * jnp.sign(mean - load.choices)
        self.correction[...] += change.astype(self.correction.dtype)


def _check_choice(
    num_experts: int, top_k: int, num_groups: int, top_groups: int
) -> None:
    """Refuses a choice of more experts than there are to choose from."""
    problem = ""
    if num_groups < 1 or num_experts % num_groups:
        problem = "the groups must have equally many experts"
    elif not 1 <= top_groups <= num_groups:
        problem = "top_groups must be from 1 to num_groups"
    elif not 1 <= top_k <= num_experts // num_groups * top_groups:
        problem = "top_k must be from 1 to the number of experts to choose from"
    if problem:
        raise ValueError(
            errors.message(
                f"Router: {problem}.",
                where=f"num_experts={num_experts}, top_k={top_k}, "
                f"num_groups={num_groups}, top_groups={top_groups}",
                way_out="The experts to choose from are num_experts // num_groups * "
                "top_groups.",
            )
        )


def _in_best_groups(scores: jax.Array, num_groups: int, top_groups: int) -> jax.Array:
    """Gives minus infinity to the experts of all but the best groups."""
    *batch, num_experts = scores.shape
    grouped = scores.reshape(*batch, num_groups, num_experts // num_groups)
    two = _largest(grouped, min(2, grouped.shape[-1]))
    best = jnp.take_along_axis(grouped, two, axis=-1).sum(axis=-1)
    chosen = _largest(best, top_groups)
    is_chosen = jax.nn.one_hot(chosen, num_groups, dtype=bool).any(axis=-2)
    allowed = jnp.where(is_chosen[..., None], grouped, -jnp.inf)
    return allowed.reshape(scores.shape)


def _largest(x: jax.Array, count: int) -> jax.Array:
    """The indices of the largest entries along the last axis, the first of equal ones.

    As ``jax.lax.top_k``, for which XLA gathers the tokens of all devices.
    """
    indices = []
    for _ in range(count):
        index = jnp.argmax(x, axis=-1)
        x = jnp.where(jax.nn.one_hot(index, x.shape[-1], dtype=bool), -jnp.inf, x)
        indices.append(index)
    return jnp.stack(indices, axis=-1)


# Loads.


class Load(NamedTuple):
    """How the experts of a layer were used: sums over tokens, which can be added.

    Attributes:
        tokens: The number of tokens, ``[]``.
        choices: How often each expert was chosen, ``[num_experts]``.
        scores: The scores of each expert, of each token divided by their sum, added
            up: ``[num_experts]``.
        squares: The sum of ``logsumexp(logits) ** 2``, ``[]``.

    Example:
        >>> router = nnx.Router(8, 4, top_k=2, rngs=nnx.Rngs(0))
        >>> load = nnx.mixtures.Load.of(router(jnp.ones((3, 8))))
        >>> load.tokens, load.choices.sum(), load.scores.sum()
        (Array(3., dtype=float32), Array(6., dtype=float32), Array(3., dtype=float32))
    """

    tokens: jax.Array
    choices: jax.Array
    scores: jax.Array
    squares: jax.Array

    @classmethod
    def of(cls, routing: Routing, mask: jax.Array | None = None) -> Load:
        """Adds up over tokens.

        Args:
            routing: The result of a router.
            mask: Which tokens count, ``[*batch]``; ``None``: all.
        """
        experts, _, scores, logits = routing
        return cls(*_sums(experts, scores, logits, mask))

    def __add__(self, other: Any) -> Load:
        return Load(*[x + y for x, y in zip(self, other, strict=True)])


@eager.compiled
def _sums(
    experts: jax.Array, scores: jax.Array, logits: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, ...]:
    """The fields of a `Load`."""
    dtype, num_experts = scores.dtype, scores.shape[-1]
    is_token = jnp.ones(scores.shape[:-1], bool) if mask is None else mask
    is_chosen = jax.nn.one_hot(experts, num_experts, dtype=dtype).sum(axis=-2)
    shares = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2

    def total(x: jax.Array) -> jax.Array:
        counts = is_token.reshape(is_token.shape + (1,) * (x.ndim - is_token.ndim))
        return jnp.where(counts, x, 0).sum(axis=range(is_token.ndim))

    return total(is_token.astype(dtype)), *map(total, (is_chosen, shares, squares))


class RouterLoad(Variable[A]):
    """The `Load` of a layer, as ``nnx.capture`` records it.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> layer = nnx.MixtureOfExperts(
        ...     nnx.Router(8, 4, top_k=2, rngs=rngs),
        ...     nnx.GatedExperts(4, 8, 16, rngs=rngs),
        ... )
        >>> y, loads = nnx.capture(layer, nnx.RouterLoad)(jnp.ones((3, 8)))
        >>> loads["load"].get_value().tokens
        Array(3., dtype=float32)
    """


def load_balance_loss(loads: Any) -> Inexact[Array, ""]:
    """Computes the loss that is least when all experts are used equally.

    That is ``num_experts * sum(f * p)``: ``f`` is the number of times that each expert
    is chosen per token, ``p`` the mean of its scores. It is ``top_k`` where all are
    equal. Of several layers it is the mean.

    Args:
        loads: What ``nnx.capture(model, nnx.RouterLoad)`` records, or any tree of
            `Load`; layers of a Stack are a first axis.

    Returns:
        A number, float32 or wider.

    Raises:
        ValueError: If there is no `Load`.

    Example:
        >>> even = nnx.mixtures.Load(8.0, jnp.full(4, 4.0), jnp.full(4, 2.0), 0.0)
        >>> nnx.mixtures.load_balance_loss(even)
        Array(2., dtype=float32)

    References:
        Fedus et al., 2021, "Switch Transformers", eq. 4 to 6.
    """

    def loss(load: Load) -> jax.Array:
        tokens = _at_least_one(load.tokens)
        product = jnp.sum(load.choices * load.scores, axis=-1)
        return load.choices.shape[-1] * product / tokens**2

    return _mean(loss, loads, "load_balance_loss")


def z_loss(loads: Any) -> Inexact[Array, ""]:
    """Computes the loss that keeps logits small: the mean of ``logsumexp(logits)**2``.

    Args:
        loads: As for `load_balance_loss`.

    Returns:
        A number, float32 or wider.

    Raises:
        ValueError: If there is no `Load`.

    Example:
        >>> load = nnx.mixtures.Load(8.0, jnp.full(4, 4.0), jnp.full(4, 2.0), 16.0)
        >>> nnx.mixtures.z_loss(load)
        Array(2., dtype=float32)

    References:
        Zoph et al., 2022, "ST-MoE", eq. 5.
    """
    return _mean(lambda x: x.squares / _at_least_one(x.tokens), loads, "z_loss")


def expert_shares(loads: Any) -> Any:
    """Computes the share of the choices that each expert has: a metric.

    Args:
        loads: As for `load_balance_loss`.

    Returns:
        The same tree with ``[num_experts]``, of sum 1, in place of each `Load`, or
        ``[layers, num_experts]``; zeros where there was no token.

    Example:
        >>> load = nnx.mixtures.Load(2.0, jnp.array([1.0, 2, 1]), jnp.ones(3), 0.0)
        >>> nnx.mixtures.expert_shares(load)
        Array([0.25, 0.5 , 0.25], dtype=float32)
    """

    def shares(load: Load) -> jax.Array:
        total = load.choices.sum(axis=-1, keepdims=True)
        return load.choices / _at_least_one(total)

    return jax.tree.map(shares, loads, is_leaf=_is_load)


def total_load(loads: Any) -> Load:
    """Adds the loads of all layers, as if they were one layer with all their tokens.

    The `load_balance_loss` of the sum is what ``transformers`` computes.

    Args:
        loads: As for `load_balance_loss`; all layers have equally many experts.

    Returns:
        Their sum.

    Raises:
        ValueError: If there is no `Load`.

    Example:
        >>> load = nnx.mixtures.Load(2.0, jnp.array([1.0, 3.0]), jnp.ones(2), 0.0)
        >>> nnx.mixtures.total_load([load, load]).choices
        Array([2., 6.], dtype=float32)
    """
    each = _loads_in(loads, "total_load")
    ranks = 0, 1, 1, 0  # without layers
    sums = [
        Load(
            *[
                jnp.sum(x, axis=range(jnp.ndim(x) - rank))
                for x, rank in zip(load, ranks, strict=True)
            ]
        )
        for load in each
    ]
    return sum(sums[1:], sums[0])


def _mean(function: Callable[[Load], jax.Array], loads: Any, call: str) -> jax.Array:
    """The mean over layers."""
    values = [jnp.ravel(function(load)) for load in _loads_in(loads, call)]
    return jnp.concatenate(values).mean()


def _loads_in(loads: Any, call: str) -> list[Load]:
    leaves = jax.tree.leaves(loads, is_leaf=_is_load)
    each = [leaf for leaf in leaves if _is_load(leaf)]
    if not each:
        raise ValueError(
            errors.message(
                f"nnx.mixtures.{call}: its argument contains no Load.",
                way_out="Record it: y, loads = nnx.capture(model, nnx.RouterLoad)(x).",
            )
        )
    return each


def _is_load(x: Any) -> bool:
    return isinstance(x, Load)


def _at_least_one(count: jax.Array) -> jax.Array:
    """The divisor of a mean, which is zero over no tokens."""
    return jnp.maximum(count, 1)
