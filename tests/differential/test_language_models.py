"""The model of ``examples/lm`` trains like the program that one writes by hand."""

import dataclasses
import functools
import importlib.util

import jax
import numpy as np
import pytest

from benchmarks import language_model_rows, libraries
from benchmarks.language_models import Setting
from examples.lm.model import Config

CONFIG = Config(vocabulary=64, layers=1, width=32, heads=4, kv_heads=2, hidden=48)
ONE_DEVICE, DIVIDED = "one device, unrolled", "fsdp=8, a Stack"
LAYOUTS = {
    ONE_DEVICE: (CONFIG, ()),
    DIVIDED: (dataclasses.replace(CONFIG, stacked=True), (("fsdp", 8),)),
}
in_all_layouts = pytest.mark.parametrize(
    "layout", [ONE_DEVICE, pytest.param(DIVIDED, marks=pytest.mark.long)]
)


@functools.cache
def five_steps(library, layout):
    """The losses of five steps, and the bytes of temporaries in one."""
    setting = Setting(*LAYOUTS[layout], batch=8, length=16)
    # The program by hand broadcasts, as one does where it is allowed.
    with jax.numpy_rank_promotion("allow"):
        step = language_model_rows.new_step(library, setting)
        compiled = step.lower().compile()
        losses = [float(step()) for _ in range(5)]
    return losses, compiled.memory_analysis().temp_size_in_bytes


def of_both(peer, layout):
    """What `five_steps` gives for our model and for another: losses, then bytes."""
    return zip(
        *(five_steps(x, layout) for x in (libraries.GRAFTREE, peer)), strict=True
    )


@in_all_layouts
def test_losses_are_those_of_the_program_by_hand(layout):
    (ours, by_hand), _ = of_both(libraries.RAW, layout)
    np.testing.assert_allclose(ours, by_hand, rtol=0, atol=1e-6)
    assert ours[0] > ours[-1]


# On one device: divided, with the few optimizations of tests, they are further apart.
def test_temporaries_are_at_most_a_hundredth_more_than_by_hand():
    _, (ours, by_hand) = of_both(libraries.RAW, ONE_DEVICE)
    assert 0 < ours <= 1.01 * by_hand


@pytest.mark.long
@pytest.mark.peers
@pytest.mark.skipif(not importlib.util.find_spec("flax"), reason="compares with Flax")
@in_all_layouts
def test_losses_are_those_of_flax(layout):
    (ours, flax), _ = of_both(libraries.FLAX, layout)
    np.testing.assert_allclose(ours, flax, rtol=0, atol=1e-6)
