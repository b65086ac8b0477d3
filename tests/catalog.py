"""The table of all layers: how to make one, what to call it with, what it is.

A new layer is a new row. From it come the laws of all layers and the comparison with
the peer (`tests/contract/test_nn_layers/`), and `tests/test_house_rules.py` holds the
tables of the guides, the names beyond Flax and the tests of a family against it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A row; a function of a layer and of what it is called with.

    Attributes:
        name: The class, in the public namespace.
        arguments: The positional arguments of the constructor.
        shapes: The shapes of what the layer is called with; a nested tuple is a tuple
            of arrays, as the carry of an LSTM.
        formula: What the outputs are in NumPy, as a function of the Params of the layer
            (by path, with underscores) and of the inputs. ``None``: the file
            of the family has tables of options, and tests it there.
        keywords: Further arguments of the constructor.
        call: Keywords of the call.
        wraps: The rows of the layers that come as first arguments.
        bound: For indices, the number of rows of the table that they look up.
        has_rngs: Whether the constructor takes ``rngs``.
        has_dtype: Whether it takes ``dtype`` and all outputs have that.
        is_ours: Whether the peer has no such class.
        beyond: Options of the constructor that the peer lacks, and their attributes.
        since: The release of Flax from which on its class is the same.
        builds: Whether it makes its layers, which have the dtypes and name wrong sizes.
        is_usual: Whether it runs in `make test` for others that share its code: those
            of promotion and contraction, of moments, of carries or of windows.
        family: See `FAMILIES`; `of_family` sets it.
    """

    name: str
    arguments: tuple[Any, ...]
    shapes: tuple[Any, ...]
    formula: Callable[..., Any] | None = None
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    wraps: tuple[str, ...] = ()
    bound: int | None = None
    has_rngs: bool = True
    has_dtype: bool = True
    is_ours: bool = False
    beyond: str = ""
    since: str = "0.12.8"
    builds: bool = False
    is_usual: bool = False
    family: str = ""

    def cls(self, library: Any = nnx) -> type:
        """The class, in one of the libraries."""
        return getattr(library, self.name)

    def make(self, library: Any = nnx, seed: Any = 0, **options: Any) -> Any:
        """A layer with the keys of ``Rngs(seed)``."""
        inner = [BY_NAME[name].make(library, seed) for name in self.wraps]
        if self.has_rngs:
            options = {"rngs": library.Rngs(seed)} | options
        # A Module among them is made again, as one that makes a layer would make it.
        keywords = copy.deepcopy(self.keywords)
        return self.cls(library)(*inner, *self.arguments, **keywords | options)

    def inputs(self, seed: int = 1, dtype: Any = jnp.float32) -> tuple[Any, ...]:
        """What the layer is called with."""
        numbers = np.random.default_rng(seed)  # JAX compiles a program for each shape

        def array(shape: Any) -> Any:
            if shape and isinstance(shape[0], tuple):
                return tuple(map(array, shape))
            if self.bound is not None:
                return jnp.asarray(numbers.integers(self.bound, size=shape), int)
            return jnp.asarray(numbers.normal(size=shape), dtype)

        return tuple(map(array, self.shapes))

    def __call__(self, layer: Any, *inputs: Any) -> Any:
        """What the layer makes of the inputs."""
        return layer(*inputs, **self.call)

    def parameters(self, library: Any = nnx) -> dict[str, inspect.Parameter]:
        """The arguments of the constructor."""
        return dict(inspect.signature(self.cls(library).__init__).parameters)


@dataclasses.dataclass(frozen=True)
class Family:
    """Layers that have a file of tests, and are listed in one place of the guides.

    Attributes:
        tests: The file, below ``tests``.
        page: The page, in ``docs/guides``.
        row: How the row of its table begins; empty: anywhere on the page.
    """

    tests: str
    page: str = "layers.md"
    row: str = ""


