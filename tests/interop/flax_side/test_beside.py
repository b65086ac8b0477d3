"""Programs find beside ``flax.nnx`` what Flax has there."""

import importlib
import subprocess
import sys

import pytest

import graftree as nnx
from graftree.interop import flax_names

LISTED = [
    (path, entry.partition("=")[0])
    for path, files in flax_names.BESIDE.items()
    for names in files.values()
    for entry in names.split()
]
OURS = {"configurations", "metrics.tensorboard"}  # the latter needs TensorFlow there


def test_every_name_of_the_table_exists():
    assert len(LISTED) > 100
    assert not [
        (path, name)
        for path, name in LISTED
        if not hasattr(flax_names.beside(path), name)
    ]


@pytest.mark.peers
@pytest.mark.parametrize("path", sorted(flax_names.BESIDE.keys() - OURS))
def test_flax_has_the_same_names_there(path):
    pytest.importorskip("flax")
    module = importlib.import_module(f"flax.{path}")
    names = [name for where, name in LISTED if where == path]
    assert [name for name in names if not hasattr(module, name)] == []


def test_modules_are_always_the_same_and_not_registered():
    assert flax_names.beside("struct") is flax_names.beside("struct")
    assert "flax.struct" not in sys.modules or sys.modules["flax.struct"].__file__


def test_packages_have_what_is_below_them():
    core = flax_names.beside("core")
    assert core.meta is flax_names.beside("core.meta")
    assert core.FrozenDict is core.frozen_dict.FrozenDict
    assert core.__path__ == []
    assert flax_names.has_beside("training") and flax_names.has_beside("metrics")
    assert {"meta", "spmd", "freeze"} <= set(dir(core))


def test_errors_and_config_are_modules_of_this_package():
    assert flax_names.beside("errors") is nnx.errors
    assert flax_names.beside("config") is nnx.config
    assert flax_names.beside("configurations").config is nnx.config


def test_what_is_missing_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"flax\.linen.*no counterpart"):
        flax_names.beside("linen")
    with pytest.raises(AttributeError, match=r"flax\.struct has no attribute 'nope'"):
        flax_names.beside("struct").nope
    assert not flax_names.has_beside("linen") and not flax_names.has_beside("stru")


def test_nothing_is_loaded_before_it_is_used():
    program = """if True:
        import sys, graftree
        from graftree.interop import flax_names
        flax_names.beside("serialization"), flax_names.beside("metrics").tensorboard
        assert not [name for name in sys.modules if "flax_side" in name]
        flax_names.beside("serialization").to_bytes
        assert not {"msgpack", "optax", "tensorboardX", "flax"} & {*sys.modules}
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_flag_is_set_while_the_context_lasts():
    for name in ("return_frozendict", "flax_return_frozendict"):
        with nnx.config.temp_flip_flag(name, True):
            assert nnx.config.flax_return_frozendict
        assert not nnx.config.flax_return_frozendict
    with pytest.raises(AttributeError, match="no configuration flag 'flax_nope'"):
        with nnx.config.temp_flip_flag("nope", True):
            pass
