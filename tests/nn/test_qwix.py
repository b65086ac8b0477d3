"""Models quantized by qwix, to which this library is ``flax.nnx`` (issue 12, 16)."""

import importlib.util
import subprocess
import sys

import pytest

from tests import sources

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not importlib.util.find_spec("qwix"), reason="needs qwix"),
]

PROGRAM = """
import sys
from graftree import dropin
from tests import compiled_programs

dropin.install()
compiled_programs.keep_in_whole_files()
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
assert nnx.Module.__module__.startswith("graftree.")
import qwix

class Net(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, *inputs):
        return self.layer(*inputs)

provider, rule = {
    "qt": (qwix.QtProvider, qwix.QtRule),
    "ptq": (qwix.PtqProvider, qwix.QuantizationRule),
}[sys.argv[1]]
x = jax.random.normal(jax.random.key(0), (2, 8, 64))
layers = {
    "Linear": lambda rngs: nnx.Linear(64, 8, rngs=rngs),
    "Einsum": lambda rngs: nnx.Einsum("abc,cd->abd", (64, 8), rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(64, 8, 3, rngs=rngs),
    "RNN": lambda rngs: nnx.RNN(nnx.GRUCell(64, 8, rngs=rngs), rngs=True),
}
if sys.argv[1] == "ptq":
    del layers["RNN"]  # it would replace a Param within the loop
for name, make in layers.items():
    model = Net(make(nnx.Rngs(0)))
    if sys.argv[2] == "plain first":
        plain = model(x)
    rules = [rule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
    quantized = qwix.quantize_model(model, provider(rules), x)
    y = quantized(x)
    if sys.argv[2] == "quantized first":
        plain = model(x)
    other = nnx.jit(lambda model, x: Net.__call__(model, x))(model, x)
    np.testing.assert_allclose(plain, other, rtol=1e-5, atol=1e-5)
    error = float(abs(y - plain).max())
    assert 1e-5 < error < 0.1, (name, error)
    np.testing.assert_array_equal(model(x), plain)
"""


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("qt", "quantized first"),
        pytest.param("qt", "plain first", marks=pytest.mark.long),
        pytest.param("ptq", "quantized first", marks=pytest.mark.long),
        ("ptq", "plain first"),
    ],
)
def test_only_the_quantized_model_is_quantized(kind, first):
    command = [sys.executable, "-c", PROGRAM, kind, first]
    completed = subprocess.run(
        command, capture_output=True, text=True, cwd=sources.ROOT
    )
    assert completed.returncode == 0, completed.stderr
