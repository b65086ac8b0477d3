"""The corpus of files that must be refused, laid out on disk.

``python -m tests.weights.hostile`` prints what each of them says.
"""

import os
import pathlib
import sys
import tempfile

from graftree import errors
from graftree.weights import sources
from tests.weights.hostile_archives import ARCHIVES
from tests.weights.hostile_files import FILES, GOOD
from tests.weights.hostile_folders import FOLDERS


def lay(folder, content):
    """Makes the folder."""
    folder.mkdir()
    (folder.parent / "outside.safetensors").write_bytes(GOOD)
    for name, data in content.items():
        if data is None:
            os.mkfifo(folder / name)
        elif isinstance(data, pathlib.Path):
            (folder / name).symlink_to(data)
        else:
            (folder / name).write_bytes(data)
    return folder


def lay_all(folder):
    """Makes all of the corpus: its path by name, with what the error must say."""
    found = {}
    for i, (name, (data, text)) in enumerate(FILES.items()):
        path = folder / f"{i}.safetensors"
        path.write_bytes(data)
        found[name] = path, text
    for i, (name, (data, text)) in enumerate(ARCHIVES.items()):
        path = folder / f"{i}.npz"
        path.write_bytes(data)
        found[f"npz: {name}"] = path, text
    for i, (name, (content, text)) in enumerate(FOLDERS.items()):
        (folder / f"{i}").mkdir()
        found[f"folder: {name}"] = lay(folder / f"{i}" / "model", content), text
    return found


def main():
    """Prints what each says."""
    with tempfile.TemporaryDirectory() as name:
        corpus = lay_all(pathlib.Path(name))
        for what, (path, _) in corpus.items():
            try:
                sources.open(path).close()
            except errors.WeightsError as error:
                print(f"{what}\n    " + str(error).replace("\n", "\n    "))
            else:
                sys.exit(f"{what}: it is read")
    print(len(corpus), "refused")


if __name__ == "__main__":
    main()
