"""Wrong inputs are named, and nothing has changed then (contract, sections 2 and 15).

A row is a layer, what it must not be called with, the exception that the contract or
the peer has, and what its message says: JAX's, where JAX refuses it. The note says
where that was, and what was given. At the end the hooks of layers, and their streams.
"""

import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import catalog, meshes, random_arrays, tables

ones = jnp.ones


def make(name, *args, **options):
    return getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))


def stateful(name, *args, **options):
    return lambda: make(name, *args, **options)


LINEAR = stateful("Linear", 2, 3)
LORA = stateful("LoRA", 3, 2, 4)
ADAPTED = stateful("LoRALinear", 3, 4, lora_rank=2)
GENERAL = stateful("LinearGeneral", (2, 4), 3, axis=(-2, -1), batch_axis={0: 5})
EINSUM = stateful("Einsum", "ab,bc->ac", (2, 3))
CONV = stateful("Conv", 4, 6, (3, 3), feature_group_count=2)
TRANSPOSE = stateful("ConvTranspose", 2, 3, (3, 3))
FLIPPED = stateful("ConvTranspose", 2, 3, 3, transpose_kernel=True)
EMBED = stateful("Embed", 5, 3)
BATCH = stateful("BatchNorm", 3)
BARE = stateful("BatchNorm", 3, use_scale=False, use_bias=False)
AREA = stateful("BatchNorm", 6, axis=(1, 2))
LAYER = stateful("LayerNorm", 3)
RMS = stateful("RMSNorm", 3)
INSTANCE = stateful("InstanceNorm", 3)
GROUP = stateful("GroupNorm", 4, 2)
GROUP_BARE = stateful("GroupNorm", 4, 2, use_scale=False, use_bias=False)
DROPOUT = stateful("Dropout", 0.5, broadcast_dims=(2,))

SAME_SHAPE = "contracting dimensions to have the same shape"
AXES = "less than the number of axes"
CHANNELS = "expects inputs.*spatial, "
SIZE = "cannot reshape array of shape (3,)"

SHAPES = [
    (LINEAR, ones((1, 4)), TypeError, f"{SAME_SHAPE}, got (4,) and (2,)"),
    (LINEAR, ones(()), TypeError, AXES),
    (LINEAR, [[1, 2, 3]], TypeError, SAME_SHAPE),
    *((x, ones((1, 5)), TypeError, SAME_SHAPE) for x in (LORA, ADAPTED)),
    *((x, ones(()), TypeError, AXES) for x in (LORA, ADAPTED)),
    (GENERAL, ones((5, 4, 2)), TypeError, f"{SAME_SHAPE}, got (4, 2) and (2, 4)"),
    (GENERAL, ones((3, 2, 4)), TypeError, "batch dimensions"),
    (GENERAL, ones(4), TypeError, AXES),
    (EINSUM, ones((1, 4)), ValueError, "label 'b'.*(4) does not match .* (2)"),
    (EINSUM, ones((1, 1, 2)), ValueError, "number of indices"),
    (CONV, ones((1, 5, 5, 2)), ValueError, f"Conv.*{CHANNELS}4]"),
    (CONV, ones((5, 4)), ValueError, "Conv.*at least 3 axes"),
    (TRANSPOSE, ones((5, 5, 3)), ValueError, f"ConvTranspose.*{CHANNELS}2]"),
    (TRANSPOSE, ones((5, 2)), ValueError, "ConvTranspose.*at least 3 axes"),
    (FLIPPED, ones((1, 5, 3)), ValueError, f"ConvTranspose.*{CHANNELS}2]"),
    (BATCH, ones((2, 4)), TypeError, SIZE),
    (BATCH, ones((2, 1)), TypeError, SIZE),
    (BATCH, ones(()), IndexError, "axis -1 is out of bounds"),
    (BARE, ones((2, 1)), TypeError, "(size 1) into shape (3,)"),
    (AREA, ones((4, 2, 2)), TypeError, "(size 6) into shape (1, 2, 2)"),
    (LAYER, ones((2, 4)), TypeError, SIZE),
    (LAYER, ones(()), IndexError, "axis -1 is out of bounds"),
    (RMS, ones((2, 4)), TypeError, SIZE),
    (INSTANCE, ones((2, 5, 4)), TypeError, SIZE),
    (GROUP, ones((2, 5, 8)), TypeError, "GroupNorm expects 4 features, got (8,)"),
    (GROUP_BARE, ones((2, 5, 8)), TypeError, "GroupNorm expects 4 features, got (8,)"),
    (GROUP, ones(()), TypeError, "GroupNorm expects 4 features, got ()"),
    (DROPOUT, ones((2, 2)), IndexError, "axis 2 is out of bounds"),
    (EMBED, ones(2), ValueError, "must be an integer"),
    (EMBED, ones(2, bool), ValueError, "must be an integer"),
]
NO_NUMBERS = [
    (make, inputs, (TypeError, ValueError), "")
    for make in (LINEAR, GENERAL, EINSUM, CONV, TRANSPOSE, EMBED)
    + (BATCH, LAYER, RMS, INSTANCE, GROUP, DROPOUT)
    for inputs in (None, "text", jax.random.split(jax.random.key(0), (2, 2)))
]


