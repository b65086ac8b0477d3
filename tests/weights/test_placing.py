"""Parts of arrays on their devices: right values, in few calls, and nothing beside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.weights import open_files, placing, writing

# Runs of 2 kB for each of eight devices: not worth a call each.
ROWS, COLUMNS = 24, 4096
VALUES = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def asked(monkeypatch):
    """How many bytes each call of the system asks for."""
    sizes = []
    read_some = open_files.OpenFile._read_some

    def watched(self, target, offset):
        sizes.append(len(target))
        return read_some(self, target, offset)

    monkeypatch.setattr(open_files.OpenFile, "_read_some", watched)
    return sizes


def load(tmp_path, sharding, layout="a b -> a b", shape=(ROWS, COLUMNS), **options):
    out = writing.Out("x", VALUES.dtype, VALUES.shape, lambda: VALUES)
    writing.write(tmp_path, [out])
    model = nnx.eval_shape(lambda: nnx.Dict(x=nnx.Param(jnp.zeros(shape))))
    table = {"x": ("x", layout)}
    nnx.weights.load(tmp_path, model, table, shardings=sharding, **options)
    return model.x.get_value()


@pytest.mark.parametrize("spec", [("a", None), (None, "a"), (None, None)], ids=str)
@pytest.mark.parametrize("layout", ["a b -> a b", "a b -> b a", "a ~b -> b a"])
@pytest.mark.parametrize("dtype", ["file", jnp.bfloat16], ids=str)
def test_each_device_has_its_part(tmp_path, mesh, spec, layout, dtype):
    expected = VALUES[:, ::-1] if "~" in layout else VALUES
    expected = expected if layout.endswith("a b") else expected.T
    found = load(
        tmp_path,
        jax.NamedSharding(mesh, jax.P(*spec)),
        layout,
        expected.shape,
        dtype=dtype,
    )
    expected = np.asarray(jnp.asarray(expected, found.dtype))
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


# An eighth of the rows is one run of 48 kB; an eighth of a row is 2 kB.
@pytest.mark.parametrize("spec", [(None, "a"), ("a", None), ()], ids=str)
def test_short_runs_are_read_in_one_go(tmp_path, mesh, asked, spec):
    load(tmp_path, jax.NamedSharding(mesh, jax.P(*spec)))
    *_, last = asked
    assert last == VALUES.nbytes
    # Before it comes the header: its size, and what it says.
    assert len(asked) == 3


def test_long_runs_are_read_for_each_device(tmp_path, mesh, asked, monkeypatch):
    monkeypatch.setattr(placing, "_SHORT", 1024)
    load(tmp_path, jax.NamedSharding(mesh, jax.P("a")))
    assert asked[2:] == 8 * [VALUES.nbytes // 8]


def test_a_stack_is_read_in_the_order_of_the_file(mesh):
    layers = {f"h.{i}.w": VALUES + i for i in range(3)}
    shape = (3, COLUMNS, ROWS)
    model = nnx.eval_shape(lambda: nnx.Dict(x=nnx.Param(jnp.zeros(shape))))
    sharding = jax.NamedSharding(mesh, jax.P(None, "a"))
    table = {"h.{i}.w": ("x", "a b -> b a")}
    nnx.weights.load(layers, model, table, shardings=sharding)
    expected = np.stack([x.T for x in layers.values()])
    np.testing.assert_array_equal(model.x.get_value(), expected)
