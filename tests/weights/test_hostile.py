"""Damaged and misleading files are refused, each for its own reason."""

import re
import tracemalloc

import numpy as np
import pytest

from graftree import errors
from graftree.weights import open_files, sources
from tests.weights import (
    hostile,
    hostile_archives,
    hostile_files,
    hostile_folders,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return hostile.lay_all(tmp_path_factory.mktemp("corpus"))


NAMES = [
    *hostile_files.FILES,
    *(f"npz: {name}" for name in hostile_archives.ARCHIVES),
    *(f"folder: {name}" for name in hostile_folders.FOLDERS),
]


def test_the_corpus_is_large(corpus):
    assert [*corpus] == NAMES and len(corpus) > 150


@pytest.mark.parametrize("name", NAMES)
def test_each_is_refused_before_an_array_is_made(corpus, name, monkeypatch):
    monkeypatch.delattr(open_files.OpenFile, "read_array")
    path, text = corpus[name]
    with pytest.raises(errors.WeightsError) as caught:
        sources.open(path)
    message = str(caught.value)
    assert re.search(text, message), message
    assert str(path) in message and len(message) < 1000


def test_each_has_a_message_of_its_own(corpus):
    texts = [text for _, text in corpus.values()]
    assert len({*texts}) > 0.95 * len(texts)


def test_none_takes_much_memory(corpus):
    tracemalloc.start()
    for name, (path, _) in corpus.items():
        size = path.stat().st_size if path.is_file() else 1_000_000
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(errors.WeightsError):
            sources.open(path)
        used = tracemalloc.get_traced_memory()[1] - before
        assert used < 300_000 + 20 * size, name
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


@pytest.mark.parametrize("name", hostile_files.LEGAL)
def test_odd_files_that_are_legal_are_read_as_the_library_reads_them(tmp_path, name):
    library = pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    path.write_bytes(hostile_files.LEGAL[name])
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
    path.write_bytes(
        hostile_files.file(
            {"a": hostile_files.tensor(dtype="BOOL", data_offsets=[0, 2])}, b"\1\2"
        )
    )
    with sources.open(path) as source:
        assert source.read("a", [slice(0, 1)]) == [True]
        with pytest.raises(errors.WeightsError, match="neither 0 nor 1"):
            source.read("a", [slice(None)])


def test_a_file_that_is_cut_off_while_it_is_open_is_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(hostile_files.GOOD)
    with sources.open(path) as source:
        with path.open("r+b") as file:
            file.truncate(len(hostile_files.GOOD) - 4)
        assert source.read("a", [slice(0, 1)]) == np.zeros(1)
        with pytest.raises(errors.WeightsError, match="did not when it was opened"):
            source.read("a", [slice(None)])