def pattern(message):
    """The message as a regular expression in which only ``.*`` is special."""
    special = {"[": r"\[", "]": r"\]", "(": r"\(", ")": r"\)"}
    return "(?s)" + "".join(special.get(c, c) for c in message)


def fails(layer, call, error, message, note=""):
    before = catalog.state_of(layer)
    with pytest.raises(error, match=pattern(message)) as caught:
        call(layer)
    assert note in "".join(getattr(caught.value, "__notes__", ()))
    after = catalog.state_of(layer)
    assert list(before) == list(after)
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path])


@pytest.mark.parametrize(("make", "inputs", "error", "message"), SHAPES + NO_NUMBERS)
def test_wrong_inputs_are_named_and_change_nothing(make, inputs, error, message):
    layer = make()
    given = f": {jax.typeof(inputs)}" if hasattr(inputs, "dtype") else ""
    name = type(layer).__name__
    argument = "x" if "Norm" in name or name == "LoRA" else "inputs"
    note = f"at {name}\n  {argument}{given}"
    fails(layer, lambda layer: layer(inputs), error, message, note)


@pytest.mark.parametrize(
    "row", [row for row in SHAPES if not isinstance(row[1], list)][::4]
)
def test_wrong_inputs_are_named_inside_programs(row):
    make, inputs, error, message = row
    for jit in (jax.jit, nnx.jit):
        call = jit(lambda layer, x: layer(x))
        fails(make(), lambda layer: call(layer, inputs), error, message)  # noqa: B023


MASKS = [*(ones(x, bool) for x in ((2, 4, 3), 4, (1, 2, 5, 3))), ones((2, 5, 3))]


@pytest.mark.parametrize("make", [BATCH, LAYER, RMS, INSTANCE])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.dtype}{mask.shape}")
def test_wrong_masks_are_named_and_change_nothing(make, mask):
    x = ones((2, 5, 3))
    message = "boolean" if mask.dtype != bool else "broadcast"
    note = f"x: float32[2,5,3]\n  mask: {jax.typeof(mask)}"
    fails(make(), lambda layer: layer(x, mask=mask), ValueError, message, note)


def test_statistics_of_another_size_are_found_before_one_is_written():
    layer = BARE()
    layer.var = nnx.BatchStat(ones(4))
    wrong = "(size 3) into shape (4,)"
    fails(layer, lambda layer: layer(ones((2, 3))), TypeError, wrong, "at BatchNorm")


@pytest.mark.parametrize("name", ["strides", "kernel_dilation", "input_dilation"])
def test_conv_needs_one_entry_per_spatial_axis(name):
    layer = make("Conv", 2, 3, (3, 3), **{name: (1,)})
    message = f"Conv with kernel_size=(3, 3) needs 2 {name}.*got (1,)"
    fails(layer, lambda layer: layer(ones((1, 5, 5, 2))), ValueError, message)


