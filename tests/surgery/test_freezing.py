"""Frozen Variables: no gradients, no optimizer state, the same everywhere else."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import meshes, modes, zoo
from tests.comparisons import raises, unchanged

surgery = nnx.surgery


def param():
    return nnx.Param(jnp.ones((1, 4)))


class Model(nnx.Module):
    """Has parts in a List, a plain list and a dict, a BatchNorm and a tied kernel."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.scales = nnx.data([param(), {"a": param()}])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(self.norm(x) * self.scales[0] * self.scales[1]["a"])


X = jax.random.normal(jax.random.key(1), (8, 4))


def loss(model):
    return jnp.mean((model(X) - 1) ** 2)


def values(model, *filters):
    flat = nnx.to_flat_state(nnx.state(model, *filters))
    return {path: np.asarray(leaf[...]) for path, leaf in flat}


def state_bytes(optimizer):
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(optimizer, nnx.OptState)))


def test_training_leaves_frozen_values_as_they_are_bit_by_bit(mode):
    model = Model()
    frozen = surgery.freeze(model, where=["blocks", "scales[1]"])
    optimizer = nnx.Optimizer(
        model, optax.adamw(0.1, weight_decay=0.5), wrt=nnx.Param, graph=mode["graph"]
    )

    @nnx.jit(**mode)
    def step(model, optimizer):
        optimizer.update(model, nnx.value_and_grad(loss, **mode)(model)[1])

    before = values(model)
    for _ in range(2):
        step(model, optimizer)
    after = values(model)
    same = {path for path in before if np.array_equal(before[path], after[path])}
    # The bias before a normalization has no gradient, but moves by rounding.
    assert same == set(frozen)
    assert ("blocks", 0, "kernel") in same and ("scales", 1, "a") in same


def test_optimizers_have_no_bytes_for_what_is_frozen():
    model = Model()
    surgery.freeze(model, where="{blocks,norm,scales}")
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    # Two moments of the head's ten numbers, a count and the number of steps.
    assert state_bytes(optimizer) == 2 * 10 * 4 + 4 + 4
    surgery.unfreeze(model, where="norm")
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert state_bytes(optimizer) == 2 * (10 + 8) * 4 + 4 + 4


def test_gradients_contain_nothing_frozen():
    model = Model()
    surgery.freeze(model, where=["blocks", "scales", "norm"])
    gradients = nnx.grad(loss)(model)
    assert [path for path, _ in nnx.to_flat_state(gradients)] == [
        ("head", "bias"),
        ("head", "kernel"),
    ]
    _, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param))(model)
    assert list(gradients) == ["head"]


def test_a_plain_gradient_of_a_whole_model_is_zero_where_it_is_frozen():
    model, reference = Model(), Model()

    def outputs(model):  # kernels in all ways to read them
        x = X @ model.blocks[0].kernel + model.blocks[1].kernel.T.sum()
        return (model.head(x) ** 2).sum() + model.blocks[1].kernel.sum()

    surgery.freeze(model, where="blocks")
    gradients, expected = jax.grad(outputs)(model), jax.grad(outputs)(reference)
    wanted = values(expected)
    for path, value in values(gradients).items():
        factor = 0 if path[0] == "blocks" else 1
        np.testing.assert_array_equal(value, factor * wanted[path])
    # What is behind a frozen layer still gets its gradient.
    by_input = jax.grad(lambda x: model.blocks[0](x).sum())(X)
    wanted = np.tile(np.asarray(model.blocks[0].kernel).sum(1), (8, 1))
    np.testing.assert_allclose(by_input, wanted, rtol=1e-5)


def total(tree):
    return sum([jnp.sum(x**2) for x in jax.tree.leaves(tree)], 0.0)


