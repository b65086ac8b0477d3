"""`nnx.checkpoints.save` and `restore`: one object in one folder; what stops them."""

import copy
import gc
import itertools
import logging
import os
import pathlib
import random
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
from tests import strategies, tables, zoo
from tests.checkpoints.saved_objects import contents
from tests.comparisons import raises
from tests.stress import faults, kills, resumes, trainings

ADAM = optax.adam(1e-3)


def everything(seed):
    """Every kind of leaf there is."""
    block, other = zoo.Block(rngs=nnx.Rngs(seed)), zoo.Block(rngs=nnx.Rngs(seed + 1))
    ones = np.full(2, seed + 0.5)
    return zoo.Box(
        block=block,
        layers=nnx.List([other]),
        tied=block.linear.kernel,
        nothing=nnx.Param(None),
        tree=nnx.Variable({"x": jnp.asarray(ones), "y": [jnp.asarray(-ones)]}),
        number=nnx.Variable(3.5 * seed),
        raw=jnp.asarray(2 * ones),
        within=nnx.data([jnp.asarray(5 * ones), {"x": (6 * ones,)}]),
        tiny=nnx.Variable(jnp.asarray(ones, jnp.float8_e4m3fn)),
        half=nnx.Variable(jnp.asarray(ones, jnp.bfloat16)),
        empty=nnx.Param(jnp.zeros((0, 3))),
        array=nnx.Variable(3 * ones),
        weak=nnx.Variable(jnp.asarray(2.0 * seed)),
        ref=nnx.Variable(jnp.asarray(4 * ones), ref=True),
        keys=nnx.Variable(jax.random.split(jax.random.key(seed, impl="rbg"), 2)),
    )


def adam(seed):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.copy, nnx.state(model)))
    return model, optimizer


def train_state(seed):
    graphdef, params = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)))
    state = nnx.TrainState.create(graphdef, params=params, tx=ADAM)
    return state.apply_gradients(params).replace(step=jnp.array(seed))


OBJECTS = {
    "Module": everything,
    "State": lambda seed: nnx.state(everything(seed)),
    "model and Optimizer": adam,
    "Rngs": lambda seed: nnx.Rngs(seed, params=seed + 1),
    "metric": lambda seed: nnx.MultiMetric(loss=nnx.metrics.Average()),
    "EMA": lambda seed: nnx.EMA(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)), 0.9),
    "TrainState": train_state,
    "Variable": lambda seed: nnx.Param(jnp.full(3, seed)),
    "nothing": lambda seed: nnx.List([]),
    "dict": lambda n: {"rngs": nnx.Rngs(n), "step": n, "x": [np.ones(2) / n]},
    "integers of 64 bits": lambda seed: nnx.Variable([-(2**63) // seed, 2**63 - seed]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_restored_object_has_every_value_and_the_other_stays(tmp_path, name):
    saved, like = OBJECTS[name](1), OBJECTS[name](2)
    before = contents(like)
    checkpoints.save(tmp_path / "a", saved)
    restored = checkpoints.restore(tmp_path / "a", like)
    assert type(restored) is type(saved) and contents(restored) == contents(saved)
    assert contents(like) == before


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


def test_an_abstract_array_that_is_no_leaf_is_not_passed_over(tmp_path):
    def make():
        return zoo.Box(within=nnx.data([jnp.ones(2)]))

    checkpoints.save(tmp_path / "a", make())
    with pytest.raises(errors.StateMismatchError, match="within/0"):
        checkpoints.restore(tmp_path / "a", nnx.eval_shape(make))


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


def sharded(seed=0):
    init = {
        "kernel_init": nnx.initializers.constant(seed + 0.5),
        "kernel_metadata": {"out_sharding": ("data", "model")},
    }
    model = nnx.Linear(8, 16, **init, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), nnx.Rngs(seed)


@pytest.fixture(scope="module")
def saved_sharded(tmp_path_factory):
    """What was saved of `sharded` on a mesh, and where."""
    folder = tmp_path_factory.mktemp("sharded") / "a"
    with jax.set_mesh(trainings.make_mesh(4, 2)):
        objects = sharded()
    checkpoints.save(folder, objects)
    return folder, contents(objects)


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (1, 1)])
def test_arrays_go_onto_the_shardings_of_the_other_object(saved_sharded, shape):
    folder, expected = saved_sharded
    mesh = trainings.make_mesh(*shape)
    with jax.set_mesh(mesh):
        found = [checkpoints.restore(folder, sharded(1))]
        found += [checkpoints.restore(folder, nnx.eval_shape(sharded))]
    graphdef, state = nnx.get_abstract_model(sharded, mesh)
    found += [nnx.merge(graphdef, checkpoints.restore(folder, state))]
    wanted = jax.NamedSharding(mesh, jax.P("data", "model"))
    for restored in found:
        model, optimizer, _ = restored
        for kernel in (model.kernel, optimizer.opt_state[0].mu["kernel"]):
            assert kernel[...].sharding == wanted
        assert contents(restored) == expected


