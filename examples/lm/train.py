"""The model with its optimizer, the loss, and the training step.

Plain functions, that know of no layout: where their arguments are, and the rules in
force (`layouts.Layout.in_force`), say where the work is done.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

import graftree as nnx
from examples.lm import layouts
from examples.lm.model import Config, LanguageModel


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        steps: Number of steps, over which the learning rate rises and falls.
        learning_rate: Its peak.
        warmup: The share of the steps in which it rises.
        weight_decay: What AdamW takes off the parameters.
        clip_norm: The largest norm of all gradients together.
        precision: The policy of the model (`nnx.precision`), or ``None``.
    """

    steps: int = 300
    learning_rate: float = 3e-3
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    precision: str | None = None


def make_transformation(recipe: Recipe) -> optax.GradientTransformation:
    """Returns AdamW with clipped gradients and a learning rate that rises and falls."""
    warmup = min(max(1, round(recipe.warmup * recipe.steps)), recipe.steps)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, warmup, max(recipe.steps, warmup + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=recipe.weight_decay),
    )


def make_objects(
    config: Config, recipe: Recipe, seed: int = 0
) -> tuple[LanguageModel, nnx.Optimizer]:
    """Returns a new model and its optimizer; in `make_state` each device its part."""
    model = LanguageModel(config, rngs=nnx.Rngs(seed))
    if recipe.precision is not None:
        nnx.precision.set_policy(model, recipe.precision, strict=True)
    optimizer = nnx.Optimizer(model, make_transformation(recipe), wrt=nnx.Param)
    return model, optimizer


def make_state(
    config: Config, recipe: Recipe, layout: layouts.Layout, seed: int = 0
) -> tuple[LanguageModel, nnx.Optimizer]:
    """Returns a new model and its optimizer, of which no device ever has the whole."""
    make = functools.partial(make_objects, config, recipe, seed)
    return nnx.sharding.init(make, layout.mesh, layout.rules)


def loss_fn(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss, in nats per token, of each token after those before it.

    Args:
        model: The model.
        tokens: ``[batch, length + 1]``: the first ``length`` are what it reads, the
            last ``length`` what it is to say.
    """
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@nnx.jit(donate_argnames=("model", "optimizer"), static_argnames="micro_batches")
def train_step(
    model: LanguageModel,
    optimizer: nnx.Optimizer,
    tokens: jax.Array,
    micro_batches: int = 1,
) -> jax.Array:
    """Learns from one batch: updates the model and the optimizer in place.

    Args:
        model: The model; its old arrays are given up.
        optimizer: Its optimizer; likewise.
        tokens: ``[batch, length + 1]``.
        micro_batches: In how many parts the gradient is computed, one after the other.

    Returns:
        The loss before the update.
    """
    if micro_batches == 1:
        loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    else:
        loss, grads = nnx.memory.value_and_grad(loss_fn, micro_batches)(model, tokens)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def test_step(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Returns the loss of one batch; changes nothing."""
    return loss_fn(model, tokens)
