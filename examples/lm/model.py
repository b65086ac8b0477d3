"""A decoder-only language model: rotary positions, RMSNorm, gated MLPs, grouped heads.

It is written once for all layouts. Each kernel names its axes by what they are
(``embed``, ``heads``, ``mlp``, ``vocab``), and rules say which axes of the mesh divide
them (`layouts`). What goes from layer to layer is divided like the batch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

import graftree as nnx

# One function for all layers, so that equal layers are equal to the last attribute.
ATTEND = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())

OF_WIDTH = {"out_sharding": ("embed",)}

# What goes from layer to layer: divided by rows, with all features of a token.
OF_TOKENS = ("batch",)


def with_whole_rows(
    arrays: Sequence[jax.Array], *, dtype: Any, inexact: bool = True
) -> tuple[jax.Array, ...]:
    """Gives a table its dtype, and gathers the parts of its rows before one is read.

    Else what is read would be divided by features, like the table, and XLA knows no way
    from there to a division by rows but to have all of it on every device.
    """
    return tuple(_gather_rows(x.astype(dtype)) for x in arrays)


@jax.custom_vjp
def _gather_rows(table: jax.Array) -> jax.Array:
    return nnx.sharding.constrain(table, ("vocab",))


def _divide_gradient(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    # First whole, so that what comes from the blocks stays divided by rows until it is
    # summed; then divided, so that nothing else is done with the whole.
    whole = nnx.sharding.constrain(gradient, ("vocab",))
    return (nnx.sharding.constrain(whole, ("vocab", "embed")),)


_gather_rows.defvjp(lambda table: (_gather_rows(table), None), _divide_gradient)


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
        vocabulary: Number of tokens; 256 for bytes.
        layers: Number of blocks.
        width: Features of a token between the blocks.
        heads: Number of query heads, a divisor of ``width``.
        kv_heads: Number of key and value heads, a divisor of ``heads``.
        hidden: Features inside an MLP.
        stacked: Whether the blocks are a `Stack`, applied by a loop.
        remat: Whether the blocks are computed again in gradients.
    """

    vocabulary: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    stacked: bool = False
    remat: bool = False


class GatedMLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``, as in Shazeer, 2020, "GLU Variants"."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int, *axes: str) -> nnx.Linear:
            metadata = {"out_sharding": axes}
            return nnx.Linear(
                inputs, outputs, use_bias=False, kernel_metadata=metadata, rngs=rngs
            )

        self.gate = linear(config.width, config.hidden, "embed", "mlp")
        self.up = linear(config.width, config.hidden, "embed", "mlp")
        self.down = linear(config.hidden, config.width, "mlp", "embed")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[*batch, width]`` to the same shape."""
        hidden = nnx.silu(self.gate(x)) * self.up(x)
        return self.down(nnx.name(hidden, "mlp_hidden"))


class Block(nnx.Module):
    """Attention and an MLP, each normalized first and added to what came in."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(
            config.width, scale_metadata=OF_WIDTH, rngs=rngs
        )
        self.attention = nnx.MultiHeadAttention(
            config.heads,
            config.width,
            num_kv_heads=config.kv_heads,
            use_bias=False,
            attention_fn=ATTEND,
            decode=False,
            kernel_metadata={"out_sharding": ("embed", "heads", None)},
            out_kernel_metadata={"out_sharding": ("heads", None, "embed")},
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.width, scale_metadata=OF_WIDTH, rngs=rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        x = nnx.sharding.constrain(x, OF_TOKENS)
        return nnx.sharding.constrain(x + self.mlp(self.mlp_norm(x)), OF_TOKENS)


class LanguageModel(nnx.Module):
    """Says for each token which one follows.

    Attributes:
        embed: Kernel ``[vocabulary, width]``.
        blocks: A List of Blocks, or a `Stack` of them.
        norm: RMSNorm of the last block's output.
        head: Kernel ``[width, vocabulary]``.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        def make(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.embed = nnx.Embed(
            config.vocabulary,
            config.width,
            promote_dtype=with_whole_rows,
            embedding_metadata={"out_sharding": ("vocab", "embed")},
            rngs=rngs,
        )
        self.blocks = (
            nnx.Stack(make, config.layers, remat=config.remat, rngs=rngs)
            if config.stacked
            else nnx.List([make(rngs) for _ in range(config.layers)])
        )
        self.norm = nnx.RMSNorm(config.width, scale_metadata=OF_WIDTH, rngs=rngs)
        self.head = nnx.Linear(
            config.width,
            config.vocabulary,
            use_bias=False,
            kernel_metadata={"out_sharding": ("embed", "vocab")},
            rngs=rngs,
        )
        self.remat = config.remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens ``[batch, length]`` to logits ``[batch, length, vocabulary]``."""
        # Else the table's division would be that of all activations: by features.
        x = nnx.sharding.constrain(self.embed(tokens), OF_TOKENS)
        if isinstance(self.blocks, nnx.Stack):
            x = self.blocks(x)
        else:
            run = nnx.remat(Block.__call__) if self.remat else Block.__call__
            for block in self.blocks:
                x = run(block, x)
        return self.head(self.norm(x))
