r"""The header of a safetensors file, read strictly.

A file is (all numbers little-endian, offsets from where the data begins)

    8 bytes    the size of the header
    header     {"__metadata__": {"format": "pt"},
                "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
               as JSON in UTF-8, from the first byte on, with spaces at the end
    data       each tensor in C order; they follow each other without gaps

This reads that much of JSON and no more, from left to right, and stops at what does not
belong there. So a header of 100 MB can't nest, or hold millions of things that nobody
asked for, and no key is overwritten by one of the same name. What it takes, the
library `safetensors` takes too, and reads the same.

Refused beyond what that library refuses: keys that come twice, fields besides the
three, anything before the first brace, and shapes that no array can have.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graftree import errors
from graftree.weights import stored_dtypes, stored_tensors
from graftree.weights.stored_tensors import Stored

# As in the library `safetensors`.
MAX_SIZE = 100_000_000

# Of NumPy.
MAX_RANK = 64

METADATA = "__metadata__"

# Halves of characters, which JSON can spell and UTF-8 can't.
HALVES = re.compile("[\ud800-\udfff]")

_FIELDS = ("dtype", "shape", "data_offsets")


@dataclasses.dataclass(frozen=True)
class Header:
    """What the header says.

    Attributes:
        tensors: By name, in the order of their data.
        begins: Where the data of each begins.
        metadata: Free text by name; None if there is none.
    """

    tensors: Mapping[str, Stored]
    begins: Mapping[str, int]
    metadata: Mapping[str, str] | None


def parse(data: bytes, data_size: int, file: str) -> Header:
    """Reads a header and checks it against the size of the data.

    Args:
        data: The bytes of the header.
        data_size: How many bytes follow it in the file.
        file: The path, for messages.

    Raises:
        WeightsError: If anything about it is wrong.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise stored_tensors.refusal(
            file, f"its header is not UTF-8, at byte {error.start} of it"
        ) from error
    reader = _Reader(text, file)
    tensors, ranges = {}, {}
    metadata = None
    if not text.startswith("{"):
        raise reader.unexpected("a brace as its first character")
    for key in reader.members():
        if key == METADATA:
            metadata = dict(reader.texts())
        else:
            tensors[key], ranges[key] = _read_tensor(reader, key)
    reader.end()
    order = sorted(tensors, key=ranges.__getitem__)
    _check_ranges([(name, *ranges[name]) for name in order], data_size, file)
    begins = {name: ranges[name][0] for name in order}
    return Header({name: tensors[name] for name in order}, begins, metadata)


def text_of(
    tensors: Sequence[tuple[str, Stored]], metadata: Mapping[str, str] | None
) -> bytes:
    """The header of a file with these tensors in this order, for `parse` to read."""
    content, end = {}, 0
    if metadata is not None:
        content[METADATA] = dict(metadata)
    for name, stored in tensors:
        content[name] = {
            "dtype": stored_dtypes.NAMES[stored.dtype],
            "shape": [int(size) for size in stored.shape],
            "data_offsets": [end, end + stored.nbytes],
        }
        end += stored.nbytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def sorted_by_format(
    tensors: Iterable[tuple[str, Stored]],
) -> list[tuple[str, Stored]]:
    """Tensors in the order that the library `safetensors` writes.

    Wider dtypes come first, so that the data of each is aligned; then by name.
    """

    def key(item: tuple[str, Stored]) -> tuple[int, str]:
        return -stored_dtypes.RANKS[item[1].dtype], item[0]

    return sorted(tensors, key=key)


# ---------------------------------------------------------------- one tensor


def _read_tensor(reader: _Reader, name: str) -> tuple[Stored, tuple[int, int]]:
    usual = reader.takes_usual()
    dtype, shape, (begin, end) = usual or _read_fields(reader, name)
    if dtype not in stored_dtypes.BY_NAME:
        raise _unknown_dtype(reader.file, name, dtype)
    stored = Stored(stored_dtypes.BY_NAME[dtype], shape)
    # No array has these sizes either, with an axis of 0 beside them.
    largest = stored.nbytes or math.prod(size or 1 for size in shape)
    if largest >= 2**63:
        what = f"the shape {[*shape]} is larger than any memory"
        raise stored_tensors.refusal(reader.file, what, name)
    if end - begin != stored.nbytes:
        raise stored_tensors.refusal(
            reader.file,
            f"the offsets {[begin, end]} are {end - begin} bytes apart, and "
            f"{dtype}{[*shape]} has {stored.nbytes}",
            name,
        )
    return stored, (begin, end)


