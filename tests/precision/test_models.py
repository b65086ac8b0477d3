"""Policies set in models."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, tables, zoo
from tests.comparisons import raises, unchanged
from tests.random_arrays import initializer

set_policy = nnx.precision.set_policy
INIT = {"kernel_init": initializer}
POLICY = "params=f32, compute=bf16, output=f32"
HALF = "params=bf16, compute=bf16"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        options = {"decode": False, "normalize_qk": True, **INIT}
        self.attn = nnx.MultiHeadAttention(2, 8, **options, rngs=rngs)
        self.mlp = nnx.Linear(8, 8, **INIT, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 8, embedding_init=initializer, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 10, **INIT, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = jnp.arange(6).reshape(2, 3)


@pytest.fixture
def model():
    return Model(nnx.Rngs(0))


def output_dtype(model):
    """The dtype of what a `Model` gives."""
    return nnx.eval_shape(lambda m: m(TOKENS), model).dtype


def dtypes_of(model):
    """The dtypes of all Variables, by path."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {path: leaf.get_raw_value().dtype for path, leaf in flat}


def everything(model):
    """The structure and the values of a model."""
    graphdef, state = nnx.split(model)
    return graphdef, jax.tree.map(np.asarray, state)


def test_layers_get_the_dtypes_that_their_arguments_would_give_them(model):
    set_policy(model, "params=bf16, compute=f16")
    dtypes = {"dtype": jnp.float16, "param_dtype": jnp.bfloat16}
    rngs = nnx.Rngs(0)
    nnx.Embed(10, 8, rngs=rngs)
    written = nnx.Linear(8, 10, rngs=rngs, **INIT, **dtypes)
    assert nnx.graphdef(model.head) == nnx.graphdef(written)
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs, **dtypes)
    assert nnx.graphdef(model.blocks[0].attn.out) == nnx.graphdef(attention.out)
    assert model.blocks[0].attn.dtype is jnp.float16
    assert {*dtypes_of(model).values()} == {jnp.dtype("bfloat16")}


def test_master_weights_stay_float32_and_layers_compute_in_half(model):
    set_policy(model, POLICY)
    assert {*dtypes_of(model).values()} == {jnp.dtype("float32")}
    assert model.embed(TOKENS).dtype == jnp.bfloat16
    assert model.head(jnp.ones((1, 8))).dtype == jnp.bfloat16
    grads = nnx.eval_shape(nnx.grad(lambda m: m(TOKENS).sum()), model)
    assert {*dtypes_of(grads).values()} == {jnp.dtype("float32")}


def test_norms_compute_in_float32_and_return_what_layers_do(model):
    set_policy(model, POLICY)
    norm, x = model.blocks[0].norm, jnp.ones((2, 8), jnp.bfloat16)
    assert norm.dtype is jnp.float32 and norm(x).dtype == jnp.bfloat16
    assert model.blocks[0].attn.query_ln.dtype is jnp.float32
    # So a policy turns no working model into one whose carries change their dtype.
    stream = jax.lax.scan(lambda x, _: (norm(x + x), None), x, length=2)[0]
    assert stream.dtype == jnp.bfloat16


def test_the_output_of_the_root_is_cast_and_of_nothing_else(model):
    set_policy(model, POLICY)
    assert output_dtype(model) == jnp.float32
    assert model.blocks[0](jnp.ones((1, 8), jnp.bfloat16)).dtype == jnp.bfloat16


def test_only_floating_arrays_of_an_output_are_cast():
    class Many(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.seen = nnx.BatchStat(jnp.ones(2, jnp.bfloat16))

        def __call__(self, x):
            key = jax.random.key(0)
            y = self.linear(x)
            return {"y": y, "n": jnp.arange(2), "key": key, "box": self.seen, "f": 1.5}

        def half(self, x):
            return self.linear(x)

    many = Many(nnx.Rngs(0))
    set_policy(many, POLICY)
    x = jnp.ones((1, 2))
    found = many(x)
    assert found["y"].dtype == jnp.float32 and found["n"].dtype == jnp.int32
    assert found["box"] is many.seen and found["f"] == 1.5
    assert jnp.issubdtype(found["key"].dtype, jax.dtypes.prng_key)
    assert many.half(x).dtype == jnp.bfloat16


def test_a_base_class_computes_in_half_before_the_result_is_cast():
    class Base(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Derived(Base):
        def __call__(self, x):
            self.seen = nnx.static(super().__call__(x).dtype)
            return super().__call__(x)

    model = Derived(nnx.Rngs(0))
    set_policy(model, POLICY)
    assert model(jnp.ones((1, 2))).dtype == jnp.float32
    assert model.seen == jnp.bfloat16


def test_the_output_is_cast_in_transforms(model, mode):
    set_policy(model, POLICY)
    assert nnx.jit(lambda m, x: m(x), **mode)(model, TOKENS).dtype == jnp.float32

    def loss(m):
        return m(TOKENS).sum()

    grads = nnx.eval_shape(nnx.grad(loss, **mode), model, **mode)
    assert grads.head.bias.get_raw_value().dtype == jnp.float32
    mapped = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), **mode)
    assert mapped(model, TOKENS).dtype == jnp.float32