def test_wrong_queries_of_embed_are_named():
    call = lambda layer: layer.attend(ones((2, 4)))  # noqa: E731
    message = f"{SAME_SHAPE}, got (4,) and (3,)"
    fails(EMBED(), call, TypeError, message, "at Embed.attend, an Embed\n  query: ")


def test_bias_that_does_not_fit_the_equation_is_named():
    layer = make("Einsum", "ab,bc->ac", (2, 3), 4)
    call = lambda layer: layer(ones((1, 2)))  # noqa: E731
    fails(layer, call, TypeError, "(size 4) into shape (1, 3)", "bias Param float32[4]")


def test_subclasses_have_their_own_name():
    class Head(nnx.Linear):
        pass

    head = Head(2, 3, rngs=nnx.Rngs(0))
    fails(head, lambda head: head(ones((1, 4))), TypeError, SAME_SHAPE, "at Head\n")


# ------------------------------------------------------------- what must go on working


def test_kernels_of_another_shape_decide_what_fits():
    layer = make("Linear", 2, 3, use_bias=False)
    layer.kernel = nnx.Param(ones((5, 7)))
    assert layer(ones((1, 5))).shape == (1, 7)
    conv = make("Conv", 2, 3, 3, use_bias=False)
    conv.kernel = nnx.Param(ones((3, 4, 6)))
    assert conv(ones((1, 5, 4))).shape == (1, 5, 6)
    norm = make("LayerNorm", 3)
    norm.scale, norm.bias = nnx.Param(ones(4)), nnx.Param(ones(4))
    assert norm(ones((2, 4))).shape == (2, 4)


def test_norms_without_params_take_any_number_of_features():
    for name in ("LayerNorm", "RMSNorm", "InstanceNorm"):
        options = {} if name == "RMSNorm" else {"use_bias": False}
        layer = make(name, 3, use_scale=False, **options)
        assert layer(ones((2, 5, 4))).shape == (2, 5, 4)


class Quantized:
    """An operand that is no array: integers and their scale, without a shape."""

    def __init__(self, x):
        self.scale = jnp.abs(x).max() / 127
        self.integers = jnp.round(x / self.scale).astype(jnp.int8)
        self.ndim = x.ndim

    def dequantize(self):
        return self.integers * self.scale


def quantize(args, *, dtype):
    inputs, kernel, bias = args
    return Quantized(inputs), Quantized(kernel), bias


def quantized_dot(lhs, rhs, *args, **options):
    return jax.lax.dot_general(lhs.dequantize(), rhs.dequantize(), *args, **options)


def test_hooks_may_hand_over_operands_without_a_shape():
    exact = make("Linear", 4, 3)
    layer = make("Linear", 4, 3, promote_dtype=quantize, dot_general=quantized_dot)
    x = random_arrays.random(5, 4)
    np.testing.assert_allclose(jax.jit(lambda x: layer(x))(x), exact(x), atol=0.05)


def test_hooks_may_store_a_kernel_in_another_shape():
    def unpack(lhs, rhs, *args, **options):
        return jax.lax.dot_general(lhs, jnp.repeat(rhs, 2, axis=0), *args, **options)

    layer = make("Linear", 4, 3, dot_general=unpack)
    layer.kernel = nnx.Param(ones((2, 3)))
    np.testing.assert_array_equal(layer(ones((1, 4))), [[4.0, 4.0, 4.0]])


# ------------------------------------------------------- functions that a user replaces


class Recorder:
    """A replacement that keeps its calls: of each the arguments and the keywords."""

    def __init__(self, function):
        self.function = function
        self.calls = []

    def __call__(self, *args, **keywords):
        self.calls.append((args, keywords))
        return self.function(*args, **keywords)


