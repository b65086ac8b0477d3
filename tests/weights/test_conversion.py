"""``python -m graftree.weights convert``, with a stand-in for PyTorch.

With PyTorch itself it was tried by hand: it is too large to be installed for this.
"""

import importlib.util
import multiprocessing
import os
import re
import runpy
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables

# `load` gives what the file names, behind the two bytes of a pickle.
TORCH = """
import os
import numpy as np

class Tensor:
    def __init__(self, array, dtype=None):
        self.array, self.shape = array, array.shape
        self.dtype = f"torch.{dtype or array.dtype}"
    def __getitem__(self, index):
        return Tensor(self.array[index], self.dtype[6:])
    def detach(self):
        return self
    def cpu(self):
        return self
    def float(self):
        return Tensor((self.array.astype(np.uint32) << 16).view(np.float32))
    def numpy(self):
        return self.array

class Deadly(Tensor):
    def __getitem__(self, index):
        return self
    def numpy(self):
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
    "refused": refuse,
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


class Here:
    """Stands for another process, and is this one."""

    def __init__(self, target, args):
        self.target, self.args, self.exitcode = target, args, 0

    def start(self):
        try:
            self.target(*self.args)
        except SystemExit as ended:
            print(ended.code, file=sys.stderr)
            self.exitcode = 1

    def join(self):
        sys.modules.pop("torch")


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Converts the file of a case as the command does; returns its status and text.

    Only some are read in another process, as all are: to start one takes seconds.
    """
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(tmp_path / "torch")
    path = [str(tmp_path / "torch"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def run(case, *options):
        file = tmp_path / f"{case}.pt"
        file.write_bytes(b"\x80\x02" + case.encode())
        monkeypatch.setattr(sys, "argv", ["weights", "convert", str(file), *options])
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            if case not in ("plain", "later"):
                here = types.SimpleNamespace(Process=Here)
                patch.setattr(multiprocessing, "get_context", lambda _: here)
            runpy.run_module("graftree.weights", run_name="__main__")
        status = ended.value.code
        printed = capfd.readouterr()
        return status, f"{printed.out}{printed.err}{status}"

    return run


@tables.cases("case, options", ("plain", []), ("nested", ["--key", "model.state_dict"]))
def test_tensors_come_through_bit_by_bit(run, tmp_path, case, options):
    (tmp_path / f"{case}.safetensors").write_text("old")  # is replaced if asked
    status, said = run(case, "--overwrite", *options)
    assert status == 0 and "4 tensors\nleft out: epoch: int\n" in said
    model = nnx.Dict({k: nnx.Param(jnp.zeros_like(x)) for k, x in TENSORS.items()})
    table = {name: name for name in TENSORS}
    nnx.weights.load(tmp_path / f"{case}.safetensors", model, table)
    for name, array in TENSORS.items():
        assert np.asarray(model[name][...]).tobytes() == array.tobytes()


@tables.cases(
    "case, options, message",
    ("nested", [], "no tensors by name\n  epoch: int\n  model: dict of 1\n.*--key"),
    ("nested", ["--key", "model.x"], "model.x is not a dict .* NoneType"),
    ("one", [], "it is not a dict of tensors, .* Tensor"),
    ("odd", [], r"'x': Tensor torch.qint8\[2\]"),
    ("refused", [], r"ValueError: WeightsUnpickler error: a class\n.*\n.*state_dict\("),
    ("later", [], "PyTorch exited with status 7, and nothing was written"),
    ("plain", ["{}/old.safetensors"], "it exists\n.*--overwrite"),
    ("plain", ["{}/new.bin"], "no .safetensors file"),
)
def test_what_fails_says_why_and_writes_nothing(run, tmp_path, case, options, message):
    (tmp_path / "old.safetensors").write_text("old")
    status, said = run(case, *[option.format(tmp_path) for option in options])
    assert status and re.search(message, said)
    left = {*os.listdir(tmp_path)} - {"torch", f"{case}.pt"}
    assert left == {"old.safetensors"}
    assert (tmp_path / "old.safetensors").read_text() == "old"


def test_help_is_plain_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["weights", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("graftree.weights", run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "usage: python -m graftree.weights" in printed and "`" not in printed


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
    assert "not installed\npip install torch" in run("plain")[1]
