"""Programs for the bridge give what they give with Flax NNX."""

import pytest

from tests.interop.bridge import (
    comparing,
    programs_modules,
    programs_to_linen,
    programs_to_nnx,
)

pytestmark = [
    pytest.mark.peers,
    # Flax warns about its own deprecations.
    pytest.mark.filterwarnings("ignore"),
]

PROGRAMS = [
    program
    for file in (programs_to_nnx, programs_to_linen, programs_modules)
    for program in file.PROGRAMS
]


@pytest.fixture(scope="module")
def peer():
    return pytest.importorskip("flax.nnx")


@pytest.mark.parametrize(
    "program", PROGRAMS, ids=lambda p: f"{p.__module__.rpartition('_')[2]}-{p.__name__}"
)
def test_programs_give_what_they_give_with_the_peer(program, peer):
    assert not comparing.compare(program, peer)
