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

import jax
import jax.numpy as jnp

import graftree
from benchmarks import gauges, groups, language_model_rows, rows, tables
from benchmarks.groups import Group
from benchmarks.language_models import Setting
from examples.lm.model import Config, LanguageModel

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
    tokens = groups.per_second(setting.num_tokens, "tokens")
    training = Group(
        "train step",
        tokens,
        language_model_rows.rows_of(language_model_rows.new_step, setting),
    )
    for row, speed in zip(training.rows, _print(training, effort), strict=True):
        share = 100 * speed * flops_per_token(setting) / peak if peak else math.nan
        print(f"{row.library}: {share:.1f} % of peak")
    if not options.no_decoding:
        steps = groups.per_second(1, "steps")
        decoding = groups.in_default_mode(rows.decode_step(12))
        _print(dataclasses.replace(decoding, quantity=steps), effort)


def _print(group: Group, effort: gauges.Effort) -> list[float]:
    figures = group.measure(effort)
    print(tables.markdown(group, figures), flush=True)
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--tiny", action="store_true", help="sizes for a CPU")
    option("--stacked", action="store_true", help="the blocks as a Stack")
    option("--remat", action="store_true", help="compute blocks again")
    option("--batch", type=int, help="rows per step; 8")
    option("--peak", type=float, help="operations per second, of an unknown device")
    option("--no-decoding", action="store_true", help="only train")
    return parser


def peak_of(device_kind: str) -> float | None:
    """The operations per second of a device, if its kind is known."""
    # The longest name that fits: "TPU v5 lite" is no "TPU v5".
    known = [kind for kind in PEAKS if device_kind.startswith(kind)]
    return PEAKS[max(known, key=len)] if known else None


def num_parameters(config: Config) -> int:
    """The number of parameters of a model."""
    with graftree.use_eager_sharding(False):
        model = graftree.eval_shape(
            lambda: LanguageModel(config, rngs=graftree.Rngs(0))
        )
    return sum(x.size for x in jax.tree.leaves(graftree.state(model, graftree.Param)))


def flops_per_token(setting: Setting) -> float:
    """Floating-point operations of a train step per token, as said above."""
    config = setting.config
    multiplied = num_parameters(config) - config.vocabulary * config.width
    attention = 6 * config.layers * config.width * setting.length
    return 6 * multiplied + attention


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
