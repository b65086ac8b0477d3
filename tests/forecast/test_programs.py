"""How the text of a compiled program is read; what is said while it is compiled."""

import importlib.util
import io
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import _jax_topologies
from graftree.forecast import costs, hlo, progress, scopes, traffic
from tests import tables

TPU_LOOP = """
HloModule m

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %one = s32[] constant(1)
  %t = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4] get-tuple-element(%t), index=1
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[4]) tuple(%next, %x)
}

%cond (t: (s32[], f32[4])) -> pred[] {
  %end = s32[] constant(END)
  %t = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0:T(128)} parameter(0)
  %zero = s32[] constant(0)
  %start = s32[]{:T(128)} copy(%zero)
  %init = (s32[], f32[4]) tuple(%start, %x)
  %loop = (s32[], f32[4]) while(%init), condition=%cond, body=%body
  ROOT %out = f32[4] get-tuple-element(%loop), index=1
}
"""


def test_loops_whose_length_no_compiler_says_are_read():
    program = hlo.Program(TPU_LOOP.replace("END", "12"))
    assert 12 in [run.count for run in program.runs()]
    assert program.unknown_loops == 0
    unknown = TPU_LOOP.replace("%end = s32[] constant(END)", "%end = s32[] foo()")
    assert hlo.Program(unknown).unknown_loops == 1


BRANCHES = """
HloModule m

%small (x: f32[4]) -> f32[4] {
  ROOT %x = f32[4] parameter(0)
}

%large (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  ROOT %y = f32[4] sine(%x)
}

ENTRY %main (i: s32[], x: f32[4]) -> f32[4] {
  %i = s32[] parameter(0)
  %x = f32[4] parameter(1)
  ROOT %out = f32[4] conditional(%i, %x, %x), branch_computations={%small, %large}
}
"""


def test_of_a_conditional_the_largest_branch_counts():
    runs = [[*run.computation] for run in hlo.Program(BRANCHES).runs()]
    assert ["x", "y"] in runs and len(runs) == 2


NAMES = {
    "jit(step)/jvp(model)/blocks[0]/up/dot_general": ("model.blocks[0].up", False),
    "jit(step)/transpose(jvp(m))/blocks/while/body/eval_jaxpr/up/add": (
        "m.blocks.up",
        True,
    ),
    "jit(f)/jvp(m)/checkpoint/rematted_computation/norm/mul": ("m.norm", False),
    "model.blocks[0].up.kernel": ("model.blocks[0].up", False),
    "(m.up.kernel:m.down.kernel)": ("m.up", False),
    "jit(f)/jvp(m)/vmap(BTNH,BSNH->BNTS)/dot_general": ("m", False),
    "jit(f)/jvp(m)/mul;jit(f)/jvp(m)/up/add": ("m", False),
    "jit(f)/add": ("", False),
    "broadcast.12": ("", False),  # the compiler's
    "": ("", False),
}


@tables.cases("name", *NAMES)
def test_names_of_operations_tell_the_module(name):
    scope = scopes.scope_of(name)
    assert (".".join(scope.path), scope.is_backward) == NAMES[name]


GROUPS = {
    "replica_groups={{0,1},{2,3}}": [[0, 1], [2, 3]],
    "replica_groups=[2,2]<=[4]": [[0, 1], [2, 3]],
    "replica_groups=[2,2]<=[2,2]T(1,0)": [[0, 2], [1, 3]],
    "replica_groups=mesh['a'=2,'b'=2] {'a'}": [[0, 2], [1, 3]],
    "replica_groups=mesh['a'=2,'b'=2] {'b'}": [[0, 1], [2, 3]],
    "replica_groups={}": [[0, 1, 2, 3]],
}


@tables.cases("groups", *GROUPS)
def test_groups_are_read_in_all_spellings(groups):
    text = f"""
HloModule m, num_partitions=4

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add
}}
"""
    program = hlo.Program(text)
    (sent,) = traffic.exchanges(program, program.computations["main"])
    assert sent.groups.tolist() == GROUPS[groups]
    assert sent.sent == 2 * 32 * (1 - 1 / len(GROUPS[groups][0]))


