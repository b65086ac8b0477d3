"""Single safetensors files that are damaged or mislead, and odd ones that are legal.

Of each of `FILES`, what its error must say. `STRICTER` are those of them that the
library `safetensors` takes.
"""

import json
import struct


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
    "a header of no bytes": (bytes(8), "begin with a brace, and has ''"),
    "a header of 2**62 bytes": (file("{}", size=2**62), "have 4611686018427387904 b"),
    "a header of 2**64 - 1 bytes": (file("{}", size=2**64 - 1), "18446744073709551615"),
    "a header over the limit": (file("{}", size=100_000_001), "100000000 are the most"),
    "a header longer than the file": (file("{}", size=3), "and the file has 10"),
    "a header that is cut off": (GOOD[:30], "the file has 30: it is cut off"),
    "the other byte order": (struct.pack(">Q", 2) + b"{}", "144115188075855872 bytes"),
    # Not what the header should be.
    "not UTF-8": (file(b'{"\xff":1}'), "not UTF-8, at byte 2"),
    "UTF-16": (
        file('{"a":1}'.encode("utf-16")),
        r"with a brace, and has .*\\ufffd\\ufffd{",
    ),
    "a surrogate in UTF-8": (file(b'{"\xed\xa0\x80":1}'), "at byte 2 of it"),
    "a byte-order mark": (file(b"\xef\xbb\xbf{}"), r"a brace, and has '\\ufeff{}'"),
    "a zip": (b"PK\x03\x04" + bytes(40), "it is a zip archive, as torch"),
    "a list": (file([]), r"a brace, and has '\[\]'"),
    "a number": (file("3"), "a brace, and has '3'"),
    "a string": (file('"a"'), "a brace, and has '\"a\"'"),
    "no JSON": (file("{a:1}"), "character 1, which has 'a:1}'"),
    "an object without an end": (spelt('{"a":@'), "Expecting ',' .* has ''"),
    "a comma too many": (spelt('{"a":@,}'), "no JSON: .* has ',?}'"),
    "text after the end": (file("{}x"), "Extra data at character 2, .* has 'x'"),
    "zeros after the end": (file(b"{}\0\0"), r"Extra data .* has '\\x00\\x00'"),
    "two headers": (file("{}{}"), "Extra data .* has '{}'"),
    "a comment": (file("{}/*x*/"), "Extra data .* has '/"),
    "a line break in a name": (
        spelt('{"a\n":@}'),
        r"Invalid control character .* has '\\n",
    ),
    "an unknown escape": (file(r'{"\x41":1}'), r"Invalid .escape.* has '\\"),
    "half a character": (spelt(r'{"\ud800":@}'), "half a character"),
    "half an escape": (file(r'{"\u12'), r"Invalid .uXXXX escape .*u12'"),
    "lists in lists": (file('{"a":' + "[" * 99_999), "header nests too deeply"),
    "objects in objects": (file('{"a":' * 99_999), "its header nests too deeply"),
    "a shape in a shape": (raw(shape="[[2]]"), r"the shape \[\[2\]\] should be"),
    # Names.
    "a name twice": (spelt('{"a":@,"a":@}'), "the key 'a' twice"),
    "a name twice, one escaped": (spelt('{"b":@,"\\u0062":@}'), "the key 'b' twice"),
    "a name that is a number": (spelt("{1:@}"), "has '1:"),
    "a name that is null": (spelt("{null:@}"), "has 'null:"),
    "a long name twice": (spelt('{"N":@,"N":@}'.replace("N", LONG)), "n'... twice"),
    # Metadata.
    "metadata with a number": (
        described({"step": 3}),
        r"{.step.: 3}, and should be text by name",
    ),
    "metadata in metadata": (
        described({"x": {"y": "z"}}),
        "{.x.: {.y.: .z.}}, and should be text",
    ),
    "metadata that is text": (described("pt"), "metadata is .pt., and"),
    "metadata that is null": (described(None), "metadata is null, and"),
    "metadata that is a tensor": (described(tensor()), "metadata is {.dtype.: .F32., "),
    "metadata twice": (file('{"__metadata__":{},"__metadata__":{}}'), "a__' twice"),
    "a key of it twice": (file('{"__metadata__":{"k":"","k":""}}'), "key 'k' twice"),
    # The fields of a tensor.
    "a tensor that is null": (
        file({"a": None}),
        "'a': it is null, and should have fields",
    ),
    "a tensor as a list": (
        file({"a": ["F32", [2], [0, 8]]}, bytes(8)),
        r"it is \[.F32., ",
    ),
    "no dtype": (file({"a": {"shape": [2], "data_offsets": [0, 8]}}), "'a': no dtype"),
    "no shape": (file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}), "no shape"),
    "no offsets": (file({"a": {"dtype": "F32", "shape": [2]}}), "no data_offsets"),
    "no fields": (file({"a": {}}), "no dtype and no shape and no data_offsets"),
    "a field twice": (file('{"a":{"dtype":"F32","dtype":"F64"}}'), "key 'dtype' twice"),
    "an unknown field": (one(strides=[4]), "the unknown field 'strides'"),
    # Dtypes.
    "an unknown dtype": (one(dtype="F33"), "unknown dtype 'F33'"),
    "a dtype in small letters": (one(dtype="f32"), "unknown dtype 'f32'"),
    "an object dtype": (one(dtype="|O"), r"unknown dtype '\|O'"),
    "a dtype that is a number": (raw(dtype="32"), "the dtype 32 is no text"),
    "a dtype that is null": (raw(dtype="null"), "the dtype null is no text"),
    "a dtype of half bytes": (
        one(bytes(1), dtype="F4", data_offsets=[0, 1]),
        "dtype F4, of which a byte has no whole element",
    ),
    # Shapes.
    "a negative size": (one(shape=[-2]), "has the number '-2', which is no size"),
    "two negative sizes": (one(shape=[-2, -1]), "the number '-2'"),
    "a size that is a fraction": (raw(shape="[2.0]"), r"the shape \[2\.0\] should be"),
    "a size with an exponent": (raw(shape="[2e0]"), r"the shape \[2\.0\]"),
    "a size that is a boolean": (raw(shape="[true,2]"), r"the shape \[true, 2\]"),
    "a size that is text": (one(shape=["2"]), r"the shape \[.2.\] should"),
    "a size that is null": (one(shape=[None]), r"the shape \[null\] should"),
    "a size that is NaN": (raw(shape="[NaN]"), r"the shape \[NaN\] should"),
    "a size that is minus zero": (raw(shape="[-0,2]"), "the number '-0'"),
    "a size with a leading zero": (raw(shape="[02]"), r"has '2\],"),
    "a size of many digits": (raw(shape=f"[{99999 * '9'}]"), "the number '9{21}'"),
    "a size in Arabic digits": (raw(shape="[\u0662]"), r"has '\\u0662\]"),
    "a shape that is a number": (
        raw(shape="2"),
        "the shape 2 should be integers in a list",
    ),
    "a shape that is null": (raw(shape="null"), "the shape null should be"),
    "a size of 2**64": (one(shape=[2**64]), r"\[18446744073709551616\] is larger"),
    "sizes whose product is 2**64": (one(shape=[2**32, 2**32]), "4294967296, 429"),
    "sizes whose product is 2**64 + 2": (
        one(shape=[3, 3, 59, 3, 11, 27, 139, 152437, 491, 61681][:9]),
        "8 bytes apart",
    ),
    "an empty shape of 2**90": (empty(2**45, 0, 2**45), r"832\] is larger than"),
    "sixty-five axes": (
        one(shape=[1] * 64 + [2]),
        "65 axes, and no array has more than 64",
    ),
    "a million axes": (
        one(shape=[1] * 1_000_000),
        "1000000 axes, and no array has more",
    ),
    # Offsets.
    "one offset": (one(data_offsets=[8]), r"the offsets \[8\] are not where"),
    "no offset": (one(data_offsets=[]), r"the offsets \[\] are not where"),
    "three offsets": (
        one(data_offsets=[0, 8, 8]),
        r"the offsets \[0, 8, 8\] are not where",
    ),
    "a negative offset": (one(data_offsets=[-8, 0]), "the number '-8'"),
    "an offset that is a boolean": (
        raw(data_offsets="[false,8]"),
        r"the offsets \[false, 8\] should",
    ),
    "an offset that is a fraction": (
        raw(data_offsets="[0,8.5]"),
        r"the offsets \[0, 8\.5\] should",
    ),
    "offsets that are an object": (
        raw(data_offsets='{"0":8}'),
        "the offsets {.0.: 8} should",
    ),
    "an end before the beginning": (one(data_offsets=[8, 0]), r"offsets \[8, 0\] are"),
    "fewer bytes": (one(data_offsets=[0, 4]), r"are 4 bytes apart, and F32\[2\] has 8"),
    "more bytes than the shape": (one(shape=[1]), r"8 bytes apart, and F32\[1\] has 4"),
    "bytes for an empty shape": (one(shape=[0]), r"apart, and F32\[0\] has 0"),
    "no bytes for a scalar": (empty(), r"0 bytes apart, and F32\[\] has 4"),
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
    "no data": (one(b""), "at byte 8, and the file has 0 bytes"),
    "data that is cut off": (GOOD[:-1], "at byte 8, and the file has 7 bytes"),
    "data too long": (GOOD + b"x", "8 bytes, and 1 more follow"),
    "data of no tensor": (file("{}", bytes(5)), "0 bytes, and 5 more follow"),
    "a program after the data": (GOOD + b"#!/bin/sh\nrm -rf /\n", "19 more follow"),
}

# What the library takes: keys that come twice, of which it keeps one, what it ignores,
# and what no array of NumPy can be.
STRICTER = {
    "an empty shape of 2**90",
    "a dtype of half bytes",
    "a key of it twice",
    "a long name twice",
    "a name twice",
    "a name twice, one escaped",
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
