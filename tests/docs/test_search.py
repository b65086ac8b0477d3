"""Questions as people type them: the page with the answer is among the first three.

The site searches in the browser, with lunr; here its port to Python searches the same
sections, titles and tags, with the same weights (`mkdocs.yml`, `website/searching.py`).
"""

import functools
import re

import lunr
import pytest

from website import pages, searching

# What people type, by the page that answers.
QUESTIONS = {
    "start/installing": "install cuda | tpu install | python version",
    "guides/training_loop": "training loop | Trainer | epochs validation"
    " | early stopping",
    "guides/training_recipes": "learning rate schedule | gradient clipping"
    " | weight decay | gradient accumulation | warmup cosine | EMA of weights",
    "guides/several_models": "GAN | two optimizers | multiple optimizers | tied weights"
    " | tied embeddings | teacher student | frozen teacher",
    "guides/derivatives": "per-example gradients | hessian | jacobian"
    " | hessian vector product | DP-SGD | L-BFGS | gradients of activations",
    "guides/state_under_vmap": "batchnorm vmap | running statistics vmap"
    " | sync batchnorm",
    "guides/inside_jit": "print shapes | print inside jit | checkify | jax.debug.print"
    " | breakpoint",
    "guides/scale": "multiple gpus | data parallel | FSDP | tensor parallel"
    " | multi-host | pmap",
    "guides/profiling": "profiling | profiler trace",
    "guides/checkpoints": "save model | load model | save only the parameters"
    " | keep best checkpoint",
    "guides/resuming": "resume training | interrupted run",
    "guides/weights": "huggingface weights | load pretrained weights | safetensors"
    " | state_dict",
    "guides/surgery": "freeze layers | transfer learning | replace a layer",
    "guides/lora": "LoRA | PEFT | fine-tuning",
    "guides/own_transforms": "write your own transform | custom transform"
    " | make a jax transform work with modules",
    "guides/quantization": "quantization | int8 | 4-bit model | quantize a model"
    " | bitsandbytes | quantization aware training | qwix",
    "guides/precision": "mixed precision | bfloat16 | loss scaling",
    "guides/recompiles": "slow compilation | recompiles",
    "guides/debugging": "NaN loss | where does NaN come from",
    "guides/decoding": "generate text | kv cache | top-k sampling",
    "guides/summaries": "number of parameters | model summary",
    "guides/randomness": "random seed | dropout rng",
    "guides/sequence_layers": "variable length sequences | attention mask | LSTM",
    "guides/layers": "custom layer | conv2d | stateful layer",
    "guides/exporting": "ONNX | export model | serving",
    "guides/ensembles": "ensemble",
    "coming_from/pytorch": "DataLoader | no_grad",
    "look_up/faq": "L2 penalty",
}


def sections():
    """The sections of all pages, as the site indexes them."""
    for path in sorted(pages.DOCS.rglob("*.md")):
        name = path.relative_to(pages.DOCS).as_posix()
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        ranks = [x for start, x in searching.RANKS.items() if name.startswith(start)]
        parts = re.split(r"^#+ (.*)$", text, flags=re.M)[1:]
        for i in range(0, len(parts), 2):
            document = {
                "id": f"{name.removesuffix('.md')}#{i}",
                "title": parts[i],
                "text": parts[i + 1],
                "tags": searching.WORDS.get(name, "") if i == 0 else "",
            }
            yield document, {"boost": ranks[0] if ranks else 1}


@functools.cache
def index():
    weights = re.findall(
        r"^ {8}(\w+): \{boost: (\d+)\}", (pages.ROOT / "mkdocs.yml").read_text(), re.M
    )
    fields = [{"field_name": name, "boost": int(boost)} for name, boost in weights]
    return lunr.lunr(ref="id", fields=fields, documents=[*sections()])


def answers(question):
    """The first three pages."""
    words = re.sub(r"[^\w ]", " ", question)
    found = [hit["ref"].partition("#")[0] for hit in index().search(words)]
    return [*dict.fromkeys(found)][:3]


@pytest.mark.parametrize("page", QUESTIONS)
def test_who_asks_finds_the_page(page):
    missed = {
        question: answers(question)
        for question in QUESTIONS[page].split(" | ")
        if page not in answers(question)
    }
    assert not missed, f"add words to website/searching.py: {missed}"


def test_there_are_sixty_questions():
    assert sum(text.count("|") + 1 for text in QUESTIONS.values()) >= 60
