"""The door to JAX: what the package relies on holds in this version, or is left.

These are tests of `_jax` and `_jax_names` themselves: what a name of JAX is for can be
seen from outside only where a later JAX lacks it (tests/stress/moved_names.py).
"""

import gc
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from graftree import _jax, _jax_names
from tests import interpreters, sources, tables, threads


def test_token_of_a_trace_is_stable_and_dies_with_the_trace():
    tokens = []

    def f(x):
        tokens.extend([_jax.current_trace(), _jax.current_trace()])
        assert tokens[0]() is not None
        return x

    jax.jit(f)(1.0)
    gc.collect()
    assert tokens[0] is tokens[1] and tokens[0] is not _jax.current_trace()
    assert tokens[0]() is None and _jax.current_trace()() is not None


def told():
    return _jax.current_trace(), _jax.is_tracing(), _jax.is_staging()


@pytest.mark.parametrize(
    ("transform", "records"),
    [(jax.jit, True), (jax.checkpoint, True), (jax.grad, False), (jax.vmap, False)],
)
def test_every_transform_is_a_trace_and_some_record_a_program(transform, records):
    seen, outer = [], _jax.current_trace()
    x = jnp.ones(2) if transform is jax.vmap else 1.0
    transform(lambda x: (seen.append(told()), x)[1])(x)
    assert seen[0][0] is not outer and seen[0][1:] == (True, records)
    assert told() == (outer, False, False)


# --------------------------------------- names that have moved, or are something else

# Of different kinds: what is off where it is missing, what is compiled into programs,
# what nothing works without, what is registered at import.
SAMPLE = (
    "jax._src.core:trace_state+jax.extend.core:get_opaque_trace_state missing",
    "jax.interpreters.mlir:register_lowering other",
    "jax._src.core:trace_state missing",
    "jax._src.export._export:serialization_registry raises",
)


def cases_without(*arguments):
    """How many cases of `tests/stress/moved_names.py` there are; none has faults."""
    printed = interpreters.printed("-m", "tests.stress.moved_names", *arguments)
    return sum(line.startswith("ok ") for line in printed.splitlines())


# To compare numbers takes a run of the program with all names.
@tables.cases(
    "sample, options",
    (SAMPLE[:1], ["--alone"]),
    pytest.param(SAMPLE, [], marks=pytest.mark.long),
)
def test_package_works_without_some_names(sample, options):
    cases = [f"--case={case}" for case in sample]
    assert cases_without("--jobs=1", *options, *cases) == len(sample)


@pytest.mark.long
@pytest.mark.parametrize("how", ["missing", "raises", "other"])
def test_package_works_without_each_name(how):
    assert cases_without(f"--how={how}") > 20


@pytest.fixture
def said(monkeypatch):
    """What is said, in a process that has said nothing; in place of tests/conftest."""
    places = []
    monkeypatch.setattr(_jax_names, "_reported", set())
    monkeypatch.setattr(_jax_names, "tell", lambda *told: places.append(told))
    return places


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


def test_way_by_a_name_that_is_there_says_nothing(said):
    assert way()(1) == ("by it", 1) and said == []


def test_way_by_a_missing_name_goes_otherwise_and_tells_once(monkeypatch, said):
    taken(monkeypatch, PLACE)
    made = way()
    assert made(1) == ("otherwise", 1) == made(1) and said == [(PLACE,)]


def test_way_that_can_not_be_prepared_is_never_gone(said):
    def refuse(_):
        raise _jax_names.ChangedError

    made = way(lambda *x: pytest.fail("it was gone"), prepare=refuse)
    assert made(1) == ("otherwise", 1) == made(1) and said == [(PLACE,)]


def test_way_that_fails_later_is_left_for_good(said):
    answers = iter([1])
    made = way(lambda found, x: next(answers))
    assert [made(0), made(0), made(0)] == [1, ("otherwise", 0), ("otherwise", 0)]
    assert said == [(PLACE,)]


def test_preparing_knows_nothing_of_the_trace_around_the_first_use(said):
    seen = []
    made = way(prepare=lambda found: (found, seen.append(_jax.is_tracing()))[:1])
    jax.jit(lambda x: made(x)[1])(1.0)
    assert seen == [False] and said == []


def test_full_stack_is_no_fault_of_a_name(said):
    errors = [RecursionError(), MemoryError()]

    def deep(_, x):
        if errors:
            raise errors.pop()
        return x

    made = way(deep)
    for kind in (MemoryError, RecursionError):
        with pytest.raises(kind):
            made(1)
    assert made(1) == 1 and said == []


def test_one_line_says_once_what_is_missing_and_lost(monkeypatch, said, caplog):
    taken(monkeypatch, PLACE)
    for _ in range(2):
        TELL(OTHER, PLACE)
    (line,) = caplog.messages
    assert line == (
        f"JAX {jax.__version__} no longer provides jax.extend.core.find_top_trace, so "
        f"{_jax_names.NAMES[PLACE]}."
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
    threads.run_in_threads(lambda: found.append(token()))
    assert found == [outside]


def test_page_on_the_design_lists_each_name():
    page = (sources.ROOT / "docs/look_up/design.md").read_text()
    listed = {x.rpartition(".")[2] for x in re.findall(r"`([\w.]+)`", page)}
    assert {re.split("[.:]", x)[-1] for x in _jax_names.NAMES} <= listed
