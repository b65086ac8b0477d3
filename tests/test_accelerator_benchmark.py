"""The program for accelerators works, and counts as its docstring says."""

import jax
import pytest

import graftree as nnx
from benchmarks import accelerator, libraries
from examples.lm import train


@pytest.mark.long
def test_it_trains_and_decodes_with_small_sizes(capsys):
    # The programs by hand broadcast, as one does where it is allowed.
    with jax.numpy_rank_promotion("allow"):
        accelerator.main(["--tiny", "--peak", "1e12"])
    printed = capsys.readouterr().out
    for part in ("train step", "decode step", "% of peak", "peak 1e+12/s"):
        assert part in printed
    for library in (libraries.RAW, *libraries.installed(libraries.GRAFTREE)):
        assert printed.count(f"  {library}  ") == 2


def test_the_model_has_the_parameters_of_gpt_2_small():
    config = accelerator.GPT2_SMALL.config

    def make():
        return train.LanguageModel(config, rngs=nnx.Rngs(0))

    with nnx.use_eager_sharding(False):
        params = nnx.state(nnx.eval_shape(make), nnx.Param)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert count == accelerator.num_parameters(config)
    assert count == pytest.approx(124e6, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12), ("cpu", None)],
)
def test_peaks_are_known_by_kind(kind, peak):
    assert accelerator.peak_of(kind) == peak
