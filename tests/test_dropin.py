"""Programs run in a process of their own, since the name ``flax`` is taken for good."""

import subprocess
import sys
import textwrap

import pytest

import graftree as nnx


@pytest.fixture
def run(tmp_path):
    """Runs a program under the drop-in; gives what it printed and what it raised."""

    def run(program, *arguments):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(program))
        command = [sys.executable, "-m", "graftree.dropin", str(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def check(completed, *lines):
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split("\n")[:-1] == [*lines]


def test_a_program_trains_unmodified(run):
    program = """
        import jax, jax.numpy as jnp, optax
        from flax import nnx

        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        x = jnp.linspace(-1, 1, 16)[:, None]

        @nnx.jit
        def step(model, optimizer):
            loss = lambda model: jnp.mean((model(x) - 3 * x) ** 2)
            optimizer.update(model, nnx.grad(loss)(model))

        for _ in range(100):
            step(model, optimizer)
        print(round(model.kernel[0, 0].item(), 1))
    """
    check(run(program), "3.0")


def test_all_import_forms_give_graftree(run):
    program = """
        from flax import nnx
        import flax, flax.nnx as nnx_again
        from flax.nnx import Module, statelib, traversals
        from flax.nnx.nn import dtypes
        from flax.nnx.nn.linear import Conv
        import flax.nnx.training.metrics as metrics
        import graftree

        assert nnx is nnx_again is flax.nnx is graftree
        assert Module is graftree.Module and Conv is graftree.Conv
        assert statelib.State is graftree.State
        assert metrics is graftree.metrics
        assert nnx.__name__ == nnx.__spec__.name == "graftree"
    """
    check(run(program))


def test_errors_config_and_version(run):
    program = """
        import flax
        from flax.errors import FlaxError, ImmutableVariableError, TraceContextError
        from flax import config, nnx

        assert issubclass(TraceContextError, FlaxError)
        assert config is flax.config
        config.update("nnx_graph_mode", False)
        print(flax.config.nnx_graph_mode, nnx.set_graph_mode.current_value())
        print(flax.__version__)
    """
    check(run(program), "False False", "0.12.12")


def test_the_program_sees_its_own_name_arguments_and_folder(run, tmp_path):
    (tmp_path / "neighbour.py").write_text("from flax.nnx import Param")
    program = """
        import os, sys
        import neighbour
        print(__name__, os.path.basename(__file__), sys.argv[1:])
        print(neighbour.Param.__module__)
    """
    expected = "__main__ script.py ['a', '--b']", "graftree.core.variables.kinds"
    check(run(program, "a", "--b"), *expected)


def test_what_is_missing_is_an_import_error_that_names_it(run):
    program = """
        for statement in (
            "from flax import linen",
            "import flax.linen as nn",
            "from flax.linen import Dense",
            "import flax.nnx.core.variables",
        ):
            try:
                exec(statement)
            except ImportError as error:
                print(str(error).partition(" has no")[0])
        from flax import linen
    """
    completed = run(program)
    assert completed.returncode == 1
    names = "flax.linen", "flax.linen", "flax.linen", "flax.nnx.core"
    assert completed.stdout.splitlines() == [
        f"No module named '{name}': Graftree" for name in names
    ]
    last_error = completed.stderr[completed.stderr.rindex("Error: ") :]
    assert "'flax.linen': Graftree has no counterpart" in last_error


def test_missing_parts_can_be_tried_for(run):
    program = """
        import flax
        try:
            from flax import linen
        except ImportError:
            print("no linen", hasattr(flax, "linen"))
    """
    check(run(program), "no linen False")


def test_flax_itself_is_never_loaded(run):
    program = """
        import sys
        from flax import nnx
        loaded = [module for name, module in sys.modules.items() if "flax" in name]
        files = {getattr(module, "__file__", None) or "" for module in loaded}
        print([file for file in files if "site-packages/flax" in file])
    """
    check(run(program), "[]")


def test_exceptions_and_exit_codes_pass_through(run):
    assert "KeyError: 'mine'" in run("raise KeyError('mine')").stderr
    assert run("raise SystemExit(3)").returncode == 3


def test_without_a_program_the_usage_is_shown():
    command = [sys.executable, "-m", "graftree.dropin"]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 1
    assert "usage: python -m graftree.dropin script.py" in completed.stderr


def test_installing_after_flax_is_refused():
    program = """if True:
        import sys, types
        from graftree import dropin
        sys.modules["flax"] = types.ModuleType("flax")
        try:
            dropin.install()
        except RuntimeError as error:
            print(error)
    """
    command = [sys.executable, "-c", program]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Flax is imported already" in completed.stdout


def test_installing_twice_is_installing_once():
    program = """if True:
        from graftree import dropin
        dropin.install(), dropin.install()
        from flax import nnx
        dropin.install()
    """
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.peers
def test_the_top_level_names_of_the_peer_that_exist_here_agree():
    peer = pytest.importorskip("flax.nnx")
    ours = {"errors", "config", "touch"}
    kinds = ("MaxPool", "AvgPool", "MinPool")
    ours |= {*kinds, *(f"Global{kind}" for kind in kinds)}
    older = {"to_refs", "to_arrays"}  # those of the peer's releases up to 0.12.0
    newer = {"RoPE", "dot_product_attention_with_rope"}  # those after 0.12.8
    assert set(nnx.__all__) - ours - older - newer <= set(dir(peer))
