"""Writes `tests/decoding/beams_of_transformers.json`: their beams of a tiny Llama.

Needs torch and transformers, and is not part of the tests:

    python scripts/beams_of_transformers.py

The weights are normal numbers of NumPy, in the order of the names of the tensors.
"""

import itertools
import json
import pathlib

import numpy as np
import torch
import transformers

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_position_embeddings": 48,
    "tie_word_embeddings": False,
}
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 7]]
SETTINGS = [  # beams, results, length penalty, early stopping, tokens, stop, repetition
    (2, 1, 1.0, False, 8, [], None),
    (3, 3, 1.0, False, 10, [7], None),
    (3, 2, 0.0, True, 10, [7, 2], None),
    (4, 2, 2.0, "never", 10, [7, 2], None),
    (4, 4, 2.0, False, 10, [1, 5, 8], None),
    (3, 3, -1.0, "never", 10, [7], None),
    (5, 2, 0.6, False, 10, [9, [3, 4]], None),
    (3, 1, 1.0, True, 9, [[1, 1], 2], None),
    (3, 2, 1.0, False, 8, [7], 1.5),
    (4, 2, 1.0, True, 1, [7], None),
]


def weights(shapes):
    """Draws the tensors."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shapes[name]) for name in sorted(shapes)}
    return {
        name: (1 + 0.1 * x if x.ndim == 1 else 0.4 * x).astype(np.float32)
        for name, x in drawn.items()
    }


class Stops(transformers.StoppingCriteria):
    """Ends a sequence with several tokens."""

    def __init__(self, stops, start):
        self.stops, self.start = stops, start

    def __call__(self, tokens, scores, **_):
        rows = [row[self.start :] for row in tokens.tolist()]
        return torch.tensor([bool(cut(row, self.stops) < len(row) + 1) for row in rows])


def cut(row, stops):
    """How many tokens a row has up to its first stop; one more if it has none."""
    for length in range(1, len(row) + 1):
        if any(row[:length][-len(stop) :] == stop for stop in stops):
            return length
    return len(row) + 1


def search(model, prompts, setting):
    """Gives the new tokens of each sequence, and their scores."""
    beams, results, penalty, early, count, stop, repetition = setting
    length = max(map(len, prompts))
    tokens = torch.zeros((len(prompts), length), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):
        tokens[i, length - len(prompt) :] = torch.tensor(prompt)
        mask[i, length - len(prompt) :] = 1
    single = [x for x in stop if isinstance(x, int)]
    several = [x for x in stop if not isinstance(x, int)]
    criteria = transformers.StoppingCriteriaList(
        [Stops(several, length)] if several else []
    )
    found = model.generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        num_beams=beams,
        num_return_sequences=results,
        length_penalty=penalty,
        early_stopping=early,
        max_new_tokens=count,
        repetition_penalty=repetition,
        eos_token_id=single or None,
        pad_token_id=0,
        stopping_criteria=criteria,
        return_dict_in_generate=True,
        output_scores=True,
    )
    stops = [[x] for x in single] + several
    rows = [row[: cut(row, stops)] for row in found.sequences[:, length:].tolist()]
    return rows, found.sequences_scores.tolist()


def main():
    """Writes the file."""
    config = transformers.LlamaConfig(**CONFIG, bos_token_id=0, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    shapes = {name: [*x.shape] for name, x in model.state_dict().items()}
    drawn = weights(shapes)
    model.load_state_dict({name: torch.tensor(x) for name, x in drawn.items()})
    cases = []
    for setting in SETTINGS:
        # A repetition penalty of transformers counts padding, so: prompt by prompt.
        batches = [[row] for row in PROMPTS] if setting[-1] else [PROMPTS]
        found = [search(model, batch, setting) for batch in batches]
        tokens, scores = ([*itertools.chain(*x)] for x in zip(*found, strict=True))
        cases.append({"setting": setting, "tokens": tokens, "scores": scores})
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    content = {"versions": versions, "prompts": PROMPTS, "shapes": shapes}
    lines = ",\n".join(json.dumps(case) for case in cases)
    text = json.dumps(content)[:-1] + f',\n"cases": [\n{lines}\n]}}\n'
    (ROOT / "tests/decoding/beams_of_transformers.json").write_text(text)


if __name__ == "__main__":
    main()
