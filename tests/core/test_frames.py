"""Calls with room for the frames of what they call: calls like others."""

import sys
import traceback

import pytest

from graftree.core import frames


def test_arguments_go_in_and_the_result_comes_out():
    def function(*args, **kwargs):
        return args, kwargs

    assert frames.with_room(function, 1, 2, function=3) == ((1, 2), {"function": 3})


def test_errors_pass():
    with pytest.raises(ZeroDivisionError) as found:
        frames.with_room(divmod, 1, 0)
    names = [frame.name for frame in traceback.extract_tb(found.value.__traceback__)]
    assert names[-1] == "with_room"


def test_frames_are_counted_as_ever():
    def depth(frame):
        return 0 if frame is None else 1 + depth(frame.f_back)

    def here():
        return depth(sys._getframe())

    assert frames.with_room(here) == here() + 1


def test_room_may_be_used_up_and_given_within_room():
    def sink(n):
        return 0 if not n else 1 + frames.with_room(sink, n - 1)

    limit = sys.getrecursionlimit()
    assert sink(200) == 200
    with pytest.raises(RecursionError):
        sink(2 * limit)
    assert sink(200) == 200


def test_a_generator_lives_on():
    def counting():
        yield from range(3)

    generator = frames.with_room(counting)
    assert frames.with_room(next, generator) == 0
    assert [*generator] == [1, 2]
