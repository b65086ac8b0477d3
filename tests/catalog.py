"""The tables of all layers: how to make one, what to call it with, its attributes.

Rules that hold for every layer are tests over them, in
`tests/nn/test_layers_under_transforms.py`. A new layer is a new row.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

NORM = "axis_name axis_index_groups use_fast_variance promote_dtype"
DENSE = "dtype param_dtype precision dot_general promote_dtype preferred_element_type"
LSTM = (
    "in_features hidden_features gate_fn activation_fn dtype param_dtype promote_dtype "
    "rngs"
)
POOLING = "window_shape strides padding"

# Those of a new layer, in order.
ATTRIBUTES = {
    "Linear": f"kernel bias in_features out_features use_bias {DENSE}",
    "LinearGeneral": "in_features out_features axis batch_axis use_bias dtype "
    "param_dtype precision dot_general dot_general_cls promote_dtype "
    "preferred_element_type kernel bias",
    "Einsum": "kernel bias einsum_str kernel_shape bias_shape dtype param_dtype "
    "precision promote_dtype einsum_op preferred_element_type",
    "Conv": "kernel_shape kernel bias in_features out_features kernel_size strides "
    "padding input_dilation kernel_dilation feature_group_count use_bias mask dtype "
    "param_dtype precision conv_general_dilated promote_dtype preferred_element_type",
    "ConvTranspose": "kernel_size in_features out_features strides padding "
    "kernel_dilation use_bias mask dtype param_dtype precision transpose_kernel "
    "promote_dtype preferred_element_type kernel_shape kernel bias",
    "Embed": "embedding num_embeddings features dtype param_dtype promote_dtype",
    "LoRA": "in_features out_features dtype param_dtype lora_param_type base_module "
    "promote_dtype lora_a lora_b",
    "LoRALinear": f"kernel bias in_features out_features use_bias {DENSE} lora",
    "PReLU": "negative_slope dtype param_dtype promote_dtype",
    "MultiHeadAttention": "num_heads in_features qkv_features out_features "
    "in_kv_features num_kv_heads dtype param_dtype broadcast_dropout dropout_rate "
    "deterministic precision use_bias attention_fn decode normalize_qk "
    "qkv_promote_dtype out_promote_dtype ln_promote_dtype qkv_dot_general "
    "out_dot_general qkv_dot_general_cls out_dot_general_cls head_dim query key value "
    "query_ln key_ln out rngs cached_key cached_value cache_index",
    "RoPE": "theta cached_sin cached_cos",
    "BatchNorm": "mean var scale bias num_features use_running_average axis momentum "
    f"epsilon dtype param_dtype use_bias use_scale {NORM}",
    "LayerNorm": "scale bias num_features epsilon dtype param_dtype use_bias use_scale "
    f"reduction_axes feature_axes {NORM}",
    "RMSNorm": "scale num_features epsilon dtype param_dtype use_scale reduction_axes "
    f"feature_axes {NORM}",
    "GroupNorm": "feature_axis num_groups group_size scale bias epsilon dtype "
    f"param_dtype use_bias use_scale reduction_axes {NORM}",
    "InstanceNorm": "scale bias num_features epsilon dtype param_dtype use_bias "
    f"use_scale feature_axes {NORM}",
    "SpectralNorm": "layer_instance n_steps epsilon dtype param_dtype "
    "error_on_non_matrix use_running_average batch_stats",
    "WeightNorm": "layer_instance feature_axes use_scale scale_init epsilon dtype "
    "param_dtype variable_filter promote_dtype scales",
    "Dropout": "rate broadcast_dims deterministic rng_collection rngs",
    "LSTMCell": f"{LSTM} ii if_ ig io hi hf hg ho carry_init",
    "OptimizedLSTMCell": f"{LSTM} dense_i dense_h carry_init",
    "SimpleCell": "in_features hidden_features dtype param_dtype residual "
    "activation_fn promote_dtype rngs dense_h dense_i carry_init",
    "GRUCell": f"{LSTM} dense_i dense_h carry_init",
    "RNN": "cell time_major return_carry reverse keep_order unroll rngs state_axes "
    "broadcast_rngs",
    "Bidirectional": "forward_rnn backward_rnn merge_fn time_major return_carry rngs",
    **{"MaxPool": POOLING, "MinPool": POOLING},
    "AvgPool": f"{POOLING} count_include_pad",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A row; a function of a layer and of what it is called with.

    Attributes:
        name: The class, in the public namespace.
        arguments: The positional arguments of the constructor.
        shapes: The shapes of what the layer is called with; a nested tuple is a tuple
            of arrays, as the carry of an LSTM.
        keywords: Further arguments of the constructor.
        call: Keywords of the call.
        wraps: The row of the layer that comes as first argument.
        bound: For indices, the number of rows of the table that they look up.
        has_rngs: Whether the constructor takes ``rngs``.
        has_dtype: Whether it takes ``dtype`` and all outputs have that.
        is_ours: Whether the peer has no such class.
        since: The release of Flax from which on its class is the same.
    """

    name: str
    arguments: tuple[Any, ...]
    shapes: tuple[Any, ...]
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    wraps: tuple[str, ...] = ()
    bound: int | None = None
    has_rngs: bool = True
    has_dtype: bool = True
    is_ours: bool = False
    since: str = "0.12.8"

    @property
    def attributes(self) -> str:
        """Those of a new layer."""
        return ATTRIBUTES.get(self.name, "num_spatial_axes")

    def cls(self, library: Any = nnx) -> type:
        """The class, in one of the libraries."""
        return getattr(library, self.name)

    def make(self, library: Any = nnx, seed: Any = 0, **options: Any) -> Any:
        """A layer with the keys of ``Rngs(seed)``."""
        inner = [BY_NAME[name].make(library, seed) for name in self.wraps]
        if self.has_rngs:
            options = {"rngs": library.Rngs(seed)} | options
        return self.cls(library)(*inner, *self.arguments, **self.keywords | options)

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


