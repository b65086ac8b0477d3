"""``python -m graftree.weights convert``, with a stand-in for PyTorch.

With PyTorch itself it was tried by hand: it is too large to be installed for this.
"""

import importlib.util
import os
import runpy
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables

# `load` gives what the file names, behind the two bytes of a pickle.
TORCH = """
import os
import numpy as np

strided, uint8 = "torch.strided", np.uint8

class Tensor:
    def __init__(self, array, dtype=None, layout=strided):
        self.array, self.layout, self.shape = array, layout, array.shape
        self.dtype = f"torch.{dtype or array.dtype}"
    def detach(self):
        return self
    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array))
    def reshape(self, *shape):
        return Tensor(self.array.reshape(shape))
    def view(self, dtype):
        return Tensor(self.array.view(dtype))
    def numpy(self):
        return self.array

class Deadly(Tensor):
    def contiguous(self):
        os._exit(7)

def refuse():
    raise ValueError("no\\nWeightsUnpickler error: a class. Set weights_only=False\\n")

shared = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3).T)
half = Tensor(np.array([0x3F80, 0x4000], np.uint16), "bfloat16")
plain = {"a": shared, "tied": shared, "b": half, "epoch": 1}
plain["n"] = Tensor(np.array(3, np.int32))
CASES = {
    "plain": lambda: plain,
    "nested": lambda: {"epoch": 1, "model": {"state_dict": plain}},
    "one": lambda: shared,
    "odd": lambda: {"x": Tensor(np.ones(2), "qint8")},
    "sparse": lambda: {"x": Tensor(np.ones(2), layout="torch.sparse_coo")},
    "refused": refuse,
    "crash": lambda: os._exit(7),
    "later": lambda: {"a": shared, "x": Deadly(np.ones(2))},
}

def load(path, *, map_location, mmap, weights_only):
    assert weights_only and map_location == "cpu" and not mmap
    with open(path, "rb") as file:
        return CASES[file.read()[2:].decode()]()
"""
TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "tied": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "b": np.array([1, 2], jnp.bfloat16),
    "n": np.array(3, np.int32),
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Converts the file of a case as the command does; returns what it printed."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(tmp_path / "torch")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "torch"))

    def run(case, *options):
        file = tmp_path / f"{case}.pt"
        file.write_bytes(b"\x80\x02" + case.encode())
        monkeypatch.setattr(sys, "argv", ["weights", "convert", str(file), *options])
        runpy.run_module("graftree.weights", run_name="__main__")
        return capsys.readouterr().out

    return run


@tables.cases("case, options", ("plain", []), ("nested", ["--key", "model.state_dict"]))
def test_tensors_come_through_bit_by_bit(run, tmp_path, case, options):
    assert "4 tensors, 56 bytes\nleft out: epoch: int\n" in run(case, *options)
    model = nnx.Dict({k: nnx.Param(jnp.zeros_like(x)) for k, x in TENSORS.items()})
    table = {name: name for name in TENSORS}
    nnx.weights.load(tmp_path / f"{case}.safetensors", model, table)
    for name, array in TENSORS.items():
        assert np.asarray(model[name][...]).tobytes() == array.tobytes()


@tables.cases(
    "case, options, message",
    ("nested", [], "no tensors by name\n  epoch: int\n  model: dict of 1\n.*--key"),
    ("nested", ["--key", "model.x"], "no tensors by name\n  model.x: NoneType"),
    ("one", [], "no tensors by name\n  the file: Tensor"),
    ("odd", [], "tensor 'x': dtype or layout qint8, which safetensors lacks"),
    ("sparse", [], "tensor 'x': dtype or layout sparse_coo"),
    ("refused", [], r"ValueError: WeightsUnpickler error: a class\n.*state_dict\(\)"),
    ("crash", [], "PyTorch ended with the status 7"),
    ("later", [], "tensor 'x': PyTorch ended with the status 7"),
    ("plain", ["old.safetensors"], "it exists\n.*--overwrite"),
    ("plain", ["new.bin"], "no .safetensors file"),
)
def test_what_fails_says_why_and_writes_nothing(
    run, tmp_path, monkeypatch, case, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.safetensors").write_text("old")
    with pytest.raises(SystemExit, match=message):
        run(case, *options)
    left = {*os.listdir(tmp_path)} - {"torch", f"{case}.pt"}
    assert left == {"old.safetensors"}
    assert (tmp_path / "old.safetensors").read_text() == "old"


def test_what_is_there_is_replaced_if_asked(run, tmp_path):
    (tmp_path / "plain.safetensors").write_text("old")
    assert "4 tensors" in run("plain", "--overwrite")


def test_other_files_are_named(run, tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    monkeypatch.setattr(sys, "argv", ["weights", "convert", str(file)])
    with pytest.raises(SystemExit, match="a GGUF file"):
        runpy.run_module("graftree.weights", run_name="__main__")


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="PyTorch is installed"
)
def test_without_pytorch_the_way_to_it_is_said(run, tmp_path, monkeypatch):
    (tmp_path / "torch" / "torch.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(SystemExit, match="not installed\npip install torch"):
        run("plain")
