"""The benchmarks run, and all libraries compute the same; no test looks at a time."""

import dataclasses
import functools
import statistics
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import graftree as nnx
from benchmarks import (
    __main__ as program,
    accelerator,
    accelerator_models,
    accelerator_programs,
    cached_layers,
    eager_layers,
    experts,
    fresh_models,
    gauges,
    generation,
    gpts,
    groups,
    libraries,
    perceptrons,
    planned_memory,
    rows,
    tables,
    weights,
)
from tests import programs

COMPUTING = [
    rows.train_step(1),
    rows.train_step(1, donate=True),
    groups.in_default_mode(rows.train_step(1, passing="nested in a dict")),
    groups.in_default_mode(rows.train_step(1, passing="keywords")),
    rows.train_step_in_place(1),
    rows.forward_call(1),
    rows.plain_jit_of_state(2),
    rows.plain_jit_of_model(1),
    rows.step_of_blocks(1),
    rows.decode_step(1),
]


# Raw code broadcasts biases, as one does where it is allowed.
pytestmark = pytest.mark.usefixtures("implicit_ranks")


def operations(group):
    return {(row.library, row.variant): row.set_up() for row in group.rows}


def check_alike(made, calls, **tolerance):
    """Asserts that all operations give in turn what the first one gives."""
    results = [[np.asarray(call()) for _ in range(calls)] for call in made]
    for result in results:
        np.testing.assert_allclose(result, results[0], **tolerance)


# ------------------------------------------------------------- the same work for all


