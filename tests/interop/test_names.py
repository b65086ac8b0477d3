"""Programs for Flax NNX find their modules and names, and no public one is missing.

Names that are missing on purpose are in `absent_names.py`, each with its reason. Uses
the tables of `graftree.interop` themselves, to see that all of them are true. At
the end the small modules of Flax.
"""

import ast
import functools
import importlib
import inspect
import operator
import pathlib
import pickle
import re
import types
import typing
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx
from graftree import ids, proxy_caller
from graftree.interop import flax_names, name_tables
from tests import catalog, interpreters, tables
from tests.interop import absent_names

# What the contract names and what exists, by path.
PATHS = """
    bridge bridge.initializers bridge.interop bridge.module bridge.variables
    bridge.wrappers proxy_caller wrappers compat deprecations extract filterlib graph
    graphlib helpers ids initializers metrics module nn nn.activations nn.attention
    nn.dtypes nn.initializers nn.linear nn.lora nn.normalization nn.recurrent
    nn.stochastic object optimizer pytreelib reprlib rnglib spmd statelib tracers
    training training.ema training.metrics training.optimizer transforms
    transforms.autodiff transforms.compilation transforms.transforms traversals
    variablelib visualization
""".split()

LISTED = [
    (path, name)
    for path, files in name_tables.MODULES.items()
    for names in files.values()
    for name in names.split()
]


def test_rows_of_the_catalog_say_which_layers_are_not_of_flax():
    beyond = flax_names.names_beyond()
    wrong = {row.name for row in catalog.LAYERS if row.is_ours != (row.name in beyond)}
    assert not wrong, (
        f"{wrong}: give the row in tests/catalog.py is_ours=True if Flax NNX lacks it; "
        "else name it with its path in src/graftree/interop/name_tables.py"
    )


# Flax had these once.
OF_OLDER_RELEASES = {"to_arrays", "to_refs"}


def test_names_beyond_flax_are_those_that_it_lacks(peer):
    pytest.importorskip("flax", minversion="0.12.12")
    lacking = {name for name in nnx.__all__ if not hasattr(peer, name)}
    assert flax_names.names_beyond() == lacking - OF_OLDER_RELEASES


@pytest.mark.parametrize("path", PATHS)
def test_paths_are_importable_and_attributes(path):
    module = importlib.import_module(f"graftree.{path}")
    reached = nnx
    for name in path.split("."):
        reached = getattr(reached, name)
    assert reached is module and flax_names.has_path(path)


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


def test_second_paths_are_the_same_module():
    assert nnx.object is nnx.pytreelib and nnx.graph is nnx.graphlib
    assert nnx.optimizer is nnx.training.optimizer
    assert nnx.metrics is nnx.training.metrics
    assert nnx.initializers is nnx.nn.initializers
    assert nnx.bridge.__path__ == [] and not hasattr(nnx.bridge.wrappers, "__path__")


def test_a_fresh_process_finds_the_modules_and_loads_little_also_without_flax():
    program = """if True:
        import sys
        import graftree
        assert not {"treescope", "optax", "flax"} & {*sys.modules}
        from graftree.interop import flax_names
        flax_names.beside("serialization"), flax_names.beside("metrics").tensorboard
        assert not [name for name in sys.modules if "flax_side" in name]
        flax_names.beside("serialization").to_bytes
        assert not {"msgpack", "optax", "tensorboardX", "flax"} & {*sys.modules}

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

        import graftree.bridge.wrappers
        import graftree.wrappers as wrappers
        from graftree import bridge, proxy_caller
        assert bridge.wrappers is wrappers is graftree.wrappers
        assert "flax" not in sys.modules

        sys.modules["flax"] = None  # as if it were not installed
        assert bridge.initializers is graftree.initializers
        assert not hasattr(bridge, "nothing")

        def by_import():
            from graftree.bridge.variables import to_linen_var

        for use in (lambda: bridge.ToNNX, lambda: wrappers.to_linen, by_import):
            for _ in range(2):
                try:
                    use()
                except ImportError as error:
                    assert error.name == "flax", error
                    assert "nnx.bridge" in str(error), error
                    assert "pip install flax" in str(error), error
                else:
                    raise AssertionError("no error")
    """
    interpreters.printed("-c", program)


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


DEPRECATED = {
    "VariableState": lambda: nnx.VariableState is nnx.Variable,
    "Use as_pure instead": lambda: nnx.pure(nnx.Param(3)) == 3,
    "Use with_vars instead": lambda: nnx.vars_as(nnx.Param(3.0), has_ref=True).ref,
}