# Name, arguments, what is called, the shapes that ``promote_dtype`` gets.
PROMOTIONS = {
    "Linear": ((2, 3), ones((4, 2)), [(4, 2), (2, 3), (3,)]),
    "LinearGeneral": ((2, (3, 5)), ones((4, 2)), [(4, 2), (2, 3, 5), (3, 5)]),
    "Einsum": (("ab,bc->ac", (2, 3), 3), ones((4, 2)), [(4, 2), (2, 3), (3,)]),
    "Conv": ((2, 3, 1), ones((1, 4, 2)), [(1, 4, 2), (1, 2, 3), (3,)]),
    "ConvTranspose": ((2, 3, 1), ones((1, 4, 2)), [(1, 4, 2), (1, 2, 3), (3,)]),
    "LoRA": ((2, 1, 3), ones((4, 2)), [(4, 2), (2, 1), (1, 3)]),
    "BatchNorm": ((3,), ones((4, 3)), [(4, 3), (3,), (3,), (3,), (3,)]),
    "LayerNorm": ((3,), ones((4, 3)), [(4, 3), (3,), (3,)]),
    "GroupNorm": ((4, 2), ones((2, 5, 4)), [(2, 5, 4), (4,), (4,)]),
    "InstanceNorm": ((3,), ones((2, 5, 3)), [(2, 5, 3), (3,), (3,)]),
    "RMSNorm": ((3,), ones((4, 3)), [(4, 3), (3,)]),
}


def call(name, **options):
    """Makes a layer and calls it, without running either; gives the output."""
    arguments, inputs, _ = PROMOTIONS[name]
    make = functools.partial(getattr(nnx, name), *arguments, **options)
    return jax.eval_shape(lambda: make(rngs=nnx.Rngs(0))(inputs))


@pytest.mark.parametrize("name", PROMOTIONS)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_promotion_gets_one_tuple_and_the_dtype(name, dtype):
    promote = Recorder(nnx.nn.dtypes.promote_dtype)
    call(name, promote_dtype=promote, dtype=dtype)
    ((args,), keywords) = promote.calls.pop()
    assert keywords == {"dtype": dtype}
    assert isinstance(args, tuple) and [x.shape for x in args] == PROMOTIONS[name][2]


WITH_BIAS = "Linear", "LinearGeneral", "Conv", "ConvTranspose", "BatchNorm"


@pytest.mark.parametrize("name", WITH_BIAS)
def test_promotion_gets_none_for_a_missing_bias(name):
    promote = Recorder(nnx.nn.dtypes.promote_dtype)
    call(name, promote_dtype=promote, use_bias=False)
    (((*args, bias),), _) = promote.calls.pop()
    assert bias is None and [x.shape for x in args] == PROMOTIONS[name][2][:-1]
    assert not promote.calls


def test_promotion_of_prelu_is_called_only_with_a_dtype():
    promote = Recorder(nnx.nn.dtypes.promote_dtype)
    nnx.PReLU(promote_dtype=promote)(ones(2))
    assert promote.calls == []
    nnx.PReLU(promote_dtype=promote, dtype=jnp.bfloat16)(ones(2))
    (((args,), keywords),) = promote.calls
    assert ([x.shape for x in args], keywords) == ([(2,), ()], {"dtype": jnp.bfloat16})


def test_promotion_of_embed_may_stay_with_integers_in_a_look_up():
    promote = Recorder(nnx.nn.dtypes.promote_dtype)
    layer = nnx.Embed(5, 3, promote_dtype=promote, rngs=nnx.Rngs(0))
    layer(jnp.array([1]))
    layer.attend(ones((2, 3)))
    forms = [([x.shape for x in args[0]], k) for args, k in promote.calls]
    dtype = {"dtype": layer.dtype}
    assert forms == [([(5, 3)], {**dtype, "inexact": False}), ([(2, 3), (5, 3)], dtype)]


WEIGHTS = nnx.nn.attention.dot_product_attention_weights


@tables.cases("function, count", (nnx.dot_product_attention, 3), (WEIGHTS, 2))
def test_promotion_of_attention_gets_what_is_compared(function, count):
    promote = Recorder(nnx.nn.dtypes.promote_dtype)
    x = ones((1, 2, 1, 4))
    function(*[x] * count, promote_dtype=promote)
    (args,), keywords = promote.calls[0]
    assert (len(args), keywords) == (count, {"dtype": None})