READINGS = {
    "leaves": total,
    "with paths": lambda m: total([x for _, x in jax.tree.leaves_with_path(m)]),
    "state": lambda m: total(nnx.state(m)),
    "split": lambda m: total(nnx.split(m)[1]),
    "merged": lambda m: total(nnx.merge(*nnx.split(m))),
    "flat": lambda m: total(nnx.to_flat_state(nnx.state(m)).leaves),
    "pure": lambda m: total(nnx.as_pure(nnx.state(m))),
    "pure dict": lambda m: total(nnx.to_pure_dict(nnx.state(m))),
    "clone": lambda m: total(nnx.clone(m)),
    "pop of a copy": lambda m: total(nnx.pop(nnx.clone(m), surgery.Frozen)),
    "mapped": lambda m: total(jax.tree.map(lambda x: x * 2, m)),
    "value": lambda m: total([m.frozen.get_value(), m.table.get_value()]),
    "compiled": lambda m: jax.jit(total)(m),
    "checkpoint": lambda m: jax.checkpoint(total)(m),
    "scanned": lambda m: jax.lax.scan(lambda c, _: (c + total(m), 0), 0.0, None, 2)[0],
}


def with_frozen_parts():
    model = nnx.Dict(
        frozen=nnx.Param(jnp.ones(3)),
        table=nnx.Param({"a": jnp.ones(2), "b": jnp.ones(())}),
        free=nnx.Param(jnp.ones(2)),
    )
    surgery.freeze(model, where=["frozen", "table"])
    return model


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_raw_leaves_have_no_gradient_however_they_are_read(read):
    def f(model):
        return read(model) + total(model.free.get_value())

    model = with_frozen_parts()
    before = [x.get_raw_value() for x in (model.frozen, model.free)]
    whole = nnx.DiffState(0, ...)
    gradients = [
        jax.grad(f)(model),
        jax.grad(jax.jit(f))(model),
        nnx.jit(nnx.grad(f, argnums=whole))(model),
        nnx.grad(f, graph=True, graph_updates=False)(model),
        nnx.grad(f, graph=False)(model),
    ]
    for found in gradients:
        assert not np.any(found["frozen"].get_value())
        assert not any(map(np.any, jax.tree.leaves(found["table"].get_value())))
        assert np.all(found["free"].get_value())
    # Nothing that a transform would take for a change.
    after = [x.get_raw_value() for x in (model.frozen, model.free)]
    assert all(map(lambda x, y: x is y, before, after))


def test_what_is_stored_is_read_as_it_is_and_by_transforms():
    # As the class says. By default, `nnx.grad` does not differentiate it at all.
    for read in (lambda m: total(m.frozen.get_raw_value()), nnx.jit(total)):
        gradient = jax.grad(read)(with_frozen_parts())
        np.testing.assert_array_equal(gradient.frozen.get_value(), 2 * np.ones(3))
        assert "frozen" not in nnx.grad(read)(with_frozen_parts())


def test_values_that_are_no_arrays_are_constants_too():
    model = nnx.Dict(table=nnx.Param({"w": jnp.ones(2), "name": "x", "n": 3}))
    plain = nnx.clone(model)
    surgery.freeze(model)

    def product(model, w):
        model = nnx.clone(model)
        model.table["w"] = w * 2
        value = model.table.get_value()
        assert value["name"] == "x" and model.table["n"] == 3
        return (value["w"] * w).sum()

    gradient = jax.grad(product, argnums=1)
    np.testing.assert_array_equal(gradient(model, jnp.ones(2)), [2, 2])
    np.testing.assert_array_equal(gradient(plain, jnp.ones(2)), [4, 4])


def test_an_optimizer_of_before_says_that_it_does_not_fit():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    surgery.freeze(model, where="blocks")
    gradients = nnx.grad(loss)(model)
    where = "0/mu/blocks/0/bias: shape (4,) then, nothing"
    way = "After changing or freezing parts of a model, make"
    told = "made for other parameters", where, way
    with unchanged(model, optimizer), raises(ValueError, *told):
        optimizer.update(model, gradients)


def test_unfreezing_is_the_inverse_of_freezing():
    model = Model()
    graphdef, variables = nnx.split(model)
    before = [(path, leaf) for path, leaf in nnx.to_flat_state(variables)]
    frozen = surgery.freeze(model)
    assert nnx.graphdef(model) != graphdef and surgery.unfreeze(model) == frozen
    assert nnx.graphdef(model) == graphdef
    after = [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model))]
    assert [path for path, _ in before] == [path for path, _ in after]
    assert all(x is y for (_, x), (_, y) in zip(before, after, strict=True))


