"""google-tunix: its Qwen3, made small, is fine-tuned with LoRA."""

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3

LENGTH = 16
STEPS = 60
GOAL = 2.3  # nats; ln 16 = 2.77 if it knows nothing


@nnx.jit
def step(model, optimizer, tokens):
    def loss_fn(model):
        logits, _ = model(tokens, *positions_and_mask(tokens))
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return losses.mean()

    differentiated = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=differentiated)(model)
    optimizer.update(model, grads)
    return loss


def positions_and_mask(tokens):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return positions, None, jnp.broadcast_to(mask, (len(tokens), *mask.shape))


def build():
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=16,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    base = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    provider = qwix.LoraProvider(module_path=".*(proj|lm_head).*", rank=8, alpha=16.0)
    tokens = jnp.ones((1, LENGTH), int)
    model = qwix.apply_lora_to_model(
        base, provider, tokens, *positions_and_mask(tokens), rngs=nnx.Rngs(1)
    )
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)


def train(model, optimizer):
    for key in jax.random.split(jax.random.key(1), STEPS):
        period = jax.random.randint(key, (8, 4), 0, 16)
        yield step(model, optimizer, jnp.tile(period, (1, LENGTH // 4)))
