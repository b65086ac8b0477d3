"""Programs for Flax NNX find their modules and names."""

import ast
import importlib
import pathlib
import subprocess
import sys

import optax
import pytest

import graftree as nnx
from graftree.interop import flax_names, foreign_names

# What the contract names and what exists, by path.
PATHS = [
    "bridge", "bridge.initializers", "bridge.interop", "bridge.module",
    "bridge.variables", "bridge.wrappers", "proxy_caller", "wrappers",
    "compat", "deprecations", "extract", "filterlib", "graph", "graphlib", "helpers",
    "ids", "initializers", "metrics", "module", "nn", "nn.activations", "nn.attention",
    "nn.dtypes", "nn.initializers", "nn.linear", "nn.lora", "nn.normalization",
    "nn.recurrent", "nn.stochastic", "object", "optimizer", "pytreelib",
    "reprlib", "rnglib", "spmd", "statelib", "tracers", "training",
    "training.ema", "training.metrics", "training.optimizer",
    "transforms", "transforms.autodiff", "transforms.compilation",
    "transforms.transforms", "traversals",
    "variablelib", "visualization",
]  # fmt: skip

LISTED = [
    (path, name)
    for path, files in flax_names.MODULES.items()
    for names in files.values()
    for name in names.split()
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_are_importable_and_attributes(path):
    module = importlib.import_module(f"graftree.{path}")
    reached = nnx
    for name in path.split("."):
        reached = getattr(reached, name)
    assert reached is module
    assert flax_names.has_path(path)


def look_up(path, name):
    return getattr(importlib.import_module(f"graftree.{path}"), name, None)


def test_every_name_of_the_table_exists():
    names = [(path, entry.partition("=")[0]) for path, entry in LISTED]
    assert len(names) > 290
    assert not [(path, name) for path, name in names if look_up(path, name) is None]


def test_names_are_the_objects_of_the_namespace():
    public = [(path, name) for path, name in LISTED if name in nnx.__all__]
    assert len(public) > 160
    assert {
        (path, name)
        for path, name in public
        if look_up(path, name) is not getattr(nnx, name)
    } == {  # as in Flax NNX
        ("reprlib", "Object"),
        ("graphlib", "Static"),
        ("bridge", "Module"),
        ("bridge.module", "Module"),
        ("bridge", "with_partitioning"),
        ("bridge.variables", "with_partitioning"),
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("object", "pytreelib"),
        ("graph", "graphlib"),
        ("optimizer", "training.optimizer"),
        ("metrics", "training.metrics"),
        ("initializers", "nn.initializers"),
    ],
)
def test_second_paths_are_the_same_module(first, second):
    modules = [importlib.import_module(f"graftree.{path}") for path in (first, second)]
    assert modules[0] is modules[1]


def test_modules_with_paths_below_them_are_packages():
    assert nnx.bridge.__path__ == []
    assert not hasattr(nnx.bridge.wrappers, "__path__")


def test_import_statements_work_in_a_fresh_process():
    program = """if True:
        import graftree.variablelib
        import graftree.nn.linear as linear
        from graftree.nn.linear import Conv, Linear
        from graftree import graphlib, training
        from graftree.statelib import *
        assert graftree.variablelib.Variable is graftree.Variable
        assert linear.Conv is Conv is graftree.Conv
        assert linear.Linear is Linear
        assert State is graphlib.State is graftree.State
        assert training.optimizer.Optimizer is graftree.Optimizer
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_names_are_named():
    with pytest.raises(AttributeError, match=r"graftree has no attribute 'Modul'"):
        nnx.Modul
    with pytest.raises(AttributeError, match=r"variablelib has no attribute 'Linear'"):
        nnx.variablelib.Linear
    with pytest.raises(AttributeError, match=r"nn\.linear has no attribute 'Foo'"):
        nnx.nn.linear.Foo
    for module, name in ((nnx, "Modul"), (nnx.decoding, "Sample")):
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        assert (caught.value.name, caught.value.obj) == (name, module)
    with pytest.raises(ImportError, match="Modul"):
        from graftree import Modul  # noqa: F401


def test_real_modules_keep_their_own_names():
    assert nnx.nn.linear.contraction_options.__module__ == "graftree.nn.linear"


def test_conversion_of_paths_is_in_graphlib_only():
    assert not hasattr(nnx, "jax_to_nnx_path")
    assert nnx.graphlib.jax_to_nnx_path(()) == ()


def test_variable_state_is_variable_and_deprecated():
    with pytest.warns(DeprecationWarning, match="VariableState") as caught:
        assert nnx.VariableState is nnx.Variable
    assert caught[0].filename == __file__


def test_the_table_loads_nothing_heavy():
    program = """if True:
        import sys, graftree
        assert not {"treescope", "optax", "flax"} & {*sys.modules}
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_pure_warns_and_does_what_as_pure_does():
    with pytest.warns(DeprecationWarning, match="Use as_pure instead"):
        assert nnx.pure(nnx.Param(3)) == 3


