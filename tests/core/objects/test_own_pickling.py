"""Classes that say how they are pickled and copied: as without Module as a base.

Random classes are written as source text and made twice, with `object` and with a class
of ours as the base. What copying gives must be the same, also that it raises.
At the end objects as pytrees of JAX.
"""

import copy
import itertools
import pickle
import sys
import threading
import types

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import graftree as nnx
from tests import strategies, tables, zoo

HEAD = """
import threading

def remade(cls, a):
    made = cls.__new__(cls)
    made.a, made.l, made.lock, made.how = a, (), None, "remade"
    return made

def put(x, state):
    vars(x).update(state)

class States:
    def __getstate__(self):
        state = super().__getstate__()
        entries = dict(state, by="States")
        entries.pop("lock", None)
        return entries

class Made({bases}):
    def __init__(self, a=1):
        self.a, self.l, self.lock = a, ((1, 2), "x"), {lock}
"""

# Each below what it is about, and a name.
METHODS = """
    # getstate super
    def __getstate__(self):
        state = super().__getstate__()
        entries = dict(state)
        entries.pop("lock", None)
        return entries

    # getstate vars
    def __getstate__(self):
        state = self.__dict__.copy()
        state.pop("lock", None)
        return state

    # getstate part
    def __getstate__(self):
        return {"a": self.a + 10}

    # getstate other
    def __getstate__(self):
        return [self.a, self.l]

    # getstate raises
    def __getstate__(self):
        raise RuntimeError("no state")

    # setstate super
    def __setstate__(self, state):
        above = getattr(super(), "__setstate__", None)
        above(state) if above else put(self, state)
        self.lock = "new"

    # setstate vars
    def __setstate__(self, state):
        self.__dict__.update(state if isinstance(state, dict) else {})
        self.how = "set"

    # setstate set
    def __setstate__(self, state):
        self.how = type(state).__name__

    # reduce class
    def __reduce__(self):
        return type(self), (self.a + 20,)

    # reduce state
    def __reduce__(self):
        return remade, (type(self), self.a), {"l": 5}

    # reduce name
    def __reduce__(self):
        return "ONE"

    # reduce ex
    def __reduce_ex__(self, protocol):
        return remade, (type(self), self.a + 30)

    # reduce super
    def __reduce_ex__(self, protocol):
        self.protocol = protocol
        return super().__reduce_ex__(protocol)

    # args args
    def __new__(cls, a=None):
        made = super().__new__(cls)
        made.new = a
        return made

    def __getnewargs__(self):
        return (self.a + 40,)

    # copy copy
    def __copy__(self):
        return remade(type(self), self.a + 50)

    # copy deepcopy
    def __deepcopy__(self, memo):
        return remade(type(self), self.a + 60)
"""
METHODS = dict(method.split("\n", 1) for method in METHODS.split("    # ")[1:])
KINDS = ("getstate", "setstate", "reduce", "args", "copy")

PARTS = st.lists(st.just("States"), max_size=1)
CLASSES = {
    kind: st.sampled_from([None, *(x for x in METHODS if x.startswith(kind))])
    for kind in KINDS
}
CLASSES |= {"before": PARTS, "behind": PARTS}
CLASSES["lock"] = st.sampled_from(["None", "threading.Lock()"])
CLASSES = st.fixed_dictionaries(CLASSES)