PROMOTING = [row for row in catalog.LAYERS if "promote_dtype" in row.parameters()]


@pytest.mark.parametrize("row", PROMOTING, ids=lambda row: row.name)
def test_a_promotion_that_does_nothing_is_accepted(row):
    def program(**options):
        layer = nnx.eval_shape(lambda: row.make(**options))
        return str(jax.make_jaxpr(lambda m, *args: row(m, *args))(layer, *row.inputs()))

    assert program(promote_dtype=lambda args, **_: args) == program()


# ------------------------------------------------------------------ contractions

DENSE = ((((1,), (0,)), ((), ())),)
CHANNELS_LAST = jax.lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))
CONV_KEYWORDS = {"lhs_dilation": (1,), "rhs_dilation": (1,), "feature_group_count": 1}
CONV_KEYWORDS["dimension_numbers"] = CHANNELS_LAST
CONVOLVE = jax.lax.conv_general_dilated
# Keyword of the constructor, what it replaces, where the operands are in the call, the
# other positional arguments and the keywords that are always there.
CONTRACTIONS = {
    "Linear": ("dot_general", jax.lax.dot_general, slice(0, 2), DENSE, {}),
    "LinearGeneral": ("dot_general", jax.lax.dot_general, slice(0, 2), DENSE, {}),
    "Einsum": ("einsum_op", jnp.einsum, slice(1, 3), ("ab,bc->ac",), {}),
    "Conv": (CONVOLVE.__name__, CONVOLVE, slice(0, 2), ((1,), "SAME"), CONV_KEYWORDS),
}


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contraction_gets_the_exact_call_form(name, precision):
    hook, function, operands, rest, keywords = CONTRACTIONS[name]
    recorder = Recorder(function)
    call(name, **{hook: recorder}, precision=precision)
    args, given = recorder.calls.pop()
    assert [x.shape for x in args[operands]] == PROMOTIONS[name][2][:2]
    assert (*args[: operands.start], *args[operands.stop :]) == rest
    assert given == {"precision": precision, **keywords}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contraction_gets_optional_keywords_only_if_set(name):
    hook, function, *_ = CONTRACTIONS[name]
    arguments, inputs, _ = PROMOTIONS[name]
    recorder = Recorder(function)
    options = {hook: recorder, "preferred_element_type": jnp.float32}
    layer = getattr(nnx, name)(*arguments, **options, rngs=nnx.Rngs(0))
    with jax.set_mesh(meshes.mesh_of("Explicit", x=1)):
        layer(inputs, out_sharding=P())
    keywords = recorder.calls[0][1]
    assert keywords["preferred_element_type"] == jnp.float32
    assert keywords["out_sharding"] == P()


def test_class_of_a_contraction_goes_before_the_function_and_is_made_anew():
    made = []

    def make():
        made.append(Recorder(jax.lax.dot_general))
        return made[-1]

    unused = Recorder(jax.lax.dot_general)
    options = {"dot_general": unused, "dot_general_cls": make, "rngs": nnx.Rngs(0)}
    layer = nnx.LinearGeneral(2, 3, **options)
    for _ in range(2):
        layer(ones((4, 2)))
    assert [len(recorder.calls) for recorder in made] == [1, 1]
    assert unused.calls == []


# ----------------------------------------------------------------------- random streams


def linear(*sizes, **options):
    return nnx.Linear(*sizes, **options, rngs=nnx.Rngs(0))


def key(*counts, seed=0):
    """The key after these draws, each from the stream that the last one began."""
    result = jax.random.key(seed)
    for count in counts:
        result = jax.random.fold_in(result, count)
    return result


