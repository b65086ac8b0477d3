"""Lists, dicts and objects that static attributes and registered nodes hold.

They may change in place: no attribute is set then. So whatever is remembered of an
object remembers what they were like. And no tracer may stay in them.
"""

import collections
import dataclasses
import gc
import pickle
import random
import types
import weakref
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import static_values, tables, zoo
from tests.changes import param
from tests.modes import BY_NAME


class Config:
    """Compares by its content, and has no hash."""

    def __init__(self, content):
        self.content = content

    def __eq__(self, other):
        return isinstance(other, Config) and self.content == other.content

    def __repr__(self):
        return f"Config({self.content!r})"


# Changes of what `nested` gives, one after the other; the last is to what is equal.
CHANGES = {
    "append": lambda config: config.append(1),
    "item of a dict": lambda config: config[0].update(a=2),
    "list in a tuple": lambda config: config[0]["b"][0].append("x"),
    "attribute": lambda config: setattr(config[1], "content", [1]),
    "equal value": lambda config: setattr(config[1], "content", [True]),
}


def nested():
    return [{"a": 1, "b": ([], None)}, Config((0,))]


# Makes of a function of one argument one that is traced at each call.
TRACED_EACH = {
    "grad": lambda f, mode: nnx.grad(f, **mode),
    "vmap": lambda f, mode: nnx.vmap(f, in_axes=None, axis_size=2, **mode),
    "cond": lambda f, mode: lambda x: nnx.cond(True, f, f, x, **mode),
    "custom_vjp": lambda f, mode: with_derivative(f, mode),
    "checkify": lambda f, mode: nnx.checkify(f, **mode),
}


def with_derivative(f, mode):
    function = nnx.custom_vjp(f, **mode)
    function.defvjp(lambda x: (f(x), None), lambda residuals, out: (None,))
    return function


def logging_model():
    return Logging(nnx.Param(jnp.ones(2)))


class Logging(nnx.Module):
    def __init__(self, kernel):
        self.kernel, self.log = kernel, nnx.static([1])


def log_of(x):
    return x.log if isinstance(x, Logging) else x["kernel"].log


@pytest.mark.parametrize("name", TRACED_EACH)
@pytest.mark.parametrize("mode", BY_NAME.values(), ids=BY_NAME)
@tables.cases("make", logging_model, lambda: nnx.State({"kernel": param(log=[1])}))
def test_a_write_to_a_list_reaches_that_of_the_argument(name, mode, make):
    # Arguments of earlier calls were equal to it, and have lists of their own.
    writes = False

    def call(x):
        if writes:
            log_of(x).append(2)
        kernel = x.kernel if isinstance(x, Logging) else x["kernel"]
        return (kernel[...] ** 2).sum()

    function = TRACED_EACH[name](call, mode)
    earlier, argument = [make() for _ in range(4)], make()
    for x in earlier:
        function(x)
    writes = True
    function(argument)
    assert [log_of(x) for x in earlier] == [[1]] * 4
    assert log_of(argument) == [1, 2]


def number(value):
    """A number that a function may make of metadata while it is traced."""
    return zlib.crc32(repr(value).encode()) % 1000


def model_of(value):
    return zoo.Box(kernel=nnx.Param(jnp.ones(()), config=value))


def read(model):
    return model.kernel * number(model.kernel.config)


# What gives the value of a model, from the mode.
def functional(mode):
    call = jax.jit(lambda graphdef, state: read(nnx.merge(graphdef, state)))
    return lambda model: call(*nnx.split(model, graph=mode["graph"]))


def with_gradient(mode):
    differentiated = nnx.value_and_grad(read, **mode)
    return lambda model: differentiated(model)[0]


def mapped(mode):
    each = nnx.vmap(lambda model, x: read(model), in_axes=(None, 0), **mode)
    return lambda model: each(model, jnp.ones(2))[0]


def of_state(mode):
    call = nnx.jit(read, **mode)
    return lambda model: call(nnx.state(model))


