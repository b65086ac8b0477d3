"""A language model with a pipeline inside, and its training step."""

import dataclasses
import functools

import jax
import numpy as np
import optax

import graftree as nnx
from examples.lm import layouts, train
from examples.lm.model import Block, Config, LanguageModel
from examples.pipeline import pipeline


class PipelinedModel(LanguageModel):
    """The language model of ``examples/lm``, its blocks divided into stages.

    All stages have the embedding, the last norm and the head, as in GPipe's figure 2
    of a model whose ends are small.

    Attributes:
        blocks: A Stack, of which each stage has a part.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(dataclasses.replace(config, layers=0), rngs=rngs)
        self.blocks = nnx.Stack(
            lambda rngs: Block(config, rngs),
            config.layers,
            remat=config.remat,
            axis_name=pipeline.STAGE,
            rngs=rngs,
        )

    def __call__(
        self,
        tokens: jax.Array,
        mesh: jax.sharding.Mesh | None = None,
        micro_batches: int = 1,
    ) -> jax.Array:
        """Maps tokens ``[batch, length]`` to logits; without a mesh, by no pipeline."""
        x = self.embed(tokens)
        if mesh is None:
            x = self.blocks(x)
        else:
            x = pipeline.apply(self.blocks, x, mesh, micro_batches)
        return self.head(self.norm(x))


def make(
    config: Config, layout: layouts.Layout, learning_rate: float = 3e-3
) -> tuple[PipelinedModel, nnx.Optimizer]:
    """Returns a new model and its optimizer; each stage makes its own layers."""

    def objects() -> tuple[PipelinedModel, nnx.Optimizer]:
        model = PipelinedModel(config, rngs=nnx.Rngs(0))
        transformation = optax.adamw(learning_rate)
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    return nnx.sharding.init(objects, layout.mesh, layout.rules)


def loss_fn(
    model: PipelinedModel,
    tokens: jax.Array,
    mesh: jax.sharding.Mesh | None,
    micro_batches: int,
) -> jax.Array:
    """Returns the mean loss of each token after those before it, in nats."""
    call = functools.partial(model, mesh=mesh, micro_batches=micro_batches)
    return train.loss_fn(call, tokens)


@nnx.jit(static_argnames=("mesh", "micro_batches"))
def loss_and_gradients(
    model: PipelinedModel,
    tokens: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
    micro_batches: int = 1,
) -> tuple[jax.Array, nnx.State]:
    """Returns the loss and its gradients; without a mesh, by no pipeline."""
    return nnx.value_and_grad(loss_fn)(model, tokens, mesh, micro_batches)


@nnx.jit(
    static_argnames=("mesh", "micro_batches"), donate_argnames=("model", "optimizer")
)
def train_step(
    model: PipelinedModel,
    optimizer: nnx.Optimizer,
    tokens: jax.Array,
    mesh: jax.sharding.Mesh,
    micro_batches: int,
) -> jax.Array:
    """Learns from one batch; returns the loss before the update."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens, mesh, micro_batches)
    optimizer.update(model, grads)
    return loss


def largest_difference(first: nnx.State, second: nnx.State) -> float:
    """Returns how far two sets of gradients are apart, relative to the largest one."""

    def relative(a: jax.Array, b: jax.Array) -> float:
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))

    pair = [jax.tree.map(np.asarray, nnx.as_pure(state)) for state in (first, second)]
    return max(jax.tree.leaves(jax.tree.map(relative, *pair)))
