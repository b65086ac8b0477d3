"""Statuses of attributes: tables and declarations; the static part that JAX gets.

Also classes that are no pytrees, as parts of objects."""

import abc
import collections
import copy
import dataclasses
import gc
import linecache
import os
import pickle
import random
import re
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import graftree as nnx
from graftree.core.objects import attributes, bookkeeping
from tests import tables, zoo


def test_tables_are_replaced_not_changed():
    box = nnx.Dict(b=1)
    table = box._pytree__nodes
    box.a = np.ones(1)
    assert dict(table) == {"b": False}
    assert dict(box._pytree__nodes) == {"b": False, "a": True}
    del box.b
    assert dict(box._pytree__nodes) == {"a": True}


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
    assert not nnx.is_data(1j)


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


def test_marks_are_fields_of_dataclasses():
    assert nnx.data(1).is_data and not nnx.static(1).is_data
    assert isinstance(nnx.data(1), dataclasses.Field)


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


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    "values",
    [(1, True), (1, 1.0), (0.0, -0.0), ("a", "b"), (None, ()), ((1,), (True,))],
    ids=str,
)
def test_another_static_value_is_another_structure(write, values):
    box = made(mode=values[0])
    before = [jax.tree.structure(box) for _ in range(2)]
    write(box, "mode", values[1])
    after = [jax.tree.structure(box) for _ in range(2)]
    assert before[0] == before[1] != after[0] == after[1]
    assert after[0] == jax.tree.structure(made(mode=values[1]))


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


# ------------------------------------------------------------------------ plain classes

HEAD = """
import abc, asyncio, contextlib, copy, dataclasses, functools, inspect, pickle, sys
import traceback, typing, warnings

events = {}

def on(f):
    events[f] = f.__name__
    return f

def counting(f):
    @functools.wraps(f)
    def run(*args, **kwargs):
        run.calls += 1
        return f(*args, **kwargs)
    run.calls = 0
    return run

def outside(x):
    return x + 100

def outside_method(self, x):
    return self.n + x

class Descriptor:
    def __set_name__(self, owner, name):
        self.name = name
    def __get__(self, obj, owner=None):
        if obj is None:
            return self
        return lambda x: (self.name, obj.n, x)

class Callable:
    def __call__(self, x):
        return ("called", x)

class Mixin:
    def m1(self, x):
        return ("mixin", x)
    def mixed(self, x):
        return ("mixed", self.m0(x))
    def __call__(self, x):
        inherited = getattr(super(), "__call__", None)
        return ("mixin's call", inherited and inherited(x))

def outcome(f):
    try:
        found = f()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[2:]
        # Objects are made by the metaclass;.
        names = [x.name for x in frames if x.filename in (__file__, "<string>")]
        return type(error).__name__, str(error), names
    return found

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

def warned(f):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f()
    return [(w.filename == __file__, w.lineno) for w in caught]

def depth(obj):
    def deepest(f, low=0):
        try:
            return f(low)
        except RecursionError:
            return None
    return [deepest(lambda _: obj.descend(k)) for k in (10, 600, 100000)]

def through_pickle(x):
    return pickle.loads(pickle.dumps(x)) == x
"""