def test_the_output_is_cast_wherever_the_model_goes(model):
    set_policy(model, POLICY)
    copies = [
        nnx.clone(model),
        nnx.merge(*nnx.split(model)),
        pickle.loads(pickle.dumps(nnx.split(model))),
        jax.tree.map(lambda x: x, model),
    ]
    copies[2] = nnx.merge(*copies[2])
    assert [output_dtype(copy) for copy in copies] == [jnp.float32] * 4
    assert jax.eval_shape(lambda m: m(TOKENS), model).dtype == jnp.float32


def test_observers_see_the_output_that_is_cast(model):
    set_policy(model, POLICY)
    seen = {}

    def note(path, _, args, output):
        seen[path] = output.dtype

    with nnx.debugging.intercept(model, Model, note):
        nnx.eval_shape(lambda: model(TOKENS))
    assert seen == {(): jnp.float32}


def test_a_later_policy_takes_the_place_of_an_earlier_one(model):
    before = everything(model)
    set_policy(model, POLICY)
    set_policy(model, "params=f32, compute=f32")
    assert output_dtype(model) == jnp.float32
    assert all("_output" not in str(k) for k in vars(model.blocks[0].norm))
    same = jax.tree.map(np.array_equal, everything(model)[1], before[1])
    assert all(jax.tree.leaves(same))


# Exceptions.


def test_an_exception_holds_for_all_that_is_in_a_part(model):
    set_policy(model, POLICY, exceptions={"blocks[1]": "compute=f16"})
    first, second = model.blocks
    assert first.attn.query.dtype is first.mlp.dtype is jnp.bfloat16
    assert second.attn.query.dtype is second.mlp.dtype is jnp.float16
    assert second.norm.dtype is jnp.float32
    assert second.norm(jnp.ones((1, 8))).dtype == jnp.float16


def test_exceptions_select_by_class_pattern_or_function(model):
    exceptions = {
        nnx.MultiHeadAttention: "compute=f32",
        "blocks[*].mlp": "params=bf16",
        lambda path, module: path == ("head",): "compute=f32, output=bf16",
    }
    set_policy(model, POLICY, exceptions=exceptions)
    assert model.blocks[0].attn.out.dtype is jnp.float32
    assert model.blocks[0].mlp.kernel[...].dtype == jnp.bfloat16
    assert model.blocks[0].mlp.dtype is jnp.bfloat16
    assert model.head.dtype is jnp.float32
    assert model.head(jnp.ones((1, 8))).dtype == jnp.bfloat16


def test_the_innermost_exception_counts_and_then_the_last(model):
    exceptions = {
        "blocks[0].mlp": "compute=f16",
        "blocks[*]": "compute=f32",
        "blocks[1].*": "compute=f16",
        "blocks[1].mlp": "compute=bf16",
    }
    set_policy(model, POLICY, exceptions=exceptions)
    assert model.blocks[0].mlp.dtype is jnp.float16
    assert model.blocks[0].attn.dtype is jnp.float32
    assert model.blocks[1].attn.dtype is jnp.float16
    assert model.blocks[1].mlp.dtype is jnp.bfloat16


def test_norms_take_an_exception_of_their_own(model):
    exceptions = {nnx.LayerNorm: "compute=bf16"}
    set_policy(model, POLICY, exceptions=exceptions)
    assert model.blocks[0].norm.dtype is jnp.bfloat16
    exceptions = {nnx.LayerNorm: "output=f32"}
    set_policy(model, POLICY, exceptions=exceptions)
    assert model.blocks[0].norm(jnp.ones((1, 8))).dtype == jnp.float32


def test_keep_leaves_a_part_as_it_is(model):
    set_policy(model, HALF, exceptions={"blocks[0]": "keep"})
    assert model.blocks[0].norm.dtype is model.blocks[0].mlp.dtype is None
    assert model.blocks[0].mlp.kernel[...].dtype == jnp.float32
    assert model.head.kernel[...].dtype == jnp.bfloat16


