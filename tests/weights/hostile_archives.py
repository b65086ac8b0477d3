"""Archives of NumPy that are damaged or mislead, with what their error must say."""

import io
import zipfile

import numpy as np


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
FILES = {
    "no array inside": (b"hello, hello, hello", "'a': ValueError"),
    "a pickle": (npy(np.array([print], object)), "dtype object, which is no number"),
    "text": (npy(np.array(["x"])), "which is no number"),
    "dates": (npy(np.array(["2020"], "M8[Y]")), "dtype datetime64.* no number"),
    "rows with fields": (npy(np.zeros(2, "f4,i4")), "which is no number"),
    "bfloat16": (npy(np.zeros(2, "V2")), "bfloat16 and float8 so, and loses which"),
    "a shape larger than the data": (
        npy(SIX, b"(6,), }  ", b"(60,), } "),
        r"float32\[60\] has 240 bytes, and the file has 24",
    ),
    "a shape by a sum": (npy(SIX, b"(6,), }       ", b"(1+5,), }"), "'a': Value"),
    "a negative shape": (npy(SIX, b"(6,), } ", b"(-6,), }"), r"the shape \[-6\]"),
    "a program as a header": (npy(SIX, b"'<f4'", b"f()"), "'a': ValueError"),
    "an unknown version": (ARRAY.replace(b"NUMPY\x01", b"NUMPY\x09"), "version"),
    "data that is cut off": (ARRAY[:-4], "and the file has 20 for"),
}

ARCHIVES = {
    "no zip": (b"x" * 100, "BadZipFile"),
    "nothing": (b"", "BadZipFile"),
    "a zip that is cut off": (PAIR[:-30], "BadZipFile"),
    "its beginning is missing": (PAIR[200:], "tensor 'a': "),
    "no array": (archive(("a.txt", b"x")), "is no array"),
    "a name twice": (PAIR.replace(b"b.npy", b"a.npy"), "'a': is there twice"),
    "a compressed one, damaged": (ZIPPED[:60].ljust(64, b"\0") + ZIPPED[64:], "'a': "),
    **{name: (archive(("a.npy", data)), text) for name, (data, text) in FILES.items()},
}
