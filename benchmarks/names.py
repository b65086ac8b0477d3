"""What the names and tricks that nobody promises are worth: python -m benchmarks.names.

Each row is measured in two fresh processes, with a name of ``_jax_names.NAMES``, or a
function of ``_python``, and without it. All other names serve something that is lost
without them, so there is nothing to compare.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
import timeit

ROWS = (
    ("jax._src.core:trace_state", "assign"),
    ("jax.extend.core:set_current_trace", "make"),
    ("jax.extend.core:set_current_trace", "attend"),
    ("jax._src.tree_util:dispatch_registry", "call"),
    ("graftree._python:evaluate", "flatten"),
)


def main() -> None:
    """Prints the microseconds of each row with the name and without it."""
    for place, work in ROWS:
        took = [_run(work, without) for without in ("", place)]
        print(f"{place:48} {work:8} {took[0]:9.2f} us  without {took[1]:9.2f} us")


def _run(work: str, without: str) -> float:
    command = [sys.executable, "-m", "benchmarks.names", work, without]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    return float(found.stdout)


def _take_away(place: str) -> None:
    if place.startswith("graftree"):
        attributes = importlib.import_module("graftree.core.objects.attributes")
        attributes._LONGEST_CHAIN = 0
        return
    find = pkgutil.resolve_name

    def found(name: str) -> object:
        if name == place:
            raise AttributeError(name)
        return find(name)

    pkgutil.resolve_name = found


def _work(name: str) -> tuple[str, dict[str, object]]:
    import jax
    import jax.numpy as jnp

    import graftree as nnx

    x = jnp.ones((8, 64))
    weight, rngs = nnx.Param(x), nnx.Rngs(0)
    blocks = nnx.List([])
    for _ in range(25):
        blocks.append(nnx.Linear(64, 64, rngs=rngs))
        blocks.append(nnx.BatchNorm(64, rngs=rngs))
        blocks.append(nnx.Dropout(0.5, rngs=rngs))
    q = jnp.ones((2, 16, 4, 16))
    ignore = jax.jit(lambda _: 0.0)
    texts = {
        "assign": "weight[...] = x",
        "make": "nnx.Linear(64, 64, rngs=rngs)",
        "attend": "nnx.dot_product_attention(q, q, q)",
        "call": "ignore(blocks)",
        "flatten": "jax.tree.flatten(blocks)",
    }
    return texts[name], {**locals(), "nnx": nnx, "jax": jax}


def _measure(name: str, without: str) -> float:
    _take_away(without)
    text, names = _work(name)
    timer = timeit.Timer(text, globals=names)
    timer.timeit(3)
    count, _ = timer.autorange()
    return min(timer.repeat(7, count)) / count * 1e6


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(_measure(sys.argv[1], sys.argv[2]))
    else:
        main()
