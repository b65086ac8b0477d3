"""Statuses of attributes; the static part that JAX gets; what `dir` lists.

At the end classes: those of Modules are what they are without `Module`.
"""

import abc
import collections
import copy
import dataclasses
import functools
import gc
import itertools
import linecache
import pickle
import re
import sys
import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import graftree as nnx
from graftree.core.objects import attributes, bookkeeping
from tests import tables, zoo


def test_tables_compare_by_content_can_be_pickled_and_are_shared():
    array = np.ones(1)
    nodes = zoo.Node(x=array, y=1), zoo.Node(x=array, y=2), zoo.Node(y=1, x=array)
    a, alike, b = (node._pytree__nodes for node in nodes)
    assert a is alike and a == b and hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


def test_classes_share_no_order():
    """Names that are equal may have another order and other keys in another class."""
    names = [str(i) for i in range(11)]
    items = nnx.List([nnx.data(i) for i in range(11)])
    node = zoo.Node(_length=11, **{name: nnx.data(int(name)) for name in names})
    for _ in range(2):
        assert jax.tree.leaves(items) == [*range(11)]
        assert jax.tree.leaves(node) == [*map(int, sorted(names))]
        assert node._pytree__nodes == items._pytree__nodes


@tables.cases(
    "assignments",
    [(f"x{i}", nnx.data(1)) for i in range(300)],
    # The status of an attribute may change without an end.
    [("x", (nnx.data, nnx.static)[i % 2](1)) for i in range(300)],
)
def test_what_a_table_keeps_alive_is_bounded(assignments):
    made, own = [], type("Own", (nnx.Pytree,), {})
    for _ in range(2):
        obj = own()
        for name, value in assignments:
            setattr(obj, name, value)
            made.append(weakref.ref(obj._pytree__nodes))
    del obj
    assert len({id(reference()) for reference in made} - {id(None)}) < 100


@pytest.mark.parametrize("register", ["dataclass", "node", "namedtuple", None])
def test_data_is_found_in_whatever_jax_takes_apart(register):
    class Pair:
        def __init__(self, x=None):
            self.x = x

    if register == "dataclass":
        jax.tree_util.register_dataclass(Pair, ["x"], [])
    elif register == "node":
        jax.tree_util.register_pytree_node(
            Pair, lambda pair: ((pair.x,), None), lambda _, children: Pair(*children)
        )
    elif register == "namedtuple":
        Pair = collections.namedtuple("Pair", "x")
    array = np.ones(1)
    assert nnx.has_data(Pair(array)) == ([array] if register else [])
    if register is None:
        zoo.Node(pair=Pair(nnx.data(1)))
        return
    with pytest.raises(ValueError, match="unexpected tags"):
        zoo.Node(pair=nnx.data(Pair(nnx.data(1))))
    if register == "namedtuple":
        with pytest.raises(ValueError, match="Found data"):
            zoo.Node(pair=Pair(array))


def test_numbers_can_be_registered_as_data():
    nnx.register_data_type(complex)
    try:
        assert jax.tree.leaves(zoo.Node(a=1j, b=1)) == [1j] and nnx.has_data(1j) == [1j]
    finally:
        attributes.DATA_REGISTRY.discard(complex)
        nnx.register_data_type(type("Clears", (), {}))
        attributes.ATOMS.add(complex)


def test_factory_of_a_field_needs_a_dataclass():
    class Made(nnx.Pytree):
        a: list = nnx.data(default_factory=lambda: [np.ones(1)])

    with pytest.raises(AttributeError, match=r"nnx\.dataclass"):
        Made().a
    assert len(nnx.state(nnx.dataclass(Made)())["a"]) == 1


@pytest.mark.parametrize("decorate", [nnx.dataclass, dataclasses.dataclass])
def test_each_of_several_declared_fields_has_its_status(decorate):
    # The decorator gives `name` its default before it says which fields there are.
    @decorate
    class Net(nnx.Module):
        layers: list = nnx.data()
        name: str = nnx.static(default="net")

    assert len(jax.tree.leaves(Net([nnx.Param(np.ones(1))]))) == 1


