"""A step is compiled from shapes, for the devices that are asked for."""

import jax
import pytest

from examples.lm import simulate


def test_a_step_is_compiled_from_shapes_and_described(capsys):
    before = len(jax.live_arrays())
    simulate.simulate(simulate.TINY)
    assert len(jax.live_arrays()) == before
    out = capsys.readouterr().out
    assert "8 simulated devices: fsdp=4 x tensor=2" in out
    # 2 blocks of 32 (4 + 2 x 2 + 4) 8 + 3 x 32 x 64 + 2 x 32; 2 x 256 x 32 + 32.
    assert "parameters: 34,976\n" in out
    for words in ("temporaries", "all-gather", "all-reduce", "not run"):
        assert words in out


def test_a_process_is_started_that_has_the_devices(monkeypatch):
    calls = []

    def run(command, *, env, check):
        calls.append((command, env))
        return type("Done", (), {"returncode": 3})

    monkeypatch.setattr(simulate.subprocess, "run", run)
    assert simulate.main(["--mesh", "data=2,fsdp=128", "--layers=1"]) == 3
    ((command, environment),) = calls
    assert command[1:3] == ["-m", "examples.lm.simulate"]
    assert environment["XLA_FLAGS"].endswith("device_count=256")


def test_plans_are_read_or_refused(capsys):
    plan = simulate.plan_of(["--mesh=fsdp=8,tensor=2", "--kv_heads=8"])
    assert (plan.devices, plan.kv_heads, plan.width) == (16, 8, 4096)
    for wrong in ("--mesh=8", "--mesh=fsdp=0", "--layers=0"):
        with pytest.raises(SystemExit):
            simulate.plan_of([wrong])
    assert "--mesh: expected axis=size" in capsys.readouterr().err
