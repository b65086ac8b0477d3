"""Programs for Flax run in processes of their own, with Flax installed and without."""

import ast
import os
import pathlib
import subprocess
import sys
import sysconfig
import textwrap
import venv

import pytest

import graftree as nnx
from graftree import dropin

SOURCE = pathlib.Path(nnx.__file__).parents[1]


@pytest.fixture(scope="session")
def python(request, tmp_path_factory):
    """The Python of an environment with our packages, and with Flax or without it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    wants_flax = getattr(request, "param", "without Flax") == "with Flax"
    hidden = "nothing" if wants_flax else "flax"
    for path in map(pathlib.Path, sys.path):
        for entry in path.iterdir() if path.name == "site-packages" else ():
            if not entry.name.startswith(hidden) and entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
    (packages / "graftree.pth").write_text(f"{SOURCE}\n")
    if wants_flax and not (packages / "flax").exists():
        pytest.skip("Flax is not installed")
    return folder / "bin" / "python"


in_both = pytest.mark.parametrize(
    "python", ["with Flax", "without Flax"], indirect=True, scope="session"
)
with_flax = pytest.mark.parametrize(
    "python", ["with Flax"], indirect=True, scope="session"
)


@pytest.fixture
def has_flax(python):
    return any(python.parents[1].glob("lib/python*/site-packages/flax"))


@pytest.fixture
def start(python, tmp_path):
    """Runs Python with these arguments in a folder of the test."""

    def start(*arguments, **variables):
        keep = {k: v for k, v in os.environ.items() if k not in _ABOUT_PYTHON}
        return subprocess.run(
            [python, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=keep | variables,
        )

    return start


_ABOUT_PYTHON = {"PYTHONPATH", "VIRTUAL_ENV", "GRAFTREE_DROPIN"}


@pytest.fixture
def write(tmp_path):
    """Writes a program to a file."""

    def write(program, name="script.py"):
        (tmp_path / name).write_text(textwrap.dedent(program))
        return name

    return write


@pytest.fixture
def run(start, write):
    """Runs a program under the drop-in; gives what it printed and what it raised."""
    return lambda program, *arguments: start(
        "-m", "graftree.dropin", write(program), *arguments
    )


def check(completed, *lines):
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split("\n")[:-1] == [*lines]


WHOSE = "from flax import nnx; print(nnx.Linear.__module__)"
TRAINING = """
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
    print(round(model.kernel[0, 0].item(), 1), type(model).__module__)