FAMILIES = {
    "linear": Family("contract/test_nn_layers/test_linear.py", row="| vectors |"),
    "conv": Family(
        "contract/test_nn_layers/test_conv.py", row="| images, audio, volumes |"
    ),
    "mixtures": Family(
        "contract/test_nn_layers/test_mixtures.py", row="| mixtures of experts |"
    ),
    "pooling": Family("contract/test_nn_layers/test_pooling.py", row="| pooling |"),
    "normalization": Family(
        "contract/test_nn_layers/test_normalization.py", row="| normalization |"
    ),
    "wrappers": Family(
        "contract/test_nn_layers/test_reparametrization.py", row="| normalization |"
    ),
    "dropout": Family("contract/test_nn_layers/test_dropout.py", row="| noise |"),
    "attention": Family(
        "contract/test_nn_layers/test_multi_head_attention.py", row="| [sequences]"
    ),
    "latent attention": Family(
        "decoding/test_latent_attention.py", row="| [sequences]"
    ),
    "positions": Family(
        "contract/test_nn_layers/test_attention.py", row="| [sequences]"
    ),
    "position biases": Family(
        "contract/test_nn_layers/test_position_biases.py", row="| [sequences]"
    ),
    "cells": Family("contract/test_nn_layers/test_cells.py", row="| [sequences]"),
    "recurrent": Family(
        "contract/test_nn_layers/test_recurrent.py", row="| [sequences]"
    ),
    "activations": Family(
        "contract/test_nn_layers/test_activations.py", row="| activations |"
    ),
    "lora": Family("contract/test_nn_layers/test_lora.py", "lora.md"),
    "containers": Family("surgery/test_stacks.py", row="| putting layers together |"),
}


def of_family(family: str, *rows: Layer) -> list[Layer]:
    """The rows of a family."""
    return [dataclasses.replace(row, family=family) for row in rows]


def cell(name: str, carry: Any, **options: Any) -> Layer:
    """The row of a recurrent cell."""
    return Layer(name, (3, 4), (carry, (2, 3)), **options)


def pooling(name: str, formula: Any, **options: Any) -> Layer:
    """The row of a pooling layer, which only this library has."""
    windows = () if name.startswith("Global") else (2,)
    options |= {"has_rngs": False, "has_dtype": False, "is_ours": True}
    return Layer(name, windows, ((2, 5, 3),), formula, **options)


ONES = {"b_initializer": nnx.initializers.ones}  # not zeros: else LoRA does nothing


def leaky(x: Any, slope: Any) -> Any:
    """The inputs, times the slope where they are negative."""
    return np.where(x < 0, slope * x, x)


def centered(x: Any, axes: Any = -1) -> Any:
    """The inputs less their mean, over the root of their variance."""
    over = {"axis": axes, "keepdims": True}
    return (x - x.mean(**over)) / np.sqrt(x.var(**over) + 1e-6)


def gated(rows: Any, gate: Any, up: Any, down: Any) -> Any:
    """What a gated MLP makes of rows."""
    return (rows @ gate / (1 + np.exp(-rows @ gate)) * (rows @ up)) @ down


def mixed(p: Any, x: Any, top_k: int = 2) -> Any:
    """What a mixture of gated experts makes of tokens: all of them, then the best."""
    logits = np.exp(x @ p.router_kernel)
    weights = logits * (logits >= np.sort(logits)[:, -top_k, None])
    kernels = [getattr(p, f"experts_{x}_kernel") for x in ("gate", "up", "down")]
    outputs = np.stack([gated(x, *own) for own in zip(*kernels, strict=True)])
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("enf,ne->nf", outputs, weights)


def over_windows(reduce: Any) -> Any:
    """A function of each two neighbours along the axis of space."""
    windows = np.lib.stride_tricks.sliding_window_view
    return lambda _, x: reduce(windows(x, 2, axis=1), axis=-1)


def over_space(reduce: Any) -> Any:
    return lambda _, x: reduce(x, axis=1)


def buckets(queries: Any, keys: Any) -> Any:
    """The bucket of T5 of each query and key: 8 of them, up to a distance of 6."""
    ahead = keys[..., None, :] - queries[..., None]
    of_distance = np.array([0, 1, 2, 2, 3, 3, 3, 3, 3])
    return of_distance[np.abs(ahead)] + 4 * (ahead > 0)


def linear_biases(queries: Any, keys: Any) -> Any:
    """Minus the distance, times the slopes of four heads."""
    distances = np.abs(keys[:, None, None] - queries[:, None, :, None])
    return -np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * distances


