"""Runs tests on a copy of the repository, in forks of a process that has imported JAX.

The process imports what all tests import, but neither the package nor a test, and makes
no backend. So a fork begins where a new process is after seconds, and sees the files of
its copy. It may hang, crash or take all memory: it has a limit, and is killed.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import hypothesis
import jax  # noqa: F401  # what the tests import
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import pytest

from tests import sources

MEMORY = 8 << 30  # bytes
FAILED = 70  # the exit code of a fork that could not run pytest, which has none such
OPTIONS = ["-p", "no:cacheprovider", "-q", "--tb=line", "--assert=plain"]
MARKS = "not long and not pages"


class Copy:
    """A copy of the files of the repository; compiled programs are kept in `ROOT`."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder.resolve()
        self.file = self.folder / "result.json"
        self._writes = 0
        for name in _files():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sources.ROOT / name, self.folder / name)
        (sources.ROOT / "out").mkdir(exist_ok=True)
        (self.folder / "out").symlink_to(sources.ROOT / "out")

    @contextlib.contextmanager
    def planted(self, path: str, text: str) -> Iterator[None]:
        """Has another text in a file for a while."""
        self.write(path, text)
        try:
            yield
        finally:
            self.write(path, (sources.ROOT / path).read_text())

    def write(self, path: str, text: str) -> None:
        """Writes a file; by its time Python sees that what it compiled is another."""
        self._writes += 1
        (self.folder / path).write_text(text)
        os.utime(self.folder / path, (self._writes, self._writes))

    def run(self, make: Callable, limit: float) -> int | None:
        """Runs tests in a fork.

        Args:
            make: Makes a plugin of pytest there, such as `Chosen`, with `options` and
                `files`; it is called with the path of `file`, where it writes.
            limit: For how many seconds.

        Returns:
            The exit code of pytest, negative after a signal; ``None`` past the limit.

        Raises:
            RuntimeError: If pytest could not be run.
        """
        self.file.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            code = FAILED
            try:
                code = self._test(make)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = _ended(pid, limit)
        if code == FAILED:
            raise RuntimeError((self.folder / "log").read_text())
        return code

    def _test(self, make: Callable) -> int:
        os.setsid()
        log = os.open(self.folder / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(log, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(self.folder)
        paths = [str(self.folder / "src"), str(self.folder)]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("tests", "graftree"):
                del sys.modules[name]
        plugin = make(self.file)
        files = [name for name in plugin.files if (self.folder / name).exists()]
        options = [*OPTIONS, f"--basetemp={self.folder / 'tmp'}", "-m", MARKS]
        return pytest.main([*options, *plugin.options, *files], plugins=[plugin])


def _files() -> list[str]:
    """The files of the repository, also new ones, but none that git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(listed, cwd=sources.ROOT, text=True).split("\0")
    return [name for name in names if (sources.ROOT / name).is_file()]


def _ended(pid: int, limit: float) -> int | None:
    """Waits for a fork, and ends all that it started."""
    end = time.monotonic() + limit
    status = None
    while status is None and time.monotonic() < end:
        time.sleep(0.02)
        done, ended = os.waitpid(pid, os.WNOHANG)
        status = ended if done else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(status)


_copies: list[Copy] = []


def pool(workers: int, folder: str):
    """Processes, each of which has a copy of its own, made in a folder: see `copy`."""

    def make():
        _copies.append(Copy(pathlib.Path(folder) / str(os.getpid())))

    return multiprocessing.get_context("fork").Pool(workers, make)


def copy() -> Copy:
    """The copy of this process of a `pool`."""
    return _copies[0]


class Chosen:
    """Runs some tests, by file in the order of their names, until one fails."""

    options = ("-x",)

    def __init__(self, tests: list[str], file: pathlib.Path):
        self._tests = frozenset(tests)
        self.files = [*dict.fromkeys(test.partition("::")[0] for test in tests)]
        self._file = file

    def pytest_collection_finish(self, session):
        """Has the same examples of each property in all runs."""
        hypothesis.settings.load_profile("ci")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Leaves out the other tests of the files."""
        items[:] = [item for item in items if item.nodeid in self._tests]

    def pytest_collectreport(self, report):
        """Names the file that can't be read."""
        if report.failed:
            self._file.write_text(json.dumps(f"collection of {report.nodeid}"))

    def pytest_runtest_logreport(self, report):
        """Names the test that has failed."""
        if report.failed:
            self._file.write_text(json.dumps(report.nodeid))
