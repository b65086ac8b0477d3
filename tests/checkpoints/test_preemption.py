"""`Checkpoints.should_stop` in a program of one process."""

import os
import signal
import threading

import pytest

from graftree.checkpoints import Checkpoints


@pytest.fixture
def signals():
    """Counts the signals that reach the handler of the program."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    yield received
    signal.signal(signal.SIGTERM, before)


def send():
    os.kill(os.getpid(), signal.SIGTERM)


def test_first_signal_is_noted_and_the_next_goes_to_the_program(tmp_path, signals):
    with Checkpoints(tmp_path) as checkpoints:
        assert not checkpoints.should_stop(1)
        send()
        assert checkpoints.should_stop(2) and not signals
        send()
        assert checkpoints.should_stop(3) and signals == [1]


def test_signal_is_the_programs_before_the_first_question(tmp_path, signals):
    with Checkpoints(tmp_path):
        send()
    assert signals == [1]


def test_close_puts_the_handler_back(tmp_path, signals):
    handler = signal.getsignal(signal.SIGTERM)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.should_stop(1)
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler
    send()
    assert signals == [1]


def test_all_who_ask_are_told(tmp_path, signals):
    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        assert not first.should_stop(1) and not second.should_stop(1)
        send()
        assert first.should_stop(2) and second.should_stop(2) and not signals
    with Checkpoints(tmp_path) as third:
        assert not third.should_stop(1)


def test_handler_of_the_program_is_left_alone(tmp_path, signals):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.should_stop(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_first_question_in_another_thread_is_refused(tmp_path):
    raised = []

    def ask():
        try:
            Checkpoints(tmp_path).should_stop(1)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "in the main thread first" in raised[0]
