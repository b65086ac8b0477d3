"""Computes `ropes_of_transformers.json` anew, as transformers does.

Run with transformers 5.24.0 and torch 2.13.0, which made the file:

    python tests/contract/test_nn_layers/ropes_of_transformers.py

A row has a configuration as config.json has had it before transformers 5, the length of
a sequence, how far each pair turns from one position to the next, and the factor of
sine and cosine, both computed by transformers in float32. For another configuration add
a row with the first two.
"""

import json
import pathlib

SIZE = 16


def main():
    import torch
    import transformers
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama

    path, rows = pathlib.Path(__file__).with_suffix(".json"), []
    for entries, length, *_ in json.loads(path.read_text()):
        theta, scaling = entries["rope_theta"], entries["rope_scaling"]
        config = transformers.LlamaConfig(
            hidden_size=4 * SIZE,
            num_attention_heads=4,
            head_dim=SIZE,
            max_position_embeddings=entries["max_position_embeddings"],
            rope_parameters={**(scaling or {}), "rope_theta": theta},
        )
        kind = config.rope_parameters.get("rope_type", "default")
        if kind == "default":
            rotary = modeling_llama.LlamaRotaryEmbedding
            turns, factor = rotary.compute_default_rope_parameters(config)
        else:
            compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
            turns, factor = compute(config, torch.device("cpu"), length)
        rows.append([entries, length, turns.tolist(), factor])
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
