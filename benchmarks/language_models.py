"""The language model of ``examples/lm`` by hand in plain JAX, to be held against it.

It is what one would write without a library: functions of nested dicts, `jax.jit` with
shardings by path. The mathematics is that of `examples.lm.model`, op for op, with its
parameters under its paths; only the sines of the rotary positions are computed once for
all blocks. Blocks are a list, or one dict of stacked arrays that `jax.lax.scan` goes
through.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import graftree
from benchmarks import steps
from examples.lm import layouts, train
from examples.lm.model import Config

EPSILON = 1e-6
THETA = 10_000.0
BFLOAT16 = "params=f32, compute=bf16"
SMALL = Config(layers=4, width=128, heads=8, kv_heads=4, hidden=384)

# What each axis of a parameter is, by the end of its path.
AXES = {
    "embed/embedding": ("vocab", "embed"),
    "query/kernel": ("embed", "heads", None),
    "key/kernel": ("embed", "heads", None),
    "value/kernel": ("embed", "heads", None),
    "out/kernel": ("heads", None, "embed"),
    "gate/kernel": ("embed", "mlp"),
    "up/kernel": ("embed", "mlp"),
    "down/kernel": ("mlp", "embed"),
    "head/kernel": ("embed", "vocab"),
    "norm/scale": ("embed",),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, on what.

    Attributes:
        config: The sizes of the model, and whether its blocks are stacked.
        mesh: The sizes of the axes of the mesh, such as ``(("fsdp", 8),)``; none for
            one device.
        batch: Number of rows.
        length: Tokens per row.
        dtype: In which the model computes; parameters are float32.
    """

    config: Config = SMALL
    mesh: tuple[tuple[str, int], ...] = ()
    batch: int = 8
    length: int = 128
    dtype: Any = jnp.float32

    @functools.cached_property
    def layout(self) -> layouts.Layout | None:
        """The mesh with its rules; ``None`` on one device."""
        return layouts.make(dict(self.mesh)) if self.mesh else None

    @property
    def recipe(self) -> train.Recipe:
        """How it is trained."""
        is_full = self.dtype == jnp.float32
        return train.Recipe(steps=1_000, precision=None if is_full else BFLOAT16)

    @property
    def num_tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.length

    def tokens(self) -> jax.Array:
        """A batch of rows: what is read, and one more token to be told."""
        shape = (self.batch, self.length + 1)
        tokens = jax.random.randint(
            jax.random.key(1), shape, 0, self.config.vocabulary, jnp.int32
        )
        if self.layout is None:
            return tokens
        return jax.device_put(tokens, self.layout.batch)

    def constrained(self, x: jax.Array) -> jax.Array:
        """Activations that stay divided by rows, as in ``examples.lm``."""
        if self.layout is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.layout.batch)

    def parameters(self) -> dict[str, Any]:
        """The parameters that ``examples.lm`` begins with, as nested dicts."""
        with graftree.use_eager_sharding(False):
            model, _ = train.make_objects(self.config, self.recipe)
        params = graftree.to_pure_dict(graftree.state(model, graftree.Param))
        blocks = params["blocks"]
        if self.config.stacked:
            params["blocks"] = blocks["layers"]
        else:
            params["blocks"] = [blocks[i] for i in range(self.config.layers)]
        return jax.tree.map(jax.device_put, params, self.shardings(params))

    def shardings(self, params: Any) -> Any:
        """Where each parameter goes, or anything of their structure."""

        def of(path, array):
            if self.layout is None:
                return jax.sharding.SingleDeviceSharding(jax.devices()[0])
            names = _axes_of(jax.tree_util.keystr(path, simple=True, separator="/"))
            names = (None,) * (array.ndim - len(names)) + names
            rules = dict(self.layout.rules)
            return jax.NamedSharding(
                self.layout.mesh, jax.P(*(rules.get(name) for name in names))
            )

        return jax.tree_util.tree_map_with_path(of, params)


def _axes_of(path: str) -> tuple[str | None, ...]:
    """What the axes of the parameter at a path are; nothing for what is none."""
    return next((axes for end, axes in AXES.items() if path.endswith(end)), ())


# ---------------------------------------------------------------------------- raw JAX


def raw(setting: Setting) -> steps.PureStep:
    """The train step as a pure function, a new one each time."""
    params = setting.parameters()
    transformation = train.make_transformation(setting.recipe)
    opt_state = transformation.init(params)
    if setting.layout is not None:
        opt_state = jax.tree.map(
            jax.device_put, opt_state, setting.shardings(opt_state)
        )

    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(raw_loss)(params, tokens, setting)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return steps.PureStep(
        jax.jit(step, donate_argnums=(0, 1)),
        {"params": params, "opt_state": opt_state},
        {"tokens": setting.tokens()},
    )


