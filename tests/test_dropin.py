"""Programs for Flax run in processes of their own, with Flax installed and without."""

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
    for path in map(pathlib.Path, sys.path):
        for entry in path.iterdir() if path.name == "site-packages" else ():
            is_hidden = entry.name.startswith("flax") and not wants_flax
            if not is_hidden and entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
    (packages / "graftree.pth").write_text(f"{SOURCE}\n")
    if wants_flax and not (packages / "flax").exists():
        pytest.skip("Flax is not installed")
    return folder / "bin" / "python"


def environments(*names):
    return pytest.mark.parametrize("python", names, indirect=True, scope="session")


in_both = environments("with Flax", "without Flax")
with_flax = environments("with Flax")


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
# Whose it is going to be: an import takes seconds.
FOUND = "import importlib.util as u; print(getattr(u.find_spec('flax'), 'origin', 0))"
LOADED = "import sys; print([x for x in sys.modules if 'graftree' in x])"
TRAINING = """
    import jax, jax.numpy as jnp, optax
    from flax import nnx

    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    x = jnp.linspace(-1, 1, 16)[:, None]

    @nnx.jit
    def step(model, optimizer):
        loss = lambda model: jnp.mean((model(x) - 3 * x) ** 2)
        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(10):
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


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_says_what_there_is(option, capsys):
    dropin.main([option])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m graftree.dropin (script.py | ")
    assert f"--install-startup     from now on {dropin.VARIABLE}=1" in printed


def test_what_is_not_there_is_named_in_one_line(write, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    write("", "empty/__init__.py")
    write("import nothing_of_this_name", "broken.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(dropin, "install", lambda: None)
    for arguments, words in [
        (["other.py", "a"], "there is no file 'other.py'"),
        (["-m", "other"], "there is no module 'other'"),
        (["-m", "empty.other"], "there is no module 'empty.other'"),
        (["-m", "empty"], "the package 'empty' has no module __main__"),
    ]:
        with pytest.raises(SystemExit) as ended:
            dropin.main(arguments)
        assert ended.value.code == f"python -m graftree.dropin: {words}"
    # An error of the program itself is its own.
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        dropin.main(["-m", "broken"])
    del sys.modules["empty"]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--instal-startup"]])
def test_without_a_program_the_usage_is_shown(arguments):
    with pytest.raises(SystemExit, match=r"usage: python -m graftree.dropin \(script"):
        dropin.main(arguments)


# ------------------------------------------------------------------ other processes


@environments("with Flax", pytest.param("without Flax", marks=pytest.mark.long))
def test_the_startup_file_is_there_on_request_only(
    start, write, python, has_flax, monkeypatch, capsys
):
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    file = packages / "graftree_startup.pth"
    monkeypatch.setattr(sysconfig, "get_path", {"purelib": packages}.get)
    said = f"{file} is installed: every Python of this environment now reads "
    try:
        for _ in range(2):  # each is done again without harm
            dropin.main(["--install-startup"])
            assert capsys.readouterr().out == said + "GRAFTREE_DROPIN.\n"
        trained = start(write(LOADED + textwrap.dedent(TRAINING)), GRAFTREE_DROPIN="1")
        check(trained, "[]", "3.0 graftree.nn.linear")  # all comes with Flax
        check(start("-I", "-c", WHOSE, GRAFTREE_DROPIN="1"), "graftree.nn.linear")
        # To import Flax takes seconds: with it, one of three.
        offs = [{}, {"GRAFTREE_DROPIN": ""}, {"GRAFTREE_DROPIN": "0"}]
        for off in offs[:1] if has_flax else offs:
            completed = start("-c", WHOSE, **off)
            assert completed.stdout == ("flax.nnx.nn.linear\n" if has_flax else "")
            assert has_flax or "No module named 'flax'" in completed.stderr
        for _ in range(2):
            dropin.main(["--remove-startup"])
            said = f"{file} does not exist: GRAFTREE_DROPIN alone has no effect.\n"
            assert capsys.readouterr().out == said and not file.exists()
        found = f"{packages}/flax/__init__.py" if has_flax else "0"
        check(start("-c", FOUND, GRAFTREE_DROPIN="1"), found)
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("verb", ["install", "remove"])
def test_a_startup_file_that_can_not_be_changed_is_told(monkeypatch, tmp_path, verb):
    monkeypatch.setattr(sysconfig, "get_path", {"purelib": tmp_path}.get)
    file = tmp_path / "graftree_startup.pth"
    file.mkdir()  # as root, the tests may write to every folder
    said = {"install": "write"}.get(verb, verb)
    with pytest.raises(SystemExit, match=f"^Cannot {said} {file}: ") as refused:
        dropin.main([f"--{verb}-startup"])
    assert "`python -m graftree.dropin`" in str(refused.value)


@environments(pytest.param("with Flax", marks=pytest.mark.long), "without Flax")
def test_processes_of_all_kinds_have_the_dropin(run, write, has_flax, tmp_path):
    write(WHOSE, "child.py")
    write(FOUND, "finding.py")
    program = f"""
        import multiprocessing, os, pickle, subprocess, sys, venv
        from concurrent import futures
        import cloudpickle
        import jax.numpy as jnp
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(2, 3, rngs=rngs)

        def work(net):
            return nnx.relu(net.linear(jnp.ones(2))).sum()

        def python(*arguments, **options):
            command = [sys.executable, *arguments]
            return subprocess.run(command, capture_output=True, text=True, **options)

        def in_process(net):
            import flax.nnx.statelib
            return nnx.Linear.__module__, work(net), python("-c", {FOUND!r}).stdout

        if __name__ == "__main__":
            print(python("-m", "child").stdout.strip())
            kinds = [["-c", {FOUND!r}], ["finding.py"], ["-P", "finding.py"]]
            found = {{python(*arguments).stdout for arguments in kinds}}
            net = Net(nnx.Rngs(0))
            for start in "spawn", "forkserver":
                context = multiprocessing.get_context(start)
                with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                    module, number, path = pool.submit(in_process, net).result()
                print(module, number == work(net))
                found.add(path)
            print(*found, end="")
            with open("pickled", "wb") as file:
                cloudpickle.dump((nnx.jit(work), net), file)
            read = "import pickle; f, net = pickle.load(open('pickled', 'rb')); "
            print(python("-c", read + "print(f(net))").stdout.strip() == str(work(net)))
            for value in "0", "":
                off = os.environ | dict(GRAFTREE_DROPIN=value)
                child = python("-c", {WHOSE!r}, env=off)
                print(child.stdout.strip() or child.stderr.splitlines()[-1])
            print(python("-c", {LOADED!r}).stdout.strip())
            # A Python without Graftree is left alone.
            folder = {str(tmp_path / "bare")!r}
            venv.create(folder, symlinks=True)
            sys.executable = os.path.join(folder, "bin", "python")
            print(python("-c", "import flax").stderr.splitlines()[-1])
    """
    ours = "graftree.nn.linear"
    missing = "ModuleNotFoundError: No module named 'flax'"
    without = "flax.nnx.nn.linear" if has_flax else missing
    check(
        run(program),
        *(ours, f"{ours} True", f"{ours} True", f"{dropin.STARTUP}/flax.py", "True"),
        *(without, without, "[]", missing),
    )


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


THE_PACKAGE = """
    import flax, graftree, jax
    import importlib, importlib.util, inspect, pathlib, pkgutil, sys
    from unittest import mock
    from flax.errors import FlaxError, TraceContextError
    flax.config.update("nnx_graph_updates", False)  # before flax.nnx is imported
    import flax.nnx as nnx_again
    import flax.nnx.training.metrics as metrics
    from flax import config, nnx
    from flax.nnx import Module, statelib, traversals
    from flax.nnx.nn import dtypes
    from flax.nnx.nn.linear import Conv
    from graftree import errors
    from graftree.interop import flax_names

    def refused(function, *args):
        try:
            function(*args)
        except (AttributeError, ImportError, LookupError) as error:
            return str(error)

    # What Flax and Graftree have in common is the same in both.
    assert config is flax.config
    config.update("nnx_graph_mode", False)
    print(config.nnx_graph_mode, nnx.set_graph_mode.current_value())
    print(config.nnx_graph_updates, nnx.set_graph_updates.current_value())
    assert refused(config.update, "no_flag", 1)

    count = nnx.Variable(jax.numpy.array(0))
    for kind in TraceContextError, flax.errors.TraceContextError, FlaxError:
        try:
            jax.jit(lambda: count.set_value(count[...] + 1))()
        except kind as error:
            assert type(error) is errors.TraceContextError
            assert str(error).startswith("Cannot mutate Variable")
    assert flax.errors.TraceContextError is errors.TraceContextError
    assert issubclass(errors.StaticArgumentError, FlaxError)

    # The names.
    assert nnx is nnx_again is flax.nnx
    assert nnx.__name__ == nnx.__spec__.name == "flax.nnx"
    assert Module is nnx.Module is graftree.Module and Conv is graftree.Conv
    assert nnx.statelib is statelib and statelib.State is graftree.State
    assert metrics is nnx.metrics is graftree.metrics
    print([name for name in dir(nnx) if not hasattr(nnx, name)])
    # What is ours alone, what Flax had once, what neither has.
    for name in flax_names.names_beyond():
        assert hasattr(graftree, name) and not hasattr(nnx, name)
        assert name not in nnx.__all__ and name not in dir(nnx)
    for name in "MaxPool", "GraphNode":
        print(refused(getattr, nnx, name))
    for statement in (
        "import flax.nnx.core.variables",
        "from flax.nnx import nonsense",
        "from flax.nnx.nonsense import Dense",
    ):
        print(refused(exec, statement).partition(" (")[0].partition(":")[0])

    # What Python asks of a package.
    assert inspect.getfile(nnx) == nnx.__file__ == graftree.__file__
    listed = {x.name: x.ispkg for x in pkgutil.iter_modules(nnx.__path__)}
    assert listed["nn"] and not listed["statelib"] and "core" not in listed
    for name in listed:
        assert importlib.util.find_spec(f"flax.nnx.{name}")
        module = importlib.import_module(f"flax.nnx.{name}")
        assert importlib.util.find_spec(f"flax.nnx.{name}")
        assert pathlib.Path(inspect.getfile(module)).exists()
        assert getattr(nnx, name) is module
    loaded = [module for name, module in sys.modules.items() if "flax" in name]
    files = [getattr(module, "__file__", None) or "" for module in loaded]
    assert not any("site-packages/flax/nnx" in file for file in files)

    # Linen is bridged to our Modules, and shares its rules of logical axes.
    print(flax.__version__)
    message = refused(exec, "import flax.linen")
    print(repr(message))
    if message is None:
        import flax.core.spmd, flax.nnx.bridge.variables
        from flax import linen as nn
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
        print(nn.Dense.__module__, len(flax.core.spmd.get_logical_axis_rules()))

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
def test_flax_nnx_is_a_package_of_all_names_that_flax_has(run, has_flax):
    completed = run(THE_PACKAGE)
    assert completed.returncode == 0, completed.stderr
    *said, version, message = completed.stdout.splitlines()[:10]
    assert said == [
        *("False False", "False False", "[]"),
        "Module flax.nnx has no attribute 'MaxPool': Flax lacks it. "
        "Graftree has it, as graftree.MaxPool.",
        "Module flax.nnx has no attribute 'GraphNode'. Use nnx.Pytree instead.",
        "No module named 'flax.nnx.core'",
        *["No module named 'flax.nnx.nonsense'"] * 2,
    ]
    of_linen = completed.stdout.splitlines()[10:]
    if has_flax:
        expected = ["(2, 3) (2, 3)", "model", "True", "flax.linen.linear 0"]
        assert (message, of_linen) == ("None", expected)
    else:
        assert version == dropin.FLAX_VERSION and not of_linen
        assert "'flax.linen': Graftree has no counterpart" in message
        assert "pip install flax" in message


@with_flax
def test_star_imports_and_pickles_of_flax_are_those_of_flax(run, start, write):
    program = """
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
    written = start(write(program), GRAFTREE_DROPIN="0")
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
    refused = "This pickle was written by Flax NNX: its objects have the attributes of "
    (line,) = written.stdout.splitlines()
    ours = line.replace("flax.nnx.nn", "graftree.nn")
    check(run(program), ours, *[refused + "Flax's classes."] * 3)


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
    said = ["STARTUP:/a", "/a:/b True", "STARTUP", "/b True"]
    said += [found if has_flax else "No module named 'flax'", "False"]
    refused = "flax.nnx is already imported, so its name can no longer mean Graftree."
    check(start("-c", FOR_A_WHILE), *said, refused)
