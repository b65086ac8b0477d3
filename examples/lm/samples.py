"""Text that a model writes: each byte drawn from what it expects after those before."""

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from examples.lm.model import Block, LanguageModel


def continue_text(
    model: LanguageModel, prompt: str, count: int, *, temperature: float, seed: int
) -> str:
    """Returns ``prompt`` and what the model writes after it.

    Args:
        model: The model; it is only read.
        prompt: The beginning, at least one byte.
        count: Number of bytes to write.
        temperature: What the logits are divided by; 0 takes the likeliest byte.
        seed: Decides what is drawn.
    """
    start = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    written = nnx.sharding.fetch(draw(model, start, seed, temperature, count))
    return bytes([*start, *written]).decode(errors="replace")


def printable(text: str) -> str:
    """Returns a text in which what a terminal would act on is replaced."""
    return "".join([c if c.isprintable() or c == "\n" else "\ufffd" for c in text])


def with_cache(model: LanguageModel, length: int) -> LanguageModel:
    """Returns a view of a model that takes a byte at a time, and remembers them."""
    decoder = nnx.view(model, decode=True, only=nnx.MultiHeadAttention)

    def init_cache(block: Block) -> None:
        block.attention.init_cache((1, length, block.attention.in_features))

    if isinstance(decoder.blocks, nnx.Stack):
        decoder.blocks.each(init_cache)
    else:
        for block in decoder.blocks:
            init_cache(block)
    return decoder


@nnx.jit(static_argnames=("temperature", "count"))
def draw(
    model: LanguageModel,
    prompt: jax.Array | np.ndarray,
    seed: int,
    temperature: float,
    count: int,
) -> jax.Array:
    """Returns the ``count`` bytes that follow a prompt, bytes ``[length]``."""
    decoder = with_cache(model, len(prompt) + count)
    key, prompt = jax.random.key(seed), jnp.asarray(prompt)

    def choose(logits: jax.Array, position: jax.Array) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        drawn = jax.random.categorical(
            jax.random.fold_in(key, position), logits / temperature
        )
        return drawn.astype(jnp.int32)

    def step(
        carry: tuple[LanguageModel, jax.Array], position: jax.Array
    ) -> tuple[tuple[LanguageModel, jax.Array], jax.Array]:
        decoder, token = carry
        logits = decoder(token[jnp.newaxis, jnp.newaxis])[0, 0].astype(jnp.float32)
        following = choose(logits, position)
        given = prompt[jnp.minimum(position + 1, len(prompt) - 1)]
        token = jnp.where(position + 1 < len(prompt), given, following)
        return (decoder, token), token

    loop = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    positions = jnp.arange(len(prompt) + count - 1)
    _, tokens = loop((decoder, prompt[0]), positions)
    return tokens[len(prompt) - 1 :]
