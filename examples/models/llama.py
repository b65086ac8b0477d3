"""Llama, as Hugging Face has it: ``python -m examples.models llama FOLDER``.

Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models".
"""

import dataclasses
from typing import Any

import jax

import graftree as nnx
from examples.models import decoders


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model, named as in its config.json.

    Attributes:
        normalizes_heads: Whether queries and keys are normalized, as in Qwen3.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    normalizes_heads: bool = False

    @classmethod
    def from_json(cls, content: dict[str, Any], **more: Any) -> "Config":
        """Takes what it needs of a config.json."""
        rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or content.get("hidden_act") != "silu":
            raise ValueError(
                "this example has rotary positions of type 'default' and silu, not "
                f"{kind!r} and {content.get('hidden_act')!r}"
            )
        heads = content["num_attention_heads"]
        values = {
            "head_dim": content["hidden_size"] // heads,
            "num_key_value_heads": heads,
            "rope_theta": rope.get("rope_theta", 10000.0),
        }
        names = {field.name for field in dataclasses.fields(cls)}
        values |= {k: x for k, x in content.items() if k in names and x is not None}
        return cls(**values, **more)


class Attention(nnx.Module):
    """Causal attention with rotary positions, and fewer heads of keys and values."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def project(heads: int) -> nnx.LinearGeneral:
            features = (heads, config.head_dim)
            return nnx.LinearGeneral(
                config.hidden_size, features, use_bias=False, rngs=rngs
            )

        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(config.head_dim, epsilon=config.rms_norm_eps, rngs=rngs)

        self.query = project(config.num_attention_heads)
        self.key = project(config.num_key_value_heads)
        self.value = project(config.num_key_value_heads)
        self.query_norm = nnx.data(norm() if config.normalizes_heads else None)
        self.key_norm = nnx.data(norm() if config.normalizes_heads else None)
        self.out = nnx.LinearGeneral(
            (config.num_attention_heads, config.head_dim),
            config.hidden_size,
            axis=(-2, -1),
            use_bias=False,
            rngs=rngs,
        )
        self.rope = nnx.RoPE(config.rope_theta)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None,
        cache: nnx.decoding.KeyValueCache | None,
    ) -> jax.Array:
        """Maps ``[batch, length, hidden_size]`` to the same shape."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = self.rope.rotate_heads(query, positions)
        key = self.rope.rotate_heads(key, positions)
        return self.out(nnx.decoding.attend(query, key, value, positions, cache))


class MLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        sizes = config.hidden_size, config.intermediate_size
        self.gate = nnx.Linear(*sizes, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(*sizes, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(*sizes[::-1], use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[*batch, hidden_size]`` to the same shape."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and an MLP, each normalized first and added to what came in."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(
                config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs
            )

        self.attention_norm = norm()
        self.attention = Attention(config, rngs)
        self.mlp_norm = norm()
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array, positions: Any, cache: Any) -> jax.Array:
        """Maps ``[batch, length, hidden_size]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), positions, cache)
        return x + self.mlp(self.mlp_norm(x))


class Llama(decoders.Decoder):
    """Says for each token which one follows."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        heads = config.num_key_value_heads, config.head_dim
        super().__init__(config.max_position_embeddings, heads)
        sizes = config.vocab_size, config.hidden_size
        self.embed = nnx.Embed(*sizes, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config, rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = nnx.RMSNorm(sizes[1], epsilon=config.rms_norm_eps, rngs=rngs)
        self.head = nnx.data(None)
        if not config.tie_word_embeddings:
            self.head = nnx.Linear(*sizes[::-1], use_bias=False, rngs=rngs)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, hidden_size]`` to ``[batch, length, vocab_size]``."""
        return super().logits(x) if self.head is None else self.head(x)


BLOCK = "model.layers.{i}"
WEIGHTS = {
    "model.embed_tokens": "embed",
    f"{BLOCK}.self_attn.q_proj": "blocks[{i}].attention.query",
    f"{BLOCK}.self_attn.k_proj": "blocks[{i}].attention.key",
    f"{BLOCK}.self_attn.v_proj": "blocks[{i}].attention.value",
    f"{BLOCK}.self_attn.o_proj": "blocks[{i}].attention.out",
    f"{BLOCK}.mlp.gate_proj": "blocks[{i}].mlp.gate",
    f"{BLOCK}.mlp.up_proj": "blocks[{i}].mlp.up",
    f"{BLOCK}.mlp.down_proj": "blocks[{i}].mlp.down",
    f"{BLOCK}.input_layernorm": "blocks[{i}].attention_norm",
    f"{BLOCK}.post_attention_layernorm": "blocks[{i}].mlp_norm",
    "model.norm": "norm",
    "lm_head": "head",
}
