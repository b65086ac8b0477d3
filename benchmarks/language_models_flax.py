"""The language model of ``examples/lm`` in Flax NNX, to be held against it.

It is the same program, as far as Flax NNX has what that uses: instead of `Stack` it has
`vmap` to make the blocks and `scan` to apply them. Where it has no rotary positions yet
(0.12.8 has none), these are plain functions here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import language_models, steps
from examples.lm import train


@functools.cache
def _block_class(nnx: Any) -> type:
    class GatedMLP(nnx.Module):
        def __init__(self, config, dtype, rngs):
            linear = functools.partial(
                nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs
            )
            self.gate = linear(config.width, config.hidden)
            self.up = linear(config.width, config.hidden)
            self.down = linear(config.hidden, config.width)

        def __call__(self, x):
            return self.down(nnx.silu(self.gate(x)) * self.up(x))

    class Block(nnx.Module):
        def __init__(self, setting, rngs):
            config, dtype = setting.config, setting.dtype
            norm = functools.partial(nnx.RMSNorm, config.width, dtype=dtype, rngs=rngs)
            self.attention_norm = norm()
            self.attention = nnx.MultiHeadAttention(
                config.heads,
                config.width,
                num_kv_heads=config.kv_heads,
                use_bias=False,
                attention_fn=_attention_fn(nnx),
                decode=False,
                dtype=dtype,
                rngs=rngs,
            )
            self.mlp_norm = norm()
            self.mlp = GatedMLP(config, dtype, rngs)
            self.setting = setting

        def __call__(self, x):
            constrained = self.setting.constrained
            x = x + self.attention(self.attention_norm(x), is_causal=True)
            x = constrained(x)
            return constrained(x + self.mlp(self.mlp_norm(x)))

    return Block


@functools.cache
def _model_class(nnx: Any) -> type:
    Block = _block_class(nnx)

    class LanguageModel(nnx.Module):
        def __init__(self, setting, rngs):
            config, dtype = setting.config, setting.dtype
            make = functools.partial(Block, setting)
            self.embed = nnx.Embed(
                config.vocabulary, config.width, dtype=dtype, rngs=rngs
            )
            if config.stacked:
                keys = (
                    rngs.split(config.layers)
                    if hasattr(rngs, "split")
                    else rngs.fork(split=config.layers)
                )
                self.blocks = nnx.vmap(lambda rngs: make(rngs=rngs))(keys)
            else:
                self.blocks = nnx.List([make(rngs=rngs) for _ in range(config.layers)])
            self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
            self.head = nnx.Linear(
                config.width,
                config.vocabulary,
                use_bias=False,
                dtype=dtype,
                rngs=rngs,
            )
            self.setting = setting

        def __call__(self, tokens):
            setting = self.setting
            x = setting.constrained(self.embed(tokens))
            run = Block.__call__
            if setting.config.remat:
                run = nnx.remat(run, prevent_cse=not setting.config.stacked)
            if setting.config.stacked:
                x = nnx.scan(
                    lambda x, block: run(block, x),
                    in_axes=(nnx.Carry, 0),
                    out_axes=nnx.Carry,
                )(x, self.blocks)
            else:
                for block in self.blocks:
                    x = run(block, x)
            return self.head(self.norm(x))

    return LanguageModel


def _attention_fn(nnx: Any) -> Any:
    """Attention with rotary positions."""
    with_rope = getattr(nnx, "dot_product_attention_with_rope", None)
    if with_rope is not None:
        return functools.partial(with_rope, rope=nnx.RoPE())

    def attend(query, key, value, **options):
        positions = jnp.arange(query.shape[-3])[None]
        turns = language_models.sine_and_cosine(positions, query.shape[-1])
        query, key = (language_models.rotate(x, turns) for x in (query, key))
        return nnx.dot_product_attention(query, key, value, **options)

    return attend


def step(nnx: Any, setting: language_models.Setting) -> steps.Step:
    """The train step of the model with the parameters of ``examples.lm``."""
    model = _model_class(nnx)(setting, rngs=nnx.Rngs(0))
    nnx.update(model, _as_state(setting.parameters()))
    transformation = train.make_transformation(setting.recipe)
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    if setting.layout is not None:
        state = nnx.state(optimizer)
        pure = nnx.to_pure_dict(state)
        nnx.replace_by_pure_dict(
            state, jax.tree.map(jax.device_put, pure, setting.shardings(pure))
        )
        nnx.update(optimizer, state)
    return language_models.nnx(nnx, model, optimizer, setting)


def _as_state(params: Any) -> Any:
    """The parameters as nested dicts alone, with the blocks by number."""
    blocks = params["blocks"]
    if isinstance(blocks, list):
        blocks = dict(enumerate(blocks))
    return params | {"blocks": blocks}
