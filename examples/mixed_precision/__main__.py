"""Trains the same transformer of 12 layers in three precisions, side by side.

``python -m examples.mixed_precision`` prints the losses: in float32, computing in
bfloat16, and computing in float16 with a `DynamicScale`. Weights are float32 in all
three, start the same, and see the same batches. The task is to continue sequences in
which each number is the sum of the two before it, modulo 17.
"""

import argparse
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import graftree as nnx

MODULUS, LENGTH, BATCH = 17, 24, 32
WIDTH, HEADS, LAYERS = 32, 4, 12

POLICIES = {
    "float32": "params=f32, compute=f32, output=f32",
    "bfloat16": "params=f32, compute=bf16, output=f32",
    "float16": "params=f32, compute=f16, output=f32",
}


class Block(nnx.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[batch, length, width]``, the same in and out."""
        x = x + self.attn(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Predicts the next number of a sequence."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(MODULUS, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, MODULUS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits ``[batch, length, modulus]`` of tokens ``[batch, length]``."""
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[-1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(key: jax.Array) -> jax.Array:
    """Sequences ``[batch, length + 1]``."""
    rows = [*jax.random.randint(key, (2, BATCH), 0, MODULUS)]
    for _ in range(LENGTH - 1):
        rows.append((rows[-1] + rows[-2]) % MODULUS)
    return jnp.stack(rows, axis=1)


def loss_of(model: Transformer, sequences: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next numbers."""
    logits = model(sequences[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:])
    return losses.mean()


@nnx.jit
def train_step(
    model: Transformer, optimizer: nnx.Optimizer, sequences: jax.Array
) -> jax.Array:
    """One step; the loss before it."""
    loss, grads = nnx.value_and_grad(loss_of)(model, sequences)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def scaled_train_step(
    model: Transformer,
    optimizer: nnx.Optimizer,
    scaler: nnx.precision.DynamicScale,
    sequences: jax.Array,
) -> jax.Array:
    """One step with a scaled loss; the loss before it."""
    loss, grads = scaler.value_and_grad(loss_of)(model, sequences)
    scaler.update(optimizer, model, grads)
    return loss


def stepper(name: str, steps: int) -> Callable[[jax.Array], float]:
    """A model with this precision, as a function that trains it by a batch."""
    model = Transformer(nnx.Rngs(0))
    nnx.precision.set_policy(model, POLICIES[name], strict=True)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    if name != "float16":
        return lambda sequences: float(train_step(model, optimizer, sequences))
    scaler = nnx.precision.DynamicScale()
    return lambda sequences: float(
        scaled_train_step(model, optimizer, scaler, sequences)
    )


def curves(steps: int) -> dict[str, list[float]]:
    """The losses of all steps, by precision."""
    train = {name: stepper(name, steps) for name in POLICIES}
    losses: dict[str, list[float]] = {name: [] for name in POLICIES}
    for key in jax.random.split(jax.random.key(1), steps):
        sequences = batch_of(key)
        for name, step in train.items():
            losses[name].append(step(sequences))
    return losses


def main() -> None:
    """Prints the losses, each the mean of the steps since the line above."""
    parser = argparse.ArgumentParser(
        "python -m examples.mixed_precision", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    losses = curves(steps)
    print(f"{'steps':>6}" + "".join([f"{name:>10}" for name in losses]))
    part = max(1, steps // 10)
    for end in range(part, steps + 1, part):
        means = [statistics.fmean(found[end - part : end]) for found in losses.values()]
        print(f"{end:>6}" + "".join([f"{x:>10.4f}" for x in means]))
    for name in ("bfloat16", "float16"):
        pairs = zip(losses[name], losses["float32"], strict=True)
        print(f"{name}: at most {max([abs(a - b) for a, b in pairs]):.4f} from float32")


if __name__ == "__main__":
    main()
