"""What collectives send: kinds, groups and bytes, against closed forms."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

DEVICES = 8
SLICED = "all-reduce + slice"


def counts(traffic):
    return {kind: (x.count, x.bytes) for kind, x in traffic.items()}


def collectives_of(function, *shape):
    """Those of a function of the part that each of eight devices has of an array."""
    mesh = jax.make_mesh((DEVICES,), ("x",))
    divided = jax.shard_map(
        function, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False
    )
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return counts(nnx.forecast.collectives(jax.jit(divided).lower(x).compile()))


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

    sent = collectives_of(exchange_all if turns == 1 else in_turns, 16, 24)
    assert sent == {k: (turns, turns * n * 24 * 4) for k, n in ROWS_OF_EACH.items()}


@pytest.mark.parametrize(("also_whole", "kind"), [(False, SLICED), (True, REDUCE)])
def test_an_all_reduce_of_which_a_device_keeps_its_part_is_no_other(also_whole, kind):
    def scattered_by_hand(x):
        total = jax.lax.psum(jnp.tile(x, (DEVICES, 1)), "x")
        part = jax.lax.dynamic_slice_in_dim(total, 2 * jax.lax.axis_index("x"), 2)
        return part + jnp.sin(total).sum() if also_whole else part

    assert collectives_of(scattered_by_hand, 16, 24) == {kind: (1, 16 * 24 * 4)}


def test_text_of_other_programs_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        nnx.forecast.collectives(jax.jit(jnp.sin).lower(1.0).as_text())


def test_spellings_of_accelerators_are_recognized():
    text = """
HloModule m, num_partitions=8

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
    sent = counts(nnx.forecast.collectives(text))
    assert sent == {"all-gather": (1, 512), "reduce-scatter": (1, 512)}


# ----------------------------------------------------------------- in a training step

WIDTH, BATCH = 64, 512
KERNEL = 4 * WIDTH * WIDTH  # bytes
TOKENS = 4 * BATCH * WIDTH


def sent_by(mesh, kernel, batch, target="cpu:8", width=WIDTH):
    """The bytes that a device sends along each axis, of a step of two layers."""
    mesh = nnx.forecast.target(target).mesh(mesh)

    def make():
        layers = [
            nnx.Linear(
                *(width, width),
                use_bias=False,
                kernel_metadata={"out_sharding": names},
                rngs=nnx.Rngs(0),
            )
            for names in kernel
        ]
        return nnx.Sequential(*layers)

    model = nnx.merge(*nnx.get_abstract_model(make, mesh))
    sharding = jax.NamedSharding(mesh, jax.P(*batch))
    x = jax.ShapeDtypeStruct((8 * width, width), jnp.float32, sharding=sharding)

    @nnx.jit(donate_argnums=0)
    def step(model, x):
        grads = nnx.grad(lambda model: (jnp.sin(model(x)) ** 2).sum())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))

    forecast = nnx.forecast.step(step, model, x)
    return {(kind, axes): x for (kind, axes), x in forecast.costs.traffic.items()}


# A ring among n sends (n - 1) / n of what it gathers or scatters, an all-reduce twice.
SHARE = (DEVICES - 1) / DEVICES


def total(sent, axis):
    return sum(x.sent for (_, axes), x in sent.items() if axes == (axis,))


def test_data_parallelism_sums_the_gradients_of_all_kernels():
    sent = sent_by({"data": 8}, [(), ()], ["data"])
    assert total(sent, "data") == pytest.approx(2 * 2 * KERNEL * SHARE, rel=0.05)


def test_fsdp_gathers_kernels_and_scatters_gradients():
    sent = sent_by({"fsdp": 8}, [("fsdp",), ("fsdp",)], ["fsdp"])
    gathered = sum(x.sent for (kind, _), x in sent.items() if kind == "all-gather")
    assert gathered == pytest.approx(2 * KERNEL * SHARE, rel=0.05)
    # On the CPU an all-reduce and a slice, which sends twice as much.
    assert total(sent, "fsdp") - gathered == pytest.approx(2 * 2 * KERNEL * SHARE)


@pytest.mark.long
def test_fsdp_on_tpus_sends_what_its_closed_form_says():
    """Smaller gradients are reduced as a whole, by a compiler that counts latencies."""
    width, axes = 512, ("fsdp",)
    try:
        sent = sent_by({"fsdp": 8}, [axes, axes], axes, "v5e:2x4", width)
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    # Products are of bfloat16, so kernels are gathered as that; gradients are scattered
    # as float32.
    expected = 2 * (2 + 4) * width**2 * SHARE
    assert total(sent, "fsdp") == pytest.approx(expected, rel=0.05)
    assert {kind for kind, _ in sent} == {"all-gather", "reduce-scatter"}


def test_tensor_parallelism_sums_activations():
    sent = sent_by({"tensor": 8}, [(None, "tensor"), ("tensor",)], [])
    assert total(sent, "tensor") == pytest.approx(2 * TOKENS * SHARE, rel=0.05)


def test_axes_are_told_apart():
    sent = sent_by({"data": 2, "tensor": 4}, [(None, "tensor"), ("tensor",)], ["data"])
    along = {axes for _, axes in sent}
    assert along == {("data",), ("tensor",)}
    assert total(sent, "tensor") == pytest.approx(2 * TOKENS / 2 * 3 / 4, rel=0.05)
    assert total(sent, "data") == pytest.approx(2 * 2 * KERNEL / 4 / 2, rel=0.05)