def test_abstract_mesh_without_devices_is_refused(saved_sharded):
    with jax.set_mesh(trainings.make_mesh(2, 4)):
        abstract = nnx.eval_shape(sharded)
    with pytest.raises(ValueError, match=r"0/bias: .*\n.* jax.set_mesh"):
        checkpoints.restore(saved_sharded[0], abstract)


@pytest.mark.parametrize("is_wide", [False, True])
def test_what_had_no_device_or_type_of_its_own_has_none_again(tmp_path, is_wide):
    """Else a restored counter could not meet arrays on other devices in a program."""
    counter = nnx.Variable(jnp.asarray(2.0)), nnx.Rngs(0)
    checkpoints.save(tmp_path / "a", counter)
    with jax.enable_x64(is_wide):
        count, rngs = checkpoints.restore(tmp_path / "a", counter)
    assert not count[...].committed and not rngs.default.key[...].committed
    assert count[...].weak_type is True and count[...].dtype == np.float32
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[1])
    assert (elsewhere * count[...]).devices() == {jax.devices()[1]}


# Folders.


def is_rngs(seed, folder):
    """Whether those streams are there."""
    restored = checkpoints.restore(folder, nnx.Rngs(9))
    return contents(restored) == contents(nnx.Rngs(seed))


@tables.cases(
    "to, again", ("a b#c?d%20é", "a b#c?d%20é"), ("made/by/save", "~/made/by/save")
)
def test_path_may_be_relative_or_in_the_home_folder_and_have_any_characters(
    tmp_path, monkeypatch, to, again
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoints.save(to, nnx.Rngs(0))
    assert is_rngs(0, again)


def test_existing_checkpoint_is_replaced_only_on_request(tmp_path):
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError, match="overwrite=True"):
        checkpoints.save(tmp_path / "a", nnx.Rngs(1))
    checkpoints.save(tmp_path / "a", nnx.Rngs(1), overwrite=True)
    assert is_rngs(1, tmp_path / "a") and os.listdir(tmp_path) == ["a"]


