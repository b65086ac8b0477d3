"""What is written, byte for byte, and what is left when that fails.

Uses `graftree.weights.saving` itself: of arrays that are made late, wrong, or not at
all, of any dtype and name, `nnx.weights.save` has none.
"""

import errno
import json
import os
import pathlib
import subprocess
import sys
import weakref

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import graftree as nnx
from graftree.weights import saving, sources, tensor_files
from tests import sources as tests_sources


def out(name, array):
    return saving.NewTensor(name, array.dtype, array.shape, lambda: array)


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


@pytest.mark.parametrize(
    "metadata", [None, {}, {"format": "pt"}, {"é\n": '\x7f\x01"\\'}]
)
def test_bytes_are_those_of_the_library(tmp_path, metadata):
    arrays = arrays_of_all_dtypes() | {'"ü\t\x02/\U0001f600': np.array(3, np.float32)}
    saving.write(tmp_path / "a.safetensors", outs(arrays), metadata=metadata)
    written = (tmp_path / "a.safetensors").read_bytes()
    assert written == bytes_of_the_library(arrays, metadata)


def test_what_is_written_is_read_again(tmp_path):
    arrays = arrays_of_all_dtypes() | {"scalar": np.array(2.5), "": np.zeros((0, 3))}
    assert saving.write(tmp_path, outs(arrays)) == [f"{tmp_path}/model.safetensors"]
    read = read_all(tmp_path)
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
    with pytest.raises(nnx.errors.WeightsError, match="read in the place of"):
        saving.write(tmp_path, outs(arrays))
    saving.write(tmp_path / "other", outs(arrays))
    with pytest.raises(nnx.errors.WeightsError, match="read in the place of"):
        saving.write(tmp_path / "other", outs(arrays), shard_bytes=80)


# ---------------------------------------------------------------- one at a time


def test_arrays_are_made_one_at_a_time(tmp_path):
    made = []

    def make():
        # The array before is no more: nothing but the writer could have kept it.
        assert all(reference() is None for reference in made)
        array = np.zeros(100, np.float32)
        made.append(weakref.ref(array))
        return array

    late = [saving.NewTensor(name, np.dtype("f4"), (100,), make) for name in "abcde"]
    saving.write(tmp_path, late)
    assert len(made) == 5


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


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"a": np.ones(2, np.complex128)}, "dtype complex128, which the format lacks"),
        ({"a": np.ones(2, ">f4")}, "dtype >f4, which the format lacks"),
        ({"a": np.ones(2, ml_dtypes.int4)}, "dtype int4, which the format lacks"),
        ({"a": np.array(["x"])}, "which the format lacks"),
        ({"__metadata__": np.ones(2)}, "no name that a file can have"),
        ({"\ud800": np.ones(2)}, "no name that a file can have"),
        ({3: np.ones(2)}, "no name that a file can have"),
    ],
)
def test_what_the_format_lacks_is_refused_before_anything_is_made(
    tmp_path, arrays, text
):
    with pytest.raises(nnx.errors.WeightsError, match=text):
        saving.write(tmp_path / "new" / "folder", outs(arrays))
    assert not [*tmp_path.iterdir()]


def test_names_come_once_metadata_is_text_and_files_have_bytes(tmp_path):
    tensors = outs({"a": np.ones(2)})
    with pytest.raises(nnx.errors.WeightsError, match="'a': there are two"):
        saving.write(tmp_path, 2 * tensors)
    with pytest.raises(nnx.errors.WeightsError, match="'step': 3 is to be text"):
        saving.write(tmp_path, tensors, metadata={"step": 3})
    with pytest.raises(ValueError, match="must be positive"):
        saving.write(tmp_path, tensors, shard_bytes=0)


def failing(*arguments):
    raise RuntimeError("the third fails")


@pytest.mark.parametrize("shard_bytes", [None, 16])
@pytest.mark.parametrize(
    ("last", "error", "text"),
    [
        (failing, RuntimeError, "the third fails"),
        (lambda: np.ones(3), nnx.errors.WeightsError, r"float64\[2\] was announced"),
    ],
)
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path, shard_bytes, last, error, text
):
    old = {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)}
    saving.write(tmp_path, outs(old), shard_bytes=shard_bytes)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    new = [*outs({"a": np.ones(2), "b": np.ones(2)})]
    new.append(saving.NewTensor("c", np.dtype(float), (2,), last))
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
    command = [sys.executable, "-m", "tests.stress.weights_kills", "2"]
    options = {"capture_output": True, "text": True, "cwd": tests_sources.ROOT}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(kills) == 2 and min(kills) > 3