def cell(name: str, carry: Any) -> Layer:
    """The row of a recurrent cell."""
    return Layer(name, (3, 4), (carry, (2, 3)))


def pooling(name: str) -> Layer:
    """The row of a pooling layer, which only this library has."""
    windows = () if name.startswith("Global") else (2,)
    options = {"has_rngs": False, "has_dtype": False, "is_ours": True}
    return Layer(name, windows, ((2, 5, 3),), **options)


LAYERS: Sequence[Layer] = [
    Layer("Linear", (3, 4), ((2, 3),)),
    Layer("LinearGeneral", ((2, 3), (4, 5)), ((7, 2, 3),), {"axis": (-2, -1)}),
    Layer("Einsum", ("...a,ab->...b", (3, 4), (4,)), ((2, 3),)),
    Layer("Conv", (3, 4, (3,)), ((2, 5, 3),)),
    Layer("ConvTranspose", (3, 4, (3,), 2), ((2, 5, 3),)),
    Layer("Embed", (6, 3), ((2, 4),), bound=6),
    Layer("LoRA", (3, 2, 4), ((2, 3),), {"b_initializer": nnx.initializers.ones}),
    Layer(
        "LoRALinear",
        (3, 4),
        ((2, 3),),
        {"lora_rank": 2, "b_initializer": nnx.initializers.ones},
        has_dtype=False,
    ),
    Layer("PReLU", (), ((2, 3),), has_rngs=False),
    Layer(
        "MultiHeadAttention",
        (2, 8),
        ((2, 3, 8),),
        {"normalize_qk": True, "dropout_rate": 0.5, "deterministic": False},
        {"decode": False},
    ),
    Layer(
        "RoPE",
        (),
        ((2, 3, 4),),
        {"embedding_size": 4, "max_seq_len": 3},
        has_rngs=False,
        has_dtype=False,
        since="0.12.9",
    ),
    Layer("BatchNorm", (3,), ((4, 3),)),
    Layer("LayerNorm", (3,), ((4, 3),)),
    Layer("RMSNorm", (3,), ((4, 3),)),
    Layer("GroupNorm", (4, 2), ((2, 5, 4),)),
    Layer("InstanceNorm", (3,), ((2, 5, 3),)),
    Layer("SpectralNorm", (), ((2, 3),), wraps=("Linear",), has_dtype=False),
    Layer(
        "WeightNorm", (), ((2, 3),), wraps=("Linear",), has_dtype=False, since="0.12.9"
    ),
    Layer("Dropout", (0.5,), ((2, 3),), has_dtype=False),
    cell("LSTMCell", ((2, 4), (2, 4))),
    cell("OptimizedLSTMCell", ((2, 4), (2, 4))),
    cell("SimpleCell", (2, 4)),
    cell("GRUCell", (2, 4)),
    Layer("RNN", (), ((2, 5, 3),), wraps=("GRUCell",), has_dtype=False),
    Layer("Bidirectional", (), ((2, 5, 3),), wraps=("RNN", "RNN"), has_dtype=False),
    *map(pooling, ("MaxPool", "MinPool", "AvgPool")),
    *map(pooling, ("GlobalMaxPool", "GlobalMinPool", "GlobalAvgPool")),
]

BY_NAME = {layer.name: layer for layer in LAYERS}

# Of the layers that share the code of promotion and contraction, of moments, of carries
# or of windows, one; and all that share none.
FAMILIES = (
    "Linear Conv Embed LoRALinear PReLU MultiHeadAttention RoPE BatchNorm LayerNorm "
    "SpectralNorm Dropout OptimizedLSTMCell RNN AvgPool GlobalMaxPool"
).split()


def unless_family(layer: Layer) -> Any:
    """The mark of a layer that others stand for: only the long run has it."""
    return () if layer.name in FAMILIES else pytest.mark.long


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
