"""The peers grid: attention, positions, recurrent layers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from tests.nn.peer_cases import (
    Case,
    PerLibrary,
    booleans,
    each,
    from_key,
    grid,
    integers,
    over_dtypes,
    real,
    with_call,
    with_inputs,
    with_options,
)

# Before, JAX's attention did not take float16 on CPUs.
HALF_ATTENTION = "0.12.12"
ALL = {"kernel_init": from_key, "bias_init": from_key}

# ---------------------------------------------------------------------------- attention


def multi_head_attention():
    base = Case(
        "MultiHeadAttention", (2, 8), {**ALL, "decode": False}, (real(2, 5, 8),)
    )
    yield Case("MultiHeadAttention", (2, 8), {"decode": False}, base.inputs)
    for case in over_dtypes(base, ("float32",)):
        is_half = case.options["dtype"] == jnp.float16
        yield case.but(since=HALF_ATTENTION if is_half else "")
    yield base.but(inputs=(real(2, 5, 8, dtype="bfloat16"),))
    yield from with_options(
        base, grid(use_bias=(True, False), normalize_qk=(True, False))
    )
    yield from with_options(
        base,
        [
            {"qkv_features": 4, "out_features": 6},
            {"precision": "highest"},
            {"out_kernel_init": initializers.ones, "out_bias_init": initializers.ones},
            {"kernel_metadata": {"note": 1}, "bias_metadata": {"note": 2}},
            {"out_kernel_metadata": {"note": 3}, "out_bias_metadata": {"note": 4}},
            {"qkv_dot_general": jax.lax.dot_general},
            {"out_dot_general_cls": lambda: jax.lax.dot_general},
        ],
    )
    grouped = base.but(args=(4, 8), options={"num_kv_heads": 2})
    yield from with_options(grouped, [{}, {"normalize_qk": True}, {"num_kv_heads": 1}])
    yield base.but(inputs=(real(2, 5, 8), real(2, 3, 8)))
    yield base.but(inputs=(real(2, 5, 8), real(2, 3, 8), real(2, 3, 8)))
    yield base.but(options={"in_kv_features": 6}, inputs=(real(2, 5, 8), real(2, 3, 6)))
    yield from with_inputs(base, real(5, 8), real(2, 1, 5, 8))
    yield from with_call(base, _masks())
    yield from _attention_dropout(base)
    yield from _decoding(base.but(options={"decode": True}))


def _masks():
    shapes = (2, 2, 5, 5), (2, 1, 5, 5), (1, 1, 5, 5)
    yield from ({"mask": booleans(*shape)} for shape in shapes)
    yield {"is_causal": True}
    yield {"is_causal": True, "mask": booleans(2, 2, 5, 5)}


def _attention_dropout(base):
    base = base.but(options={"dropout_rate": 0.5})
    yield from with_call(base, each(deterministic=(True, False)))
    active = base.but(options={"deterministic": False})
    yield from with_options(active, each(broadcast_dropout=(True, False)))
    yield from with_call(active, list(_masks())[:2])
    yield active.but(streams=("params", "dropout"))
    for rngs in (
        PerLibrary(lambda library, rngs: rngs),
        PerLibrary(lambda library, rngs: rngs.dropout),
    ):
        yield active.but(options={"keep_rngs": False}, call={"rngs": rngs})
    yield active.but(options={"dtype": jnp.bfloat16})
    yield active.but(args=(4, 8), options={"num_kv_heads": 2})
    causal = active.but(call={"is_causal": True})
    yield causal
    yield causal.but(
        call={"mask": booleans(2, 1, 1, 5)},
        why_different="a mask that is broadcast can't be causal, too",
    )


def _decoding(base):
    base = base.but(inputs=(real(2, 1, 8),), calls=4, prepare=_init_cache)
    yield base
    yield base.but(options={"decode": None}, call={"decode": True})
    yield from with_options(base, each(normalize_qk=(True,), use_bias=(False,)))
    yield base.but(args=(4, 8), options={"num_kv_heads": 2})
    yield base.but(call={"mask": booleans(1, 1, 1, 4)})
    yield base.but(options={"dropout_rate": 0.5, "deterministic": False})
    half = base.but(options={"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16})
    yield half.but(prepare=_init_half_cache)
    yield half.but(why_different="a cache needs the dtype of the computation")


def _init_cache(layer):
    layer.init_cache((2, 4, 8))


def _init_half_cache(layer):
    layer.init_cache((2, 4, 8), dtype=layer.dtype)


def dot_product_attention():
    heads = real(2, 5, 4, 6)
    base = Case("dot_product_attention", inputs=(heads, heads, heads))
    yield base
    for name in ("dot_product_attention", "nn.attention.dot_product_attention_weights"):
        count = 2 if name.endswith("weights") else 3
        case = Case(name, inputs=(heads,) * count)
        yield from with_call(case, each(dtype=(jnp.float32, jnp.bfloat16)))
        for dtype in ("bfloat16", "float16"):
            typed = case.but(inputs=(heads._replace(dtype=dtype),) * count)
            yield typed.but(since=HALF_ATTENTION if dtype == "float16" else "")
            yield typed.but(call={"dtype": jnp.float32})
        yield from with_call(
            case,
            [
                {"is_causal": True},
                {"bias": real(2, 4, 5, 5)},
                {"bias": real(1, 4, 5, 5), "is_causal": True},
                {"mask": booleans(2, 4, 5, 5)},
                {"mask": booleans(1, 1, 5, 5)},
                {"mask": real(2, 4, 5, 5, dtype="float32")},
                {"bias": real(2, 4, 5, 5), "mask": booleans(2, 4, 5, 5)},
            ],
        )
        grouped = (heads, real(2, 5, 2, 6), real(2, 5, 2, 6))[:count]
        yield case.but(inputs=grouped)
        yield case.but(inputs=(real(5, 4, 6),) * count)
        yield case.but(inputs=(real(2, 1, 5, 4, 6),) * count)
        yield case.but(inputs=(heads, real(2, 3, 4, 6), real(2, 3, 4, 6))[:count])
        key = PerLibrary(lambda library, rngs: rngs.dropout())
        dropping = case.but(call={"dropout_rate": 0.5, "dropout_rng": key})
        yield from with_call(
            dropping, grid(broadcast_dropout=(True, False), deterministic=(True, False))
        )
        yield dropping.but(inputs=grouped)
    yield base.but(
        inputs=(heads, heads, real(2, 5, 4, 3)),
        why_different="values must be as deep as keys",
    )


def masks():
    base = Case("make_attention_mask", inputs=(booleans(2, 5), booleans(2, 3)))
    positions = (integers(2, 5), integers(2, 3))
    yield base
    yield from with_call(
        base, each(dtype=(jnp.bfloat16, bool), extra_batch_dims=(1, 2))
    )
    yield base.but(inputs=positions, call={"pairwise_fn": jnp.greater_equal})
    yield base.but(inputs=(booleans(5), booleans(3)))
    causal = Case("make_causal_mask", inputs=(real(2, 5),))
    yield causal
    yield from with_call(
        causal, each(dtype=(jnp.bfloat16, bool), extra_batch_dims=(1,))
    )
    both = booleans(2, 1, 5, 5)
    combined = Case("combine_masks", inputs=(both, both))
    yield combined
    yield combined.but(call={"dtype": bool})
    yield from with_inputs(combined, (both,), (None, both), (both, None, both), (None,))


def rope():
    base = Case("RoPE", inputs=(real(2, 5, 6),))
    yield base
    yield from with_options(
        base,
        [{"theta": 100.0}, {"embedding_size": 6, "max_seq_len": 5}]
        + [{"embedding_size": 6, "max_seq_len": 9, "theta": 50.0}],
    )
    yield from with_inputs(base, real(5, 6), real(2, 1, 5, 6))
    yield base.but(call={"input_positions": np.arange(5) * 2})
    heads = real(2, 5, 4, 6)
    make = PerLibrary(lambda library, rngs: library.RoPE())
    rotated = Case(
        "dot_product_attention_with_rope", inputs=(heads,) * 3, call={"rope": make}
    )
    yield rotated
    yield rotated.but(call={"is_causal": True})
    yield rotated.but(
        call={"input_positions": np.arange(5)},
        why_different="positions are mapped over the wrong axis",
    )
    yield base.but(
        inputs=(real(2, 5, 6, dtype="bfloat16"),), why_different="bfloat16 is upcast"
    )


# --------------------------------------------------------------------------- recurrence

CELL_INITS = {**ALL, "recurrent_kernel_init": from_key}


def _cell(name, carries):
    """The cases that all cells have."""

    def cases():
        carry = (real(2, 4),) * carries if carries > 1 else real(2, 4)
        base = Case(name, (3, 4), CELL_INITS, (carry, real(2, 3)))
        yield Case(name, (3, 4), inputs=base.inputs)
        yield from over_dtypes(base, ("float32",))
        yield base.but(inputs=(carry, real(2, 3, dtype="bfloat16")))
        functions = {"gate_fn": jax.nn.hard_sigmoid, "activation_fn": jax.nn.relu}
        if name == "SimpleCell":
            functions = {"activation_fn": jax.nn.relu, "residual": True}
        yield from with_options(base, [{key: f} for key, f in functions.items()])
        yield base.but(options={"kernel_metadata": {"note": 1}})
        yield base.but(options={"recurrent_kernel_metadata": {"note": 2}})
        yield base.but(options={"bias_metadata": {"note": 3}})
        yield base.but(options={"keep_rngs": True})
        yield base.but(options={"keep_rngs": True}, streams=("params", "carry"))
        first = base.but(inputs=((2, 3),), method="initialize_carry")
        rngs = PerLibrary(lambda library, rngs: rngs)
        yield first.but(call={"rngs": rngs})
        yield first.but(call={"rngs": rngs, "carry_init": initializers.normal()})
        yield first.but(
            options={"keep_rngs": True, "carry_init": initializers.normal()}
        )
        yield first.but(options={"param_dtype": jnp.bfloat16}, call={"rngs": rngs})

    return cases


CELLS = "LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell"


def _make_cell(name, **options):
    def make(library, rngs):
        rngs = library.Rngs(5, dropout=6)
        return getattr(library, name)(3, 4, rngs=rngs, **{**CELL_INITS, **options})

    make.__name__ = name
    return PerLibrary(make)


def rnn():
    # Outside of `jit` each scan is compiled anew: few calls, and of a small cell.
    base = Case("RNN", (_make_cell("SimpleCell"),), inputs=(real(2, 5, 3),), calls=1)
    yield from (base.but(args=(_make_cell(name),), calls=2) for name in CELLS)
    everything = {"time_major": True, "return_carry": True, "reverse": True}
    yield from with_options(
        base,
        [
            {"time_major": True},
            {"return_carry": True},
            {"reverse": True},
            {"reverse": True, "keep_order": True},
            everything,
            {"keep_order": True},
        ],
    )
    yield base.but(call=everything)
    padded = base.but(call={"seq_lengths": np.array([2, 5])})
    yield from with_call(
        padded,
        [
            {},
            {"return_carry": True},
            {"reverse": True},
            {"reverse": True, "keep_order": True, "return_carry": True},
        ],
    )
    yield padded.but(args=(_make_cell("LSTMCell"),), call={"return_carry": True})
    yield from with_options(base, each(unroll=(2, 5)))
    rngs = PerLibrary(lambda library, rngs: rngs)
    yield base.but(options={"rngs": rngs})
    yield base.but(call={"rngs": rngs})
    yield base.but(call={"initial_carry": real(2, 4)}, options={"rngs": False})
    yield base.but(call={"initial_carry": real(2, 4), "return_carry": True})
    yield from with_inputs(base, real(5, 3), real(2, 1, 5, 3))
    yield padded.but(
        call={"seq_lengths": np.array([0, 5]), "return_carry": True},
        why_different="a length of zero gives the carry after the last padded step",
    )


def bidirectional():
    def both(name):
        def make(library, rngs):
            return library.RNN(_make_cell(name).make(library, rngs))

        make.__name__ = f"RNN({name})"
        return PerLibrary(make)

    base = Case(
        "Bidirectional",
        (both("SimpleCell"), both("SimpleCell")),
        inputs=(real(2, 5, 3),),
        calls=1,
    )
    yield base.but(args=(both("OptimizedLSTMCell"), both("GRUCell")), calls=2)
    yield from with_options(base, each(time_major=(True,), return_carry=(True,)))
    yield from with_options(base, each(merge_fn=(jnp.add,)))
    yield base.but(call={"seq_lengths": np.array([2, 5]), "return_carry": True})
    yield base.but(call={"initial_carry": (real(2, 4), real(2, 4))})
    yield base.but(call={"rngs": PerLibrary(lambda library, rngs: rngs)})


TABLES = {
    "MultiHeadAttention": multi_head_attention,
    "dot_product_attention": dot_product_attention,
    "masks": masks,
    "RoPE": rope,
    "LSTMCell": _cell("LSTMCell", 2),
    "OptimizedLSTMCell": _cell("OptimizedLSTMCell", 2),
    "GRUCell": _cell("GRUCell", 1),
    "SimpleCell": _cell("SimpleCell", 1),
    "RNN": rnn,
    "Bidirectional": bidirectional,
}
