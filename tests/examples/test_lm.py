"""The language-model example: equal losses in all layouts, resuming, what is sent."""

import dataclasses
import functools
import itertools
import json
import math
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.lm import (
    __main__ as command,
    compare,
    curves,
    data,
    experiment,
    layouts,
    loops,
    processes,
    published,
    restacking,
    samples,
    settings,
    simulate,
    train,
)
from examples.lm.model import Config, LanguageModel
from tests import interpreters, tables
from tests.examples.commands import PNG_SIGNATURE, error_line

SIZES = {"layers": 1, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 32}
TINY = settings.Settings(
    mesh={"fsdp": 8}, steps=4, batch_size=16, length=16, every=2, sample=4, **SIZES
)

# Losses are sums of many numbers in float32, and each layout adds them in its own
# order: that moves a loss near 6 by a few units in the last place, 5e-7 each.
ROUNDING = 1e-5


def as_arguments(options, *names):
    """Sizes of the model, and other options, as a command takes them."""
    listed = [*SIZES, *names]
    return [f"--{n.replace('_', '-')}={getattr(options, n)}" for n in listed]


def losses_of(options, steps=3):
    """The losses of some steps, with as many devices as the mesh has."""
    layout = layouts.make(options.mesh)
    with layout.in_force():
        job = loops.Job(options, layout)
        return [float(job.step(number)) for number in range(1, steps + 1)], job


@pytest.fixture(scope="module")
def undivided():
    """The losses on one device."""
    return losses_of(dataclasses.replace(TINY, mesh={"data": 1}))[0]


