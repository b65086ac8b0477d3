"""Folders and indexes that are damaged or mislead, with what their error must say.

What is in a folder is bytes by name; a path, where a link points; or None for a pipe.
"""

import json
from pathlib import Path

from tests.weights.hostile_files import GOOD, file, tensor, two


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
    "a file that is a number": (1, "'a': has int in the place of a file"),
    "a file that is null": (None, "has NoneType in the place"),
}

# An index of these bytes, beside a good file.
INDEXES = {
    "no weight_map": (b'{"metadata": {}}', "it has no weight_map"),
    "a weight_map that is a list": (b'{"weight_map": ["a"]}', "no weight_map"),
    "an index that is a list": (b"[]", "it has no weight_map"),
    "an index that is no JSON": (b"{", "it is no JSON"),
    "an index that is not UTF-8": (b'{"\xff": 1}', "it is not UTF-8, at byte 2"),
    "an index that nests": (b"[" * 999_999, "it nests too deeply"),
    "a number of many digits": (b'{"x": %s}' % (9999 * b"9"), "no JSON: Exceeds"),
    "a tensor twice in the index": (
        b'{"weight_map": {"a": "x", "a": "%s"}}' % ONE.encode(),
        "it has the key 'a' twice",
    ),
    "two weight_maps": (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' twice"),
}

FOLDERS = {
    "nothing there": ({}, "it has no .safetensors file"),
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
        f"'c': should be in '{ONE}', and is not",
    ),
    "a tensor in another file": (
        {ONE: GOOD, TWO: OTHER, INDEX: index({"a": TWO, "b": ONE})},
        f"'a': should be in '{TWO}', and is not",
    ),
    "a tensor in two files": (
        {ONE: GOOD, TWO: two([0, 8], [8, 16]), INDEX: index({"a": ONE, "b": TWO})},
        f"'a': is in '{TWO}'; the index says '{ONE}'",
    ),
    "a tensor that the index lacks": (
        IN_ONE | {ONE: two([0, 8], [8, 16])},
        "'b': is in .*; the index says nothing of it",
    ),
    "a damaged file": (
        {ONE: GOOD, TWO: OTHER[:-3], INDEX: index({"a": ONE, "b": TWO})},
        f"{TWO}.*\n.*'b': it ends at byte 8, and the file has 5",
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
