"""`load_state`: all of a state gets into an object, or nothing does and it is said.

At the end Orbax by hand, as programs for Flax NNX use it."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import tables, zoo
from tests.checkpoints.saved_objects import contents

load_state = nnx.checkpoints.load_state


def model(shift=0.0):
    return nnx.Dict(
        layers=nnx.List(nnx.Dict(w=nnx.Param(jnp.full(2, i + shift))) for i in (0, 1)),
        head=nnx.Dict(w=nnx.Param(jnp.full(3, shift)), b=nnx.BatchStat(jnp.ones(1))),
        key=nnx.RngKey(jax.random.key(0), tag="x"),
        ref=nnx.Param(jnp.full(2, shift), ref=True),
    )


def failure(node, state, **options):
    before = str(nnx.state(node))
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        load_state(node, state, **options)
    assert str(nnx.state(node)) == before
    return caught.value


def test_variables_keep_identity_type_and_metadata_and_get_values():
    node = nnx.Dict(w=nnx.Param(jnp.zeros(2), tag="own"))
    kept = node.w
    done = load_state(node, {"w": nnx.BatchStat(jnp.ones(2), tag="other")})
    assert node.w is kept and type(kept) is nnx.Param and kept.tag == "own"
    assert kept[...].tolist() == [1.0, 1.0] and done.loaded == 1
    assert (done.kept, done.dropped, done.cast) == ((), (), ())


@pytest.mark.parametrize("is_abstract", [False, True], ids=["concrete", "abstract"])
def test_what_may_be_missing_or_dropped_is_said_by_the_caller(is_abstract):
    state = nnx.to_pure_dict(nnx.state(model(1.0)))
    del state["head"]
    state["old_head"] = {"w": jnp.ones(5)}
    node = nnx.eval_shape(model) if is_abstract else model()
    error = failure(node, state)
    assert error.missing == (("head", "b"), ("head", "w"))
    assert error.unexpected == (("old_head", "w"),)
    assert "missing=" in str(error) and "unexpected=" in str(error)
    options = {"missing": ["head.w", nnx.BatchStat], "unexpected": "old_head.**"}
    if is_abstract:
        error = failure(node, state, **options)
        assert [x.path for x in error.misfits] == [("head", "b"), ("head", "w")]
        assert "no value to keep" in str(error)
        return
    done = load_state(node, state, **options)
    assert done.kept == (("head", "b"), ("head", "w"))
    assert done.dropped == (("old_head", "w"),) and done.loaded == 4
    assert node.head.w[...].tolist() == [0.0, 0.0, 0.0]
    assert node.layers[1].w[...].tolist() == [2.0, 2.0]


def test_keys_of_an_abstract_model_are_made_before_the_rest_is_loaded():
    make = lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # noqa: E731
    node = nnx.eval_shape(make)
    assert "nnx.reseed" in str(failure(node, {}, missing=nnx.RngState))
    nnx.reseed(node, default=1, dropout=1)
    assert len(load_state(node, {}, missing=nnx.RngState).kept) == 2


def test_a_leaf_that_differs_is_left_out_if_both_options_say_so():
    state = nnx.to_pure_dict(nnx.state(model(1.0)))
    state["head"]["w"] = jnp.ones(7)
    node = model()
    for options in ({}, {"missing": "head.w"}, {"unexpected": "head.w"}):
        assert failure(node, state, **options).misfits[0].what == "shape"
    done = load_state(node, state, missing="head.w", unexpected="head.w")
    assert done.kept == done.dropped == (("head", "w"),)
    assert node.head.w[...].tolist() == [0.0, 0.0, 0.0]


def test_options_see_paths_as_the_object_spells_them():
    node = nnx.List([nnx.Param(jnp.zeros(1))])
    seen = []
    state = {"0": {"value": jnp.ones(1)}, "1": {"value": jnp.ones(2)}}
    done = load_state(node, state, unexpected=lambda path, x: seen.append(path) or True)
    assert seen == [(1,)] and done.dropped == ((1,),)


@tables.cases(
    "held, given, fits",
    (jnp.ones(2), jnp.full(2, 3, jnp.bfloat16), True),
    (jnp.ones(2, jnp.float16), np.full(2, 3.0), True),
    (np.ones(2), jnp.full(2, 3.0), True),
    (jnp.ones(2, jnp.int8), jnp.full(2, 3), True),
    (jnp.ones(2, jnp.int8), jnp.array([3, 300]), False),
    (jnp.ones(2, jnp.uint32), jnp.array([3, -1]), False),
    (jnp.ones(2, jnp.int4), jnp.full(2, 3, jnp.uint8), True),
    (jnp.ones(2, jnp.float16), jnp.full(2, 1e30), False),
    (jnp.ones(2), np.full(2, 1e300), False),
    (jnp.ones(2, jnp.float8_e4m3fn), jnp.full(2, 3, jnp.bfloat16), True),
    (jnp.ones(2, jnp.float8_e4m3fn), np.full(2, 1e5, jnp.bfloat16), False),
    (jnp.ones(2), jnp.full(2, 3), False),
    (jnp.ones(2, int), jnp.full(2, 3.0), False),
    (jnp.ones(2, bool), jnp.full(2, 1), False),
    (jnp.ones(2), jnp.full(2, 3, jnp.complex64), False),
    (jnp.ones(2, jnp.complex64), jnp.full(2, 3), False),
    (jax.random.key(0), jax.random.key(1, impl="rbg"), False),
    ([jnp.ones(2)], [jnp.full(2, 3, jnp.bfloat16)], True),
    ids=str,
)
def test_casts_are_asked_for_and_keep_the_kind(held, given, fits):
    node = nnx.Dict(x=nnx.Variable(held))
    assert failure(node, {"x": given}).misfits[0].what == "dtype"
    if not fits:
        failure(node, {"x": given}, cast=True)
        return
    assert load_state(node, {"x": given}, cast=True).cast == (("x",),)
    (before,), (after,) = map(jax.tree.leaves, (held, node.x.get_raw_value()))
    assert type(after) is type(before) and after.dtype == before.dtype
    assert np.asarray(after, np.float32).tolist() == [3.0, 3.0]


def test_no_cast_makes_up_for_what_is_missing():
    node = nnx.Dict(x=nnx.Variable({"a": jnp.ones(2), "b": jnp.ones(2)}))
    given = {"x": {"a": jnp.full(2, 3, jnp.bfloat16)}}
    assert failure(node, given, cast=True).missing == (("x", "b"),)
    assert jax.tree.leaves(node.x.get_raw_value()["a"])[0].tolist() == [1.0, 1.0]


def test_infinities_stay_and_complex_numbers_have_two_parts():
    node = nnx.Dict(x=nnx.Param(jnp.ones(1, jnp.float16)))
    load_state(node, {"x": jnp.full(1, jnp.inf)}, cast=True)
    assert jnp.isinf(node.x[...]).all()
    node = nnx.Dict(x=nnx.Param(jnp.ones(1, jnp.complex64)))
    load_state(node, {"x": np.full(1, 1 + 2j)}, cast=True)
    failure(node, {"x": np.full(1, 1 + 1e300j)}, cast=True)


def test_donated_arrays_are_neither_taken_nor_kept():
    def make():
        return nnx.Dict(w=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)))

    donated = make()
    donated.w[...].delete()
    error = failure(make(), nnx.state(donated))
    assert "w: float32[2] in the object, one that was donated" in str(error)
    with pytest.raises(nnx.errors.StateMismatchError, match="donated"):
        load_state(donated, {"b": jnp.ones(2)}, missing="w")


def test_scalars_become_arrays_where_the_object_has_them():
    node = nnx.Dict(x=nnx.Variable(jnp.zeros((), jnp.uint32)), y=nnx.Variable(1))
    load_state(node, {"x": 3, "y": 4})
    assert node.x[...].dtype == jnp.uint32 and node.x[...] == 3
    assert node.y.get_raw_value() == 4


def test_buffers_of_numpy_are_copied_and_arrays_of_jax_are_not():
    array, jax_array = np.ones((64, 64), np.float32), jnp.ones(2)
    node = nnx.Dict(a=nnx.Param(jnp.zeros((64, 64))), b=nnx.Param(jnp.zeros(2)))
    load_state(node, {"a": array, "b": jax_array})
    array[0, 0] = 5
    assert node.a[...][0, 0] == 1 and node.b.get_raw_value() is jax_array
    assert not node.a[...].committed


def make_placed():
    return zoo.Box(
        w=nnx.Param(jnp.zeros((4, 8)), out_sharding=("a", "b")),
        b=nnx.Param(jnp.zeros(3)),
        key=nnx.RngKey(jax.random.key(0), tag="x"),
    )


GIVEN = {
    "w": np.ones((4, 8), np.float32),
    "b": jax.device_put(np.ones(3, np.float32), jax.devices()[3]),
    "key": jax.random.key(1),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("form", ["concrete", "eval_shape", "get_abstract_model"])
def test_arrays_come_onto_the_shardings_that_the_object_has(kind, form):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    if form == "get_abstract_model":
        node = nnx.merge(*nnx.get_abstract_model(make_placed, mesh))
        load_state(node, GIVEN)
    else:
        with jax.set_mesh(mesh):
            node = make_placed() if form == "concrete" else nnx.eval_shape(make_placed)
            load_state(node, GIVEN)
    for variable, spec in ((node.w, P("a", "b")), (node.b, P()), (node.key, P())):
        wanted = NamedSharding(mesh, spec)
        value = variable[...]
        assert isinstance(value.sharding, NamedSharding)
        assert value.sharding.is_equivalent_to(wanted, value.ndim)


def test_a_mesh_that_is_not_in_force_is_an_error_and_no_ignored_sharding():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        node = nnx.eval_shape(make_placed)
    with pytest.raises(ValueError, match=r"(?s)not active.*b: .*jax.set_mesh"):
        load_state(node, GIVEN)
    assert isinstance(node.w.get_raw_value(), jax.ShapeDtypeStruct)


def test_a_ref_is_written_through():
    node, other = model(), model(1.0)
    ref = node.ref.get_raw_value()
    load_state(node, other)
    assert node.ref.get_raw_value() is ref and ref[...].tolist() == [1.0, 1.0]


def test_an_abstract_state_has_no_values():
    node = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    abstract = nnx.eval_shape(lambda: nnx.Dict(w=nnx.Param(jnp.zeros(2))))
    assert failure(node, abstract).misfits[0].what == "value"
    assert failure(abstract, nnx.state(abstract)).misfits[0].what == "value"


def test_a_variable_as_the_root():
    variable = nnx.Param(jnp.zeros(2))
    for given in (np.ones(2, np.float32), nnx.Param(jnp.ones(2))):
        assert load_state(variable, given).loaded == 1
    assert isinstance(variable.get_raw_value(), jax.Array)
    failure(variable, jnp.ones(3))


@pytest.mark.parametrize("state", [None, 3, "path"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError, match=r"load_state expects a State"):
        load_state(model(), state)


def test_an_object_without_state_is_refused():
    with pytest.raises(TypeError, match="Unsupported type"):
        load_state(jnp.ones(2), {})


def test_values_are_loaded_under_jit():
    @jax.jit
    def load(state):
        node = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
        load_state(node, state, cast=True)
        return node.w[...]

    assert load({"w": jnp.ones(2, jnp.bfloat16)}).dtype == jnp.float32


# ------------------------------------------------------------------------ Orbax by hand

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
    optimizer.update(model, jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)))
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


def boxed(state):
    """A dict as Orbax restores it without types: each Variable is a folder."""
    if isinstance(state, dict):
        return {key: boxed(value) for key, value in state.items()}
    return {"value": state}


def test_values_in_the_boxes_of_a_checkpoint_replace_those_of_a_state(folder):
    pure = boxed(restored(folder / "pure"))
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    nnx.replace_by_pure_dict(abstract, pure)
    check_same(nnx.merge(graphdef, abstract), saved())
    pure["norm"]["mean"] = {"values": pure["norm"]["mean"]["value"]}
    with pytest.raises(ValueError, match=r"\('norm', 'mean', 'values'\)"):
        nnx.replace_by_pure_dict(abstract, pure)


def test_a_variable_that_holds_a_dict_takes_dicts_and_boxes_of_them():
    state = nnx.State({"a": nnx.Variable({"x": 1}), "b": nnx.Variable({"value": 1})})
    nnx.replace_by_pure_dict(state, {"a": {"value": {"x": 2}}, "b": {"value": 2}})
    assert state["a"].get_value() == {"x": 2}
    assert state["b"].get_value() == {"value": 2}


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


def test_pattern_7_a_manager_of_checkpoints(tmp_path):
    args = ocp.args
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args.StandardSave({**states(trained()), "step": 3}))
        target = {**states(trained(2)), "step": 0}
        given = manager.restore(0, args=args.StandardRestore(target))
        untyped = manager.restore(0, args=args.StandardRestore())
    assert given["step"] == 3
    for state in (given, untyped):
        model, optimizer = trained(2)
        nnx.update(model, state["model"], strict=True)
        nnx.checkpoints.load_state(optimizer, state["optimizer"])
        check_same((model, optimizer), trained())


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
