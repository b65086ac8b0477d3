"""Sub-modules by import statements."""

import flax.nnx as nnx
import flax.nnx.variablelib as variablelib
from flax.nnx import helpers, tracers, traversals
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import Conv, default_kernel_init
from flax.nnx.spmd import get_partition_spec
from flax.nnx.training.metrics import Average
from flax.nnx.training.optimizer import Optimizer, OptState
from flax.nnx.transforms import autodiff, compilation, iteration

print(variablelib.Param is nnx.Param, Conv is nnx.Conv, Average is nnx.metrics.Average)
print(autodiff.grad is nnx.grad, compilation.jit is nnx.jit, iteration.vmap is nnx.vmap)
print(Optimizer is nnx.Optimizer, nnx.optimizer.OptState is OptState)
print(dtypes.promote_dtype((1,), dtype=None)[0].dtype, callable(default_kernel_init))
print(traversals.flatten_mapping({"a": {"b": 1}}), helpers.TrainState is nnx.TrainState)
print(
    tracers.current_jax_trace() is not None,
    get_partition_spec is nnx.get_partition_spec,
)