WAYS = {
    "jit": lambda mode: nnx.jit(read, **mode),
    "grad": with_gradient,
    "vmap": mapped,
    "state": of_state,
    "functional": functional,
    "jax.jit": lambda mode: jax.jit(read),
}


def check_changes_are_seen(call, model, names=CHANGES):
    for change in (lambda config: None, *map(CHANGES.get, names)):
        change(model.kernel.config)
        assert [float(call(model)) for _ in range(3)] == [float(read(model))] * 3


@dataclasses.dataclass
class Settings:
    """What programs keep of their command line."""

    size: object = 1
    other: object = "x"
    seen: object = dataclasses.field(default=0, compare=False)


class Renamed(Settings):
    """Equal to none of the others, as its type is another."""


@dataclasses.dataclass
class Computed:
    """Its field is a property."""

    size: object

    @property
    def size(self):
        return self.sizes[-1]

    @size.setter
    def size(self, value):
        vars(self).setdefault("sizes", []).append(value)


@dataclasses.dataclass
class Redirected:
    """Its attributes are elsewhere."""

    size: object = 1

    def __getattribute__(self, name):
        return sizes["size"] if name == "size" else super().__getattribute__(name)


sizes = {"size": 1}


class Elsewhere:
    """Its hash is not that of its attributes."""

    def __eq__(self, other):
        return isinstance(other, Elsewhere)

    def __hash__(self):
        return hash(sizes["size"])


@dataclasses.dataclass(slots=True)
class Slotted:
    size: object = 1


class Pair(NamedTuple):
    first: object
    second: object


# What makes a static value, and what changes it in place.
IN_PLACE = {
    "field": (Settings, lambda x: setattr(x, "size", 2)),
    "equal field": (Settings, lambda x: setattr(x, "size", True)),
    "deleted field": (lambda: Settings(2), lambda x: vars(x).pop("size", None)),
    "class": (Settings, lambda x: setattr(x, "__class__", Renamed)),
    "dict of an object": (Settings, lambda x: setattr(x, "__dict__", {"size": 3})),
    "list in a field": (lambda: Settings([1]), lambda x: x.size.append(2)),
    "property": (lambda: Computed(1), lambda x: setattr(x, "size", 2)),
    "special method": (Redirected, lambda x: sizes.update(size=sizes["size"] + 1)),
    "hash": (Elsewhere, lambda x: sizes.update(size=sizes["size"] + 1)),
    "slot": (Slotted, lambda x: setattr(x, "size", 2)),
    "named tuple": (lambda: Pair([1], 2), lambda x: x.first.append(2)),
    "order": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
    "key": (lambda: {1: 2}, lambda x: x.update({True: x.pop(1)})),
    "set": (lambda: {1, 2}, lambda x: (x.remove(1), x.add(True))),
    "list": (lambda: [0.0], lambda x: x.__setitem__(0, -0.0)),
    "object": (lambda: Config([1]), lambda x: x.content.append(2)),
    "object with a hash": (
        lambda: static_values.Tag("a"),
        lambda x: setattr(x, "name", "b"),
    ),
    "own slot": (lambda: InSlots([1]), lambda x: setattr(x, "content", 2)),
    "slot of a base": (lambda: WithSlots([1]), lambda x: x.content.append(2)),
    "empty slot": (lambda: InSlots(1), lambda x: x.empty_or_fill()),
    "state of its own": (lambda: WithState(1), lambda x: setattr(x, "content", 2)),
    "no pickle": (lambda: Unpicklable([1]), lambda x: x.content.append(2)),
    "deque": (collections.deque, lambda x: x.append(1)),
    "array in a field": (
        lambda: Settings(np.ones(2)),
        lambda x: x.size.__setitem__(0, 2.0),
    ),
    "proxy": (lambda: types.MappingProxyType({"a": [1]}), lambda x: x["a"].append(2)),
    "moved to the end": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda x: x.move_to_end("a"),
    ),
    "default": (
        lambda: collections.defaultdict(int),
        lambda x: setattr(x, "default_factory", float),
    ),
    "attribute of a list": (lambda: Names("ab"), lambda x: setattr(x, "note", 1)),
    "what refers to itself": (lambda: in_itself(), lambda x: x.content.append(2)),
}


