"""A step of decoding in single layers: `MultiHeadAttention` with a cache, a mixture.

By hand they are functions of dicts of arrays; the caches that they return are what the
next step takes. All sequences are at one position, which stays.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import graftree
from benchmarks import experts, generation, groups, language_models
from benchmarks.gauges import Operation
from benchmarks.groups import Group, Row
from benchmarks.libraries import GRAFTREE, RAW


@dataclasses.dataclass(frozen=True)
class Setting:
    """Attention with rotary positions and grouped heads, and what is in its cache.

    Attributes:
        features: The size of a token.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        batch: Number of sequences.
        slots: Room for tokens.
        position: That of the new token.
    """

    features: int = 512
    heads: int = 8
    kv_heads: int = 4
    batch: int = 8
    slots: int = 256
    position: int = 200

    def layer(self) -> graftree.MultiHeadAttention:
        """The layer, from one seed."""
        return graftree.MultiHeadAttention(
            self.heads,
            self.features,
            num_kv_heads=self.kv_heads,
            use_bias=False,
            rope=graftree.RoPE(),
            decode=False,
            rngs=graftree.Rngs(0),
        )

    def inputs(self) -> tuple[jax.Array, jax.Array]:
        """The new token of each sequence, and its position."""
        shape = self.batch, 1, self.features
        x = jax.random.normal(jax.random.key(1), shape)
        return x, jnp.full((self.batch, 1), self.position)


def all_groups() -> list[Group]:
    """All measurements."""
    return [*map(attention_step, (1, 8)), *map(mixture_step, (8, 64))]


def attention_step(batch: int) -> Group:
    """The step of `MultiHeadAttention`."""
    setting = Setting(batch=batch)
    rows = (
        Row(RAW, "", functools.partial(raw, setting)),
        Row(GRAFTREE, "", functools.partial(ours, setting)),
    )
    name = f"step of attention with a cache, batch {batch}"
    return Group(name, groups.MICROSECONDS, rows, "1.1 raw")


def mixture_step(num_experts: int) -> Group:
    """The step of a mixture for eight sequences."""
    setting = experts.Setting(num_experts, tokens=8)
    forward = experts.of_setting(setting)[0]
    return dataclasses.replace(forward, name=f"step of a mixture, {forward.name}")


def ours(setting: Setting) -> Operation:
    """The step of the layer."""
    layer, (x, positions) = setting.layer(), setting.inputs()
    cache = layer.make_cache(setting.batch, setting.slots)

    @graftree.jit
    def step(layer: Any, cache: Any, x: Any, positions: Any) -> Any:
        return layer(x, positions=positions, cache=cache)

    return lambda: step(layer, cache, x, positions)


def raw(setting: Setting) -> Operation:
    """The step by hand."""
    params = graftree.to_pure_dict(graftree.state(setting.layer(), graftree.Param))
    x, positions = setting.inputs()
    size = setting.features // setting.heads
    shape = setting.batch, setting.slots, setting.kv_heads, size
    caches = jnp.zeros(shape), jnp.zeros(shape)

    @jax.jit
    def step(params: Any, caches: Any, x: Any, positions: Any) -> Any:
        query, key, value = language_models.heads_of(params, x)
        turns = language_models.sine_and_cosine(positions, size)
        keys = generation.write_rows(
            caches[0], language_models.rotate(key, turns), positions
        )
        values = generation.write_rows(caches[1], value, positions)
        query = language_models.rotate(query, turns)
        mask = positions[:, None, :, None] >= jnp.arange(setting.slots)
        seen = jax.nn.dot_product_attention(query, keys, values, mask=mask)
        y = jnp.einsum("blhd,hdw->blw", seen, params["out"]["kernel"])
        return (keys, values), y

    def operation() -> jax.Array:
        nonlocal caches
        caches, y = step(params, caches, x, positions)
        return y

    return operation