def raw_loss(params: Any, tokens: jax.Array, setting: Setting) -> jax.Array:
    """The mean loss, in nats per token."""
    logits = raw_logits(params, tokens[:, :-1], setting).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def raw_logits(params: Any, tokens: jax.Array, setting: Setting) -> jax.Array:
    """Logits ``[batch, length, vocabulary]``."""
    config = setting.config
    params = jax.tree.map(lambda x: x.astype(setting.dtype), params)
    x = setting.constrained(params["embed"]["embedding"][tokens])
    positions = jnp.arange(tokens.shape[1])[None]
    turns = sine_and_cosine(positions, config.width // config.heads)
    run = functools.partial(_block, setting)
    if config.stacked:

        def body(x, params):
            return run(params, x, turns), None

        body = jax.checkpoint(body, prevent_cse=False) if config.remat else body
        x, _ = jax.lax.scan(body, x, params["blocks"])
    else:
        block = jax.checkpoint(run) if config.remat else run
        for layer in params["blocks"]:
            x = block(layer, x, turns)
    return norm(params["norm"], x) @ params["head"]["kernel"]


def _block(setting: Setting, params: Any, x: jax.Array, turns: Any) -> jax.Array:
    attention = params["attention"]
    query, key, value = heads_of(attention, norm(params["attention_norm"], x))
    seen = jax.nn.dot_product_attention(
        rotate(query, turns), rotate(key, turns), value, is_causal=True
    )
    x = x + jnp.einsum("blhd,hdw->blw", seen, attention["out"]["kernel"])
    x = setting.constrained(x)
    return setting.constrained(
        x + gated_mlp(params["mlp"], norm(params["mlp_norm"], x))
    )


def norm(params: Any, x: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """What ``nnx.RMSNorm`` computes."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * (jax.lax.rsqrt(square + epsilon) * params["scale"])).astype(x.dtype)


def heads_of(params: Any, x: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values ``[batch, length, heads, size]``."""
    names = ("query", "key", "value")
    return tuple(
        jnp.einsum("blw,whd->blhd", x, params[name]["kernel"]) for name in names
    )


def gated_mlp(params: Any, x: jax.Array) -> jax.Array:
    """``down(silu(gate(x)) * up(x))``."""
    inner = jax.nn.silu(x @ params["gate"]["kernel"]) * (x @ params["up"]["kernel"])
    return inner @ params["down"]["kernel"]


def sine_and_cosine(
    positions: jax.Array, size: int, theta: float = THETA
) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine of rotary angles, ``[batch, length, 1, size / 2]``."""
    pairs = size // 2
    frequencies = 1.0 / theta ** (jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.sin(angles), jnp.cos(angles)


def rotate(x: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Queries or keys ``[batch, length, heads, size]``, turned by their positions."""
    sin, cos = turns
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


# ----------------------------------------------------------------- Graftree, Flax NNX


def nnx(
    nnx: Any,
    model: Any,
    optimizer: Any,
    setting: Setting,
    passing: steps.Passing = steps.POSITIONAL,
) -> steps.Step:
    """The train step on objects of Graftree or Flax NNX, a new function each time."""

    def step(model, optimizer, tokens):
        loss, grads = nnx.value_and_grad(train.loss_fn)(model, tokens)
        optimizer.update(model, grads)
        return loss

    return steps.Step(
        nnx.jit(step, donate_argnums=(0, 1)),
        {"model": model, "optimizer": optimizer},
        {"tokens": setting.tokens()},
        passing,
    )


def ours(setting: Setting) -> steps.Step:
    """The train step of ``examples.lm``."""
    recipe, layout = setting.recipe, setting.layout
    if layout is None:
        with graftree.use_eager_sharding(False):
            objects = train.make_objects(setting.config, recipe)
        return nnx(graftree, *objects, setting)
    objects = train.make_state(setting.config, recipe, layout)
    return nnx(graftree, *objects, setting, _in_force(layout))


def _in_force(layout: layouts.Layout) -> steps.Passing:
    """By position, while the mesh and its rules are in force."""

    def call(step, objects, batch):
        with layout.in_force():
            return steps.POSITIONAL.call(step, objects, batch)

    return steps.Passing(steps.POSITIONAL.wrap, call)