WAYS = {
    "copy": copy.copy,
    "pickle2": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "pickle4": lambda x: pickle.loads(pickle.dumps(x, 4)),
    "pickle5": lambda x: pickle.loads(pickle.dumps(x, 5)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
}
NUMBERS = itertools.count()


def made(choice, base):
    """The class of a choice in a module of its own, where pickle finds it."""
    before = choice["before"]
    behind = [part for part in choice["behind"] if part not in before]
    bases = ", ".join([*before, *([base] if base else []), *behind])
    bodies = [METHODS[choice[kind]] for kind in KINDS if choice[kind]]
    module = types.ModuleType(f"made_{next(NUMBERS)}")
    vars(module).update(nnx=nnx)
    sys.modules[module.__name__] = module
    exec(HEAD.format(bases=bases, lock=choice["lock"]) + "".join(bodies), vars(module))
    module.ONE = module.Made()
    return module.Made


def told(x):
    if not hasattr(x, "__dict__"):
        return x
    items = {k: v for k, v in vars(x).items() if not k.startswith("_pytree")}
    lock = type(threading.Lock())
    return {k: "lock" if isinstance(v, lock) else v for k, v in items.items()}


def outcome(cls, way):
    x = cls()
    try:
        again = way(x)
    except Exception:  # which one depends on the version of Python, too
        return "raises"
    return type(again) is cls, again is x, told(again)


@given(CLASSES, st.sampled_from(["nnx.Module", "nnx.Pytree", "nnx.Object"]))
def test_random_classes_are_copied_as_without_module(choice, base):
    plain, ours = made(choice, ""), made(choice, base)
    for name, way in WAYS.items():
        assert outcome(ours, way) == outcome(plain, way), name
    hooks = any(choice[kind] for kind in KINDS[:4])
    if not hooks and "States" not in (*choice["before"], *choice["behind"]):
        assert outcome(ours, copy.deepcopy) == outcome(plain, copy.deepcopy)


@strategies.examples(30, 200)
@given(CLASSES)
def test_copies_have_bookkeeping_of_their_own(choice):
    x = made(choice, "nnx.Module")()
    x.p = nnx.data(nnx.Param(jnp.ones(2)))
    for way in (copy.copy, copy.deepcopy):
        try:
            again = way(x)
        except Exception:
            continue
        if again is x or not isinstance(again, nnx.Module):
            continue
        assert again._pytree__state is not x._pytree__state
        call = nnx.jit(lambda m: m.a, graph=True)
        before = [int(call(x)) for _ in range(3)] if hasattr(x, "a") else []
        again.a = 7
        assert [int(call(again)) for _ in range(3)] == [7, 7, 7]
        assert [int(call(x)) for _ in range(3)] == before


class Locked:
    """Has what can't be pickled, leaves it out and makes it anew."""

    def __getstate__(self):
        state = super().__getstate__()
        del state["lock"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()


class Guarded(Locked, zoo.Box):
    pass


class LockedList(Locked, nnx.List):
    pass


class LockedMetric(Locked, nnx.metrics.Average):
    pass


def guarded():
    return Guarded(w=nnx.Param(jnp.ones(2)), act=nnx.relu)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@tables.cases("make", guarded, lambda: LockedList([1, nnx.Param(2.0)]), LockedMetric)
def test_what_can_not_be_pickled_is_left_out_and_made_anew(make, way):
    x = make()
    x.lock = threading.Lock()
    again = way(x)
    assert type(again) is type(x) and again.lock is not x.lock
    leaves = [jax.tree.map(np.array, jax.tree.leaves(each)) for each in (x, again)]
    np.testing.assert_equal(*leaves)
    if make is guarded:
        assert again.act is nnx.relu
        assert nnx.jit(lambda m: m.w * 2)(again).tolist() == [2.0, 2.0]


def test_getstate_gives_functions_and_a_dict_of_its_own():
    x = guarded()
    state = nnx.Module.__getstate__(x)
    assert state["act"] is nnx.relu
    del state["w"]
    assert x.w is not None


# ------------------------------------------------------------------------- Variables


class Tagged(nnx.Param):
    __slots__ = ("mark",)


class Told(nnx.Param):
    def __getstate__(self):
        return {**super().__getstate__(), "told": 1}

    def __setstate__(self, state):
        assert state.pop("told") == 1
        state["_raw_value"] = state["_raw_value"] + 1
        super().__setstate__(state)


class Past(nnx.Param):
    """Sets its parts one by one, as the Variables of Keras do."""

    def __setstate__(self, state):
        for name in ("_raw_value", "_trace_state", "_var_metadata"):
            object.__setattr__(self, name, state[name])


class Remade(nnx.Param):
    def __reduce__(self):
        return Remade, (self[...] * 2,)


ALL_WAYS = WAYS | {"deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", ALL_WAYS.values(), ids=ALL_WAYS)
def test_variables_with_methods_of_their_own_are_copied_by_them(way):
    marked = Tagged(jnp.ones(2), tag="x")
    marked.mark = (1, 2)
    again = way(marked)
    assert again.mark == (1, 2) and again.tag == "x"
    assert way(Told(jnp.ones(2), tag="x"))[...].tolist() == [2.0, 2.0]
    assert way(Remade(jnp.ones(2)))[...].tolist() == [2.0, 2.0]
    past = way(Past(jnp.ones(2), tag="x"))
    past[...] += 1
    past.set_metadata(tag="y")
    assert past[...].tolist() == [2.0, 2.0] and past.tag == "y"
    assert len(nnx.state(nnx.Dict(p=past))) == 1


def test_a_variable_that_holds_itself_can_be_copied():
    for cls in (nnx.Param, Tagged):
        v = cls(None)
        v.set_raw_value([v])
        for way in (WAYS["pickle4"], WAYS["cloudpickle"], copy.deepcopy):
            again = way(v)
            assert again.get_raw_value()[0] is again and again is not v


# ----------------------------------------------------------------------- pytrees of JAX


def test_objects_that_new_replaces_are_not_initialized():
    class Odd(nnx.Pytree):
        def __new__(cls):
            return 3

        def __init__(self):
            raise AssertionError("not called")

    assert Odd() == 3


def test_failed_assignment_changes_nothing():
    node = zoo.Node(a=1)
    graphdef, version = nnx.graphdef(node), node._pytree__state.version
    with pytest.raises(ValueError):
        node.b = [np.ones(1)]
    assert dict(node._pytree__nodes) == {"a": False} and not hasattr(node, "b")
    assert nnx.graphdef(node) == graphdef and node._pytree__state.version == version


def test_descriptors_that_want_an_instance_are_assigned_to():
    class Halved:
        def __get__(self, obj, owner=None):
            return obj._doubled / 2

        def __set__(self, obj, value):
            obj._doubled = 2 * value

    holder = type("Holder", (nnx.Pytree,), {"x": Halved()})()
    holder.x = 3
    assert (holder.x, holder._doubled) == (3, 6) and "x" not in vars(holder)
    for name in ("x", "missing"):
        with pytest.raises(AttributeError):
            delattr(holder, name)


class Meter(nnx.Pytree):
    def __init__(self):
        self.unit = "m"

    @property
    def reading(self):
        return vars(self)["_reading"]

    @reading.setter
    def reading(self, value):
        vars(self)["_reading"] = value
        if value is None:
            raise ValueError("no reading")

    @reading.deleter
    def reading(self):
        del vars(self)["_reading"]


def fail_to_set(meter):
    with pytest.raises(ValueError, match="no reading"):
        meter.reading = None


@tables.cases(
    "change",
    lambda meter: setattr(meter, "reading", 2),
    lambda meter: setattr(meter, "reading", np.ones(1)),
    lambda meter: delattr(meter, "reading"),
    fail_to_set,
    lambda meter: setattr(meter, "__class__", zoo.Node),
)
def test_what_descriptors_do_is_seen(change):
    """They are code of the user, which may write into ``vars`` itself."""
    meter = Meter()
    meter.reading = 1
    graphdefs = [nnx.graphdef(meter) for _ in range(3)]
    change(meter)
    assert nnx.graphdef(meter) is not graphdefs[-1]
    merged = nnx.merge(*nnx.split(meter))
    assert type(merged) is type(meter)
    assert vars(merged).get("_reading") is vars(meter).get("_reading")


def test_the_base_class_has_descriptors_too():
    obj = nnx.Pytree()
    obj.__class__ = Meter
    assert type(obj) is Meter and repr(obj) == "Meter()"


# ------------------------------------------------------------------ classes that change


def test_declaration_may_be_repeated():
    class First(nnx.Pytree):
        a: object = nnx.data()

    class Second(First):
        a: list = nnx.data()

    obj = Second()
    obj.a = [jnp.ones(1)]
    assert len(jax.tree.leaves(obj)) == 1


class Base(nnx.Module):
    def __new__(cls, kind=None):
        return super().__new__(Derived if cls is Base else cls)

    def __init__(self, kind):
        self.kind = "base"


class Derived(Base):
    def __init__(self, kind):
        self.kind = kind
        self.w = nnx.Param(jnp.ones(2))


def test_init_is_that_of_the_class_which_new_chose():
    obj = Base("chosen")
    assert type(obj) is Derived and obj.kind == "chosen"


class Bare(nnx.Module):
    """Made past `Pytree.__new__`."""

    def __new__(cls, by_hand=False):
        obj = object.__new__(cls)
        if by_hand:
            vars(obj)["_pytree__state"] = nnx.pytreelib.PytreeState()
        obj.made = True
        return obj

    def __init__(self, by_hand):
        self.w = nnx.Param(jnp.ones(2))


USES = {
    "flatten": lambda m: jax.tree.map(lambda x: x, m),
    "split": lambda m: nnx.merge(*nnx.split(m)),
    "clone": nnx.clone,
    "jit": nnx.jit(lambda m: m),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "in place": lambda m: m,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("by_hand", [True, False])
def test_objects_made_past_new_are_like_others(by_hand, use):
    got = USES[use](Bare(by_hand))
    assert got.made and got.w[...].tolist() == [1.0, 1.0]
    assert dict(got._pytree__nodes) == {"made": False, "w": True}


@pytest.mark.parametrize("use", USES)
def test_objects_without_any_bookkeeping_are_like_empty_ones(use):
    got = USES[use](object.__new__(Derived))
    assert type(got) is Derived and dict(got._pytree__nodes) == {}
    assert not got._pytree__state.initializing


def test_deleting_and_changing_class_need_no_bookkeeping():
    m = object.__new__(Derived)
    vars(m)["a"] = 1
    del m.a
    m.__class__ = Bare
    assert type(m) is Bare and repr(m) == "Bare()"


def with_property():
    class Reads(nnx.Module):
        @property
        def k(self):
            return self.inner

        @k.setter
        def k(self, value):
            self.inner = value

    return Reads


def test_attributes_follow_the_bases_that_a_class_has_now():
    child = type("Child", (type("Plain", (nnx.Module,), {}),), {})
    m = child()
    m.k = 1
    child.__bases__ = (with_property(),)
    m.k = 2
    assert (vars(m)["k"], m.inner) == (1, 2)


def test_attributes_follow_a_property_that_comes_and_goes():
    Reads = with_property()
    m, prop = Reads(), Reads.k
    del Reads.k
    m.k = jnp.ones(2)
    assert m._pytree__nodes["k"] and len(jax.tree.leaves(m)) == 1
    Reads.k = prop
    m.k = 3
    assert m.inner == 3
    Reads.k = "plain"
    m.k = 4
    assert vars(m)["k"] == 4


def test_calls_follow_a_class_that_changes():
    """A `__setattr__` assigned later may write past ours."""
    cls = type("Model", (zoo.Box,), {})
    m, f = cls(k=1), nnx.jit(lambda m: m.k * jnp.ones(()))
    assert [f(m).item() for _ in range(3)] == [1.0] * 3
    cls.__setattr__ = object.__setattr__
    m.k = 2
    assert [f(m).item() for _ in range(3)] == [2.0] * 3
    m.k = 3
    assert f(m) == 3.0


def test_state_has_the_names_of_older_releases():
    state = nnx.Module()._pytree__state
    state._initializing = state._is_setup = True
    assert state.initializing and state.is_setup
    assert state._initializing and state._is_setup
