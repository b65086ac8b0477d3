"""A GPT, a ViT and a conv net, by hand and in the libraries, in bfloat16.

`RAW` has them as one writes them in plain JAX: functions of nested dicts, with the
mathematics of Graftree's layers and the layout of their parameters. Parameters are
float32, products bfloat16; means, softmax and loss float32. Equinox has its own layers
with the same arithmetic, on parameters that are cast before.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

DTYPE = jnp.bfloat16
EPSILON = 1e-6


class Sizes(NamedTuple):
    """Sizes of a model and of its batch.

    Attributes:
        batch: Number of samples.
        extent: Tokens of a text, or pixels of a side of an image.
        width: Features; of the conv net those of the first stage.
        layers: Blocks; of the conv net stages, each with twice the features.
        heads: Of attention.
        classes: Words or labels.
        patch: Pixels of a side of a patch.
    """

    batch: int
    extent: int
    width: int
    layers: int
    classes: int
    heads: int = 1
    patch: int = 1

    @property
    def num_patches(self) -> int:
        """How many patches an image has."""
        return (self.extent // self.patch) ** 2


# Multiples of the 128 rows and columns of a matrix unit; each compiles in a minute.
SIZES = {
    "GPT": Sizes(8, 256, 256, 1, 2048, heads=2),
    "ViT": Sizes(16, 128, 256, 1, 1024, heads=2, patch=16),
    "conv net": Sizes(32, 32, 128, 1, 1024),
}
TINY = {
    "GPT": Sizes(2, 16, 32, 1, 64, heads=4),
    "ViT": Sizes(2, 16, 32, 1, 10, heads=4, patch=8),
    "conv net": Sizes(2, 16, 8, 2, 10),
}


def batch(name: str, sizes: Sizes) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The inputs of a model, and what it is to tell."""
    if name == "GPT":
        tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.extent), jnp.int32)
        return tokens, tokens
    images = (sizes.batch, sizes.extent, sizes.extent, 3)
    labels = jax.ShapeDtypeStruct((sizes.batch,), jnp.int32)
    return jax.ShapeDtypeStruct(images, DTYPE), labels


