"""What was saved is there after a kill; `tests.stress.kills` kills more often."""

import pytest

from tests.stress import kills


@pytest.mark.parametrize(
    ("number", "seed"), [(2, 0), pytest.param(6, 1, marks=pytest.mark.long)]
)
def test_a_killed_save_loses_nothing_and_leaves_nothing_that_loads(number, seed):
    options = kills.read_options(["--kills", f"{number}", "--seed", f"{seed}"])
    _, expected = kills.run(options)
    assert expected.done["series"] and expected.done["single"]
