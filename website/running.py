"""Runs the blocks of a page in order, as if they were one program."""

import ast
import contextlib
import dataclasses
import io
import linecache
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from typing import Any

from website import outputs, pages


@dataclasses.dataclass(frozen=True)
class Result:
    """What a block has done.

    Attributes:
        block: The block.
        output: What it printed, and the value of its last expression.
        figure: The figure of matplotlib that it ends in or left open, or None.
    """

    block: pages.Block
    output: str
    figure: Any

    @property
    def is_as_the_page_says(self) -> bool:
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """What is not as the page says."""
        said = self.block.output
        if (said is None) != (self.output == ""):
            return f"the page says {said!r}; it printed {self.output!r}"
        if said is not None and not outputs.agree(said, self.output):
            return f"the page says\n{said}\nit printed\n{self.output}"
        if (self.block.picture is None) != (self.figure is None):
            made = "no figure" if self.figure is None else "a figure"
            return f"the page shows {self.block.picture}; the block made {made}"
        return None


def run(page: pages.Page) -> Iterator[Result]:
    """Runs the blocks of a page whose packages are here, in a folder of their own.

    Raises:
        Exception: What a block raises; its traceback names the line of the page.
    """
    program = types.ModuleType("page")
    linecache.checkcache(str(page.path))
    with (
        _as_imported(program),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
    ):
        for block in page.blocks:
            if block.can_run:
                if block.language == "sh":
                    output, value = _of_commands(block, page), None
                else:
                    output, value = _output(block, page, program.__dict__)
                figure = _open_figure()
                if _is_drawn(value) and type(value).__name__ == "Figure":
                    figure = value
                yield Result(block, output, figure)


def faults(page: pages.Page, results: Iterable[Result]) -> list[str]:
    """What is not as the page says, each with its place, as editors link it."""
    return [f"{page.path}:{x.block.line}: {x.fault}" for x in results if x.fault]


@contextlib.contextmanager
def _as_imported(program: types.ModuleType) -> Iterator[None]:
    """Lets dataclasses and pickle find what the page defines."""
    sys.modules[program.__name__] = program
    try:
        yield
    finally:
        del sys.modules[program.__name__]
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")


def _output(
    block: pages.Block, page: pages.Page, names: dict[str, Any]
) -> tuple[str, Any]:
    """What a block prints, and the value of its last expression."""
    tree = ast.parse(block.code)
    ast.increment_lineno(tree, block.line - 1)
    last = tree.body.pop() if _ends_in_a_value(block.code, tree) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(page.path), "exec"), names)
        if isinstance(last, ast.Expr):
            expression = ast.Expression(last.value)
            value = eval(compile(expression, str(page.path), "eval"), names)
            if value is not None and not _is_drawn(value):
                print(repr(value))
    return printed.getvalue().rstrip(), value


_SECONDS = 300  # of a command


def _of_commands(block: pages.Block, page: pages.Page) -> str:
    """What shell commands print, with the repository as a reader has it.

    Raises:
        RuntimeError: If one fails, or takes longer than five minutes.
    """
    ours = f"{pages.ROOT / 'src'}{os.pathsep}{pages.ROOT}"
    python = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": ours, "PATH": python}
    environment.pop("XLA_FLAGS", None)  # of eight devices, see `prepare`
    run = subprocess.run(
        ["bash", "-e", "-c", block.code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"{page.path}:{block.line}: {block.code}{run.stderr}")
    return run.stdout.rstrip()


def _ends_in_a_value(code: str, tree: ast.Module) -> bool:
    """Whether the last line is an expression, and no semicolon hides it."""
    is_hidden = code.rstrip().endswith(";")
    return bool(tree.body) and isinstance(tree.body[-1], ast.Expr) and not is_hidden


def _is_drawn(value: Any) -> bool:
    """Whether it is a part of a figure, such as what ``axes.plot`` returns."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return type(first).__module__.startswith("matplotlib.")


def _open_figure() -> Any:
    """The figure that is open, which is then closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not pyplot.get_fignums():
        return None
    figure = pyplot.gcf()
    pyplot.close("all")
    return figure


def prepare() -> None:
    """Sets up this process to run pages: eight devices, figures without a window.

    Errors are as they are, without JAX's word on the frames that it has left out.
    """
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
        ]
    ).strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"
