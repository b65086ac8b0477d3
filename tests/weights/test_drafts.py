"""Drafts of tables for the files of encoder-decoders and mixtures of Hugging Face."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

FILES = json.loads((pathlib.Path(__file__).parent / "names_of_hf.json").read_text())


def weights_of(family):
    """The tensors of a family, from the recorded names and shapes."""
    shapes = {}
    for name, shape in FILES[family].items():
        shapes |= {name.replace("{i}", str(i)): shape for i in range(2)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def linear(ins, outs, bias=False):
    return nnx.Linear(ins, outs, use_bias=bias, rngs=nnx.Rngs(0))


def attention(bias=False, key_bias=None, kv=16, **parts):
    key_bias = bias if key_bias is None else key_bias
    return nnx.Dict(
        query=linear(16, 16, bias),
        key=linear(16, kv, key_bias),
        value=linear(16, kv, bias),
        out=linear(16, 16, bias),
        **parts,
    )


def rms(size=16):
    return nnx.RMSNorm(size, rngs=nnx.Rngs(0))


def layer_norm():
    return nnx.LayerNorm(16, rngs=nnx.Rngs(0))


def embed(rows, size=16):
    return nnx.Embed(rows, size, rngs=nnx.Rngs(0))


def zeros(*shape):
    return nnx.Param(jnp.zeros(shape))


def block(mlp, norm, is_cross=False, **options):
    parts = {"attention": attention(**options), "attention_norm": norm()}
    if is_cross:
        parts |= {"cross_attention": attention(**options)}
        parts |= {"cross_attention_norm": norm()}
    return nnx.Dict(**parts, mlp=mlp(), mlp_norm=norm())


def blocks(*args, **options):
    return nnx.List([block(*args, **options) for _ in range(2)])


def t5():
    def mlp():
        return nnx.Dict(gate=linear(16, 24), up=linear(16, 24), down=linear(24, 16))

    def part(is_cross):
        layers = blocks(mlp, rms, is_cross)
        return nnx.Dict(blocks=layers, norm=rms(), relative_bias=embed(32, 4))

    return nnx.Dict(
        embed=embed(50), encoder=part(False), decoder=part(True), head=linear(16, 50)
    )


def whisper():
    def mlp():
        return nnx.Dict(up=linear(16, 24, True), down=linear(24, 16, True))

    def part(is_cross, length, **parts):
        biases = {"bias": True, "key_bias": False}
        layers = blocks(mlp, layer_norm, is_cross, **biases)
        return nnx.Dict(blocks=layers, norm=layer_norm(), pos=embed(length), **parts)

    convs = {
        f"conv{i}": nnx.Conv(ins, 16, 3, rngs=nnx.Rngs(0))
        for i, ins in ((1, 8), (2, 16))
    }
    return nnx.Dict(
        encoder=part(False, 12, **convs), decoder=part(True, 10, embed=embed(50))
    )


def mixture(width, bias=False, **options):
    """Experts whose parameters are stacked, as ``[experts, inputs, outputs]``."""

    def grouped(ins, outs):
        biases = {"bias": zeros(3, outs)} if bias else {}
        return nnx.Dict(kernel=zeros(3, ins, outs), **biases)

    def mlp():
        sizes = {"gate": (16, width), "up": (16, width), "down": (width, 16)}
        experts = nnx.Dict({name: grouped(*size) for name, size in sizes.items()})
        biases = {"bias": zeros(3)} if bias else {}
        router = nnx.Dict(kernel=zeros(16, 3), **biases)
        return nnx.Dict(router=router, experts=experts)

    layers = blocks(mlp, rms, kv=8, bias=bias, **options)
    return nnx.Dict(embed=embed(50), blocks=layers, norm=rms(), head=linear(16, 50))


def gpt_oss():
    model = mixture(24, bias=True)
    for layer in model.blocks:
        layer.attention.sinks = zeros(4)
    return model


def qwen3_moe():
    model = mixture(12)
    for layer in model.blocks:
        layer.attention.query_norm, layer.attention.key_norm = rms(4), rms(4)
    return model


GATE_UP = [f"blocks[{{i}}].mlp.experts.{x}.kernel" for x in ("gate", "up")]
DECODER = "decoder.block.{i}.layer"

# The names that the drafted table leaves, which repeat others, and lines of it.
CASES = {
    "t5": (
        t5,
        {"shared.weight", "decoder.embed_tokens.weight"},
        {
            f"{DECODER}.0.layer_norm": "decoder.blocks[{i}].attention_norm",
            f"{DECODER}.1.layer_norm": "decoder.blocks[{i}].cross_attention_norm",
            f"{DECODER}.1.EncDecAttention.o": "decoder.blocks[{i}].cross_attention.out",
            f"{DECODER}.2.layer_norm": "decoder.blocks[{i}].mlp_norm",
            f"{DECODER}.2.DenseReluDense.wi_0": "decoder.blocks[{i}].mlp.gate",
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": (
                "encoder.relative_bias"
            ),
        },
    ),
    "whisper": (
        whisper,
        {"proj_out.weight"},
        {
            "model.decoder.layers.{i}.encoder_attn.k_proj": (
                "decoder.blocks[{i}].cross_attention.key"
            ),
            "model.decoder.layers.{i}.final_layer_norm": "decoder.blocks[{i}].mlp_norm",
            "model.encoder.embed_positions": "encoder.pos",
        },
    ),
    "gpt_oss": (
        gpt_oss,
        set(),
        {
            "model.layers.{i}.mlp.experts.gate_up_proj": (
                GATE_UP,
                "e d (o part) -> e d o",
            ),
            "model.layers.{i}.mlp.experts.down_proj": (
                "blocks[{i}].mlp.experts.down.kernel"
            ),
            "model.layers.{i}.mlp.router.weight": (
                "blocks[{i}].mlp.router.kernel",
                "o i -> i o",
            ),
        },
    ),
    "mixtral": (
        lambda: mixture(24),
        set(),
        {"model.layers.{i}.mlp.experts.gate_up_proj": (GATE_UP, "e +o d -> e d o")},
    ),
    "qwen3_moe": (
        qwen3_moe,
        set(),
        {
            "model.layers.{i}.mlp.experts.down_proj": (
                "blocks[{i}].mlp.experts.down.kernel",
                "e o i -> e i o",
            )
        },
    ),
}


@pytest.mark.parametrize("family", CASES)
def test_tables_of_families_are_found_and_load(family):
    make, left, lines = CASES[family]
    weights, model = weights_of(family), make()
    draft = nnx.weights.draft(weights, model)
    assert {*draft.names} == left and not draft.paths
    assert lines.items() <= draft.entries.items()
    table = eval(str(draft), {"nnx": nnx})  # what it prints is the table
    for name in left:
        del weights[name]
    nnx.weights.load(weights, model, table)


def test_experts_of_their_own_in_the_file_are_stacked():
    weights = weights_of("mixtral")
    for name in [*weights]:
        if ".mlp.experts." in name:
            stacked = weights.pop(name)
            halves = {"down": ["w2"]}.get(name.split(".")[-1][:4], ["w1", "w3"])
            for e, x in enumerate(stacked):
                parts = zip(halves, np.split(x, len(halves)), strict=True)
                stem = name.rpartition(".")[0]
                weights |= {f"{stem}.{e}.{w}.weight": part for w, part in parts}
    model = mixture(24)
    draft = nnx.weights.draft(weights, model)
    stem, path = "model.layers.{i}.mlp.experts.{j}", "blocks[{i}].mlp.experts"
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    assert {
        f"{stem}.{w}.weight": (f"{path}.{part}.kernel", "o i -> i o")
        for w, part in names.items()
    }.items() <= draft.entries.items()
    nnx.weights.load(weights, model, nnx.weights.Mapping(draft.entries))


def test_the_order_of_gate_and_up_is_in_doubt():
    draft = nnx.weights.draft(weights_of("gpt_oss"), gpt_oss())
    name = "model.layers.{i}.mlp.experts.gate_up_proj"
    assert draft.doubtful[name] == [(GATE_UP, "e d +o -> e d o")]
    assert "'e d (o part) -> e d o'),  # or ([" in str(draft)


def test_arrays_of_layers_have_no_layout_of_their_own():
    """A layer that misses one tensor is listed, and no line leads to half of it."""
    model = nnx.Dict(a=linear(2, 3, bias=True))
    draft = nnx.weights.draft({"a.weight": np.zeros((2, 3))}, model)
    assert not draft.entries and draft.paths == {"a.bias": (3,), "a.weight": (3, 2)}
