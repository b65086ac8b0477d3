"""What is opened at a path, and that only the bytes of slices are read."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graftree import errors
from graftree.weights import open_files, sources, writing
from tests.weights.hostile_files import GOOD

RNG = np.random.default_rng(0)
ARRAYS = {
    "matrix": RNG.normal(size=(64, 48)).astype(np.float32),
    "half": RNG.normal(size=(5, 4, 3, 2)).astype(jnp.bfloat16),
    "scalar": np.array(7, np.int64),
    "flags": RNG.integers(0, 2, 9).astype(bool),
    "empty": np.zeros((0, 4), np.int8),
}
OF_NUMPY = {name: array for name, array in ARRAYS.items() if name != "half"}


def write(path, **options):
    def out(name, array):
        return writing.Out(name, array.dtype, array.shape, lambda: array)

    outs = [out(name, array) for name, array in ARRAYS.items()]
    return writing.write(path, outs, **options)


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


def test_a_set_is_read_by_slices_and_no_bytes_beside_them(tmp_path):
    write(tmp_path, shard_bytes=200, metadata={"format": "pt"})
    with sources.open(tmp_path) as source:
        assert len(source.files) > 1 and source.metadata is None
        assert all(file.metadata == {"format": "pt"} for file in source.files.values())
        assert check(source, ARRAYS) == source.bytes_read


def test_only_ranges_of_the_slices_are_asked_of_the_system(tmp_path, monkeypatch):
    asked = []
    read_some = open_files.OpenFile._read_some

    def watched(self, target, offset):
        asked.append(len(target))
        return read_some(self, target, offset)

    write(tmp_path)
    with sources.open(tmp_path) as source:
        monkeypatch.setattr(open_files.OpenFile, "_read_some", watched)
        source.read("matrix", np.s_[8:16, :])
        source.read("matrix", np.s_[8:16, 12:24])
    assert asked == [8 * 48 * 4] + 8 * [12 * 4]


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
    out = writing.Out("a", array.dtype, array.shape, lambda: array)
    writing.write(tmp_path, [out])
    with sources.open(tmp_path) as source:
        for index in (np.s_[:128, :], np.s_[:, :256], np.s_[:, :]):
            wanted = array[index].nbytes
            peak = peak_of(lambda index=index: source.read("a", index))
            assert wanted <= peak < wanted + 50_000


def test_writing_takes_the_memory_of_one_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_BLOCK", 2**16)
    shape = (1024, 512)
    size = 4 * 1024 * 512

    def out(name, make):
        return writing.Out(name, np.dtype("f4"), shape, make)

    outs = [
        *(out(f"{i}", lambda: np.zeros(shape, np.float32)) for i in range(3)),
        *(
            out(f"turned {i}", lambda: np.zeros(shape[::-1], np.float32).T)
            for i in "ab"
        ),
    ]
    peak = peak_of(lambda: writing.write(tmp_path, outs, shard_bytes=2 * size))
    assert size <= peak < size + 300_000


def test_the_system_may_read_less_than_asked(tmp_path, monkeypatch):
    read_some = open_files.OpenFile._read_some
    monkeypatch.setattr(
        open_files.OpenFile,
        "_read_some",
        lambda self, target, offset: read_some(self, target[:7], offset),
    )
    write(tmp_path)
    with sources.open(tmp_path) as source:
        check(source, ARRAYS)


def test_it_reads_where_the_system_has_no_preadv(tmp_path, monkeypatch):
    monkeypatch.delattr(open_files.os, "preadv")
    write(tmp_path)
    with sources.open(tmp_path) as source:
        check(source, ARRAYS)


def test_nothing_is_read_after_closing(tmp_path):
    write(tmp_path)
    with sources.open(tmp_path) as source:
        pass
    with pytest.raises(ValueError, match="closed file"):
        source.read("matrix", np.s_[:, :])


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model", "adapter_model"], "model"),
        (["adapter_model"], "adapter_model"),
        (["anything"], "anything"),
    ],
)
def test_a_folder_has_one_file_to_read(tmp_path, names, chosen):
    for name in names:
        (tmp_path / f"{name}.safetensors").write_bytes(GOOD)
    (tmp_path / "config.json").write_text("{}")
    with sources.open(str(tmp_path)) as source:
        assert source.name == str(tmp_path / f"{chosen}.safetensors")


def test_an_index_comes_before_files_beside_it(tmp_path):
    write(tmp_path, shard_bytes=200)
    (tmp_path / "consolidated.safetensors").write_bytes(GOOD)
    with sources.open(tmp_path) as source:
        assert source.name.endswith("model.safetensors.index.json")


def test_links_of_the_hub_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0f3a"
    write(blobs, shard_bytes=200)
    snapshot.mkdir(parents=True)
    for file in [*blobs.iterdir()]:
        blob = file.rename(blobs / f"sha{hash(file.name)}")
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    with sources.open(snapshot) as source:
        check(source, ARRAYS)


@pytest.mark.parametrize("name", ["none.safetensors", "none.npz", "none.json", "none"])
def test_what_is_not_there_is_said(tmp_path, name):
    with pytest.raises(errors.WeightsError, match="nothing is there$"):
        sources.open(tmp_path / name)
    with pytest.raises(errors.WeightsError, match="Its parent is no folder: "):
        sources.open(tmp_path / "folder" / name)


@pytest.mark.parametrize("source", [3, None, [np.ones(2)]])
def test_what_is_no_source_is_a_type_error(source):
    with pytest.raises(TypeError, match="reads a path, or a dict of arrays"):
        sources.open(source)


# ---------------------------------------------------------------- archives


@pytest.mark.parametrize("turned", [False, True])
def test_archives_are_read_by_slices(tmp_path, turned):
    arrays = {
        name: np.asfortranarray(a) if turned else a for name, a in OF_NUMPY.items()
    }
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


# ---------------------------------------------------------------- mappings


class Tensor:
    """A tensor as PyTorch has it: it needs two calls before NumPy sees it."""

    def __init__(self, array, dtype, ready=False):
        self.array, self.dtype, self.ready = array, f"torch.{dtype}", ready
        self.shape = array.shape

    def __getitem__(self, index):
        return Tensor(self.array[index], self.dtype[6:])

    def detach(self):
        return Tensor(self.array, self.dtype[6:])

    def cpu(self):
        return Tensor(self.array, self.dtype[6:], ready=True)

    def float(self):
        return Tensor(self.array.astype(np.float32), "float32", self.ready)

    def numpy(self):
        assert self.ready
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


@pytest.mark.parametrize(
    ("arrays", "kind"),
    [
        (ARRAYS, np.asarray),
        (ARRAYS, lambda array: Tensor(array, array.dtype.name)),
        (OF_NUMPY, lambda array: array.astype(array.dtype.newbyteorder(">"))),
    ],
    ids=["numpy", "torch", "big-endian"],
)
def test_dicts_of_arrays_are_a_source(arrays, kind):
    with sources.open({name: kind(array) for name, array in arrays.items()}) as source:
        assert check(source, arrays) == source.bytes_read


def test_arrays_of_jax_are_a_source():
    arrays = {"a": np.arange(6.0, dtype=np.float32), "b": ARRAYS["half"]}
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    given = {
        "a": jax.device_put(arrays["a"], sharding),
        "b": jnp.asarray(arrays["b"]),
    }
    with sources.open(given) as source:
        check(source, arrays)


def test_what_is_read_of_a_dict_is_a_copy():
    array = np.zeros(3)
    with sources.open({"a": array}) as source:
        source.read("a", [slice(None)])[:] = 1
    assert not array.any()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0, 2.0], "'a': list"),
        (3.0, "'a': float"),
        (np.array(["x"]), r"'a': ndarray <U1\[1\]"),
        (np.array([None]), r"'a': ndarray object\[1\]"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), r"ShapeDtypeStruct float32\[2\]"),
        (jax.random.key(0), r"key<fry>\[\]"),
        (Tensor(np.ones(2), "quint8"), r"'a': Tensor torch.quint8\[2\]"),
    ],
)
def test_values_that_are_no_arrays_of_numbers_are_listed(value, text):
    with pytest.raises(TypeError, match=text) as caught:
        sources.open({"a": value, "b": value, "fine": np.ones(2)})
    assert "'b': " in str(caught.value) and "fine" not in str(caught.value)


def test_names_are_strings():
    with pytest.raises(TypeError, match="Names must be strings"):
        sources.open({3: np.ones(2)})


OTHERS = {
    "a.pt": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(22) + b"a/data.pkl", "torch.load('"),
    "b.bin": (b"\x80\x02}q\x00." + bytes(40), "torch.load('"),
    "c.gguf": (b"GGUF\x03\x00\x00\x00" + bytes(40), "gguf.GGUFReader('"),
    "d.h5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "h5py"),
    "e.safetensors": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "f.safetensors": (b"<!DOCTYPE html><html></html>", "get it again"),
    "g.safetensors": (b"PK\x03\x04" + bytes(26) + b"x.npy" + bytes(9), "with .npz"),
    "h.npy": (b"\x93NUMPY\x01\x00" + bytes(40), "numpy.load('"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("is_in_folder", [False, True])
def test_another_format_is_named_with_the_way_to_its_tensors(
    tmp_path, name, is_in_folder
):
    content, way_out = OTHERS[name]
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(errors.WeightsError, match=" is an? ") as caught:
        sources.open(tmp_path if is_in_folder else file)
    assert way_out in str(caught.value)
    if way_out.endswith("('"):
        assert f"{way_out}{file}'" in str(caught.value)
    assert "header" not in str(caught.value)


def test_arrays_under_another_name_are_read_once_it_is_right(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        np.savez(file, x=np.ones(2))
    with pytest.raises(errors.WeightsError, match=r"an \.npz archive"):
        sources.open(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "a.npz")
    with sources.open(tmp_path / "a.npz") as source:
        assert [*source.tensors] == ["x"]