"""


@with_flax
def test_a_program_trains_unmodified_as_if_python_had_started_it(run, write):
    write("from flax.nnx import Param", "neighbour.py")
    program = """
    import os, sys
    os.environ["JAX_ENABLE_X64"] = "1"  # which JAX reads when it is imported
    import neighbour
    """
    program += TRAINING
    program += """
    print(__name__, os.path.basename(__file__), sys.argv[1:])
    print(neighbour.Param is nnx.Param, nnx.Param(jnp.arange(3.0)).dtype)
    raise KeyError("mine")
    """
    completed = run(program, "a", "--b")
    said = "3.0 graftree.nn.linear", "__main__ script.py ['a', '--b']", "True float64"
    assert completed.stdout.splitlines() == [*said], completed.stderr
    assert completed.stderr.endswith("KeyError: 'mine'\n")
    assert completed.returncode == 1


def test_a_module_is_run_by_its_name_and_says_how_it_ends(start, write, tmp_path):
    (tmp_path / "package").mkdir()
    program = """
        import sys
        from flax.nnx import Linear
        from . import neighbour
        print(__name__, sys.argv[1:], Linear.__module__)
        raise SystemExit(3)
    """
    write(program, "package/program.py")
    write("", "package/neighbour.py")
    completed = start("-m", "graftree.dropin", "-m", "package.program", "a")
    assert completed.stdout == "__main__ ['a'] graftree.nn.linear\n", completed.stderr
    assert completed.returncode == 3


@pytest.mark.parametrize("arguments", [[], ["-m"]])
def test_without_a_program_the_usage_is_shown(arguments):
    with pytest.raises(SystemExit, match=r"usage: python -m graftree.dropin \(script"):
        dropin.main(arguments)


# ------------------------------------------------------------------ other processes


@in_both
def test_the_startup_file_is_there_on_request_only(start, write, python, has_flax):
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    file = packages / "graftree_startup.pth"
    without = "flax.nnx.nn.linear\n" if has_flax else ""
    said = f"{file} is installed: each Python of this environment looks for "
    try:
        completed = start("-m", "graftree.dropin", "--install-startup")
        check(completed, said + "GRAFTREE_DROPIN.")
        check(start(write(TRAINING), GRAFTREE_DROPIN="1"), "3.0 graftree.nn.linear")
        check(start("-I", "-c", WHOSE, GRAFTREE_DROPIN="1"), "graftree.nn.linear")
        # To import Flax takes seconds: with it, one of three.
        offs = [{}, {"GRAFTREE_DROPIN": ""}, {"GRAFTREE_DROPIN": "0"}]
        for off in offs[:1] if has_flax else offs:
            completed = start("-c", WHOSE, **off)
            assert completed.stdout == without
            assert has_flax or "No module named 'flax'" in completed.stderr
        loaded = "import sys; print([x for x in sys.modules if 'graftree' in x])"
        check(start("-c", loaded, GRAFTREE_DROPIN="1"), "[]")  # before Flax is imported
        completed = start("-m", "graftree.dropin", "--remove-startup")
        check(completed, f"{file} is not there: GRAFTREE_DROPIN alone has no effect.")
        assert not file.exists()
        assert start("-c", WHOSE, GRAFTREE_DROPIN="1").stdout == without
    finally:
        file.unlink(missing_ok=True)


def test_the_startup_file_is_written_and_removed_or_that_is_refused(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(sysconfig, "get_path", lambda kind: {"purelib": tmp_path}[kind])
    file = tmp_path / "graftree_startup.pth"
    for option, is_there in ("--install-startup", True), ("--remove-startup", False):
        for _ in range(2):  # each is done again without harm
            dropin.main([option])
            assert file.exists() is is_there
    file.mkdir()  # as root, the tests may write to every folder
    for option, verb in ("--install-startup", "write"), ("--remove-startup", "remove"):
        with pytest.raises(SystemExit, match=f"^Cannot {verb} {file}: ") as refused:
            dropin.main([option])
        assert "`python -m graftree.dropin`" in str(refused.value)


@pytest.mark.parametrize(
    "python",
    [pytest.param("with Flax", marks=pytest.mark.long), "without Flax"],
    indirect=True,
    scope="session",
)
def test_processes_of_all_kinds_have_the_dropin(run, write, has_flax, tmp_path):
    write(WHOSE, "child.py")
    program = f"""
        import multiprocessing, os, subprocess, sys, venv
        from concurrent import futures
        WHOSE = {WHOSE!r}

        def whose(_):
            import flax.nnx.statelib
            from flax import nnx
            again = subprocess.check_output([sys.executable, "-c", WHOSE], text=True)
            return nnx.Linear.__module__, again.strip()

        if __name__ == "__main__":
            kinds = [["-c", WHOSE], ["child.py"], ["-m", "child"], ["-P", "child.py"]]
            shown = [subprocess.check_output([sys.executable, *x]) for x in kinds]
            for start in "spawn", "forkserver":
                context = multiprocessing.get_context(start)
                with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                    shown += list(pool.map(whose, [0]))
            print({{*shown}})
            for value in "0", "":
                off = os.environ | dict(GRAFTREE_DROPIN=value)
                child = subprocess.run([sys.executable, "-c", WHOSE], env=off,
                                       capture_output=True, text=True)
                print(child.stdout.strip() or child.stderr.splitlines()[-1])
            loaded = "import sys; print([x for x in sys.modules if 'graftree' in x])"
            child = subprocess.check_output([sys.executable, "-c", loaded], text=True)
            print(child.strip())
            # A Python without Graftree is left alone.
            folder = {str(tmp_path / "bare")!r}
            venv.create(folder, symlinks=True)
            bare = os.path.join(folder, "bin", "python")
            child = subprocess.run([bare, "-c", "import flax"], capture_output=True)
            print(child.stderr.decode().splitlines()[-1])
    """
    completed = run(program)
    assert completed.returncode == 0, completed.stderr
    first, *rest = completed.stdout.splitlines()
    assert ast.literal_eval(first) == {
        b"graftree.nn.linear\n",
        ("graftree.nn.linear",) * 2,
    }
    missing = "ModuleNotFoundError: No module named 'flax'"
    without = "flax.nnx.nn.linear" if has_flax else missing
    assert rest == [without, without, "[]", missing]


def test_functions_and_models_reach_other_processes(run):
    program = """
        import multiprocessing, pickle, subprocess, sys
        import cloudpickle
        import jax.numpy as jnp
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(2, 3, rngs=rngs)

        def work(net):
            return nnx.relu(net.linear(jnp.ones(2))).sum()

        if __name__ == "__main__":
            net = Net(nnx.Rngs(0))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [net]) == [work(net)])
            child = "f, net = pickle.load(sys.stdin.buffer); print(f(net))"
            completed = subprocess.run(
                [sys.executable, "-c", "import pickle, sys; " + child],
                input=cloudpickle.dumps((nnx.jit(work), net)),
                capture_output=True,
            )
            print(completed.stdout.decode().strip() == str(work(net)))
    """
    check(run(program), "True", "True")


def test_a_test_suite_runs_under_the_plugin(start, write):
    write("from flax import nnx\nprint(nnx.__name__)", "conftest.py")
    write(
        """
        from flax import nnx
        def test_linear():
            assert nnx.Linear.__module__ == "graftree.nn.linear"
        """,
        "test_script.py",
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "graftree.dropin"]
    completed = start("-m", "pytest", *options, "--numprocesses", "1")
    assert "1 passed" in completed.stdout, completed.stdout + completed.stderr


# ---------------------------------------------------------------------- what is there


NAMES = """
    from flax import nnx
    import flax, flax.nnx as nnx_again
    from flax.nnx import Module, statelib, traversals
    from flax.nnx.nn import dtypes
    from flax.nnx.nn.linear import Conv
    import flax.nnx.training.metrics as metrics
    import graftree

    assert nnx is nnx_again is flax.nnx
    assert nnx.__name__ == nnx.__spec__.name == "flax.nnx"
    assert Module is nnx.Module is graftree.Module and Conv is graftree.Conv
    assert nnx.statelib is statelib and statelib.State is graftree.State
    assert metrics is nnx.metrics is graftree.metrics
    print(*[name for name in dir(nnx) if not hasattr(nnx, name)])

    # What is ours alone, what Flax had once, what neither has.
    from graftree.interop import flax_names
    for name in flax_names.BEYOND:
        assert hasattr(graftree, name) and not hasattr(nnx, name)
        assert name not in nnx.__all__ and name not in dir(nnx)
    for name in "MaxPool", "GraphNode":
        try:
            getattr(nnx, name)
        except AttributeError as error:
            print(error)
    for statement in (
        "import flax.nnx.core.variables",
        "from flax.nnx import nonsense",
        "from flax.nnx.nonsense import Dense",
    ):
        try:
            exec(statement)
        except ImportError as error:
            print(str(error).partition(" (")[0].partition(":")[0])

    # What Python asks of a package.
    import importlib, importlib.util, inspect, pathlib, pkgutil, sys
    from unittest import mock
    from graftree import errors

    assert inspect.getfile(nnx) == nnx.__file__ == graftree.__file__
    listed = {x.name: x.ispkg for x in pkgutil.iter_modules(nnx.__path__)}
    assert listed["nn"] and not listed["statelib"] and "core" not in listed
    for name in listed:
        assert importlib.util.find_spec(f"flax.nnx.{name}")
        module = importlib.import_module(f"flax.nnx.{name}")
        assert importlib.util.find_spec(f"flax.nnx.{name}")
        assert pathlib.Path(inspect.getfile(module)).exists()
        assert getattr(nnx, name) is module

    # It can be imported again and again.
    for _ in range(2):
        now = sys.modules["flax.nnx"]
        assert importlib.reload(now) is now
        assert importlib.reload(nnx.statelib) is nnx.statelib
        del sys.modules["flax.nnx"]
        import flax.nnx
        assert flax.nnx.Linear is nnx.Linear
        with mock.patch.dict(sys.modules):
            for name in [x for x in sys.modules if x.partition(".")[0] == "flax"]:
                del sys.modules[name]
            from flax import nnx as again
            from flax.nnx import statelib
            import flax.errors
            assert again.Linear is nnx.Linear and statelib is nnx.statelib
            kind = errors.TraceContextError
            assert issubclass(kind, flax.errors.TraceContextError)
            assert issubclass(kind, flax.errors.FlaxError)
    import flax.errors
    assert flax.errors.TraceContextError is errors.TraceContextError
    assert issubclass(errors.StaticArgumentError, flax.errors.FlaxError)