class InSlots:
    """Compares by what is in its slot."""

    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content

    def __eq__(self, other):
        return type(other) is type(self) and self.content == other.content

    def empty_or_fill(self):
        if hasattr(self, "content"):
            del self.content
        else:
            self.content = 2


class WithSlots(InSlots):
    __slots__ = ("more",)


class WithState(InSlots):
    """Says what it is, as classes of attrs and pydantic do."""

    __slots__ = ()

    def __getstate__(self):
        return {"content": self.content}


class Unpicklable(InSlots):
    __slots__ = ()

    def __reduce_ex__(self, protocol):
        raise TypeError("can't be pickled")


class Names(list):
    pass


def in_itself():
    made = Config([1])
    made.content.append(made)
    return made


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: object


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_of_any_kind_of_value_is_seen(name, mode):
    make, change = IN_PLACE[name]
    model, seen = zoo.Box(w=nnx.Param(1.0), tag=nnx.static(make())), []
    step = nnx.jit(lambda model: seen.append(1), **mode)
    for times in (1, 2):
        for _ in range(4):
            step(model)
        assert len(seen) == times
        change(model.tag)


# Each puts a value into another one.
WRAPPERS = [
    *(lambda x: [x], lambda x: (x, 1), lambda x: {"a": x}, Settings, Slotted, Config),
    *(InSlots, WithSlots, WithState, Unpicklable, lambda x: Pair(x, 2)),
    *(lambda x: types.MappingProxyType({"a": x}), lambda x: collections.deque([x])),
    *(lambda x: collections.OrderedDict(a=x), lambda x: types.SimpleNamespace(a=x)),
]


@pytest.mark.parametrize("seed", range(5))
def test_a_change_at_any_depth_is_seen(seed, mode):
    draw, inner = random.Random(seed), []
    outer = inner
    for _ in range(40):
        outer = draw.choice(WRAPPERS)(outer)
    model, seen = zoo.Box(w=nnx.Param(1.0), tag=nnx.static(outer)), []
    step = nnx.jit(lambda model: seen.append(1), **mode)
    for times in (1, 2):
        for _ in range(3):
            step(model)
        assert len(seen) == times
        inner.append(1)


def test_equal_values_are_one_program_whatever_is_shared_in_them(mode):
    step = nnx.jit(lambda model: seen.append(1), **mode)
    shared, seen = Frozen((1, 2)), []
    for tag in ((shared, shared), (Frozen((1, 2)), Frozen((1, 2)))):
        step(zoo.Box(w=nnx.Param(1.0), tag=tag))
    assert seen == [1]


def test_fields_that_are_not_compared_may_change(mode):
    settings = Settings()
    model, seen = zoo.Box(w=nnx.Param(1.0), tag=settings), []
    step = nnx.jit(lambda model: seen.append(1), **mode)
    for settings.seen in range(5):
        step(model)
    assert seen == [1]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_between_two_calls_is_seen(way, mode):
    names = CHANGES if way == "jit" else ["list in a tuple", "equal value"]
    check_changes_are_seen(WAYS[way](mode), model_of(nested()), names)


def test_a_change_in_what_is_bound_is_seen(value_mode):
    model = model_of(nested())
    bound = nnx.jit_partial(read, model, **value_mode)
    check_changes_are_seen(lambda model: bound(), model)


def test_an_object_that_was_traced_for_stays_told_from_others():
    step = nnx.jit(lambda model: model.w * number(model.tag.name))
    for _ in range(2):  # each round has the values of the round before in its cache
        model = zoo.Box(w=nnx.Param(jnp.array(1.0)), tag=static_values.Tag("a"))
        for model.tag.name in "aabbab":
            assert step(model) == number(model.tag.name)


def test_a_treedef_keeps_what_it_was_made_of():
    model = model_of(Config(1))
    config, before = model.kernel.config, jax.tree.structure(model)
    for config.content in (True, 1):
        assert (jax.tree.structure(model) == before) is (type(config.content) is int)