SPREAD = """
HloModule m, num_partitions=8

%start (p: f32[2,8]) -> (f32[2,8], f32[16,8], s32[2]) {
  %p = f32[2,8]{1,0} parameter(0)
  %gather.1 = f32[16,8]{1,0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="0"}, metadata={op_name="jit(f)/m/up/dot_general"}
  ROOT %call.1 = (f32[2,8]{1,0}, f32[16,8]{1,0}, s32[2]{0:S(4)}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%middle (p: f32[2,8], g: f32[16,8], s: s32[2], x: f32[4]) -> (f32[4], f32[2,8], f32[16,8], f32[16,8], s32[2]) {
  %p = f32[2,8]{1,0} parameter(0)
  %g = f32[16,8]{1,0} parameter(1)
  %s = s32[2]{0:S(4)} parameter(2)
  %x = f32[4]{0} parameter(3)
  %y = f32[4]{0} sine(%x)
  %gather.2 = f32[16,8]{1,0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %all = (f32[4]{0}, f32[2,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}, s32[2]{0:S(4)}) tuple(%y, %p, %g, %gather.2, %s)
}

%done (p: f32[2,8], g: f32[16,8], s: s32[2]) -> f32[16,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %g = f32[16,8]{1,0} parameter(1)
  %s = s32[2]{0:S(4)} parameter(2)
  %gather.3 = f32[16,8]{1,0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %call.3 = f32[16,8]{1,0} custom-call(%p, %g, %gather.3, %s), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[2,8], x: f32[4]) -> (f32[16,8], f32[4]) {
  %p = f32[2,8]{1,0} parameter(0)
  %x = f32[4]{0} parameter(1)
  %a = (f32[2,8]{1,0}, f32[16,8]{1,0}, s32[2]{0:S(4)}) fusion(%p), kind=kCustom, calls=%start
  %a0 = f32[2,8]{1,0} get-tuple-element(%a), index=0
  %a1 = f32[16,8]{1,0} get-tuple-element(%a), index=1
  %a2 = s32[2]{0:S(4)} get-tuple-element(%a), index=2
  %b = (f32[4]{0}, f32[2,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}, s32[2]{0:S(4)}) fusion(%a0, %a1, %a2, %x), kind=kLoop, calls=%middle
  %b0 = f32[4]{0} get-tuple-element(%b), index=0
  %b1 = f32[2,8]{1,0} get-tuple-element(%b), index=1
  %b2 = f32[16,8]{1,0} get-tuple-element(%b), index=2
  %b4 = s32[2]{0:S(4)} get-tuple-element(%b), index=4
  %c = f32[16,8]{1,0} fusion(%b1, %b2, %b4), kind=kCustom, calls=%done
  ROOT %r = (f32[16,8]{1,0}, f32[4]{0}) tuple(%c, %b0)
}
"""  # noqa: E501


def test_a_collective_that_is_spread_over_fusions_counts_once():
    """On TPUs it stands in each fusion that runs while it is sent."""
    (total,) = nnx.forecast.collectives(SPREAD).values()
    assert (total.count, total.bytes) == (1, 512)
    program = hlo.Program(SPREAD)
    (main,) = [run.computation for run in program.runs()]
    (sent,) = traffic.exchanges(program, main)
    assert scopes.scope_of(sent.instruction.op_name).path == ("m", "up")
    num_bytes = {name: costs.num_bytes(program, main, x) for name, x in main.items()}
    # The start reads a part, and passes it on beside the whole; then only x is read.
    assert num_bytes["a"] == 64 + 64 + 512 and num_bytes["b"] == 16 + 16
    assert num_bytes["c"] == 0


def test_what_leaves_a_host_is_shared_by_its_devices():
    groups = np.arange(8)[None]
    sent = traffic.Sent(None, "all-gather", 800, groups)
    hosts = np.repeat([0, 1], 4)
    assert sent.sent_between(hosts) == 100  # of 700, 4 devices share what 4 others have
    assert sent.sent_between(np.zeros(8, int)) == 0
    assert traffic.seconds([(sent, 3)], hosts, link=600, host_link=10) == 30


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no plugin")

    monkeypatch.setattr(_jax_topologies, "devices_of", refuse)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, extra in {"v5e:2x9": "tpu", "h100:9": "gpu"}.items():
        with pytest.raises(ImportError, match=rf"graftree\[forecast-{extra}\]"):
            nnx.forecast.target(name)


# -------------------------------------------------------------------- while it compiles


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
