"""What is no weights: damaged and misleading files, each refused for its own reason."""

import io
import json
import os
import pathlib
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables
from tests.stress import weights_fuzz
from tests.weights.tensors import Tensor


def file(header, data=b"", size=None):
    """A file with such a header; ``size`` is what it says of the header's size."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def tensor(**changes):
    """A tensor of two float32, or another."""
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def one(data=bytes(8), **changes):
    """A file with one tensor."""
    return file({"a": tensor(**changes)}, data)


def empty(*shape):
    """A file with one tensor, of no bytes."""
    return one(b"", shape=shape, data_offsets=[0, 0])


def described(metadata):
    """A file with one tensor and metadata."""
    return file({"__metadata__": metadata, "a": tensor()}, bytes(8))


def raw(**changes):
    """A file with one tensor, some of its fields as text."""
    fields = {"dtype": '"F32"', "shape": "[2]", "data_offsets": "[0,8]"} | changes
    inner = ",".join(f'"{name}":{text}' for name, text in fields.items())
    return file('{"a":{' + inner + "}}", bytes(8))


def two(first, second, data=bytes(16)):
    """A file with two tensors, of such offsets."""
    first, second = tensor(data_offsets=first), tensor(data_offsets=second)
    return file({"a": first, "b": second}, data)


def spelt(header):
    """A file with a header where each @ is a tensor, all of the same bytes."""
    return file(header.replace("@", json.dumps(tensor())), bytes(8))


GOOD = one()
LONG = 9999 * "n"

FILES = {
    # The size of the header.
    "nothing": (b"", "it has 0 bytes"),
    "seven bytes": (bytes(7), "it has 7 bytes"),
    "a header of no bytes": (bytes(8), "begin with a brace, but has ''"),
    "a header of 2**62 bytes": (file("{}", size=2**62), "have 4611686018427387904 b"),
    "a header of 2**64 - 1 bytes": (file("{}", size=2**64 - 1), "18446744073709551615"),
    "a header over the limit": (file("{}", size=100_000_001), "at most 100000000 fit"),
    "a header longer than the file": (file("{}", size=3), "but the file has 10"),
    "a header that is cut off": (GOOD[:30], "the file has 30: it is cut off"),
    "the other byte order": (struct.pack(">Q", 2) + b"{}", "144115188075855872 bytes"),
    # Not what the header should be.
    "not UTF-8": (file(b'{"\xff":1}'), "not UTF-8, at byte 2"),
    "UTF-16": (file('{"a":1}'.encode("utf-16")), r"a brace, but has .*\\ufffd\\ufffd{"),
    "a byte-order mark": (file(b"\xef\xbb\xbf{}"), r"a brace, but has '\\ufeff{}'"),
    "a zip": (b"PK\x03\x04" + bytes(40), "it is a zip archive, as torch"),
    "a list": (file([]), r"a brace, but has '\[\]'"),
    "no JSON": (file("{a:1}"), "character 1, which has 'a:1}'"),
    "an object without an end": (spelt('{"a":@'), "Expecting ',' .* has ''"),
    "text after the end": (file("{}x"), "Extra data at character 2, .* has 'x'"),
    "a line break in a name": (spelt('{"a\n":@}'), r"Invalid control .* has '\\n"),
    "an unknown escape": (file(r'{"\x41":1}'), r"Invalid .escape.* has '\\"),
    "half a character": (spelt(r'{"\ud800":@}'), "incomplete character"),
    "lists in lists": (file('{"a":' + "[" * 99_999), "header nests too deeply"),
    "a shape in a shape": (raw(shape="[[2]]"), r"the shape \[\[2\]\] should be"),
    # Names.
    "a name twice": (spelt('{"a":@,"a":@}'), "the key 'a' twice"),
    "a name that is a number": (spelt("{1:@}"), "has '1:"),
    "a long name twice": (spelt('{"N":@,"N":@}'.replace("N", LONG)), "n'... twice"),
    # Metadata.
    "metadata with a number": (described({"step": 3}), r"{.step.: 3}, not a dict"),
    "metadata that is null": (described(None), "metadata is null, not"),
    "metadata twice": (file('{"__metadata__":{},"__metadata__":{}}'), "a__' twice"),
    "a key of it twice": (file('{"__metadata__":{"k":"","k":""}}'), "key 'k' twice"),
    # The fields of a tensor.
    "a tensor that is null": (file({"a": None}), "'a': it is null, not an object"),
    "a tensor as a list": (file({"a": ["F32", [2], [0, 8]]}, bytes(8)), r"is \[.F32."),
    "no dtype": (file({"a": {"shape": [2], "data_offsets": [0, 8]}}), "'a': no dtype"),
    "no fields": (file({"a": {}}), "no dtype and no shape and no data_offsets"),
    "a field twice": (file('{"a":{"dtype":"F32","dtype":"F64"}}'), "key 'dtype' twice"),
    "an unknown field": (one(strides=[4]), "the unknown field 'strides'"),
    # Dtypes.
    "an unknown dtype": (one(dtype="F33"), "unknown dtype 'F33'"),
    "a dtype that is a number": (raw(dtype="32"), "the dtype 32 is not text"),
    "a dtype of half bytes": (
        one(bytes(1), dtype="F4", data_offsets=[0, 1]),
        "dtype F4, whose elements are smaller than a byte",
    ),
    # Shapes.
    "a negative size": (one(shape=[-2]), "has the number '-2', which is not a size"),
    "a size that is a fraction": (raw(shape="[2.0]"), r"the shape \[2\.0\] should be"),
    "a size that is a boolean": (raw(shape="[true,2]"), r"the shape \[true, 2\]"),
    "a size that is text": (one(shape=["2"]), r"the shape \[.2.\] should"),
    "a size that is NaN": (raw(shape="[NaN]"), r"the shape \[NaN\] should"),
    "a size that is minus zero": (raw(shape="[-0,2]"), "the number '-0'"),
    "a size with a leading zero": (raw(shape="[02]"), r"has '2\],"),
    "a size of many digits": (raw(shape=f"[{99999 * '9'}]"), "the number '9{21}'"),
    "a size in Arabic digits": (raw(shape="[\u0662]"), r"has '\\u0662\]"),
    "a shape that is a number": (raw(shape="2"), "the shape 2 should be integers"),
    "a size of 2**64": (one(shape=[2**64]), r"\[18446744073709551616\] is larger"),
    "sizes whose product is 2**64": (one(shape=[2**32, 2**32]), "4294967296, 429"),
    "sizes whose product is 2**64 + 2": (
        one(shape=[3, 3, 59, 3, 11, 27, 139, 152437, 491, 61681][:9]),
        "8 bytes apart",
    ),
    "an empty shape of 2**90": (empty(2**45, 0, 2**45), r"832\] is larger than"),
    "sixty-five axes": (one(shape=[1] * 64 + [2]), "65 axes, but an array has at most"),
    "a million axes": (one(shape=[1] * 1_000_000), "1000000 axes, but an array has"),
    # Offsets.
    "one offset": (one(data_offsets=[8]), r"the offsets \[8\] are not a begin"),
    "three offsets": (one(data_offsets=[0, 8, 8]), r"\[0, 8, 8\] are not a begin"),
    "a negative offset": (one(data_offsets=[-8, 0]), "the number '-8'"),
    "an offset that is a boolean": (
        raw(data_offsets="[false,8]"),
        r"the offsets \[false, 8\] should",
    ),
    "an offset that is a fraction": (
        raw(data_offsets="[0,8.5]"),
        r"the offsets \[0, 8\.5\] should",
    ),
    "an end before the beginning": (one(data_offsets=[8, 0]), r"offsets \[8, 0\] are"),
    "fewer bytes": (one(data_offsets=[0, 4]), r"are 4 bytes apart, but F32\[2\] has 8"),
    "more bytes than the shape": (one(shape=[1]), r"8 bytes apart, but F32\[1\] has 4"),
    "bytes for an empty shape": (one(shape=[0]), r"apart, but F32\[0\] has 0"),
    "no bytes for a scalar": (empty(), r"0 bytes apart, but F32\[\] has 4"),
    # All tensors together.
    "the same bytes twice": (two([0, 8], [0, 8]), "bytes 0 to 8 overlap those of 'a'"),
    "bytes that overlap": (two([0, 8], [4, 12]), "12 overlap those of 'a', up to 8"),
    "an empty tensor inside another": (
        file({"a": tensor(), "b": tensor(shape=[0], data_offsets=[4, 4])}, bytes(8)),
        "its bytes 4 to 4 overlap",
    ),
    "a gap": (two([0, 8], [12, 20], bytes(20)), "the bytes 8 to 12 belong to no"),
    "a gap at the beginning": (one(bytes(12), data_offsets=[4, 12]), "0 to 4 belong"),
    "a tensor after the end": (two([0, 8], [8, 16], bytes(8)), "'b': it ends .* 16"),
    "data that is cut off": (GOOD[:-1], "at byte 8, but the file has 7 bytes"),
    "data too long": (GOOD + b"x", "8 bytes, and 1 more follow"),
    "data of no tensor": (file("{}", bytes(5)), "0 bytes, and 5 more follow"),
}

# What the library takes: keys that come twice, of which it keeps one, what it ignores,
# and what no array of NumPy can be.
STRICTER = {
    "an empty shape of 2**90",
    "a dtype of half bytes",
    "a key of it twice",
    "a long name twice",
    "a name twice",
    "a tensor as a list",
    "an unknown field",
    "metadata that is null",
    "sixty-five axes",
}

LEGAL = {
    "no tensors": file("{}"),
    "a scalar": one(bytes(4), shape=[], data_offsets=[0, 4]),
    "an empty tensor": empty(3, 0),
    "empty tensors between others": file(
        {
            "a": tensor(),
            "b": tensor(shape=[0], data_offsets=[0, 0]),
            "c": tensor(shape=[0], data_offsets=[8, 8]),
        },
        bytes(8),
    ),
    "an empty name": file({"": tensor()}, bytes(8)),
    "a name with a path": file({"../../etc/passwd": tensor()}, bytes(8)),
    "a name in other letters": spelt('{"\u00e9\U0001f600":@}'),
    "an escaped name": spelt('{"\\ud83d\\ude00\\n\\u0000":@}'),
    "escaped fields": file(
        '{"a":{"d\\u0074ype":"F\\u00332","shape":[2],"data_offsets":[0,8]}}', bytes(8)
    ),
    "fields in another order": file({"a": dict([*tensor().items()][::-1])}, bytes(8)),
    "tensors in another order": two([8, 16], [0, 8]),
    "spaces everywhere": file(
        '{ "a" :\t{"dtype" : "F32" ,\n"shape":[ 2 ] ,"data_offsets":[ 0 , 8 ]\r} }   ',
        bytes(8),
    ),
    "a header that is not aligned": spelt('{"a":@} '),
    "data that is not aligned": file(
        {
            "a": tensor(dtype="U8", shape=[1], data_offsets=[0, 1]),
            "b": tensor(data_offsets=[1, 9]),
        },
        bytes(range(9)),
    ),
    "metadata that is empty": described({}),
    "metadata at the end": file({"a": tensor(), "__metadata__": {"x": ""}}, bytes(8)),
    "NaN and infinity": one(struct.pack("<ff", float("nan"), float("inf"))),
    "sixty-four axes": one(shape=[1] * 63 + [2]),
    "an empty tensor with a large size": empty(2**60, 0),
    "ten thousand tensors": file(
        {f"{i}": tensor(data_offsets=[8 * i, 8 * i + 8]) for i in range(10_000)},
        bytes(80_000),
    ),
}


# ----------------------------------------------------------------------------- archives


def npy(array, old=b"", new=b""):
    """An array as NumPy stores it, its header changed."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    return stream.getvalue().replace(old, new.ljust(len(old)))


