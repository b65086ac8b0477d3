"""Programs of the bridge give what they give with Flax NNX."""

import pytest

from tests.interop.bridge import (
    comparing,
    programs_modules,
    programs_to_linen,
    programs_to_nnx,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Flax warns about its own deprecations
    pytest.mark.usefixtures("implicit_ranks"),
]

EVERY = 6  # in `make test`; the rest is in `make test-all`
PROGRAMS = [
    pytest.param(
        program,
        id=f"{program.__module__.rpartition('_')[2]}-{program.__name__}",
        marks=() if number % EVERY == 0 else pytest.mark.long,
    )
    for file in (programs_to_nnx, programs_to_linen, programs_modules)
    for number, program in enumerate(comparing.programs_of(file))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_give_what_they_give_with_the_peer(program, peer):
    assert not comparing.compare(program, peer)


def test_there_are_programs():
    assert len(PROGRAMS) > 65
