"""A few random programs in each run; ``python -m tests.differential`` runs many.

`make test` runs a third of the few.
"""

import pytest

from tests.differential import captures, generator, running

LONG = pytest.mark.long
SEEDS = [*range(17), *(pytest.param(seed, marks=LONG) for seed in range(17, 50))]


@pytest.mark.parametrize("seed", SEEDS)
def test_program_means_what_it_means_in_plain_python(seed):
    program, steps = generator.make(seed)
    mode = program.modes[seed % len(program.modes)]
    check(program, mode, steps if mode == running.GRAPH_UPDATES else None)


# By turns each way has one mode in `make test`.
WAYS_AND_MODES = [
    pytest.param(way, mode, marks=[LONG] if (i + j) % 3 else [])
    for i, way in enumerate([*captures.WAYS, *captures.PLAIN_WAYS])
    for j, mode in enumerate(running.MODES)
]


# Issue 12, §1: only what stood in the closure itself was seen to be an object.
@pytest.mark.parametrize(("way", "mode"), WAYS_AND_MODES)
def test_control_flow_sees_the_present_state_of_what_it_names(way, mode):
    program, steps = captures.make(0, ways=[way])
    check(program, mode, steps if mode == running.GRAPH_UPDATES else None)


@pytest.mark.parametrize("call", captures.CALLS)
def test_every_control_flow_sees_the_present_state(call):
    program, steps = captures.make(0, calls=[call])
    check(program, running.GRAPH_UPDATES, steps)


def check(program, mode, expected):
    found = running.difference(program, mode, expected=expected)
    if found:
        smaller = running.shrunk(program, mode)
        pytest.fail(f"{found[2]}\n\n{smaller.script(mode)}", pytrace=False)
