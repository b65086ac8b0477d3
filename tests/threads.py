"""Functions that run at the same time."""

import threading


def run_in_threads(*functions):
    """Runs each function in a thread of its own; none may raise."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[f]) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
