"""Classes that programs of both libraries are made of."""

import jax.numpy as jnp
from flax import linen as nn


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