def test_registering_a_type_reaches_instances_seen_before():
    late = type("Late", (), {})
    assert not nnx.is_data(late())
    nnx.register_data_type(late)
    assert nnx.is_data(late())


@pytest.mark.parametrize("declare", [nnx.data, nnx.static])
def test_unknown_options_of_a_declaration_are_named(declare):
    told = rf"^nnx\.{declare.__name__} got unexpected options \['alias', 'static'\]\.$"
    with pytest.raises(TypeError, match=told):
        declare(default=1, static=True, alias="a")


# ---------------------------------------------------------------------- the static part


# `split` watches objects too, and remembers their static values beside.


def made(**attributes):
    return zoo.Node(kernel=nnx.Param(jnp.ones(1)), **attributes)


def watched(box):
    assert bookkeeping.version_writes(box)
    return vars(box)


WRITES = {
    "setattr": setattr,
    "vars": lambda box, name, value: vars(box).update({name: value}),
    "watched vars": lambda box, name, value: watched(box).update({name: value}),
    "object": object.__setattr__,
}


@pytest.mark.parametrize("name", ["it's", 'a "b"', "\\", "{x}", "None", "ü"])
def test_names_need_not_be_identifiers(name):
    box = made(**{name: 1})
    leaves, treedef = jax.tree.flatten(box)
    assert vars(jax.tree.unflatten(treedef, leaves))[name] == 1
    object.__setattr__(box, name, 2)
    assert treedef != jax.tree.structure(box)


