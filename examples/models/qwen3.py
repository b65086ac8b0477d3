"""Qwen3, as Hugging Face has it: Llama, but queries and keys are normalized.

Yang et al., 2025, "Qwen3 Technical Report".
"""

from examples.models import llama

BLOCK = llama.BLOCK
NORMS = {
    f"{BLOCK}.self_attn.q_norm": "blocks[{i}].attention.query_norm",
    f"{BLOCK}.self_attn.k_norm": "blocks[{i}].attention.key_norm",
}
LLAMA = [line for line in llama.WEIGHTS.items() if line[0] != "lm_head"]
# In the order of the files: after the embedding and the four projections.
WEIGHTS = dict([*LLAMA[:5], *NORMS.items(), *LLAMA[5:]])
