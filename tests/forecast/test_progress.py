"""What is said while a step is compiled, and what is kept of it."""

import io
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.forecast import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def wait(texts, stream):
    """Waits until a stream has some texts, for at most two seconds."""
    for _ in range(200):
        if all(text in stream.getvalue() for text in texts):
            break
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_long_compilation_is_shown_with_its_seconds(kind, monkeypatch):
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "INTERVAL", 0.02)
    with progress.candidate("2 of 3"), progress.shown("compiling f for v5e"):
        wait(["f for v5e", "0 s" if kind is io.StringIO else "0:00:00"], stream)
    assert "nnx.forecast: 2 of 3: compiling f for v5e" in stream.getvalue()
    with progress.shown("another"):
        wait(["another"], stream)
    assert "2 of 3: another" not in stream.getvalue()


def test_a_short_compilation_says_nothing(capfd):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    nnx.forecast.step(jnp.sin, x, target=nnx.forecast.target("cpu"))
    assert capfd.readouterr().err == ""


def test_candidates_are_counted(monkeypatch):
    texts = []

    def shown(text):
        texts.append(progress._candidate.get() + text)
        return progress.contextlib.nullcontext()

    monkeypatch.setattr(progress, "shown", shown)
    target = nnx.forecast.target("cpu")

    def square(x):
        return x * x

    def arguments(size):
        return (jax.ShapeDtypeStruct((size,), jnp.float32),)

    def forecast(size):
        return nnx.forecast.step(square, *arguments(size), target=target)

    done = forecast(8)
    names = {"a": done, "b": lambda: forecast(16), "c": lambda: forecast(4)}
    comparison = nnx.forecast.compare(names)
    assert [*comparison.forecasts] == ["c", "a", "b"]
    assert texts[1:] == [
        "2 of 3, b: compiling square for cpu",
        "3 of 3, c: compiling square for cpu",
    ]
    nnx.forecast.largest(square, arguments, memory=64, target=target)
    assert texts[3] == "size 1, compilation 1: compiling square for cpu"


KEPT = """
import jax, jax.numpy as jnp
import graftree as nnx

hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
target = nnx.forecast.target("{}")
x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
for _ in range(2):
    nnx.forecast.step(lambda x: x @ x, x, target=target)
    jax.clear_caches()
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


@pytest.mark.long
@pytest.mark.parametrize(("name", "hits"), [("cpu", "1"), ("v5e", "0"), ("h100", "0")])
def test_programs_for_cpus_are_kept_by_jax_and_no_others(name, hits, tmp_path):
    """It can't read those for devices that aren't there, and warns: in vain."""
    try:
        nnx.forecast.target(name)
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    options = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", KEPT.format(name)],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout.strip()) == (0, hits), run.stderr
