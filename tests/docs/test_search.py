"""Questions as people type them: the page with the answer is among the first three.

The site searches in the browser, with lunr; here its port to Python searches the same
sections, titles and tags, with the same weights (`mkdocs.yml`, `website/searching.py`),
and ranks what it finds as Material does.
"""

import functools
import inspect
import json
import re
import types

import pytest
from lunr import builder, stop_word_filter

from website import mkdocs_hooks, pages, reference, searching

pytestmark = pytest.mark.peers  # of the bridge to Linen, which imports Flax
pytest.importorskip("flax")

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


# The same, as in threads: google/flax #756, #887, #1857, #4209, #4459, #4989, #5117,
# patrick-kidger/equinox #61, #640, #705, #973, #1046, huggingface/transformers #11936,
# keras-team/keras #21364.
OF_THREADS = {
    "guides/training_recipes": "different learning rates for different parameters"
    " | exclude bias from weight decay | layerwise learning rate decay"
    " | optax multi_transform",
    "guides/surgery": "stop gradient for some parameters",
    "guides/recompiles": "why is my function recompiled",
    "look_up/performance": "overhead of jit | nnx slower than linen",
    "coming_from/linen": "convert linen to nnx | ToNNX",
    "guides/transforms": "static arguments",
    "guides/stacks": "scan over layers | stack a list of modules",
    "look_up/jax_errors": "UnexpectedTracerError",
    "guides/checkpoints": "restore a checkpoint with a different structure"
    " | orbax checkpoint manager | load parameters into another model"
    " | restore on a different number of devices",
    "guides/ensembles": "vmap over models",
    "guides/inside_jit": "intermediate activations",
    "guides/debugging": "forward hook",
    "guides/randomness": "PRNG key reuse",
    "guides/forecast": "out of memory",
    "guides/objects": "batchnorm eval mode",
    "guides/sequence_layers": "mask padding tokens in the loss",
}

# The names of the API, by the page of the reference that has their entry.
NAMES = {
    "training": "nnx.Optimizer | Optimizer | TrainState",
    "linear": "Linear | Embed",
    "transforms": "nnx.scan | scan | jit | nnx.value_and_grad | vmap",
    "variables": "Variable | nnx.Param | BatchStat",
    "normalization": "RMSNorm | BatchNorm",
    "graph": "split | merge | nnx.update",
    "states": "FlatState",
    "modules": "Module | nnx.List",
    "attention": "MultiHeadAttention",
    "randomness": "Rngs",
    "dropout": "Dropout",
    "checkpoints": "nnx.checkpoints.save",
    "weights": "weights.load",
    "metrics": "nnx.metrics.Accuracy",
}


def sections():
    """The sections of all pages and of the reference, as Material lists them."""
    for path in sorted(pages.DOCS.rglob("*.md")):
        name = path.relative_to(pages.DOCS).as_posix()
        yield from sections_of(name, path.read_text())
    public = reference.public_names()
    for page, topic in reference.TOPICS.items():
        names = [x for group in reference.sections_of(topic).values() for x in group]
        parts = [(f"nnx.{x}", public[x]) for x in names]
        for x in names:
            if isinstance(public[x], type):
                parts += [y for y in vars(public[x]).items() if y[0][0] != "_"]
        texts = [f"## {name}\n{inspect.getdoc(x) or name}" for name, x in parts]
        head = f"# {topic.title}\n{topic.words}\n"
        yield from sections_of(f"look_up/api/{page}.md", head + "\n".join(texts))


def sections_of(name, text):
    ranks = [x for start, x in searching.RANKS.items() if name.startswith(start)]
    code = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
    text = code.sub(lambda block: block[0].replace("\n#", "\n"), text)
    parts = re.split(r"^#+ (.*)$", text, flags=re.M)[1:]
    for i in range(0, len(parts), 2):
        yield {
            "location": name.removesuffix(".md") + (f"#{i}" if i else ""),
            "title": parts[i],
            "text": parts[i + 1],
            "tags": searching.WORDS.get(name, "").split(", "),
            "boost": ranks[0] if ranks else 1,
        }


@functools.cache
def settings():
    """The separator of words, and the weights of the fields, in ``mkdocs.yml``."""
    text = (pages.ROOT / "mkdocs.yml").read_text()
    weights = re.findall(r"^ {8}(\w+): \{boost: (\d+)\}", text, re.M)
    (separator,) = re.findall(r"separator: '(.*)'", text)
    return re.compile(separator), {name: int(boost) for name, boost in weights}


def words_of(text):
    text = " ".join(text) if isinstance(text, list) else text
    return [word for word in re.split(settings()[0], text.lower()) if word]


@functools.cache
def index():
    found = [*sections()]
    searching.rank_entries(found)
    made = builder.Builder()
    made.b(0)  # as Material does: a word counts the same in a long text
    made.pipeline.add(stop_word_filter.stop_word_filter)
    made.ref("location")
    for name, boost in settings()[1].items():
        made.field(name, boost)
    for section in found:
        texts = {x: " ".join(words_of(section[x])) for x in settings()[1]}
        made.add({**section, **texts}, {"boost": section["boost"]})
    return made.build()


@functools.cache
def ignored():
    """The words that `docs/site.js` leaves out."""
    (text,) = re.findall(r"const IGNORED = [^;]*", (pages.DOCS / "site.js").read_text())
    return {word for part in re.findall('"([^"]*)"', text) for word in part.split()}


def answers(question):
    """The first three pages, in the order in which Material shows them."""
    typed = words_of(question)
    words = [word for word in typed if word not in ignored()] or typed
    scores = {}
    for hit in index().search(" ".join(f"{word}^10 {word}*" for word in words)):
        page, _, part = hit["ref"].partition("#")
        matched = hit["match_data"].metadata
        share = sum(any(x.startswith(w) for x in matched) for w in words) / len(words)
        score = hit["score"] * (1 + (share + (not part)) ** 2)
        scores[page] = max(score, scores.get(page, 0))
    return sorted(scores, key=scores.get, reverse=True)[:3]


@pytest.mark.parametrize("asked", [QUESTIONS, OF_THREADS], ids=["first", "threads"])
def test_who_asks_finds_the_page(asked):
    missed = {
        question: answers(question)
        for page, questions in asked.items()
        for question in questions.split(" | ")
        if page not in answers(question)
    }
    assert not missed, f"add words to website/searching.py: {missed}"


def test_who_types_a_name_finds_its_entry_first():
    entries = [(x, page) for page, names in NAMES.items() for x in names.split(" | ")]
    first = {name: answers(name)[0] for name, _ in entries}
    assert first == {name: f"look_up/api/{page}" for name, page in entries}


def test_the_index_that_the_site_has_gets_the_names(tmp_path):
    (tmp_path / "search").mkdir()
    file = tmp_path / "search" / "search_index.json"
    section = {"location": "look_up/api/linear.html#x", "title": "nnx.Linear"}
    method = {"location": "look_up/api/linear.html#y", "title": "attend"}
    file.write_text(json.dumps({"config": {}, "docs": [section, method]}))
    mkdocs_hooks.on_post_build(types.SimpleNamespace(site_dir=str(tmp_path)))
    ranked = {**section, "tags": ["Linear"], "boost": searching.ENTRY_RANK}
    assert json.loads(file.read_text()) == {"config": {}, "docs": [ranked, method]}
