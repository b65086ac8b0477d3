"""The benchmark of loading works, and all loaders load the same."""

import types

import pytest
import safetensors

from benchmarks import libraries, weights


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
    options = types.SimpleNamespace(layers=1, width=32)
    found = []
    for kind in ("one", "several"):
        weights.write(tmp_path / kind, options)
        forms_of = {}
        for file in (tmp_path / kind).glob("*.safetensors"):
            with safetensors.safe_open(file, "np") as opened:
                names = opened.keys()
                slices = [opened.get_slice(name) for name in names]
            forms = [(x.get_dtype(), x.get_shape()) for x in slices]
            forms_of |= zip(names, forms, strict=True)
        found.append(forms_of)
    assert found[0] == found[1]
    assert {dtype for dtype, _ in found[0].values()} == {"BF16", "F32"}
    assert len([*(tmp_path / "several").glob("*.safetensors")]) > 1
