"""Scalars, images and text for TensorBoard: ``flax.metrics.tensorboard``.

The files are written by tensorboardX, PyTorch or TensorFlow, whichever is installed;
the first of them that can be imported is used.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

_MISSING = (
    "flax.metrics.tensorboard writes its files with tensorboardX, PyTorch or "
    "TensorFlow, and none of them can be imported.\n"
    "Install one: pip install tensorboardX"
)


class _Backend(Protocol):
    """The methods that tensorboardX and PyTorch have in common."""

    def add_scalar(self, tag: str, value: Any, step: int) -> None: ...
    def add_images(self, tag: str, images: Any, step: int, **options: Any) -> None: ...
    def add_text(self, tag: str, text: str, step: int) -> None: ...
    def add_histogram(self, tag: str, values: Any, step: int, bins: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class SummaryWriter:
    """Writes a log that TensorBoard shows.

    Args:
        log_dir: The folder for the files; made if it does not exist.
        auto_flush: Whether every call reaches the disk before it returns.

    Raises:
        ImportError: If neither tensorboardX, PyTorch nor TensorFlow is installed.

    Example:
        >>> from graftree.interop.flax_side import summary_writers
        >>> writer = summary_writers.SummaryWriter("/tmp/run")  # doctest: +SKIP
        >>> writer.scalar("loss", 0.5, step=1)  # doctest: +SKIP
    """

    def __init__(self, log_dir: str, auto_flush: bool = True) -> None:
        self._backend = _open(str(log_dir))
        self._auto_flush = auto_flush

    def scalar(self, tag: str, value: Any, step: int) -> None:
        """Writes a number.

        Args:
            tag: Its name.
            value: A scalar or an array with one element.
            step: The training step.
        """
        self._backend.add_scalar(tag, np.asarray(value).item(), step)
        self._written()

    def image(self, tag: str, image: Any, step: int, max_outputs: int = 3) -> None:
        """Writes one image or several.

        Args:
            tag: Their name.
            image: ``[height, width]``, ``[height, width, channels]`` or ``[images,
                height, width, channels]``, with 1, 3 or 4 channels; integers up to 255
                or floats up to 1.
            step: The training step.
            max_outputs: The most images to write.

        Raises:
            ValueError: If the number of dimensions is another one.
        """
        pixels = np.asarray(image)
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if pixels.ndim == 3:
            pixels = pixels[None]
        if pixels.ndim != 4:
            raise ValueError(
                "An image has 2 dimensions (height, width), 3 with channels, or 4 with "
                f"several images; got the shape {np.shape(image)}."
            )
        if pixels.shape[-1] == 1:
            pixels = np.repeat(pixels, 3, axis=-1)
        if not np.issubdtype(pixels.dtype, np.floating):
            pixels = pixels.astype(np.uint8)
        batch = pixels[:max_outputs]
        self._backend.add_images(tag, batch, step, dataformats="NHWC")
        self._written()

    def text(self, tag: str, textdata: str, step: int) -> None:
        """Writes text, which TensorBoard shows as Markdown.

        Args:
            tag: Its name.
            textdata: The text, or an array of strings.
            step: The training step.
        """
        lines = np.atleast_1d(np.asarray(textdata)).ravel()
        self._backend.add_text(tag, "\n".join(str(line) for line in lines), step)
        self._written()

    def histogram(
        self, tag: str, values: Any, step: int, bins: int | None = None
    ) -> None:
        """Writes how values are distributed.

        Args:
            tag: Their name.
            values: An array of any shape.
            step: The training step.
            bins: The number of bins; None for the square root of the number of values,
                at least 30.
        """
        flat = np.asarray(values).ravel()
        count = max(30, int(np.sqrt(flat.size))) if bins is None else bins
        self._backend.add_histogram(tag, flat, step, bins=count)
        self._written()

    def hparams(self, hparams: dict[str, Any]) -> None:
        """Writes the settings of the run, as text."""
        lines = [f"{name}: {value}" for name, value in sorted(hparams.items())]
        self.text("hparams", "  \n".join(lines), step=0)

    def flush(self) -> None:
        """Brings all that was written to the disk."""
        self._backend.flush()

    def close(self) -> None:
        """Ends the log."""
        self._backend.close()

    def _written(self) -> None:
        if self._auto_flush:
            self.flush()


def _open(log_dir: str) -> _Backend:
    for name in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(name).SummaryWriter(log_dir)
        except ImportError:
            continue
    try:
        return _TensorFlow(importlib.import_module("tensorflow"), log_dir)
    except ImportError:
        raise ImportError(_MISSING) from None


class _TensorFlow:
    """TensorFlow's writer with the methods of the other two."""

    def __init__(self, tensorflow: Any, log_dir: str) -> None:
        self._summary: Any = tensorflow.summary
        self._writer: Any = tensorflow.summary.create_file_writer(log_dir)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        with self._writer.as_default():
            self._summary.scalar(tag, value, step=step)

    def add_images(self, tag: str, images: Any, step: int, **options: Any) -> None:
        with self._writer.as_default():
            self._summary.image(tag, images, step=step, max_outputs=len(images))

    def add_text(self, tag: str, text: str, step: int) -> None:
        with self._writer.as_default():
            self._summary.text(tag, text, step=step)

    def add_histogram(self, tag: str, values: Any, step: int, bins: Any) -> None:
        with self._writer.as_default():
            self._summary.histogram(tag, values, step=step, buckets=bins)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