@tables.cases(
    "exceptions, told",
    ({"blok[*]": "compute=f32"}, "exceptions='blok[*]' matches no module"),
    ({nnx.Conv: "compute=f32"}, "exceptions=Conv matches no module"),
    ({"head": "compute=f33"}, "'f33' is not a floating dtype"),
    ({"blocks": "output=f32"}, "List has no plain method __call__"),
)
def test_a_wrong_exception_is_an_error_and_changes_nothing(model, exceptions, told):
    with unchanged(model), raises(ValueError, told):
        set_policy(model, HALF, exceptions=exceptions)


def test_exceptions_are_a_dict(model):
    with pytest.raises(TypeError, match="must be a dict"):
        set_policy(model, HALF, exceptions=["head"])


# Layers that it does not know.


def with_scales():
    """A model with two layers of a user that say nothing of dtypes."""
    scales = [zoo.Box(factors=nnx.List([nnx.Param(jnp.ones(8))])) for _ in range(2)]
    return nnx.Dict(linear=nnx.Linear(8, 8, rngs=nnx.Rngs(0)), scales=nnx.List(scales))


def test_unknown_layers_are_returned_and_warned_of():
    model = with_scales()
    with pytest.warns(nnx.errors.UnknownLayerWarning) as caught:
        applied = set_policy(model, HALF)
    assert [x.path for x in applied.unknown] == [("scales", 0), ("scales", 1)]
    text = "scales[0-1]  Box  factors[0] float32[8]"
    assert text in str(caught[0].message) and text in str(applied)
    assert model.scales[0].factors[0][...].dtype == jnp.float32
    assert model.linear.kernel[...].dtype == jnp.bfloat16


def test_strict_makes_unknown_layers_an_error_before_anything_changes():
    model = with_scales()
    with unchanged(model), pytest.raises(ValueError, match="scales"):
        set_policy(model, HALF, strict=True)
    set_policy(model, HALF, strict=True, exceptions={zoo.Box: "keep"})


def test_layers_of_users_with_the_usual_attributes_are_set():
    own = zoo.Box(dtype=None, param_dtype=jnp.float32, bias=nnx.Param(jnp.ones(2)))
    set_policy(own, HALF, strict=True)
    assert own.dtype is own.param_dtype is jnp.bfloat16
    assert own.bias[...].dtype == jnp.bfloat16


def test_attributes_of_these_names_that_hold_no_float_dtypes_stay():
    own = zoo.Box(dtype=jnp.int8, param_dtype="table")
    set_policy(own, HALF, strict=True)
    assert own.dtype is jnp.int8 and own.param_dtype == "table"


# Composite layers.


@pytest.mark.parametrize("policy", [POLICY, "params=bf16, compute=f32"])
@tables.cases("make", nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell)
def test_recurrent_networks_run_with_any_policy(make, policy):
    model = nnx.RNN(make(2, 3, rngs=nnx.Rngs(0)))
    applied = set_policy(model, policy, strict=True)
    cell = [layer for layer in applied.layers if layer.path == ("cell",)]
    assert cell[0].policy.compute == applied.policy.compute
    kernels = [x for path, x in dtypes_of(model).items() if path[-1] == "kernel"]
    assert {*kernels} == {applied.policy.params}
    assert nnx.eval_shape(model, jnp.ones((1, 4, 2))).shape == (1, 4, 3)


def test_low_rank_adaptations_follow_the_layer_or_an_exception():
    layer = nnx.LoRALinear(2, 3, lora_rank=1, rngs=nnx.Rngs(0))
    set_policy(layer, HALF, exceptions={"lora": "params=f32"})
    assert layer(jnp.ones((1, 2))).dtype == jnp.bfloat16
    assert layer.kernel[...].dtype == jnp.bfloat16
    assert layer.lora.lora_a[...].dtype == jnp.float32


@pytest.mark.parametrize("wrapper", [nnx.SpectralNorm, nnx.WeightNorm])
def test_reparametrized_weights_stay_in_the_dtype_of_params(wrapper):
    model = wrapper(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    set_policy(model, POLICY, strict=True)
    assert model(jnp.ones((1, 2))).dtype == jnp.float32
    assert model.layer_instance(jnp.ones((1, 2))).dtype == jnp.bfloat16
    assert {*dtypes_of(model).values()} == {jnp.dtype("float32")}


def test_statistics_streams_and_caches_stay_as_they_are():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(2, 2, rngs=rngs),
        nnx.BatchNorm(2, rngs=rngs),
        nnx.Dropout(0.5, rngs=rngs),
        nnx.RoPE(embedding_size=2, max_seq_len=3),
    )
    others = {p: x for p, x in dtypes_of(model).items() if p[-1] in ("mean", "var")}
    set_policy(model, HALF, strict=True)
    model(jnp.ones((3, 2)))
    found = dtypes_of(model)
    assert {path: found[path] for path in others} == others
    assert found["layers", 1, "scale"] == jnp.bfloat16
    assert model.layers[3].cached_sin[...].dtype == jnp.float32


