"""Training runs that others have published, and what `simulate` says of the same.

    python -m examples.lm.published          all of them
    python -m examples.lm.published h100     those on H100

Each has the model, the mesh, the batch and the length of a run of MaxText, with
parameters and moments in float32 and products in bfloat16, and the time of its step.
The program is that of this example. It has more to compute than theirs had: blocks are
computed again in the gradient, where they kept some of it, and attention makes all of
its weights, where their kernels left out those that are masked.
"""

import dataclasses
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace

from examples.lm import simulate
from examples.lm.settings import in_words
from examples.lm.simulate import Plan

LLAMA_2_7B = Plan(length=4096)
LLAMA_3_8B = Plan(kv_heads=8, hidden=14336, vocabulary=128_256, length=8192)
LLAMA_3_70B = replace(LLAMA_3_8B, layers=80, width=8192, heads=64, hidden=28672)


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        model: Its name.
        plan: Its sizes, mesh and batch.
        seconds: How long a step took.
        source: The page that says so, in a repository on GitHub.
    """

    model: str
    plan: Plan
    seconds: float
    source: str


RUNS = [
    Run(
        "Llama 2 7B",
        replace(LLAMA_2_7B, target="h100:8", mesh={"fsdp": 8}, batch=16),
        0.721,
        "NVIDIA/JAX-Toolbox: docs/frameworks/maxtext/README.md",
    ),
    Run(
        "Llama 2 7B",
        replace(
            LLAMA_2_7B, target="h100:32x8", mesh={"data": 32, "fsdp": 8}, batch=1024
        ),
        1.500,
        "AI-Hypercomputer/gpu-recipes: "
        "training/a3mega/llama-2-7b/maxtext-pretraining-gke/README.md",
    ),
    Run(
        "Llama 3.1 70B",
        replace(
            LLAMA_3_70B, target="h200:32x8", mesh={"data": 2, "fsdp": 128}, batch=512
        ),
        15.516,
        "AI-Hypercomputer/gpu-recipes: "
        "training/a3ultra/llama3-1-70b/maxtext-pretraining-gke/README.md",
    ),
    Run(
        "Llama 3.1 8B",
        # The scores of 3 texts of 8,192 tokens, which their kernel never writes, don't
        # fit; those of one do.
        replace(
            LLAMA_3_8B, target="v6e:4x4", mesh={"fsdp": 16}, batch=48, micro_batches=3
        ),
        3.393,
        "AI-Hypercomputer/tpu-recipes: "
        "training/trillium/Llama3.1-8B-MaxText/v6e-16/README.md",
    ),
]


def main(arguments: Sequence[str]) -> int:
    """Prints a row for each run whose target has the text; returns the exit code."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    print("| model | devices | mesh | batch | at least | measured | share |")
    print("|---|---|---|---|---|---|---|")
    sources = []
    for run in RUNS:
        if all(text in run.plan.target for text in arguments):
            print(_row(run), flush=True)
            sources.append(f"{run.model}, {run.plan.target}: {run.source}")
    print("", *sources, sep="\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{peak:.2f} GiB of this process")
    return 0


def _row(run: Run) -> str:
    plan, forecast = run.plan, simulate.forecast_of(run.plan)
    cells = [run.model, plan.target, in_words(plan.mesh)]
    cells.append(f"{plan.batch} x {plan.length:,}")
    if forecast.bound is None:
        cells += ["unknown", f"{run.seconds:.3f} s", "unknown"]
    else:
        share = forecast.bound / run.seconds
        cells += [f"{forecast.bound:.3f} s", f"{run.seconds:.3f} s", f"{share:.0%}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
