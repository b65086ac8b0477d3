"""Takes names of JAX away, one at a time, from a program that uses all of the package.

A JAX to come may lack a name of the table in `_jax_names.py`, or have another thing
there. Whatever it is: the package can be imported, what the program computes is the
same, what must be refused is refused, and one line says what is off. Only what a name
alone serves (`SERVES`) may fail or differ.

    python -m tests.stress.moved_names                      # each name, in each way
    python -m tests.stress.moved_names --case "jax._src.core:trace_state missing"

This process imports JAX, and nothing of ours. Each case is a fork of it, which sees
Graftree for the first time. There JAX has all its names; whoever asks from Graftree has
not (`take_away`).
"""

import argparse
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import types

# Of JAX, which is imported here and started in the forks.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads should not fork

import jax
import numpy as np
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401

from tests import compiled_programs, sources

PATIENCE = 300.0  # seconds that a case may take

# The parts of `moved_program.py` that may fail, or give another text, without a name.
SERVES = {
    "jax._src.config:trace_context": "recompilations",
    "jax._src.config:trace_context_names": "recompilations",
    "jax.extend.source_info_util:summarize": "nans",
    "jax.extend.source_info_util:transform_name_stack": "tables saved_values",
    "jax.extend.source_info_util:current_name_stack": "tables saved_values",
    "jax._src.export._export:serialization_registry": "exported_functions",
    "jax._src.export._export:deserialization_registry": "exported_functions",
    "jax.experimental.checkify:checkify": "checks",
    "jax.experimental.checkify:user_checks": "checks",
}
CLEAR = ("ValueError: Cannot ", "NotImplementedError: nnx.")
# What nothing asks for as long as another name is there, or in a single process.
SPARE = {
    "jax.extend.core:get_opaque_trace_state",
    "jax._src.distributed:global_state",
}
# What gives nothing can't be seen to do nothing.
UNSEEN = {
    ("jax._src.source_info_util:register_exclusion", "other"),
    ("jax._src.traceback_util:register_exclusion", "other"),
}
# Without them the package can't be imported, and says so.
NEEDED = "jax._src.core:trace_state+jax.extend.core:get_opaque_trace_state"