"""


@in_both
def test_flax_nnx_is_a_package_of_all_names_that_flax_has(run):
    check(
        run(NAMES),
        "",
        "Module flax.nnx has no attribute 'MaxPool': Flax lacks it. "
        "Graftree has it, as graftree.MaxPool.",
        "Module flax.nnx has no attribute 'GraphNode'. Write nnx.Pytree in its place.",
        "No module named 'flax.nnx.core'",
        "No module named 'flax.nnx.nonsense'",
        "No module named 'flax.nnx.nonsense'",
    )


IN_COMMON = """
    import flax
    from flax.errors import FlaxError, TraceContextError
    flax.config.update("nnx_graph_updates", False)  # before flax.nnx is imported
    from flax import config, nnx
    import jax, graftree, sys

    count = nnx.Variable(jax.numpy.array(0))
    for kind in TraceContextError, flax.errors.TraceContextError, FlaxError:
        try:
            jax.jit(lambda: count.set_value(count[...] + 1))()
        except kind as error:
            assert type(error) is graftree.errors.TraceContextError
            assert str(error).startswith("Cannot mutate Variable")
    assert flax.errors.TraceContextError is graftree.errors.TraceContextError
    assert issubclass(graftree.errors.StaticArgumentError, FlaxError)

    assert config is flax.config
    config.update("nnx_graph_mode", False)
    print(config.nnx_graph_mode, nnx.set_graph_mode.current_value())
    print(config.nnx_graph_updates, nnx.set_graph_updates.current_value())
    try:
        config.update("no_flag", 1)
    except LookupError:
        print("refused")

    loaded = [module for name, module in sys.modules.items() if "flax" in name]
    files = [getattr(module, "__file__", None) or "" for module in loaded]
    print(any("site-packages/flax/nnx" in file for file in files))
    print(flax.__version__)
    from flax import linen as nn
    print(nn.Dense.__module__)

    # Linen is bridged to our Modules, and shares its rules of logical axes.
    import flax.core.spmd, flax.nnx.bridge.variables
    from flax.nnx import bridge
    config.update("nnx_graph_mode", True)
    x = jax.numpy.ones((1, 2))
    dense = nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)).lazy_init(x)
    variables = bridge.to_linen(nnx.Linear, 2, 3).init(nnx.Rngs(0).params(), x)
    assert isinstance(dense, nnx.Module) and type(dense.kernel) is graftree.Param
    assert nnx.wrappers is bridge.wrappers
    print(dense.kernel.shape, variables["params"]["kernel"].shape)
    rules = (("embed", "model"),)
    kernel = nnx.Param(1.0, out_sharding=("embed",), eager_sharding=False)
    with flax.core.spmd.logical_axis_rules(rules):
        print(nnx.spmd.get_var_pspec(kernel)[0])
    with nnx.logical_axis_rules(rules):
        print(flax.core.spmd.get_logical_axis_rules() == rules)
    print(len(flax.core.spmd.get_logical_axis_rules()))
