"""A train step and an evaluation in turns, the model switched before each.

Blocks with batch statistics and dropout do other things in training than in evaluation,
so ``train()`` and ``eval()`` change static attributes of all of them. The functions of
raw JAX are two, and nothing is switched.
"""

from typing import Any

import jax

from benchmarks import blocks, perceptrons, steps
from benchmarks.gauges import Operation


def raw(depth: int) -> Operation:
    """Both functions take the same values."""
    batch = perceptrons.batch()
    params, state = blocks.parameters(depth), blocks.states(depth)
    step = steps.raw(blocks.loss, params, batch, state=state)
    _, treedef = jax.tree.flatten((params, steps.ADAM.init(params), state))

    @jax.jit
    def evaluate(leaves, x, y):
        params, _, state = jax.tree.unflatten(treedef, leaves)
        return blocks.evaluated(params, state, x, y)

    def operation():
        step()
        return evaluate(step.objects["leaves"], *batch.values())

    return operation


def nnx(nnx: Any, depth: int, **mode: bool) -> Operation:
    """One model, switched, for Graftree or Flax NNX."""
    model = blocks.nnx_model(nnx, depth)
    step, evaluate = _functions(nnx, model, **mode)
    batch = perceptrons.batch()

    def operation():
        model.train()
        step()
        model.eval()
        return evaluate(model, *batch.values())

    return operation


def nnx_view(nnx: Any, depth: int, **mode: bool) -> Operation:
    """A view of the model is evaluated, and nothing is switched."""
    model = blocks.nnx_model(nnx, depth)
    view = nnx.view(model, deterministic=True, use_running_average=True)
    step, evaluate = _functions(nnx, model, **mode)
    batch = perceptrons.batch()

    def operation():
        step()
        return evaluate(view, *batch.values())

    return operation


def _functions(nnx: Any, model: Any, **mode: bool) -> tuple[Operation, Any]:
    loss, batch = perceptrons.nnx_loss, perceptrons.batch()
    step = steps.nnx(nnx, loss, model, batch, has_state=True, **mode)
    return step, nnx.jit(loss, **mode)