OLDER = [
    (file, name) for file, names in flax_names.OLDER.items() for name in names.split()
]


@pytest.mark.parametrize(("file", "entry"), OLDER)
def test_older_names_are_in_the_namespace_and_not_listed(file, entry):
    name, _, current = entry.partition("=")
    assert getattr(nnx, name) is look_up(file, current or name)
    assert name not in nnx.__all__


@pytest.mark.parametrize("name", flax_names.GONE)
def test_names_that_are_gone_say_what_to_write(name):
    with pytest.raises(
        AttributeError, match=rf"'{name}'\. Write nnx\.\w+ in"
    ) as caught:
        getattr(nnx, name)
    current = str(caught.value).partition("Write nnx.")[2].split()[0]
    assert hasattr(nnx, current)


def test_older_modes_are_views():
    model = nnx.Sequential(nnx.Dropout(0.5), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    evaluating = nnx.eval_mode(model, only=nnx.Dropout)
    assert evaluating.layers[0].deterministic
    assert not evaluating.layers[1].use_running_average
    assert not nnx.train_mode(evaluating).layers[0].deterministic
    assert not model.layers[0].deterministic


def test_popping_by_several_filters_gives_a_state_for_each():
    model = nnx.Dict(a=nnx.Cache(1), b=nnx.Intermediate(2), c=nnx.Param(3))
    popped = nnx.graphlib.graph_pop(model, (nnx.Cache, nnx.Intermediate))
    assert [sorted(state) for state in popped] == [["a"], ["b"]]
    assert sorted(nnx.state(model)) == ["c"]


def test_vars_as_warns_and_takes_older_keywords():
    with pytest.warns(DeprecationWarning, match="Use with_vars instead") as caught:
        assert nnx.vars_as(nnx.Param(3.0), has_ref=True).ref
    assert caught[0].filename == __file__


def test_type_checkers_know_the_same_modules():
    tree = ast.parse(pathlib.Path(nnx.__file__).read_text())
    (branch,) = [node.orelse for node in tree.body if isinstance(node, ast.If)]
    later, *rest = branch
    assert {alias.name for alias in later.names} == {*flax_names.LATER}
    names = {target.id for node in rest for target in node.targets}
    paths = {*flax_names.MODULES, *flax_names.ALIASES, *flax_names.SAME}
    assert names | {"initializers", "metrics"} == {x for x in paths if "." not in x}


@pytest.mark.parametrize("name", foreign_names.HINTS)
def test_names_of_other_libraries_are_told_what_to_write(name):
    with pytest.raises(
        AttributeError, match=f"'{name}'. Write .* in its place"
    ) as told:
        getattr(nnx, name)
    assert foreign_names.HINTS[name] in str(told.value)
    assert name not in dir(nnx)
    form = foreign_names.HINTS[name]
    made = {"in_features": 2, "out_features": 3, "hidden_features": 4}
    made |= {"nnx": nnx, "optax": optax, "rngs": nnx.Rngs(0)}
    assert callable(eval(form, made))
