"""Modules are pytrees; what is data of them, what they hold and iterate over."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Annotated(nnx.Module):  # deprecated
    layers: nnx.Data[list]
    name: nnx.Static[str]

    def __init__(self):
        self.layers = [nnx.Param(jnp.ones(1)), nnx.Param(jnp.zeros(1))]
        self.name = "net"


@nnx.dataclass
class Fields(nnx.Module):
    layers: list = nnx.data()
    name: str = nnx.static(default="net")


net = Fields(Annotated().layers)
print(len(jax.tree.leaves(Annotated())), len(jax.tree.leaves(net)))
print(net.name, nnx.is_data(net.layers))


class Box(nnx.Pytree):
    def __init__(self):
        self.a = nnx.data(jnp.ones(2))
        self.b = nnx.static((1, 2))


box = Box()
print(len(jax.tree.leaves(box)), jax.tree.map(lambda x: x * 3, box).a, box.b)
print(nnx.Object is not None, issubclass(nnx.Module, nnx.Pytree))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Dict(a=nnx.Linear(2, 2, rngs=rngs))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return {name: head(x) for name, head in self.heads.items()}


x = jnp.ones((1, 2))
net = Net(nnx.Rngs(0))
net.layers.append(nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
print(len(net.layers), sorted(nnx.state(net)["layers"]), net.heads.a is net.heads["a"])
print([(path, type(m).__name__) for path, m in nnx.iter_modules(net)])
print([name for name, child in nnx.iter_children(net.layers[0])])

print(sorted(net(x)))


# `nnx.capture` in place of `pop`.
class Sower(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return x


y, sown = nnx.capture(Sower(), nnx.Intermediate)(x)
print(sown["x"].get_value()[0], y.shape)

# States as flat dicts for a checkpoint, and back.
flat = {
    "/".join(map(str, path)): leaf[...]
    for path, leaf in nnx.to_flat_state(nnx.state(net.layers))
}
print(sorted(flat))
other = nnx.clone(net.layers)
state = jax.tree.map(jnp.zeros_like, nnx.state(other))
for path, leaf in nnx.to_flat_state(state):
    leaf[...] = flat["/".join(map(str, path))]
nnx.update(other, state)
print(jnp.allclose(other[2](x), net.layers[2](x)))

# JAX's own transforms.
layer = net.layers[0]
print(jax.jit(lambda m, x: m(x))(layer, x).shape)
grads = jax.grad(lambda layer: layer(x).sum())(layer)
print(type(grads).__name__, grads.kernel[...].shape)
layer = jax.tree.map(lambda p, g: p - 0.1 * g, layer, grads)
print(layer.bias[...], jax.vmap(layer)(jnp.ones((3, 1, 2))).shape)
stack = jax.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(
    jax.random.split(jax.random.key(0), 3)
)
print(stack.kernel[...].shape)


class Frozen(nnx.Param):
    pass


# Tagged parameters are frozen by a filter.
net = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=Frozen(jnp.ones(2)))
trainable = nnx.All(nnx.Param, nnx.Not(Frozen))
optimizer = nnx.Optimizer(net, optax.sgd(1.0), wrt=trainable)
grads = nnx.grad(lambda n: (n.a * n.b).sum(), argnums=nnx.DiffState(0, trainable))(net)
optimizer.update(net, grads)
print(net.a[...], net.b[...])