@pytest.mark.parametrize("message", DEPRECATED)
def test_deprecated_names_do_the_same_and_warn_at_the_line_of_the_caller(message):
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert DEPRECATED[message]()
    assert caught[0].filename == __file__


OLDER = [(file, x) for file, names in name_tables.OLDER.items() for x in names.split()]


@pytest.mark.parametrize(("file", "entry"), OLDER)
def test_older_names_are_in_the_namespace_and_not_listed(file, entry):
    name, _, current = entry.partition("=")
    assert getattr(nnx, name) is look_up(file, current or name)
    assert name not in nnx.__all__


@pytest.mark.parametrize("name", name_tables.GONE)
def test_names_that_are_gone_say_what_to_write(name):
    with pytest.raises(AttributeError, match=rf"'{name}'. Use nnx\.\w+ inst") as caught:
        getattr(nnx, name)
    assert hasattr(nnx, str(caught.value).partition("Use nnx.")[2].split()[0])


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


def test_bound_methods_are_taken_apart_also_within_partials():
    split = nnx.transforms.transforms._resolve_bound_callable
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    function, instance, is_bound = split(functools.partial(model.__call__, [1.0, 0.0]))
    assert instance is model and is_bound
    assert function.func is nnx.Linear.__call__ and function.args == ([1.0, 0.0],)
    for other in (len, model, functools.partial(len), "x".upper):
        assert split(other) == (other, None, False)


def test_type_checkers_know_the_same_modules():
    tree = ast.parse(pathlib.Path(nnx.__file__).read_text())
    (branch,) = [node.orelse for node in tree.body if isinstance(node, ast.If)]
    later, *rest = branch
    modules = {x for x in nnx.__all__ if inspect.ismodule(getattr(nnx, x))}
    at_once = {"config", "debugging", "errors", "initializers", "metrics", "mixtures"}
    assert {alias.name for alias in later.names} == modules - at_once
    names = {target.id for node in rest for target in node.targets}
    paths = {*name_tables.MODULES, *name_tables.ALIASES, *name_tables.SAME}
    own = {"initializers", "metrics", "training"}  # which are listed, too
    assert names | own == {x for x in paths if "." not in x}


# What stands in the code of the hints.
GIVEN = {
    **{"nnx": nnx, "jax": jax, "jnp": jnp, "optax": optax, "rngs": nnx.Rngs(0)},
    **{"in_features": 2, "out_features": 4, "hidden_features": 4, "num_groups": 2},
    **{"num_embeddings": 5, "features": 2, "num_heads": 2, "value": jnp.ones(2)},
    **{"layer": nnx.relu, "layers": [nnx.relu]},
    "model": nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    **{"logits": jnp.ones((4, 3)), "labels": jnp.zeros(4, int)},
    **{"predictions": jnp.ones((4, 3)), "targets": jnp.ones((4, 3))},
    **{"batches": [(0, 1)], "optimizer": None, "train_step": lambda *_: None},
}


@pytest.mark.parametrize("name", name_tables.HINTS)
def test_names_of_other_libraries_are_told_what_to_write(name):
    with pytest.raises(AttributeError) as told:
        getattr(nnx, name)
    text = f"Module graftree has no attribute '{name}'. Use (.*?) instead(.*)."
    form, more = re.fullmatch(text, str(told.value)).groups()
    assert name not in dir(nnx)
    exec(form, dict(GIVEN))
    for path in re.findall(r"nnx\.([\w.]+\w)", more):
        operator.attrgetter(path)(nnx)
    for option in re.findall(r"`(\w+)", more):
        function = eval(form.partition("(")[0], dict(GIVEN))
        assert option in inspect.signature(function).parameters


@tables.cases(
    "name, shape, expected",
    ("Dense", (1, 2), (1, 4)),
    ("Conv1d", (1, 8, 2), (1, 8, 4)),
    ("Conv2D", (1, 8, 8, 2), (1, 8, 8, 4)),
    ("LSTM", (1, 5, 2), (1, 5, 4)),
    ("BatchNorm2d", (1, 8, 8, 2), (1, 8, 8, 2)),
    ("SpatialDropout2D", (1, 8, 8, 2), (1, 8, 8, 2)),
    ("MaxPool2d", (1, 8, 8, 2), (1, 4, 4, 2)),
    ("AdaptiveAvgPool2d", (1, 8, 8, 2), (1, 2)),
    ("Upsample", (1, 8, 8, 2), (1, 64, 64, 2)),
    ("Flatten", (3, 8, 8, 2), (3, 128)),
    ("Identity", (3, 8), (3, 8)),
)
def test_what_to_write_does_what_it_is_for(name, shape, expected):
    form = re.match("Use (.*?) instead", name_tables.HINTS[name])[1]
    layer = nnx.Sequential(eval(form, dict(GIVEN)))
    assert layer(jnp.ones(shape)).shape == expected


