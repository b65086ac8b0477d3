"""GPT-2, as Hugging Face has it: ``python -m examples.models gpt2 FOLDER``.

Radford et al., 2019, "Language Models are Unsupervised Multitask Learners".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import graftree as nnx
from examples.models import decoders


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model, named as in its config.json."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Config":
        """Takes what it needs of a config.json."""
        if content.get("activation_function") != "gelu_new":
            raise ValueError("this example has the activation function gelu_new")
        return cls(
            **{field.name: content[field.name] for field in dataclasses.fields(cls)}
        )


class Attention(nnx.Module):
    """Causal attention."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        heads = (config.n_head, config.n_embd // config.n_head)
        self.query = nnx.LinearGeneral(config.n_embd, heads, rngs=rngs)
        self.key = nnx.LinearGeneral(config.n_embd, heads, rngs=rngs)
        self.value = nnx.LinearGeneral(config.n_embd, heads, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, config.n_embd, axis=(-2, -1), rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: nnx.decoding.KeyValueCache | None,
    ) -> jax.Array:
        """Maps ``[batch, length, n_embd]`` to the same shape."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        return self.out(nnx.decoding.attend(query, key, value, positions, cache))


class Block(nnx.Module):
    """Attention and an MLP, each normalized first and added to what came in."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, epsilon = config.n_embd, config.layer_norm_epsilon
        self.attention_norm = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        """Maps ``[batch, length, n_embd]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), positions, cache)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT2(decoders.Decoder):
    """Says for each token which one follows."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width, heads = config.n_embd, config.n_head
        super().__init__(config.n_positions, (heads, width // heads))
        self.embed = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(config.n_positions, width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.n_layer)])
        self.norm = nnx.LayerNorm(width, epsilon=config.layer_norm_epsilon, rngs=rngs)

    def embed_tokens(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        """Maps tokens ``[batch, length]`` to ``[batch, length, n_embd]``."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.embed(tokens) + self.positions(positions)


BLOCK = "transformer.h.{i}"
PARTS = ("query", "key", "value")
# GPT-2 stores the kernels of linear layers as we do, inputs first.
WEIGHTS = {
    "transformer.wte": "embed",
    "transformer.wpe": "positions",
    f"{BLOCK}.ln_1": "blocks[{i}].attention_norm",
    f"{BLOCK}.attn.c_attn.weight": (
        [f"blocks[{{i}}].attention.{part}.kernel" for part in PARTS],
        "e +(h d) -> e h d",
    ),
    f"{BLOCK}.attn.c_attn.bias": (
        [f"blocks[{{i}}].attention.{part}.bias" for part in PARTS],
        "+(h d) -> h d",
    ),
    f"{BLOCK}.attn.c_proj.weight": (
        "blocks[{i}].attention.out.kernel",
        "(h d) e -> h d e",
    ),
    f"{BLOCK}.attn.c_proj.bias": "blocks[{i}].attention.out.bias",
    f"{BLOCK}.ln_2": "blocks[{i}].mlp_norm",
    f"{BLOCK}.mlp.c_fc.weight": ("blocks[{i}].up.kernel", "i o -> i o"),
    f"{BLOCK}.mlp.c_fc.bias": "blocks[{i}].up.bias",
    f"{BLOCK}.mlp.c_proj.weight": ("blocks[{i}].down.kernel", "i o -> i o"),
    f"{BLOCK}.mlp.c_proj.bias": "blocks[{i}].down.bias",
    "transformer.ln_f": "norm",
}