LAYERS: Sequence[Layer] = [
    *of_family(
        "linear",
        Layer(
            "Linear",
            (3, 4),
            ((2, 3),),
            lambda p, x: x @ p.kernel + p.bias,
            is_usual=True,
        ),
        Layer(
            "LinearGeneral",
            ((2, 3), (4, 5)),
            ((7, 2, 3),),
            lambda p, x: np.einsum("nab,abcd->ncd", x, p.kernel) + p.bias,
            keywords={"axis": (-2, -1)},
        ),
        Layer(
            "Einsum",
            ("...a,ab->...b", (3, 4), (4,)),
            ((2, 3),),
            lambda p, x: x @ p.kernel + p.bias,
        ),
        Layer(
            "Embed",
            (6, 3),
            ((2, 4),),
            lambda p, i: p.embedding[i],
            bound=6,
            is_usual=True,
        ),
    ),
    *of_family(
        "conv",
        Layer(
            "Conv",
            (3, 4, (3,)),
            ((2, 5, 3),),
            is_usual=True,
        ),
        Layer(
            "ConvTranspose",
            (3, 4, (3,), 2),
            ((2, 5, 3),),
        ),
    ),
    *of_family(
        "lora",
        Layer(
            "LoRA",
            (3, 2, 4),
            ((2, 3),),
            lambda p, x: x @ p.lora_a @ p.lora_b,
            keywords=ONES,
        ),
        Layer(
            "LoRALinear",
            (3, 4),
            ((2, 3),),
            lambda p, x: x @ (p.kernel + p.lora_lora_a @ p.lora_lora_b) + p.bias,
            keywords={"lora_rank": 2, **ONES},
            has_dtype=False,
            is_usual=True,
        ),
    ),
    *of_family(
        "activations",
        Layer(
            "PReLU",
            (),
            ((2, 3),),
            lambda p, x: leaky(x, p.negative_slope),
            has_rngs=False,
            is_usual=True,
        ),
    ),
    *of_family(
        "attention",
        Layer(
            "MultiHeadAttention",
            (2, 8),
            ((2, 3, 8),),
            keywords={
                "normalize_qk": True,
                "dropout_rate": 0.5,
                "deterministic": False,
            },
            call={"decode": False},
            beyond="normalize_qk_axes rope sliding_window logits_soft_cap scale "
            "use_sinks sinks value_head_dim",
            is_usual=True,
        ),
    ),
    *of_family(
        "latent attention",
        Layer(
            "MultiHeadLatentAttention",
            (2, 8),
            ((2, 3, 8),),
            keywords={
                "q_lora_rank": 3,
                "kv_lora_rank": 4,
                "qk_nope_head_dim": 2,
                "qk_rope_head_dim": 2,
                "v_head_dim": 3,
                "rope": nnx.RoPE(),
                "dropout_rate": 0.5,
                "deterministic": False,
            },
            is_ours=True,
            builds=True,
        ),
    ),
    *of_family(
        "positions",
        Layer(
            "RoPE",
            (),
            ((2, 3, 4),),
            keywords={"embedding_size": 4, "max_seq_len": 3},
            has_rngs=False,
            has_dtype=False,
            beyond="scaling partial_rotary_factor interleaved seq_len",
            since="0.12.9",
            is_usual=True,
        ),
    ),
    *of_family(
        "position biases",
        Layer(
            "RelativePositionBias",
            (3,),
            ((2, 3), (2, 4)),
            lambda p, i, j: np.moveaxis(p.embed_embedding[buckets(i, j)], -1, -3),
            keywords={"num_buckets": 8, "max_distance": 6},
            bound=9,
            is_ours=True,
        ),
        Layer(
            "ALiBi",
            (4,),
            ((2, 3), (2, 4)),
            lambda _, i, j: linear_biases(i, j),
            bound=9,
            has_rngs=False,
            has_dtype=False,
            is_ours=True,
        ),
    ),
    *of_family(
        "normalization",
        Layer(
            "BatchNorm",
            (3,),
            ((4, 3),),
            is_usual=True,
        ),
        Layer(
            "LayerNorm",
            (3,),
            ((4, 3),),
            lambda p, x: p.scale * centered(x) + p.bias,
            beyond="scale_offset",
            is_usual=True,
        ),
        Layer(
            "RMSNorm",
            (3,),
            ((4, 3),),
            lambda p, x: p.scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6),
            beyond="scale_offset",
        ),
        Layer(
            "GroupNorm",
            (4, 2),
            ((2, 5, 4),),
            lambda p, x: (
                p.scale * centered(x.reshape(2, 5, 2, 2), (1, 3)).reshape(x.shape)
                + p.bias
            ),
        ),
        Layer(
            "InstanceNorm",
            (3,),
            ((2, 5, 3),),
            lambda p, x: p.scale * centered(x, 1) + p.bias,
        ),
    ),
    *of_family(
        "wrappers",
        Layer(
            "SpectralNorm",
            (),
            ((2, 3),),
            wraps=("Linear",),
            has_dtype=False,
            is_usual=True,
        ),
        Layer(
            "WeightNorm",
            (),
            ((2, 3),),
            wraps=("Linear",),
            has_dtype=False,
            since="0.12.9",
        ),
    ),
    *of_family(
        "dropout",
        Layer(
            "Dropout",
            (0.5,),
            ((2, 3),),
            has_dtype=False,
            is_usual=True,
        ),
    ),
    *of_family(
        "cells",
        cell(
            "LSTMCell",
            ((2, 4), (2, 4)),
        ),
        cell(
            "OptimizedLSTMCell",
            ((2, 4), (2, 4)),
            is_usual=True,
        ),
        cell(
            "SimpleCell",
            (2, 4),
        ),
        cell("GRUCell", (2, 4)),
    ),
    *of_family(
        "recurrent",
        Layer(
            "RNN",
            (),
            ((2, 5, 3),),
            wraps=("GRUCell",),
            has_dtype=False,
            is_usual=True,
        ),
        Layer(
            "Bidirectional",
            (),
            ((2, 5, 3),),
            wraps=("RNN", "RNN"),
            has_dtype=False,
        ),
        Layer(
            "StackedRNN",
            (nnx.GRUCell, 3, 4),
            ((2, 5, 3),),
            keywords={"num_layers": 2},
            has_dtype=False,
            is_ours=True,
            builds=True,
        ),
    ),
    *of_family(
        "mixtures",
        Layer(
            "Router",
            (3, 5),
            ((2, 3),),
            keywords={"top_k": 2},
            has_dtype=False,
            is_ours=True,
        ),
        Layer(
            "GroupedLinear",
            (2, 3, 4),
            ((2, 3),),
            lambda p, x: np.einsum("gf,gfo->go", x, p.kernel) + p.bias,
            call={"group_sizes": (1, 1)},
            is_ours=True,
        ),
        Layer(
            "GatedExperts",
            (5, 3, 4),
            ((2, 3),),
            lambda p, x: np.stack(
                [
                    gated(row, p.gate_kernel[e], p.up_kernel[e], p.down_kernel[e])
                    for row, e in zip(x, (0, 2), strict=True)
                ]
            ),
            call={"group_sizes": (1, 0, 1, 0, 0)},
            is_ours=True,
        ),
        Layer(
            "MixtureOfExperts",
            (),
            ((2, 3),),
            mixed,
            wraps=("Router", "GatedExperts"),
            has_rngs=False,
            has_dtype=False,
            is_ours=True,
            is_usual=True,
        ),
    ),
    *of_family(
        "pooling",
        pooling("MaxPool", over_windows(np.max)),
        pooling("MinPool", over_windows(np.min)),
        pooling("AvgPool", over_windows(np.mean), is_usual=True),
        pooling("GlobalMaxPool", over_space(np.max), is_usual=True),
        pooling("GlobalMinPool", over_space(np.min)),
        pooling("GlobalAvgPool", over_space(np.mean)),
    ),
    *of_family(
        "containers",
        Layer(
            "Sequential",
            (),
            ((2, 3),),
            lambda p, x: leaky(
                x @ p.layers_0_kernel + p.layers_0_bias, p.layers_1_negative_slope
            ),
            wraps=("Linear", "PReLU"),
            has_rngs=False,
            has_dtype=False,
        ),
        Layer(
            "Stack",
            (lambda rngs: nnx.Linear(8, 8, rngs=rngs), 2),
            ((2, 8),),
            lambda p, x: (
                (x @ p.layers_kernel[0] + p.layers_bias[0]) @ p.layers_kernel[1]
                + p.layers_bias[1]
            ),
            has_dtype=False,
            is_ours=True,
            builds=True,
        ),
    ),
]

BY_NAME = {layer.name: layer for layer in LAYERS}


def unless_family(layer: Layer) -> Any:
    """The mark of a layer that others stand for: only the long run has it."""
    return () if layer.is_usual else pytest.mark.long


def of_families(layers: Sequence[Layer]) -> Any:
    """Runs a test with a layer of each family; in the long run with all of them."""
    rows = [pytest.param(x, id=x.name, marks=unless_family(x)) for x in layers]
    return pytest.mark.parametrize("row", rows)


every_layer = pytest.mark.parametrize("row", LAYERS, ids=lambda row: row.name)
every_family = of_families(LAYERS)


def raw(x: Any) -> np.ndarray:
    """The numbers of an array, also of random keys."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def state_of(layer: Any, library: Any = nnx) -> dict[Any, np.ndarray]:
    """The numbers of all Variables, by path."""
    flat = library.to_flat_state(library.state(layer))
    return {path: raw(variable[...]) for path, variable in flat}