def table():
    """The names, without importing the package."""
    path = sources.ROOT / "src" / "graftree" / "_jax_names.py"
    spec = importlib.util.spec_from_file_location("names_of_jax", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NAMES


# ---------------------------------------------------------------------- taking a name


class Unusable:
    """Raises, whatever is done with it."""

    def _raise(self, *_, **__):
        raise TypeError("This is not what it was.")

    __call__ = __getattr__ = __get__ = __iter__ = __len__ = __contains__ = _raise
    __getitem__ = __setitem__ = __delitem__ = __hash__ = __eq__ = __bool__ = _raise


def nothing(*_, **__):
    """Takes all that it is given, and returns nothing."""


def stand_in(true, how):
    """What a name stands for in place of ``true``; an `AttributeError` for nothing."""
    if how == "missing":
        return AttributeError("It has moved.")
    if how == "raises":
        return Unusable()
    return nothing if callable(true) else object()


HOWS = ("missing", "raises", "other")


def take_away(place, how):
    """Takes a name away from whoever asks for it in Graftree."""
    module_name, _, path = place.partition(":")
    name, _, attribute = path.partition(".")
    module = importlib.import_module(module_name)
    true = getattr(module, name)
    given = stand_in(getattr(true, attribute) if attribute else true, how)
    if attribute:
        is_there = not isinstance(given, AttributeError)
        given = types.SimpleNamespace(**({attribute: given} if is_there else {}))

    class Moved(type(module)):
        def __getattribute__(self, asked):
            if asked != name or not is_asked_by_us():
                return super().__getattribute__(asked)
            if isinstance(given, AttributeError):
                raise given
            return given

    # The module itself, so that JAX's other modules go on with what they have of it.
    module.__class__ = Moved


def is_asked_by_us():
    """Whether the first frame that is none of the import system is one of Graftree."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith(("importlib", "pkgutil")):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith("graftree")


# --------------------------------------------------------------------------- the cases


def run_case(places, how, path):
    """Runs the program without some names; writes what came of it to a file."""
    printed = os.open(f"{path}.printed", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    said, logger, handler = [], logging.getLogger("graftree"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.propagate = False
    for place in places:
        take_away(place, how)
    jax.config.update("jax_disable_most_optimizations", True)
    compiled_programs.keep_in_whole_files()
    try:
        outcomes = importlib.import_module("tests.stress.moved_program").run()
    except ImportError as error:
        outcomes = {"import": f"ImportError: {error}"}
    with open(path, "w") as file:
        json.dump({"outcomes": outcomes, "said": said}, file)


def run_all(cases, jobs):
    """What came of each case, in forks of this process, a few at a time."""
    assert len(os.listdir("/proc/self/task")) == 1, "A process with threads can't fork."
    context, waiting, running = multiprocessing.get_context("fork"), [*cases], {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.pop(0)
                path = os.path.join(folder, f"{len(waiting)}.json")
                process = context.Process(target=run_case, args=(*case, path))
                process.start()
                running[case] = process, path, time.monotonic() + PATIENCE
            for case, (process, path, end) in [*running.items()]:
                if process.is_alive() and time.monotonic() > end:
                    process.kill()
                elif not process.is_alive():
                    del running[case]
                    yield case, read(path, process.exitcode)
            time.sleep(0.05)


def read(path, code):
    """What a case has written; if it came to no end, that."""
    if code == 0:
        with open(path) as file:
            return json.load(file)
    with open(f"{path}.printed") as file:
        last = file.read()[-2000:]
    return {"outcomes": {"import": f"ended with {code}: {last}"}, "said": []}


# ------------------------------------------------------------------------- the verdicts


def faults(places, how, found, expected):
    """What must not be, in one line each."""
    if "+".join(places) == NEEDED:
        outcome = found["outcomes"].get("import", "")
        return [] if "Install a newer graftree" in outcome else [f"import: {outcome}"]
    if "import" in found["outcomes"]:
        return [f"import: {found['outcomes']['import']}"]
    served = parts_served_by(places)
    wrong = []
    for part, outcome in expected["outcomes"].items():
        got = found["outcomes"].get(part)
        is_clear = isinstance(got, list) or str(got).startswith(CLEAR)
        text = difference(got, outcome)
        if text and not (part in served and is_clear):
            wrong.append(f"{part}: {text}")
    for place in {place for place in places if (place, how) not in UNSEEN} - SPARE:
        lines = [line for line in found["said"] if place.replace(":", ".") in line]
        if len(lines) != 1:
            wrong.append(f"told in {len(lines)} lines: {lines}")
    return wrong


def parts_served_by(places):
    """What may fail, or give another text, without these names."""
    return {part for place in places for part in SERVES.get(place, "").split()}


def difference(found, expected):
    """Where an outcome differs from what is expected; ``None`` if nowhere.

    What is expected is an outcome itself, which may be an error if a case runs alone.
    """
    if not isinstance(found, list) or len(found) != len(expected):
        return f"{found} in place of {expected}"
    for one, other in zip(found, expected, strict=True):
        if one != other and not are_close(one, other):
            return f"{one} in place of {other}"
    return None


def are_close(one, other):
    """Whether they differ by rounding: cut elsewhere, a program adds otherwise."""
    if isinstance(one, str) or isinstance(other, str) or one[0] != other[0]:
        return False
    numbers = one[1], other[1]
    return one[0].startswith("float") and np.allclose(*numbers, 1e-5, 1e-6)


def all_cases():
    """Each name of the table in each way, and both that tell traces apart."""
    places = [(name,) for name in table()] + [tuple(NEEDED.split("+"))]
    return [(place, how) for place in places for how in HOWS]


def main(arguments=None):
    """Prints what came of each case; returns how many have faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.moved_names")
    parser.add_argument("--how", action="append", choices=HOWS)
    parser.add_argument("--case", action="append", help="a place, a space, and how")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="compares no numbers")
    options = parser.parse_args(arguments)
    chosen = [
        (places, how)
        for places, how in all_cases()
        if how in (options.how or HOWS)
        if not options.case or f"{'+'.join(places)} {how}" in options.case
    ]
    for place in table():
        importlib.import_module(place.partition(":")[0])
    expected = None
    if not options.alone:
        (_, expected), *_ = run_all([((), "missing")], 1)
        broken = [x for x in expected["outcomes"].items() if isinstance(x[1], str)]
        assert not broken and not expected["said"], (broken, expected["said"])
    count = 0
    for (places, how), found in run_all(chosen, options.jobs):
        lines = faults(places, how, found, expected or found)
        count += bool(lines)
        print("FAULT" if lines else "ok", "+".join(places), how, flush=True)
        for line in lines:
            print(f"    {line[:600]}")
        for part in parts_served_by(places):
            print(f"    {part}: {str(found['outcomes'].get(part))[:200]!r}")
        for line in found["said"]:
            print(f"    said: {line}")
    return count


if __name__ == "__main__":
    sys.exit(min(main(), 1))
