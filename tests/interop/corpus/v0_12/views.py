"""Views share Variables with the model."""

from flax import nnx

net = nnx.Sequential(
    nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
)
evaluate = nnx.view(net, deterministic=True, use_running_average=True)
print(evaluate.layers[0].deterministic, net.layers[0].deterministic)
print(evaluate.layers[1].scale is net.layers[1].scale)
try:
    nnx.view(net, detreministic=True)
except ValueError as error:
    print("Unused keys found" in str(error))
print("use_running_average" in nnx.view_info(net))
