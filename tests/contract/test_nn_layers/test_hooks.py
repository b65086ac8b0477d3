"""How layers call what replaces promotion and contraction (contract, section 2).

Replacements quantize, count or redirect. They see the exact call forms of the contract;
keywords that are not set are not passed, so that they need not have them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import catalog

ones = jnp.ones


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


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral", "Conv", "ConvTranspose"])
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


@pytest.mark.parametrize(
    ("function", "count"), [(nnx.dot_product_attention, 3), (WEIGHTS, 2)]
)
def test_promotion_of_attention_gets_what_is_compared(function, count):
    promote = Recorder(nnx.nn.dtypes.promote_dtype)
    x = ones((1, 2, 1, 4))
    function(*[x] * count, promote_dtype=promote)
    (args,), keywords = promote.calls[0]
    assert (len(args), keywords) == (count, {"dtype": None})


PROMOTING = [row for row in catalog.LAYERS if "promote_dtype" in row.parameters()]


@pytest.mark.parametrize("row", PROMOTING, ids=lambda row: row.name)
def test_a_promotion_that_does_nothing_is_accepted(row):
    inputs = row.inputs()
    layers = row.make(), row.make(promote_dtype=lambda t, **kw: t)
    outputs = [jax.tree.leaves(row(layer, *inputs)) for layer in layers]
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------ contractions

DENSE = ((((1,), (0,)), ((), ())),)
CHANNELS_LAST = jax.lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))
CONV_KEYWORDS = {"lhs_dilation": (1,), "rhs_dilation": (1,), "feature_group_count": 1}
CONV_KEYWORDS["dimension_numbers"] = CHANNELS_LAST
CONV = jax.lax.conv_general_dilated
# Keyword of the constructor, what it replaces, where the operands are in the call, the
# other positional arguments and the keywords that are always there.
CONTRACTIONS = {
    "Linear": ("dot_general", jax.lax.dot_general, slice(0, 2), DENSE, {}),
    "LinearGeneral": ("dot_general", jax.lax.dot_general, slice(0, 2), DENSE, {}),
    "Einsum": ("einsum_op", jnp.einsum, slice(1, 3), ("ab,bc->ac",), {}),
    "Conv": (CONV.__name__, CONV, slice(0, 2), ((1,), "SAME"), CONV_KEYWORDS),
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
    kinds = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=kinds)):
        layer(inputs, out_sharding=P())
    keywords = recorder.calls[0][1]
    assert keywords["preferred_element_type"] == jnp.float32
    assert keywords["out_sharding"] == P()


@pytest.mark.parametrize("name", [*CONTRACTIONS, "ConvTranspose"])
def test_preferred_element_type_decides_the_output_dtype(name):
    arguments, inputs, _ = PROMOTIONS[name]
    options = {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}
    layer = getattr(nnx, name)(*arguments, **options, rngs=nnx.Rngs(0))
    layer.bias = None
    assert jax.eval_shape(layer, inputs).dtype == jnp.float32


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