# Per layer its constructor (given ``rngs``), and how many keys it draws with a bias.
DRAWS = {
    "Linear": (lambda r: nnx.Linear(2, 3, rngs=r), 2),
    "LinearGeneral": (lambda r: nnx.LinearGeneral(2, 3, rngs=r), 2),
    "Einsum": (lambda r: nnx.Einsum("ab,bc->ac", (2, 3), 3, rngs=r), 2),
    "Conv": (lambda r: nnx.Conv(2, 3, 3, rngs=r), 2),
    "ConvTranspose": (lambda r: nnx.ConvTranspose(2, 3, 3, rngs=r), 2),
    "Embed": (lambda r: nnx.Embed(2, 3, rngs=r), 1),
    "LoRA": (lambda r: nnx.LoRA(2, 1, 3, rngs=r), 2),
    "LoRALinear": (lambda r: nnx.LoRALinear(2, 3, lora_rank=1, rngs=r), 4),
    "BatchNorm": (lambda r: nnx.BatchNorm(2, rngs=r), 2),
    "LayerNorm": (lambda r: nnx.LayerNorm(2, rngs=r), 2),
    "GroupNorm": (lambda r: nnx.GroupNorm(2, 1, rngs=r), 2),
    "InstanceNorm": (lambda r: nnx.InstanceNorm(2, rngs=r), 2),
    "RMSNorm": (lambda r: nnx.RMSNorm(2, rngs=r), 1),
    "SpectralNorm": (lambda r: nnx.SpectralNorm(linear(2, 3), rngs=r), 1),
    "WeightNorm": (lambda r: nnx.WeightNorm(linear(2, 3), rngs=r), 0),
    "LSTMCell": (lambda r: nnx.LSTMCell(2, 3, rngs=r), 12),
    "OptimizedLSTMCell": (lambda r: nnx.OptimizedLSTMCell(2, 3, rngs=r), 3),
    "SimpleCell": (lambda r: nnx.SimpleCell(2, 3, rngs=r), 3),
    "GRUCell": (lambda r: nnx.GRUCell(2, 3, rngs=r), 3),
    "MultiHeadAttention": (lambda r: nnx.MultiHeadAttention(2, 4, rngs=r), 8),
    "norms": (lambda r: nnx.MultiHeadAttention(2, 4, normalize_qk=True, rngs=r), 10),
    "without bias": (lambda r: nnx.Linear(2, 3, use_bias=False, rngs=r), 1),
    "none": (lambda r: nnx.LayerNorm(2, use_bias=False, use_scale=False, rngs=r), 0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_layers_draw_their_number_of_keys_from_params(name):
    make, count = DRAWS[name]
    rngs = nnx.Rngs(0, params=1, dropout=2, carry=3)
    make(rngs)
    counts = {k: int(rngs[k].count[...]) for k in ("params", "dropout", "carry")}
    assert counts == {"params": count, "dropout": 0, "carry": 0}
    assert rngs.default.count[...] == 0


def attention(rngs):
    return nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=rngs)


def rnn(seed, rngs=True):
    return nnx.RNN(nnx.GRUCell(2, 3, rngs=nnx.Rngs(seed)), rngs=rngs)


# Layers that keep a stream: the name of the one they fork, and how they are made.
FORKS = {
    "Dropout": ("noise", lambda r: nnx.Dropout(0.5, rng_collection="noise", rngs=r)),
    "Attention": ("dropout", attention),
    "RNN": ("carry", lambda r: rnn(0, r)),
    "Bidirectional": ("carry", lambda r: nnx.Bidirectional(rnn(0), rnn(1), rngs=r)),
}


@pytest.mark.parametrize("name", FORKS)
def test_layers_that_draw_later_keep_a_fork_and_its_tag(name):
    stream, make = FORKS[name]
    rngs = nnx.Rngs(**{"params": 1, stream: 7})
    layer = make(rngs)
    assert rngs[stream].count[...] == 1
    assert layer.rngs.key[...] == key(0, seed=7)
    assert (layer.rngs.count[...], layer.rngs.tag) == (0, stream)
    rngs = nnx.Rngs(params=1, default=7)
    assert make(rngs).rngs.tag == "default"
    assert rngs.default.count[...] == 1


def test_cells_fork_before_they_draw_their_params():
    rngs = nnx.Rngs(0)
    with pytest.warns(UserWarning, match="keep_rngs argument is deprecated"):
        cell = nnx.GRUCell(2, 3, keep_rngs=True, rngs=rngs)
    assert cell.rngs.key[...] == key(0)
    assert rngs.default.count[...] == 4


def test_attention_forks_after_its_params():
    assert attention(nnx.Rngs(0)).rngs.key[...] == key(8)


# ------------------------------------------------------------- published numbers


def general(*sizes, **options):
    return nnx.LinearGeneral(*sizes, axis=(-2, -1), **options)


def lora(*sizes, **options):
    return nnx.LoRALinear(*sizes, lora_rank=2, **options)


def spectral(rngs):
    norm = nnx.SpectralNorm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=rngs)
    return types.SimpleNamespace(u=norm.batch_stats["kernel", "u"])


