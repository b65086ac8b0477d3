"""LoRA, DoRA, dropout and rank-stabilized scales, on every kind of weight.

Layers are linear in their weight and in their inputs, so outputs and gradients are
known in NumPy's float64: with ``w`` stored, ``v = w + scale * a @ b`` and its columns
scaled to ``m``, a layer gives ``f(x, w) + f(kept, m * v / |v| - w)``.
"""

import itertools
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import graftree as nnx
from tests import meshes
from tests.comparisons import raises
from tests.surgery.adapted_kinds import CALL, KINDS, SCALE, check, float64, numbers

surgery = nnx.surgery
VARIANTS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "dropout": {"dropout": 0.5},
    "all": {"use_rslora": True, "use_dora": True, "dropout": 0.5},
}


class Adapted:
    """A model of one layer with LoRA that is not zero, and its formula."""

    def __init__(self, variant, name):
        self.kind, self.options = KINDS[name], dict(VARIANTS[variant])
        self.model = nnx.Dict(layer=self.kind.make(nnx.Rngs(0)))
        self.plain = nnx.clone(self.model)
        where = surgery.at(self.kind.where)
        options = {"rank": 2, "alpha": 2 * SCALE, "rngs": nnx.Rngs(1)}
        if name in OWN and "dropout" in self.options:
            before = nnx.graphdef(self.model)
            with raises(ValueError, "dropout=0.5", "layer.", "without dropout"):
                surgery.add_lora(self.model, where, **options, **self.options)
            assert nnx.graphdef(self.model) == before
            del self.options["dropout"]
        surgery.add_lora(self.model, where, **options, **self.options)
        x = self.kind.x
        outputs = CALL(self.model.layer, x)
        check(outputs, np.float64(CALL(self.plain.layer, x)), 1e-6)
        a, b, *lengths = self.leaves()
        b[...] = numbers(*b.shape)
        for leaf in lengths:
            leaf[...] *= 1 + abs(numbers(*leaf.shape))

    def leaves(self, model=None):
        state = nnx.state(model or self.model, nnx.LoRAParam)
        flat = nnx.to_flat_state(state)
        names = ["lora_a", "lora_b", "magnitude"][: 2 + ("use_dora" in self.options)]
        assert [path[-1] for path in flat.paths] == names
        return flat.leaves

    def weight(self, model=None):
        params = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
        (leaf,) = nnx.to_flat_state(nnx.state(model or self.model, params)).leaves
        return leaf

    @property
    def scale(self):
        return SCALE * (np.sqrt(2) if "use_rslora" in self.options else 1)

    @property
    def letters(self):
        """Those of ``a``, ``b``, the kernel, and the magnitude."""
        factors, kernel = self.kind.product.split("->")
        a, b = factors.split(",")
        batch = [x for x in kernel if x in a and x in b]
        return a, b, kernel, "".join([*batch, *[x for x in kernel if x not in a]])

    def direction(self):
        """The sum and its gains, ``1`` without DoRA."""
        w, a, b, *lengths = float64(self.weight(), *self.leaves())
        _, _, kernel, columns = self.letters
        v = w + self.scale * np.einsum(self.kind.product, a, b)
        if not lengths:
            return v, np.ones_like(v), np.ones_like(v)
        ins = tuple(i for i, x in enumerate(kernel) if x not in columns)
        norm = np.sqrt((v**2).sum(ins, keepdims=True))
        gain = np.einsum(f"{columns},{kernel}->{kernel}", lengths[0], 1 / norm + 0 * v)
        return v, gain, v / norm

    def counts_as(self):
        v, gain, _ = self.direction()
        return gain * v

    def outputs(self, kept):
        w = np.float64(self.weight())
        of = self.kind.expected
        return of(self.kind.x, w) + of(kept, self.counts_as() - w)

    def kept(self):
        """What the next call keeps of the inputs."""
        layer = getattr(self.model.layer, "part", self.model.layer)
        dropout = getattr(layer.lora, "dropout", None)
        if dropout is None or isinstance(self.model.layer, nnx.Embed):
            return self.kind.x
        return np.asarray(nnx.clone(dropout)(jnp.asarray(self.kind.x)))


OWN = [
    name
    for name, kind in KINDS.items()
    if surgery.add_lora(
        nnx.Dict(layer=kind.make(nnx.Rngs(0))),
        surgery.at(kind.where),
        rank=1,
        rngs=nnx.Rngs(0),
    )
    not in ([("layer",)], [("layer", "part")])
]


