"""A run of the size of GPT-2 small: tokens/s, share of the peak, decoding.

``python -m benchmarks.accelerator`` trains the model of ``examples/lm``, 124 million
parameters in bfloat16, beside the same by hand in plain JAX and in Flax NNX, and then
decodes with a small one, where what counts is how fast a call is dispatched. ``--tiny``
takes sizes for a CPU, to see that it works.

Model FLOPs utilization is ``flops * tokens / seconds / peak``. Per token a step has
``6 * parameters + 6 * layers * width * length`` floating-point operations: 2 for each
parameter that multiplies (the embedding's table does not) forward and 4 backward, and
for attention, causal, half of the 12 of its two products (Chowdhery et al., 2022,
"PaLM", appendix B, counts all of them). What is computed again does not count.
"""

import argparse
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

import graftree
from benchmarks import decoding, gauges, language_model_rows, libraries
from benchmarks.language_models import Setting
from benchmarks.libraries import FLAX, GRAFTREE, RAW
from examples.lm.model import Config

GPT2_SMALL = Setting(
    Config(vocabulary=50_304, layers=12, width=768, heads=12, kv_heads=12, hidden=672),
    batch=8,
    length=1_024,
    dtype=jnp.bfloat16,
)
TINY = Setting(
    Config(vocabulary=64, layers=2, width=32, heads=4, kv_heads=4, hidden=48),
    batch=2,
    length=16,
    dtype=jnp.bfloat16,
)

# Dense bfloat16 operations per second, as the makers state them.
PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def main(arguments: list[str] | None = None) -> None:
    """Measures what was asked for and prints it."""
    options = _parser().parse_args(arguments)
    setting = TINY if options.tiny else GPT2_SMALL
    config = dataclasses.replace(
        setting.config, stacked=options.stacked, remat=options.remat
    )
    setting = dataclasses.replace(
        setting, config=config, batch=options.batch or setting.batch
    )
    effort = gauges.QUICK if options.tiny else gauges.FULL
    effort = dataclasses.replace(effort, pick=min)
    peak = options.peak or peak_of(jax.devices()[0].device_kind)
    print(_setting(setting, peak))
    _print("train step", "tokens/s", _training(setting, effort), _share(setting, peak))
    if not options.no_decoding:
        title = f"decode step, {decoding.BATCH} rows"
        _print(title, "steps/s", _decoding(effort))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--stacked", action="store_true", help="the blocks as a Stack")
    parser.add_argument("--remat", action="store_true", help="compute blocks again")
    parser.add_argument("--batch", type=int, help="rows per step; 8")
    parser.add_argument(
        "--peak",
        type=float,
        help="operations per second of the device, if unknown here",
    )
    parser.add_argument("--no-decoding", action="store_true", help="train alone")
    return parser


def peak_of(device_kind: str) -> float | None:
    """The operations per second of a device, if its kind is known."""
    # The longest name that fits: "TPU v5 lite" is no "TPU v5".
    known = [kind for kind in PEAKS if device_kind.startswith(kind)]
    return PEAKS[max(known, key=len)] if known else None


def num_parameters(config: Config) -> int:
    """The number of parameters of a model."""
    return sum(math.prod(shape) for shape in _shapes(config))


def _shapes(config: Config) -> list[tuple[int, ...]]:
    width, head = config.width, config.width // config.heads
    block = [
        *[(width, heads, head) for heads in (config.heads, *[config.kv_heads] * 2)],
        (config.heads, head, width),
        *[(width, config.hidden)] * 3,
        *[(width,)] * 2,
    ]
    table = (config.vocabulary, width)
    return [*block * config.layers, *[table] * 2, (width,)]


def flops_per_token(setting: Setting) -> float:
    """Floating-point operations of a train step per token, as said above."""
    config = setting.config
    multiplied = num_parameters(config) - config.vocabulary * config.width
    attention = 6 * config.layers * config.width * setting.length
    return 6 * multiplied + attention


def _training(setting: Setting, effort: gauges.Effort) -> dict[str, float]:
    names = (RAW, *libraries.installed(GRAFTREE, FLAX))
    steps = [language_model_rows.new_step(name, setting) for name in names]
    seconds = gauges.seconds_per_call(steps, effort)
    return {n: setting.num_tokens / s for n, s in zip(names, seconds, strict=True)}


def _decoding(effort: gauges.Effort, depth: int = 12) -> dict[str, float]:
    found = libraries.installed(GRAFTREE, FLAX)
    steps = {RAW: decoding.raw(depth)}
    steps |= {name: decoding.nnx(nnx, depth) for name, nnx in found.items()}
    seconds = gauges.seconds_per_call([*steps.values()], effort)
    return {name: 1 / s for name, s in zip(steps, seconds, strict=True)}


def _share(setting: Setting, peak: float | None) -> Any:
    if peak is None:
        return lambda speed: "unknown peak"
    return lambda speed: (
        f"{100 * speed * flops_per_token(setting) / peak:.1f} % of peak"
    )


def _print(title: str, unit: str, speeds: dict[str, float], share: Any = None) -> None:
    print(f"\n{title:28}{unit:>14}{'/ raw':>8}")
    for name, speed in speeds.items():
        line = f"  {name:26}{speed:>14,.0f}{speed / speeds[RAW]:>8.2f}"
        print(line + (f"  {share(speed)}" if share else ""), flush=True)


def _setting(setting: Setting, peak: float | None) -> str:
    config = setting.config
    return (
        f"JAX {jax.__version__}, Graftree {graftree.__version__}, "
        f"{jax.devices()[0].device_kind}; {num_parameters(config):,} parameters, "
        f"{setting.batch} rows of {setting.length} tokens, "
        f"{flops_per_token(setting):.3g} operations per token, "
        + (f"peak {peak:.3g}/s" if peak else "no peak known: --peak")
    )


if __name__ == "__main__":
    main()
