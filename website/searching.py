"""What a search finds first: ranks of folders, and words that people type.

Material's search joins the words of a query by "or", and weighs a word in a title or a
tag more than one in a text. So a page that answers under another name gets that name as
a tag, which only the search sees.
"""

import pathlib

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
    " architecture, config.json",
    "guides/decoding.md": "tokenizer, generate text, top-k, top-p",
    "guides/derivatives.md": "per-sample gradients, second derivatives, HVP,"
    " differential privacy, line search",
    "guides/encoder_decoder.md": "seq2seq, translation, speech recognition,"
    " cross-attention, BART, summarization",
    "guides/exporting.md": "serving, deployment, ONNX",
    "guides/initialization.md": "initialize weights again, reset parameters,"
    " reset_parameters, LazyLinear, infer sizes, sizes from an example",
    "guides/inside_jit.md": "print shapes, print values, checkify, breakpoint, assert,"
    " debugger",
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
    "guides/own_transforms.md": "custom transform, write a transform, own transform,"
    " jaxpr interpreter, decorator, lift a jax function",
    "guides/precision.md": "mixed precision, bf16, fp16, half precision, AMP, autocast,"
    " loss scaling, GradScaler",
    "guides/quantization.md": "quantize, int8, int4, nf4, 4-bit, 8-bit, bitsandbytes,"
    " QAT, PTQ, post-training quantization, quantization-aware training, GPTQ, AWQ,"
    " qwix",
    "guides/recompiles.md": "torch.compile, slow compilation, retracing",
    "guides/resuming.md": "resume training, interrupted run, continue training,"
    " preemption",
    "guides/scale.md": "DDP, FSDP, DataParallel, data parallel, data parallelism, multi"
    " GPU, multiple GPUs, several GPUs, distributed, multi-host, pmap, tensor"
    " parallel",
    "guides/several_models.md": "GAN, two optimizers, multiple optimizers, two models,"
    " tied weights, weight tying, tied embeddings, distillation",
    "guides/sequence_layers.md": "LSTM, GRU, RNN, variable length sequences,"
    " variable-length",
    "guides/stacks.md": "gradient checkpointing, activation checkpointing",
    "guides/state_under_vmap.md": "BatchNorm vmap, sync batchnorm, SyncBatchNorm",
    "guides/summaries.md": "model.summary, torchinfo, number of parameters, count"
    " parameters",
    "guides/surgery.md": "transfer learning, freeze layers, requires_grad",
    "guides/training_loop.md": "Trainer, training loop, early stopping, epochs,"
    " validation",
    "guides/training_recipes.md": "gradient accumulation, gradient clipping, learning"
    " rate schedule, scheduler, weight decay, warmup, EMA",
    "guides/variables.md": "nn.Parameter, register_buffer, buffers",
    "guides/weights.md": "huggingface, from_pretrained, state_dict, safetensors, load"
    " pretrained weights, pretrained",
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
