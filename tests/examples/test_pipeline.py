"""The pipeline computes what the model does without it; each stage has a part."""

import numpy as np
import pytest

import graftree as nnx
from examples.lm import hlo
from examples.lm.model import Config
from examples.pipeline import __main__ as command
from examples.pipeline import pipeline, training

CONFIG = Config(vocabulary=16, layers=4, width=8, heads=2, kv_heads=1, hidden=16)
STAGES, MICRO_BATCHES = 2, 3
TOKENS = np.random.default_rng(0).integers(16, size=(6, 9)).astype("int32")


@pytest.fixture(scope="module")
def layout():
    return training.layout_of(STAGES)


@pytest.fixture(scope="module")
def objects(layout):
    return training.make(CONFIG, layout)


def test_loss_and_gradients_are_those_of_the_model_without_a_pipeline(layout, objects):
    with layout.in_force():
        call = training.loss_and_gradients
        loss, gradients = call(objects[0], TOKENS, layout.mesh, MICRO_BATCHES)
        expected, expected_gradients = call(objects[0], TOKENS)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert training.largest_difference(gradients, expected_gradients) < 1e-5


def test_each_stage_has_its_layers_only(objects):
    for row in nnx.sharding.report(objects).rows:
        if "blocks" in row.path:
            assert row.local_shape == (2, *row.shape[1:]), row.path


def test_each_turn_sends_once_and_training_learns(layout, objects):
    with layout.in_force():
        step = training.train_step.lower(*objects, TOKENS, layout.mesh, MICRO_BATCHES)
        compiled = step.compile()
        losses = [compiled(*objects, TOKENS) for _ in range(5)]
    assert losses[-1] < losses[0]
    turns = pipeline.turns(STAGES, MICRO_BATCHES)
    sent = hlo.collectives(compiled.as_text())["collective-permute"]
    assert sent.count >= 2 * turns  # forward, and backward


def test_the_bubble_is_what_gpipe_says():
    assert pipeline.bubble_fraction(4, 4) == 3 / 7
    assert pipeline.bubble_fraction(1, 4) == 0.0


def test_what_does_not_come_out_even_is_refused(layout, objects, capsys):
    x = np.zeros((6, 8, 8), "float32")
    with pytest.raises(ValueError, match="6 rows in 4 micro-batches"):
        pipeline.apply(objects[0].blocks, x, layout.mesh, 4)
    for wrong in (["--layers=3"], ["--batch=3"], ["--steps=0"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
    assert "can't share 3 layers" in capsys.readouterr().err
