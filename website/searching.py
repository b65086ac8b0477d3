"""What a search finds first: ranks of folders, and words that people type.

Material's search joins the words of a query by "or", and weighs a word in a title or a
tag more than one in a text. So a page that answers under another name gets that name as
a tag, which only the search sees. An entry of the reference gets its name.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

# How much a page of a folder counts: who asks how, wants a guide.
RANKS = {
    "start": 2,
    "guides": 2,
    "coming_from": 3,
    "look_up/errors": 0.7,
    "look_up/api": 0.5,
}

# What other libraries call things, by the page that has the answer.
WORDS = {
    "coming_from/keras.md": "callbacks, compile and fit, model.fit, ModelCheckpoint",
    "coming_from/pytorch.md": "DataLoader, data loader, no_grad, nn.Module",
    "guides/beam_search.md": "num_beams, length penalty, assistant model, draft model",
    "guides/checkpoints.md": "save model, load model, load a model, save only the"
    " parameters, save weights, ModelCheckpoint, keep best checkpoint, save the"
    " architecture, config.json, Orbax CheckpointManager, restore on other"
    " devices",
    "guides/debugging.md": "NaN, NaN loss, inf, forward hook",
    "guides/decoding.md": "tokenizer, generate text, top-k, top-p, KV cache",
    "guides/derivatives.md": "per-sample gradients, second derivatives, HVP,"
    " differential privacy, line search, L-BFGS",
    "guides/encoder_decoder.md": "seq2seq, translation, speech recognition,"
    " cross-attention, BART, summarization",
    "guides/ensembles.md": "vmap over models, many models",
    "guides/exporting.md": "serving, deployment, ONNX, export model",
    "guides/initialization.md": "initialize weights again, reset parameters,"
    " reset_parameters, LazyLinear, infer sizes, sizes from an example",
    "guides/inside_jit.md": "print shapes, print values, checkify, breakpoint, assert,"
    " debugger, intermediate activations",
    "guides/layers.md": "Conv2d, nn.Conv2d, custom layer, stateful layer, layer with"
    " state",
    "guides/forecast.md": "out of memory, OOM, how many GPUs, will my model fit, MFU,"
    " roofline, memory estimate, flops",
    "guides/logging.md": "TensorBoard, logger, CSVLogger, progress bar, tqdm, wandb,"
    " metrics log",
    "guides/lora.md": "fine-tuning, adapters, PEFT",
    "guides/metrics.md": "AUC, ROC, F1, confusion matrix, accuracy, torchmetrics",
    "guides/mixtures.md": "MoE, sparse, expert parallel, top-k routing, load balancing",
    "guides/other_libraries.md": "TensorBoard, wandb, logging, Dataset",
    "guides/objects.md": "dataclass, eval mode, train and eval",
    "guides/own_transforms.md": "custom transform, write a transform, own transform,"
    " jaxpr interpreter, decorator, lift a jax function",
    "guides/precision.md": "mixed precision, bf16, fp16, half precision, AMP, autocast,"
    " loss scaling, GradScaler",
    "guides/quantization.md": "quantize, int8, int4, nf4, 4-bit, 8-bit, bitsandbytes,"
    " QAT, PTQ, post-training quantization, quantization-aware training, GPTQ, AWQ,"
    " qwix",
    "guides/randomness.md": "random seed, PRNG, key reuse, PRNGKey",
    "guides/recompiles.md": "torch.compile, slow compilation, retracing, recompiled,"
    " recompilation, compiles again",
    "guides/resuming.md": "resume training, interrupted run, continue training,"
    " preemption",
    "guides/scale.md": "DDP, FSDP, DataParallel, data parallel, data parallelism, multi"
    " GPU, multiple GPUs, several GPUs, distributed, multi-host, pmap, tensor"
    " parallel",
    "guides/several_models.md": "GAN, two optimizers, multiple optimizers, two models,"
    " tied weights, weight tying, tied embeddings, distillation",
    "guides/sequence_layers.md": "LSTM, GRU, RNN, variable length sequences,"
    " variable-length, padding, masked loss",
    "guides/stacks.md": "gradient checkpointing, activation checkpointing, scan over"
    " layers, list of modules",
    "guides/state_under_vmap.md": "BatchNorm vmap, sync batchnorm, SyncBatchNorm",
    "guides/summaries.md": "model.summary, torchinfo, number of parameters, count"
    " parameters",
    "guides/profiling.md": "profiling, profiler, profiler trace, xprof",
    "guides/surgery.md": "transfer learning, freeze layers, requires_grad, replace a"
    " layer, stop gradient",
    "guides/transforms.md": "static arguments, static_argnums",
    "guides/training_loop.md": "Trainer, training loop, early stopping, epochs,"
    " validation",
    "guides/training_recipes.md": "gradient accumulation, gradient clipping, learning"
    " rate schedule, scheduler, weight decay, warmup, EMA, EMA of weights,"
    " multi_transform, different learning rates",
    "guides/variables.md": "nn.Parameter, register_buffer, buffers",
    "guides/weights.md": "huggingface, from_pretrained, state_dict, safetensors, load"
    " pretrained weights, pretrained",
    "look_up/faq.md": "L2 penalty, FAQ",
    "look_up/performance.md": "overhead, slow, slower, speed, dispatch",
}


def write_front_matter(folder: pathlib.Path) -> None:
    """Writes rank and words into the pages below ``folder``, at the top of each."""
    for path in folder.rglob("*.md"):
        name = path.relative_to(folder).as_posix()
        ranks = [rank for start, rank in RANKS.items() if name.startswith(f"{start}/")]
        head = [f"search:\n  boost: {rank}" for rank in ranks]
        if name in WORDS:
            head += [f"tags: [{WORDS[name]}]"]
        if head:
            text = path.read_text()
            path.write_text("\n".join(["---", *head, "---", "", text]))


# How much an entry of the reference counts for its name; parts of a name below a
# sub-module, as in `weights.load`, are words of many questions.
ENTRY_RANK, ENTRY_BELOW_RANK = 20, 8


def rank_entries(sections: Sequence[dict[str, Any]]) -> None:
    """Has the search find an entry of the reference first by its name.

    Entries are the sections whose title is a public name, such as ``nnx.Linear``; they
    get it as a tag.

    Args:
        sections: Those of the index, as Material writes them; changed in place.
    """
    for section in sections:
        name = section["title"].removeprefix("nnx.")
        is_entry = section["location"].startswith("look_up/api/")
        if is_entry and name != section["title"] and not name.startswith("bridge."):
            section["tags"] = [name]
            section["boost"] = ENTRY_BELOW_RANK if "." in name else ENTRY_RANK