CHANGES = {
    "contents": lambda box: box.sizes.append(2),
    "flags": lambda box: setattr(box._pytree__state, "is_setup", True),
    "one of many": lambda box: object.__setattr__(box, "a99", True),
    "name": lambda box: vars(box).update(other=vars(box).pop("a50")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_all_that_is_static_belongs_to_the_structure(name):
    box = made(sizes=[1], **{f"a{i}": i for i in range(100)})
    before = [jax.tree.structure(box) for _ in range(2)]
    CHANGES[name](box)
    assert before[0] == before[1] != jax.tree.structure(box)
    assert jax.tree.structure(box) == jax.tree.structure(copy.copy(box))


@pytest.mark.caches("it asks for the very same static part")
def test_unchanged_objects_give_the_very_same_static_part():
    box = made(mode="a", rate=0.5)
    first, second = (jax.tree.structure(box).node_data()[1] for _ in range(2))
    assert first is second


@pytest.mark.parametrize("write", ["setattr", "watched vars"])
def test_static_values_that_were_replaced_are_let_go(write):
    box = made(function=lambda: None)
    kept = weakref.ref(box.function)
    jax.tree.leaves(box)
    WRITES[write](box, "function", None)
    gc.collect()
    assert kept() is None


def test_structures_keep_no_object():
    box = made(mode="a")
    kept, treedef = weakref.ref(box), [jax.tree.structure(box) for _ in range(2)]
    del box
    gc.collect()
    assert kept() is None and treedef[0] == treedef[1]


values = st.sampled_from([0, False, 0.0, -0.0, "a", None, (), (0,), [0], jnp.ones(1)])
names = st.sampled_from("abc")
writes = st.tuples(st.sampled_from([*WRITES]), names, values)


@settings(max_examples=60, deadline=None)
@given(st.lists(writes, max_size=8))
def test_structure_is_that_of_a_copy_whatever_is_written(steps):
    box = made(a=1, b=nnx.data([1]), c="c")
    for write, name, value in steps:
        try:
            WRITES[write](box, name, copy.copy(value))
            structure = jax.tree.structure(copy.copy(box))
        except ValueError:  # data in a static attribute
            box = made(a=1, b=nnx.data([1]), c="c")
            continue
        assert jax.tree.structure(box) == structure == jax.tree.structure(box)


# ----------------------------------------------------------------------- what dir lists


class Listed(zoo.Box):
    setting = 1

    def _helper(self):
        pass


def model():
    return Listed(linear=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), _mine=2)


OBJECTS = {
    "module": model,
    "attention": lambda: nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)),
    "variable class": lambda: nnx.Param,
    "variable": lambda: nnx.Param(jnp.ones(2), tag="x"),
    "state": lambda: nnx.state(model()),
    "rngs": lambda: nnx.Rngs(0),
    "dict": lambda: nnx.Dict(a=1),
    "namespace": lambda: nnx,
    "layers": lambda: nnx.nn,
    "older forms": lambda: nnx.compat,
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_what_is_listed_exists_and_is_public(make):
    x = make()
    listed = dir(x)
    private = {n for n in listed if n.startswith("_") and not n.startswith("__")}
    assert private <= {"_mine", "_helper"} and all(map(str.isidentifier, listed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What an array of JAX lists as well, and does not have.
        lost = [n for n in listed if n not in dir(jax.Array) and not hasattr(x, n)]
    assert lost in ([], ["__abstractmethods__"])


def test_everything_of_a_users_class_is_listed():
    names = {"setting", "linear", "_mine", "_helper", "train", "set_attributes", "sow"}
    assert names <= set(dir(model()))
    assert names - {"linear", "_mine"} <= set(dir(Listed))
    assert {"linear", "items"} <= set(dir(nnx.state(model())))
    assert "linear" in dir(nnx.unpack(model()))


def test_variables_list_their_metadata_and_what_their_value_has():
    listed = {*dir(nnx.Param(jnp.ones(2), ref=True, tag="x"))}
    assert {"tag", "mean", "T", "at", "get_value"} <= listed
    assert "mean" not in dir(nnx.Param("text")) and "upper" in dir(nnx.Param("text"))


def test_the_namespace_lists_its_names_and_sub_modules():
    listed = {name for name in dir(nnx) if not name.startswith("_")}
    modules = {"compat", "variablelib", "graphlib", "debugging", "bridge", "reprlib"}
    assert set(nnx.__all__) | modules <= listed
    assert not listed & {"core", "interop", "annotations", "use_refs"}


def test_what_the_peer_lists_is_listed(peer):
    def public(x):
        return {name for name in dir(x) if not name.startswith("_")}

    for make in (
        lambda n: n.Linear(2, 3, rngs=n.Rngs(0)),
        lambda n: n.Param(jnp.ones(2)),
        lambda n: n.Rngs(0),
        lambda n: n.Dict(a=1),
        lambda n: n.State({"a": 1}),
    ):
        assert public(make(peer)) <= public(make(nnx))


# ------------------------------------------------------------------------ plain classes

HEAD = """
import copy, dataclasses, functools, inspect, pickle, traceback, typing

def counting(f):
    @functools.wraps(f)
    def run(*args, **kwargs):
        run.calls += 1
        return f(*args, **kwargs)
    run.calls = 0
    return run

def outside(x):
    return x + 100

class Mixin:
    def __call__(self, x):
        inherited = getattr(super(), "__call__", None)
        return ("mixin's call", inherited and inherited(x))

def outcome(f):
    try:
        return f()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[2:]
        # Objects are made by the metaclass.
        names = [x.name for x in frames if x.filename in (__file__, "<string>")]
        return type(error).__name__, str(error), names

def described(f):
    f = getattr(f, "__func__", f)
    return (
        f.__name__, f.__qualname__, f.__doc__, f.__module__ == __name__,
        f.__code__.co_varnames, f.__defaults__, f.__kwdefaults__,
        len(f.__closure__ or ()), f.__globals__ is globals(), sorted(vars(f)),
        inspect.isfunction(f), inspect.isroutine(f), inspect.getfullargspec(f),
        str(inspect.signature(f)), inspect.getsource(f), hasattr(f, "__wrapped__"),
        typing.get_type_hints(f), inspect.isgeneratorfunction(f),
        inspect.iscoroutinefunction(f), inspect.unwrap(f).__code__.co_name,
    )
"""

OWN = """
    n: int = 3
    def __init__(self, n=3): self.n = n
    def __repr__(self): return "an object"
    def other(self, x, flag=False): return ("other", x, flag)
    def fails(self, x): raise ValueError(x, self.n)
"""
PLAIN_CALL = """
    def __call__(self, x, flag: bool = False):
        return self.fails(x) if flag else ("call", x, self.n)
"""
CALLS = {
    "plain": PLAIN_CALL,
    "calls that of the base": """
    def __call__(self, x):
        inherited = getattr(super(), "__call__", None)
        return ("own", inherited(x) if inherited else x)
""",
    "another name": """
    def forward(self, x, scale=3): return x * scale + self.n
    __call__ = forward
""",
    "partial": """
    def go(self, k, x): return ("go", k, x, self.n)
    __call__ = functools.partialmethod(go, 5)
""",
    "recursive": "    def __call__(self, x): return x if x <= 0 else self(x - 1)",
    "generator": "    def __call__(self, k): yield from range(k)",
    "static": "    __call__ = staticmethod(outside)",
    "decorated": """
    @counting
    def __call__(self, x): return ("counted call", x)
""",
}
# How classes come by it; `{own}` and `{call}` stand for what is above.
FORMS = {
    "alone": "class C(Base):{own}{call}",
    "derived": f"class B(Base):{{own}}{PLAIN_CALL}\nclass C(B):\n    pass\n{{call}}",
    "mixed in": "class C(Mixin, Base):{own}{call}",
    "data": "@dataclasses.dataclass(eq=False, repr=False)\nclass C(Base):{own}{call}",
}
# `C` is the class, `o` an object.
PROBES = [
    "o(2)", "o.__call__(3)", "C.__call__(o, 4)", "o(1, flag=True)", "o(typo=1)",
    "C.__call__()", "[*o(3)]", "o(90)", "callable(o)", "described(C.__call__)",
    "described(o.__call__)", "inspect.signature(o) == inspect.signature(o.__call__)",
    "o.__call__.__self__ is o", "o.__call__.__code__.co_varnames", "C.__call__.calls",
    "pickle.loads(pickle.dumps(C.__call__))(o, 4)", "C.__call__ is C.__call__",
    "repr(C.__call__).split(' at ')[0]", "vars(copy.copy(o.__call__.__func__))",
]  # fmt: skip
# What changes the class before it is asked.
PATCHES = [
    "None", "C.__call__.__defaults__ = (True,)", "C.__call__.note = 'new'",
    "C.__call__.__code__ = C.other.__code__", "C.__call__.__doc__ = 'Said.'",
    "C.__call__ = C.other", "C.forward.__defaults__ = (11,)",
    "C.__call__.note = 1; del C.__call__.note", "C.__call__.calls = 40",
    "before = C.__call__; C.__call__ = lambda self, x: ('around', before(self, x))",
]  # fmt: skip


compiled = functools.cache(compile)


def answers(source, patch, base):
    """What the probes give of a class that has this base."""
    module, file = types.ModuleType("classes"), "<classes>"
    module.__dict__.update(Base=base, __file__=file)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    sys.modules["classes"] = module

    def ask(text, mode="eval"):
        code = compiled(text, file, mode)
        return repr(module.outcome(lambda: eval(code, vars(module))))

    try:
        exec(compiled(source, file, "exec"), vars(module))
        found = {patch: ask(patch, "exec")} | {text: ask(text) for text in PROBES}
        return {text: re.sub("0x[0-9a-f]+", "", x) for text, x in found.items()}
    finally:
        del sys.modules["classes"], linecache.cache[file]


class Meta(abc.ABCMeta):
    """As that of Modules, it says what a call of a class does."""

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs)


class Plain(metaclass=Meta):
    """What a class is without Module."""


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_a_class_behave_as_without_module(call):
    inherited = [(form, "del C.__call__") for form in ("derived", "mixed in")]
    for name, patch in [*itertools.product(FORMS, PATCHES), *inherited]:
        form = FORMS[name]
        source = HEAD + form.format(own=OWN, call=CALLS[call]) + "\no = C()"
        assert answers(source, patch, nnx.Module) == answers(source, patch, Plain)
