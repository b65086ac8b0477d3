"""Which dtype a layer gives: that of all its operands, unless it is told."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import catalog

HALF = jnp.bfloat16
NORMS = "BatchNorm", "LayerNorm", "RMSNorm", "InstanceNorm", "GroupNorm"
DENSE = "Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose", "LoRA"

# Options of the constructor, the dtype of the inputs, that of the outputs.
COMMON = [
    ({}, jnp.float32, jnp.float32),
    ({}, HALF, jnp.float32),
    ({}, jnp.int32, jnp.float32),
    ({}, jnp.complex64, jnp.complex64),
    ({"param_dtype": HALF}, HALF, HALF),
    ({"param_dtype": HALF}, jnp.int32, HALF),
    ({"param_dtype": HALF}, jnp.float32, jnp.float32),
    ({"dtype": HALF}, jnp.float32, HALF),
    ({"dtype": HALF}, jnp.int32, HALF),
    ({"dtype": "float16"}, jnp.float32, jnp.float16),
    ({"dtype": jnp.complex64}, jnp.float32, jnp.complex64),
]
LORA_LINEAR = [
    ({"lora_dtype": HALF}, jnp.float32),
    ({"lora_param_dtype": HALF}, jnp.float32),
    ({"dtype": HALF}, HALF),
    ({"dtype": HALF, "lora_dtype": HALF}, HALF),
    ({"dtype": HALF, "lora_dtype": jnp.float32}, jnp.float32),
    ({"dtype": HALF, "preferred_element_type": jnp.float32}, jnp.float32),
    ({"param_dtype": HALF, "lora_param_dtype": HALF}, jnp.float32),
]
ROWS = [
    *(
        # The statistics of a BatchNorm are float32, and take part.
        (name, options, given, jnp.float32)
        if name == "BatchNorm" and options == {"param_dtype": HALF}
        else (name, options, given, expected)
        for name in DENSE + NORMS
        for options, given, expected in COMMON
    ),
    *(("LoRALinear", options, jnp.float32, out) for options, out in LORA_LINEAR),
    # The arithmetic of these is in float32 unless they are told otherwise.
    ("SimpleCell", {"param_dtype": HALF}, HALF, jnp.float32),
    ("SimpleCell", {"param_dtype": HALF, "dtype": None}, HALF, HALF),
    ("SimpleCell", {"param_dtype": HALF, "dtype": jnp.float16}, HALF, jnp.float16),
    *(("PReLU", {}, given, given) for given in (jnp.float16, HALF, jnp.float32)),
    ("PReLU", {"dtype": jnp.float16}, jnp.float32, jnp.float16),
    ("Embed", {"param_dtype": HALF}, jnp.int32, HALF),
    ("Embed", {"dtype": jnp.float16}, jnp.int32, jnp.float16),
    (
        "Embed",
        {"param_dtype": jnp.int32, "embedding_init": nnx.initializers.ones},
        jnp.int32,
        jnp.int32,
    ),
    *(
        ("Dropout", {}, given, given)
        for given in (HALF, jnp.float16, jnp.float32, jnp.complex64)
    ),
    ("Dropout", {}, jnp.int32, jnp.float32),
    ("RoPE", {}, jnp.int32, jnp.float32),
    *(("RoPE", {}, given, given) for given in (HALF, jnp.float16)),
]


@pytest.mark.parametrize(("name", "options", "given", "expected"), ROWS)
def test_output_dtype(name, options, given, expected):
    row = catalog.BY_NAME[name]

    def call(*inputs):
        return row(row.make(**options), *inputs)

    outputs = jax.tree.leaves(jax.eval_shape(call, *row.inputs(dtype=given)))
    assert {y.dtype for y in outputs} == {jnp.dtype(expected)}


@pytest.mark.parametrize(
    "row",
    [r for r in catalog.LAYERS if r.has_dtype and "param_dtype" in r.parameters()],
    ids=lambda row: row.name,
)
def test_params_have_the_dtype_that_was_asked_for(row):
    for options, expected in [({}, jnp.float32), ({"param_dtype": HALF}, HALF)]:
        layer = nnx.eval_shape(lambda options=options: row.make(**options))
        params = jax.tree.leaves(nnx.state(layer, nnx.Param))
        assert {param.dtype for param in params} == {jnp.dtype(expected)}


def test_the_low_rank_part_of_a_linear_has_a_dtype_of_its_own():
    row, dtypes = catalog.BY_NAME["LoRALinear"], {"param_dtype": HALF}
    layer = nnx.eval_shape(lambda: row.make(**dtypes))
    assert (layer.kernel.dtype, layer.lora.lora_a.dtype) == (HALF, jnp.float32)
    layer = nnx.eval_shape(lambda: row.make(lora_param_dtype=HALF))
    assert (layer.kernel.dtype, layer.lora.lora_a.dtype) == (jnp.float32, HALF)


@pytest.mark.parametrize("dtype", [None, HALF, jnp.float16])
@pytest.mark.parametrize("param_dtype", [HALF, jnp.float16, jnp.float32])
def test_statistics_are_float32_whatever_the_other_dtypes(param_dtype, dtype):
    row = catalog.BY_NAME["BatchNorm"]

    def states(x):
        layer = row.make(param_dtype=param_dtype, dtype=dtype)
        before = nnx.clone(layer)
        layer(x)
        return before, layer

    for layer in jax.eval_shape(states, *row.inputs(dtype=HALF)):
        assert layer.scale.dtype == layer.bias.dtype == param_dtype
        assert layer.mean.dtype == layer.var.dtype == jnp.float32


UNPROMOTED = {"promote_dtype": lambda args, **_: args}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in (*DENSE, *NORMS, "PReLU")]
    + [(name, UNPROMOTED) for name in NORMS],
)
def test_a_dtype_of_integers_is_refused_by_the_call(name, options):
    row = catalog.BY_NAME[name]
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        jax.eval_shape(
            lambda *x: row(row.make(dtype=jnp.int32, **options), *x), *row.inputs()
        )


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_a_layer_without_values_says_what_to_do(dtype):
    layer = nnx.eval_shape(lambda: nnx.Linear(2, 3, dtype=dtype, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"(?s)abstract.*float32\[2,3\].*load_state"):
        layer(jnp.ones((1, 2)))


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [None, HALF, "float16"])
def test_promotion_gives_the_dtypes_of_the_peer(peer, dtype):
    kinds = [jnp.int8, HALF, jnp.float16, jnp.float32, bool]
    for a in kinds:
        for b in kinds:
            args = (jnp.ones(1, a), None, jnp.ones(1, b), 2.0)
            ours, theirs = (
                library.nn.dtypes.promote_dtype(args, dtype=dtype)
                for library in (nnx, peer)
            )
            assert [getattr(x, "dtype", x) for x in ours] == [
                getattr(x, "dtype", x) for x in theirs
            ]