def test_other_folders_are_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(errors.CheckpointError, match="not a checkpoint, so it was not"):
        checkpoints.save(tmp_path, nnx.Rngs(0), overwrite=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_killed_swap_leaves_a_checkpoint(tmp_path, is_swapped):
    """The folders between the steps of replacing ``a``: see `files._swap`."""
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    checkpoints.save(tmp_path / "a.graftree-new", nnx.Rngs(1))
    if is_swapped:
        (tmp_path / "a").rename(tmp_path / "a.graftree-old")
    assert is_rngs(int(is_swapped), tmp_path / "a")
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
    assert is_rngs(0, tmp_path / "a") and os.listdir(tmp_path) == ["a"]


def test_tree_mode_stores_pytrees_and_refuses_shared_variables(tmp_path):
    with nnx.set_graph_mode(False):
        model = zoo.Scale(3.0)
        checkpoints.save(tmp_path / "a", {"model": model, "step": 3})
        like = {"model": zoo.Scale(), "step": 0}
        restored = checkpoints.restore(tmp_path / "a", like)
        with pytest.raises(ValueError, match="nnx.checkpoints.save with graph=False"):
            checkpoints.save(tmp_path / "b", {"x": model, "y": model})
    assert restored["step"] == 3 and contents(restored["model"]) == contents(model)


# Refusals.


def donated():
    model = zoo.Scale()
    model.w[...].delete()
    return model


REFUSED = {
    "text": (lambda: {"a": "text"}, TypeError, "a is of type str"),
    "an object": (lambda: {"a": [object()]}, TypeError, "a/0 is of type object"),
    "big integer": (lambda: {"a": 2**63}, TypeError, "a is an integer of more than 64"),
    "less": (lambda: {"a": -(2**63) - 1}, TypeError, "a is an integer of more than 64"),
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
    "a folder": (
        lambda: nnx.State({1: {"b": jnp.ones(2)}, "1": jnp.ones(2)}),
        ValueError,
        "the same name on disk, '1'",
    ),
    "one folder for two": (
        lambda: nnx.State({1: {"a": jnp.ones(2)}, "1": nnx.Param(jnp.ones(2))}),
        ValueError,
        "the same name on disk, '1.value'",
    ),
    "donated": (donated, TypeError, "w has been deleted or donated"),
    "dots": (
        lambda: {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}},
        ValueError,
        "the same name on disk, 'a.b'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_by_path(tmp_path, name):
    make, kind, text = REFUSED[name]
    with raises(kind, text):
        checkpoints.save(tmp_path / "a", make())
    assert not os.listdir(tmp_path)


def test_saving_in_a_trace_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a is traced: save outside of jit"):
        jax.jit(lambda x: checkpoints.save(tmp_path / "a", {"a": x}))(1.0)


def test_missing_or_other_folder_is_one_clear_error(tmp_path):
    with pytest.raises(errors.CheckpointError, match="at .*/a: the path does not"):
        checkpoints.restore(tmp_path / "a", nnx.Rngs(0))
    (tmp_path / "a.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(errors.CheckpointError, match="holds an incomplete checkpoint"):
        checkpoints.restore(tmp_path / "a", nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError, match="is not a complete checkpoint"):
        checkpoints.restore(tmp_path, nnx.Rngs(0))


def test_an_object_in_the_place_of_the_path_is_told(tmp_path):
    with pytest.raises(TypeError, match=r"of a folder, got a Scale\.\nThe path is"):
        checkpoints.restore(zoo.Scale(), tmp_path)


@pytest.mark.parametrize("file", ["_METADATA", "manifest.ocdbt", "d"])
def test_damaged_checkpoint_is_one_clear_error(tmp_path, capfd, file):
    checkpoints.save(tmp_path / "a", nnx.Rngs(0))
    damaged = tmp_path / "a" / file
    if damaged.is_dir():
        shutil.rmtree(damaged)
    else:
        os.truncate(damaged, damaged.stat().st_size // 2)
    with pytest.raises(errors.CheckpointError, match="is damaged: part of it"):
        checkpoints.restore(tmp_path / "a", nnx.Rngs(0))
    assert capfd.readouterr().err == ""


def test_missing_orbax_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match="pip install orbax-checkpoint"):
        checkpoints.save(tmp_path / "a", nnx.Rngs(0))


def test_nothing_is_printed_and_the_log_of_the_program_is_back(tmp_path, capfd, caplog):
    before = [*logging.getLogger("absl").filters]
    checkpoints.save(tmp_path / "a", everything(0))
    with checkpoints.Checkpoints(tmp_path / "b") as kept:
        kept.save(1, rngs=nnx.Rngs(0))
    checkpoints.restore(tmp_path / "a", everything(1))
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("absl").filters == before
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


@strategies.examples(few=12, many=1000)
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
        assert contents(checkpoints.restore(folder, like)) == contents(state)


@pytest.mark.parametrize("key", ["", "/", "a/", "\ud800"])
def test_a_key_that_is_no_name_is_refused_with_its_path(tmp_path, key):
    with raises(ValueError, "is not a valid name on disk", repr((key,)), "Rename"):
        checkpoints.save(tmp_path / "a", {key: jnp.ones(2), "b": jnp.ones(3)})
    assert not os.listdir(tmp_path)


# -------------------------------------------------------- what can't be read or written


@pytest.mark.parametrize("make", faults.READS, ids=lambda make: make.__name__)
def test_what_is_no_fitting_checkpoint_is_one_clear_error(tmp_path, make):
    make(tmp_path / "there")
    assert len(faults.read_fault(tmp_path / "there").splitlines()) < 8


@pytest.fixture
def open_folder():
    """A folder that other users may enter, unlike that of pytest."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.parametrize("title", faults.WRITES)
def test_nothing_is_lost_where_nothing_can_be_written(open_folder, capfd, title):
    messages = faults.WRITES[title](open_folder)
    assert all("folder" in m or "path" in m or "larger" in m for m in messages)
    assert capfd.readouterr() == ("", "")


# TensorStore tells threads of Orbax that have ended by then that a read has failed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
@tables.cases(
    "damage",
    *(faults.cut, faults.remove, faults.flip),
    pytest.param(faults.empty, marks=pytest.mark.long),
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_one_clear_error_or_does_no_harm(tmp_path, damage):
    faults.good_series(tmp_path / "good")
    for name in faults.files_of(tmp_path / "good"):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        message = faults.damage_of_step(tmp_path / "bad", name, damage)
        shutil.rmtree(tmp_path / "bad")
        # Orbax has no checksums of the numbers, which docs/guides/checkpoints.md says.
        if damage is not faults.flip or "ocdbt.process_0/d/" not in name:
            assert message is None or "estore" in message, name
    gc.collect()  # what is told then belongs to this test


@tables.cases("number, seed", (1, 0), pytest.param(6, 1, marks=pytest.mark.long))
def test_a_killed_save_loses_nothing_and_leaves_nothing_that_loads(number, seed):
    options = kills.read_options(["--kills", f"{number}", "--seed", f"{seed}"])
    _, expected = kills.run(options)
    assert expected.done["series"] and expected.done["single"]


@pytest.fixture(scope="module")
def step():
    return trainings.make_step()


def train(steps, step, made, data, mesh):
    """The losses of some steps, bit by bit."""
    batches = (trainings.next_batch(data, mesh) for _ in range(steps))
    return [float(step(made, *batch)).hex() for batch in batches]


@pytest.mark.parametrize("name", ["2x4", pytest.param("1x1", marks=pytest.mark.long)])
def test_resumed_run_is_the_unbroken_one_bit_by_bit(tmp_path, step, name):
    mesh = trainings.make_mesh(*trainings.MESHES[name])
    with jax.set_mesh(mesh):
        made, data = trainings.make_objects(16), trainings.make_data()
        again = copy.deepcopy(made)  # with its transformation: `step` is compiled once
        with checkpoints.Checkpoints(tmp_path) as kept:
            first = train(2, step, made, data, mesh)
            kept.save(1, **made, **data)
            # The arrays that are being saved are donated, and the data goes on.
            rest = train(2, step, made, data, mesh)
        end = trainings.digest(made, data)

        data = trainings.make_data()
        assert train(1, step, again, data, mesh) == first[:1]
        with checkpoints.Checkpoints(tmp_path) as kept:
            assert kept.restore_latest(**again, **data) == 1
        assert train(2, step, again, data, mesh) == rest
        assert trainings.digest(again, data) == end


@pytest.mark.long
def test_a_run_goes_on_over_other_devices(tmp_path, step):
    losses = []
    with checkpoints.Checkpoints(tmp_path) as kept:
        for name, number in zip(["1x8", "2x4", "1x1"], itertools.count()):
            mesh = trainings.make_mesh(*trainings.MESHES[name])
            with jax.set_mesh(mesh):
                made, data = trainings.make_objects(16), trainings.make_data()
                kept.restore_latest(**made, **data)
                losses += train(1, step, made, data, mesh)
                kept.save(number, **made, **data)
    mesh = trainings.make_mesh(1, 1)
    with jax.set_mesh(mesh):
        made, data = trainings.make_objects(16), trainings.make_data()
        unbroken = train(3, step, made, data, mesh)
    found, expected = ([*map(float.fromhex, x)] for x in (losses, unbroken))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_killed_processes_go_on_bit_by_bit(tmp_path):
    options = resumes.read_options(["--kills", "2"])
    tally = resumes.break_often("2x4/2", tmp_path, options, random.Random(1))
    assert tally.kills + tally.stops == 2 and tally.losses > 0