def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy, in float32."""
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits.astype(jnp.float32), labels).mean()


# --------------------------------------------------------------------------- plain JAX


def _raw_linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["kernel"].astype(DTYPE) + params["bias"].astype(DTYPE)


def _raw_projection(params: Any, x: jax.Array, axes: int) -> jax.Array:
    """Contracts the last axes of ``x`` with the first ones of the kernel."""
    kernel, last = params["kernel"].astype(DTYPE), range(x.ndim - axes, x.ndim)
    contracted = (tuple(last), tuple(range(axes))), ((), ())
    return jax.lax.dot_general(x, kernel, contracted) + params["bias"].astype(DTYPE)


def _raw_norm(params: Any, x: jax.Array, axes: Any = -1, **options: float) -> Any:
    """LayerNorm, or BatchNorm: the output and the moments."""
    wide, epsilon = x.astype(jnp.float32), options.get("epsilon", EPSILON)
    mean = jnp.mean(wide, axes, keepdims=True)
    square = jnp.mean(jnp.square(wide), axes, keepdims=True)
    variance = jnp.maximum(square - jnp.square(mean), 0)
    factor = jax.lax.rsqrt(variance + epsilon) * params["scale"].astype(DTYPE)
    y = (wide - mean) * factor + params["bias"].astype(DTYPE)
    return y.astype(DTYPE), mean, variance


def _raw_block(params: Any, x: jax.Array, is_causal: bool) -> jax.Array:
    attention = params["attention"]
    y, *_ = _raw_norm(params["attention_norm"], x)
    heads = [_raw_projection(attention[n], y, 1) for n in ("query", "key", "value")]
    y = jax.nn.dot_product_attention(*heads, is_causal=is_causal)
    x = x + _raw_projection(attention["out"], y, 2)
    y, *_ = _raw_norm(params["norm"], x)
    return x + _raw_linear(params["down"], jax.nn.gelu(_raw_linear(params["up"], y)))


def _raw_gpt(params: Any, _: Any, tokens: jax.Array, sizes: Sizes) -> Any:
    x = params["embed"]["embedding"].astype(DTYPE)[tokens]
    x = x + params["positions"].astype(DTYPE)
    for i in range(sizes.layers):
        x = _raw_block(params["blocks"][i], x, is_causal=True)
    x, *_ = _raw_norm(params["norm"], x)
    return _raw_linear(params["head"], x), {}


def _raw_vit(params: Any, _: Any, images: jax.Array, sizes: Sizes) -> Any:
    x = _raw_conv(params["patches"], images, sizes.patch, "VALID")
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    x = x + params["positions"].astype(DTYPE)
    for i in range(sizes.layers):
        x = _raw_block(params["blocks"][i], x, is_causal=False)
    x, *_ = _raw_norm(params["norm"], x)
    return _raw_linear(params["head"], x.mean(1)), {}


def _raw_conv(params: Any, x: jax.Array, stride: int, padding: str = "SAME") -> Any:
    kernel, numbers = params["kernel"].astype(DTYPE), ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    y = jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=numbers
    )
    return y + params["bias"].astype(DTYPE) if "bias" in params else y


def _raw_conv_net(params: Any, stats: Any, x: jax.Array, sizes: Sizes) -> Any:
    def conv_norm(name, x, stride=1):
        old, params_of, stats_of = {}, params, stats
        for key in name:
            params_of, stats_of = params_of[key], stats_of[key]
        x = _raw_conv(params_of["conv"], x, stride)
        axes, old = (0, 1, 2), stats_of["norm"]
        y, mean, var = _raw_norm(params_of["norm"], x, axes, epsilon=1e-5)
        for key, now in {"mean": mean, "var": var}.items():
            now = jax.lax.stop_gradient(now.reshape(-1))
            moved[(*name, "norm", key)] = 0.99 * old[key] + 0.01 * now
        return y

    moved: dict[Any, jax.Array] = {}
    x = jax.nn.relu(conv_norm(("stem",), x))
    for i in range(sizes.layers):
        y = jax.nn.relu(conv_norm(("blocks", i, "first"), x, 2))
        y = conv_norm(("blocks", i, "second"), y)
        x = jax.nn.relu(y + conv_norm(("blocks", i, "shortcut"), x, 2))
    return _raw_linear(params["head"], x.mean((1, 2))), moved


RAW = {"GPT": _raw_gpt, "ViT": _raw_vit, "conv net": _raw_conv_net}

# ----------------------------------------------------------------- Graftree, Flax NNX


@functools.cache
def nnx_classes(nnx: Any) -> dict[str, Callable[..., Any]]:
    """The models as classes of Graftree or Flax NNX."""
    return _nnx_transformers(nnx) | {"conv net": _nnx_conv_net(nnx)}


def _nnx_transformers(nnx: Any) -> dict[str, Callable[..., Any]]:
    class Block(nnx.Module):
        def __init__(self, sizes, rngs):
            width, options = sizes.width, {"dtype": DTYPE, "rngs": rngs}
            self.attention_norm = nnx.LayerNorm(width, epsilon=EPSILON, **options)
            self.attention = nnx.MultiHeadAttention(
                sizes.heads, width, decode=False, **options
            )
            self.norm = nnx.LayerNorm(width, epsilon=EPSILON, **options)
            self.up = nnx.Linear(width, 4 * width, **options)
            self.down = nnx.Linear(4 * width, width, **options)

        def __call__(self, x, is_causal):
            x = x + self.attention(self.attention_norm(x), is_causal=is_causal)
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Transformer(nnx.Module):
        def __init__(self, sizes, length, rngs):
            options = {"dtype": DTYPE, "rngs": rngs}
            self.positions = nnx.Param(jnp.zeros((length, sizes.width)))
            self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
            self.norm = nnx.LayerNorm(sizes.width, epsilon=EPSILON, **options)
            self.head = nnx.Linear(sizes.width, sizes.classes, **options)

        def features(self, x, is_causal):
            x = x + self.positions[...].astype(DTYPE)
            for block in self.blocks:
                x = block(x, is_causal)
            return self.norm(x)

    class GPT(Transformer):
        def __init__(self, sizes, rngs):
            super().__init__(sizes, sizes.extent, rngs)
            self.embed = nnx.Embed(sizes.classes, sizes.width, dtype=DTYPE, rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.features(self.embed(tokens), is_causal=True))

    class ViT(Transformer):
        def __init__(self, sizes, rngs):
            super().__init__(sizes, sizes.num_patches, rngs)
            patch = (sizes.patch, sizes.patch)
            options = {"strides": patch, "padding": "VALID", "dtype": DTYPE}
            self.patches = nnx.Conv(3, sizes.width, patch, **options, rngs=rngs)

        def __call__(self, images):
            x = self.patches(images)
            x = x.reshape(x.shape[0], -1, x.shape[-1])
            return self.head(self.features(x, is_causal=False).mean(1))

    return {"GPT": GPT, "ViT": ViT}


def _nnx_conv_net(nnx: Any) -> Callable[..., Any]:
    class ConvNorm(nnx.Module):
        def __init__(self, inputs, outputs, size, rngs, stride=1):
            options = {"strides": stride, "use_bias": False, "dtype": DTYPE}
            self.conv = nnx.Conv(inputs, outputs, (size, size), **options, rngs=rngs)
            self.norm = nnx.BatchNorm(outputs, dtype=DTYPE, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.conv(x))

    class Residual(nnx.Module):
        def __init__(self, inputs, outputs, rngs):
            self.first = ConvNorm(inputs, outputs, 3, rngs, stride=2)
            self.second = ConvNorm(outputs, outputs, 3, rngs)
            self.shortcut = ConvNorm(inputs, outputs, 1, rngs, stride=2)

        def __call__(self, x):
            y = self.second(nnx.relu(self.first(x)))
            return nnx.relu(y + self.shortcut(x))

    class ConvNet(nnx.Module):
        def __init__(self, sizes, rngs):
            widths = [sizes.width * 2**i for i in range(sizes.layers + 1)]
            self.stem = ConvNorm(3, sizes.width, 3, rngs)
            pairs = itertools.pairwise(widths)
            self.blocks = nnx.List([Residual(*pair, rngs) for pair in pairs])
            self.head = nnx.Linear(widths[-1], sizes.classes, dtype=DTYPE, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.stem(x))
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((1, 2)))

    return ConvNet


# ---------------------------------------------------------------------------- Equinox


@functools.cache
def equinox_classes(eqx: Any) -> dict[str, Callable[..., Any]]:
    """The models as classes of Equinox, of one sample, with their state."""
    return _equinox_transformers(eqx) | {"conv net": _equinox_conv_net(eqx)}


def _equinox_transformers(eqx: Any) -> dict[str, Callable[..., Any]]:
    class Block(eqx.Module):
        layers: dict[str, Any]

        def __init__(self, sizes, key):
            keys, width = jax.random.split(key, 3), sizes.width
            biases = ("query", "key", "value", "output")
            options = {f"use_{name}_bias": True for name in biases}
            self.layers = {
                "attention_norm": eqx.nn.LayerNorm(width, eps=EPSILON),
                "attention": eqx.nn.MultiheadAttention(
                    sizes.heads, width, **options, key=keys[0]
                ),
                "norm": eqx.nn.LayerNorm(width, eps=EPSILON),
                "up": eqx.nn.Linear(width, 4 * width, key=keys[1]),
                "down": eqx.nn.Linear(4 * width, width, key=keys[2]),
            }

        def __call__(self, x, mask):
            y = jax.vmap(self.layers["attention_norm"])(x)
            x = x + self.layers["attention"](y, y, y, mask=mask)
            y = jax.vmap(self.layers["up"])(jax.vmap(self.layers["norm"])(x))
            return x + jax.vmap(self.layers["down"])(jax.nn.gelu(y))

    class Transformer(eqx.Module):
        inputs: Any
        positions: Any
        blocks: list[Block]
        norm: Any
        head: Any

        def __init__(self, sizes, length, inputs, key):
            keys = jax.random.split(key, sizes.layers + 1)
            self.inputs, self.positions = inputs, jnp.zeros((length, sizes.width))
            self.blocks = [Block(sizes, key) for key in keys[1:]]
            self.norm = eqx.nn.LayerNorm(sizes.width, eps=EPSILON)
            self.head = eqx.nn.Linear(sizes.width, sizes.classes, key=keys[0])

        def features(self, x, mask=None):
            x = x + self.positions
            for block in self.blocks:
                x = block(x, mask)
            return jax.vmap(self.norm)(x)

    class GPT(Transformer):
        def __init__(self, sizes, key):
            embed = eqx.nn.Embedding(sizes.classes, sizes.width, key=key)
            super().__init__(sizes, sizes.extent, embed, key)

        def __call__(self, tokens, state):
            x = jax.vmap(self.inputs)(tokens)
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            return jax.vmap(self.head)(self.features(x, mask)), state

    class ViT(Transformer):
        def __init__(self, sizes, key):
            options = {"stride": sizes.patch, "key": key}
            patches = eqx.nn.Conv2d(3, sizes.width, sizes.patch, **options)
            super().__init__(sizes, sizes.num_patches, patches, key)

        def __call__(self, image, state):
            x = self.inputs(image.transpose(2, 0, 1))
            x = x.reshape(x.shape[0], -1).T
            return self.head(self.features(x).mean(0)), state

    return {"GPT": GPT, "ViT": ViT}


def _equinox_conv_net(eqx: Any) -> Callable[..., Any]:
    class ConvNorm(eqx.Module):
        conv: Any
        norm: Any

        def __init__(self, inputs, outputs, size, key, stride=1):
            options = {"stride": stride, "padding": "SAME", "use_bias": False}
            self.conv = eqx.nn.Conv2d(inputs, outputs, size, **options, key=key)
            self.norm = eqx.nn.BatchNorm(outputs, "batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(self.conv(x), state)

    class ConvNet(eqx.Module):
        stem: Any
        blocks: list[Any]
        head: Any

        def __init__(self, sizes, key):
            widths = [sizes.width * 2**i for i in range(sizes.layers + 1)]
            self.stem = ConvNorm(3, sizes.width, 3, key)
            self.blocks = [
                [
                    ConvNorm(inputs, outputs, 3, key, stride=2),
                    ConvNorm(outputs, outputs, 3, key),
                    ConvNorm(inputs, outputs, 1, key, stride=2),
                ]
                for inputs, outputs in itertools.pairwise(widths)
            ]
            self.head = eqx.nn.Linear(widths[-1], sizes.classes, key=key)

        def __call__(self, x, state):
            x, state = self.stem(x.transpose(2, 0, 1), state)
            x = jax.nn.relu(x)
            for first, second, shortcut in self.blocks:
                y, state = first(x, state)
                y, state = second(jax.nn.relu(y), state)
                x, state = shortcut(x, state)
                x = jax.nn.relu(x + y)
            return self.head(x.mean((1, 2))), state

    return ConvNet