# ------------------------------------------------- what the peer returns, and has below

ALL_PATHS = sorted({*name_tables.MODULES, *name_tables.SAME, "proxy_caller"})


def public(x):
    return [name for name in dir(x) if not name.startswith("_")]


def is_of_flax(value):
    """Whether a value of a module is Flax's, not what its file imports from others."""
    if isinstance(value, (types.ModuleType, typing.TypeVar, typing.ParamSpec)):
        return False
    if typing.get_args(value):  # an alias in the words of `typing`
        return True
    module = getattr(value, "__module__", None)
    return module is None or module.startswith("flax")


def differences(theirs, ours, is_meant, table):
    """What is missing without a reason, and what has a reason but is not missing.

    A name of the table may be missing in Flax, too: its releases differ in such names.
    """
    listed = absent_names.listed(table)
    unlisted = {
        f"{where}: {name}"
        for where, x in theirs.items()
        for name in public(x)
        if is_meant(x, name) and not hasattr(ours[where], name)
        if name not in listed.get(where, ())
    }
    outdated = {
        f"{where}: {name}"
        for where, names in listed.items()
        for name in names
        if hasattr(ours[where], name)
    }
    return unlisted, outdated


@pytest.mark.peers
def test_sub_modules_lack_no_name_that_is_not_listed():
    theirs = {path: importlib.import_module(f"flax.nnx.{path}") for path in ALL_PATHS}
    ours = {path: importlib.import_module(f"graftree.{path}") for path in ALL_PATHS}

    def is_meant(module, name):
        return is_of_flax(getattr(module, name))

    found = differences(theirs, ours, is_meant, absent_names.OF_MODULES)
    assert found == (set(), set())


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # to read `raw_value` warns
def test_returned_objects_lack_no_attribute_that_is_not_listed():
    peer = importlib.import_module("flax.nnx")
    theirs, ours = absent_names.made(peer), absent_names.made(nnx)
    assert theirs.keys() == ours.keys() and len(ours) > 70
    seen = {cls for x in theirs.values() for cls in type(x).__mro__}
    for name in dir(peer):  # the classes of which none was made
        cls = getattr(peer, name)
        if inspect.isclass(cls) and cls not in seen and hasattr(nnx, name):
            theirs[name], ours[name] = cls, getattr(nnx, name)
    found = differences(theirs, ours, lambda x, name: True, absent_names.OF_OBJECTS)
    assert found == (set(), set())


# --------------------------------------------------- what the helpers do, as the peer's


