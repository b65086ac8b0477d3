"""States as flat dicts for a checkpoint, and back."""

import jax.numpy as jnp
from flax import nnx


def create(seed):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs))


flat = {
    "/".join(map(str, path)): leaf[...]
    for path, leaf in nnx.to_flat_state(nnx.state(create(0)))
}
print(sorted(flat))
net = create(1)
state = nnx.state(net)
for path, leaf in nnx.to_flat_state(state):
    leaf[...] = flat["/".join(map(str, path))]
nnx.update(net, state)
print(jnp.allclose(net(jnp.ones((1, 2))), create(0)(jnp.ones((1, 2)))))
