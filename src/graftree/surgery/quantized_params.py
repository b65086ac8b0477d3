"""Kernels held in 8 or 4 bits, out of training, as the base for LoRA (QLoRA).

The numbers are those of qwix: a Param holds a ``qwix.QArray`` instead of an array, and
gives the array that this stands for wherever it is read. So layers, LoRA and policies
work as before, and each layer makes its kernel again in each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.variables import values, variables
from graftree.core.variables.variables import A
from graftree.surgery import frozen_variables, lora_targets, selections
from graftree.surgery.lora_targets import LoRATarget


class Quantized(frozen_variables.Frozen[A]):
    """A frozen Variable that holds a ``qwix.QArray``, and reads as its array."""

    def get_value(self, *, index: Any = variables.MISSING) -> Any:
        """Returns the array that the stored numbers and scales stand for."""
        value, qwix = super().get_value(), _qwix("A quantized Param")
        if isinstance(value, qwix.QArray):  # and no sharding, in a tree of these
            is_abstract = isinstance(value.qvalue, jax.ShapeDtypeStruct)
            make = qwix.dequantize
            value = jax.eval_shape(make, value) if is_abstract else make(value)
        return value if index is variables.MISSING else value[index]

    def __getattr__(self, name: str) -> Any:
        if name == "_raw_value" or name in variables.metadata_of(self):
            return super().__getattr__(name)
        # The shape and dtype of a QArray are those of its array.
        is_known = name in ("shape", "ndim", "dtype")
        return getattr(self.get_raw_value() if is_known else self.get_value(), name)


def quantize(
    model: Any, where: Any, qtype: Any = "int8", *, tile_size: int | None = None
) -> list[Path]:
    """Holds kernels in 8 or 4 bits, in place, and takes them out of training.

    Each number becomes a multiple of a scale, and each output of a layer has scales of
    its own. Layers then compute with these rounded kernels, made from them in each
    call, in the dtype of the scales; gradients pass through to the inputs. Train LoRA
    on top: `add_lora` works as on any layer. Rematerialize the layers in the backward
    pass (`nnx.remat`, ``Stack(remat=True)``), which would keep the kernels otherwise.

    Args:
        model: A Module, or another object or container of layers.
        where: The layers or Params, as for `add_lora`.
        qtype: What each number becomes: ``"int8"``, ``"int4"``, ``"nf4"`` (of QLoRA),
            or another one of ``qwix.quantize``.
        tile_size: How many inputs share a scale; ``None``: all.

    Returns:
        The paths of the kernels.

    Raises:
        ImportError: If qwix is not installed.
        ValueError: If something is selected that `add_lora` could not adapt, or a
            kernel is quantized already, is abstract, in a ref, or has a hook; or if
            ``tile_size`` does not divide its inputs. Then nothing has changed.
        TypeError: If ``model`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns one of the kernels.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
        >>> before = model(jnp.ones((1, 64)))
        >>> nnx.surgery.quantize(model, nnx.Linear, "int4", tile_size=32)
        [('layers', 0, 'kernel')]
        >>> error = jnp.abs(model(jnp.ones((1, 64))) - before).max()
        >>> bool(0 < error < 0.5), model.layers[0].kernel.get_raw_value().qvalue.dtype
        (True, dtype(int4))

    References:
        Dettmers et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
    """
    call = "nnx.surgery.quantize"
    qwix = _qwix(call)
    selections.check_model(model, call)
    targets = lora_targets.select(model, where, call)
    lora_targets.check(model, targets, call)
    selections.check_all(
        [(target.own_path, target) for target in targets],
        lambda target: _reason_against(target, tile_size),
        f"{call}: some kernels can't be quantized.",
        "Exclude them with `where`.",
    )
    kernels = [target.kernel for target in targets]
    arrays = [_quantized(qwix, target, qtype, tile_size) for target in targets]
    for target in targets:
        variables.check_owned(target.kernel, paths.dotted(target.own_path))
    for kernel, array in zip(kernels, arrays, strict=True):
        frozen_variables.take_out(kernel, Quantized)
        kernel.set_raw_value(array)
    return [_kernel_path(target) for target in targets]


def dequantize(model: Any, where: Any = ...) -> list[Path]:
    """Makes quantized kernels arrays and Params again: the inverse of `quantize`.

    They keep the rounding. `merge_lora` can then merge adaptations into them.

    Args:
        model: A Module, or another object or container of layers.
        where: The parts of the model in which they are, as for `merge_lora`.

    Returns:
        The paths of the kernels.

    Raises:
        ValueError: If nothing there is quantized.
        TypeError: If ``model`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns one of the kernels.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
        >>> paths = nnx.surgery.quantize(model, nnx.Linear)
        >>> rounded = model.layers[0].kernel[...]
        >>> nnx.surgery.dequantize(model)
        [('layers', 0, 'kernel')]
        >>> jnp.array_equal(model.layers[0].kernel, rounded)
        Array(True, dtype=bool)
    """
    call = "nnx.surgery.dequantize"
    selections.check_model(model, call)
    within = selections.within(model, where, call)
    items = [x for x in within if isinstance(x.value, Quantized)]
    if not items:
        raise ValueError(f"{call}: nothing that is selected is quantized.")
    for path, kernel in items:
        variables.check_owned(kernel, paths.dotted(path))
    for _, kernel in items:
        kernel.set_raw_value(kernel.get_value())
        frozen_variables.put_back(kernel)
    return [path for path, _ in items]


def _kernel_path(target: LoRATarget) -> Path:
    if target.name is not None:
        return target.own_path
    return (*target.path, target.adaptable.kernel)


def _reason_against(target: LoRATarget, tile_size: int | None) -> str | None:
    kernel = target.kernel
    raw = kernel.get_raw_value()
    if isinstance(kernel, Quantized):
        return "it is already quantized"
    if values.is_stand_in(raw) or _jax.is_ref(raw):
        return "its kernel is abstract, or in a ref"
    if "on_get_value" in variables.metadata_of(kernel):
        return "its kernel has a hook `on_get_value`"
    if type(kernel) is not frozen_variables.Frozen and (
        reason := frozen_variables.reason_against(kernel, False)
    ):
        return reason
    if tile_size is not None and target.axes.ins[-1] % tile_size:
        return f"tile_size={tile_size} does not divide {target.axes.ins[-1]} inputs"
    return None


def _quantized(qwix: Any, target: LoRATarget, qtype: Any, tile_size: int | None) -> Any:
    """Rounds a kernel, with scales for each output, batch axis and tile of inputs."""
    kernel, axes = target.kernel.get_value(), target.axes
    order: Sequence[int] = axes.grouped(range(kernel.ndim))
    num_outs, num_ins = len(axes.outs), len(axes.ins)
    ins = order[kernel.ndim - num_outs - num_ins : kernel.ndim - num_outs]
    tiled = {} if tile_size is None else {ins[-1]: tile_size}
    channelwise = tuple([axis for axis in order if axis not in ins])
    return qwix.quantize(kernel, qtype, channelwise_axes=channelwise, tiled_axes=tiled)


def _qwix(call: str) -> Any:
    try:
        import qwix
    except ImportError as error:
        raise ImportError(
            f"{call} uses the package qwix, which is not installed.\n"
            "Install it: pip install qwix"
        ) from error
    return qwix