def test_what_returns_has_the_metadata_of_the_caller_not_a_note_of_it(mode):
    model = model_of([1])
    new = nnx.jit(lambda model: nnx.Param(model.kernel[...], x=[1]), **mode)(model)
    assert type(new.x) is list and new.x == [1]
    for made in (
        nnx.merge(*nnx.split(model, graph=mode["graph"])),
        nnx.clone(model),
        jax.tree.map(lambda x: x, model),
        jax.jit(lambda model: model)(model),
    ):
        assert made.kernel.config is model.kernel.config


def test_a_function_that_changes_it_is_traced_at_each_call(mode):
    def count(model):
        model.kernel.config.append(0)
        return jnp.array(len(model.kernel.config))

    model, counted = model_of([]), nnx.jit(count, **mode)
    assert [int(counted(model)) for _ in range(4)] == [1, 2, 3, 4]


def test_the_hash_of_a_skeleton_stays_and_is_that_of_its_content():
    tag = static_values.Tag("a")
    graphdef = nnx.graphdef(model_of(tag))
    again, before = pickle.loads(pickle.dumps(graphdef)), hash(graphdef)
    tag.name = "b"
    assert hash(graphdef) == before == hash(again)
    now = nnx.graphdef(model_of(tag))
    assert now != graphdef and hash(now) != before


# ------------------------------------------------------ tracers (issue 12, section 13)


def logging(log):
    return zoo.Box(weight=nnx.Param(jnp.array(2.0)), log=nnx.static(log))


# What is held, and how a value is put into it.
PUT = {
    "list": (lambda: [1], lambda log, x: log.append(x)),
    "dict": (lambda: {"a": 1}, lambda log, x: log.update(a=(x, 2))),
    "nested": (lambda: {"a": [1]}, lambda log, x: log["a"].append(x)),
    "object": (lambda: types.SimpleNamespace(a=1), lambda x, y: setattr(x, "a", [y])),
}
TRANSFORMS = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "grad": nnx.grad,
    "cond": lambda f, **mode: lambda m: nnx.cond(jnp.array(True), f, f, m, **mode),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", PUT)
def test_a_tracer_is_taken_out_and_told_with_its_path(kind, transform, mode):
    make, put = PUT[kind]
    model = nnx.Dict(layers=nnx.List([logging(make())]))

    def f(model):
        layer = model.layers[0]
        put(layer.log, layer.weight * 2)
        return layer.weight * 2

    with pytest.warns(nnx.errors.LostUpdateWarning, match="static attr") as caught:
        out = TRANSFORMS[transform](f, **mode)(model)
    assert transform == "grad" or out == 4.0
    for words in ("args[0], at layers/0/log", "nnx.Variable"):
        assert words in str(caught[0].message)
    assert model.layers[0].log == make()


