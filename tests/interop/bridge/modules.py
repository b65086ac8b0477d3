"""What programs of both libraries are made of."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests import meshes

X = jax.random.normal(jax.random.key(7), (4, 3))
KEY = jax.random.key(0)


def compact(nnx):
    """Decorates the compact call of a bridge Module that has nothing else."""

    def make(call):
        members = {"__call__": nnx.bridge.compact(call)}
        return type(call.__name__, (nnx.bridge.Module,), members)

    return make


def linen(call):
    """The same, of a Linen Module."""
    return type(call.__name__, (nn.Module,), {"__call__": nn.compact(call)})


def mapped(cls, size=3, **options):
    """Linen Modules side by side, each with Variables and keys of its own."""
    axes = dict.fromkeys(("params", "batch_stats", "Variable"), 0)
    keys = {"params": True, "dropout": True}
    options |= {"variable_axes": axes, "split_rngs": keys, "axis_size": size}
    return nn.vmap(cls, in_axes=None, **options)


def scanned(cls, length):
    """Linen Modules one after the other."""
    axes = {"params": 0, "batch_stats": 0}
    return nn.scan(cls, variable_axes=axes, split_rngs={"params": True}, length=length)


def on_devices(*names):
    """A context in which arrays are divided over two devices along the last name."""
    return jax.set_mesh(meshes.mesh_of(**dict.fromkeys(names, 1) | {names[-1]: 2}))


def net(nnx):
    """A class with parameters, statistics, dropout and a counter."""

    class Net(nnx.Module):
        def __init__(self, din, dout, *, rngs, rate=0.5):
            self.lin = nnx.Linear(din, dout, rngs=rngs)
            self.norm = nnx.BatchNorm(dout, rngs=rngs)
            self.drop = nnx.Dropout(rate, rngs=rngs)
            self.count = nnx.Variable(jnp.zeros(()))
            self.din = din

        def __call__(self, x, train=False):
            self.count[...] += 1
            x = self.norm(self.lin(x), use_running_average=not train)
            return self.drop(x, deterministic=not train)

        def project(self, x, times=1):
            return self.lin(x) * times

    return Net


def dense(nnx):
    class Dense(nnx.bridge.Module):
        features: int
        use_bias: bool = True

        @nnx.bridge.compact
        def __call__(self, x):
            shape = x.shape[-1], self.features
            y = x @ self.param("kernel", nn.initializers.lecun_normal(), shape)
            if self.use_bias:
                y += self.param("bias", nn.initializers.zeros_init(), shape[1:])
            return y

    return Dense


def mlp(nnx):
    Dense = dense(nnx)

    class MLP(nnx.bridge.Module):
        hidden: int = 5

        @nnx.bridge.compact
        def __call__(self, x):
            x = nnx.relu(Dense(self.hidden)(x))
            x = Dense(2, name="out")(x)
            count = self.variable("counts", "n", lambda: jnp.zeros(()))
            count[...] += 1
            return x

    return MLP
