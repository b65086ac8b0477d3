"""Writes `ropes_of_transformers.json`: what transformers computes from configurations.

Run with transformers 5.24.0 and torch 2.13.0, which made the file:

    python tests/contract/test_nn_layers/ropes_of_transformers.py

A row has a configuration as config.json has had it before transformers 5, the length of
a sequence, how far each pair turns from one position to the next, and the factor of
sine and cosine, both computed by transformers in float32.
"""

import json
import pathlib

SIZE = 16
SHORT = [1.0 + i / 16 for i in range(8)]
LONG = [1.0 + i * 3 / 4 for i in range(8)]
FACTORS = {"short_factor": SHORT, "long_factor": LONG}


def original(length):
    return {"original_max_position_embeddings": length}


# theta, max_position_embeddings, rope_scaling, length of the sequence.
CASES = [
    (500000.0, 128, None, 9),
    (1e6, 128, {"rope_type": "linear", "factor": 8.0}, 9),
    (1e4, 32, {"type": "dynamic", "factor": 4.0}, 9),
    (1e4, 32, {"type": "dynamic", "factor": 4.0}, 100),
    (1e4, 128, {"type": "yarn", "factor": 4.0, **original(32)}, 9),
    (1e4, 128, {"rope_type": "yarn", "factor": None, **original(32)}, 9),
    (
        150000.0,
        131072,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            **original(4096),
        },
        9,
    ),
    (
        1e4,
        163840,
        {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            **original(4096),
        },
        9,
    ),
    (
        1e4,
        128,
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.25,
            "beta_fast": 8,
            "beta_slow": 2,
            **original(32),
        },
        9,
    ),
    (
        500000.0,
        512,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **original(64),
        },
        9,
    ),
    (1e4, 128, {"rope_type": "longrope", **FACTORS, **original(32)}, 32),
    (1e4, 128, {"rope_type": "longrope", **FACTORS, **original(32)}, 33),
    (1e4, 128, {"rope_type": "longrope", "factor": 16, **FACTORS, **original(32)}, 9),
    (1e6, 128, {"rope_type": "proportional", "partial_rotary_factor": 0.25}, 9),
]


def main():
    import torch
    import transformers
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama

    rows = []
    for theta, longest, scaling, length in CASES:
        config = transformers.LlamaConfig(
            hidden_size=4 * SIZE,
            num_attention_heads=4,
            head_dim=SIZE,
            max_position_embeddings=longest,
            rope_parameters={**(scaling or {}), "rope_theta": theta},
        )
        kind = config.rope_parameters.get("rope_type", "default")
        functions = modeling_rope_utils.ROPE_INIT_FUNCTIONS
        if kind == "default":
            compute = (
                modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters
            )
            turns, factor = compute(config)
        else:
            turns, factor = functions[kind](config, torch.device("cpu"), length)
        entries = {"rope_theta": theta, "max_position_embeddings": longest}
        rows.append(
            [{**entries, "rope_scaling": scaling}, length, turns.tolist(), factor]
        )
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
