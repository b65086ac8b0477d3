"""The peers grid: layers with kernels, tables, statistics or random zeros."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from tests.nn.peer_cases import (
    INPUT_DTYPES,
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

# Not the default, zeros: a bias that is left out would not show.
BIAS = {"bias_init": from_key}
SCALE_AND_BIAS = {**BIAS, "scale_init": from_key}
# For many shapes: each that `lecun_normal` is compiled for costs a quarter of a second.
ALL = {**BIAS, "kernel_init": from_key}

# What all layers with a kernel take.
KERNEL_OPTIONS = tuple(
    each(
        precision=("highest", jax.lax.Precision.DEFAULT),
        kernel_init=(initializers.he_uniform(), initializers.ones),
        preferred_element_type=(jnp.float32,),
        dtype=("float16", jnp.complex64),
        promote_dtype=(lambda arrays, **options: arrays,),
        kernel_metadata=({"note": 1},),
        bias_metadata=({"note": 2},),
    )
)
HALF = {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}


def linear():
    base = Case("Linear", (6, 5), BIAS, (real(2, 7, 6),))
    yield Case("Linear", (6, 5), inputs=(real(2, 7, 6),))
    yield from over_dtypes(base, use_bias=(True, False))
    yield from with_inputs(base, real(6), real(4, 6), real(0, 6), real(2, 3, 4, 6))
    yield from with_options(base, [*KERNEL_OPTIONS, HALF])


def linear_general():
    base = Case("LinearGeneral", (6, 5), BIAS, (real(2, 7, 6),))
    yield Case("LinearGeneral", (6, 5), inputs=(real(2, 7, 6),))
    yield from over_dtypes(base, ("float32", "int32"), use_bias=(True, False))
    yield from with_options(base, [*KERNEL_OPTIONS, HALF])
    shapes = [
        (((7, 6), (4, 5)), {"axis": (-2, -1)}),
        (((7, 6), 5), {"axis": (1, 2)}),
        ((2, 5), {"axis": 0}),
        ((7, (4, 5)), {"axis": -2}),
        ((6, 5), {"batch_axis": {0: 2}}),
        ((6, (4, 5)), {"batch_axis": {0: 2, 1: 7}}),
        ((7, 5), {"axis": 1, "batch_axis": {0: 2}}),
    ]
    for args, options in shapes:
        yield from with_options(
            base.but(args=args, options={**ALL, **options}),
            each(use_bias=(True, False)),
        )
    custom = {"dot_general_cls": lambda: jax.lax.dot_general}
    yield from with_options(base, [custom, {"dot_general": jax.lax.dot_general}])


def einsum():
    base = Case("Einsum", ("...a,ab->...b", (6, 5), (5,)), BIAS, (real(2, 7, 6),))
    yield Case("Einsum", base.args, inputs=base.inputs)
    yield from over_dtypes(base)
    yield from with_options(base, [*KERNEL_OPTIONS, HALF])
    equations = [
        (("nta,hab->nthb", (3, 6, 5), (3, 5)), real(2, 7, 6)),
        (("nta,hab->nthb", (3, 6, 5)), real(2, 7, 6)),
        (("nta , ab -> ntb", (6, 5), 5), real(2, 7, 6)),
        (("nta,tab->ntb", (7, 6, 5), (7, 5)), real(2, 7, 6)),
        (("nta,ab->bnt", (6, 5), (5,)), real(2, 7, 6)),
        (("...hd,hdo->...o", (3, 6, 5), (5,)), real(2, 3, 6)),
        (("d...ab,bc...->ad...c", (6, 5, 3), (3, 5)), real(2, 3, 4, 6)),
        (("ab,ab->ab", (2, 3), (2, 3)), real(2, 3)),
    ]
    for args, inputs in equations:
        yield base.but(args=args, options=ALL, inputs=(inputs,))
    yield base.but(call={"einsum_str": "n t a, a b -> t n b"})


def conv():
    base = Case("Conv", (6, 4, 3), BIAS, (real(2, 5, 6),))
    yield Case("Conv", (6, 4, 3), inputs=base.inputs)
    yield from over_dtypes(base)
    yield from with_options(base, [*KERNEL_OPTIONS, HALF])
    yield from with_options(
        base.but(options=ALL), each(use_bias=(False,), feature_group_count=(2,))
    )
    yield from with_inputs(base, real(5, 6), real(2, 2, 5, 6), real(0, 5, 6))
    yield base.but(args=(6, 6, 3), options={**ALL, "feature_group_count": 6})
    yield from with_options(
        base, grid(padding=("CAUSAL",), strides=(1, 2), kernel_dilation=(1, 2))
    )
    yield from with_options(base, each(mask=(booleans(3, 6, 4), real(3, 6, 4))))
    plane = base.but(args=(3, 4, (3, 2)), options=ALL, inputs=(real(2, 5, 6, 3),))
    yield from with_options(
        plane,
        grid(
            padding=("SAME", "VALID", "SAME_LOWER", "CIRCULAR", "REFLECT")
            + (1, (1, 2), ((0, 1), (2, 1)), [1, (0, 2)]),
            strides=(1, (2, 1)),
            kernel_dilation=(1, (2, 1)),
        ),
    )
    yield from with_options(
        plane,
        grid(padding=(1, ((0, 1), 2)), input_dilation=(2, (1, 3), None)),
    )
    yield from with_inputs(plane, real(5, 6, 3), real(2, 2, 5, 6, 3))
    yield plane.but(args=(3, 4, [3, 2]))
    yield from with_options(plane, each(strides=(2, None), kernel_dilation=(2, None)))
    yield plane.but(args=(3, 2, (2, 2, 2)), inputs=(real(2, 4, 3, 3, 3),))
    refused = "jax.lax refuses named paddings of dilated inputs"
    yield from with_options(
        plane.but(why_different=refused, options={"input_dilation": 2}),
        each(padding=("SAME", "VALID", "SAME_LOWER", "CIRCULAR", "REFLECT")),
    )
    yield plane.but(options={"padding": [[0, 1], 2]}, why_different="a pair is a tuple")
    yield base.but(args=(6, 4, np.int64(3)), why_different="a size is a Python int")


def conv_transpose():
    base = Case("ConvTranspose", (6, 4, 3), BIAS, (real(2, 5, 6),))
    yield Case("ConvTranspose", (6, 4, 3), inputs=base.inputs)
    yield from over_dtypes(base, ("float32", "bfloat16", "int32"))
    yield from with_options(base, [*KERNEL_OPTIONS, HALF, {"use_bias": False}])
    yield from with_inputs(base, real(5, 6), real(2, 2, 5, 6))
    yield from with_options(base, each(mask=(booleans(3, 6, 4), real(3, 6, 4))))
    plane = base.but(args=(3, 4, (3, 2)), options=ALL, inputs=(real(2, 5, 6, 3),))
    yield from with_options(
        plane,
        grid(
            padding=("SAME", "VALID", "CIRCULAR", 1, (1, 2), ((0, 1), (2, 1))),
            strides=(None, (2, 1)),
            transpose_kernel=(False, True),
            kernel_dilation=(None, 2),
        ),
    )
    yield from with_options(plane, each(strides=(1, 2), kernel_dilation=((1, 2),)))
    yield plane.but(args=(3, 2, (2, 2, 2), 2), inputs=(real(2, 3, 3, 3, 3),))


def embed():
    base = Case("Embed", (7, 6), inputs=(integers(2, 5),))
    yield from over_dtypes(base, ("int32", "uint8"))
    yield from with_inputs(base, *(integers(2, 5, dtype=d) for d in ("int8", "uint32")))
    yield from with_options(base, each(embedding_init=(initializers.ones,)))
    yield from with_options(base, each(dtype=("float16", jnp.int32, jnp.complex64)))
    yield base.but(options={"embedding_metadata": {"note": 1}})
    outside = np.array([-1, -7, 6, 7, -8, 100])
    yield from with_inputs(base, integers(), integers(0, 3), integers(1, 2, 3), outside)
    yield base.but(args=(1, 6), inputs=(integers(2, 3),))
    refused = base.but(
        args=(1, 6), why_different="a single row needs an axis of inputs"
    )
    yield refused.but(inputs=(integers(),))
    attend = base.but(method="attend", inputs=(real(2, 3, 6),))
    yield from over_dtypes(attend)
    yield from with_inputs(attend, real(6), real(0, 6))


def prelu():
    base = Case("PReLU", inputs=(real(3, 4),))
    for dtype in INPUT_DTYPES[:3]:
        yield from with_inputs(base, real(3, 4, dtype=dtype))
        yield from over_dtypes(base.but(args=(0.3,)), (dtype,))
    yield from with_options(base, each(negative_slope_metadata=({"note": 1},)))


# --------------------------------------------------------------------- normalization


def batch_norm():
    base = Case("BatchNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(4, 3, 6), booleans(4, 3, 1), booleans(4, 1, 1))
    yield from with_options(
        base, grid(use_fast_variance=(True, False), momentum=(0.99, 0.5, 0.0))
    )
    yield base.but(options={"axis": 1}, args=(3,))
    yield base.but(options={"axis": 0}, args=(4,))
    yield base.but(options={"axis": -3}, args=(4,), call={"mask": booleans(1, 3, 6)})
    evaluated = base.but(prepare=_train_once_then_evaluate)
    yield from over_dtypes(evaluated, ("float32", "bfloat16"))
    yield from with_call(evaluated, [{"use_running_average": False}])
    yield from with_call(base, each(use_running_average=(True, False)))
    yield base.but(
        options={"use_running_average": None}, call={"use_running_average": False}
    )


def _train_once_then_evaluate(layer):
    x = jax.random.normal(jax.random.key(9), (4, layer.num_features)) + 2
    layer(x)
    layer.eval()


def _norms(base, *masks):
    yield Case(base.name, base.args, inputs=base.inputs)
    yield from over_dtypes(base, ("float32", "bfloat16", "int32"))
    yield base.but(inputs=(real(4, 3, 6, dtype="float16"),))
    yield from with_options(base, grid(use_bias=(True, False), use_scale=(True, False)))
    unpromoted = {"promote_dtype": lambda arrays, **options: arrays}
    yield from with_options(
        base,
        [
            {"epsilon": 1e-2},
            {"use_fast_variance": False},
            {"bias_metadata": {"note": 1}},
            {"scale_metadata": {"note": 2}},
            {"dtype": "bfloat16"},
            unpromoted,
        ],
    )
    for mask in masks:
        yield from with_options(
            base.but(call={"mask": mask}),
            [{}, {"dtype": jnp.bfloat16}, {"use_fast_variance": False}],
        )


def layer_norm():
    base = Case("LayerNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(4, 3, 6), booleans(1, 1, 6))
    yield base.but(options={"dtype": jnp.complex64})
    yield from with_inputs(base, real(6), real(0, 6), real(2, 6), real(2, 4, 3, 6))
    yield from with_options(base, each(reduction_axes=((1, 2), (0, -1), -2, (0, 1, 2))))
    yield base.but(args=(18,), options={"feature_axes": (-2, -1)})
    yield base.but(
        args=(18,), options={"feature_axes": (1, 2), "reduction_axes": (1, 2)}
    )
    yield base.but(args=(4,), options={"feature_axes": 0})
    yield _averaged_over_a_mapped_axis(base)


def rms_norm():
    base = Case("RMSNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    masks = booleans(4, 3, 6), booleans(1, 1, 6)
    for case in _norms(base, *masks):
        options = {k: v for k, v in case.options.items() if "bias" not in k}
        yield Case("RMSNorm", case.args, options, case.inputs, case.call)
    base = Case("RMSNorm", (6,), {"scale_init": initializers.normal()}, base.inputs)
    yield from with_inputs(base, real(6), real(0, 6), real(2, 4, 3, 6))
    yield from with_options(base, each(reduction_axes=((1, 2), (0, -1), -2)))
    yield base.but(args=(18,), options={"feature_axes": (-2, -1)})
    yield base.but(options={"dtype": jnp.complex64})
    yield base.but(inputs=(real(4, 3, 6), booleans(4, 3, 6)))
    yield _averaged_over_a_mapped_axis(base)


def instance_norm():
    base = Case("InstanceNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(4, 3, 6), booleans(1, 3, 1))
    yield from with_inputs(base, real(2, 4, 3, 6), real(2, 6))
    yield base.but(args=(3,), options={"feature_axes": 1})
    yield base.but(args=(18,), options={"feature_axes": (1, 2)})
    yield _averaged_over_a_mapped_axis(base)


def group_norm():
    base = Case("GroupNorm", (6, 3), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(4, 3, 6), booleans(4, 1, 6))
    yield from with_options(base.but(args=(6, None)), each(group_size=(1, 2, 3, 6)))
    yield from (base.but(args=(6, groups)) for groups in (1, 2, 6))
    yield base.but(args=(32,), inputs=(real(4, 3, 32),))
    yield from with_inputs(base, real(2, 6), real(2, 4, 3, 6))
    yield from with_options(base, each(reduction_axes=((1, 2), (-2, -1), (0, 2))))
    yield _averaged_over_a_mapped_axis(base)
    mixed = base.but(why_different="statistics of kept axes go to the wrong groups")
    yield from with_options(mixed, each(reduction_axes=(-1,)))
    yield from with_options(
        mixed.but(inputs=(real(2, 4, 3, 6),)),
        each(reduction_axes=((-2, -1), (1, -1), (0, -1))),
    )
    no_batch = base.but(why_different="axis 0 is taken for one that is never reduced")
    yield no_batch.but(options={"reduction_axes": (0, 1, 2)})
    yield no_batch.but(inputs=(real(6),))
    per_position = base.but(call={"mask": booleans(4, 3, 1)})
    yield per_position.but(why_different="a mask needs one entry per channel")


def _averaged_over_a_mapped_axis(base):
    def call(library, layer, x):
        return jax.vmap(layer, axis_name="i")(x)

    return base.but(options={"axis_name": "i"}, inputs=(real(2, 4, 3, 6),), method=call)


def dropout():
    make_rngs = PerLibrary(lambda library, rngs: library.Rngs(dropout=rngs()))
    make_stream = PerLibrary(lambda library, rngs: rngs.fork()["dropout"])
    key = PerLibrary(lambda library, rngs: rngs())
    base = Case("Dropout", (0.5,), inputs=(real(4, 3, 6),), calls=3)
    yield base
    for dtype in INPUT_DTYPES[:3]:
        for rate in (0, 0.0, 0.1, 0.5, 0.9, 1, 1.0):
            yield base.but(args=(rate,), inputs=(real(4, 3, 6, dtype=dtype),))
    yield from with_options(
        base, each(broadcast_dims=((0,), (1,), (-1,), (0, 2), (-1, -3), (0, 1, 2)))
    )
    for streams in (("dropout",), ("params", "dropout"), ("default", "noise")):
        named = base.but(streams=streams)
        yield named
        yield named.but(options={"rng_collection": streams[-1], "broadcast_dims": (1,)})
    yield from with_options(base, each(deterministic=(True, False)))
    yield from with_call(base, each(deterministic=(True, False)))
    yield base.but(options={"deterministic": True}, call={"deterministic": False})
    yield base.but(options={"rngs": make_stream}, streams=("params", "dropout"))
    yield base.but(prepare=lambda layer: layer.eval())
    yield base.but(call={"rngs": make_rngs})
    for given in (make_rngs, make_stream, key):
        yield base.but(options={"rngs": None}, call={"rngs": given})
    yield base.but(inputs=(integers(4, 3),), why_different="integers crash in select")


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
}
