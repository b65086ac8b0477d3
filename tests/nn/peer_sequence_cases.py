"""The peers grid: attention, positions, recurrent layers; layers around others."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from tests.nn.peer_cases import (
    Case,
    PerLibrary,
    booleans,
    from_key,
    over_dtypes,
    real,
    with_call,
    with_options,
)

ALL = {"kernel_init": from_key, "bias_init": from_key}
BF16 = jnp.bfloat16
own_rngs = PerLibrary(lambda library, rngs: rngs)

# ---------------------------------------------------------------------------- attention


def multi_head_attention():
    options = {**ALL, "decode": False}
    base = Case("MultiHeadAttention", (2, 8), options, (real(2, 5, 8),))
    yield base
    yield base.cast("bfloat16").but(options={"param_dtype": BF16})
    yield base.but(options={"use_bias": False, "normalize_qk": True, "dtype": BF16})
    first = {
        "out_kernel_init": initializers.ones,
        "out_bias_init": initializers.ones,
        "kernel_metadata": {"note": 1},
        "bias_metadata": {"note": 2},
        "qkv_dot_general": jax.lax.dot_general,
    }
    yield base.but(options=first).of(mask=booleans(2, 2, 5, 5), is_causal=True)
    other = {
        "out_kernel_metadata": {"note": 3},
        "out_bias_metadata": {"note": 4},
        "out_dot_general_cls": lambda: jax.lax.dot_general,
        "qkv_features": 4,
        "out_features": 6,
        "in_kv_features": 6,
        "num_kv_heads": 1,
        "precision": "highest",
    }
    yield base.but(options=other).of(real(2, 5, 8), real(2, 3, 6), real(2, 3, 6))

    active = base.but(options={"dropout_rate": 0.5, "deterministic": False})
    yield active.but(calls=2, streams=("params", "dropout"))
    unkept = active.but(options={"broadcast_dropout": False, "keep_rngs": False})
    stream = PerLibrary(lambda library, rngs: rngs.dropout)
    yield from (unkept.of(rngs=rngs) for rngs in (own_rngs, stream))
    yield active.of(is_causal=True, mask=booleans(2, 1, 1, 5)).but(
        why_different="a mask that is broadcast can't be causal, too"
    )

    decoding = base.of(real(2, 1, 8), decode=True, mask=booleans(1, 1, 1, 4))
    decoding = decoding.but(calls=2, prepare=lambda layer: layer.init_cache((2, 4, 8)))
    yield decoding
    yield decoding.but(
        options={"dtype": BF16, "param_dtype": BF16},
        why_different="a cache needs the dtype of the computation",
    )


def dot_product_attention():
    heads, few = real(2, 5, 4, 6), real(2, 3, 2, 6)
    key = PerLibrary(lambda library, rngs: rngs.dropout())
    dropout = {"dropout_rate": 0.5, "dropout_rng": key}
    base = Case("dot_product_attention", inputs=(heads,) * 3)
    yield base.cast("bfloat16")
    yield base.of(is_causal=True, bias=real(1, 4, 5, 5), dtype=BF16)
    yield base.of(mask=booleans(1, 1, 5, 5), broadcast_dropout=False, **dropout)
    weights = Case("nn.attention.dot_product_attention_weights", inputs=(heads,) * 2)
    yield weights.cast("bfloat16")
    yield weights.of(heads, few, **dropout)
    deeper = base.of(heads, heads, real(2, 5, 4, 3))
    yield deeper.but(why_different="values must be as deep as keys")


def rope():
    base = Case("RoPE", inputs=(real(2, 5, 6),))
    table = {"embedding_size": 6, "max_seq_len": 9, "theta": 100.0}
    yield from with_options(base, {}, table)
    yield base.of(input_positions=np.arange(5) * 2)
    make = PerLibrary(lambda library, rngs: library.RoPE())
    rotated = Case(
        "dot_product_attention_with_rope",
        inputs=(real(2, 5, 4, 6),) * 3,
        call={"rope": make},
    )
    yield rotated.of(is_causal=True)
    yield rotated.of(input_positions=np.arange(5)).but(
        why_different="positions are mapped over the wrong axis"
    )
    yield base.cast("bfloat16").but(why_different="bfloat16 is upcast")


# --------------------------------------------------------------------------- recurrence

CELL_INITS = {**ALL, "recurrent_kernel_init": from_key}
NOTED = {
    "kernel_metadata": {"note": 1},
    "recurrent_kernel_metadata": {"note": 2},
    "bias_metadata": {"note": 3},
}


def _cell(name, carries):
    """The cases that all cells have."""

    def cases():
        carry = (real(2, 4),) * carries if carries > 1 else real(2, 4)
        base = Case(name, (3, 4), CELL_INITS, (carry, real(2, 3)))
        yield base
        functions = {"gate_fn": jax.nn.hard_sigmoid, "activation_fn": jax.nn.relu}
        if name == "SimpleCell":
            functions = {"activation_fn": jax.nn.relu, "residual": True}
        kept = base.but(options={"keep_rngs": True}, streams=("params", "carry"))
        yield kept
        yield from with_options(base, {**functions, **NOTED}, {"dtype": BF16})
        half = base.but(options={"param_dtype": BF16})
        yield half
        first = {"method": "initialize_carry", "inputs": ()}
        normal, shape = initializers.normal(), {"input_shape": (2, 3)}
        yield half.but(**first, call={"rngs": own_rngs, **shape})
        yield base.but(**first, call={"rngs": own_rngs, "carry_init": normal, **shape})
        yield kept.but(**first, options={"carry_init": normal}, call=shape)

    return cases


def _make_cell(name):
    def make(library, rngs):
        rngs = library.Rngs(5, dropout=6)
        return getattr(library, name)(3, 4, rngs=rngs, **CELL_INITS)

    return PerLibrary(make)


def rnn():
    # Outside of `jit` each scan is compiled anew: few calls, and of a small cell.
    base = Case("RNN", (_make_cell("SimpleCell"),), inputs=(real(2, 5, 3),))
    yield base
    everything = {"time_major": True, "return_carry": True, "reverse": True}
    yield base.but(options={**everything, "unroll": 2})
    padded = base.of(seq_lengths=np.array([2, 5]))
    yield from with_call(
        padded, {"reverse": True}, {"reverse": True, "keep_order": True}
    )
    yield padded.but(_make_cell("OptimizedLSTMCell")).of(return_carry=True)
    yield base.but(options={"rngs": own_rngs}).of(real(2, 1, 5, 3))
    yield base.but(options={"rngs": False}).of(initial_carry=real(2, 4))
    yield padded.of(seq_lengths=np.array([0, 5]), return_carry=True).but(
        why_different="a length of zero gives the carry after the last padded step"
    )


def bidirectional():
    def network(library, rngs):
        return library.RNN(_make_cell("SimpleCell").make(library, rngs))

    networks = PerLibrary(network), PerLibrary(network)
    base = Case("Bidirectional", networks, inputs=(real(2, 5, 3),))
    yield base
    yield base.but(options={"time_major": True, "merge_fn": jnp.add})
    yield base.of(initial_carry=(real(2, 4), real(2, 4)), rngs=own_rngs)


# ---------------------------------------------------------------- layers around others

LORA = {"a_initializer": from_key, "b_initializer": from_key}


def inner(name, *args, **options):
    """A layer inside, with the Rngs of the one around it."""

    def make(library, rngs):
        return getattr(library, name)(*args, **ALL, **options, rngs=rngs)

    return PerLibrary(make)


def lora():
    base = Case("LoRA", (6, 2, 5), LORA, (real(2, 6),))
    yield base
    yield from over_dtypes(base)
    param = PerLibrary(lambda library, rngs: library.Param)
    yield from with_options(
        base,
        {"a_metadata": {"note": 1}, "b_metadata": {"note": 2}},
        {"lora_param_type": param},
        {"base_module": inner("Linear", 6, 5), "dtype": BF16},
    )


def lora_linear():
    base = Case("LoRALinear", (6, 5), {**ALL, **LORA, "lora_rank": 2}, (real(2, 6),))
    yield base
    yield from with_options(
        base,
        {"dtype": BF16, "lora_dtype": BF16, "lora_param_dtype": jnp.float16},
        {"param_dtype": BF16, "use_bias": False, "a_metadata": {"note": 1}},
        {"lora_dtype": BF16, "kernel_metadata": {"note": 2}},
    )
    yield base.but(options={"dtype": BF16}).but(
        why_different="a half dtype does not reach the low-rank part"
    )


def spectral_norm():
    base = Case("SpectralNorm", (inner("Linear", 6, 5),), inputs=(real(2, 6),), calls=2)
    yield from with_options(
        base, {}, {"n_steps": 0}, {"n_steps": 2, "epsilon": 1e-3}, {"dtype": BF16}
    )
    yield base.of(update_stats=False)
    yield base.but(options={"param_dtype": BF16})
    yield base.but(inner("Linear", 6, 5, param_dtype=BF16))


def weight_norm():
    base = Case("WeightNorm", (inner("Linear", 6, 5),), inputs=(real(2, 6),), calls=2)
    rounded = base.but(options={"dtype": BF16})
    yield rounded.but(calls=1)
    by_path = PerLibrary(lambda library, rngs: library.PathContains("bias"))
    yield from with_options(
        base,
        {},
        {"feature_axes": None, "use_scale": False},
        {"feature_axes": (0, 1), "epsilon": 1e-3},
        {"scale_init": initializers.constant(2.0)},
        {"variable_filter": by_path},
    )
    for case, why in (
        (rounded, "norms of half-precision weights are half precision"),
        (
            base.but(options={"scale_init": initializers.normal()}),
            "random initializers get a stream for a key",
        ),
        (base.but(options={"param_dtype": BF16}), "scales ignore their dtype"),
    ):
        yield case.but(why_different=why)


TABLES = {
    "MultiHeadAttention": multi_head_attention,
    "dot_product_attention": dot_product_attention,
    "RoPE": rope,
    "LSTMCell": _cell("LSTMCell", 2),
    "OptimizedLSTMCell": _cell("OptimizedLSTMCell", 2),
    "GRUCell": _cell("GRUCell", 1),
    "SimpleCell": _cell("SimpleCell", 1),
    "RNN": rnn,
    "Bidirectional": bidirectional,
    "LoRA": lora,
    "LoRALinear": lora_linear,
    "SpectralNorm": spectral_norm,
    "WeightNorm": weight_norm,
}