# Members of a class, each below its name; `{i}` is the number of the class.
MEMBERS = '''
    # m0
    def m0(self, x, k: int = 2, *, s=1):
        """Doubles."""
        return x * k + s + self.n

    # m1
    def m1(self, x):
        return ("m1 of {i}", super().m1(x) if hasattr(super(), "m1") else x)

    # registered
    @on
    def registered(self, x):
        return ("registered {i}", x)

    # counted
    @counting
    def counted(self, x):
        return self.n * x

    # value
    value: typing.Callable = lambda x: x * 3

    # other_value
    other_value: typing.Callable = outside

    # static
    static = staticmethod(outside)

    # bound_later
    bound_later = outside_method

    # instance
    instance = Callable()

    # made
    @classmethod
    def made(cls, n):
        return cls(n).n

    # half
    half = functools.partialmethod(lambda self, a, b: (a, b, self.n), 7)

    # twice
    @property
    def twice(self):
        return self.n * 2

    # lazily
    lazily = Descriptor()

    # dispatched
    @functools.singledispatchmethod
    def dispatched(self, x):
        return ("any", x)
    @dispatched.register
    def _(self, x: int):
        return ("int", x)

    # items
    def items_of(self, k):
        yield from range(k + self.n)

    # later
    async def later(self, x):
        return x + self.n

    # descend
    def descend(self, k):
        return 0 if k == 0 else 1 + self.descend(k - 1)

    # frames
    def frames(self, k):
        return [sys._getframe(i).f_code.co_name for i in range(k)]
    def called_by(self):
        return self.frames(3)

    # warns
    def warns(self):
        warnings.warn("old", DeprecationWarning, stacklevel=2)

    # fails
    def fails(self, x):
        raise ValueError(x, self.n)

    # call
    def __call__(self, x, flag=False):
        if flag:
            return self.fails(x) if hasattr(self, "fails") else 1 // 0
        return ("call of {i}", x, self.n)

    # super_call
    def __call__(self, x):
        inherited = getattr(super(), "__call__", None)
        return ("{i}", inherited(x) if inherited else x)

    # alias_call
    def forward(self, x, scale=3):
        return x * scale + self.n
    __call__ = forward

    # partial_call
    def go(self, k, x):
        return ("go", k, x, self.n)
    __call__ = functools.partialmethod(go, 5)

    # recursive_call
    def __call__(self, x):
        return x if x <= 0 else self(x - 1)

    # generator_call
    def __call__(self, k):
        yield from range(k)

    # static_call
    __call__ = staticmethod(outside)

    # registered_call
    @counting
    def __call__(self, x):
        return ("counted call", x)
'''
MEMBERS = dict(member.split("\n", 1) for member in MEMBERS.split("    # ")[1:])

# For the members that a class has, what is asked; `C` is the class, `o` an object.
PROBES = {
    "m0": [
        "o.m0(2)", "C.m0(o, 3, k=1)", "described(C.m0)", "described(o.m0)", "o.m0()",
        "o.m0.__self__ is o", "through_pickle(o.m0.__func__)", "C.m0 is o.m0.__func__",
        "copy.deepcopy(C.m0) is C.m0", "type(C.m0).__name__",
    ],
    "m1": ["o.m1(1)", "described(C.m1)"],
    "registered": [
        "events.get(C.registered)", "o.registered(4)", "C.registered in events"
    ],
    "counted": ["o.counted(3), C.counted.calls", "C.counted.__wrapped__.__name__"],
    "value": ["C.value(5)", "type(vars(C).get('value')).__name__", "o.value()"],
    "other_value": ["C.other_value is outside", "through_pickle(C.other_value)"],
    "static": ["o.static(1)", "C.static is outside"],
    "bound_later": ["o.bound_later(1)", "C.bound_later is outside_method"],
    "instance": ["o.instance(2)", "C.instance(3)"],
    "made": ["C.made(9)", "o.made(8)"],
    "half": ["o.half(2)", "C.half(o, 3)"],
    "twice": ["o.twice", "C.twice.fget(o)"],
    "lazily": ["o.lazily(1)", "C.lazily.name"],
    "dispatched": ["o.dispatched(1)", "o.dispatched('a')"],
    "items": ["[*o.items_of(2)]", "described(C.items_of)"],
    "later": ["asyncio.run(o.later(1))", "described(C.later)"],
    "descend": ["depth(o)"],
    "frames": ["o.called_by()", "C.called_by(o)"],
    "warns": ["warned(lambda: o.warns())", "warned(lambda: C.warns(o))"],
    "fails": ["o.fails(3)", "C.fails(o, 4)", "C.fails(1)"],
    "call": [
        "o(1)", "o.__call__(2)", "C.__call__(o, 3)", "o(1, flag=True)", "o(typo=1)",
        "C.__call__()", "inspect.signature(o) == inspect.signature(o.__call__)",
        "described(C.__call__)", "described(o.__call__)", "callable(o)",
        "'flag' in o.__call__.__code__.co_varnames", "o.__call__.__self__ is o",
        "pickle.loads(pickle.dumps(C.__call__))(o, 4)",
        "C.__call__ is C.__call__", "repr(C.__call__).split(' at ')[0]",
        "vars(copy.copy(o.__call__.__func__))",
    ],
    "super_call": ["o(1)", "described(C.__call__)", "C.__call__(o, 2)"],
    "alias_call": ["o(2)", "described(C.__call__)", "described(C.forward)",
                   "pickle.loads(pickle.dumps(C.__call__)) is C.forward"],
    "partial_call": ["o(2)", "o.__call__(3)", "C.__call__(o, 4)"],
    "recursive_call": ["o(5)", "o(90)"],
    "generator_call": ["[*o(3)]", "inspect.isgeneratorfunction(C.__call__)"],
    "static_call": ["o(3)", "C.__call__(4)", "C.__call__ is outside"],
    "registered_call": ["o(1), C.__call__.calls", "described(C.__call__)"],
}  # fmt: skip