def archive(*members, compression=zipfile.ZIP_STORED):
    """A zip of such files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as made:
        for name, data in members:
            made.writestr(name, data)
    return stream.getvalue()


ARRAY = npy(np.arange(6, dtype=np.float32))
PAIR = archive(("a.npy", ARRAY), ("b.npy", ARRAY))
SIX = np.zeros(6, "f4")
ZIPPED = archive(("a.npy", ARRAY), compression=zipfile.ZIP_DEFLATED)

# An archive with one file, ``a.npy``.
INNER = {
    "no array inside": (b"hello, hello, hello", "'a': ValueError"),
    "a pickle": (npy(np.array([print], object)), "dtype object, which is not a number"),
    "text": (npy(np.array(["x"])), "which is not a number"),
    "dates": (npy(np.array(["2020"], "M8[Y]")), "dtype datetime64.* not a number"),
    "rows with fields": (npy(np.zeros(2, "f4,i4")), "which is not a number"),
    "bfloat16": (npy(np.zeros(2, "V2")), "bfloat16 and float8 so, and loses which"),
    "a shape larger than the data": (
        npy(SIX, b"(6,), }  ", b"(60,), } "),
        r"float32\[60\] has 240 bytes, but the file has 24",
    ),
    "a shape by a sum": (npy(SIX, b"(6,), }       ", b"(1+5,), }"), "'a': Value"),
    "a negative shape": (npy(SIX, b"(6,), } ", b"(-6,), }"), r"the shape \[-6\]"),
    "a program as a header": (npy(SIX, b"'<f4'", b"f()"), "'a': ValueError"),
    "an unknown version": (ARRAY.replace(b"NUMPY\x01", b"NUMPY\x09"), "version"),
    "data that is cut off": (ARRAY[:-4], "but the file has 20 for"),
}

ARCHIVES = {
    "no zip": (b"x" * 100, "BadZipFile"),
    "nothing": (b"", "BadZipFile"),
    "a zip that is cut off": (PAIR[:-30], "BadZipFile"),
    "its beginning is missing": (PAIR[200:], "tensor 'a': "),
    "no array": (archive(("a.txt", b"x")), "is not an array"),
    "a name twice": (PAIR.replace(b"b.npy", b"a.npy"), "'a': occurs twice"),
    "a compressed one, damaged": (ZIPPED[:60].ljust(64, b"\0") + ZIPPED[64:], "'a': "),
    **{name: (archive(("a.npy", data)), text) for name, (data, text) in INNER.items()},
}


# ------------------------------------------------------------------------------ folders


def index(places):
    """An index of a set."""
    return json.dumps({"metadata": {}, "weight_map": places}).encode()


INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OTHER = file({"b": tensor()}, bytes(8))
OUTSIDE = "../outside.safetensors"
IN_ONE = {INDEX: index({"a": ONE})}

# An index with one tensor in such a file.
PLACES = {
    "an index without files": (ONE, f"file '{ONE}' is missing"),
    "a file above": (OUTSIDE, f"file '{OUTSIDE}' is not in the folder"),
    "a file above, from below": (f"below/../{OUTSIDE}", f"/../{OUTSIDE}' is not in"),
    "an absolute path": ("/etc/passwd", "'/etc/passwd' is not in the folder"),
    "a path of Windows": ("..\\outside.safetensors", r"outside.safetensors' is not in"),
    "a drive of Windows": ("C:x.safetensors", "'C:x.safetensors'"),
    "a stream of Windows": (f"{ONE}:x", f"'{ONE}:x' is not in"),
    "half a character in a path": ("\ud800", r"'\\ud800' is not in"),
    "a zero in a path": ("a\0b", r"'a\\x00b' is not in"),
    "the folder as a file": (".", r"file '.' is not in"),
    "a file without a name": ("", "file '' is not in"),
    "a file that is another index": (INDEX, "its header would have"),
    "a file that is a number": (1, "'a': has int instead of a file"),
    "a file that is null": (None, "has NoneType instead"),
}

# An index of these bytes, beside a good file.
INDEXES = {
    "no weight_map": (b'{"metadata": {}}', "it has no weight_map"),
    "an index that is a list": (b"[]", "it has no weight_map"),
    "an index that is not JSON": (b"{", "it is not JSON"),
    "an index that is not UTF-8": (b'{"\xff": 1}', "it is not UTF-8, at byte 2"),
    "an index that nests": (b"[" * 999_999, "it nests too deeply"),
    "a number of many digits": (b'{"x": %s}' % (9999 * b"9"), "not JSON: Exceeds"),
    "a tensor twice in the index": (
        b'{"weight_map": {"a": "x", "a": "%s"}}' % ONE.encode(),
        "it has the key 'a' twice",
    ),
    "two weight_maps": (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' twice"),
}

FOLDERS = {
    "nothing there": ({}, "it contains no .safetensors file"),
    "a file above and back": (
        {ONE: GOOD, INDEX: index({"a": f"../model/{ONE}"})},
        f"'../model/{ONE}' is not in",
    ),
    "a link to a file outside": (
        IN_ONE | {ONE: Path(OUTSIDE)},
        "a link to .*/outside.safetensors, is not in",
    ),
    "a link to a folder outside": (
        {"below": Path(".."), INDEX: index({"a": "below/outside.safetensors"})},
        "'below/outside.safetensors', a link to",
    ),
    "a circle of links": (IN_ONE | {ONE: Path(ONE)}, f"'{ONE}'"),
    "a pipe": (IN_ONE | {ONE: None}, "it is not a regular file"),
    "a file that lacks a tensor": (
        {ONE: GOOD, INDEX: index({"a": ONE, "c": ONE})},
        f"'c': should be in '{ONE}', but is not",
    ),
    "a tensor in another file": (
        {ONE: GOOD, TWO: OTHER, INDEX: index({"a": TWO, "b": ONE})},
        f"'a': should be in '{TWO}', but is not",
    ),
    "a tensor in two files": (
        {ONE: GOOD, TWO: two([0, 8], [8, 16]), INDEX: index({"a": ONE, "b": TWO})},
        f"'a': is in '{TWO}'; the index says '{ONE}'",
    ),
    "a tensor that the index lacks": (
        IN_ONE | {ONE: two([0, 8], [8, 16])},
        "'b': is in .*; the index says nothing about it",
    ),
    "a damaged file": (
        {ONE: GOOD, TWO: OTHER[:-3], INDEX: index({"a": ONE, "b": TWO})},
        f"{TWO}.*\n.*'b': it ends at byte 8, but the file has 5",
    ),
    "a set and a file": (
        IN_ONE | {"model.safetensors": GOOD, ONE: GOOD},
        f"several files, .*: {INDEX}, {ONE}, model.safetensors",
    ),
    "a set without its index": ({ONE: GOOD, TWO: OTHER}, f"several files, .*: {ONE}, "),
    "two indexes": (
        {f"{name}.safetensors.index.json": index({}) for name in "xy"},
        "several files, .*: x.safetensors.index.json, y.saf",
    ),
}
for name, (place, text) in PLACES.items():
    FOLDERS[name] = {INDEX: index({"a": place})}, text
for name, (data, text) in INDEXES.items():
    FOLDERS[name] = {ONE: GOOD, INDEX: data}, text


# ----------------------------------------------------------------- what is said of them


def lay(folder, content):
    """Makes a folder."""
    folder.mkdir(parents=True)
    (folder.parent / "outside.safetensors").write_bytes(GOOD)
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
    files = {name: (*x, "safetensors") for name, x in FILES.items()}
    for name, x in ARCHIVES.items():
        files[f"npz: {name}"] = *x, "npz"
    for i, (name, (data, text, suffix)) in enumerate(files.items()):
        path = folder / f"{i}.{suffix}"
        path.write_bytes(data)
        found[name] = path, text
    for i, (name, (content, text)) in enumerate(FOLDERS.items()):
        found[f"folder: {name}"] = lay(folder / f"{i}" / "model", content), text
    return found


def refusal(path):
    """What is said of a file, before anything is looked for in it."""
    with pytest.raises(nnx.errors.WeightsError) as caught:
        nnx.weights.draft(path, nnx.Dict())
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [*FILES, *(f"npz: {x}" for x in ARCHIVES), *(f"folder: {x}" for x in FOLDERS)],
)
def test_each_is_refused_for_its_own_reason(corpus, name):
    path, text = corpus[name]
    message = refusal(path)
    assert re.search(text, message), message
    assert str(path) in message and len(message) < 1000


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


@pytest.mark.parametrize("name", FILES)
def test_the_library_takes_only_what_is_listed(name):
    library = pytest.importorskip("safetensors")
    data, _ = FILES[name]
    if name in STRICTER:
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
    assert refusal(tmp_path / name).endswith("it does not exist")
    assert "Its parent is not a folder: " in refusal(tmp_path / "folder" / name)


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
    "b.pt": (b"\x80\x04\x95\n\0\0\0\0" + bytes(40), "convert '"),
    "c.gguf": (b"GGUF\x03\x00\x00\x00" + bytes(40), "gguf.GGUFReader('"),
    "d.h5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "h5py.File('"),
    "d.keras": (b"PK\x03\x04" + bytes(26) + b"metadata.json", "Unzip it"),
    "d.msgpack": (b"\x81\xa6params\x82\xa5Dense" + bytes(40), "open('"),
    "e.safetensors": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "f.safetensors": (b"<!DOCTYPE html><html></html>", "get the file again"),
    "g.safetensors": (b"PK\x03\x04" + bytes(26) + b"x.npy" + bytes(9), "with .npz"),
    "h.npy": (b"\x93NUMPY\x01\x00" + bytes(40), "numpy.load('"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("is_in_folder", [False, True])
def test_another_format_is_named_with_the_way_to_tensors(tmp_path, name, is_in_folder):
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
