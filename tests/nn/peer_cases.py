"""What a case of the peers grid is, and how tables of cases are written.

A case is a layer or a function of the public namespace, how it is made and what it is
called with. It is written down without either library: what belongs to one (an Rngs, a
Module inside a Module) stands there as a `PerLibrary`, an array as a `Spec`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers


class Spec(NamedTuple):
    """An array to be drawn, the same for both libraries."""

    shape: tuple[int, ...]
    dtype: str


def real(*shape: int, dtype: str = "float32") -> Spec:
    return Spec(shape, dtype)


def integers(*shape: int, dtype: str = "int32") -> Spec:
    return Spec(shape, dtype)


def booleans(*shape: int) -> Spec:
    return Spec(shape, "bool")


class PerLibrary(NamedTuple):
    """A value that each library makes for itself.

    Attributes:
        make: Called with the library and the Rngs of the constructor or of the call.
    """

    make: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the grid.

    Attributes:
        name: A class or function of the namespace: ``"nn.linear.Linear"``.
        args: Positional arguments of the constructor.
        options: Keyword arguments of the constructor.
        inputs: Positional arguments of the call; other numbers in each call.
        call: Keyword arguments of the call.
        method: What is called: the name of a method, or a function that takes the
            layer and the arguments of the call.
        prepare: Called with the layer before the first call.
        calls: How often to call.
        streams: The names of the streams in the Rngs; none: a default one.
        why_different: Where the peer is wrong, so that results must differ; empty: they
            must agree.
    """

    name: str
    args: tuple = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple = ()
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | Callable = "__call__"
    prepare: Callable[[Any], Any] | None = None
    calls: int = 1
    streams: tuple[str, ...] = ()
    why_different: str = ""

    def but(self, *args: Any, **changes: Any) -> "Case":
        """This case with other fields; options and call are added to those it has."""
        changes["args"] = args or self.args
        for field in ("options", "call"):
            changes[field] = {**getattr(self, field), **changes.get(field, {})}
        return dataclasses.replace(self, **changes)

    def of(self, *inputs: Any, **call: Any) -> "Case":
        """This case called otherwise."""
        return self.but(inputs=inputs or self.inputs, call=call)

    def cast(self, dtype: str) -> "Case":
        """This case called with arrays of another dtype."""
        return self.of(*(spec._replace(dtype=dtype) for spec in self.inputs))


def with_options(base: Case, *rows: Mapping[str, Any]) -> Iterator[Case]:
    return (base.but(options=row) for row in rows)


def with_call(base: Case, *rows: Mapping[str, Any]) -> Iterator[Case]:
    return (base.but(call=row) for row in rows)


def over_dtypes(base: Case) -> Iterator[Case]:
    """Half precision of the computation, and of Params and inputs."""
    yield base.but(options={"dtype": jnp.bfloat16})
    yield base.cast("bfloat16").but(options={"param_dtype": jnp.bfloat16})


# ------------------------------------------------------------------- values from a case


def resolve(value: Any, library: Any, rngs: Any, seed: int) -> Any:
    """Puts arrays for each `Spec` and a library's own values for each `PerLibrary`."""
    if isinstance(value, Spec):
        return draw(value, seed)
    if isinstance(value, PerLibrary):
        return value.make(library, rngs)
    if type(value) in (tuple, list):
        parts = enumerate(value)
        return type(value)(resolve(x, library, rngs, seed + n) for n, x in parts)
    return value


@functools.cache
def draw(spec: Spec, seed: int) -> jax.Array:
    """Draws an array: normal numbers, integers below five, mostly true booleans."""
    generator = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return jnp.asarray(generator.random(spec.shape) < 0.7)
    if jnp.issubdtype(spec.dtype, jnp.integer):
        return jnp.asarray(generator.integers(0, 5, spec.shape), spec.dtype)
    return jnp.asarray(generator.standard_normal(spec.shape), spec.dtype)