@pytest.mark.long
@pytest.mark.parametrize("group", COMPUTING, ids=lambda group: group.name)
def test_all_libraries_compute_what_raw_jax_computes(group):
    check_alike(operations(group).values(), 3, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_switched_models_compute_what_the_functions_of_raw_jax_compute():
    # The gradient of a bias before BatchNorm is rounding, of which Adam makes steps.
    check_alike(operations(rows.train_and_evaluate(1)).values(), 3, rtol=5e-3)


@pytest.mark.parametrize("group", COMPUTING[:5], ids=lambda group: group.name)
def test_train_steps_lower_the_loss(group):
    step = group.rows[0].set_up()
    losses = [float(step()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


@pytest.mark.long
def test_gpts_compute_what_the_pure_function_computes():
    peers = libraries.installed("Graftree", "Flax NNX").values()
    made = [gpts.raw(1)(), *(gpts.nnx(library, 1)() for library in peers)]
    check_alike(made, 2, rtol=1e-5)


@pytest.mark.parametrize("of", ["forward", "gradient"])
def test_transformer_blocks_are_traced_to_no_more_than_the_pure_function(of):
    counts = operations(rows.equations(of))
    found = {library: count() for (library, _), count in counts.items()}
    assert 0 < found["Graftree"] <= found["raw JAX"]


def test_transformer_blocks_compute_what_the_pure_function_computes():
    x = gpts.inputs()
    found = programs.in_one_program(gpts.nnx_block(nnx), x)
    expected = jax.jit(gpts.raw_block)(gpts.block_parameters(), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("is_ragged", [True, False])
def test_decoding_makes_the_tokens_of_the_program_by_hand(is_ragged):
    sizes = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 1}
    config = dataclasses.replace(generation.SMALL, **sizes)
    setting = generation.Setting(2, config, length=16, count=5, is_ragged=is_ragged)
    expected = generation.raw(setting, is_uniform=not is_ragged)()
    np.testing.assert_array_equal(generation.ours(setting)(), expected)


def test_a_step_of_attention_is_that_of_the_program_by_hand():
    setting = cached_layers.Setting(features=16, heads=4, kv_heads=2, slots=6)
    setting = dataclasses.replace(setting, batch=2, position=3)
    steps_of = cached_layers.ours(setting), cached_layers.raw(setting)
    for _ in range(2):
        found, expected = (step() for step in steps_of)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_mixtures_of_experts_compute_what_all_experts_do():
    setting = experts.Setting(4, tokens=12, features=8, hidden=8)
    (forward, *_) = experts.of_setting(setting)
    check_alike(operations(forward).values(), 3, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", eager_layers.RAW)
def test_eager_layers_compute_what_raw_code_computes(name):
    check_alike(operations(rows.eager_layer(name)).values(), 2, rtol=1e-4, atol=1e-5)


def test_constructed_models_hold_arrays_of_the_same_shapes():
    made = [operation() for operation in operations(rows.construct(2)).values()]
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(model)) for model in made]
    assert set(sizes) == {2 * (perceptrons.WIDTH**2 + perceptrons.WIDTH)}


@pytest.mark.parametrize("name", ["jax.tree.flatten", "pop"])
def test_forms_give_as_many_arrays(name):
    taken = [op() for op in operations(rows.functional_form(name, 2)).values()]
    assert len({len(jax.tree.leaves(result)) for result in taken}) == 1


# ------------------------------------------------------- what is not the time of a call


@pytest.mark.long
@pytest.mark.parametrize(
    "row", groups.in_default_mode(rows.of_a_gpt(1)[0]).rows, ids=tables.label
)
def test_each_lowering_traces_the_model_again(row, monkeypatch):
    traced, attention = [], gpts.attention
    monkeypatch.setattr(
        gpts, "attention", lambda *args: traced.append(1) or attention(*args)
    )
    lower = row.set_up()
    lower()
    once = len(traced)
    lower()
    assert once > 0 and len(traced) == 2 * once


@pytest.mark.long
def test_peak_memory_tells_one_copy_of_the_state_from_two():
    def peak(donate):
        sizes = planned_memory.PEAK_DEPTH, planned_memory.PEAK_WIDTH
        step = functools.partial(perceptrons.raw, *sizes, donate=donate)
        return planned_memory.peak(step)()

    assert peak(donate=False) == pytest.approx(2, abs=0.05)
    assert peak(donate=True) < 1.5


@pytest.mark.parametrize("program", planned_memory.PROGRAMS[2:])
def test_stacks_compute_what_the_loop_by_hand_computes(program):
    expected = planned_memory.raw_outputs(program)
    outputs = planned_memory.nnx_outputs(nnx, program)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("program", planned_memory.PROGRAMS)
def test_compiled_programs_need_the_memory_of_those_by_hand(program):
    for part in planned_memory.PARTS:
        raw, *others = rows.bytes_planned(program, part).rows
        by_hand = raw.set_up()()
        ours = [row for row in others if row.library == "Graftree"]
        assert all(row.set_up()() <= 1.01 * by_hand for row in ours)


def test_fresh_models_are_counted_after_the_first_tenth():
    course = fresh_models.raw(20)
    assert course["first"] > 0 and course["last"] > 0
    assert course["objects"] < 5  # below zero where objects of other tests go meanwhile


@pytest.mark.long
def test_imports_are_timed_in_a_process_of_their_own():
    (row, *_) = rows.importing().rows
    assert 0 < row.set_up()() < 60


# ------------------------------------------------------------------- gauges and tables


def test_operations_take_turns_and_slow_ones_fewer():
    order, effort = [], gauges.Effort(turns=3, seconds=0, budget=60)
    gauges.seconds_per_call([lambda x=x: order.append(x) for x in "ab"], effort)
    assert order[-6:] == ["a", "b"] * 3
    effort = gauges.Effort(turns=25, seconds=0, budget=10, fewest=3)
    assert [effort.turns_of(seconds) for seconds in (0.001, 1, 60)] == [25, 10, 3]


@pytest.mark.parametrize(("pick", "picked"), [(statistics.median, 2.0), (min, 1.0)])
def test_first_readings_warm_up_and_of_the_others_one_is_picked(pick, picked):
    values = iter([0.0, 1.0, 5.0, 2.0])
    effort = gauges.Effort(turns=3, seconds=0, budget=60, pick=pick)
    assert gauges.readings([lambda: next(values)], effort) == [picked]


LIBRARIES = ("raw JAX", "Graftree", "Flax NNX", "Equinox")
GROUP = groups.Group(
    "call",
    groups.MICROSECONDS,
    tuple(groups.Row(library, "", jax.devices) for library in LIBRARIES),
    target="1.10 raw",
)
FIGURES = [1.0, 2.0, 8.0, 4.0]


def test_table_compares_with_raw_jax_and_graftree_with_its_peers():
    assert tables.markdown(GROUP, FIGURES).strip().splitlines()[:5] == [
        "| call | µs | / raw | / Flax | / Equinox | target |",
        "| :-- | --: | --: | --: | --: | --: |",
        "| raw JAX | 1.0 | 1.00 |  |  |  |",
        "| Graftree | 2.0 | 2.00 | 0.25 | 0.50 | 1.10 raw |",
        "| Flax NNX | 8.0 | 8.00 |  |  |  |",
    ]


def test_figures_are_in_the_unit_of_their_quantity():
    values = iter([1e-6, 2e-6])
    rows = [groups.Row(name, "", lambda: values.__next__) for name in LIBRARIES[:2]]
    group = groups.Group("course", groups.COURSE_MICROSECONDS, tuple(rows))
    assert group.measure(gauges.QUICK) == pytest.approx([1.0, 2.0])


def test_tables_leave_out_columns_without_figures():
    group = groups.Group("call", groups.MICROSECONDS, GROUP.rows[:2])
    assert tables.markdown(group, FIGURES[:2]).strip().splitlines() == [
        "| call | µs | / raw |",
        "| :-- | --: | --: |",
        "| raw JAX | 1.0 | 1.00 |",
        "| Graftree | 2.0 | 2.00 |",
    ]


def test_ratios_are_left_out_where_the_figure_should_be_zero():
    group = groups.Group("stays", groups.OBJECTS, GROUP.rows[:2])
    lines = tables.markdown(group, [0.0, -0.001]).splitlines()
    assert lines[-1] == "| Graftree | 0.00 |"


def test_program_prints_the_groups_asked_for(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks", "--quick", "--only", "merge"])
    program.main()
    titles = [row for row in capsys.readouterr().out.splitlines() if "/ raw" in row]
    assert [title.split(",")[0] for title in titles] == ["| merge"]


@pytest.mark.parametrize(
    "group",
    [groups.in_default_mode(group) for group in rows.other_arguments(4)],
    ids=lambda group: group.name.split(",")[0],
)
def test_calls_with_arguments_that_are_no_objects_run(group):
    chosen = [row for row in group.rows if row.library in LIBRARIES[:2]]
    assert all(jax.tree.leaves(row.set_up()()) for row in chosen)


def test_names_of_groups_are_unique():
    names = [group.name for group in rows.all_groups()]
    assert len(set(names)) == len(names)


def test_quick_programs_leave_out_rows_but_no_group_of_unrolled_layers():
    full, quick = rows.all_groups(), rows.all_groups(quick=True)
    stacks = [group for group in full if "a Stack" in group.name]
    programs_of = [group for group in full if "accelerators" in group.name]
    assert len(quick) == len(full) - len(stacks) - len(programs_of)
    slow = [group for group in quick if "200 layers" in group.name]
    assert {row.library for group in slow for row in group.rows} == {*LIBRARIES[:2]}


# ---------------------------------------------- the program for accelerators


@pytest.mark.long
def test_accelerators_train_and_decode_with_small_sizes(capsys):
    accelerator.main(["--tiny", "--peak", "1e12"])
    printed = capsys.readouterr().out
    for part in ("train step", "decode step", "% of peak", "peak 1e+12/s"):
        assert part in printed
    for library in (libraries.RAW, *libraries.installed(libraries.GRAFTREE)):
        assert printed.count(f"| {library}") == 2


@pytest.mark.long
def test_the_model_has_the_parameters_of_gpt_2_small():
    count = accelerator.num_parameters(accelerator.GPT2_SMALL.config)
    assert count == pytest.approx(124e6, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12), ("cpu", None)],
)
def test_peaks_are_known_by_kind(kind, peak):
    assert accelerator.peak_of(kind) == peak


# ------------------------------------------------- programs for accelerators


@pytest.mark.long
@pytest.mark.parametrize("name", accelerator_models.TINY)
def test_models_for_accelerators_compute_what_the_functions_by_hand_do(name):
    sizes = accelerator_models.TINY[name]
    inputs, labels = [
        jnp.ones(x.shape, x.dtype) for x in accelerator_models.batch(name, sizes)
    ]
    classes = accelerator_models.nnx_classes(nnx)
    model = classes[name](sizes, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param, nnx.BatchStat)
    params, stats = map(nnx.to_pure_dict, state)
    logits, moved = accelerator_models.RAW[name](params, stats, inputs, sizes)
    found = programs.in_one_program(model, inputs)
    np.testing.assert_allclose(found, logits, rtol=0.05, atol=0.05)
    after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    for path, value in moved.items():
        of_model = functools.reduce(lambda tree, key: tree[key], path, after)
        np.testing.assert_allclose(of_model, value, rtol=0.02, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", accelerator_models.TINY)
def test_steps_for_accelerators_have_the_same_operations(name, monkeypatch):
    monkeypatch.setattr(accelerator_models, "SIZES", accelerator_models.TINY)
    reading = accelerator_programs.all_groups("cpu", quantities=["operations"])
    (group,) = [group for group in reading if f", {name}:" in group.name]
    counts = [operation() for operation in operations(group).values()]
    assert counts[0] > 0
    np.testing.assert_allclose(counts, counts[0], rtol=0.05)


def test_a_compiler_that_is_missing_is_said_once(monkeypatch, capsys):
    def refuse(name):
        raise ImportError(f"{name} needs its compiler\nwithout it ...")

    monkeypatch.setattr(nnx.forecast, "target", refuse)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--only", "accelerators, v5e"])
    program.main()
    printed = capsys.readouterr().out
    assert printed.count("Not measured: v5e:1x1 needs its compiler\n") == 1
    assert "without it" not in printed


# ------------------------------------------------------------------- loading weights


@pytest.mark.long
def test_all_loaders_load_a_small_checkpoint_in_all_layouts(tmp_path, capsys):
    # It compares what the loaders have loaded.
    weights.main(["--layers=1", "--width=64", "--turns=1", f"--folder={tmp_path}"])
    printed = capsys.readouterr().out
    assert weights.LOADERS[0] == libraries.GRAFTREE
    for layout in weights.LAYOUTS:
        for files in ("one", "several"):
            assert f"| {layout} | {files} | Graftree |" in printed


@pytest.mark.long
def test_the_checkpoint_is_of_mixed_dtypes_in_one_file_or_several(tmp_path):
    options = types.SimpleNamespace(layers=1, width=32)

    def forms(kind):
        weights.write(tmp_path / kind, options)
        found = {}
        for file in (tmp_path / kind).glob("*.safetensors"):
            with safetensors.safe_open(file, "np") as opened:
                names = opened.keys()
                slices = {name: opened.get_slice(name) for name in names}
            found |= {k: (x.get_dtype(), x.get_shape()) for k, x in slices.items()}
        return found

    one = forms("one")
    assert one == forms("several")
    assert {dtype for dtype, _ in one.values()} == {"BF16", "F32"}
    assert len([*(tmp_path / "several").glob("*.safetensors")]) > 1
