"""What a compiled program sends between devices is read from its text.

And a step is compiled from shapes, for the devices that are asked for.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from examples.lm import hlo, layouts, simulate, train
from examples.lm.model import Config

CONFIG = Config(vocabulary=96, layers=1, width=64, heads=4, kv_heads=2, hidden=160)
DEVICES = 8


def fsdp_step():
    """The text of a training step, and the model."""
    layout = layouts.make({"fsdp": DEVICES})
    make = functools.partial(train.make_objects, CONFIG, train.Recipe())
    tokens = jax.ShapeDtypeStruct((16, 9), jnp.int32, sharding=layout.batch)
    with layout.in_force():
        model, optimizer = nnx.merge(*nnx.get_abstract_model(make, layout.mesh))
        lowered = train.train_step.lower(model, optimizer, tokens)
    return lowered.compile().as_text(), model


# --------------------------------------------------------------------------- counting


def collectives_of(function, *shape):
    """Those of a function of the part that each of eight devices has of an array."""
    mesh = jax.make_mesh((DEVICES,), ("x",))
    divided = jax.shard_map(
        function, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False
    )
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return hlo.collectives(jax.jit(divided).lower(x).compile().as_text())


def exchange_all(x):
    whole = jax.lax.all_gather(x, "x", tiled=True)
    x = x + jax.lax.psum_scatter(whole * x.sum(), "x", tiled=True)
    x = x * jax.lax.psum(jnp.cos(x), "x")
    x = jax.lax.all_to_all(x, "x", split_axis=1, concat_axis=1, tiled=True)
    return jax.lax.ppermute(x, "x", [(i, (i + 1) % DEVICES) for i in range(DEVICES)])


REDUCE = "all-reduce"
ROWS_OF_EACH = {"all-gather": 16, "reduce-scatter": 16, REDUCE: 2}
ROWS_OF_EACH |= {"all-to-all": 2, "collective-permute": 2}


@pytest.mark.parametrize("turns", [1, 5])
def test_each_kind_counts_with_its_bytes_once_for_each_turn_of_a_loop(turns):
    def in_turns(x):
        return jax.lax.fori_loop(0, turns, lambda _, x: exchange_all(x), x)

    found = collectives_of(exchange_all if turns == 1 else in_turns, 16, 24)
    assert found == {k: (turns, turns * n * 24 * 4) for k, n in ROWS_OF_EACH.items()}


@pytest.mark.parametrize(("also_whole", "kind"), [(False, hlo.SLICED), (True, REDUCE)])
def test_an_all_reduce_of_which_a_device_keeps_its_part_is_no_other(also_whole, kind):
    def scattered_by_hand(x):
        total = jax.lax.psum(jnp.tile(x, (DEVICES, 1)), "x")
        part = jax.lax.dynamic_slice_in_dim(total, 2 * jax.lax.axis_index("x"), 2)
        return part + jnp.sin(total).sum() if also_whole else part

    assert collectives_of(scattered_by_hand, 16, 24) == {kind: (1, 16 * 24 * 4)}


def test_text_of_other_programs_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.collectives(jax.jit(jnp.sin).lower(1.0).as_text())


def test_spellings_of_accelerators_are_recognized():
    text = """
%all-reduce-scatter.1 (input: f32[16,8]) -> f32[2,8] {
  %input = f32[16,8]{1,0:T(8,128)} parameter(0)
  %at = s32[] constant(2)
  %zero = s32[] constant(0)
  %all-reduce.1 = f32[16,8]{1,0:T(8,128)} all-reduce(%input), to_apply=%add
  ROOT %slice = f32[2,8]{1,0} dynamic-slice(%all-reduce.1, %at, %zero)
}

ENTRY %main (param: f32[2,8]) -> f32[2,8] {
  %param = f32[2,8]{1,0} parameter(0)
  %start = (f32[2,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%param), dimensions={0}
  %whole = f32[16,8]{1,0} all-gather-done(%start)
  ROOT %fusion = f32[2,8]{1,0} fusion(%whole), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    assert hlo.collectives(text) == {"all-gather": (1, 512), "reduce-scatter": (1, 512)}


# -------------------------------------------------------------------------- the layouts


def test_fsdp_gathers_all_kernels_and_scatters_their_gradients():
    """It sums only scalars over all devices, and no parameter is whole on one."""
    text, model = fsdp_step()
    found, params = hlo.collectives(text), jax.tree.leaves(nnx.state(model, nnx.Param))
    num_bytes = 4 * sum(x.size for x in params)
    assert found["all-gather"].num_bytes >= num_bytes
    scattered = found.get("reduce-scatter", found.get(hlo.SLICED))
    assert scattered == (len(params), num_bytes)
    assert found[REDUCE].num_bytes == 4 * found[REDUCE].count
    assert hlo.whole_arrays(text, {x.shape for x in params}) == []


def test_what_is_whole_on_each_device_is_listed_where_it_goes_in_and_comes_out():
    def update(weights, batch):
        return weights - batch.sum(0), batch * 2

    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    weights, batch = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in (((24,), jax.P()), ((16, 24), jax.P("x")))
    )
    text = jax.jit(update).lower(weights, batch).compile().as_text()
    assert hlo.whole_arrays(text, [(24,), (16, 24)]) == [
        "parameter weights: f32[24]",
        "result 0: f32[24]",
    ]


# -------------------------------------------------------------------- simulated devices


def test_a_step_is_compiled_from_shapes_and_described(capsys):
    before = len(jax.live_arrays())
    simulate.simulate(simulate.TINY)
    assert len(jax.live_arrays()) == before
    out = capsys.readouterr().out
    assert "8 simulated devices: fsdp=4 x tensor=2" in out
    # 2 blocks of 32 (4 + 2 x 2 + 4) 8 + 3 x 32 x 64 + 2 x 32; 2 x 256 x 32 + 32.
    assert "parameters: 34,976\n" in out
    for words in ("temporaries", "all-gather", "all-reduce", "not run"):
        assert words in out


def test_a_process_is_started_that_has_the_devices(monkeypatch):
    calls = []

    def run(command, *, env, check):
        calls.append((command, env))
        return type("Done", (), {"returncode": 3})

    monkeypatch.setattr(simulate.subprocess, "run", run)
    assert simulate.main(["--mesh", "data=2,fsdp=128", "--layers=1"]) == 3
    ((command, environment),) = calls
    assert command[1:3] == ["-m", "examples.lm.simulate"]
    assert environment["XLA_FLAGS"].endswith("device_count=256")


def test_plans_are_read_or_refused(capsys):
    plan = simulate.plan_of(["--mesh=fsdp=8,tensor=2", "--kv_heads=8"])
    assert (plan.devices, plan.kv_heads, plan.width) == (16, 8, 4096)
    for wrong in ("--mesh=8", "--mesh=fsdp=0", "--layers=0"):
        with pytest.raises(SystemExit):
            simulate.plan_of([wrong])
    assert "--mesh: expected axis=size" in capsys.readouterr().err
