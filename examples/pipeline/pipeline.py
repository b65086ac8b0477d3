"""GPipe: the layers of a Stack on different devices, which work on parts of a batch.

A mesh axis ``stage`` divides the layers: with 8 layers on 4 devices, each has two.
The batch is cut into micro-batches. In each turn a stage applies its layers to one
micro-batch and hands the result to the next stage:

    turn        0    1    2    3    4    5    6
    stage 0    m0   m1   m2   m3    .    .    .
    stage 1     .   m0   m1   m2   m3    .    .
    stage 2     .    .   m0   m1   m2   m3    .
    stage 3     .    .    .   m0   m1   m2   m3

The dots are the *bubble*: stages that wait. Here they compute something all the same,
of which nothing is used. Backward, JAX goes through the same turns in reverse, and
sends the gradients the other way.

Huang et al., 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism".
"""

import jax
import jax.numpy as jnp

import graftree as nnx

STAGE = "stage"


def turns(stages: int, micro_batches: int) -> int:
    """How many turns it takes until the last stage is done."""
    return micro_batches + stages - 1


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """The share of its turns in which a stage has nothing to do."""
    return (stages - 1) / turns(stages, micro_batches)


def apply(
    stack: nnx.Stack, x: jax.Array, mesh: jax.sharding.Mesh, micro_batches: int
) -> jax.Array:
    """Computes ``stack(x)``, each stage its own layers.

    Args:
        stack: Layers made with ``axis_name="stage"``. They may not write to themselves,
            as `Dropout` does: in the bubble they would, too.
        x: ``[batch, ...]``, the same on all stages.
        mesh: Devices with an axis ``stage`` that divides the number of layers.
        micro_batches: In how many parts the batch is cut; it divides the batch.

    Returns:
        The output of the last layer, of the shape of ``x``, on all stages.

    Raises:
        ValueError: If the layers or the batch can't be divided.
    """
    stages = mesh.shape[STAGE]
    if len(stack) % stages or len(x) % micro_batches:
        raise ValueError(
            f"{len(stack)} layers on {stages} stages, and {len(x)} rows in "
            f"{micro_batches} micro-batches: both must come out even."
        )
    split = x.reshape(micro_batches, -1, *x.shape[1:])
    run = nnx.shard_map(
        _of_one_stage,
        mesh=mesh,
        in_specs=(jax.P(STAGE), jax.P()),
        out_specs=jax.P(STAGE),
    )
    # Each stage returns what it computed last; that of the last one is the output.
    return run(stack, split)[-1].reshape(x.shape)


def _of_one_stage(layers: nnx.Stack, micro_batches: jax.Array) -> jax.Array:
    """What the layers of this device make of all micro-batches, in turn."""
    stage, stages = jax.lax.axis_index(STAGE), jax.lax.axis_size(STAGE)
    count = len(micro_batches)
    to_next = [(i, i + 1) for i in range(stages - 1)]

    def turn(received: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = micro_batches[jnp.minimum(number, count - 1)]
        y = layers(jnp.where(stage == 0, first, received))
        return jax.lax.ppermute(y, STAGE, to_next), y

    nothing = jax.lax.pcast(jnp.zeros_like(micro_batches[0]), STAGE, to="varying")
    _, made = jax.lax.scan(turn, nothing, jnp.arange(turns(stages, count)))
    # Stage number s has made something of the first micro-batch in turn s.
    return made[None, stages - 1 :]