def from_key(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An initializer: normal numbers that depend on the key; it compiles nothing."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(generator.standard_normal(shape), dtype)


# ------------------------------------------------------------------------------- layers

# Not the default, zeros: a bias that is left out would not show.
BIAS = {"bias_init": from_key}
SCALE_AND_BIAS = {**BIAS, "scale_init": from_key}
# For many shapes: each that `lecun_normal` is compiled for costs a quarter of a second.
ALL = {**BIAS, "kernel_init": from_key}
NOTES = {"kernel_metadata": {"note": 1}, "bias_metadata": {"note": 2}}


def unpromoted(arrays, **options):
    return arrays


def with_kernel(base):
    """The cases that all layers with a kernel have."""
    yield base
    yield base.cast("bfloat16").but(options={"param_dtype": jnp.bfloat16})
    yield base.cast("int32").but(options={"dtype": jnp.float16})
    yield from with_options(
        base,
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
        {"precision": "highest", **NOTES},
        {"promote_dtype": unpromoted},
    )


def linear():
    base = Case("Linear", (6, 5), ALL, (real(2, 7, 6),))
    yield from with_kernel(base)
    yield base.but(options={"use_bias": False, "dtype": jnp.complex64})


def linear_general():
    base = Case("LinearGeneral", (6, 5), ALL, (real(2, 7, 6),))
    yield from with_kernel(base)
    yield base.but((7, 6), (4, 5), options={"axis": (-2, -1)})
    yield base.but(7, 5, options={"axis": 1, "batch_axis": {0: 2}, "use_bias": False})


def einsum():
    base = Case("Einsum", ("...a,ab->...b", (6, 5), (5,)), ALL, (real(2, 7, 6),))
    yield from with_kernel(base)
    yield base.of(einsum_str="n t a, a b -> t n b")
    yield base.but("nta,tab->ntb", (7, 6, 5), (7, 5))


def conv():
    base = Case("Conv", (6, 4, 3), ALL, (real(2, 5, 6),))
    yield from with_kernel(base)
    grouped = {"use_bias": False, "feature_group_count": 2}
    causal = {"padding": "CAUSAL", "strides": 2, "kernel_dilation": 2}
    yield from with_options(base, grouped, causal, {"mask": booleans(3, 6, 4)})
    plane = base.but(3, 4, [3, 2]).of(real(2, 5, 6, 3))
    lower = {"padding": "SAME_LOWER", "strides": (2, 1), "kernel_dilation": (1, 2)}
    yield from with_options(plane, lower, {"padding": [1, (0, 2)]})
    refused = "jax.lax refuses named paddings of dilated inputs"
    yield plane.but(why_different=refused, options={"input_dilation": 2})
    yield plane.but(options={"padding": [[0, 1], 2]}, why_different="a pair is a tuple")
    yield base.but(6, 4, np.int64(3), why_different="a size is a Python int")


def conv_transpose():
    base = Case("ConvTranspose", (6, 4, 3), ALL, (real(2, 5, 6),))
    yield from with_kernel(base)
    yield base.but(options={"use_bias": False, "mask": booleans(3, 6, 4)})
    plane = base.but(3, 4, (3, 2)).of(real(2, 5, 6, 3))
    circular = {"padding": "CIRCULAR", "strides": (2, 1), "kernel_dilation": 2}
    valid = {"padding": "VALID", "strides": 2, "transpose_kernel": True}
    yield from with_options(plane, circular, valid)


def embed():
    base = Case("Embed", (7, 6), inputs=(integers(2, 5),))
    yield from with_options(
        base,
        {},
        {"param_dtype": jnp.bfloat16, "embedding_metadata": {"note": 1}},
        {"dtype": jnp.float16, "embedding_init": initializers.ones},
    )
    outside = np.array([-1, -7, 6, 7, -8, 100])
    yield from map(base.of, (integers(2, 5, dtype="uint8"), integers(), outside))
    yield base.but(1, 6)
    refused = base.but(1, 6, why_different="a single row needs an axis of inputs")
    yield refused.of(integers())
    attend = base.but(method="attend", inputs=(real(2, 3, 6),))
    yield attend
    yield from over_dtypes(attend)


def prelu():
    base = Case("PReLU", inputs=(real(3, 4),))
    yield base.but(options={"negative_slope_metadata": {"note": 1}})
    yield from over_dtypes(base.but(0.3))


# --------------------------------------------------------------------- normalization


def batch_norm():
    base = Case("BatchNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),), calls=2)
    yield from _norms(base, booleans(4, 1, 1))
    yield base.but(3, options={"axis": -2, "momentum": 0.5}).of(mask=booleans(4, 1, 6))
    yield base.but(prepare=_train_once_then_evaluate)
    yield from (base.of(use_running_average=x) for x in (True, False))


def _train_once_then_evaluate(layer):
    layer(np.linspace(0, 4, 4 * layer.num_features, dtype="f4").reshape(4, -1))
    layer.eval()


def _norms(base, mask):
    """The cases that all norms have, some of which know no bias."""
    has_bias = "bias_init" in base.options
    yield base
    yield from over_dtypes(base)
    no_bias = {"use_bias": False} if has_bias else {}
    noted = {"bias_metadata": {"note": 1}} if has_bias else {}
    slow = {"use_fast_variance": False, "promote_dtype": unpromoted}
    yield base.but(options={"use_scale": False, **no_bias})
    yield base.but(options={"epsilon": 1e-2, "scale_metadata": {"note": 2}, **noted})
    yield base.of(mask=mask)
    yield base.of(mask=mask).but(options=slow)


def layer_norm():
    base = Case("LayerNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(1, 1, 6))
    yield from _over_features(base)


def rms_norm():
    base = Case("RMSNorm", (6,), {"scale_init": from_key}, (real(4, 3, 6),))
    yield from _norms(base, booleans(1, 1, 6))
    yield from _over_features(base)


def _over_features(base):
    yield base.but(18, options={"feature_axes": (-2, -1)})
    if base.name == "RMSNorm":
        yield base.of(real(4, 3, 6), booleans(4, 3, 6))
    else:
        yield _averaged_over_a_mapped_axis(base)


def instance_norm():
    base = Case("InstanceNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(1, 3, 1))
    yield base.but(18, options={"feature_axes": (1, 2)})


def group_norm():
    base = Case("GroupNorm", (6, 3), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(4, 1, 6))
    yield base.but(6, None, options={"group_size": 2})
    yield base.but(options={"reduction_axes": (-2, -1)})
    mixed = base.but(why_different="statistics of kept axes go to the wrong groups")
    yield mixed.but(options={"reduction_axes": (-1,)})
    no_batch = base.but(why_different="axis 0 is taken for one that is never reduced")
    yield no_batch.but(options={"reduction_axes": (0, 1, 2)})
    per_position = base.of(mask=booleans(4, 3, 1))
    yield per_position.but(why_different="a mask needs one entry per channel")


def _averaged_over_a_mapped_axis(base):
    def call(layer, x):
        return jax.vmap(layer, axis_name="i")(x)

    return base.but(options={"axis_name": "i"}, inputs=(real(2, 4, 3, 6),), method=call)


def dropout():
    make_rngs = PerLibrary(lambda library, rngs: library.Rngs(dropout=rngs()))
    make_stream = PerLibrary(lambda library, rngs: rngs.fork()["dropout"])
    key = PerLibrary(lambda library, rngs: rngs())
    base = Case("Dropout", (0.5,), inputs=(real(4, 3, 6),), calls=2)
    yield from (base.but(rate).cast("bfloat16") for rate in (0, 0.1, 1.0))
    yield from with_options(
        base,
        {"broadcast_dims": (0,)},
        {"broadcast_dims": (-1, -3), "deterministic": False},
        {"deterministic": True},
    )
    named = base.but(streams=("default", "noise"))
    yield named.but(options={"rng_collection": "noise"})
    yield from with_call(base, {"deterministic": True}, {"rngs": make_rngs})
    yield base.but(options={"deterministic": True}, call={"deterministic": False})
    yield base.but(options={"rngs": make_stream}, streams=("params", "dropout"))
    yield base.but(prepare=lambda layer: layer.eval())
    yield from (base.but(options={"rngs": None}).of(rngs=x) for x in (make_stream, key))
    yield base.of(integers(4, 3)).but(why_different="integers crash in select")


def pooling():
    image, explicit = real(2, 5, 4, 3), ((0, 1), (2, 1))
    for name in ("avg_pool", "max_pool", "min_pool"):
        base = Case(name, inputs=(image,), call={"window_shape": (2, 3)})
        yield base.of(real(2, 1, 5, 4, 3), padding="SAME", strides=(2, 1))
        yield base.of(real(2, 1, 5, 4, 3), padding=explicit).but(
            why_different="explicit padding knows one batch axis only"
        )
    yield Case("max_pool", inputs=base.inputs, call=base.call).cast("int32")
    inside = {"window_shape": (2, 3), "count_include_pad": False}
    average = Case("avg_pool", inputs=(image,), call=inside)
    yield from with_call(average, {"padding": "SAME"}, {"padding": explicit})
    yield average.cast("bfloat16").but(why_different="upcast to float32")


# -------------------------------------------------------------- what works on sequences

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
    yield padded.of(reverse=True)
    yield padded.of(reverse=True, keep_order=True)
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
    "Linear": linear,
    "LinearGeneral": linear_general,
    "Einsum": einsum,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Embed": embed,
    "PReLU": prelu,
    "BatchNorm": batch_norm,
    "LayerNorm": layer_norm,
    "RMSNorm": rms_norm,
    "InstanceNorm": instance_norm,
    "GroupNorm": group_norm,
    "Dropout": dropout,
    "pooling": pooling,
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
