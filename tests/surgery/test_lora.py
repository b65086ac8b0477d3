"""LoRA onto the layers of a model and into their kernels, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import graftree as nnx
from tests import meshes, zoo
from tests.comparisons import raises, unchanged

surgery = nnx.surgery
CALL = nnx.jit(lambda layer, x: layer(x))


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# How each is made, the shape of its inputs, and what its kernel counts as, by the
# letters of its axes.
LAYERS = {
    "general": (
        lambda rngs: nnx.LinearGeneral((2, 3), (4, 5), axis=(-1, 1), rngs=rngs),
        *((6, 2, 7, 3), "hir,rop->hiop"),
    ),
    "conv": (
        lambda rngs: nnx.Conv(3, 5, (3, 2), 2, padding="CIRCULAR", rngs=rngs),
        *((2, 8, 6, 3), "klir,ro->klio"),
    ),
    "half": (
        lambda rngs: nnx.Linear(
            3, 5, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, rngs=rngs
        ),
        *((2, 3), "ir,ro->io"),
    ),
}


def adapted(name, *, alpha=6, rank=2):
    """A model of one layer with LoRA that is not zero, a plain one, and inputs."""
    make, shape, _ = LAYERS[name]
    model = nnx.Dict(layer=make(nnx.Rngs(0)))
    plain = nnx.clone(model)
    paths = surgery.add_lora(model, "layer", rank=rank, alpha=alpha, rngs=nnx.Rngs(1))
    assert paths == [("layer",)]
    x = random(0, *shape)
    unchanged, expected = CALL(model.layer, x), CALL(plain.layer, x)
    np.testing.assert_array_equal(unchanged, expected)
    assert unchanged.dtype == expected.dtype
    low_rank = model.layer.lora
    low_rank.lora_b[...] = random(1, *low_rank.lora_b.shape)
    return model, plain, x


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_counts_with_the_sum_of_kernel_and_product(name):
    model, plain, x = adapted(name)
    low_rank = model.layer.lora
    a, b = np.float64(low_rank.lora_a[...]), np.float64(low_rank.lora_b[...])
    kernel = np.float64(plain.layer.kernel[...]) + 3 * np.einsum(LAYERS[name][2], a, b)
    expected = nnx.clone(plain)
    expected.layer.kernel[...] = kernel.astype(np.float32)
    rtol = 3e-2 if name == "half" else 2e-5
    wanted, outputs = CALL(expected.layer, x), CALL(model.layer, x)
    size = np.abs(wanted).max()
    np.testing.assert_allclose(outputs, wanted, atol=rtol * size)
    assert outputs.dtype == wanted.dtype

    assert surgery.merge_lora(model) == [("layer",)]
    np.testing.assert_allclose(model.layer.kernel, kernel, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(CALL(model.layer, x), outputs, atol=rtol * size)
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    assert type(model.layer) is type(plain.layer)


def test_a_table_of_one_row_counts_with_the_sum_in_look_up_and_attention():
    model = nnx.Dict(layer=nnx.Embed(1, 3, rngs=nnx.Rngs(0)))
    surgery.add_lora(model, nnx.Embed, rank=2, rngs=nnx.Rngs(1))
    low_rank = model.layer.lora
    low_rank.lora_b[...] = random(1, 2, 3)
    a, b = np.float64(low_rank.lora_a), np.float64(low_rank.lora_b)
    table, query = np.float64(model.layer.embedding) + a @ b, random(2, 5, 3)
    for _ in range(2):
        looked_up, attended = model.layer(np.zeros(2, int)), model.layer.attend(query)
        np.testing.assert_allclose(looked_up, table[[0, 0]], rtol=1e-5)
        np.testing.assert_allclose(attended, query @ table.T, rtol=1e-4, atol=1e-5)
        if type(model.layer) is not nnx.Embed:
            surgery.merge_lora(model)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 4, rngs=rngs)
        )

    def __call__(self, x):
        return x + self.mlp(self.attention(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = random(3, 2, 5, 4)
PATTERN = "blocks.*.attention.{query,value}"
PATHS = [("blocks", 0, "attention", name) for name in ("query", "value")]


def loss(model):
    return jnp.mean((model(X) - 1) ** 2)


def test_only_the_adaptation_is_trained(mode):
    model = Model(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    assert surgery.add_lora(model, PATTERN, rank=2, rngs=nnx.Rngs(1)) == PATHS
    surgery.freeze(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    adamw = optax.adamw(0.1)
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param, graph=mode["graph"])
    # Two moments of [4, 2] and [2, 2, 2] in each of two layers, a count and the step.
    state = nnx.state(optimizer, nnx.OptState)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 2 * 2 * 16 * 4 + 8

    @nnx.jit(**mode)
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss, **mode)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses[-1] < losses[0] == pytest.approx(float(loss(Model(nnx.Rngs(0)))))
    outputs = model(X)
    surgery.unfreeze(model)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.LoRAParam)))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    surgery.merge_lora(model)
    np.testing.assert_allclose(model(X), outputs, rtol=1e-5, atol=1e-6)
    assert nnx.graphdef(model) == nnx.graphdef(Model(nnx.Rngs(0)))


def test_checkpoints_of_the_plain_model_fit():
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(2))
    surgery.add_lora(model, PATTERN, rank=2, rngs=nnx.Rngs(1))
    base = nnx.state(other)
    nnx.checkpoints.load_state(model, base, missing=nnx.LoRAParam)
    np.testing.assert_array_equal(model(X), other(X))
    plain_paths = set(nnx.to_flat_state(base).paths)
    assert set(nnx.to_flat_state(nnx.state(model)).paths) - plain_paths == {
        (*path, "lora", name) for path in PATHS for name in ("lora_a", "lora_b")
    }


def test_shared_layers_are_adapted_once_and_stay_the_same_objects():
    model = Model(nnx.Rngs(0))
    model.tied = model.head
    head, kernel = model.head, model.head.kernel
    assert surgery.add_lora(model, "tied", rank=1, rngs=nnx.Rngs(1)) == [("head",)]
    assert model.tied is model.head is head and head.kernel is kernel
    assert surgery.merge_lora(model, "tied") == [("head",)]
    assert model.tied is head and type(head) is nnx.Linear


def test_adaptations_are_taken_off():
    model = Model(nnx.Rngs(0))
    before = model(X)
    surgery.add_lora(model, nnx.Linear, rank=2, rngs=nnx.Rngs(1))
    model.head.lora.lora_b[...] += 1.0
    assert len(surgery.remove_lora(model, "blocks")) == 2
    assert surgery.remove_lora(model) == [("head",)]
    np.testing.assert_array_equal(model(X), before)
    assert nnx.graphdef(model) == nnx.graphdef(Model(nnx.Rngs(0)))


def test_lora_linear_becomes_linear():
    options = {"lora_rank": 2, "b_initializer": nnx.initializers.ones}
    model = nnx.Dict(layer=nnx.LoRALinear(3, 4, **options, rngs=nnx.Rngs(0)))
    x = random(0, 2, 3)
    before = model.layer(x)
    surgery.merge_lora(model)
    np.testing.assert_allclose(model.layer(x), before, rtol=1e-5)
    plain = nnx.Dict(layer=nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    assert nnx.graphdef(model) == nnx.graphdef(plain)


def test_new_variables_are_sharded_like_the_axes_of_the_kernel():
    with jax.set_mesh(meshes.mesh_of(x=2, y=2)):
        layer = nnx.LinearGeneral(
            4, (2, 6), kernel_metadata={"out_sharding": ("x", "y")}, rngs=nnx.Rngs(0)
        )
    model = nnx.Dict(layer=layer)
    surgery.add_lora(model, "layer", rank=2, rngs=nnx.Rngs(1))  # no mesh is set
    a, b = layer.lora.lora_a, layer.lora.lora_b
    assert (a.out_sharding, b.out_sharding) == (("x", None), (None, "y", None))
    assert a.sharding.spec == PartitionSpec("x", None)
    assert b.sharding.spec == PartitionSpec(None, "y", None)
    assert a.eager_sharding
    surgery.merge_lora(model)
    assert layer.kernel.sharding.spec == PartitionSpec("x", "y")


def test_factors_of_an_einsum_are_sharded_by_the_letters_of_the_kernel():
    with jax.set_mesh(meshes.mesh_of(x=2, y=2)):
        options = {"kernel_metadata": {"out_sharding": ("y", "x", None)}}
        layer = nnx.Einsum("btd,ndh->btnh", (2, 4, 3), **options, rngs=nnx.Rngs(0))
    surgery.add_lora(layer, nnx.Einsum, rank=2, rngs=nnx.Rngs(1))
    a, b = layer.lora.lora_a, layer.lora.lora_b
    assert (a.out_sharding, b.out_sharding) == (("x", None), (None, "y", None))
    surgery.merge_lora(layer)
    assert layer.kernel.sharding.spec == PartitionSpec("y", "x", None)


def test_abstract_models_get_abstract_variables_that_can_be_loaded():
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    surgery.add_lora(model, PATTERN, rank=2, rngs=nnx.Rngs(1))
    real = Model(nnx.Rngs(0))
    surgery.add_lora(real, PATTERN, rank=2, rngs=nnx.Rngs(1))
    shapes = [
        jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(m)))
        for m in (model, real)
    ]
    assert shapes[0] == shapes[1] and nnx.graphdef(model) == nnx.graphdef(real)
    nnx.update(model, nnx.state(real))
    np.testing.assert_array_equal(model(X), real(X))
    with pytest.raises(ValueError, match="its kernel is abstract"):
        surgery.merge_lora(nnx.eval_shape(lambda: nnx.clone(real)))


def test_half_precision_layers_keep_their_dtypes():
    layer = nnx.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model = nnx.Dict(layer=layer)
    x = jnp.asarray(random(0, 2, 3), jnp.bfloat16)
    surgery.add_lora(model, "layer", rank=2, rngs=nnx.Rngs(1))
    assert layer.lora.lora_a.dtype == jnp.bfloat16 == layer(x).dtype
    surgery.remove_lora(model)
    options = {"rank": 2, "rngs": nnx.Rngs(1), "param_dtype": jnp.float32}
    surgery.add_lora(model, "layer", **options)
    assert layer.lora.lora_a.dtype == jnp.float32 and layer(x).dtype == jnp.bfloat16
    layer.lora.lora_b[...] += 1.0
    surgery.merge_lora(model)
    assert layer.kernel.dtype == jnp.bfloat16


def test_refs_stay_refs():
    with nnx.use_refs(True):
        model = nnx.Dict(layer=nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    ref = model.layer.kernel.get_raw_value()
    surgery.add_lora(model, "layer", rank=2, rngs=nnx.Rngs(1))
    assert model.layer.lora.lora_b.ref
    jax.jit(lambda m: m.layer.lora.lora_b.set_value(jnp.ones((2, 4))))(model)
    x = random(0, 2, 3)
    before = model.layer(x)
    surgery.merge_lora(model)
    assert model.layer.kernel.get_raw_value() is ref
    np.testing.assert_allclose(model.layer(x), before, rtol=1e-5)


class MyLinear(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


def refused_model():
    rngs = nnx.Rngs(0)
    return nnx.Dict(
        mine=MyLinear(2, 2, rngs=rngs),
        adapted=nnx.LoRALinear(2, 2, lora_rank=1, rngs=rngs),
        norm=nnx.LayerNorm(2, rngs=rngs),
        grouped=nnx.Conv(2, 2, 1, feature_group_count=2, rngs=rngs),
        masked=nnx.Conv(2, 2, 1, mask=jnp.ones((1, 2, 2)), rngs=rngs),
        wrapped=nnx.WeightNorm(nnx.Linear(2, 2, rngs=rngs), rngs=rngs),
        free=nnx.Einsum(None, (2, 2), rngs=rngs),
        scaled=nnx.Einsum("bde,de->bde", (2, 2), rngs=rngs),
        summed=nnx.Einsum("bd,dhk->bh", (2, 2, 2), rngs=rngs),
        own=zoo.Box(
            vector=nnx.Param(jnp.ones(2)), number=nnx.Param(jnp.ones((2, 2), int))
        ),
        many=nnx.List([nnx.Param(jnp.ones((2, 2)))]),
        taken=zoo.Box(w=nnx.Param(jnp.ones((2, 2))), lora=1),
        fine=nnx.Linear(2, 2, rngs=rngs),
    )


REFUSED = {
    "mine": "mine: MyLinear is a subclass, which may compute something else",
    "adapted": "adapted: LoRALinear already has LoRA",
    "norm": "norm: LayerNorm has no kernel that can be adapted",
    "grouped": "grouped: a Conv with feature_group_count=2",
    "masked": "masked: a Conv with a mask",
    "wrapped.layer_instance": "wrapped.layer_instance: SpectralNorm or WeightNorm",
    "wrapped.layer_instance.kernel": "wrapped.layer_instance.kernel: SpectralNorm",
    "free": "free: an Einsum without an equation of its own",
    "scaled": "scaled: not a product of inputs and a matrix: 'bde,de->bde'",
    "summed": "summed: not a product of inputs and a matrix",
    "own.vector": "own.vector: it has fewer than two axes of its own",
    "own.number": "own.number: its dtype is int32",
    "many[0]": "many[0]: it is in a List, not an attribute of a module",
    "taken.w": "taken.w: its Box has an attribute `lora`",
    "adapted.lora.lora_a": "adapted.lora.lora_a: it is itself part of LoRA",
}


def test_what_cannot_be_adapted_is_listed_and_nothing_is_changed():
    model, rngs = refused_model(), nnx.Rngs(1)
    told = [*map(REFUSED.get, sorted(REFUSED)), "Select layers of the classes Conv"]
    with unchanged(model, rngs), raises(ValueError, "some of what is selected", *told):
        surgery.add_lora(model, [*REFUSED, "fine"], rank=1, rngs=rngs)


def test_params_are_selected_where_no_layer_matches():
    def model():
        own = zoo.Box(w=nnx.Param(jnp.ones((2, 2))), b=nnx.Param(jnp.ones(2)))
        return nnx.Dict(fc=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), own=own)

    matrices = nnx.All(nnx.Param, lambda path, x: x.ndim == 2)
    for where, paths in (
        (lambda path, x: "fc" in path, [("fc",)]),  # and not its Params
        ("fc.kernel", [("fc",)]),
        (matrices, [("fc",), ("own", "w")]),
        (["fc", "own.w"], [("fc",), ("own", "w")]),
    ):
        adapted = model()
        found = surgery.add_lora(adapted, where, rank=1, rngs=nnx.Rngs(1))
        assert found == paths
        assert surgery.remove_lora(adapted, paths[-1][0]) == paths[-1:]
    with raises(ValueError, "matches no layer", "similar paths: own.w"):
        surgery.add_lora(model(), "own.ww", rank=1, rngs=nnx.Rngs(1))
    twice = model()
    surgery.add_lora(twice, "own.w", rank=1, rngs=nnx.Rngs(1))
    with raises(ValueError, "own.w: it already has LoRA"):
        surgery.add_lora(twice, "own.w", rank=1, rngs=nnx.Rngs(1))


class Halved(nnx.Param):
    def get_value(self, **options):
        return super().get_value(**options) / 2


def test_a_param_with_behaviour_of_its_own_is_read_by_it():
    model = nnx.Dict(own=zoo.Scale())
    model.own.w = Halved(jnp.full((2, 2), 4.0))
    ones = nnx.initializers.ones
    options = {"a_initializer": ones, "b_initializer": ones, "rngs": nnx.Rngs(0)}
    surgery.add_lora(model, "own.w", rank=3, alpha=3, **options)
    np.testing.assert_array_equal(model.own(1.0), np.full((2, 2), 4 / 2 + 3))
    with raises(ValueError, "own.w: its kernel, a Halved, has custom behaviour"):
        surgery.merge_lora(model)


def test_an_einsum_is_adapted_for_its_own_equation():
    layer = nnx.Einsum("bi,io->bo", (3, 4), rngs=nnx.Rngs(0))
    surgery.add_lora(layer, nnx.Einsum, rank=1, rngs=nnx.Rngs(1))
    x = random(0, 2, 3)
    np.testing.assert_array_equal(layer(x, "bi, io -> bo"), layer(x))
    with raises(ValueError, "another equation: 'bi,io->ob'", "einsum_str=None"):
        layer(x, "bi,io->ob")


def test_nothing_stays_behind_if_an_initializer_fails():
    model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(1)
    calls = iter(range(9))

    def failing(*args):
        if next(calls) == 1:
            raise RuntimeError("no more")
        return nnx.initializers.ones(*args)

    with unchanged(model, rngs), pytest.raises(RuntimeError, match="no more"):
        surgery.add_lora(model, PATTERN, rank=2, rngs=rngs, a_initializer=failing)


def test_wrong_arguments_are_refused():
    model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(1)
    for rank in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=f"positive integer as `rank`, got {rank}"):
            surgery.add_lora(model, "head", rank=rank, rngs=rngs)
    with raises(ValueError, "where='haed' matches no layer", "similar paths: head"):
        surgery.add_lora(model, "haed", rank=1, rngs=rngs)
    with pytest.raises(AttributeError, match="params"):
        surgery.add_lora(model, "head", rank=1, rngs=3)
    with pytest.raises(ValueError, match=r"merge_lora: no layer in the model has LoRA"):
        surgery.merge_lora(model)
    with pytest.raises(ValueError, match="remove_lora: no layer in 'head' has LoRA"):
        surgery.remove_lora(model, "head")


def test_kernels_that_others_use_are_not_merged():
    rngs = nnx.Rngs(0)
    model = nnx.Dict(a=nnx.Linear(2, 2, rngs=rngs), b=nnx.Linear(2, 2, rngs=rngs))
    model.b.kernel = model.a.kernel
    surgery.add_lora(model, "a", rank=1, rngs=rngs)
    with pytest.raises(ValueError, match="a: its kernel is shared: a.kernel, b.kernel"):
        surgery.merge_lora(model)
    assert "lora" in vars(model.a)
    model.a.kernel = nnx.clone(model.a.kernel)
    assert surgery.merge_lora(model) == [("a",)]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.float32])
def test_a_kernel_that_would_overflow_is_not_merged(dtype):
    def layer():
        options = {"param_dtype": dtype, "kernel_init": nnx.initializers.zeros}
        return nnx.Linear(2, 2, dtype=jnp.float32, **options, rngs=nnx.Rngs(0))

    model = nnx.Dict(a=layer(), b=layer())
    surgery.add_lora(model, ["a", "b"], rank=1, rngs=nnx.Rngs(0))
    model.b.lora.lora_a.set_value(jnp.array([[2.0], [0.0]]))
    model.b.lora.lora_b.set_value(jnp.array([[float(jnp.finfo(dtype).max), 0.5]]))
    where = "b: 1 of 4 numbers are no longer finite in"
    with unchanged(model), raises(ValueError, "would overflow", where):
        surgery.merge_lora(model)
    model.b.lora.lora_b.set_value(jnp.array([[0.25, 0.5]]))
    assert len(surgery.merge_lora(model)) == 2


def test_lora_that_belongs_to_no_layer_is_not_forgotten_silently():
    base = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model = nnx.Dict(
        wrapped=nnx.LoRA(2, 1, 2, base_module=base, rngs=nnx.Rngs(0)),
        layer=nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
    )
    surgery.add_lora(model, "layer", rank=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="not belong to a layer.*\n  wrapped: LoRA"):
        surgery.merge_lora(model)
    assert surgery.merge_lora(model, "layer") == [("layer",)]


def test_inside_a_transform_layers_of_arguments_stay_what_they_are_outside(mode):
    model = Model(nnx.Rngs(0))

    def adapt(model):
        surgery.add_lora(model, "head", rank=1, rngs=nnx.Rngs(1))

    told = pytest.warns(nnx.errors.LostUpdateWarning)
    if mode.get("graph_updates"):
        told = pytest.raises(ValueError, match="Expected an object of type LoRALinear")
    with unchanged(model), told:
        nnx.jit(adapt, **mode)(model)
    with unchanged(model), pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda: adapt(model))()
