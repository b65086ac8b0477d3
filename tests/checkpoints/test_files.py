"""`nnx.checkpoints.save` and `restore`: one object in one folder."""

import logging
import os
import shutil
import sys
import tempfile

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from hypothesis import strategies as st

import graftree as nnx
from graftree import checkpoints, errors
from tests import strategies


class Model(nnx.Module):
    """Every kind of leaf there is."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.tied = self.linear.kernel
        self.nothing = nnx.Param(None)
        self.tree = nnx.Variable({"x": rngs.normal((2,)), "y": [rngs.normal((3,))]})
        self.number = nnx.Variable(3.5)
        self.raw = rngs.normal((2,))
        self.tiny = nnx.Variable(rngs.normal((4,)).astype(jnp.float8_e4m3fn))
        self.half = nnx.Variable(rngs.normal((4,)).astype(jnp.bfloat16))
        self.empty = nnx.Param(jnp.zeros((0, 3)))
        self.array = nnx.Variable(np.asarray(rngs.normal((3,))))
        self.weak = nnx.Variable(jnp.asarray(2.0))
        self.ref = nnx.Variable(rngs.normal((3,)), ref=True)
        self.keys = nnx.Variable(jax.random.split(jax.random.key(1, impl="rbg"), 2))


def numbers(obj):
    """The dtype and the content of each leaf."""
    found = []
    for leaf in jax.tree.leaves(nnx.as_pure(nnx.to_arrays(nnx.state(obj)))):
        dtype = getattr(leaf, "dtype", type(leaf))
        if isinstance(leaf, jax.Array) and jnp.issubdtype(dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.append((str(dtype), np.shape(leaf), np.asarray(leaf).tobytes()))
    return found


def adam(seed):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model))
    return model, optimizer


ADAM = optax.adam(1e-3)
OBJECTS = {
    "Module": lambda seed: Model(nnx.Rngs(seed)),
    "State": lambda seed: nnx.state(Model(nnx.Rngs(seed))),
    "model and Optimizer": adam,
    "Rngs": lambda seed: nnx.Rngs(seed, params=seed + 1),
    "metric": lambda seed: nnx.MultiMetric(loss=nnx.metrics.Average()),
    "EMA": lambda seed: nnx.EMA(nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), 0.9),
    "Variable": lambda seed: nnx.Param(jnp.full(3, seed)),
    "nothing": lambda seed: nnx.List([]),
    "dict": lambda seed: {"rngs": nnx.Rngs(seed), "step": seed, "x": [jnp.ones(seed)]},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_restored_object_has_every_value_and_the_other_stays(tmp_path, name):
    saved, like = OBJECTS[name](1), OBJECTS[name](1 if name == "dict" else 2)
    before = numbers(like)
    checkpoints.save(tmp_path / "a", saved)
    restored = checkpoints.restore(tmp_path / "a", like)
    assert type(restored) is type(saved)
    assert numbers(restored) == numbers(saved)
    assert numbers(like) == before


def test_all_differences_are_in_one_error(tmp_path):
    checkpoints.save(tmp_path / "a", {"a": jnp.ones(2), "b": jnp.ones(2), "c": 1})
    like = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16), "d": jnp.ones(1)}
    with pytest.raises(errors.StateMismatchError) as caught:
        checkpoints.restore(tmp_path / "a", like)
    assert caught.value.missing == (("d",),)
    assert caught.value.unexpected == (("c",),)
    assert [(x.path, x.what) for x in caught.value.misfits] == [
        (("a",), "shape"),
        (("b",), "dtype"),
    ]
    text = str(caught.value)
    assert str(tmp_path / "a") in text and "float32[2] in the state" in text


def test_exceptions_are_the_callers_words(tmp_path):
    saved = {"kernel": nnx.Param(jnp.full(3, 1.5)), "old": nnx.Param(jnp.ones(2))}
    checkpoints.save(tmp_path / "a", saved)
    new = nnx.Cache(jnp.full(2, 7.0))
    like = {"kernel": nnx.Param(jnp.zeros(3, jnp.bfloat16)), "new": new}
    restored = checkpoints.restore(
        tmp_path / "a", like, missing=nnx.Cache, unexpected="old", cast=True
    )
    assert restored["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(restored["kernel"][...], jnp.full(3, 1.5))
    assert restored["new"][...].tolist() == [7.0, 7.0]
    kept = restored["new"][...].unsafe_buffer_pointer()
    assert kept != new[...].unsafe_buffer_pointer()  # either may be donated


def test_integers_that_do_not_fit_are_not_cast(tmp_path):
    checkpoints.save(tmp_path / "a", {"n": jnp.array([1, 300])})
    with pytest.raises(errors.CheckpointError, match="do not fit into int8"):
        checkpoints.restore(tmp_path / "a", {"n": jnp.zeros(2, jnp.int8)}, cast=True)


def test_kept_leaf_must_have_a_value(tmp_path):
    checkpoints.save(tmp_path / "a", {"a": jnp.ones(2)})
    like = {"a": jnp.ones(2), "b": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(errors.StateMismatchError, match="b: only float32.2., abstract"):
        checkpoints.restore(tmp_path / "a", like, missing="b")


# Where arrays go.


def mesh_of(*shape):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), axis_types=kinds, devices=devices)


def sharded(seed=0):
    metadata = {"out_sharding": ("data", "model")}
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(seed), kernel_metadata=metadata)
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), nnx.Rngs(seed)


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (1, 1)])
def test_arrays_go_onto_the_shardings_of_the_other_object(tmp_path, shape):
    with jax.set_mesh(mesh_of(4, 2)):
        saved = sharded()
    checkpoints.save(tmp_path / "a", saved)
    mesh = mesh_of(*shape)
    wanted = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("data", "model")
    )
    with jax.set_mesh(mesh):
        concrete, abstract = sharded(1), nnx.eval_shape(sharded)
        from_abstract = checkpoints.restore(tmp_path / "a", abstract)
    graphdef, state = nnx.get_abstract_model(sharded, mesh)
    from_state = nnx.merge(graphdef, checkpoints.restore(tmp_path / "a", state))
    for restored in (
        checkpoints.restore(tmp_path / "a", concrete),
        from_abstract,
        from_state,
    ):
        model, optimizer, _ = restored
        assert model.kernel[...].sharding == wanted
        assert optimizer.opt_state[0].mu["kernel"][...].sharding == wanted
        assert numbers(restored) == numbers(saved)


def test_what_had_no_device_of_its_own_has_none_again(tmp_path):
    """Else a restored counter could not meet arrays on other devices in a program."""
    checkpoints.save(tmp_path / "a", sharded_counter())
    restored = checkpoints.restore(tmp_path / "a", sharded_counter())
    count, rngs = restored
    assert not count[...].committed and not rngs.default.key[...].committed
    assert count[...].weak_type
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[1])
    assert (elsewhere * count[...]).devices() == {jax.devices()[1]}


@pytest.mark.parametrize("is_wide", [False, True])
def test_weak_type_is_kept_whatever_the_width_of_numbers(is_wide, tmp_path):
    checkpoints.save(tmp_path / "a", nnx.Variable(jnp.asarray(2.0)))
    wanted = nnx.Variable(jnp.asarray(0.0))
    with jax.enable_x64(is_wide):
        restored = checkpoints.restore(tmp_path / "a", wanted)
    assert restored[...].weak_type is True and restored[...].dtype == np.float32


def sharded_counter():
    return nnx.Variable(jnp.asarray(2.0)), nnx.Rngs(0)


def test_abstract_mesh_without_devices_is_refused(tmp_path):
    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):
        checkpoints.save(tmp_path / "a", sharded())
        abstract = nnx.eval_shape(sharded)
    with pytest.raises(ValueError, match=r"0/kernel has a sharding .* jax.set_mesh"):
        checkpoints.restore(tmp_path / "a", abstract)


# Folders.


@pytest.mark.parametrize(
    ("to", "again"),
    [("a b#c?d%20é", "a b#c?d%20é"), ("made/by/save", "~/made/by/save")],
)
def test_path_may_be_relative_or_in_the_home_folder_and_have_any_characters(
    tmp_path, monkeypatch, to, again
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoints.save(to, nnx.Rngs(0))
    assert numbers(checkpoints.restore(again, nnx.Rngs(1))) == numbers(nnx.Rngs(0))


def test_existing_checkpoint_is_replaced_only_on_request(tmp_path):
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError, match="overwrite=True"):
        checkpoints.save(tmp_path / "a", nnx.Rngs(1))
    checkpoints.save(tmp_path / "a", nnx.Rngs(1), overwrite=True)
    restored = checkpoints.restore(tmp_path / "a", nnx.Rngs(0))
    assert numbers(restored) == numbers(nnx.Rngs(1))
    assert os.listdir(tmp_path) == ["a"]


def test_other_folders_are_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(errors.CheckpointError, match="no checkpoint, so it is not"):
        checkpoints.save(tmp_path, nnx.Rngs(0), overwrite=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_killed_swap_leaves_a_checkpoint(tmp_path, is_swapped):
    """The folders between the steps of replacing ``a``: see `files._swap`."""
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    checkpoints.save(tmp_path / "a.graftree-new", nnx.Rngs(1))
    if is_swapped:
        (tmp_path / "a").rename(tmp_path / "a.graftree-old")
    found = checkpoints.restore(tmp_path / "a", nnx.Rngs(2))
    assert numbers(found) == numbers(nnx.Rngs(1 if is_swapped else 0))
    with pytest.raises(errors.CheckpointError, match="exists"):
        checkpoints.save(tmp_path / "a", nnx.Rngs(3))
    checkpoints.save(tmp_path / "a", nnx.Rngs(3), overwrite=True)
    assert os.listdir(tmp_path) == ["a"]


def test_failed_save_leaves_nothing_and_keeps_the_one_before(tmp_path, monkeypatch):
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))

    def fail(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(orbax.checkpoint.StandardCheckpointHandler, "finalize", fail)
    with pytest.raises(errors.CheckpointError, match="The disk is full") as caught:
        checkpoints.save(tmp_path / "a", nnx.Rngs(1), overwrite=True)
    assert caught.value.errno == 28
    assert os.listdir(tmp_path) == ["a"]
    restored = checkpoints.restore(tmp_path / "a", nnx.Rngs(1))
    assert numbers(restored) == numbers(nnx.Rngs(0))


def test_tree_mode_stores_pytrees_and_refuses_shared_variables(tmp_path):
    with nnx.set_graph_mode(False):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        checkpoints.save(tmp_path / "a", {"model": model, "step": 3})
        like = {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(1)), "step": 0}
        restored = checkpoints.restore(tmp_path / "a", like)
        with pytest.raises(ValueError, match="nnx.checkpoints.save with graph=False"):
            checkpoints.save(tmp_path / "b", {"x": model, "y": model})
    assert restored["step"] == 3
    assert numbers(restored["model"]) == numbers(model)


def test_train_state_is_restored_as_a_new_one(tmp_path):
    def train_state(seed):
        graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(seed)))
        return nnx.TrainState.create(graphdef, params=params, tx=ADAM)

    saved = train_state(0).apply_gradients(train_state(1).params)
    checkpoints.save(tmp_path / "a", saved)
    restored = checkpoints.restore(tmp_path / "a", train_state(2))
    assert type(restored) is nnx.TrainState and restored.step == 1
    assert numbers(restored.params) == numbers(saved.params)
    assert numbers(restored.opt_state) == numbers(saved.opt_state)


# Refusals.

REFUSED = {
    "text": (lambda: {"a": "text"}, TypeError, "a has the type str"),
    "an object": (lambda: {"a": [object()]}, TypeError, "a/0 has the type object"),
    "big integer": (lambda: {"a": 2**70}, TypeError, "a is an integer of more than"),
    "strings": (lambda: {"a": np.array(["x"])}, TypeError, "a has the dtype <U1"),
    "odd dtype": (
        lambda: {"a": nnx.Param(jnp.ones(2, jnp.uint4))},
        TypeError,
        "a has the dtype uint4, which Orbax can't store",
    ),
    "abstract": (
        lambda: nnx.eval_shape(lambda: nnx.Rngs(0)),
        TypeError,
        "default/key is abstract",
    ),
    "bare array": (lambda: jnp.ones(2), TypeError, "put it in a dict"),
    "dots": (
        lambda: {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}},
        ValueError,
        "the same name on disk, 'a.b'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_by_path(tmp_path, name):
    make, kind, text = REFUSED[name]
    with pytest.raises(kind) as caught:
        checkpoints.save(tmp_path / "a", make())
    assert text in str(caught.value)
    assert not os.listdir(tmp_path)


def test_integers_of_64_bits_are_stored_and_larger_ones_are_refused(tmp_path):
    extremes = [-(2**63), 2**63 - 1]
    checkpoints.save(tmp_path / "a", nnx.Variable(extremes))
    restored = checkpoints.restore(tmp_path / "a", nnx.Variable([0, 0]))
    assert restored.get_value() == extremes
    for number in (-(2**63) - 1, 2**63):
        with pytest.raises(TypeError, match="is an integer of more than 64 bits"):
            checkpoints.save(tmp_path / "b", nnx.Variable(number))


def test_donated_array_is_refused(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.kernel[...].delete()
    with pytest.raises(TypeError, match="kernel has been deleted or donated"):
        checkpoints.save(tmp_path / "a", model)


def test_saving_in_a_trace_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a is traced: save outside of jit"):
        jax.jit(lambda x: checkpoints.save(tmp_path / "a", {"a": x}))(1.0)


def test_missing_or_other_folder_is_one_clear_error(tmp_path):
    with pytest.raises(errors.CheckpointError, match="at .*/a: nothing is there"):
        checkpoints.restore(tmp_path / "a", nnx.Rngs(0))
    (tmp_path / "a.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(errors.CheckpointError, match="only a part of one is there"):
        checkpoints.restore(tmp_path / "a", nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError, match="is not a whole checkpoint"):
        checkpoints.restore(tmp_path, nnx.Rngs(0))


def test_an_object_in_the_place_of_the_path_is_told(tmp_path):
    with pytest.raises(
        TypeError, match=r"path of a folder, got a Linear\.\nThe path is"
    ):
        checkpoints.restore(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tmp_path)


@pytest.mark.parametrize("file", ["_METADATA", "manifest.ocdbt", "d"])
def test_damaged_checkpoint_is_one_clear_error(tmp_path, capfd, file):
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    damaged = tmp_path / "a" / file
    if damaged.is_dir():
        shutil.rmtree(damaged)
    else:
        os.truncate(damaged, damaged.stat().st_size // 2)
    with pytest.raises(errors.CheckpointError, match="is damaged: a part is missing"):
        checkpoints.restore(tmp_path / "a", nnx.Rngs(0))
    assert capfd.readouterr().err == ""


def test_missing_orbax_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install .graftree\[checkpoints\]"):
        checkpoints.save(tmp_path / "a", nnx.Rngs(0))


def test_nothing_is_printed(tmp_path, capfd):
    before = [*logging.getLogger("absl").filters]
    checkpoints.save(tmp_path / "a", Model(nnx.Rngs(0)))
    checkpoints.restore(tmp_path / "a", Model(nnx.Rngs(1)))
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("absl").filters == before


def test_the_log_of_the_program_is_heard_again_afterwards(tmp_path, caplog):
    checkpoints.save(tmp_path / "a", Model(nnx.Rngs(0)))
    with checkpoints.Checkpoints(tmp_path / "b") as kept:
        kept.save(1, rngs=nnx.Rngs(0))
    checkpoints.restore(tmp_path / "a", Model(nnx.Rngs(1)))
    logging.getLogger("asyncio").warning("tensorstore is mentioned")
    assert caplog.messages == ["tensorstore is mentioned"]


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_the_log_of_orbax_is_kept_for_who_asks_for_it(tmp_path, caplog, level):
    pytest.importorskip("absl.logging")
    log = logging.getLogger("absl")
    before = log.level
    try:
        log.setLevel(level)
        checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    finally:
        log.setLevel(before)
    assert bool(caplog.messages) == (level == logging.INFO)


def test_a_path_that_cannot_be_looked_up_is_named(tmp_path):
    path = tmp_path / ("x" * 300)
    for read in (
        lambda: checkpoints.restore(path, nnx.Rngs(0)),
        lambda: checkpoints.Checkpoints(path).steps(),
    ):
        with pytest.raises(errors.CheckpointError, match="too long") as caught:
            read()
        assert str(caught.value).startswith(f"Reading {path} failed.")


# Names: any tree comes back as it was, or is refused before a byte is written.

# What a file system, a path language or Orbax may read as its own.
HOSTILE = ["", "/", ".", "..", "a", "a/", "/a", "a.", "a/b", "a.b", "1", "value", "~"]
HOSTILE += ["\0", "\ud800", "é", "%2F", ".zarray", "x" * 300, "_METADATA", "manifest"]
KEYS = st.one_of(
    st.sampled_from(HOSTILE), st.integers(-1, 2), st.text(max_size=3), st.booleans()
)
LEAVES = st.integers(1, 99).flatmap(
    lambda x: st.sampled_from([jnp.full(2, x), nnx.Param(jnp.full(1, x)), x])
)
# A State may have keys of several types, which JAX would not sort in a dict.
TREES = st.recursive(
    LEAVES, lambda x: st.dictionaries(KEYS, x, min_size=1, max_size=3), max_leaves=5
).filter(lambda x: isinstance(x, dict))


def content(state):
    return {
        path: jnp.asarray(leaf).tolist()
        for path, leaf in nnx.to_flat_state(nnx.as_pure(state))
    }


@strategies.examples(few=40, many=1000)
@hypothesis.given(TREES)
def test_every_tree_comes_back_or_is_refused_before_anything_is_written(tree):
    state = nnx.State(tree)
    with tempfile.TemporaryDirectory() as parent:
        folder = os.path.join(parent, "saved")
        try:
            checkpoints.save(folder, state)
        except (ValueError, TypeError) as error:
            assert "name" in str(error) or "sort" in str(error), error
            assert not os.listdir(parent)
            return
        like = jax.tree.map(lambda x: x * 0, state)
        assert content(checkpoints.restore(folder, like)) == content(state)


@pytest.mark.parametrize("key", ["", "/", "a/", "\ud800"])
def test_a_key_that_is_no_name_is_refused_with_its_path(tmp_path, key):
    with pytest.raises(ValueError, match="is no name on disk") as caught:
        checkpoints.save(tmp_path / "a", {key: jnp.ones(2), "b": jnp.ones(3)})
    assert repr((key,)) in str(caught.value) and "Rename" in str(caught.value)
    assert not os.listdir(tmp_path)


def test_a_leaf_can_not_have_the_name_of_a_folder(tmp_path):
    state = nnx.State({1: {"b": jnp.ones(2)}, "1": jnp.ones(2)})
    with pytest.raises(ValueError, match="the same name on disk, '1'"):
        checkpoints.save(tmp_path / "a", state)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["_METADATA", "_CHECKPOINT_METADATA", "__", "é.", ""])
def test_an_object_of_a_step_has_a_name_of_its_own(tmp_path, name):
    with checkpoints.Checkpoints(tmp_path) as series:
        with pytest.raises(ValueError, match="no name for a saved object"):
            series.save(1, **{name: nnx.Rngs(0)})
        assert series.steps() == []
