"""Names of JAX that have moved, or are something else: nothing dies or is wrong."""

import re
import subprocess
import sys
import threading

import jax
import jax.extend.core
import numpy as np
import pytest

from graftree import _jax, _jax_names
from tests import sources

# Of different kinds: what nothing works without, what is registered at import, what is
# off where it is missing, what is compiled into programs.
SAMPLE = (
    "jax._src.core:trace_state missing",
    "jax._src.core:trace_state+jax.extend.core:get_opaque_trace_state missing",
    "jax.interpreters.mlir:register_lowering other",
    "jax._src.export._export:serialization_registry raises",
)


def run_without(*arguments):
    """Runs the program of `tests/stress/moved_names.py`."""
    command = [sys.executable, "-m", "tests.stress.moved_names", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=sources.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_package_works_without_some_names():
    cases = [part for case in SAMPLE for part in ("--case", case)]
    printed = run_without("--jobs", "1", *cases)
    assert sum(line.startswith("ok ") for line in printed.splitlines()) == len(SAMPLE)


@pytest.mark.long
@pytest.mark.parametrize("how", ["missing", "raises", "other"])
def test_package_works_without_each_name(how):
    run_without("--how", how)


@pytest.fixture
def told(monkeypatch):
    """What is said, in a process that has said nothing; in place of tests/conftest."""
    said = []
    monkeypatch.setattr(_jax_names, "_told", set())
    monkeypatch.setattr(_jax_names, "tell", lambda *places: said.append(places))
    return said


TELL = _jax_names.tell  # which tests/conftest.py replaces
PLACE, OTHER = "jax.extend.core:find_top_trace", "jax.extend.core:Primitive"


def way(function=lambda found, x: ("by it", x), **options):
    made = _jax_names.by(PLACE, **options)(function)
    made.otherwise(lambda x: ("otherwise", x))
    return made


def taken(monkeypatch, *places):
    """Takes names out of reach."""
    find = _jax_names.find

    def find_others(place):
        if place in places:
            raise AttributeError(place)
        return find(place)

    monkeypatch.setattr(_jax_names, "find", find_others)


def test_way_by_a_name_that_is_there_says_nothing(told):
    assert way()(1) == ("by it", 1) and told == []


def test_way_by_a_missing_name_goes_otherwise_and_tells_once(monkeypatch, told):
    taken(monkeypatch, PLACE)
    made = way()
    assert made(1) == ("otherwise", 1) == made(1)
    assert told == [(PLACE,)]


def test_way_that_can_not_be_prepared_is_never_gone(told):
    def refuse(_):
        raise _jax_names.ChangedError

    calls = []
    made = way(lambda *x: calls.append(x), prepare=refuse)
    assert made(1) == ("otherwise", 1) == made(1)
    assert calls == [] and told == [(PLACE,)]


def test_way_that_fails_later_is_left_for_good(told):
    answers = iter([1])
    made = way(lambda found, x: next(answers))
    assert [made(0), made(0), made(0)] == [1, ("otherwise", 0), ("otherwise", 0)]
    assert told == [(PLACE,)]


def test_preparing_knows_nothing_of_the_trace_around_the_first_use(told):
    seen = []
    made = way(prepare=lambda found: (found, seen.append(_jax.is_tracing()))[:1])
    jax.jit(lambda x: made(x)[1])(1.0)
    assert seen == [False] and told == []


def test_full_stack_is_no_fault_of_a_name(told):
    errors = iter([RecursionError(), MemoryError()])

    def deep(_, x):
        for error in errors:
            raise error
        return x

    made = way(deep)
    for kind in (RecursionError, MemoryError):
        with pytest.raises(kind):
            made(1)
    assert made(1) == 1 and told == []


def test_one_line_says_once_what_is_missing_and_lost(monkeypatch, told, caplog):
    taken(monkeypatch, PLACE)
    for _ in range(2):
        TELL(OTHER, PLACE)
    (line,) = caplog.messages
    assert line == (
        f"JAX {jax.__version__} has moved jax.extend.core.find_top_trace: "
        f"{_jax_names.NAMES[PLACE].lost}."
    )


def test_name_that_tells_no_traces_apart_is_not_taken():
    assert _jax._tells_apart(_jax.current_trace)
    assert not _jax._tells_apart(lambda: None)  # always the same
    assert not _jax._tells_apart(object)  # never the same


def test_token_by_states_lasts_as_long_as_it_is_held():
    token = _jax._by_states(jax.extend.core.get_opaque_trace_state)
    outside = token()
    for _ in range(10_100):  # an earlier version kept the last 10,000
        jax.vmap(lambda x: (token(), x)[1])(np.zeros(1))
    assert token() is outside and _jax._tells_apart(token)


def test_token_by_states_is_that_of_all_threads_outside_of_traces():
    token, found = _jax._by_states(jax.extend.core.get_opaque_trace_state), []
    outside = token()
    thread = threading.Thread(target=lambda: found.append(token()))
    thread.start()
    thread.join()
    assert found == [outside]


def test_page_on_the_design_lists_each_name():
    page = (sources.ROOT / "docs/look_up/design.md").read_text()
    listed = {x.rpartition(".")[2] for x in re.findall(r"`([\w.]+)`", page)}
    assert {re.split("[.:]", x)[-1] for x in _jax_names.NAMES} <= listed
