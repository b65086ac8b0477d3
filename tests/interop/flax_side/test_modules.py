"""The modules beside ``flax.nnx`` have the names of Flax and do what those do.

Uses `graftree.interop` itself: where Flax is installed, programs get these modules from
``graftree.dropin`` alone, in a process of their own.
"""

import functools
import importlib
import itertools
import sys
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.interop import flax_names, name_tables
from graftree.interop.flax_side import state_dicts
from tests.interop.flax_side import cases

serialization = flax_names.beside("serialization")
jax_utils = flax_names.beside("jax_utils")

LISTED = [
    (path, entry.partition("=")[0])
    for path, files in name_tables.BESIDE.items()
    for names in files.values()
    for entry in names.split()
]
OURS = {"configurations", "metrics.tensorboard"}  # the latter needs TensorFlow there


# ------------------------------------------------------------------------------- names


def test_every_name_of_the_table_exists():
    assert len(LISTED) > 70
    assert [x for x in LISTED if not hasattr(flax_names.beside(x[0]), x[1])] == []


@pytest.mark.peers
@pytest.mark.parametrize("path", sorted(name_tables.BESIDE.keys() - OURS))
def test_flax_has_the_same_names_there(path):
    pytest.importorskip("flax")
    module = importlib.import_module(f"flax.{path}")
    names = [name for where, name in LISTED if where == path]
    assert [name for name in names if not hasattr(module, name)] == []


def test_modules_are_always_the_same_and_packages_have_what_is_below_them():
    assert flax_names.beside("struct") is flax_names.beside("struct")
    # They are not registered.
    assert "flax.struct" not in sys.modules or sys.modules["flax.struct"].__file__
    core = flax_names.beside("core")
    assert core.spmd is flax_names.beside("core.spmd")
    assert core.FrozenDict is core.frozen_dict.FrozenDict and core.__path__ == []
    assert flax_names.has_beside("training") and flax_names.has_beside("metrics")
    assert {"frozen_dict", "spmd", "freeze"} <= set(dir(core))
    assert flax_names.beside("errors") is nnx.errors
    assert flax_names.beside("config") is nnx.config
    assert flax_names.beside("configurations").config is nnx.config


def test_what_is_missing_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"flax\.linen.*no counterpart"):
        flax_names.beside("linen")
    with pytest.raises(AttributeError, match=r"flax\.struct has no attribute 'nope'"):
        flax_names.beside("struct").nope
    assert not flax_names.has_beside("linen") and not flax_names.has_beside("stru")


def test_a_flag_is_set_while_the_context_lasts():
    for name in ("return_frozendict", "flax_return_frozendict"):
        with nnx.config.temp_flip_flag(name, True):
            assert nnx.config.flax_return_frozendict
        assert not nnx.config.flax_return_frozendict
    with pytest.raises(AttributeError, match="no configuration flag 'flax_nope'"):
        with nnx.config.temp_flip_flag("nope", True):
            pass


# ----------------------------------------------------------------------- call by call


def namespace(module_of):
    """The modules by name, as attributes of attributes."""
    root = types.SimpleNamespace(training=types.SimpleNamespace())
    for path in cases.PATHS:
        parent, _, name = path.rpartition(".")
        if parent != "core":
            setattr(getattr(root, parent) if parent else root, name, module_of(path))
    return root


def text(value):
    """What two results are compared by; of an error its built-in type."""
    if isinstance(value, Exception):
        return next(cls for cls in type(value).__mro__ if cls.__module__ == "builtins")
    if isinstance(value, (list, tuple)):
        return [text(one) for one in value]
    if isinstance(value, dict):
        return {key: text(one) for key, one in value.items()}
    return repr(value).replace("_EmptyNode", "EmptyNode")


def test_there_are_groups():
    assert len(cases.GROUPS) == 9


@pytest.mark.peers
@pytest.mark.parametrize("group", cases.GROUPS, ids=lambda group: group.__name__)
def test_results_are_those_of_flax(group):
    pytest.importorskip("flax")
    theirs = group(namespace(lambda path: importlib.import_module(f"flax.{path}")))
    ours = group(namespace(flax_names.beside))
    different = {
        name: (text(ours[name]), text(theirs[name]))
        for name in theirs
        if text(ours[name]) != text(theirs[name])
    }
    assert different == {} and len(theirs) > 5


# ------------------------------------------------------------------- states and bytes


def test_what_has_no_state_dict_or_does_not_fit_one_is_told_with_its_path():
    with pytest.raises(ValueError, match="same as strings"):
        serialization.to_state_dict({1: 0, "1": 0})
    with pytest.raises(ValueError, match=r"Expected a dict at path \./a .* got int"):
        serialization.from_state_dict({"a": {"b": 1}}, {"a": 3})
    with pytest.raises(ValueError, match="size of the list"):
        serialization.from_state_dict({"a": [1]}, {"a": {}})
    assert serialization.current_path() == ""
    with pytest.raises(TypeError, match="made from a class, got 3"):
        flax_names.beside("struct").dataclass(3)


