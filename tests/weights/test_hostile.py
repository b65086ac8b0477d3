"""What is no weights: damaged and misleading files, each refused for its own reason."""

import os
import pathlib
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables
from tests.stress import weights_fuzz
from tests.weights import hostile_archives, hostile_files, hostile_folders
from tests.weights.tensors import Tensor


def lay(folder, content):
    """Makes a folder."""
    folder.mkdir(parents=True)
    (folder.parent / "outside.safetensors").write_bytes(hostile_files.GOOD)
    for name, data in content.items():
        if data is None:
            os.mkfifo(folder / name)
        elif isinstance(data, pathlib.Path):
            (folder / name).symlink_to(data)
        else:
            (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """All of them on disk: the path by name, with what the error must say."""
    folder, found = tmp_path_factory.mktemp("corpus"), {}
    files = {name: (*x, "safetensors") for name, x in hostile_files.FILES.items()}
    for name, x in hostile_archives.ARCHIVES.items():
        files[f"npz: {name}"] = *x, "npz"
    for i, (name, (data, text, suffix)) in enumerate(files.items()):
        path = folder / f"{i}.{suffix}"
        path.write_bytes(data)
        found[name] = path, text
    for i, (name, (content, text)) in enumerate(hostile_folders.FOLDERS.items()):
        found[f"folder: {name}"] = lay(folder / f"{i}" / "model", content), text
    return found


NAMES = [
    *hostile_files.FILES,
    *(f"npz: {name}" for name in hostile_archives.ARCHIVES),
    *(f"folder: {name}" for name in hostile_folders.FOLDERS),
]


def refusal(path):
    """What is said of a file, before anything is looked for in it."""
    with pytest.raises(nnx.errors.WeightsError) as caught:
        nnx.weights.draft(path, nnx.Dict())
    return str(caught.value)


def test_the_corpus_is_large(corpus):
    assert [*corpus] == NAMES and len(corpus) > 150


@pytest.mark.parametrize("name", NAMES)
def test_each_is_refused_for_its_own_reason(corpus, name):
    path, text = corpus[name]
    message = refusal(path)
    assert re.search(text, message), message
    assert str(path) in message and len(message) < 1000


def test_each_has_a_message_of_its_own(corpus):
    texts = [text for _, text in corpus.values()]
    assert len({*texts}) > 0.95 * len(texts)


def test_none_is_loaded_or_takes_much_memory(corpus):
    nnx.weights.load({}, nnx.Dict(), {})  # imports what it needs
    tracemalloc.start()
    for name, (path, _) in corpus.items():
        size = path.stat().st_size if path.is_file() else 1_000_000
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(nnx.errors.WeightsError):
            nnx.weights.load(path, nnx.Dict(), {})
        assert tracemalloc.get_traced_memory()[1] - before < 300_000 + 20 * size, name
    tracemalloc.stop()


@pytest.mark.parametrize("name", hostile_files.FILES)
def test_the_library_takes_only_what_is_listed(name):
    library = pytest.importorskip("safetensors")
    data, _ = hostile_files.FILES[name]
    if name in hostile_files.STRICTER:
        library.deserialize(data)
    else:
        with pytest.raises(library.SafetensorError):
            library.deserialize(data)


@pytest.mark.parametrize("rounds", [300, pytest.param(30_000, marks=pytest.mark.long)])
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(rounds):
    pytest.importorskip("safetensors")
    ends = weights_fuzz.run(rounds, seed=rounds)  # random damage
    assert ends["read by both"] > 0.05 * rounds
    assert ends["refused by both"] > 0.5 * rounds


# ---------------------------------------------------------------- no source at all


@pytest.mark.parametrize("name", ["none.safetensors", "none.npz", "none.json", "none"])
def test_what_is_not_there_is_said(tmp_path, name):
    assert refusal(tmp_path / name).endswith("nothing is there")
    assert "Its parent is no folder: " in refusal(tmp_path / "folder" / name)


def test_what_is_no_source_is_a_type_error():
    for source in (3, None, [np.ones(2)]):
        with pytest.raises(TypeError, match="reads a path, or a dict of arrays"):
            nnx.weights.draft(source, nnx.Dict())
    with pytest.raises(TypeError, match="Names must be strings"):
        nnx.weights.draft({3: np.ones(2)}, nnx.Dict())


@tables.cases(
    "value, text",
    ([1.0, 2.0], "'a': list"),
    (3.0, "'a': float"),
    (np.array(["x"]), r"'a': ndarray <U1\[1\]"),
    (np.array([None]), r"'a': ndarray object\[1\]"),
    (jax.ShapeDtypeStruct((2,), jnp.float32), r"ShapeDtypeStruct float32\[2\]"),
    (jax.random.key(0), r"key<fry>\[\]"),
    (Tensor(np.ones(2), "quint8"), r"'a': Tensor torch.quint8\[2\]"),
)
def test_values_that_are_no_arrays_of_numbers_are_listed(value, text):
    with pytest.raises(TypeError, match=text) as caught:
        nnx.weights.draft({"a": value, "b": value, "fine": np.ones(2)}, nnx.Dict())
    assert "'b': " in str(caught.value) and "fine" not in str(caught.value)


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
    message = refusal(tmp_path if is_in_folder else file)
    assert re.search(" is an? ", message) and way_out in message
    if way_out.endswith("('"):
        assert f"{way_out}{file}'" in message
    assert "header" not in message


def test_arrays_under_another_name_are_read_once_it_is_right(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        np.savez(file, x=np.ones(2))
    assert "an .npz archive" in refusal(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "a.npz")
    assert [*nnx.weights.draft(tmp_path / "a.npz", nnx.Dict()).names] == ["x"]