def run(folder, should_stop=lambda: False, **changes):
    """Runs the experiment in a folder; tells which signal stopped it."""
    options = dataclasses.replace(TINY, output=folder, **changes)
    return experiment.run(options, should_stop=should_stop)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder) is None
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped after three of its four steps."""
    folder, asked = tmp_path_factory.mktemp("stopped"), itertools.count(1)
    assert run(folder, lambda: next(asked) >= 3) is signal.SIGINT
    return folder


def arrays_in(folder):
    """The arrays of the last checkpoint in a folder, by path."""

    def make():
        return train.make_objects(loops.config_of(TINY), loops.recipe_of(TINY))

    with layouts.make({"data": 1}).in_force():
        model, optimizer = nnx.eval_shape(make)
        with nnx.checkpoints.Checkpoints(folder / "checkpoints") as checkpoints:
            step = checkpoints.restore_latest(
                model=model, optimizer=optimizer, curve=None
            )
    assert step == TINY.steps
    flat = nnx.to_flat_state(nnx.state((model, optimizer)))
    return {path: np.asarray(variable[...]) for path, variable in flat}


# ------------------------------------------------------------------------- layouts


ALL_AXES = {"data": 2, "fsdp": 2, "tensor": 2}
OTHER_LAYOUTS = [
    {"mesh": {"fsdp": 4, "tensor": 2}, "accumulate": 2},
    {"mesh": {"data": 8}},
    {"mesh": {"fsdp": 8}, "accumulate": 2},
    {"mesh": {"fsdp": 8}, "stack": True},
    {"mesh": {"tensor": 2}, "remat": True},
]


@pytest.mark.long
@tables.cases(
    "changes",
    {"mesh": ALL_AXES, "stack": True, "remat": True, "accumulate": 2},
    *(pytest.param(changes, marks=pytest.mark.long) for changes in OTHER_LAYOUTS),
    ids=lambda changes: dataclasses.replace(TINY, **changes).label,
)
def test_losses_are_those_of_one_device(undivided, changes):
    losses, _ = losses_of(dataclasses.replace(TINY, **changes))
    np.testing.assert_allclose(losses, undivided, rtol=0, atol=ROUNDING)


@pytest.mark.long
def test_losses_in_bfloat16_are_near_those_in_float32(undivided):
    losses, _ = losses_of(dataclasses.replace(TINY, precision="bf16"))
    np.testing.assert_allclose(losses, undivided, rtol=0, atol=0.02)
    assert not np.allclose(losses, undivided, rtol=0, atol=1e-7)


@pytest.mark.long
def test_no_device_has_a_whole_kernel_before_or_after_a_step():
    _, job = losses_of(TINY, steps=1)
    report = nnx.sharding.report((job.model, job.optimizer))
    kernels = [row for row in report.rows if len(row.shape) > 1]
    assert len(kernels) == 3 * 9  # the model's, and their two moments
    assert all(row.local_bytes * 8 == row.num_bytes for row in kernels)


# ------------------------------------------------------------------- stop and resume


@pytest.mark.long
def test_resuming_on_the_same_mesh_is_exact_to_the_last_bit(whole, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    assert run(folder) is None
    assert curves.read(folder).curve == curves.read(whole).curve
    expected, found = arrays_in(whole), arrays_in(folder)
    assert found.keys() == expected.keys()
    for path, array in found.items():
        assert array.tobytes() == expected[path].tobytes(), path


@pytest.mark.long
@pytest.mark.parametrize("changes", [OTHER_LAYOUTS[0], OTHER_LAYOUTS[3]])
def test_resuming_in_another_layout_is_exact_up_to_rounding(
    whole, stopped, tmp_path, changes
):
    folder = shutil.copytree(stopped, tmp_path / "run")
    assert run(folder, **changes) is None
    expected, found = curves.read(whole).curve, curves.read(folder).curve
    assert found.training[:3] == expected.training[:3]
    np.testing.assert_allclose(found.training, expected.training, atol=ROUNDING)
    np.testing.assert_allclose(found.held_out, expected.held_out, atol=ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("stacked", [False, True])
def test_values_of_a_list_of_blocks_fit_a_stack_and_reverse(stacked):
    def make(seed, stacked):
        config = Config(**SIZES, stacked=stacked)
        return train.make_state(config, train.Recipe(), layout, seed)

    layout, tokens = layouts.make({"data": 1}), np.array([[*b"abc"]])
    with layout.in_force():
        saved, target = make(0, stacked), make(1, not stacked)
        train.train_step(*saved, tokens)
        restacking.fill(target, saved)
        # The first loss shows the parameters, the second the moments too.
        expected = [train.train_step(*saved, tokens).item() for _ in range(2)]
        found = [train.train_step(*target, tokens).item() for _ in range(2)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)
    assert expected[1] != expected[0]


@pytest.mark.long
def test_finished_run_is_told_again_and_trains_no_more(whole, capsys):
    before = curves.read(whole).curve
    assert run(whole) is None
    assert "going on after step 4" in capsys.readouterr().out
    assert curves.read(whole).curve == before


def test_folder_of_another_experiment_is_refused(whole, capsys):
    arguments = ["--mesh=fsdp=8", "--steps=9", "--batch-size=16", f"--output={whole}"]
    error = error_line(capsys, command.main, arguments)
    assert "--steps was 4, is 9" in error and "--width was 16, is 128" in error


@tables.cases("cause, code", (signal.SIGINT, 130), (signal.SIGTERM, 143))
def test_exit_code_says_which_signal_stopped_a_run(tmp_path, monkeypatch, cause, code):
    monkeypatch.setattr(experiment, "run", lambda *_, **__: cause)
    assert command.main([f"--output={tmp_path}"]) == code


def test_folder_of_a_run_holds_curve_picture_and_checkpoints_only(whole):
    names = {path.name for path in whole.iterdir()}
    assert names == {"checkpoints", "curve.png", curves.FILE}
    assert (whole / "curve.png").read_bytes().startswith(PNG_SIGNATURE)


# ------------------------------------------------------------------------------ text


def test_batches_are_a_function_of_seed_and_step_whatever_divides_them():
    text = np.arange(256, dtype=np.uint8)

    def batch(seed, step, **mesh):
        sharding = layouts.make(mesh).batch
        return np.asarray(data.Batches(text, 8, 5, seed, sharding)(step))

    first = batch(0, 1, data=8)
    assert first.shape == (8, 6) and first.dtype == np.int32
    np.testing.assert_array_equal(np.diff(first), 1)
    np.testing.assert_array_equal(first, batch(0, 1, fsdp=2, tensor=4))
    others = batch(0, 2, data=8), batch(1, 1, data=8)
    assert not any(np.array_equal(first, other) for other in others)


def test_held_out_batches_cover_their_text_from_end_to_end():
    text = np.arange(250, dtype=np.uint8)
    found = data.held_out_batches(text, 4, 9, layouts.make({"data": 4}).batch)
    assert {x.shape for x in found} == {(4, 10)}
    assert {*np.concatenate(found).flat} == {*range(250)}


def test_text_is_learned_from_but_for_the_tenth_that_is_held_out():
    text = data.load()
    sizes = [len(path.read_bytes()) for path in data.FOLDER.glob("*.txt")]
    assert len(text.train) + len(text.held_out) == sum(sizes)
    assert len(text.held_out) == pytest.approx(sum(sizes) / 10, abs=2)


@pytest.mark.parametrize("stacked", [pytest.param(False, marks=pytest.mark.long), True])
def test_cache_gives_the_likeliest_bytes_that_the_whole_text_gives(stacked):
    config = Config(**SIZES | {"layers": 2}, stacked=stacked)
    with layouts.make({"data": 1}).in_force():
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        found = samples.draw(model, np.array([*b"abc"]), 0, temperature=0, count=4)
        text = jnp.array([[*b"abc", *found]])
        logits = nnx.jit(lambda model, tokens: model(tokens))(model, text)
    assert [*found] == [*logits[0, 2:-1].argmax(axis=-1)]
    assert not nnx.to_flat_state(nnx.state(model, nnx.Cache))


@pytest.mark.long
def test_losses_fall_below_the_entropy_of_a_byte_after_another():
    def n_log_n(counts):
        counts = counts[counts > 0]
        return np.sum(counts * np.log(counts))

    text = data.load().train
    counts = np.zeros((256, 256))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    entropy = (n_log_n(counts.sum(axis=1)) - n_log_n(counts)) / counts.sum()
    assert entropy == pytest.approx(2.46, abs=0.02)  # nats per byte

    sizes = {"width": 64, "heads": 4, "kv_heads": 2, "hidden": 192, "layers": 2}
    options = dataclasses.replace(TINY, steps=300, length=64, **sizes)
    losses, _ = losses_of(options, steps=300)
    assert losses[0] > 5 and np.mean(losses[-10:]) < entropy - 0.1


# ----------------------------------------------------------------------- wrong options


@tables.cases(
    "option, message",
    ("--mesh=data=4", "data=4 is a mesh of 4 devices, but there are 8"),
    ("--mesh=model=8", "no axis 'model': expected some of data, fsdp, tensor"),
    ("--mesh=data", "expected a size from 1 to 4096 for data, got ''"),
    ("--mesh=data=0", "expected a size from 1 to 4096 for data, got '0'"),
    ("--mesh=data=2,data=4", "the axis data is given twice"),
    ("--mesh=data=6", "--batch-size: expected a multiple of 6"),
    ("--mesh=tensor=8", "--kv-heads: expected a multiple of 8 (tensor of --mesh)"),
    ("--accumulate=5", "--batch-size: expected a multiple of 5"),
    ("--heads=3", "--heads: expected a multiple of 4 (--kv-heads), got 3"),
    ("--width=100", "--width: expected a multiple of 16"),
    ("--precision=bf15", "--precision: "),
    ("--steps=0", "--steps: expected a whole number from 1 to"),
    ("--temperature=hot", "expected a number from 0 to 10, got 'hot'"),
    ("--prompt=", "--prompt: expected some text"),
    ("--devices=3", "data=3 is a mesh of 3 devices, but there are 8"),
    ("--speed=9", "--speed"),
)
def test_wrong_option_is_refused_in_one_line(capsys, tmp_path, option, message):
    folder = tmp_path / "out"
    batch = "--batch-size=30" if option == "--devices=3" else "--batch-size=32"
    error = error_line(capsys, command.main, [option, batch, f"--output={folder}"])
    assert message in error


def test_damaged_record_is_refused_in_one_line(capsys, tmp_path):
    (tmp_path / curves.FILE).write_text(json.dumps({"label": "data=8"}))
    error = error_line(capsys, command.main, ["--mesh=data=8", f"--output={tmp_path}"])
    assert "is not a record of a run" in error


# ------------------------------------------------------------------------- as a program


@pytest.mark.long
@pytest.mark.parametrize("cause", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_a_run_that_goes_on(tmp_path, cause):
    options = ["--mesh=fsdp=2,tensor=2", "--steps=2000", "--every=5"]
    options += as_arguments(TINY, "length")
    options.append(f"--output={tmp_path}")
    variables = {"PYTHONUNBUFFERED": "1", "XLA_FLAGS": ""}
    with interpreters.start("-m", "examples.lm", *options, **variables) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        process.send_signal(cause)
        out, error = process.communicate()
    assert lines[-1].startswith("step    5/2000"), lines
    assert process.returncode == 128 + cause, error
    last = out.splitlines()[-1]
    assert last.startswith("stopped after step"), last
    step = len(curves.read(tmp_path).curve.training)
    assert f"step {step}," in last and step < 2000
    assert (tmp_path / "checkpoints" / str(step)).is_dir()


@pytest.mark.long
def test_comparison_has_a_row_for_each_run(whole, stopped, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    assert compare.main([f"{whole}", f"{stopped}", f"--picture={picture}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| fsdp=8 ") and "| 0.0e+00 " in lines[3]
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_comparison_of_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert "has no run in it" in error_line(capsys, compare.main, [f"{tmp_path}"])


# ----------------------------------------------------------------------- two processes


@pytest.mark.long  # tests/test_tools.py has two that load and save
def test_two_processes_train_as_one_does(tmp_path):
    mesh = {"data": 2, "fsdp": 2}
    options = dataclasses.replace(TINY, mesh=mesh, steps=2, batch_size=64, length=64)
    told = ["--processes=2", "--sample=1", f"--output={tmp_path}"]
    told += [f"--mesh={settings.in_words(mesh)}"]
    told += as_arguments(options, "steps", "batch_size", "length", "every")
    # Both compute while this process does.
    with interpreters.start("-m", "examples.lm", *told) as both:
        expected, _ = losses_of(options, steps=2)
        out, errors = both.communicate(timeout=120)
    assert both.returncode == 0, out + errors
    assert "4 of cpu in 2 process(es)" in out and errors == ""
    found = json.loads((tmp_path / "run.json").read_text())["curve"]["training"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)


def test_devices_that_processes_can_not_share_are_refused(tmp_path, capsys):
    told = ["--processes=3", "--mesh=data=4", f"--output={tmp_path}"]
    error = error_line(capsys, command.main, told)
    assert "--processes: 3 can't share 4 devices equally" in error


@tables.cases(
    "codes, code, words",
    ([0, 0], 0, ""),
    ([1, -9], 1, "process 1 ended (killed by SIGKILL)"),
    ([None, 3], 1, "process 1 ended (exit code 3)"),
    ([-6, None], 1, "process 0 ended (killed by SIGABRT)"),
    ([2, 2], 2, "--mesh: wrong"),
)
def test_one_line_says_which_process_failed(tmp_path, capsys, codes, code, words):
    logs = [tmp_path / f"process-{number}.log" for number in range(2)]
    for log in logs:
        log.write_text("noise\nerror: --mesh: wrong\n")
    assert processes.judge(codes, logs) == code
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == (1 if code else 0)


# --------------------------------------------------------------- devices not there


@pytest.mark.long
def test_a_step_is_compiled_from_shapes_and_described(capsys):
    before = len(jax.live_arrays())
    simulate.simulate(simulate.TINY)
    assert len(jax.live_arrays()) == before
    out = capsys.readouterr().out
    assert "cpu:8: 8 devices, fsdp=4, tensor=2" in out
    # 2 blocks of 32 (4 + 2 x 2 + 4) 8 + 3 x 32 x 64 + 2 x 32; 2 x 256 x 32 + 32.
    assert "parameters: 34,976\n" in out
    for words in ("temporaries", "all-gather", "all-reduce", "model.blocks"):
        assert words in out


def test_plans_are_read_or_refused(monkeypatch, capsys):
    plans = []
    monkeypatch.setattr(simulate, "simulate", plans.append)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = ["--mesh=fsdp=8,tensor=2", "--kv_heads=8", "--target=cpu:16"]
    assert simulate.main(options) == 0
    (plan,) = plans
    assert (plan.target, plan.kv_heads, plan.width) == ("cpu:16", 8, 4096)
    for wrong in ("--mesh=8", "--mesh=fsdp=0", "--layers=0", "--largest=batch"):
        assert wrong.split("=")[0] in error_line(capsys, simulate.plan_of, [wrong])


@pytest.mark.long
def test_the_largest_batch_that_fits_is_found_and_described(monkeypatch, capsys):
    plan = dataclasses.replace(simulate.TINY, params="bf16", largest="batch")
    limited = functools.partial(nnx.forecast.largest, memory=2**18, at_most=16)
    monkeypatch.setattr(nnx.forecast, "largest", limited)
    simulate.simulate(plan)
    out = capsys.readouterr().out
    assert "params=bf16" in out
    assert "batch 8: " in out
    assert "batch 16: " in out


def test_published_runs_have_a_mesh_of_all_devices(monkeypatch, capsys):
    for run in published.RUNS:
        topology = run.plan.target.partition(":")[2].split("x")
        assert math.prod(run.plan.mesh.values()) == math.prod(map(int, topology))
        assert run.plan.batch % math.prod(run.plan.mesh.values()) == 0
    bound = types.SimpleNamespace(bound=0.1442)
    monkeypatch.setattr(simulate, "forecast_of", lambda plan: bound)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert published.main(["h100:8"]) == 0
    row = "| Llama 2 7B | h100:8 | fsdp=8 | 16 x 4,096 | 0.144 s | 0.721 s | 20% |"
    assert row in capsys.readouterr().out


def test_a_target_that_is_unknown_is_refused(capsys):
    assert simulate.main(["--tiny", "--target=v9"]) == 2
    assert "there is no such target" in capsys.readouterr().err
