"""What is opened at a path, that only the bytes of slices are read, and writing.

Uses `graftree.weights.sources` itself: which bytes the system is asked for, and what is
held in memory, nothing else can tell.
"""

import errno
import json
import os
import pathlib
import tracemalloc

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from graftree.weights import block_scales, saving, sources, stored_tensors, tensor_files
from tests import interpreters, tables
from tests.meshes import mesh_of
from tests.weights import test_hostile as hostile
from tests.weights.tensors import Tensor, float8, mxfp4, numbers
from tests.weights.test_hostile import GOOD

ARRAYS = {
    "matrix": numbers(64, 48),
    "half": numbers(5, 4, 3, 2, dtype=jnp.bfloat16),
    "scalar": np.array(7, np.int64),
    "flags": np.arange(9) % 2 == 1,
    "empty": np.zeros((0, 4), np.int8),
}
OF_NUMPY = {name: array for name, array in ARRAYS.items() if name != "half"}


def out(name, array):
    stored = stored_tensors.Stored(array.dtype, array.shape)
    return saving.NewTensor(name, stored, lambda: array)


def write(path, **options):
    saving.write(path, [out(name, array) for name, array in ARRAYS.items()], **options)


def check(source, arrays):
    """All tensors and some slices of them are those of the arrays."""
    assert {*source.tensors} == {*arrays}
    count = 0
    for name, array in arrays.items():
        stored = source.tensors[name]
        assert (stored.dtype, stored.shape) == (array.dtype, array.shape)
        for part in (0, 1, 2):
            index = tuple(slice(size * part // 4, size) for size in array.shape)
            read = source.read(name, index)
            assert read.dtype == array.dtype and read.shape == array[index].shape
            assert read.tobytes() == array[index].tobytes()
            assert read.flags.c_contiguous and read.flags.writeable
            count += read.nbytes
    return count


# ---------------------------------------------------------------- files


def test_a_file_is_read_by_slices_and_no_bytes_beside_them(tmp_path):
    write(tmp_path)
    with sources.open(tmp_path / "model.safetensors") as source:
        assert source.name == str(tmp_path / "model.safetensors")
        assert source.bytes_read == 0
        assert check(source, ARRAYS) == source.bytes_read
    with pytest.raises(ValueError, match="closed file"):
        source.read("matrix", np.s_[:, :])


def test_a_set_is_read_by_slices_and_no_bytes_beside_them(tmp_path):
    write(tmp_path, shard_bytes=200, metadata={"format": "pt"})
    (tmp_path / "consolidated.safetensors").write_bytes(GOOD)
    with sources.open(tmp_path) as source:
        # The index comes before the file beside it.
        assert source.name.endswith("model.safetensors.index.json")
        assert source.metadata is None
        assert check(source, ARRAYS) == source.bytes_read
    files = [*tmp_path.glob("model-*.safetensors")]
    assert len(files) > 1
    for path in files:
        with sources.open(path) as source:
            assert source.metadata == {"format": "pt"}


@pytest.mark.parametrize("name", hostile.LEGAL)
def test_odd_files_that_are_legal_are_read_as_the_library_reads_them(tmp_path, name):
    library = pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    path.write_bytes(hostile.LEGAL[name])
    expected = dict(library.deserialize(path.read_bytes()))
    with sources.open(path) as source, library.safe_open(path, "np") as opened:
        assert source.metadata == opened.metadata()
        assert {*source.tensors} == {*expected}
        for key, stored in source.tensors.items():
            array = source.read(key, [slice(None)] * len(stored.shape))
            assert array.shape == stored.shape == tuple(expected[key]["shape"])
            assert array.tobytes() == bytes(expected[key]["data"])


def test_booleans_are_zero_or_one(tmp_path):
    path = tmp_path / "a.safetensors"
    flags = hostile.tensor(dtype="BOOL", data_offsets=[0, 2])
    path.write_bytes(hostile.file({"a": flags}, b"\1\2"))
    with sources.open(path) as source:
        assert source.read("a", [slice(0, 1)]) == [True]
        with pytest.raises(nnx.errors.WeightsError, match="neither 0 nor 1"):
            source.read("a", [slice(None)])


def test_a_file_that_is_cut_off_while_it_is_open_is_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(GOOD)
    with sources.open(path) as source:
        with path.open("r+b") as file:
            file.truncate(len(GOOD) - 4)
        assert source.read("a", [slice(0, 1)]) == np.zeros(1)
        with pytest.raises(nnx.errors.WeightsError, match="unlike when it was opened"):
            source.read("a", [slice(None)])


# ---------------------------------------------------------------- what is asked


@pytest.fixture
def asked(monkeypatch):
    """How many bytes each call of the system asks for."""
    sizes, read_some = [], stored_tensors.OpenFile._read_some

    def watched(self, target, offset):
        sizes.append(len(target))
        return read_some(self, target, offset)

    monkeypatch.setattr(stored_tensors.OpenFile, "_read_some", watched)
    return sizes


def test_only_ranges_of_the_slices_are_asked_of_the_system(tmp_path, asked):
    write(tmp_path)
    with sources.open(tmp_path) as source:
        asked.clear()
        source.read("matrix", np.s_[8:16, :])
        source.read("matrix", np.s_[8:16, 12:24])
    assert asked == [8 * 48 * 4] + 8 * [12 * 4]


def load_on_all_devices(folder, shape, *spec):
    """Loads an array of ones, divided over eight devices."""
    array = np.ones(shape, np.float32)
    saving.write(folder, [out("x", array)])
    sharding = jax.NamedSharding(mesh_of(a=8), jax.P(*spec))
    model = nnx.eval_shape(lambda: nnx.Dict(x=nnx.Param(jnp.zeros(shape))))
    nnx.weights.load(folder, model, {"x": "x"}, shardings=sharding)
    assert model.x[...].sharding == sharding
    return array.nbytes


# An eighth of the rows is one run of 48 kB; an eighth of a row is 2 kB.
@pytest.mark.parametrize("spec", [(None, "a"), ("a", None), ()], ids=str)
def test_short_runs_are_read_in_one_go(tmp_path, asked, spec):
    size = load_on_all_devices(tmp_path, (24, 4096), *spec)
    *_, last = asked
    assert last == size
    # Before it comes the header: its size, and what it says.
    assert len(asked) == 3


def test_long_runs_are_read_for_each_device(tmp_path, asked):
    size = load_on_all_devices(tmp_path, (8, 2**14), "a")
    assert asked[2:] == 8 * [size // 8]


def test_only_what_the_devices_hold_is_read_and_once(monkeypatch):
    opened, real = [], sources.open

    def watched(source):
        opened.append(real(source))
        return opened[-1]

    monkeypatch.setattr(sources, "open", watched)
    weights = {f"{i}": np.ones((4, 8), np.float32) for i in range(3)}
    model = nnx.eval_shape(lambda: nnx.Dict(x=nnx.Param(jnp.zeros((3, 4, 8)))))
    sharding = jax.NamedSharding(mesh_of(a=2, b=4), jax.P(None, "a"))
    nnx.weights.load(weights, model, {"{i}": "x"}, shardings=sharding)
    assert opened[0].bytes_read == sum(x.nbytes for x in weights.values())


def peak_of(function):
    """How much memory a call takes at most, arrays of NumPy included."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_reading_takes_the_memory_of_the_result(tmp_path):
    array = np.zeros((1024, 2048), np.float32)
    saving.write(tmp_path, [out("a", array)])
    with sources.open(tmp_path) as source:
        for index in (np.s_[:128, :], np.s_[:, :256], np.s_[:, :]):
            wanted = array[index].nbytes
            peak = peak_of(lambda index=index: source.read("a", index))
            assert wanted <= peak < wanted + 50_000


def test_writing_takes_the_memory_of_one_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_BLOCK", 2**16)
    shape, size = (1024, 512), 4 * 1024 * 512
    stored = stored_tensors.Stored(np.dtype("f4"), shape)

    def announced(name, make):
        return saving.NewTensor(name, stored, make)

    outs = [announced(f"{i}", lambda: np.zeros(shape, np.float32)) for i in range(3)]
    turned = lambda: np.zeros(shape[::-1], np.float32).T  # noqa: E731
    outs += [announced(f"turned {i}", turned) for i in "ab"]
    peak = peak_of(lambda: saving.write(tmp_path, outs, shard_bytes=2 * size))
    assert size <= peak < size + 300_000


def test_the_system_may_read_less_than_asked_or_lack_preadv(tmp_path, monkeypatch):
    write(tmp_path)
    read_some = stored_tensors.OpenFile._read_some
    with monkeypatch.context() as patch, sources.open(tmp_path) as source:
        patch.setattr(
            stored_tensors.OpenFile,
            "_read_some",
            lambda self, target, offset: read_some(self, target[:7], offset),
        )
        check(source, ARRAYS)
    monkeypatch.setattr(stored_tensors, "_preadv", None)
    with sources.open(tmp_path) as source:
        check(source, ARRAYS)


@st.composite
def arrays_with_slices(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    index = []
    for size in shape:
        start, stop = sorted(draw(st.tuples(*[st.integers(0, size)] * 2)))
        index.append(draw(st.sampled_from([slice(None), slice(start, stop)])))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    return array, tuple(index)


@hypothesis.given(arrays_with_slices())
def test_runs_are_the_bytes_of_the_slice_in_order(case):
    array, index = case
    data = array.tobytes()
    bounds = stored_tensors.bounds_of(array.shape, index)
    length, starts = stored_tensors.runs(bounds, 4)
    runs = [data[start : start + length] for start in starts]
    assert b"".join(runs) == array[index].tobytes()


# ---------------------------------------------------------------- folders


@tables.cases(
    "names, chosen",
    (["model", "adapter_model"], "model"),
    (["adapter_model"], "adapter_model"),
    (["anything"], "anything"),
)
def test_a_folder_has_one_file_to_read(tmp_path, names, chosen):
    for name in names:
        (tmp_path / f"{name}.safetensors").write_bytes(GOOD)
    (tmp_path / "config.json").write_text("{}")
    with sources.open(str(tmp_path)) as source:
        assert source.name == str(tmp_path / f"{chosen}.safetensors")


def test_links_of_the_hub_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0f3a"
    write(blobs, shard_bytes=200)
    snapshot.mkdir(parents=True)
    for file in [*blobs.iterdir()]:
        blob = file.rename(blobs / f"sha{hash(file.name)}")
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    with sources.open(snapshot) as source:
        check(source, ARRAYS)


# ---------------------------------------------------------------- archives, mappings


@pytest.mark.parametrize("order", [np.asarray, np.asfortranarray])
def test_archives_are_read_by_slices(tmp_path, order):
    arrays = {name: order(array) for name, array in OF_NUMPY.items()}
    np.savez(tmp_path / "a.npz", **arrays)
    with sources.open(tmp_path / "a.npz") as source:
        assert check(source, arrays) == source.bytes_read


def test_compressed_archives_are_read_whole(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", **OF_NUMPY)
    with sources.open(tmp_path / "a.npz") as source:
        check(source, OF_NUMPY)
        assert source.bytes_read == 3 * sum(a.nbytes for a in OF_NUMPY.values())


def test_other_byte_orders_in_archives_become_ours(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.arange(6, dtype=">i4"))
    with sources.open(tmp_path / "a.npz") as source:
        check(source, {"a": np.arange(6, dtype="i4")})


KINDS = {
    "numpy": (ARRAYS, np.asarray),
    "torch": (ARRAYS, lambda array: Tensor(array, array.dtype.name)),
    "big-endian": (OF_NUMPY, lambda array: array.astype(array.dtype.newbyteorder(">"))),
}


@pytest.mark.parametrize(("arrays", "kind"), KINDS.values(), ids=KINDS)
def test_dicts_of_arrays_are_a_source(arrays, kind):
    with sources.open({name: kind(array) for name, array in arrays.items()}) as source:
        assert check(source, arrays) == source.bytes_read


def test_arrays_of_jax_are_a_source():
    arrays = {"a": np.arange(6.0, dtype=np.float32), "b": ARRAYS["half"]}
    sharding = jax.NamedSharding(mesh_of(x=2), jax.P("x"))
    given = {"a": jax.device_put(arrays["a"], sharding), "b": jnp.asarray(arrays["b"])}
    with sources.open(given) as source:
        check(source, arrays)


def test_what_is_read_of_a_dict_is_a_copy():
    array = np.zeros(3)
    with sources.open({"a": array}) as source:
        source.read("a", [slice(None)])[:] = 1
    assert not array.any()


# ------------------------------------------------------------------------------ writing


def outs(arrays):
    return [out(name, np.asarray(array)) for name, array in arrays.items()]


def read_all(path):
    with sources.open(path) as source:
        return {
            name: source.read(name, [slice(None)] * len(stored.shape))
            for name, stored in source.tensors.items()
        }


def arrays_of_all_dtypes():
    rng = np.random.default_rng(0)
    names = [f"{i}.{name}" for i, name in enumerate(tensor_files.DTYPES)]
    rng.shuffle(names)
    dtypes = {name: tensor_files.DTYPES[name.split(".")[1]] for name in names}
    return {
        name: rng.integers(0, 2, (3, i)).astype(dtypes[name])
        for i, name in enumerate(names)
    }


def bytes_of_the_library(arrays, metadata):
    library = pytest.importorskip("safetensors")

    def described(array):
        data = {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
        return library.TensorSpec(dtype=array.dtype.name, shape=array.shape, **data)

    specs = {name: described(array) for name, array in arrays.items()}
    return library.serialize(specs, metadata=metadata)


@tables.cases("metadata", None, {}, {"format": "pt"}, {"é\n": '\x7f\x01"\\'})
def test_bytes_are_those_of_the_library_and_are_read_again(tmp_path, metadata):
    odd = {'"ü\t\x02/\U0001f600': np.array(3, np.float32), "": np.zeros((0, 3))}
    arrays, path = arrays_of_all_dtypes() | odd, tmp_path / "model.safetensors"
    assert saving.write(tmp_path, outs(arrays), metadata=metadata) == [str(path)]
    assert path.read_bytes() == bytes_of_the_library(arrays, metadata)
    read = read_all(path)
    assert {*read} == {*arrays}
    for name, array in arrays.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert read[name].tobytes() == array.tobytes()


# ---------------------------------------------------------------- sets


def test_files_of_a_set_have_at_most_so_many_bytes(tmp_path):
    arrays = {f"{i}": np.full(10 * i, i, np.float32) for i in range(1, 8)}
    paths = saving.write(tmp_path / "x.safetensors", outs(arrays), shard_bytes=200)
    names = [os.path.basename(path) for path in paths]
    assert names[0] == "x-00001-of-00006.safetensors"
    assert names[-1] == "x.safetensors.index.json"
    sizes = [sum(array.nbytes for array in read_all(path).values()) for path in paths]
    assert sizes[:-1] == [120, 120, 160, 240, 280, 200]
    index = json.loads(pathlib.Path(paths[-1]).read_text())
    assert index["metadata"] == {"total_parameters": 280, "total_size": 1120}
    read = read_all(paths[-1])
    assert all((read[name] == array).all() for name, array in arrays.items())


def test_what_fits_into_one_file_is_one(tmp_path):
    paths = saving.write(tmp_path, outs({"a": np.ones(3)}), shard_bytes=24)
    assert [os.path.basename(path) for path in paths] == ["model.safetensors"]


def test_a_smaller_set_replaces_a_larger_one(tmp_path):
    arrays = {f"{i}": np.full(10, i, np.float32) for i in range(6)}
    saving.write(tmp_path, outs(arrays), shard_bytes=40)
    (tmp_path / "model-00001-of-00009.safetensors").write_bytes(b"of somebody else")
    saving.write(tmp_path, outs(arrays), shard_bytes=120)
    assert {*read_all(tmp_path)} == {*arrays}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00001-of-00009.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_file_beside_a_set_is_refused_as_no_reader_would_know_which(tmp_path):
    arrays = {"a": np.ones(10), "b": np.ones(10)}
    saving.write(tmp_path, outs(arrays), shard_bytes=80)
    with pytest.raises(nnx.errors.WeightsError, match="read instead of"):
        saving.write(tmp_path, outs(arrays))
    saving.write(tmp_path / "other", outs(arrays))
    with pytest.raises(nnx.errors.WeightsError, match="read instead of"):
        saving.write(tmp_path / "other", outs(arrays), shard_bytes=80)


@pytest.mark.parametrize("block", [1, 7, 64, 2**24])
def test_transposed_arrays_are_written_in_c_order(tmp_path, block, monkeypatch):
    monkeypatch.setattr(saving, "_BLOCK", block)
    array = np.arange(5 * 4 * 3 * 2, dtype=np.int16).reshape(5, 4, 3, 2)
    arrays = {
        "turned": array.T,
        "swapped": array.swapaxes(1, 2),
        "reversed": array[::-1, :, ::2],
        "repeated": np.broadcast_to(np.float32(2), (3, 4)),
        "half": jnp.ones((3, 2), jnp.bfloat16),
    }
    saving.write(tmp_path, outs(arrays))
    read = read_all(tmp_path)
    assert all((read[name] == array).all() for name, array in arrays.items())


# ---------------------------------------------------------------- refused


@tables.cases(
    "arrays, text",
    ({"a": np.ones(2, np.complex128)}, "the format has no dtype complex128"),
    ({"a": np.ones(2, ">f4")}, "the format has no dtype >f4"),
    ({"a": np.ones(2, ml_dtypes.int4)}, "the format has no dtype int4"),
    ({"a": np.array(["x"])}, "the format has no dtype"),
    ({"__metadata__": np.ones(2)}, "not a name that a file can have"),
    ({"\ud800": np.ones(2)}, "not a name that a file can have"),
    ({3: np.ones(2)}, "not a name that a file can have"),
)
def test_what_the_format_lacks_is_refused_before_any_is_made(tmp_path, arrays, text):
    with pytest.raises(nnx.errors.WeightsError, match=text):
        saving.write(tmp_path / "new" / "folder", outs(arrays))
    assert not [*tmp_path.iterdir()]


def test_names_come_once_metadata_is_text_and_files_have_bytes(tmp_path):
    tensors = outs({"a": np.ones(2)})
    with pytest.raises(nnx.errors.WeightsError, match="'a': two tensors have"):
        saving.write(tmp_path, 2 * tensors)
    with pytest.raises(nnx.errors.WeightsError, match="'step': 3 must be a string"):
        saving.write(tmp_path, tensors, metadata={"step": 3})
    with pytest.raises(ValueError, match="must be positive"):
        saving.write(tmp_path, tensors, shard_bytes=0)


def failing(*arguments):
    raise RuntimeError("the third fails")


@pytest.mark.parametrize("shard_bytes", [None, 16])
@tables.cases(
    "last, error, text",
    (failing, RuntimeError, "the third fails"),
    (lambda: np.ones(3), nnx.errors.WeightsError, r"expected float64\[2\]"),
)
def test_a_failed_write_leaves_what_was_there(tmp_path, shard_bytes, last, error, text):
    old = {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)}
    saving.write(tmp_path, outs(old), shard_bytes=shard_bytes)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    new = [*outs({"a": np.ones(2), "b": np.ones(2)})]
    stored = stored_tensors.Stored(np.dtype(float), (2,))
    new.append(saving.NewTensor("c", stored, last))
    with pytest.raises(error, match=text):
        saving.write(tmp_path, new, shard_bytes=shard_bytes)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(error, match=text):
        saving.write(tmp_path / "new" / "folder", new, shard_bytes=shard_bytes)
    assert {*tmp_path.iterdir()} == {*before}


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving.os, "fsync", full)
    with pytest.raises(nnx.errors.WeightsError, match="No space left") as caught:
        saving.write(tmp_path / "new", outs({"a": np.ones(2)}))
    assert caught.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(nnx.errors.WeightsError, match="is a folder"):
        saving.write(tmp_path / "a.safetensors", outs({"a": np.ones(2)}))
    (tmp_path / "file").write_text("")
    with pytest.raises(nnx.errors.WeightsError, match="can't write"):
        saving.write(tmp_path / "file" / "below", outs({"a": np.ones(2)}))


def test_a_killed_write_leaves_the_old_files_the_new_ones_or_none():
    printed = interpreters.printed("-m", "tests.stress.weights_kills", "2")
    kills = [int(line.split()[0]) for line in printed.splitlines()]
    assert len(kills) == 2 and min(kills) > 3


def test_a_device_s_part_reads_only_its_blocks(tmp_path):
    file, values = mxfp4("x", 8, 4, 32 * 2**11)
    saving.write(tmp_path / "x.safetensors", outs(file))
    with sources.open(tmp_path / "x.safetensors") as source:
        x = block_scales.decoded(source, ["x"])
        piece = x.read("x", (slice(1, 2), slice(40, 70), slice(1, 3)))
        np.testing.assert_array_equal(np.float64(piece), values[1:2, 40:70, 1:3])
        assert source.bytes_read == 2 * 2 * (16 + 1)
    file, values = float8("x", 300, 300)
    saving.write(tmp_path / "y.safetensors", outs(file))
    with sources.open(tmp_path / "y.safetensors") as source:
        x = block_scales.decoded(source, ["x"])
        piece = x.read("x", (slice(120, 130), slice(256, 299)))
        np.testing.assert_array_equal(np.float64(piece), values[120:130, 256:299])
        assert source.bytes_read == 10 * 43 + 2 * 1 * 4