# What changes the class between probes.
PATCHES = {
    "m0": [
        "C.m0.__defaults__ = (7,)", "C.m0.__kwdefaults__ = {'s': 50}",
        "C.m0.note = 'new'", "C.m0 = lambda self, x: ('patched', x)",
        "C.m0.__code__ = C.other.__code__",
    ],
    "m1": ["C.m1 = outside_method", "del C.m1"],
    "call": [
        "C.__call__.__defaults__ = (True,)", "C.__call__.note = 'new'",
        "C.__call__.__code__ = C.other.__code__", "C.__call__.__doc__ = 'Said.'",
        "C.__call__ = C.other", "del C.__call__", "del C.__call__.note",
        "before = C.__call__; C.__call__ = lambda self, x: ('around', before(self, x))",
    ],
    "alias_call": ["C.forward.__defaults__ = (11,)", "C.__call__.__defaults__ = (12,)"],
    "registered_call": ["C.__call__.calls = 40"],
}  # fmt: skip

OTHER = """
    def other(self, x, flag=False):
        return ("other", x, flag)
"""


class Program:
    """The classes and probes of a seed."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.lines, self.probes = [HEAD], []
        base, has, mixed = "Base", set(), choose.randint(0, 9)
        for i in range(choose.randint(1, 3)):
            kinds = choose.sample([*MEMBERS], choose.randint(2, 7))
            calls = [kind for kind in kinds if kind.endswith("call")]
            kinds = [kind for kind in kinds if kind not in calls[1:]]
            has = {kind for kind in has if not (calls and kind.endswith("call"))}
            has |= {*kinds}
            bases = f"Mixin, {base}" if i == mixed else base
            if choose.random() < 0.2:
                self.lines.append("@dataclasses.dataclass(eq=False, repr=False)")
            self.lines.append(f"class C{i}({bases}):")
            if i == 0:
                self.lines.append("    n: int = 3")
                self.lines.append("    def __init__(self, n=3): self.n = n")
            self.lines.append(OTHER)
            self.lines += [MEMBERS[kind].replace("{i}", str(i)) for kind in kinds]
            base = f"C{i}"
        self.lines.append(f"C, o = {base}, {base}()")
        for _ in range(choose.randint(5, 15)):
            kind = choose.choice(sorted(has))
            if choose.random() < 0.15 and kind in PATCHES:
                self.probes.append((choose.choice(PATCHES[kind]), "exec"))
            else:
                self.probes.append((choose.choice(PROBES[kind]), "eval"))

    def run(self, name: str, base: type) -> list[object]:
        """What the probes give if the classes have this base."""
        source, file = "\n".join(self.lines), f"<{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        module = types.ModuleType(name)
        module.__dict__.update(Base=base, __file__=file)
        sys.modules[name] = module
        try:
            exec(compile(source, file, "exec"), vars(module))
            return [self._ask(module, *probe) for probe in self.probes]
        finally:
            del sys.modules[name], linecache.cache[file]

    @staticmethod
    def _ask(module: types.ModuleType, text: str, mode: str) -> str:
        code = compile(text, module.__file__, mode)
        found = module.outcome(lambda: eval(code, vars(module)))
        address = r"0x[0-9a-f]+"
        return re.sub(address, "", repr(found).replace(module.__name__, "module"))


class Meta(abc.ABCMeta):
    """As that of Modules, it says what a call of a class does."""

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs)


class Plain(metaclass=Meta):
    """What a class is without Module."""


COUNT = 5000 if os.environ.get("TEST_ALL") else 300


@pytest.mark.parametrize("part", range(10))
def test_classes_behave_as_without_module(part):
    for seed in range(part * COUNT // 10, (part + 1) * COUNT // 10):
        program = Program(seed)
        plain = program.run("plain_classes", Plain)
        ours = program.run("module_classes", nnx.Module)
        for (text, _), wanted, found in zip(program.probes, plain, ours, strict=True):
            assert found == wanted, f"seed {seed}: {text}\n{program.lines[1:]}"
