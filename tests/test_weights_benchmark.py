"""The benchmark of loading works, and all loaders load the same."""

import pytest

from benchmarks import libraries, weights
from graftree.weights import sources


@pytest.mark.long
def test_it_loads_a_small_checkpoint_in_all_layouts(tmp_path, capsys):
    # It compares what the loaders have loaded.
    options = ["--layers=1", "--width=64", "--turns=1", f"--folder={tmp_path}"]
    weights.main(options)
    printed = capsys.readouterr().out
    assert weights.LOADERS[0] == libraries.GRAFTREE
    for layout in weights.LAYOUTS:
        for files in ("one", "several"):
            assert f"| {layout} | {files} | Graftree |" in printed


def test_the_checkpoint_is_of_mixed_dtypes_in_one_file_or_several(tmp_path):
    class Options:
        layers, width = 1, 32

    found = []
    for kind in ("one", "several"):
        weights.write(tmp_path / kind, Options)
        with sources.open(tmp_path / kind) as source:
            found.append(dict(source.tensors))
    assert found[0] == found[1]
    assert {x.dtype.name for x in found[0].values()} == {"bfloat16", "float32"}
    assert len([*(tmp_path / "several").glob("*.safetensors")]) > 1
