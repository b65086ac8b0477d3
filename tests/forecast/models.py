"""Training steps whose operations have closed forms.

A product of ``[m, k]`` and ``[k, n]`` has ``2 m k n`` operations, its two gradients as
many each. Padding doesn't count.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import graftree as nnx


class Case(NamedTuple):
    """A step and what it costs."""

    make: object
    inputs: tuple
    outputs: int
    flops: int

    def arguments(self):
        """The step, the abstract model and optimizer, the batch."""

        def make():
            model = self.make(rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

        x = jax.ShapeDtypeStruct(*self.inputs)
        labels = x.shape if x.dtype == jnp.int32 else x.shape[:1]
        return (
            train_step,
            *nnx.eval_shape(make),
            x,
            jax.ShapeDtypeStruct(labels, jnp.int32),
        )


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        loss = optax.softmax_cross_entropy_with_integer_labels
        return loss(model(x).astype(jnp.float32), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


class Block(nnx.Module):
    def __init__(self, width, rngs, dtype=None):
        options = {"dtype": dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(width, **options)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    def __init__(self, layers, width, words, rngs, stacked=False, dtype=None):
        self.embed = nnx.Embed(words, width, dtype=dtype, rngs=rngs)
        block = functools.partial(Block, width, dtype=dtype)
        if stacked:
            self.blocks = nnx.Stack(lambda rngs: block(rngs=rngs), layers, rngs=rngs)
        else:
            self.blocks = nnx.Sequential(*[block(rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, words, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


class ConvNet(nnx.Module):
    def __init__(self, widths, classes, rngs):
        a, b, c = widths
        self.stem = nnx.Conv(3, a, (3, 3), rngs=rngs)
        self.down = nnx.Conv(a, b, (3, 3), strides=2, padding="VALID", rngs=rngs)
        self.dilated = nnx.Conv(b, c, (3, 3), kernel_dilation=2, rngs=rngs)
        self.head = nnx.Linear(c, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        x = nnx.relu(self.down(x))
        return self.head(nnx.relu(self.dilated(x)).mean((1, 2)))


def decoder_flops(batch, length, layers, width, words):
    """6 N D, and of attention 12 batch length^2 width for each layer."""
    kernels = layers * 12 * width**2 + width * words
    attention = layers * 12 * batch * length**2 * width
    return 6 * kernels * batch * length + attention


def conv_flops(batch, size, widths, classes):
    a, b, c = widths
    half = (size - 3) // 2 + 1
    stem = 2 * 2 * batch * (3 * size - 2) ** 2 * 3 * a
    down = 6 * batch * (3 * half) ** 2 * a * b
    dilated = 6 * batch * (3 * half - 4) ** 2 * b * c
    return stem + down + dilated + 6 * batch * c * classes


_DECODER = (8, 128, 2, 256, 512)


def _decoder(**options):
    _, _, *sizes = _DECODER
    tokens = (_DECODER[:2], jnp.int32)
    make = functools.partial(Decoder, *sizes, **options)
    return Case(make, tokens, _DECODER[:2], decoder_flops(*_DECODER))


def _images(batch, size):
    return (batch, size, size, 3), jnp.float32


CASES = {
    "decoder": _decoder(),
    "decoder, bf16": _decoder(dtype=jnp.bfloat16),
    "decoder, scanned": _decoder(stacked=True),
    "conv net": Case(
        functools.partial(ConvNet, (32, 64, 128), 10),
        _images(8, 31),
        8,
        conv_flops(8, 31, (32, 64, 128), 10),
    ),
}
