"""Which tests run which lines of the package, kept in ``out/mutants``.

Per state of the package and file of tests there is one record, so that a new test takes
a run of its file alone. What a test runs in other processes is not seen.
"""

import functools
import hashlib
import importlib.machinery
import json
import os
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator

from tests import sources
from tests.stress import forks

KEPT = sources.ROOT / "out" / "mutants"
BATCH = 12  # files for each fork; its start takes seconds
LIMIT = 1200  # seconds

# Tests of texts, and those that start all of this.
UNSEEN = ("tests/docs", "tests/test_house_rules.py", "tests/test_tools.py")

Lines = dict[str, int]
Tests = dict[str, tuple[float, Lines]]
"""Per passing test its seconds, and per file the lines that it runs, as bits."""


class Recorder:
    """Runs all tests of some files, and writes which lines of the package each runs."""

    options = ()

    def __init__(self, files: list[str], file: pathlib.Path):
        self.files = files
        self._file = file
        self._root = f"{file.parent}{os.sep}"
        self._hits: dict[str, set[int]] = {}
        self._reports: list = []
        self._seen: Tests = {}
        self._watch()

    def _watch(self) -> None:
        """Has each line of the package told, the first time that a test runs it."""
        monitoring = sys.monitoring
        tool, loader = monitoring.COVERAGE_ID, importlib.machinery.SourceFileLoader
        event, get_code = monitoring.events.LINE, loader.get_code

        def hit(code, line):
            self._hits.setdefault(code.co_filename, set()).add(line)
            return monitoring.DISABLE

        def watch(code):
            monitoring.set_local_events(tool, code, event)
            for constant in code.co_consts:
                if isinstance(constant, types.CodeType):
                    watch(constant)

        def watched(loader, name):
            code = get_code(loader, name)
            if code is not None and loader.path.startswith(f"{self._root}src"):
                watch(code)
            return code

        monitoring.use_tool_id(tool, __name__)
        monitoring.register_callback(tool, event, hit)
        loader.get_code = watched

    def pytest_runtest_logstart(self):
        """Begins with a test."""
        self._hits.clear()
        self._reports.clear()
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report):
        """Takes notice of how a part of a test has ended."""
        self._reports.append((report.passed, report.duration))

    def pytest_runtest_logfinish(self, nodeid):
        """Keeps what a test has run, if it passes, and has the same name each time."""
        if all(passed for passed, _ in self._reports) and " at 0x" not in nodeid:
            seconds = sum(seconds for _, seconds in self._reports)
            lines = {
                name.removeprefix(self._root): sum(1 << line for line in lines)
                for name, lines in self._hits.items()
            }
            self._seen[nodeid] = round(seconds, 4), lines

    def pytest_sessionfinish(self):
        """Writes all of it, by file."""
        found = {file: {} for file in self.files}
        for nodeid, (seconds, lines) in self._seen.items():
            bits = {name: f"{mask:x}" for name, mask in lines.items()}
            found[nodeid.partition("::")[0]][nodeid] = seconds, bits
        self._file.write_text(json.dumps(found))


def files_of_tests() -> list[str]:
    """The files with tests of `make test`, and those with examples."""
    tests = (sources.ROOT / "tests").rglob("test_*.py")
    examples = [x.path for x in sources.package() if ">>>" in x.text]
    names = [str(path.relative_to(sources.ROOT)) for path in sorted(tests)]
    names += map(str, examples)
    return [name for name in names if not name.startswith(UNSEEN)]


def _digest(*paths: pathlib.Path) -> str:
    texts = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(texts).hexdigest()[:16]


def _place(state: str, file: str) -> pathlib.Path:
    """Where the record of a file of tests is."""
    name = file.replace(os.sep, "-")
    return KEPT / state / f"{name}-{_digest(sources.ROOT / file)}.json"


def recorded(pool, files: list[str]) -> Tests:
    """What tests of some files run; runs those of which there is no record yet."""
    state = _digest(*sorted(sources.PACKAGE.rglob("*.py")))
    places = {file: _place(state, file) for file in files}
    missing = [file for file, place in places.items() if not place.exists()]
    count = -(-len(missing) // BATCH)
    batches = [missing[i::count] for i in range(count)]
    done = pool.imap_unordered(_batch, batches)
    for number, (code, found) in enumerate(done, 1):
        print(f"{number} of {count} batches of tests run, code {code}", flush=True)
        for file, tests in found.items():
            places[file].parent.mkdir(parents=True, exist_ok=True)
            places[file].write_text(json.dumps(tests))
    return dict(_tests(place for place in places.values() if place.exists()))


def _batch(files: list[str]) -> tuple[int | None, dict]:
    copy = forks.copy()
    code = copy.run(functools.partial(Recorder, files), LIMIT)
    if not copy.file.exists():
        return code, {}
    return code, json.loads(copy.file.read_text())


def _tests(places: Iterable[pathlib.Path]) -> Iterator[tuple[str, tuple[float, Lines]]]:
    for place in places:
        for nodeid, (seconds, bits) in json.loads(place.read_text()).items():
            yield nodeid, (seconds, {name: int(x, 16) for name, x in bits.items()})


def seeing(tests: Tests, file: str, first: int, last: int) -> dict[str, float]:
    """The tests that run a line from the first to the last, and how long they take."""
    mask = (1 << (last + 1)) - (1 << first)
    return {
        nodeid: seconds
        for nodeid, (seconds, lines) in tests.items()
        if lines.get(file, 0) & mask
    }
