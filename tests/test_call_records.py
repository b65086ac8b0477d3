"""`_python.recorded`: which functions ran in a call, in this thread alone."""

import sys
import threading

import pytest

from graftree import _python


def one():
    return 1


def two():
    return one() + 1


def other():
    return 3


def test_all_functions_that_ran_are_recorded_each_time():
    for _ in range(2):
        output, codes = _python.recorded(two)
        assert output == 2
        assert {one.__code__, two.__code__} <= codes
        assert other.__code__ not in codes


def test_an_inner_record_has_what_ran_before_it_too_and_passes_it_on():
    def outer():
        one()
        return _python.recorded(two)[1]

    inner_codes, codes = _python.recorded(outer)
    assert one.__code__ in inner_codes
    assert inner_codes <= codes
    assert outer.__code__ not in inner_codes


def test_records_of_several_threads_are_apart():
    begun, may_end = threading.Barrier(3), threading.Barrier(3)

    def record(function):
        def body():
            begun.wait(10)
            function()
            may_end.wait(10)
            return function()

        codes[function] = _python.recorded(body)[1]

    codes = {}
    threads = [threading.Thread(target=record, args=(f,)) for f in (two, other)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    one()  # in a thread that records nothing
    may_end.wait(10)
    for thread in threads:
        thread.join()
    assert {one.__code__, two.__code__} <= codes[two]
    assert other.__code__ in codes[other]
    assert other.__code__ not in codes[two]
    assert one.__code__ not in codes[other]


def test_a_thread_that_begins_later_sees_what_has_run_before():
    def early():
        two()
        thread = threading.Thread(target=late)
        thread.start()
        thread.join()

    def late():
        codes.append(_python.recorded(two)[1])

    codes = []
    _python.recorded(early)
    assert {one.__code__, two.__code__} <= codes[0]


def test_a_failure_ends_the_record():
    with pytest.raises(ZeroDivisionError):
        _python.recorded(lambda: 1 / 0)
    assert _python.recorded(one)[0] == 1
    _python.record_all([one.__code__])  # into no record


def test_beside_a_profiler_it_works_or_says_that_there_is_no_record():
    sys.setprofile(lambda *_: None)
    try:
        output, codes = _python.recorded(two)
    finally:
        sys.setprofile(None)
    assert output == 2
    if sys.version_info < (3, 12):
        assert codes is None
    else:
        assert {one.__code__, two.__code__} <= codes
