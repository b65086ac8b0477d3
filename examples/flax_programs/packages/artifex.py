"""avitai-artifex: a variational autoencoder of small pictures, from its classes."""

import jax
import jax.numpy as jnp
import optax
from artifex.generative_models.core.configuration import (
    DecoderConfig,
    EncoderConfig,
    VAEConfig,
)
from artifex.generative_models.models.vae import VAE
from flax import nnx

STEPS = 100
GOAL = 1.5
SHAPE = (8, 8, 1)


@nnx.jit
def step(model, optimizer, x):
    def loss_fn(model):
        return model.loss_fn({"inputs": x}, model(x))["total_loss"]

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def build():
    sizes = {"hidden_dims": (64,), "activation": "relu"}
    config = VAEConfig(
        name="vae",
        encoder=EncoderConfig(name="encoder", input_shape=SHAPE, latent_dim=4, **sizes),
        decoder=DecoderConfig(
            name="decoder", output_shape=SHAPE, latent_dim=4, **sizes
        ),
        encoder_type="dense",
        kl_weight=0.01,
    )
    model = VAE(config, rngs=nnx.Rngs(0, dropout=1, sample=2))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def train(model, optimizer):
    for key in jax.random.split(jax.random.key(2), STEPS):
        rows = jax.nn.one_hot(jax.random.randint(key, (32,), 0, 8), 8)
        yield step(model, optimizer, jnp.tile(rows[:, :, None, None], (1, 1, 8, 1)))
