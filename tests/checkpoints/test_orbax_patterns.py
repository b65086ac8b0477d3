"""Orbax by hand, as programs for Flax NNX use it; and the strict form of each load."""

import functools
import logging

import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx
from tests import zoo
from tests.checkpoints.saved_objects import contents

ocp = pytest.importorskip("orbax.checkpoint")
logging.getLogger("absl").setLevel(logging.ERROR)


def make(seed=0, is_larger=False):
    """A list longer than ten, random streams, statistics, and a tied Variable."""
    rngs = nnx.Rngs(seed)
    layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
    norm, dropout = nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    model = zoo.Box(layers=layers, norm=norm, dropout=dropout, tied=layers[10])
    if is_larger:
        model.head = nnx.Linear(2, 2, rngs=rngs)
    return model


make_larger = functools.partial(make, is_larger=True)


def check_same(node, other):
    assert contents(node) == contents(other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What was saved: ``state``, ``pure`` and ``trained``, a model and an optimizer."""
    root = tmp_path_factory.mktemp("checkpoints")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "state", nnx.state(saved()))
        checkpointer.save(root / "pure", nnx.to_pure_dict(nnx.state(saved())))
        checkpointer.save(root / "trained", nnx.state(trained()))
    return root


def saved():
    model = make(1)
    model.norm.mean[...] = jnp.full(2, 7.0)
    return model


def trained(seed=1):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    return model, optimizer


def restored(folder, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, *target)


def test_pattern_1_a_state_into_an_abstract_one(folder):
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    state = restored(folder / "state", abstract)
    check_same(nnx.merge(graphdef, state), saved())
    assert type(state["norm"]["mean"]) is nnx.BatchStat
    model = make()
    assert nnx.checkpoints.load_state(model, state).kept == ()
    check_same(model, saved())


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_pattern_2_updating_an_abstract_model(tmp_path):
    state = nnx.state(saved())
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", state)
        given = checkpointer.restore(tmp_path / "c", item=state)
    for strict in (False, True):
        model = nnx.eval_shape(make)
        nnx.update(model, given, strict=strict)
        check_same(model, saved())


def test_pattern_3_pure_dicts(folder):
    pure = restored(folder / "pure")
    assert {*pure["layers"]} == {str(i) for i in range(11)}
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    nnx.replace_by_pure_dict(abstract, pure)
    check_same(nnx.merge(graphdef, abstract), saved())
    check_same(nnx.merge(graphdef, pure), saved())
    check_same(nnx.merge(graphdef, nnx.restore_int_paths(pure)), saved())
    with pytest.raises(ValueError, match="key in pure_dict not available in state"):
        nnx.replace_by_pure_dict(abstract, {**pure, "other": jnp.ones(1)})
    model = nnx.eval_shape(make)
    nnx.checkpoints.load_state(model, pure)
    check_same(model, saved())


def test_what_replace_by_pure_dict_lets_pass_is_told_by_load_state(folder):
    pure = restored(folder / "pure")
    del pure["norm"]["mean"]
    pure["layers"]["3"]["kernel"] = jnp.ones((5, 5))
    _, abstract = nnx.split(nnx.eval_shape(make))
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        nnx.checkpoints.load_state(abstract, pure)
    assert caught.value.missing == (("norm", "mean"),)
    assert caught.value.misfits[0].path == ("layers", 3, "kernel")
    nnx.replace_by_pure_dict(abstract, pure)
    assert isinstance(abstract["norm"]["mean"][...], jax.ShapeDtypeStruct)
    assert abstract["layers"][3]["kernel"].shape == (5, 5)


@pytest.mark.parametrize("load", ["merge", "update", "strict", "load_state"])
def test_a_raw_restored_state_is_understood(folder, load):
    raw = restored(folder / "state")
    assert list(raw["norm"]["mean"]) == ["value"]
    model = nnx.eval_shape(make)
    if load == "merge":
        model = nnx.merge(nnx.graphdef(model), raw)
    elif load == "load_state":
        nnx.checkpoints.load_state(model, raw)
    else:
        nnx.update(model, raw, strict=load == "strict")
    check_same(model, saved())
    assert model.tied is model.layers[10]


def renamed(state, old, new):
    """A state by paths, with another name at the beginning of some."""
    flat = nnx.traversals.flatten_mapping(state)
    flat = {(new, *p[1:]) if p[0] == old else p: value for p, value in flat.items()}
    return nnx.traversals.unflatten_mapping(flat)


def test_pattern_4_surgery_on_paths(folder):
    other = renamed(restored(folder / "pure"), "layers", "blocks")
    with pytest.raises(nnx.errors.StateMismatchError, match="expected: blocks/0/bias"):
        nnx.checkpoints.load_state(make(), other)
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    nnx.replace_by_pure_dict(abstract, renamed(other, "blocks", "layers"))
    check_same(nnx.merge(graphdef, abstract), saved())
    flat_state = dict(nnx.to_flat_state(nnx.state(saved())))
    check_same(nnx.merge(graphdef, nnx.from_flat_state(flat_state)), saved())


def test_pattern_4_a_changed_model_gets_new_parameters(folder):
    pure = restored(folder / "pure")
    model = nnx.eval_shape(make_larger)
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        nnx.checkpoints.load_state(model, pure)
    assert caught.value.missing == (("head", "bias"), ("head", "kernel"))
    pure["head"] = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    nnx.checkpoints.load_state(model, pure)
    graphdef, abstract = nnx.split(nnx.eval_shape(make_larger))
    nnx.replace_by_pure_dict(abstract, pure)
    check_same(nnx.merge(graphdef, abstract), model)
    assert model.head(jnp.ones((1, 2))).tolist() == [[2.0, 2.0]]


def test_pattern_4_a_layer_is_replaced_in_an_abstract_model(folder):
    model = nnx.eval_shape(make)
    model.layers[0] = nnx.LoRALinear(2, 2, lora_rank=1, rngs=nnx.Rngs(3))
    pure = restored(folder / "pure")
    nnx.update(model, pure)
    kernel = pure["layers"]["0"]["kernel"]
    assert model.layers[0].kernel[...].tolist() == kernel.tolist()
    with pytest.raises(nnx.errors.StateMismatchError, match="layers/0/lora/lora_a"):
        nnx.update(model, pure, strict=True)
    done = nnx.checkpoints.load_state(model, pure, missing=nnx.LoRAParam)
    assert [path[-1] for path in done.kept] == ["lora_a", "lora_b"]


def test_pattern_5_partial_initialization(folder):
    old = nnx.State(nnx.restore_int_paths(restored(folder / "pure")))

    @nnx.jit(donate_argnums=0)
    def load(old_state):
        model = make_larger()
        nnx.update(model, old_state)
        return model

    strictly = make_larger()
    nnx.checkpoints.load_state(strictly, old, missing="head.**")
    expected = contents(strictly)
    assert contents(load(old)) == expected


def test_pattern_6_sharded(tmp_path):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def build():
        return nnx.Dict(w=nnx.Param(jnp.arange(8.0), out_sharding=("x",)))

    graphdef, abstract = nnx.get_abstract_model(build, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        with jax.set_mesh(mesh):
            checkpointer.save(tmp_path / "c", nnx.state(build()))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "c", target=abstract)
        raw = checkpointer.restore(tmp_path / "c")
    wanted = jax.NamedSharding(mesh, jax.P("x"))
    model = nnx.merge(graphdef, state)
    assert model.w[...].sharding.is_equivalent_to(wanted, 1)
    # Elsewhere: on one device in the state, on the mesh in the model.
    raw["w"]["value"] = jax.device_put(raw["w"]["value"], jax.devices()[5])
    nnx.checkpoints.load_state(model, raw)
    assert model.w[...].sharding.is_equivalent_to(wanted, 1)
    assert model.w[...].tolist() == [*range(8)]


def states(objects):
    return {"model": nnx.state(objects[0]), "optimizer": nnx.state(objects[1])}


def check_filled(given, strict=True):
    """A model and an optimizer get what was saved of `trained`."""
    other = trained(2)
    nnx.update(other[0], given["model"], strict=strict)
    nnx.update(other[1], given["optimizer"], strict=strict)
    check_same(other, trained())


def test_pattern_7_a_manager_of_checkpoints(tmp_path):
    args = ocp.args
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args.StandardSave({**states(trained()), "step": 3}))
        target = {**states(trained(2)), "step": 0}
        given = manager.restore(0, args=args.StandardRestore(target))
        untyped = manager.restore(0, args=args.StandardRestore())
    assert given["step"] == 3
    check_filled(given, strict=False)
    for state in (given, untyped):
        model, optimizer = trained(2)
        nnx.update(model, state["model"], strict=True)
        nnx.checkpoints.load_state(optimizer, state["optimizer"])
        check_same((model, optimizer), trained())


def test_pattern_7_composites(tmp_path):
    args = ocp.args

    def composite(kind, objects):
        return args.Composite(**{k: kind(x) for k, x in states(objects).items()})

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=composite(args.StandardSave, trained()))
        given = manager.restore(0, args=composite(args.StandardRestore, trained()))
    check_filled(given)


def test_a_model_with_its_optimizer_is_one_object(folder):
    both = trained(2)
    raw = restored(folder / "trained")
    assert {*raw} == {"0", "1"}
    nnx.checkpoints.load_state(both, raw)
    check_same(both, trained())
    assert both[1].step.dtype == jnp.uint32
    with pytest.raises(nnx.errors.StateMismatchError, match="below 0: pass that part"):
        nnx.checkpoints.load_state(both[0], raw)


def test_pattern_8_random_keys_of_an_abstract_model(folder):
    pure = restored(folder / "pure")
    del pure["dropout"]
    model = nnx.eval_shape(make)
    nnx.update(model, pure)
    nnx.reseed(model, default=123)
    assert isinstance(model.dropout.rngs.key[...], jax.Array)
    other = nnx.eval_shape(make)
    nnx.reseed(other, default=123)
    nnx.checkpoints.load_state(other, pure, missing=nnx.RngState)
    check_same(model, other)


def test_pure_dicts_are_bytes_for_flax():
    serialization = pytest.importorskip("flax.serialization")
    pure = nnx.to_pure_dict(nnx.state(trained()[0]))
    given = serialization.from_bytes(pure, serialization.to_bytes(pure))
    model = trained(2)[0]
    nnx.checkpoints.load_state(model, given)
    check_same(model, trained()[0])
