"""Random damage, in some hundred rounds; `tests.stress.weights_fuzz` has more."""

import pytest

from tests.stress import weights_fuzz


@pytest.mark.parametrize("rounds", [300, pytest.param(30_000, marks=pytest.mark.long)])
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(rounds):
    pytest.importorskip("safetensors")
    ends = weights_fuzz.run(rounds, seed=rounds)
    assert ends["read by both"] > 0.05 * rounds
    assert ends["refused by both"] > 0.5 * rounds