def test_a_tracer_is_taken_out_also_if_the_function_fails():
    model = logging([])

    @nnx.jit
    def f(model, x):
        model.log.append(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        f(model, 1.0)
    assert model.log == []


# --------------------------------------------------------------------- registered nodes


class Bag:
    """A graph node by registration, which lists its label as metadata."""

    def __init__(self, label=""):
        self.label = label
        self.items = {}


class Slotted:
    """The same of a type that weak references can't refer to."""

    __slots__ = ("items", "label")
    __init__ = Bag.__init__


def listed(bag):
    # What is a number is static: else it would be data that never changes.
    return [
        (key, nnx.graphlib.StaticElem(x) if isinstance(x, int) else x)
        for key, x in bag.items.items()
    ], bag.label


for kind in (Bag, Slotted):
    nnx.graphlib.register_graph_node_type(
        kind,
        listed,
        lambda bag, key, value: bag.items.__setitem__(key, value),
        lambda bag, key: bag.items.pop(key),
        lambda label, kind=kind: kind(label),
        lambda bag: bag.items.clear(),
        lambda bag, items: bag.items.update(items),
    )


def ones():
    return nnx.Param(jnp.ones(2))


def make(kind=Bag):
    bag = kind("a")
    bag.items = {"w": ones(), "n": 2, "inner": [ones()]}
    return bag


def owner(bag):
    return zoo.Box(bag=nnx.data(bag), more=nnx.data([bag]))


def bag_of(x):
    return x.bag if isinstance(x, zoo.Box) else x


def told(x):
    """All that is in a bag."""
    bag = bag_of(x)
    return len(bag.label), bag.items["n"], nnx.as_pure(nnx.state(x))


# One after the other.
IN_NODES = {
    "nothing": lambda bag: None,
    "a value": lambda bag: bag.items["w"].set_value(jnp.full(2, 7.0)),
    "another Variable": lambda bag: bag.items.update(w=nnx.Param(jnp.zeros(2))),
    "a static value": lambda bag: bag.items.update(n=3),
    "one more": lambda bag: bag.items.update(x=ones()),
    "a member of a list": lambda bag: bag.items["inner"].append(ones()),
    "one less": lambda bag: bag.items.pop("inner"),
    "metadata": lambda bag: setattr(bag, "label", "longer"),
    "an array": lambda bag: bag.items.update(z=jnp.ones(2)),
    "another array": lambda bag: bag.items.update(z=jnp.zeros(2)),
}


@tables.cases("kind, wrap", (Bag, bag_of), (Bag, owner), (Slotted, bag_of))
def test_changes_are_seen(graph_mode, kind, wrap):
    x, called = wrap(make(kind)), nnx.jit(told, **graph_mode)
    for change in IN_NODES.values():
        change(bag_of(x))
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, called(x), told(x))


@pytest.mark.parametrize("wrap", [bag_of, owner])
@pytest.mark.parametrize("refers_back", [False, True])
def test_none_is_kept_alive(wrap, refers_back):
    bag = make()
    x, called = wrap(bag), nnx.jit(lambda x: bag_of(x).items["w"][...].sum())
    if refers_back:
        bag.items["back"] = x
    for _ in range(4):
        called(x)
    gone = weakref.ref(bag)
    del x, bag
    gc.collect()
    assert gone() is None


def test_the_structure_of_one_reaches_the_caller_each_time():
    def grow(bag):
        bag.items[f"n{len(bag.items)}"] = ones()
        bag.items["w"][...] += 1
        return len(bag.items)

    bag, called = make(), nnx.jit(grow)
    assert [called(bag) for _ in range(4)] == [4, 5, 6, 7]
    assert bag.items["w"][...].tolist() == [5, 5]
    assert sorted(bag.items) == ["inner", "n", "n3", "n4", "n5", "n6", "w"]


# Of a State in an attribute, at integers as keys.
IN_STATE = {
    "a Variable at an integer": lambda s: s["a"]["c"].update({1: param(7)}),
    "more at an integer": lambda s: s["a"]["c"].update({3: param(7)}),
    "less at an integer": lambda s: s["a"]["c"].pop(1),
    "a number": lambda s: s["a"]["c"].update({2: 7}),
    "an array": lambda s: s["a"]["c"].update({2: jnp.ones(1)}),
}
READERS = {
    "state": nnx.state,
    "jit": nnx.jit(lambda model: nnx.as_pure(model.s)),
    "jax": jax.jit(lambda model: nnx.as_pure(model.s)),
}


@pytest.mark.parametrize("name", IN_STATE)
@pytest.mark.parametrize("reader", READERS)
def test_changes_of_a_state_in_an_attribute_are_seen(reader, name):
    def made():
        inner = {"b": param(1), "c": {1: param(2), 2: 3}}
        return zoo.Box(s=nnx.data(nnx.State({"a": inner})))

    call, model, other = READERS[reader], made(), made()
    for _ in range(3):
        call(model)
    for x in (model, other):
        IN_STATE[name](x.s)
    jax.tree.map(np.testing.assert_array_equal, call(model), call(other))


def test_what_changes_inside_of_metadata_is_seen():
    bag, called = make(), nnx.jit(lambda bag: len(bag.label.name))
    bag.label = static_values.Tag("a")
    assert [called(bag) for _ in range(3)] == [1, 1, 1]
    bag.label.name = "abc"
    assert called(bag) == 3