def _read_fields(
    reader: _Reader, name: str
) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """The fields of a tensor, however they are written."""
    dtype, shape, offsets, seen = "", (), (), set()
    for field in reader.members():
        seen.add(field)
        if field == "dtype":
            dtype = reader.string()
        elif field == "shape":
            shape = reader.integers(MAX_RANK, "axes")
        elif field == "data_offsets":
            offsets = reader.integers(2, "offsets")
        else:
            what = f"the unknown field {stored_tensors.quoted(field)}"
            raise stored_tensors.refusal(reader.file, what, name)
    missing = [field for field in _FIELDS if field not in seen]
    if missing:
        what = f"no {' and no '.join(missing)}"
        raise stored_tensors.refusal(reader.file, what, name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        what = f"the offsets {[*offsets]} are not where it begins and ends"
        raise stored_tensors.refusal(reader.file, what, name)
    return dtype, shape, offsets


def _unknown_dtype(file: str, name: str, dtype: str) -> errors.WeightsError:
    if dtype in stored_dtypes.PACKED:
        return stored_tensors.refusal(
            file,
            f"dtype {dtype}, of which a byte has no whole element",
            name,
            "That isn't read. Store it as U8 or in a wider dtype.",
        )
    return stored_tensors.refusal(
        file,
        f"the unknown dtype {stored_tensors.quoted(dtype)}",
        name,
        f"Known are {' '.join(stored_dtypes.BY_NAME)}.",
    )


# ---------------------------------------------------------------- all together


def _check_ranges(
    ranges: list[tuple[str, int, int]], data_size: int, file: str
) -> None:
    """Raises unless the ranges follow each other and fill the data."""
    before, expected = "", 0
    for name, begin, end in ranges:
        if begin < expected:
            raise stored_tensors.refusal(
                file,
                f"its bytes {begin} to {end} overlap those of "
                f"{stored_tensors.quoted(before)}, up to {expected}",
                name,
            )
        if begin > expected:
            raise stored_tensors.refusal(
                file,
                f"before it, the bytes {expected} to {begin} belong to no tensor",
                name,
            )
        if end > data_size:
            raise stored_tensors.refusal(
                file,
                f"it ends at byte {end}, and the file has {data_size} bytes of data: "
                "it is cut off",
                name,
            )
        before, expected = name, end
    if expected != data_size:
        raise stored_tensors.refusal(
            file,
            f"its tensors have {expected} bytes, and {data_size - expected} more "
            "follow that belong to none",
        )


# ---------------------------------------------------------------- JSON

_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING = re.compile(
    r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
)
# At most the digits of 2**64: converting more would take long.
_INTEGER = re.compile(r"(?:0|[1-9][0-9]{0,19}+)(?![0-9.eE])")
# A tensor as the library writes it. Large models have 100,000 of them, which take 1.1 s
# so, and 2.8 s token by token.
_NUMBER = "(?:0|[1-9][0-9]{0,18}+)"
_USUAL = re.compile(
    rf'\{{"dtype":"([A-Z0-9_]+)","shape":\[((?:{_NUMBER}(?:,{_NUMBER}){{0,63}})?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)


class _Reader:
    """Reads JSON from left to right."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.at = 0

    def unexpected(self, expected: str) -> errors.WeightsError:
        found = stored_tensors.quoted(self.text[self.at : self.at + 20])
        if self.at == len(self.text):
            found = "its end"
        return stored_tensors.refusal(
            self.file,
            f"its header should have {expected} at character {self.at}, and has "
            f"{found}",
        )

    def members(self) -> Iterator[str]:
        """The keys of an object; each time, its value is to be read next."""
        self._expect("{")
        seen = set()
        if self._takes("}"):
            return
        while True:
            key = self.string()
            if key in seen:
                raise stored_tensors.refusal(
                    self.file,
                    f"its header has the key {stored_tensors.quoted(key)} twice",
                )
            seen.add(key)
            self._expect(":")
            yield key
            if self._takes("}"):
                return
            self._expect(",")

    def texts(self) -> Iterator[tuple[str, str]]:
        """The items of an object whose values are strings."""
        for key in self.members():
            yield key, self.string()

    def integers(self, limit: int, called: str) -> tuple[int, ...]:
        """A list of integers that are not negative."""
        self._expect("[")
        found = []
        while not self._takes("]"):
            if found:
                self._expect(",")
            if len(found) == limit:
                raise self.unexpected(f"no more than {limit} {called}")
            found.append(int(self._match(_INTEGER, "an integer from 0 up")))
        return tuple(found)

    def takes_usual(self) -> tuple[str, tuple[int, ...], tuple[int, int]] | None:
        """The fields of a tensor, if they are written as they usually are."""
        match = _USUAL.match(self.text, self.at)
        if not match:
            return None
        dtype, sizes, begin, end = match.groups()
        if int(begin) > int(end):
            return None
        self.at = match.end()
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        return dtype, shape, (int(begin), int(end))

    def string(self) -> str:
        """A string."""
        raw = self._match(_STRING, "a string")
        if "\\" not in raw:
            return raw[1:-1]
        text = json.loads(raw)
        if HALVES.search(text):
            raise stored_tensors.refusal(
                self.file, f"its header has half a character, in {raw[:200]!a}"
            )
        return text

    def end(self) -> None:
        """Raises if more follows."""
        self._skip()
        if self.at != len(self.text):
            raise self.unexpected("spaces up to its end")

    def _skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _takes(self, character: str) -> bool:
        self._skip()
        found = self.text.startswith(character, self.at)
        self.at += found
        return found

    def _expect(self, character: str) -> None:
        if not self._takes(character):
            raise self.unexpected(f"a {character!r}")

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        self._skip()
        match = pattern.match(self.text, self.at)
        if not match:
            raise self.unexpected(expected)
        self.at = match.end()
        return match.group()
