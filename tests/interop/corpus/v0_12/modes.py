"""`train_mode`, `eval_mode`, `set_mode`, before they were `view`.

Not in Flax today.
"""

from flax import nnx

net = nnx.Sequential(
    nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
)
train, evaluate = nnx.train_mode(net), nnx.eval_mode(net)
print(train.layers[0].deterministic, evaluate.layers[0].deterministic)
print(train.layers[1].use_running_average, evaluate.layers[1].use_running_average)
other = nnx.set_mode(net, only=nnx.Dropout, deterministic=True)
print(other.layers[0].deterministic, other.layers[1].use_running_average)
print(nnx.eval_mode(nnx.Linear(1, 1, rngs=nnx.Rngs(0))).kernel.shape)
print("deterministic" in nnx.set_mode_info(net))
