"""Children and modules by functions."""

from flax import nnx

net = nnx.Sequential(
    nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.BatchNorm(1, rngs=nnx.Rngs(0))
)
print([(path, type(m).__name__) for path, m in nnx.iter_modules(net)])
print([name for name, child in nnx.iter_children(net.layers[0])])
