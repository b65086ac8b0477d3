"""Helpers around a training step in programs for Flax.

- ``flax.training.train_state``: params, optimizer state and step in one pytree.
- ``flax.jax_utils``: copies of data on several devices, for ``pmap``.
- ``flax.metrics.tensorboard``: scalars, images and text for TensorBoard. The first of
  tensorboardX, PyTorch and TensorFlow that can be imported writes the files.
"""

from __future__ import annotations

import collections
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graftree.interop.flax_side import pytree_dataclasses
from graftree.training import optimizers


class TrainState(pytree_dataclasses.PyTreeNode):
    """Params, optimizer state and step; a step returns a new object.

    Write a subclass to hold more. Unlike `nnx.TrainState` it has a function instead
    of the skeleton of a model.

    Attributes:
        step: The number of calls of `apply_gradients`.
        apply_fn: The function of the model; static.
        params: A pytree of arrays, or a State.
        tx: The Optax transformation; static.
        opt_state: The state of ``tx``.

    Example:
        >>> import optax
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.array(3.0)}, tx=optax.sgd(0.5)
        ... )
        >>> state = state.apply_gradients(grads={"w": jnp.array(2.0)})
        >>> state.step, state.params["w"].item()
        (1, 2.0)
    """

    step: int | jax.Array
    apply_fn: Callable[..., Any] | None = pytree_dataclasses.field(pytree_node=False)
    params: Any = pytree_dataclasses.field(pytree_node=True)
    tx: Any = pytree_dataclasses.field(pytree_node=False)
    opt_state: Any = pytree_dataclasses.field(pytree_node=True)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Any,
        tx: Any,
        **kwargs: Any,
    ) -> Self:
        """Makes an object with a fresh optimizer state, at step 0.

        Args:
            apply_fn: The function of the model, or None.
            params: A pytree of arrays, or a State.
            tx: An Optax transformation.
            **kwargs: Values of the fields that a subclass adds.

        Returns:
            The new object.
        """
        opt_state = tx.init(params)
        return cls(
            step=0,
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=opt_state,
            **kwargs,
        )

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Returns the object after one step of the optimizer.

        Args:
            grads: Gradients with the structure of ``params``.
            **kwargs: New values of other fields.

        Returns:
            A new object with ``step + 1``; this one is unchanged.
        """
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optimizers.apply_updates(self.params, updates)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )


_AXIS = "_device_put_sharded"


def replicate(
    tree: Any, devices: Sequence[Any] | None = None, axis_name: str = _AXIS
) -> Any:
    """Copies a pytree to several devices.

    Args:
        tree: A pytree of arrays.
        devices: The devices; by default all of this process.
        axis_name: The name of the axis of the mesh that they form.

    Returns:
        A pytree of arrays ``[devices, ...]``, one row on each device.

    Example:
        >>> copies = replicate({"w": jnp.ones(3)}, jax.devices()[:1])
        >>> copies["w"].shape
        (1, 3)
    """
    chosen = jax.local_devices() if devices is None else list(devices)
    sharding = _sharding(chosen, axis_name)

    def copies(leaf: Any) -> jax.Array:
        row = jnp.asarray(leaf)[None]
        shape = (len(chosen), *row.shape[1:])
        rows = [jax.device_put(row, device) for device in chosen]
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    return jax.tree.map(copies, tree)


def _sharding(devices: Sequence[Any], axis_name: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), axis_name), PartitionSpec(axis_name))


def unreplicate(tree: Any) -> Any:
    """Takes the first of the copies that `replicate` made.

    Args:
        tree: A pytree of arrays ``[devices, ...]``.

    Returns:
        A pytree of their first rows.

    Example:
        >>> unreplicate({"w": jnp.ones((4, 3))})["w"].shape
        (3,)
    """
    return jax.tree.map(lambda leaf: leaf[0], tree)


def prefetch_to_device(
    iterator: Iterable[Any],
    size: int,
    devices: Sequence[Any] | None = None,
    axis_name: str = _AXIS,
) -> Iterator[Any]:
    """Puts batches on devices ahead of their use.

    Args:
        iterator: Yields pytrees of arrays ``[devices * n, ...]``.
        size: How many batches wait on the devices; 2 is enough for one GPU.
        devices: The devices that share a batch; by default all of this process.
        axis_name: The name of the axis of the mesh that they form.

    Returns:
        An iterator over the same batches, split over the devices along axis 0.

    Raises:
        ValueError: If ``size`` is not positive, or an array can't be split evenly.

    Example:
        >>> batches = prefetch_to_device(
        ...     [np.ones(1), np.zeros(1)], size=2, devices=jax.devices()[:1]
        ... )
        >>> [batch.item() for batch in batches]
        [1.0, 0.0]
    """
    if size < 1:
        raise ValueError(
            f"At least one batch must wait on the devices, got size={size}."
        )
    chosen = jax.local_devices() if devices is None else list(devices)
    return _ahead(iter(iterator), size, _sharding(chosen, axis_name))


def _ahead(batches: Iterator[Any], size: int, sharding: NamedSharding) -> Iterator[Any]:
    placed = (jax.device_put(batch, sharding) for batch in batches)
    waiting = collections.deque(itertools.islice(placed, size))
    while waiting:
        yield waiting.popleft()
        waiting.extend(itertools.islice(placed, 1))


_MISSING = (
    "flax.metrics.tensorboard writes its files with tensorboardX, PyTorch or "
    "TensorFlow, and none of them can be imported.\n"
    "Install one: pip install tensorboardX"
)


class SummaryWriter:
    """Writes a log that TensorBoard shows.

    Args:
        log_dir: The folder for the files; made if it does not exist.
        auto_flush: Whether every call reaches the disk before it returns.

    Raises:
        ImportError: If neither tensorboardX, PyTorch nor TensorFlow is installed.

    Example:
        >>> writer = SummaryWriter("/tmp/run")  # doctest: +SKIP
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
        self._add("scalar", tag, np.asarray(value).item(), step)

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
        self._add("images", tag, pixels[:max_outputs], step, dataformats="NHWC")

    def text(self, tag: str, textdata: str, step: int) -> None:
        """Writes text, which TensorBoard shows as Markdown.

        Args:
            tag: Its name.
            textdata: The text, or an array of strings.
            step: The training step.
        """
        lines = np.atleast_1d(np.asarray(textdata)).ravel()
        self._add("text", tag, "\n".join(str(line) for line in lines), step)

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
        self._add("histogram", tag, flat, step, bins=count)

    def hparams(self, hparams: dict[str, Any]) -> None:
        """Writes the settings of the run, as text."""
        lines = [f"{name}: {value}" for name, value in sorted(hparams.items())]
        self.text("hparams", "  \n".join(lines), step=0)

    def flush(self) -> None:
        """Writes everything so far to the disk."""
        self._backend.flush()

    def close(self) -> None:
        """Ends the log."""
        self._backend.close()

    def _add(self, kind: str, *values: Any, **options: Any) -> None:
        getattr(self._backend, f"add_{kind}")(*values, **options)
        if self._auto_flush:
            self.flush()


def _open(log_dir: str) -> Any:
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