def outcome(f, *args, **kwargs):
    try:
        return f(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return type(error)


TREES = [
    (0, [1, 2]),
    ((0, 1), ({"a": 1, "b": 2}, 3)),
    ((0, 1), (3,)),
    ((0, None), ({"a": 1}, [3])),
    ([0], (1,)),
    ({"a": 1}, {"a": [2, 3]}),
]


def answers(ask):
    """What a function of a library gives, with the peer and with ours."""
    return [ask(library) for library in (importlib.import_module("flax.nnx"), nnx)]


@pytest.mark.peers
@pytest.mark.parametrize("trees", TREES, ids=str)
def test_prefixes_are_broadcast_as_by_the_peer(trees):
    def ask(library):
        broadcast = library.extract.broadcast_prefix
        broadcast_map = library.extract.broadcast_prefix_map
        return [
            outcome(broadcast, *trees),
            outcome(broadcast, *trees, prefix_is_leaf=lambda x: x is None),
            outcome(broadcast_map, lambda *x: x[1:], *trees),
        ]

    theirs, ours = answers(ask)
    assert ours == theirs


@pytest.mark.peers
def test_aliases_are_found_as_by_the_peer():
    def ask(library):
        check = library.extract.check_no_aliases
        v, w = library.Param(1.0), library.Param(1.0)
        linear = library.Linear(1, 1, rngs=library.Rngs(0))
        paths = {
            jax.tree_util.keystr(path): type(x).__name__
            for path, x in check("f", a=linear, b=[v, 1], c=jnp.ones(1)).items()
        }
        refused, taken = [outcome(check, "f", a=x, b=[v]) for x in (v, [w])]
        return paths, refused, len(taken)

    theirs, ours = answers(ask)
    assert ours == theirs and len(ours[0]) == 3


@pytest.mark.peers
def test_changes_and_keywords_are_told_as_by_the_peer():
    def ask(library):
        x = library.extract
        v = library.Param(jnp.ones(1))
        other = library.Param(jnp.zeros(1), tag="x")
        changed = [x.variable_changed(v, w) for w in (v, v.copy(), other)]
        keywords = (lambda a: 0, lambda a, **k: 0, lambda b=1, *, a: 0)
        return changed, [x.filter_kwargs(f, a=1, c=2) for f in keywords]

    theirs, ours = answers(ask)
    assert ours == theirs


@pytest.mark.peers
def test_registries_know_the_same_types():
    def ask(library):
        graph, tree = library.graphlib.GRAPH_REGISTRY, library.graphlib.PYTREE_REGISTRY
        names = ("Module", "Linear", "Rngs", "List", "Param", "State")
        kinds = [getattr(library, name) for name in names] + [list, dict, tuple, int]
        return [(kind in graph, kind in tree) for kind in kinds]

    theirs, ours = answers(ask)
    assert ours == theirs


def test_registries_show_what_is_registered():
    class Node:
        pass

    graph, tree = nnx.graphlib.GRAPH_REGISTRY, nnx.graphlib.PYTREE_REGISTRY
    assert Node not in graph and nnx.Linear in [*graph] and len(graph) == len([*graph])
    nnx.graphlib.register_graph_node_type(
        Node,
        lambda node: ((), None),
        lambda node, key, value: None,
        lambda node, key: None,
        lambda metadata: Node(),
        lambda node: None,
        lambda node, items: None,
    )
    assert Node in graph and Node in [*graph]
    assert {list, tuple, dict, nnx.State} <= {*tree} and not {*tree} & {*graph}
    with pytest.raises(TypeError):
        graph[Node] = None


# ------------------------------------------------------------- signatures, attributes

_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_NAMED = (*_BY_POSITION, inspect.Parameter.KEYWORD_ONLY)

# What differs on purpose. Everything here says why.
EXCEPTIONS = {
    # Made by `split` and `update_context`, not by users; these are their insides.
    "GraphState",
    "UpdateContext",
    # Taken as **kwargs, and given on to the layer that asks for it.
    "Sequential.__call__",
}


def parameters(function):
    """Those that callers give, by name."""
    listed = inspect.signature(function).parameters
    taken = {name: p for name, p in listed.items() if p.kind in _NAMED}
    return {n: p for n, p in taken.items() if n[0] != "_" and n not in ("self", "cls")}


def methods(name, theirs, ours):
    """The constructor and the public methods that both classes have."""
    if "__init__" in vars(theirs):
        yield name, theirs.__init__, ours.__init__
    for method in dir(theirs):
        is_public = not method.startswith("_") or method == "__call__"
        # There the functions of jax.random show through, with a `key` nobody passes.
        if name.startswith("Rng") and hasattr(jax.random, method):
            continue
        pair = [getattr(x, method, None) if is_public else None for x in (theirs, ours)]
        if all(map(inspect.isroutine, pair)):
            yield f"{name}.{method}", *pair


def shared(flax, nnx):
    """All public functions and methods that modules share: name, theirs, ours."""
    for name in dir(flax):
        theirs, ours = getattr(flax, name), getattr(nnx, name, None)
        if name.startswith("_") or ours is None:
            continue
        if inspect.isclass(theirs) and inspect.isclass(ours):
            yield from methods(name, theirs, ours)
        elif callable(theirs) and not isinstance(theirs, types.ModuleType):
            yield name, theirs, ours


def differing(pairs):
    """Says of each function which parameters are missing, elsewhere or others."""
    for name, theirs, ours in pairs:
        try:
            expected, given = parameters(theirs), parameters(ours)
        except (TypeError, ValueError):  # classes of typing show no signature
            continue
        in_order = [n for n, p in expected.items() if p.kind in _BY_POSITION]
        missing = [n for n in expected if n not in given]
        if missing or [*given][: len(in_order)] != in_order:
            yield name, missing or [*given]
        others = [n for n in given if n in expected and not same(expected[n], given[n])]
        if others:
            yield name, others


def same(theirs, ours):
    """Whether a parameter is given in the same way, and has the same default."""
    is_plain = isinstance(theirs.default, int | float | str | None)
    return theirs.kind == ours.kind and (not is_plain or theirs.default == ours.default)


BRIDGE = [path for path in ALL_PATHS if path.startswith(("bridge", "proxy_caller"))]


@pytest.mark.peers
@pytest.mark.parametrize("path", ["", *BRIDGE])
@pytest.mark.filterwarnings("ignore")  # of names that warn when they are read
def test_parameters_are_those_of_flax(path):
    names = [f"{root}.{path}".rstrip(".") for root in ("flax.nnx", "graftree")]
    pairs = [*shared(*map(importlib.import_module, names))]
    found = dict(differing(pairs))
    assert pairs and {name: found[name] for name in found.keys() - EXCEPTIONS} == {}


# ------------------------------------------------------------------------ small modules

# ------------------------------------------------- compat: graph mode, whatever is set


def test_each_is_the_public_function():
    partials = {name: getattr(nnx.compat, name) for name in dir(nnx.compat)}
    partials = {k: f for k, f in partials.items() if type(f) is functools.partial}
    assert len(partials) > 30
    for name, function in partials.items():
        assert function.func is getattr(nnx, name, getattr(nnx.rnglib, name, None))


@pytest.mark.parametrize("decorate", [nnx.compat.jit, nnx.compat.jit()])
def test_jit_propagates_structure_with_and_without_parentheses(decorate):
    model = nnx.Module()
    model.a = model.b = nnx.Param(jnp.ones(2))
    model.me = model

    @decorate
    def add(model):
        model.c = nnx.Param(model.a + model.b)

    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        add(model)
        grads = nnx.compat.grad(lambda model: (model.a * model.b).sum())(model)
    assert model.c.tolist() == grads["a"].tolist() == [2, 2]


# ------------------------------------------------------------------------ deprecations


def double(x, *, times=1):
    """Doubles a number."""
    return x * 2**times


class Model:
    def run(self):
        return "ran"


def test_every_call_does_the_same_and_warns_at_the_line_of_the_caller():
    older = nnx.deprecations.deprecated(double)
    message = "This function is deprecated. Use double instead."
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=message) as caught:
            assert older(3, times=2) == 12
        assert caught[0].filename == __file__


