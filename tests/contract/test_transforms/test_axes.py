"""What holds for all transforms that map over an axis, and for all that donate."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import comparisons
from tests.contract.test_transforms.matrix import MESH, cases, flat, tracers_in
from tests.modes import BY_NAME
from tests.zoo import Box

P = jax.sharding.PartitionSpec


def spec(axis):
    """The entry of a mapped axis, one of two, in the specs of `shard_map`."""
    return P() if axis is None else P(*(None,) * (axis % 2), "d")


def sharded(f, axes, out_axis, mode):
    specs = {"in_specs": tuple(map(spec, axes)), "out_specs": spec(out_axis)}
    return nnx.shard_map(f, mesh=MESH, **specs, **mode)


def by_axes(transform):
    return lambda f, axes, out_axis, mode: transform(
        f, in_axes=axes, out_axes=out_axis, **mode
    )


# Called with a function, the axis of each argument and that of the output.
MAPPED = {name: by_axes(getattr(nnx, name)) for name in ("vmap", "pmap", "scan")}
MAPPED["shard_map"] = sharded
each_mapped = pytest.mark.parametrize("name", MAPPED)


def square():
    return Box(a=nnx.Param(jnp.array([[0.0, 1.0], [2.0, 3.0]]), tag="x"))


@each_mapped
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_updates_and_outputs_are_on_the_axis_that_was_mapped(name, axis, mode):
    def double(m):
        assert m.a.size == 2 and m.a.ndim == (2 if name == "shard_map" else 1)
        m.a[...] *= 2
        return m.a + 1

    model = square()
    out = MAPPED[name](double, (axis,), axis, mode)(model)
    assert model.a[...].tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert out.tolist() == [[1.0, 3.0], [5.0, 7.0]]


@each_mapped
def test_outputs_may_have_another_axis_than_the_arguments(name, mode):
    out = MAPPED[name](lambda m: m.a * 2, (0,), 1, mode)(square())
    rows = {"shard_map": [[0.0, 2.0, 4.0, 6.0]]}.get(name, [[0.0, 4.0], [2.0, 6.0]])
    assert out.tolist() == rows


@each_mapped
def test_one_object_has_one_axis(name, graph_mode):
    model = square()
    before = comparisons.snapshot(model)
    different = MAPPED[name](lambda a, b: a.a * 1, (0, None), 0, graph_mode)
    axes = r"0/a: P.*1/a: P" if name == "shard_map" else r"0/a: 0.*1/a: None"
    phrase = rf"(?s)Inconsistent aliasing detected.*Param.*{axes}"
    with pytest.raises(ValueError, match=phrase):
        different(model, model)
    assert comparisons.snapshot(model) == before


@each_mapped
def test_a_returned_argument_keeps_its_axis(name):
    model = square()
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        MAPPED[name](lambda m: m, (0,), 1, {})(model)
    assert MAPPED[name](lambda m: m, (1,), 1, {})(model) is model
    assert model.a[...].tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("name", ["vmap", "pmap", "shard_map"])
def test_what_has_no_axis_is_written_once(name, mode):
    def write(m, x):
        m.a[...] += 1
        return x

    model = square()
    MAPPED[name](write, (None, 0), 0, mode)(model, jnp.ones(2))
    assert model.a[...].tolist() == [[1.0, 2.0], [3.0, 4.0]] and model.a.tag == "x"
    assert not tracers_in(model)


# ----------------------------------------------------------------------------- donation

# Each calls ``f(model, x, kept)`` and donates the first two.
DONATING = {
    "jit": lambda f, args, mode: nnx.jit(f, donate_argnums=(0, 1), **mode)(*args),
    "jit_partial": lambda f, args, mode: nnx.jit_partial(
        f, args[0], donate_argnums=(0, 1), **mode
    )(*args[1:]),
    "pmap": lambda f, args, mode: nnx.pmap(f, donate_argnums=(0, 1), **mode)(*args),
}


@cases(lambda row: row.transform in DONATING, without=("compiled",))
def test_donated_variables_stay_readable_and_donated_arrays_are_freed(case):
    donate = DONATING[case.row.transform]
    place = jax.pmap(jnp.array) if case.row.transform == "pmap" else jnp.array
    model = Box(w=nnx.Param(place(jnp.ones(2))), other=nnx.Param(place(jnp.zeros(2))))
    x, kept = place(jnp.ones(2)), place(jnp.full(2, 3.0))
    before = model.w.get_raw_value()

    def add(model, x, kept):
        model.w[...] += x + kept
        return x * 2

    out = donate(add, (model, x, kept), BY_NAME[case.mode])
    assert flat(out) == [2.0, 2.0]
    assert before.is_deleted() and x.is_deleted() and not kept.is_deleted()
    assert flat(model.w) == [5.0, 5.0] and flat(model.other) == [0.0, 0.0]
