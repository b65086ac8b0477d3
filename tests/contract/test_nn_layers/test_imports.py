"""Where programs find the layers (contract, section 1)."""

import importlib
import inspect

import jax
import pytest

import graftree as nnx

ACTIVATIONS = (
    "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu"
    " log_sigmoid log_softmax logsumexp one_hot relu identity relu6 selu sigmoid silu"
    " soft_sign softmax softplus standardize swish tanh"
).split()

TOP_LEVEL = (
    "Linear LinearGeneral Einsum Conv ConvTranspose Embed LoRA LoRALinear LoRAParam"
    " PReLU MultiHeadAttention RoPE dot_product_attention"
    " dot_product_attention_with_rope make_attention_mask make_causal_mask"
    " combine_masks BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm SpectralNorm"
    " WeightNorm Dropout RNNCellBase LSTMCell OptimizedLSTMCell SimpleCell GRUCell RNN"
    " Bidirectional avg_pool max_pool min_pool pool logical_axis_rules initializers"
    " Initializer"
).split() + ACTIVATIONS

SUBMODULES = {
    "activations": ["PReLU", *ACTIVATIONS],
    "attention": (
        "MultiHeadAttention RoPE dot_product_attention dot_product_attention_with_rope"
        " dot_product_attention_weights make_attention_mask make_causal_mask"
        " combine_masks"
    ).split(),
    "dtypes": ["canonicalize_dtype", "promote_dtype"],
    "initializers": ["Initializer", "lecun_normal", "ones_init", "zeros_init"],
    "linear": (
        "Linear LinearGeneral Einsum Conv ConvTranspose Embed default_kernel_init"
        " default_bias_init default_embed_init canonicalize_padding"
    ).split(),
    "lora": (
        "LoRA LoRALinear LoRAParam default_a_initializer default_b_initializer"
    ).split(),
    "normalization": (
        "BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm SpectralNorm WeightNorm"
    ).split(),
    "recurrent": (
        "RNNCellBase LSTMCell OptimizedLSTMCell SimpleCell GRUCell RNN Bidirectional"
        " flip_sequences RNNBase modified_orthogonal default_kernel_init"
        " default_bias_init"
    ).split(),
    "stochastic": ["Dropout"],
}
# Names of sub-modules that the public namespace does not have.
HIDDEN = (
    "dot_product_attention_weights canonicalize_dtype promote_dtype flip_sequences"
    " RNNBase modified_orthogonal default_kernel_init default_bias_init"
    " default_embed_init canonicalize_padding"
).split()


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_name_is_in_the_public_namespace(name):
    assert hasattr(nnx, name)
    assert name in nnx.__all__


@pytest.mark.parametrize("name", HIDDEN)
def test_name_is_not_in_the_public_namespace(name):
    assert not hasattr(nnx, name)


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_submodule_has_its_names(submodule):
    module = importlib.import_module(f"graftree.nn.{submodule}")
    assert getattr(nnx.nn, submodule) is module
    for name in SUBMODULES[submodule]:
        value = getattr(module, name)
        if name in TOP_LEVEL:
            assert value is getattr(nnx, name)


def test_there_is_one_module_of_initializers():
    assert nnx.initializers is nnx.nn.initializers


def test_defaults_are_those_of_the_contract():
    linear, lora = nnx.nn.linear, nnx.nn.lora
    assert linear.default_bias_init is nnx.initializers.zeros
    assert lora.default_b_initializer is nnx.initializers.zeros
    key, shape = jax.random.key(0), (4, 3)
    for ours, jaxs in (
        (linear.default_kernel_init, jax.nn.initializers.lecun_normal()),
        (lora.default_a_initializer, jax.nn.initializers.he_uniform()),
    ):
        assert (ours(key, shape, "float32") == jaxs(key, shape, "float32")).all()


def test_rnn_base_is_a_protocol():
    assert inspect.isclass(nnx.nn.recurrent.RNNBase)
    assert getattr(nnx.nn.recurrent.RNNBase, "_is_protocol", False)


def test_flattening_of_padding_has_the_name_of_the_peer():
    canonicalize_padding = nnx.nn.linear.canonicalize_padding
    assert canonicalize_padding("SAME", 2) == "SAME"
    assert canonicalize_padding(1, 2) == [(1, 1), (1, 1)]
    assert canonicalize_padding(((0, 1), 2), 2) == [(0, 1), (2, 2)]
    with pytest.raises(ValueError, match="Invalid padding format.*len 2"):
        canonicalize_padding((1,), 2)
