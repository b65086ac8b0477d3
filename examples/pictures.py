"""Pictures, written so that a file is either the whole new one or the old one."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from matplotlib import axes, figure

# They also differ to the color-blind (Okabe and Ito).
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
    *("#999999", "#f0e442"),
)


def write(picture: figure.Figure, path: pathlib.Path, dpi: int = 120) -> None:
    """Writes a picture to ``path``, as PNG."""
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", dpi=dpi)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a path to write to, which takes the place of ``path`` on success."""
    temporary = path.with_name(path.name + ".new")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def tidy(plot: axes.Axes) -> None:
    """Gives a plot a grid, and takes the lines above and on the right away."""
    plot.grid(alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
