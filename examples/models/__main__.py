"""A language model from a folder of Hugging Face: ``python -m examples.models FOLDER``.

It continues prompts, given as tokens or as text, and says how fast. A wrong option or
folder is answered by an error with exit code 2.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from examples.command_lines import OneLineParser, simulate, whole_number

EPILOG = """Padding: Hugging Face leaves out of a prompt whatever equals the token for
padding. The tokens beside shared/hf/qwen3 were made so, with 0: its prompt has a 0 that
does not count. --pad 0 does the same; --check does it by itself."""

DTYPES = ("float32", "bfloat16", "float16", "file")


def tokens(text: str) -> list[int]:
    """Converts an option that takes tokens."""
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers of tokens, as in 1,2,3, got {text!r}"
        ) from None


def make_parser() -> OneLineParser:
    """Returns the parser of the options."""
    parser = OneLineParser(
        prog="python -m examples.models",
        description="Continues prompts with a model from a folder of Hugging Face: a "
        "config.json and safetensors files.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    number = whole_number(1, 10**6)
    add("family", nargs="?", metavar="FAMILY", help="default: as config.json says")
    add("folder", type=pathlib.Path, metavar="FOLDER")
    add("--adapter", type=pathlib.Path, metavar="FOLDER", help="a LoRA adapter of PEFT")
    add("--prompt", type=tokens, action="append", metavar="1,2,3", help="also several")
    add("--text", action="append", help="a prompt for the folder's tokenizer.json")
    add("--tokens", type=number, default=16, metavar="N", help="how many are made")
    add("--pad", type=int, metavar="TOKEN", help="one that does not count; see below")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="or from those that make up P")
    add("--seed", type=whole_number(0, 2**31 - 1), default=0, metavar="N")
    add("--dtype", choices=DTYPES, help="of the parameters; file: those of the file")
    add("--mesh", metavar="fsdp=N", help="devices that the parameters are divided over")
    add("--save", type=pathlib.Path, metavar="FOLDER", help="where to write the model")
    add("--check", action="store_true", help="compare with FOLDER/expected.npz")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    devices = 1
    if options.mesh is not None:
        axis, _, size = options.mesh.partition("=")
        if axis != "fsdp" or not size.isdecimal() or not int(size):
            parser.error(f"--mesh: expected fsdp=N, got {options.mesh!r}")
        devices = int(size)
        simulate(devices)
    try:
        run(options, devices)
    except (ValueError, OSError) as error:  # such as a WeightsError
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, devices: int = 1) -> None:
    """Does what the options say."""
    # Not at the top: JAX counts its devices when it is loaded.
    import graftree as nnx
    from examples.models import checks, pretrained

    folder = options.folder.expanduser()
    content = pretrained.read_config(folder)
    if options.family is not None:
        content["model_type"] = options.family
    _, weights = pretrained.family(content)
    if options.check:
        print(checks.table(folder, content, options.adapter))
        return
    tokenizer = _tokenizer(folder) if options.text else None
    prompts = _prompts(options, tokenizer, content)
    began = time.perf_counter()
    mesh = pretrained.mesh_of(devices) if options.mesh else None
    model = pretrained.load(folder, content=content, dtype=options.dtype, mesh=mesh)
    if options.adapter is not None:
        nnx.weights.load_adapter(options.adapter, model, weights)
    seconds = time.perf_counter() - began
    print(f"{content['model_type']}, loaded in {seconds:.1f} s")
    if prompts:
        _generate(model, prompts, options, tokenizer, content)
    if options.save is not None:
        if options.adapter is not None:
            nnx.surgery.merge_lora(model)
        pretrained.save(options.save, model, folder, content)
        print(f"saved to {options.save}")


def _tokenizer(folder: pathlib.Path) -> Any:
    """The tokenizer of a folder."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError(
            "--text needs the package tokenizers: pip install tokenizers"
        ) from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"--text needs {path}, which is missing: pass --prompt")
    return tokenizers.Tokenizer.from_file(str(path))


def _prompts(
    options: argparse.Namespace, tokenizer: Any, content: dict[str, Any]
) -> list[list[int]]:
    """The prompts as tokens, all of them in the vocabulary."""
    prompts = list(options.prompt or [])
    prompts += [tokenizer.encode(text).ids for text in options.text or []]
    size = content["vocab_size"]
    for prompt in prompts:
        for token in prompt:
            if not 0 <= token < size:
                raise ValueError(
                    f"there is no token {token}: the vocabulary has 0 to {size - 1}"
                )
    return prompts


def _generate(
    model: Any,
    prompts: list[list[int]],
    options: argparse.Namespace,
    tokenizer: Any,
    content: dict[str, Any],
) -> None:
    """Prints what follows the prompts, and how fast it was made."""
    import jax

    import graftree as nnx

    sampler = nnx.decoding.Sampler(options.temperature, options.top_k, options.top_p)
    stop = content.get("eos_token_id")
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    seconds = []
    for _ in range(2):  # the first one compiles
        began = time.perf_counter()
        made = nnx.decoding.generate(
            model,
            prompts,
            max_new_tokens=options.tokens,
            sampler=sampler,
            key=jax.random.key(options.seed),
            stop=stop,
            pad=options.pad,
        )
        seconds.append(time.perf_counter() - began)
    for row in made.lists():
        print(tokenizer.decode(row) if tokenizer else ",".join(map(str, row)))
    count = int(made.lengths.sum())
    print(
        f"{count} tokens, {count / seconds[1]:,.0f} per second, prompts included; "
        f"{seconds[0]:.1f} s for the first time, when the program is compiled"
    )


if __name__ == "__main__":
    sys.exit(main())