def test_every_variable_gets_its_own_class_and_metadata_back():
    kinds = [nnx.Param, nnx.LoRAParam, zoo.Kind, nnx.Variable]
    model = nnx.List([kind(jnp.ones(2), tag=kind.__name__) for kind in kinds])
    surgery.freeze(model, nnx.Variable)
    assert [type(x) for x in model] == [surgery.Frozen] * 4
    assert [x.tag for x in model] == ["Param", "LoRAParam", "Kind", "Variable"]
    assert surgery.unfreeze(model, nnx.LoRAParam) == [(1,)]
    assert surgery.unfreeze(model, nnx.Not(zoo.Kind)) == [(0,), (3,)]
    surgery.unfreeze(model)
    assert [type(x) for x in model] == kinds
    assert model[2].get_metadata(exclude_required=True) == {"tag": "Kind"}


def test_what_is_shared_stays_shared_and_is_frozen_everywhere():
    model = Model()
    model.tied = model.blocks[0]
    model.alias = model.head.kernel
    model.pair = nnx.data((model.head.kernel, nnx.Param(jnp.ones(2))))
    frozen = surgery.freeze(model, where="tied")
    assert frozen == [("blocks", 0, "bias"), ("blocks", 0, "kernel")]
    # Two ways lead to a part; each of them is a path of it.
    assert surgery.freeze(model, where="pair[0]") == [("alias",)]
    assert model.alias is model.head.kernel is model.pair[0]
    assert isinstance(model.pair[0], surgery.Frozen)
    assert isinstance(model.head.bias, nnx.Param)


def test_cycles_and_deep_sharing_are_followed_once():
    model = nnx.Dict(inner=nnx.Dict(weight=nnx.Param(jnp.ones(1))))
    model.inner.outer = model
    frozen = surgery.freeze(model, where="inner.outer.inner.weight")
    assert frozen == [("inner", "weight")]
    chain = nnx.Dict(leaf=nnx.Param(jnp.ones(1)))
    for _ in range(60):  # 2 ** 60 paths
        chain = nnx.Dict(a=chain, b=chain)
    assert len(surgery.freeze(chain, where="**.b.leaf")) == 1


def test_checkpoints_and_states_fit_before_and_after():
    model, plain = Model(), Model(seed=1)
    surgery.freeze(model, where="blocks")
    assert [*nnx.to_flat_state(nnx.state(model)).paths] == [
        *nnx.to_flat_state(nnx.state(plain)).paths
    ]
    # Also where Variables give their metadata: each keeps what it is.
    nnx.update(model, nnx.state(plain))
    assert type(model.blocks[0].kernel) is surgery.Frozen
    np.testing.assert_array_equal(model.blocks[0].kernel, plain.blocks[0].kernel)
    nnx.update(plain, nnx.state(model))
    assert not plain.blocks[0].kernel.has_metadata("frozen_type")
    surgery.unfreeze(model)
    assert nnx.graphdef(model) == nnx.graphdef(plain)


def test_frozen_models_are_copied_merged_and_pickled():
    model = Model()
    surgery.freeze(model, where="blocks")
    copies = [
        nnx.clone(model),
        copy.deepcopy(model),
        nnx.merge(*nnx.split(model)),
        jax.tree.map(lambda x: x, model),
        pickle.loads(pickle.dumps(model)),
    ]
    for other in copies:
        assert nnx.graphdef(other) == nnx.graphdef(model)
    for other in copies:
        assert len(surgery.unfreeze(other)) == 4
        assert type(other.blocks[0].kernel) is nnx.Param


def test_compiled_functions_notice_freezing():
    model = Model()
    count = nnx.jit(lambda model: len(nnx.to_flat_state(nnx.state(model, nnx.Param))))
    assert [int(count(model)) for _ in range(3)] == [10] * 3
    surgery.freeze(model, where="blocks")
    assert [int(count(model)) for _ in range(3)] == [6] * 3
    surgery.unfreeze(model)
    assert int(count(model)) == 10