def test_an_older_name_looks_like_the_new_function_with_a_note():
    older = nnx.deprecations.deprecated(double)
    assert older.__name__ == "double"
    assert inspect.signature(older) == inspect.signature(double)
    first, *_, last = older.__doc__.splitlines()
    assert (first, last) == (".. deprecated::", "Doubles a number.")


def test_methods_are_named_with_their_class():
    older = nnx.deprecations.deprecated(Model.run)
    with pytest.warns(DeprecationWarning, match=r"Use Model\.run instead"):
        assert older(Model()) == "ran"
    # It has no docstring of its own.
    assert older.__doc__.endswith("Use :func:`Model.run` instead.")


OLDER_SPELLINGS = {
    "sharding": lambda: nnx.Param(jnp.ones(2), sharding=(), eager_sharding=False),
    "sharding_names": lambda: nnx.Param(1.0).set_metadata(sharding_names=()),
    "flat_state": lambda: nnx.State({}).flat_state(),
}


@pytest.mark.parametrize("spelling", OLDER_SPELLINGS)
def test_documented_older_spellings_warn_only_those_who_ask(spelling):
    # Issue 12. Python's own filters: a DeprecationWarning counts in the program only.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("error", category=DeprecationWarning, module=__name__)
        OLDER_SPELLINGS[spelling]()
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match=spelling):
            OLDER_SPELLINGS[spelling]()


# ----------------------------------------------------------------------- numbers, calls


def test_equal_numbers_are_equal_and_pickling_keeps_them():
    number = ids.uuid()
    assert pickle.loads(pickle.dumps(number)) == number
    assert ids.UUID(3) == ids.UUID(3) != ids.UUID(4)
    assert len({ids.UUID(3), ids.UUID(3)}) == 1


def test_accesses_are_recorded_for_later():
    accessor = proxy_caller.DelayedAccessor().layers[0]
    assert accessor.actions == (proxy_caller.GetAttr("layers"), proxy_caller.GetItem(0))
    same = proxy_caller.DelayedAccessor().layers[0]
    assert accessor == same != proxy_caller.DelayedAccessor()
    proxy = proxy_caller.CallableProxy(lambda accessor, *args: accessor("ab")(*args))
    assert proxy.replace("a", "b") == "bb" and proxy[1].upper() == "B"