# A Param that is selected itself has no inputs that could be dropped.
PAIRS = [
    (variant, name)
    for variant, name in itertools.product(VARIANTS, KINDS)
    if variant != "dropout" or name not in OWN
]


@pytest.mark.parametrize(("variant", "name"), PAIRS)
def test_a_weight_counts_as_its_formula_says_and_is_merged(variant, name):
    it = Adapted(variant, name)
    kind, model = it.kind, it.model
    model.eval()
    w = it.counts_as()
    outputs = CALL(model.layer, kind.x)
    check(outputs, kind.expected(kind.x, w), 3e-6)
    for other in (nnx.clone(model), pickle.loads(pickle.dumps(model))):
        assert nnx.graphdef(other) == nnx.graphdef(model)
        check(CALL(other.layer, kind.x), np.float64(outputs), 1e-6)
    taken_off, half = nnx.clone(model), nnx.clone(model)
    nnx.precision.set_policy(half, "params=bf16, compute=bf16", strict=True)
    x = jnp.asarray(kind.x)
    x = x if x.dtype == jnp.int32 else x.astype(jnp.bfloat16)
    rounded = CALL(half.layer, x)
    dtypes = [x.dtype for x in (rounded, it.weight(half), *it.leaves(half))]
    assert {*dtypes} == {jnp.dtype(jnp.bfloat16)}
    check(rounded, kind.expected(kind.x, w), 4e-2)
    surgery.remove_lora(taken_off)
    surgery.merge_lora(model)
    check(it.weight()[...], w, 2e-6)
    check(CALL(model.layer, kind.x), kind.expected(kind.x, w), 3e-6)
    for other in (model, taken_off):
        assert nnx.graphdef(other) == nnx.graphdef(it.plain)