def test_refs_and_abstract_and_sharded_variables_are_frozen():
    with jax.set_mesh(meshes.mesh_of(x=2)):
        sharded = nnx.Param(jnp.ones((4, 2)), out_sharding=("x", None))
    model = nnx.Dict(
        ref=nnx.Param(jnp.ones(2), ref=True),
        abstract=nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32)),
        sharded=sharded,
    )
    surgery.freeze(model)
    jax.jit(lambda model: model.ref.set_value(jnp.zeros(2)))(model)
    np.testing.assert_array_equal(model.ref[...], np.zeros(2))
    assert model.sharded.out_sharding == ("x", None)
    assert model.sharded.sharding.spec == jax.sharding.PartitionSpec("x", None)
    assert model.abstract.shape == (2,)
    assert jax.grad(lambda w: (model.ref * w).sum())(jnp.ones(2)).shape == (2,)
    surgery.unfreeze(model)
    assert model.ref.ref and type(model.ref) is nnx.Param


class Doubled(nnx.Param):
    """A class of the user's whose values are computed as they are read."""

    def get_value(self, **kwargs):
        return super().get_value(**kwargs) * 2


REFUSED = {
    "statistics": (lambda: Model(), "norm.mean: BatchStat is not a parameter"),
    "keys": (
        lambda: nnx.Dict(dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
        "dropout.rngs.key: RngKey is not a parameter",
    ),
    "behaviour": (
        lambda: nnx.Dict(weight=Doubled(jnp.ones(1))),
        "weight: Doubled has custom behaviour: get_value",
    ),
    "overwritten": (
        lambda: nnx.Dict(
            layer=nnx.SpectralNorm(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
        ),
        "layer.layer_instance.kernel: SpectralNorm or WeightNorm overwrites it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_frozen_is_listed_and_nothing_is_changed(name):
    make, expected = REFUSED[name]
    model = make()
    told = "can't be frozen", expected, "Exclude them"
    with unchanged(model), raises(ValueError, *told):
        surgery.freeze(model, nnx.Variable)


def test_a_selection_of_nothing_is_an_error():
    model = Model()
    with raises(ValueError, "'block' matches no part", "similar paths: blocks"):
        surgery.freeze(model, where="block")
    with pytest.raises(ValueError, match="'norm_' matches no part"):
        surgery.freeze(model, where=["blocks", "norm_"])
    message = "matches no Variable to freeze", "a string is a tag"
    with raises(ValueError, *message):
        surgery.freeze(model, "blocks")
    with pytest.raises(ValueError, match="the filter LoRAParam matches no Variable"):
        surgery.freeze(model, nnx.LoRAParam)
    with pytest.raises(ValueError, match="no Variable to unfreeze.\n  12 Variables, 0"):
        surgery.unfreeze(model)
    surgery.freeze(model)
    with pytest.raises(ValueError, match="12 Variables, 10 of them frozen; the others"):
        surgery.freeze(model)
    with pytest.raises(TypeError, match="freeze expects a Module"):
        surgery.freeze(jnp.ones(2))


def test_a_class_cannot_change_inside_a_transform_and_nothing_stays_behind(mode):
    model, message = Model(), r"nnx.jit: args\[0\].blocks\[0\].bias was a"
    with unchanged(model), pytest.raises(ValueError, match=message):
        nnx.jit(lambda model: surgery.freeze(model) and None, **mode)(model)
    if mode is modes.GRAPH_UPDATES:
        error, message = nnx.errors.TraceContextError, r"at blocks\[0\].bias"
        with unchanged(model), pytest.raises(error, match=message):
            nnx.jit(lambda: surgery.freeze(model) and None, **mode)()


def test_models_are_frozen_where_a_transform_makes_them():
    def make():
        model = Model()
        surgery.freeze(model, where="blocks")
        return model

    for model in (nnx.jit(make)(), nnx.eval_shape(make)):
        assert type(model.blocks[0].kernel) is surgery.Frozen
        assert model.blocks[0].kernel.frozen_type is nnx.Param


def test_a_precision_policy_stores_frozen_parameters_in_its_dtype_too():
    model = Model()
    surgery.freeze(model, where="blocks")
    with pytest.warns(nnx.errors.UnknownLayerWarning):  # of the model's own scales
        nnx.precision.set_policy(model, "params=bf16, compute=bf16")
    assert model.blocks[0].kernel.dtype == model.head.kernel.dtype == jnp.bfloat16
    surgery.unfreeze(model)
    assert model.blocks[0].kernel.dtype == jnp.bfloat16
