"""A Llama that is small enough for tests."""

from examples.models import llama

CONFIG = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=48,
)
