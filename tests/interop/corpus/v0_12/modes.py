"""`train_mode`, `eval_mode`, `set_mode`, before they were `view`.

Not in Flax today.
"""

from flax import nnx

net = nnx.Sequential(
    nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
)
for other in (
    nnx.train_mode(net),
    nnx.eval_mode(net),
    nnx.set_mode(net, only=nnx.Dropout, deterministic=True),
):
    print(other.layers[0].deterministic, other.layers[1].use_running_average)
print("deterministic" in nnx.set_mode_info(net))
