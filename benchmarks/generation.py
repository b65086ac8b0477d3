"""Greedy decoding with a cache: `nnx.decoding.generate` beside the same by hand.

The model is the Llama of ``examples/models``, at a size at which the host and small
operations still count. By hand it is functions of nested dicts, with a cache that is
made once and a `jax.lax.while_loop`, in one `jax.jit`. Both take prompts of different
lengths, padded to one. Where all have one length, a program by hand that knows that can
write all rows of the cache at the same place: the row ``one length alone``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import graftree
from benchmarks import groups, language_models
from benchmarks.gauges import Operation
from benchmarks.groups import Group, Row
from benchmarks.libraries import GRAFTREE, RAW
from examples.models.llama import Config, Llama

SMALL = Config(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=512,
)

MIDDLE = dataclasses.replace(
    SMALL,
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    head_dim=64,
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is generated.

    Attributes:
        batch: Number of prompts.
        config: The sizes of the model.
        length: Tokens of the longest prompt.
        count: How many tokens are made for each.
        is_ragged: Whether each of the other prompts has one token less.
    """

    batch: int
    config: Config = SMALL
    length: int = 16
    count: int = 128
    is_ragged: bool = True

    def prompts(self) -> list[list[int]]:
        """The prompts."""
        rng = np.random.default_rng(0)
        less = [row % self.length * self.is_ragged for row in range(self.batch)]
        size = self.config.vocab_size
        return [rng.integers(0, size, self.length - n).tolist() for n in less]

    def model(self) -> Llama:
        """The model, from one seed."""
        return Llama(self.config, rngs=graftree.Rngs(0))


def all_groups() -> list[Group]:
    """All measurements."""
    ragged = {1: "prompt", 8: "prompts of different lengths"}
    return [
        *(_group(Setting(batch), words) for batch, words in ragged.items()),
        _group(Setting(8, is_ragged=False), "prompts of one length"),
        _group(Setting(8, MIDDLE, count=32), "prompts, a model of 30 million"),
    ]


def _group(setting: Setting, prompts: str) -> Group:
    rows = [
        Row(RAW, "", functools.partial(raw, setting)),
        Row(GRAFTREE, "", functools.partial(ours, setting)),
    ]
    if not setting.is_ragged:
        uniform = functools.partial(raw, setting, is_uniform=True)
        rows.append(Row(RAW, "one length alone", uniform))
    name = f"greedy decoding, {setting.batch} {prompts}"
    quantity = groups.per_second(setting.batch * setting.count, "tokens")
    return Group(name, quantity, tuple(rows), "0.95 raw")


def ours(setting: Setting) -> Operation:
    """Greedy decoding with the library."""
    model, prompts = setting.model(), setting.prompts()

    def operation() -> np.ndarray:
        made = graftree.decoding.generate(model, prompts, max_new_tokens=setting.count)
        return made.tokens

    return operation


def raw(setting: Setting, *, is_uniform: bool = False) -> Operation:
    """Greedy decoding by hand."""
    params = graftree.to_pure_dict(graftree.state(setting.model(), graftree.Param))
    rows, length = setting.prompts(), setting.length
    function = jax.jit(functools.partial(_run, setting, is_uniform))

    def operation() -> np.ndarray:
        tokens = np.zeros((len(rows), length), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        lengths = np.array([len(row) for row in rows], np.int32)
        return np.asarray(function(params, tokens, lengths))

    return operation


def _run(
    setting: Setting, is_uniform: bool, params: Any, tokens: Any, lengths: Any
) -> jax.Array:
    config, count = setting.config, setting.count
    batch, length = tokens.shape
    shape = (batch, length + count, config.num_key_value_heads, config.head_dim)
    caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in params["blocks"]]
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    write = _write_uniform if is_uniform else write_rows
    logits, caches = _forward(config, write, params, tokens, positions, caches)
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    first = jnp.argmax(last, axis=-1).astype(jnp.int32)
    made = jnp.zeros((batch, count), jnp.int32).at[:, 0].set(first)

    def advance(carry: Any) -> Any:
        step, token, made, caches = carry
        at = (lengths + step - 1)[:, None]
        logits, caches = _forward(config, write, params, token[:, None], at, caches)
        token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return step + 1, token, made.at[:, step].set(token), caches

    carry = (1, first, made, caches)
    return jax.lax.while_loop(lambda carry: carry[0] < count, advance, carry)[2]


Write = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def write_rows(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """A cache with new entries of each row at the positions of that row."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, positions].set(new, mode="drop")


def _write_uniform(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, new, positions[0, 0], axis=1)


def _forward(
    config: Config, write: Write, params: Any, tokens: Any, positions: Any, caches: Any
) -> tuple[jax.Array, Any]:
    """Logits, and the caches with these tokens."""
    x = params["embed"]["embedding"][tokens]
    turns = language_models.sine_and_cosine(
        positions, config.head_dim, config.rope_theta
    )
    norm = functools.partial(language_models.norm, epsilon=config.rms_norm_eps)
    slots = jnp.arange(caches[0][0].shape[1])
    mask = positions[:, None, :, None] >= slots
    found = []
    for i, cache in enumerate(caches):
        block = params["blocks"][i]
        attention, y = block["attention"], norm(block["attention_norm"], x)
        query, key, value = language_models.heads_of(attention, y)
        keys = write(cache[0], language_models.rotate(key, turns), positions)
        values = write(cache[1], value, positions)
        found.append((keys, values))
        query = language_models.rotate(query, turns)
        seen = jax.nn.dot_product_attention(query, keys, values, mask=mask)
        x = x + jnp.einsum("blhd,hdw->blw", seen, attention["out"]["kernel"])
        y = norm(block["mlp_norm"], x)
        x = x + language_models.gated_mlp(block["mlp"], y)
    return norm(params["norm"], x) @ params["head"]["kernel"], found
