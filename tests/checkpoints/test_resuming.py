"""A run that goes on is the run that was never interrupted, bit by bit."""

import itertools
import random

import jax
import pytest

from graftree import checkpoints
from tests.stress import resumes, trainings

MESHES = ["2x4", pytest.param("1x1", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def step():
    return trainings.make_step()


def train(steps, step, made, data, mesh):
    """The losses of some steps, bit by bit."""
    batches = (trainings.next_batch(data, mesh) for _ in range(steps))
    return [float(step(made, *batch)).hex() for batch in batches]


@pytest.mark.parametrize("name", MESHES)
def test_resumed_run_is_the_unbroken_one_bit_by_bit(tmp_path, step, name):
    mesh = trainings.make_mesh(name)
    with jax.set_mesh(mesh):
        made, data = trainings.make_objects(16), trainings.make_data()
        with checkpoints.Checkpoints(tmp_path) as kept:
            first = train(2, step, made, data, mesh)
            kept.save(1, **made, **data)
            # The arrays that are being saved are donated, and the data goes on.
            rest = train(2, step, made, data, mesh)
        end = trainings.digest(made, data)

        made, data = trainings.make_objects(16), trainings.make_data()
        assert train(1, step, made, data, mesh) == first[:1]
        with checkpoints.Checkpoints(tmp_path) as kept:
            assert kept.restore_latest(**made, **data) == 1
        assert train(2, step, made, data, mesh) == rest
        assert trainings.digest(made, data) == end


@pytest.mark.long
def test_a_run_goes_on_over_other_devices(tmp_path, step):
    losses = []
    with checkpoints.Checkpoints(tmp_path) as kept:
        for name, number in zip(["1x8", "2x4", "1x1"], itertools.count()):
            mesh = trainings.make_mesh(name)
            with jax.set_mesh(mesh):
                made, data = trainings.make_objects(16), trainings.make_data()
                kept.restore_latest(**made, **data)
                losses += train(1, step, made, data, mesh)
                kept.save(number, **made, **data)
    mesh = trainings.make_mesh("1x1")
    with jax.set_mesh(mesh):
        made, data = trainings.make_objects(16), trainings.make_data()
        unbroken = train(3, step, made, data, mesh)
    found, expected = ([*map(float.fromhex, x)] for x in (losses, unbroken))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_killed_processes_go_on_bit_by_bit(tmp_path):
    options = resumes.read_options(["--kills", "2"])
    tally = resumes.break_often("2x4/2", tmp_path, options, random.Random(1))
    assert tally.kills + tally.stops == 2 and tally.losses > 0