@pytest.mark.parametrize(("variant", "name"), PAIRS)
def test_a_step_moves_what_was_added_along_its_gradients(variant, name, mode):
    it = Adapted(variant, name)
    kind, model = it.kind, it.model
    _, a, b, *_ = float64(it.weight(), *it.leaves())
    of_a, of_b, kernel, columns = it.letters
    kept, w = it.kept(), np.array(it.weight())
    shape = it.outputs(kept).shape
    cost = np.float64(numbers(*shape))
    expected = it.outputs(kept)
    v, gain, unit = it.direction()
    surgery.freeze(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    sgd = optax.sgd(0.1)
    optimizer = nnx.Optimizer(model, sgd, wrt=nnx.Param, graph=mode["graph"])

    @nnx.jit(**mode)
    def step(model, optimizer):
        def loss(model):
            y = model.layer(kind.x)
            return jnp.sum(y * cost.astype(np.float32)), y

        # Counts of random streams are integers.
        options = {"has_aux": True, "allow_int": True}
        grads, y = nnx.grad(loss, **options, **mode)(model)
        optimizer.update(model, grads)
        return y

    ones = np.eye(v.size).reshape(v.size, *v.shape)
    slope = [np.sum(kind.expected(kept, one) * cost) for one in ones]
    slope = np.reshape(slope, v.shape)
    check(step(model, optimizer), expected, 3e-6)
    # The length of a column counts as a constant.
    of_sum = it.scale * gain * slope
    moved = float64(*it.leaves())
    check(moved[0], a - 0.1 * np.einsum(f"{kernel},{of_b}->{of_a}", of_sum, b), 4e-6)
    check(moved[1], b - 0.1 * np.einsum(f"{kernel},{of_a}->{of_b}", of_sum, a), 4e-6)
    if "use_dora" in it.options:
        of_lengths = np.einsum(f"{kernel}->{columns}", slope * unit)
        before = np.einsum(f"{kernel}->{columns}", gain * v / unit)
        count = v.size // of_lengths.size
        check(moved[2], before / count - 0.1 * of_lengths, 1e-5)
    surgery.unfreeze(model)
    np.testing.assert_array_equal(it.weight()[...], w)


@pytest.mark.parametrize(("variant", "name"), PAIRS)
def test_adapters_of_peft_go_out_and_in(variant, name, tmp_path):
    it = Adapted(variant, name)
    if it.kind.line is None:
        line = {"x.weight": it.kind.where.removesuffix(".kernel") + ".kernel"}
        with pytest.raises(ValueError, match="the table lacks adapted layers"):
            nnx.weights.save_adapter(tmp_path, it.model, line)
        return
    if isinstance(it.model.layer, nnx.Embed):
        it.model.layer.lora.adapts_attend = False
    is_parameter = name in OWN or name == "GroupedLinear"
    try:
        nnx.weights.save_adapter(tmp_path, it.model, it.kind.line)
    except ValueError as error:
        assert is_parameter and {"use_dora", "dropout"} & {*it.options}
        limits = "PEFT has no DoRA (use_dora)", "PEFT has no dropout"
        assert any(limit in str(error) for limit in limits)
        assert not any(tmp_path.iterdir())
        return
    nnx.weights.load_adapter(tmp_path, it.plain, it.kind.line)
    for x, y in zip(it.leaves(it.plain), it.leaves(), strict=True):
        np.testing.assert_array_equal(x[...], y[...])
    it.model.eval()
    check(
        CALL(it.plain.layer, it.kind.x),
        float64(CALL(it.model.layer, it.kind.x))[0],
        1e-6,
    )
    if "dropout" in it.options:
        assert it.plain.layer.lora.dropout.rate == 0.5
        assert it.plain.layer.lora.dropout.deterministic


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_a_stack_are_adapted_apart(name):
    kind = KINDS[name]
    stack = nnx.Dict(layer=nnx.Stack(kind.make, 2, rngs=nnx.Rngs(0)))
    plain = nnx.graphdef(stack)
    where = kind.where.replace("layer", "layer.layers")
    surgery.add_lora(stack, where, rank=2, alpha=2 * SCALE, rngs=nnx.Rngs(1))
    (a, b), (weight,) = [
        nnx.to_flat_state(x).leaves
        for x in nnx.state(stack, nnx.LoRAParam, nnx.Variable)
    ]
    b[...] = numbers(*b.shape)
    w, a, b = float64(weight, a, b)
    apart = kind.product.replace(",", ",z").replace("->", "->z")
    sums = w + SCALE * np.einsum(f"z{apart}", a, b)
    found = stack.layer.each(nnx.jit(lambda layer: layer(kind.x)))
    expected = np.stack([kind.expected(kind.x, w) for w in sums])
    check(found, expected, 2e-6)
    surgery.merge_lora(stack)
    check(weight[...], sums, 1e-6)
    assert nnx.graphdef(stack) == plain


# ------------------------------------------------------------------------- whole models


def matrix(rngs, *shape):
    return nnx.Param(rngs.params.normal(shape) / 4)


class Block(nnx.Module):
    """All kinds of weights, experts as a mixture has them among these."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.heads = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.out = nnx.Einsum("bnh,nhd->bd", (2, 4, 8), rngs=rngs)
        self.conv = nnx.Conv(2, 2, 3, rngs=rngs)
        self.up, self.down = matrix(rngs, 2, 8, 4), matrix(rngs, 2, 4, 8)
        self.mix = matrix(rngs, 8, 8)

    def __call__(self, x):
        x = x + self.out(self.heads(jnp.sin(self.first(x))))
        x = x + self.conv(x.reshape(-1, 4, 2)).reshape(x.shape)
        sizes = jnp.array([1, len(x) - 1])  # sorted by expert
        hidden = jnp.sin(jax.lax.ragged_dot(x, self.up[...], sizes))
        return x + jax.lax.ragged_dot(hidden, self.down[...], sizes) + x @ self.mix


KNOWN, PARAMS = "**.{first,heads,out,conv}", "**.{up,down,mix}"


def adapt(model, **options):
    """Adapts all, with dropout where there are inputs; changes what is added."""
    surgery.add_lora(model, KNOWN, rank=2, alpha=4, rngs=nnx.Rngs(1), **options)
    options.pop("dropout", None)
    surgery.add_lora(model, PARAMS, rank=2, alpha=4, rngs=nnx.Rngs(2), **options)
    surgery.freeze(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if path[-1] != "lora_a":
            leaf[...] += 0.3 * numbers(*leaf.shape)


def loss_and_gradients(model, x, mode):
    @nnx.jit(**mode)
    def step(model, x):
        def loss(model):
            y = model.blocks(x) if hasattr(model.blocks, "each") else model(x)
            return jnp.mean(jnp.sin(y))

        # Counts of random streams are integers.
        return nnx.value_and_grad(loss, allow_int=True, **mode)(model)

    return step(model, x)


class Model(nnx.Module):
    def __init__(self, blocks):
        self.blocks = blocks

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


LATER = [pytest.param(x, marks=pytest.mark.long) for x in VARIANTS if x != "LoRA"]


@pytest.mark.parametrize("variant", ["LoRA", *LATER])
@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_stack_is_trained_as_its_layers_are(variant, remat, mode):
    stack = Model(nnx.Stack(Block, 2, rngs=nnx.Rngs(0), remat=remat))
    adapt(stack, **VARIANTS[variant])
    layers = nnx.clone(stack)
    surgery.unstack(layers, "blocks")
    x = numbers(5, 8)
    for _ in range(2):  # other masks the second time
        loss, grads = loss_and_gradients(stack, x, mode)
        expected, by_layer = loss_and_gradients(layers, x, mode)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        of_layers = nnx.to_pure_dict(nnx.state(by_layer, nnx.LoRAParam))["blocks"]
        stacked = jax.tree.map(lambda *x: np.stack(x), *of_layers.values())
        of_stack = nnx.to_pure_dict(nnx.state(grads, nnx.LoRAParam))["blocks"]["layers"]
        jax.tree.map(lambda x, y: check(x, np.float64(y), 1e-4), of_stack, stacked)
    if "dropout" in VARIANTS[variant]:
        again, _ = loss_and_gradients(stack, x, mode)
        assert abs(again - loss) > 1e-5
        stack.eval()
    before = CALL(stack.blocks, x)
    surgery.merge_lora(stack)
    check(CALL(stack.blocks, x), np.float64(before), 1e-5)


class Sharded(NamedTuple):
    """A layer of which a kernel is divided by both axes of a mesh."""

    make: object
    spec: tuple
    where: str = "blocks"
    x: object = numbers(8, 8)


SHARDED = {
    "Linear": Sharded(
        lambda rngs, **options: nnx.Linear(8, 16, rngs=rngs, **options),
        ("data", "model"),
    ),
    "heads": Sharded(
        lambda rngs, **options: nnx.LinearGeneral(8, (4, 4), rngs=rngs, **options),
        ("data", "model", None),
    ),
    "Einsum": Sharded(
        lambda rngs, **options: nnx.Einsum(
            "bd,dnh->bnh", (8, 4, 4), (4, 4), rngs=rngs, **options
        ),
        ("data", "model", None),
    ),
    "Conv": Sharded(
        lambda rngs, **options: nnx.Conv(8, 16, 3, rngs=rngs, **options),
        (None, "data", "model"),
        x=numbers(8, 5, 8),
    ),
    "Conv, outputs as the batch": Sharded(
        lambda rngs, **options: nnx.Conv(8, 16, 3, rngs=rngs, **options),
        (None, "model", "data"),
        x=numbers(8, 5, 8),
    ),
    "ConvTranspose": Sharded(
        lambda rngs, **options: nnx.ConvTranspose(8, 16, 3, rngs=rngs, **options),
        (None, "data", "model"),
        "blocks.kernel",
        numbers(8, 5, 8),
    ),
    "Embed": Sharded(
        lambda rngs, kernel_metadata: nnx.Embed(
            8, 16, embedding_metadata=kernel_metadata, rngs=rngs
        ),
        ("data", "model"),
        x=np.arange(8),
    ),
    "Stack": Sharded(
        lambda rngs, **options: nnx.Stack(
            lambda rngs: nnx.Linear(8, 8, rngs=rngs, **options), 2, rngs=rngs
        ),
        ("data", "model"),
        "blocks.layers",
    ),
    "experts": Sharded(
        lambda rngs, **options: nnx.GroupedLinear(4, 8, 16, rngs=rngs, **options),
        ("model", "data", None),
    ),
}


@pytest.mark.parametrize(
    ("name", "variant", "axes"),
    [
        *itertools.product(SHARDED, ("LoRA", "all"), ["Explicit"]),
        *itertools.product(("Linear", "Stack"), ["all"], ["Auto"]),
    ],
)
def test_eight_devices_give_what_one_gives(variant, name, axes):
    row, options = SHARDED[name], dict(VARIANTS[variant])
    if row.where == "blocks.kernel":  # a Param has no inputs that could be dropped
        options.pop("dropout", None)

    def build():
        model = Model(row.make(nnx.Rngs(0), kernel_metadata={"out_sharding": row.spec}))
        where = surgery.at(row.where)
        surgery.add_lora(model, where, rank=2, rngs=nnx.Rngs(1), **options)
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
            if path[-1] == "lora_b":
                variable[...] += 0.3
        return model

    @nnx.jit
    def step(model, x):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        sizes = (jnp.array([3, 0, 4, 1]),) * (name == "experts")

        def loss(model):
            return jnp.sum(jnp.sin(model.blocks(x, *sizes)))

        return nnx.value_and_grad(loss, argnums=wrt)(model)

    with nnx.use_eager_sharding(False):
        expected, by_one = step(build(), row.x)
    mesh = meshes.mesh_of(axes, data=4, model=2)
    with jax.set_mesh(mesh):
        model = build()
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        loss, grads = step(model, jax.device_put(row.x, sharding))
    if "use_dora" in options and name == "Linear":
        assert model.blocks.lora.magnitude.sharding.spec == PartitionSpec("model")
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(
        lambda x, y: check(x, np.float64(y), 1e-5),
        nnx.to_pure_dict(grads),
        nnx.to_pure_dict(by_one),
    )


# ---------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"dropout": 0.5}])
def test_a_table_counts_as_the_same_in_look_up_and_attend(options):
    model = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    surgery.add_lora(model, "layer", rank=2, rngs=nnx.Rngs(1), **options)
    change = model.layer.lora
    change.lora_b[...] = numbers(2, 3)
    w, a, b = float64(model.layer.embedding, change.lora_a, change.lora_b)
    table, query = w + a @ b, numbers(4, 3)
    kept = query
    if change.magnitude is not None:
        change.magnitude[...] *= 2
        lengths = np.sqrt((table**2).sum(0))
        table *= np.float64(change.magnitude[...]) / lengths
    elif options:  # rows are looked up without inputs, queries are inputs
        kept = np.asarray(nnx.clone(change.dropout)(query))
    check(model.layer(np.arange(5)), table, 1e-6)
    check(model.layer.attend(query), query @ w.T + kept @ (table - w).T, 1e-6)


def test_a_column_without_length_has_no_direction():
    model = Model(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    model.blocks.kernel[:, 1] = 0.0
    before, rngs = nnx.graphdef(model), nnx.Rngs(1)
    with raises(ValueError, "blocks", "1 of its columns are zeros", "without use_dora"):
        surgery.add_lora(model, "blocks", rank=1, rngs=rngs, use_dora=True)
    assert nnx.graphdef(model) == before and rngs.default.count[...] == 0


def test_rates_out_of_range_and_missing_streams_are_refused():
    model = Model(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=r"range \[0, 1\]"):
        surgery.add_lora(model, "blocks", rank=1, rngs=nnx.Rngs(1), dropout=1.5)
    with pytest.raises(KeyError, match="dropout"):
        rngs = nnx.Rngs(params=1)
        surgery.add_lora(model, "blocks", rank=1, rngs=rngs, dropout=0.5)
    assert nnx.graphdef(model) == before


def test_abstract_models_get_abstract_lengths():
    model = nnx.eval_shape(lambda: Model(nnx.Linear(3, 2, rngs=nnx.Rngs(0))))
    surgery.add_lora(model, "blocks", rank=1, rngs=nnx.Rngs(1), use_dora=True)
    lengths = model.blocks.lora.magnitude.get_raw_value()
    assert isinstance(lengths, jax.ShapeDtypeStruct) and lengths.shape == (2,)


def mixture_with_dropout():
    rngs = nnx.Rngs(0)
    experts = nnx.GatedExperts(4, 4, 8, rngs=rngs)
    model = nnx.MixtureOfExperts(nnx.Router(4, 4, top_k=2, rngs=rngs), experts)
    surgery.add_lora(model, "experts.up", rank=2, dropout=0.5, rngs=rngs)
    model.experts.up.lora.lora_b[...] += 1.0
    return model, numbers(8, 4)


def test_divided_experts_may_have_lora_with_dropout():
    model, x = mixture_with_dropout()
    model.expert_axis = "expert"
    with jax.set_mesh(meshes.mesh_of("Auto", expert=2)):
        assert nnx.eval_shape(lambda model: model(x), model).shape == x.shape


@pytest.mark.long
def test_divided_experts_with_dropout_compute_the_same_without_it():
    model, x = mixture_with_dropout()
    call = nnx.jit(lambda model, x: model(x))
    model.eval()
    expected = call(model, x)
    model.expert_axis = "expert"
    with jax.set_mesh(meshes.mesh_of("Auto", expert=2)):
        np.testing.assert_allclose(call(model, x), expected, rtol=1e-4, atol=1e-5)
        model.train()
        dropped = [np.asarray(call(model, x)) for _ in range(2)]
    assert not np.allclose(*dropped)