TREES = np.arange(9), {"a": np.arange(12).reshape(3, 4), "b": [np.ones(9, "f4")]}


@pytest.mark.peers
@pytest.mark.parametrize("tree", TREES)
def test_large_arrays_are_in_the_same_pieces(monkeypatch, tree):
    peer = pytest.importorskip("flax.serialization")
    for module in (peer, state_dicts):
        monkeypatch.setattr(module, "MAX_CHUNK_SIZE", 16)
    data = serialization.msgpack_serialize(tree)
    assert data == peer.msgpack_serialize(tree)
    restored = serialization.msgpack_restore(data)
    equal = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(equal, restored, tree)


def test_in_place_leaves_the_tree_as_it_is():
    tree = {"a": jnp.ones(2)}
    serialization.msgpack_serialize(tree, in_place=True)
    assert isinstance(tree["a"], jax.Array)


@pytest.mark.parametrize("dtype", ["<U3", "S2", [("x", "i4")]])
def test_dtypes_that_could_not_be_read_back_are_refused(dtype):
    with pytest.raises(ValueError, match="not supported for serialization"):
        serialization.to_bytes({"a": np.zeros(2, dtype)})


def test_without_msgpack_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match="pip install msgpack"):
        serialization.to_bytes({})


def test_a_state_goes_to_bytes_and_back():
    state = nnx.state(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu))
    zeros = jax.tree.map(jnp.zeros_like, state)
    restored = serialization.from_bytes(zeros, serialization.to_bytes(state))
    assert isinstance(restored["layers"][0]["kernel"], nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_what_a_state_lacks_is_named_by_its_path():
    state = nnx.State({"a": {"b": nnx.Param(jnp.ones(1))}})
    with pytest.raises(ValueError, match=r"\{'b'\}.*at path \./a"):
        serialization.from_bytes(state, serialization.to_bytes({"a": {}}))


# ------------------------------------------------------------------------- on devices


def test_lists_are_batches_too_and_each_comes_once():
    batches = [np.full(2, i) for i in range(3)]
    found = jax_utils.prefetch_to_device(batches, 2, jax.devices()[:2])
    assert [int(batch[0]) for batch in itertools.islice(found, 5)] == [0, 1, 2]
    with pytest.raises(ValueError, match="size=0"):
        jax_utils.prefetch_to_device([], 0)


# --------------------------------------------------------------------- summary writers

PACKAGES = ("tensorboardX", "torch.utils.tensorboard", "torch", "tensorflow")


@pytest.fixture
def install(monkeypatch):
    """Installs one of the packages that write logs; without the call none is there."""
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)

    def install(name, **content):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))

    return install


def new_writer(**options):
    return flax_names.beside("metrics.tensorboard").SummaryWriter("logs", **options)


@pytest.fixture
def calls(install):
    """The calls that tensorboardX gets."""
    noted = []

    class Recorder:
        def __init__(self, log_dir):
            noted.append(("open", log_dir))

        def __getattr__(self, name):
            return lambda *args, **kwargs: noted.append((name, *args, kwargs))

    install("tensorboardX", SummaryWriter=Recorder)
    return noted


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3), (6, 4, 5, 3)])
def test_images_are_batches_of_at_most_max_outputs(calls, shape):
    images = np.zeros(shape, np.int32)
    new_writer(auto_flush=False).image("input", images, 1, max_outputs=2)
    name, _, pixels, step, options = calls[-1]
    count = min(2, shape[0] if len(shape) == 4 else 1)
    assert (name, step, pixels.shape) == ("add_images", 1, (count, 4, 5, 3))
    assert pixels.dtype == np.uint8 and options == {"dataformats": "NHWC"}


def test_scalars_text_histograms_and_settings(calls):
    writer = new_writer(auto_flush=False)
    writer.scalar("loss", jnp.array([0.5]), 3)
    writer.text("note", "hello", 1)
    writer.histogram("weights", np.ones((2, 2)), 2, bins=4)
    writer.hparams({"rate": 0.1, "depth": 2})
    opened, scalar, text, histogram, settings = calls
    assert (opened, scalar) == (("open", "logs"), ("add_scalar", "loss", 0.5, 3, {}))
    assert text == ("add_text", "note", "hello", 1, {})
    assert histogram[3:] == (2, {"bins": 4}) and histogram[2].shape == (4,)
    assert settings[2] == "depth: 2  \nrate: 0.1"
    with pytest.raises(ValueError, match=r"got the shape \(3,\)"):
        writer.image("input", np.zeros(3), 1)


def test_each_call_is_flushed_by_default(calls):
    writer = new_writer()
    writer.scalar("loss", 1.0, 1)
    writer.close()
    assert [call[0] for call in calls[2:]] == ["flush", "close"]


def test_tensorflow_is_used_if_it_is_all_there_is(install):
    summary = unittest.mock.MagicMock()
    install("tensorflow", summary=summary)
    new_writer().scalar("loss", 0.5, 3)
    summary.create_file_writer.assert_called_once_with("logs")
    summary.scalar.assert_called_once_with("loss", 0.5, step=3)


def test_without_any_package_the_error_names_them(install):
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        new_writer()
