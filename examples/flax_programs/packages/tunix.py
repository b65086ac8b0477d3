"""google-tunix: its Qwen3, made small, is fine-tuned with LoRA by its trainer."""

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

STEPS = 60
GOAL = 2.0


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
    rule = qwix.LoraProvider(
        module_path=".*(q_proj|kv_proj|gate_proj|up_proj|down_proj|lm_head).*",
        rank=8,
        alpha=16.0,
    )
    model = qwix.apply_lora_to_model(
        base, rule, **base.get_model_input(), rngs=nnx.Rngs(1)
    )
    return (model,)


def inputs(batch):
    mask = batch.input_mask
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def train(model):
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=STEPS)
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-2), config)
    trainer = trainer.with_gen_model_input_fn(inputs)
    step = trainer.create_train_step_fn()
    step = nnx.jit(step)
    for key in jax.random.split(jax.random.key(1), STEPS):
        tokens = jnp.tile(jax.random.randint(key, (8, 4), 0, 16), (1, 4))
        batch = peft_trainer.TrainingInput(tokens, jnp.ones_like(tokens, bool))
        out = step(trainer.model, trainer.optimizer, inputs(batch))
        yield jax.tree.leaves(out)[0]