# A layer, its sizes, the path of a Param in it, the sum of that and its first entries.
NUMBERS = [
    (nnx.Linear, (2, 3), "kernel", -1.5841567)
    + (0.7567299, -0.6857005, -0.5688337, -0.8757605),
    (general, ((2, 3), (4, 5)), "kernel", 5.3294494)
    + (0.4368983, -0.3958894, -0.3284163, -0.5056206),
    (nnx.Conv, (3, 4, 3), "kernel", 1.0697719)
    + (0.3567259, -0.3232424, -0.2681508, -0.4128375),
    (nnx.Embed, (5, 3), "embedding", -1.7087169)
    + (0.5796679, -0.5232740, -0.4319574, -0.6762890),
    (nnx.MultiHeadAttention, (2, 4), "query.kernel", -1.2985813, 0.5350889),
    (nnx.MultiHeadAttention, (2, 4), "key.kernel", 0.9493977, 0.6797945),
    (nnx.MultiHeadAttention, (2, 4), "value.kernel", -1.3851357, -0.5436897),
    (nnx.MultiHeadAttention, (2, 4), "out.kernel", 2.9667004, 0.6153617),
    (nnx.LSTMCell, (2, 3), "ii.kernel", -1.5841567, 0.7567299),
    (nnx.LSTMCell, (2, 3), "if_.kernel", -4.4712596, -1.5153329),
    (nnx.LSTMCell, (2, 3), "hi.kernel", -1.3580108, -0.7837888),
    (nnx.LSTMCell, (2, 3), "ho.kernel", -2.3456446, -0.1426982),
    (nnx.OptimizedLSTMCell, (2, 3), "dense_i.kernel", -0.5423267, 0.7567299),
    (nnx.OptimizedLSTMCell, (2, 3), "dense_h.kernel", -2.7342030, -0.5433681),
    (nnx.GRUCell, (2, 3), "dense_i.kernel", -1.7439917, 0.7567299),
    (nnx.GRUCell, (2, 3), "dense_h.kernel", 1.3665038, 0.4244834),
    (nnx.SimpleCell, (2, 3), "dense_i.kernel", -4.4712596, -1.5153329),
    (nnx.SimpleCell, (2, 3), "dense_h.kernel", -1.4714753, 0.5891491),
    (lora, (3, 4), "lora.lora_a", 1.5041376)
    + (1.1382990, 1.1661402, -0.4495851, -0.7917019),
    (spectral, (), "u", -0.0065050, 0.0100401, -0.0090634, -0.0074817),
]


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: f"{row[0].__name__}.{row[2]}")
def test_seed_zero_gives_the_published_numbers(row):
    make, sizes, path, total, *first = row
    param = operator.attrgetter(path)(make(*sizes, rngs=nnx.Rngs(0)))
    values = np.float64(param[...]).ravel()
    # They are published with seven digits; a QR differs in the last bit by how it is
    # compiled.
    np.testing.assert_allclose(values[: len(first)], first, rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(values.sum(), total, rtol=0, atol=1e-6)


def test_seed_zero_drops_the_published_entries():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for expected in ([2, 0, 2, 0, 2, 2, 2, 0], [2, 2, 2, 0, 2, 0, 0, 2]):
        np.testing.assert_array_equal(layer(jnp.ones(8)), expected)
