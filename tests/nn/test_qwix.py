"""Models quantized by qwix, to which this library is ``flax.nnx`` (issue 12, 16)."""

import importlib.util

import pytest

from tests import interpreters, tables

pytestmark = [
    pytest.mark.peers,
    pytest.mark.long,
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

KINDS = {
    "qt": (qwix.QtProvider, qwix.QtRule),
    "ptq": (qwix.PtqProvider, qwix.QuantizationRule),
}
LAYERS = {
    "Linear": lambda rngs: nnx.Linear(64, 8, rngs=rngs),
    "Einsum": lambda rngs: nnx.Einsum("abc,cd->abd", (64, 8), rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(64, 8, 3, rngs=rngs),
    "RNN": lambda rngs: nnx.RNN(nnx.GRUCell(64, 8, rngs=rngs), rngs=True),
}
x = jax.random.normal(jax.random.key(0), (2, 8, 64))
for kind, first in (argument.split(":") for argument in sys.argv[1:]):
    provider, rule = KINDS[kind]
    rules = [rule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
    for name, make in LAYERS.items():
        if (kind, name) == ("ptq", "RNN"):
            continue  # it would replace a Param within the loop
        model = Net(make(nnx.Rngs(0)))
        if first == "plain":
            plain = model(x)
        quantized = qwix.quantize_model(model, provider(rules), x)
        y = quantized(x)
        if first == "quantized":
            plain = model(x)
        other = nnx.jit(lambda model, x: Net.__call__(model, x))(model, x)
        np.testing.assert_allclose(plain, other, rtol=1e-5, atol=1e-5)
        error = float(abs(y - plain).max())
        assert 1e-5 < error < 0.1, (name, error)
        np.testing.assert_array_equal(model(x), plain)
"""


@tables.cases(
    "runs",
    ["qt:quantized", "ptq:plain"],
    pytest.param(["ptq:quantized", "qt:plain"], marks=pytest.mark.long),
)
def test_only_the_quantized_model_is_quantized(runs):
    interpreters.printed("-c", PROGRAM, *runs)
