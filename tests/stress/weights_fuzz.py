"""Files with random damage: ``python -m tests.stress.weights_fuzz --rounds 200000``.

A good file is changed here and there: bytes, numbers, words of the header, its parts in
another order. Each mutant is given to our reader and to the library `safetensors`:

- ours reads it, and then the library does too, with the same tensors; or it raises a
  `WeightsError`, and nothing else;
- what the library reads and ours does not is refused for one of the reasons in
  `STRICTER`;
- the memory taken is less than a bound that depends on the size of the file alone.

Archives of NumPy and indexes are damaged too; they are read, or refused.
"""

import argparse
import collections
import io
import json
import pathlib
import random
import re
import struct
import tempfile
import tracemalloc

import numpy as np

from graftree import errors
from graftree.weights import sources

# Why we refuse what the library reads.
STRICTER = re.compile(
    "twice|unknown field|whose elements are smaller|larger than any memory|"
    "an array has at most 64|neither 0 nor 1|must begin with a brace|"
    # Metadata that is null, a tensor as a list, and a dtype as an object.
    r"its metadata is null|it is \[.*not an object|the dtype \{.* is not text"
)

WORDS = (
    *("0", "1", "-1", "2", "8", "9", "16", "4294967296", "18446744073709551615", "1e3"),
    *("18446744073709551616", "0.5", "true", "null", "NaN", "[]", "{}", '""', "[0,0]"),
    *'"F32" "F64" "BOOL" "F4" "dtype" "shape" "a" "__metadata__"'.split(),
    *('"data_offsets"', "{", "}", "[", "]", ",", ":", '"', "\\", "\\u0061", " ", "\n"),
    *("\x00", "\u00e9", "\\ud800", "/*"),
)

TOKEN = re.compile(r'"[^"]*"|[0-9]+|[\[\]{}:,]|.', re.DOTALL)


def seed(**tensors):
    """A good file that is changed: header and data."""
    content, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        offsets = [end, end + nbytes]
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end += nbytes
    return json.dumps(content, separators=(",", ":")), bytes(i % 2 for i in range(end))


SEEDS = [
    seed(a=("F32", [2], 8)),
    seed(a=("F32", [2, 3], 24), b=("F16", [4], 8), c=("U8", [], 1)),
    seed(a=("F32", [0, 3], 0), b=("BOOL", [2, 2], 4), c=("F64", [1], 8)),
]


def mutant(rng):
    """The bytes of a file with some damage."""
    text, data = rng.choice(SEEDS)
    tokens = TOKEN.findall(text)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(tokens))
        change = rng.randrange(6)
        if change == 0:
            tokens[at] = rng.choice(WORDS)
        elif change == 1:
            tokens.insert(at, rng.choice(WORDS))
        elif change == 2:
            del tokens[at : at + rng.randrange(1, 4)]
        elif change == 3:
            numbers = [i for i, token in enumerate(tokens) if token.isdigit()]
            if numbers:
                i = rng.choice(numbers)
                changed = int(tokens[i]) + rng.choice([-8, -4, -1, 1, 4, 8])
                tokens[i] = str(max(0, changed))
        elif change == 4:
            start = rng.randrange(len(tokens))
            tokens[at:at] = tokens[start : start + rng.randrange(1, 16)]
        else:
            other = rng.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        tokens = tokens or [""]
    header = "".join(tokens).encode(errors="surrogatepass")
    if rng.random() < 0.5:
        header += b" " * (-len(header) % 8)
    whole = bytearray(struct.pack("<Q", len(header)) + header + data)
    return damaged(rng, whole, rng.choice([0, 0, 0, 1, 2]))


def damaged(rng, whole, times):
    """Bytes with so many changes."""
    whole = bytearray(whole)
    for _ in range(times):
        at = rng.randrange(len(whole))
        change = rng.randrange(4)
        if change == 0:
            whole[at] = rng.randrange(256)
        elif change == 1:
            whole[at] ^= 1 << rng.randrange(8)
        elif change == 2:
            del whole[at : at + rng.choice([1, 2, len(whole)])]
        else:
            whole[at:at] = rng.randbytes(rng.randrange(1, 9))
        whole = whole or bytearray(1)
    return bytes(whole)


def others():
    """Files of other kinds: two archives, and an index with its file."""
    arrays = {"a": np.arange(6.0), "b": np.ones((2, 3), np.int8, "F"), "c": np.array(3)}
    archives = []
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, **arrays)
        archives.append(("mutant.npz", stream.getvalue()))
    places = json.dumps({"metadata": {}, "weight_map": {"a": "good.safetensors"}})
    return [*archives, ("mutant.safetensors.index.json", places.encode())]


OTHERS = others()


def judge_other(folder, rng):
    """What became of a file of another kind: it is read, or refused."""
    name, data = rng.choice(OTHERS)
    path = folder / name
    path.write_bytes(damaged(rng, data, rng.randrange(1, 4)))
    try:
        ours(path)
    except errors.WeightsError:
        return f"refused ({path.suffix})"
    except Exception as error:
        raise AssertionError(f"{name}: {path.read_bytes()!r}") from error
    return f"read ({path.suffix})"


def ours(path):
    """All that our reader reads."""
    with sources.open(path) as source:
        found = {}
        for name, stored in source.tensors.items():
            whole = source.read(name, [slice(None)] * len(stored.shape))
            found[name] = stored.shape, whole.tobytes()
        return source.metadata, found


def theirs(library, path, data):
    """All that the library reads."""
    with library.safe_open(path, "np") as opened:
        metadata = opened.metadata()
    return metadata, {
        name: (tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in library.deserialize(data)
    }


def has_twins(data):
    """Whether a key comes twice, of which the library keeps the last."""
    found = []

    def watch(pairs):
        found.append(len(dict(pairs)) < len(pairs))

    size = int.from_bytes(data[:8], "little")
    json.loads(data[8 : 8 + size], object_pairs_hook=watch)
    return any(found)


def judge(library, path, data):
    """What became of a file; raises if it isn't as it should be."""
    path.write_bytes(data)
    tracemalloc.start()
    refused, read = None, None
    try:
        read = ours(path)
    except errors.WeightsError as error:
        refused = error
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000 + 20 * len(data), peak
    try:
        expected = theirs(library, path, data)
    except library.SafetensorError:
        assert refused, "the library refuses it"
        return "refused by both"
    if refused:
        assert STRICTER.search(str(refused)) or has_twins(data), str(refused)
        return "refused by ours alone"
    assert read == expected, (read, expected)
    return "read by both"


def run(rounds, seed):
    """How many mutants had which end."""
    import safetensors

    rng = random.Random(seed)
    ends = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "mutant.safetensors"
        text, data = SEEDS[0]
        (path.parent / "good.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text.encode() + data
        )
        for _ in range(rounds):
            data = mutant(rng)
            try:
                ends[judge(safetensors, path, data)] += 1
            except Exception as error:
                raise AssertionError(f"{data!r}") from error
            ends[judge_other(path.parent, rng)] += 1
    return ends


def main():
    """Runs rounds and prints how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for end, count in sorted(run(options.rounds, options.seed).items()):
        print(f"{count:8} {end}")


if __name__ == "__main__":
    main()
