"""Runs programs: ``python -m tests.interop.corpus.running ours|flax FILE...``.

All run in one process, with our ``flax`` or the real one.

Prints a dict as JSON: for each file what it printed, what it raised, and at which of
its lines a DeprecationWarning came.
"""

import contextlib
import io
import json
import sys
import traceback
import warnings

from tests import compiled_programs


def run(path):
    """What one program prints, raises and warns of."""
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    printed, lines, raised = io.StringIO(), set(), None

    def note(message, category, filename, lineno, file=None, line=None):
        if issubclass(category, DeprecationWarning):
            lines.add(line_of(path))

    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            exec(code, {"__name__": "__main__"})
        except Exception:
            raised = traceback.format_exc()
    return {"printed": printed.getvalue(), "raised": raised, "warned": sorted(lines)}


def line_of(path):
    """The line of the program that is running."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


def reset():
    """Undoes what a program sets for the whole process."""
    from flax import nnx

    nnx.use_eager_sharding(True)


def main(which, paths):
    """Runs the programs with our ``flax`` or the real one."""
    compiled_programs.keep_in_whole_files()
    if which == "ours":
        from graftree import dropin

        dropin.install()
    outcomes = {}
    for path in paths:
        outcomes[path] = run(path)
        reset()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