"""


@in_both
def test_what_flax_and_graftree_have_in_common_is_the_same_in_both(run, has_flax):
    completed = run(IN_COMMON)
    *shared, version = completed.stdout.splitlines()[:5]
    assert shared == ["False False", "False False", "refused", "False"]
    rest = completed.stdout.splitlines()[5:]
    if has_flax:
        assert rest[0] == "flax.linen.linear", completed.stderr
        assert rest[1:] == ["(2, 3) (2, 3)", "model", "True", "0"], completed.stderr
    else:
        assert version == dropin.FLAX_VERSION and not rest
        last_error = completed.stderr[completed.stderr.rindex("Error: ") :]
        assert "'flax.linen': Graftree has no counterpart" in last_error
        assert "pip install flax" in last_error


@with_flax
def test_star_imports_and_pickles_of_flax_are_those_of_flax(run, start, write):
    written = start(
        write(
            """
            from flax.nnx import *
            names = [x for x in globals() if not x.startswith("__")]
            import pickle
            from flax import nnx
            model = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
            tagged = nnx.Param(1.0, tag="x")
            state = nnx.state(model)
            saved = dict(model=model, list=nnx.List([1]), rngs=nnx.Rngs(0))
            saved |= dict(state=(state, nnx.to_flat_state(state), tagged))
            saved |= dict(names=(names, dir(nnx)))
            for name, x in saved.items():
                pickle.dump(x, open(name, "wb"))
            print(model.kernel[...].tolist(), nnx.Linear.__module__)
            """
        ),
        GRAFTREE_DROPIN="0",
    )
    assert written.stdout.endswith("flax.nnx.nn.linear\n"), written.stderr
    program = """
        from flax.nnx import *
        names = {x for x in globals() if not x.startswith("__")}
        import pickle
        starred, listed = pickle.load(open("names", "rb"))
        assert {*starred} <= names, {*starred} - names
        # Names of other releases: those up to 0.12.0, and those after 0.12.8.
        others = {"ids", "to_arrays", "to_refs"}
        others |= {"RoPE", "dot_product_attention_with_rope"}
        assert names - {*listed} <= others, names - {*listed}
        from flax import nnx
        model = nnx.Linear(1, 2, rngs=nnx.Rngs(1))
        state, flat, tagged = pickle.load(open("state", "rb"))
        nnx.update(model, state, strict=True)
        print(model.kernel[...].tolist(), nnx.Linear.__module__)
        assert nnx.from_flat_state(flat) == state
        tagged.set_value(2.0)
        assert tagged.tag == "x" and float(nnx.jit(lambda v: v * 2)(tagged)) == 4
        for name in "model", "list", "rngs":
            try:
                pickle.load(open(name, "rb"))
            except pickle.UnpicklingError as error:
                print(str(error).splitlines()[0])
    """
    refused = (
        "This pickle was written by Flax NNX: its objects have the attributes of "
        "Flax's classes."
    )
    (line,) = written.stdout.splitlines()
    ours = line.replace("flax.nnx.nn", "graftree.nn")
    check(run(program), ours, refused, refused, refused)


# ------------------------------------------------------------- installed for a while


FOR_A_WHILE = """if True:
    import os, sys, types
    from graftree import config, dropin, errors

    before = list(sys.path)
    for inherited in "/a", None:
        os.environ.pop("PYTHONPATH", None)
        if inherited:
            os.environ["PYTHONPATH"] = inherited
        dropin.install()
        print(os.environ["PYTHONPATH"].replace(dropin.STARTUP, "STARTUP"))
        os.environ["PYTHONPATH"] += os.pathsep + "/b"
        dropin.uninstall()
        print(os.environ["PYTHONPATH"], sys.path == before)
    try:
        import flax.linen  # Flax itself is not too late
    except ImportError:
        pass
    before = list(sys.path_hooks), dict(sys.modules)
    dropin.install(), dropin.install()
    from flax import nnx
    import importlib, pkgutil
    importlib.reload(nnx)
    assert [*pkgutil.iter_modules(nnx.__path__)]
    dropin.uninstall()
    assert sys.path_hooks == before[0]
    assert not [x for x in {*sys.modules} - {*before[1]} if "flax.nnx" in x]

    bases = errors.TraceContextError.__bases__
    names = set(vars(errors.GraftreeError))
    dropin.install()
    import flax, flax.nnx.nn.linear
    flax.config.update("nnx_graph_mode", False)
    dropin.uninstall()
    dropin.uninstall()
    assert errors.TraceContextError.__bases__ == bases
    assert set(vars(errors.GraftreeError)) == names
    assert "GRAFTREE_DROPIN" not in os.environ
    try:
        from flax import nnx
        import flax.nnx.nn.linear
        print(nnx.Linear.__module__, flax.nnx.nn.linear.__name__)
        flax.config.update("nnx_graph_mode", True)
        assert flax.errors.TraceContextError is not errors.TraceContextError
    except ImportError as error:
        print(error)
    print(config.nnx_graph_mode)

    sys.modules.setdefault("flax.nnx", types.ModuleType("flax.nnx"))
    try:
        dropin.install()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


@in_both
def test_uninstalling_gives_everything_back(start, has_flax):
    found = "flax.nnx.nn.linear flax.nnx.nn.linear"
    check(
        start("-c", FOR_A_WHILE),
        *("STARTUP:/a", "/a:/b True", "STARTUP", "/b True"),
        found if has_flax else "No module named 'flax'",
        "False",
        "flax.nnx is already imported, so its name can no longer mean Graftree.",
    )