# Sharing, refs, abstract models, traces.


def test_shared_layers_are_set_once_and_contradictions_are_refused():
    shared = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model = nnx.Dict(a=shared, b=shared)
    applied = set_policy(model, HALF)
    assert [layer.path for layer in applied.layers] == [("a",)]
    with raises(ValueError, "shared part", "b: params=bfloat16, compute=float32"):
        set_policy(model, HALF, exceptions={"b": "compute=f32"})
    with raises(ValueError, "two policies", "b: as it is"):
        set_policy(model, HALF, exceptions={"b": "keep"})
    set_policy(model, HALF, exceptions={"{a,b}": "compute=f32"})
    assert shared.dtype is jnp.float32


def test_tied_params_get_one_dtype():
    rngs = nnx.Rngs(0)
    model = nnx.Dict(a=nnx.Linear(2, 2, rngs=rngs), b=nnx.Linear(2, 2, rngs=rngs))
    model.b.kernel = model.a.kernel
    with pytest.raises(ValueError, match="shared part"):
        set_policy(model, HALF, exceptions={"b": "params=f32"})
    set_policy(model, HALF)
    assert model.b.kernel is model.a.kernel


def test_array_refs_are_replaced_and_still_updated_in_place():
    model = nnx.with_vars(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ref=True)
    set_policy(model, HALF)
    assert model.kernel.has_ref and model.kernel[...].dtype == jnp.bfloat16

    @jax.jit
    def reset(model):
        model.kernel[...] = jnp.zeros_like(model.kernel[...])

    reset(model)
    assert not model.kernel[...].any()


def test_abstract_models_get_dtypes_too():
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    set_policy(model, HALF)
    assert model.head.kernel.get_raw_value().dtype == jnp.bfloat16
    assert isinstance(model.head.kernel.get_raw_value(), jax.ShapeDtypeStruct)


def test_compiled_functions_notice_a_new_policy(model):
    run = nnx.jit(lambda m: m.head(jnp.ones((1, 8))))
    dtypes = [run(model).dtype, run(model).dtype]
    set_policy(model, POLICY)
    dtypes.append(run(model).dtype)
    assert dtypes == [jnp.float32, jnp.float32, jnp.bfloat16]


def test_a_model_of_another_trace_is_refused(model, mode):
    @nnx.jit(**mode)
    def run(x):
        set_policy(model, HALF)
        return x

    with unchanged(model), pytest.raises(nnx.errors.TraceContextError):
        run(1.0)


def test_what_holds_no_layers_is_refused():
    with pytest.raises(TypeError, match="got State"):
        set_policy(nnx.state(nnx.Dict()), HALF)


def test_a_model_without_a_plain_call_has_no_output():
    class Jitted(nnx.Module):
        @nnx.jit
        def __call__(self, x):
            return x

    for model in (nnx.Dict(a=nnx.Linear(2, 2, rngs=nnx.Rngs(0))), Jitted()):
        with pytest.raises(ValueError, match="(Dict|Jitted) has no plain method __cal"):
            set_policy(model, POLICY)


def floating_dtypes(outputs):
    leaves = jax.tree.leaves(outputs)
    return {str(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}


@pytest.mark.filterwarnings("ignore::graftree.errors.UnknownLayerWarning")
@catalog.every_family
def test_output_is_what_any_layer_returns_that_is_the_model(row):
    layer, inputs = row.make(), row.inputs()
    for output in ("float32", "bfloat16", "float16"):
        set_policy(layer, f"params=f32, compute=bf16, output={output}")
        assert floating_dtypes(nnx.eval_shape(nnx.jit(row), layer, *inputs)) == {output}
    assert floating_dtypes(row(layer, *inputs)) == {output}


@pytest.mark.parametrize("where", ["", nnx.LayerNorm])
def test_an_exception_may_say_what_a_norm_returns_that_is_the_model(where):
    x = jnp.ones((1, 8))
    for said, expected in (("output=f16", "float16"), ("compute=f16", "float32")):
        norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        exceptions = {(lambda path, _: path == ()) if where == "" else where: said}
        set_policy(norm, POLICY, exceptions=exceptions)
        assert norm(x).dtype == expected
