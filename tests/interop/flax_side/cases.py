"""Calls whose results, pytree paths, bytes and errors are the same in Flax and here.

A case is a function of a namespace that has the modules of ``flax`` by name.
"""

import collections
import copy
import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tests.interop.bridge.comparing import catch

PATHS = (
    "struct traverse_util serialization core core.frozen_dict core.spmd"
    " typing training.train_state jax_utils"
).split()

Pair = collections.namedtuple("Pair", "first second")

NESTED = {"b": {"x": 1, "e": {}}, "a": 2, "l": [1, {"q": 2}]}
LEAVES = {
    "half": jnp.ones(2, jnp.bfloat16),
    "complex": 1 + 2j,
    "scalar": np.float32(2),
    "int": 3,
    "str": "x",
    "bytes": b"xy",
    "float": 2.5,
    "none": None,
    "true": True,
    "list": [1, np.int8(2)],
    "zero-d": np.asarray(3),
    "float8": jnp.ones(2, jnp.float8_e4m3fn),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "empty": np.zeros((0, 2)),
    "date": np.array(["2020-01-01"], "datetime64[D]"),
    "nested": {"z": jnp.arange(3), "y": {}},
}


class Words(types.SimpleNamespace):
    """Stands for a module that has another structure of names."""


def paths(tree):
    """All that JAX says about a pytree."""
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def make_classes(struct):
    @struct.dataclass
    class A:
        x: int
        y: float = struct.field(pytree_node=False, default=2.0)
        z: int = 3

    @struct.dataclass
    class C(A):
        v: int = 4

    class P(struct.PyTreeNode):
        x: int
        n: str = struct.field(pytree_node=False, default="s")

    class Q(P, kw_only=True):
        w: int

    @struct.dataclass
    class Own:
        x: int

        def replace(self, **changes):
            return "mine"

    @struct.dataclass(frozen=False, eq=False)
    class Loose:
        x: int

    @struct.dataclass
    class Std:
        a: int
        s: int = dataclasses.field(metadata={"static": True}, default=4)

    return Words(A=A, C=C, P=P, Q=Q, Own=Own, Loose=Loose, Std=Std)


def struct_cases(flax):
    struct, ser = flax.struct, flax.serialization
    k = make_classes(struct)
    sub = type("S", (k.A,), {})
    loose = k.Loose(1)
    loose.x = 5
    return {
        "repr": [k.A(1), k.C(1), k.P(1), k.Q(1, w=2), sub(1)],
        "paths": [paths(x) for x in (k.A(1), k.C(1), k.P(None), k.Q(1, w=2), sub(1))],
        "structure": [str(jax.tree.structure(x)) for x in (k.A(1), k.Q(1, w=2))],
        "map": jax.tree.map(lambda x: x + 1, k.Q(1, w=2)),
        "replace": [k.A(1).replace(y=5), k.Q(1, w=2).replace(n="t"), k.Own(1)],
        "own replace": k.Own(1).replace(x=2),
        "bad replace": catch(k.A(1).replace, q=1),
        "frozen": catch(setattr, k.A(1), "x", 2),
        "loose": loose,
        "twice": struct.dataclass(k.A) is k.A,
        "subclass is new": struct.dataclass(sub) is sub,
        "kw_only": catch(k.Q, 1, 2),
        "field": dict(struct.field(False, metadata={"k": 1}).metadata),
        "base": catch(struct.PyTreeNode),
        "static of the standard library": paths(k.Std(1)),
        "equal": [k.A(1) == k.A(1), k.A(1) == k.A(2), loose == k.Loose(5)],
        "hash": hash(k.A(1)) == hash(k.A(1)),
        "deepcopy": copy.deepcopy(k.A(1)),
        "to": ser.to_state_dict([k.C(1), k.Q(k.A(3), w=2)]),
        "from": ser.from_state_dict(k.C(1), {"x": 7, "z": 8, "v": 9}),
        "nested": ser.from_state_dict(k.P([k.A(1)]), {"x": {"0": {"x": 5, "z": 6}}}),
        "missing": catch(ser.from_state_dict, k.C(1), {"x": 7}),
        "unknown": catch(ser.from_state_dict, k.A(1), {"x": 7, "z": 8, "o": 2}),
        "jit": jax.jit(lambda q: q.replace(x=q.x + q.w))(k.Q(1, w=2)),
        "grad": jax.grad(lambda a: a.x * a.y)(k.A(3.0, z=0.0)),
        "vmap": jax.vmap(lambda a: a.x * 2)(k.A(jnp.arange(3), z=jnp.ones(3))),
        "marked": [hasattr(x, "_flax_dataclass") for x in (k.A, k.P, int)],
    }


def traversal_cases(flax):
    tu, core = flax.traverse_util, flax.core
    seen = []
    frozen = core.freeze(NESTED)

    def at_b(path, value):
        seen.append((path, value))
        return path == ("b",)

    return {
        "flat": tu.flatten_dict(NESTED),
        "keep": tu.flatten_dict(NESTED, keep_empty_nodes=True),
        "empty root": tu.flatten_dict({}, keep_empty_nodes=True),
        "sep": tu.flatten_dict(NESTED, sep="/"),
        "sep of ints": catch(tu.flatten_dict, {1: {2: 3}}, sep="/"),
        "leaf": [tu.flatten_dict(NESTED, is_leaf=at_b), seen],
        "leaf root": tu.flatten_dict(NESTED, is_leaf=lambda path, x: True),
        "leaf root sep": tu.flatten_dict(NESTED, is_leaf=lambda p, x: True, sep="/"),
        "leaf empty": tu.flatten_dict(NESTED, is_leaf=lambda path, x: not x),
        "positional": tu.flatten_dict(NESTED, True, None, "."),
        "frozen": tu.flatten_dict(frozen),
        "frozen inside": tu.flatten_dict({"a": frozen}),
        "proxy inside": tu.flatten_dict({"a": types.MappingProxyType({"b": 1})}),
        "proxy": catch(tu.flatten_dict, types.MappingProxyType({"a": 1})),
        "list": catch(tu.flatten_dict, [1]),
        "unflatten": tu.unflatten_dict({("a", "b"): 1, ("c",): 2}),
        "unflatten sep": tu.unflatten_dict({"a/b": 1, "c": 2}, sep="/"),
        "unflatten empty": tu.unflatten_dict({("a", "b"): tu.empty_node}),
        "unflatten string": tu.unflatten_dict({"ab": 1}),
        "empty path": catch(tu.unflatten_dict, {(): 3}),
        "conflict": catch(tu.unflatten_dict, {("a",): 3, ("a", "b"): 2}),
        "last wins": tu.unflatten_dict({("a", "b"): 3, ("a",): 2}),
        "not a dict": [
            catch(tu.unflatten_dict, [(("a",), 1)]),
            catch(tu.unflatten_dict, core.freeze({"a": 1}), sep="/"),
        ],
        "empty node": [jax.tree.leaves(tu.empty_node), tu.empty_node == {}],
        "map": tu.path_aware_map(lambda path, x: (path, x), NESTED),
        "map frozen": tu.path_aware_map(lambda path, x: (path, x), frozen),
        "map empty": tu.path_aware_map(lambda path, x: 1, {}),
    }


def state_dict_cases(flax):
    ser, core = flax.serialization, flax.core

    class Own:
        def __init__(self, value):
            self.value = value

        def __repr__(self):
            return f"Own({self.value})"

    register = ser.register_serialization_state
    own = Own, lambda x: {"v": x.value}, lambda x, state: Own(state["v"])
    register(*own)
    pair = {"n": Pair(1, 2)}
    older = {"name": "Pair", "fields": {"0": "first", "1": "second"}}
    older["values"] = {"0": 5, "1": 6}
    moments = optax.adam(1e-3).init({"w": jnp.ones(2)})
    back, to = ser.from_state_dict, ser.to_state_dict
    return {
        "containers": to({"a": [1, (2, 3)], "n": Pair(1, jnp.ones(2)), "x": None}),
        "keys": to({1: {2: 3}}),
        "equal keys": catch(to, {1: 0, "1": 0}),
        "frozen": to({"f": core.freeze({"q": {"r": [1]}})}),
        "other dicts": to(collections.OrderedDict(a=[1])),
        "leaves": to({"s": "str", "t": {1, 2}, "n": np.float32(3)}),
        "own": to([Own([1])]),
        "own back": back([Own(1)], {"0": {"v": 2}}),
        "subclass": isinstance(to(type("Sub", (Own,), {})(3)), Own),
        "registered": catch(register, *own),
        "override": register(*own, override=True),
        "back": back(
            {"a": [1, (2, 3)], **pair},
            {"a": {"0": 7, "1": {"0": 8, "1": 9}}, "n": {"first": 5, "second": 6}},
        ),
        "older pair": back(pair, {"n": older}),
        "int keys": back({1: 2}, {"1": 5}),
        "extra": back({"a": {"b": 1}}, {"a": {"b": 5, "d": 7}, "z": 3}),
        "missing": catch(back, {"a": {"b": 1, "c": 2}}, {"a": {"b": 5}}),
        "length": catch(back, {"a": [1, 2]}, {"a": {"0": 1}}),
        "fields": catch(back, {"a": Pair(1, 2)}, {"a": {"first": 1}}),
        "name": catch(back, {"a": {"b": [1, 2]}}, {"a": {"b": {"0": 1}}}, name="root"),
        "none": back(None, {"a": 1}),
        "leaf": back(jnp.ones(2), np.zeros(3)),
        "leaf of another kind": back({"a": 3}, {"a": {"b": 3}}),
        "refrozen": back(core.freeze({"a": 3, "b": {"c": 4}}), {"a": 4, "b": {"c": 5}}),
        "frozen missing": catch(back, core.freeze({"b": {"c": 3}}), {"b": {}}),
        "optax": to(moments),
        "optax back": back(moments, to(moments)),
        "partial": to(jax.tree_util.Partial(max, 3)),
    }


def byte_cases(flax):
    ser = flax.serialization
    dump, load = ser.msgpack_serialize, ser.msgpack_restore
    big = np.arange(6.0).reshape(2, 3)
    return {
        "bytes": {name: dump({"k": leaf}) for name, leaf in LEAVES.items()},
        "all": ser.to_bytes(LEAVES),
        "sorted": dump({"b": 1, "a": 2}),
        "as given": dump({"b": 1, "a": 2}, in_place=True),
        "restored": load(dump(LEAVES)),
        "types": [type(x) for x in load(dump(LEAVES)).values()],
        "dtypes": [getattr(x, "dtype", 0) for x in jax.tree.leaves(load(dump(LEAVES)))],
        "writeable": load(dump(big)).flags.writeable,
        "root": [load(dump(big)), load(dump([big, 2]))],
        "int keys": load(dump({1: 2})),
        "tuple": catch(dump, {"k": (1, 2)}),
        "key": catch(dump, {"k": jax.random.key(0)}),
        "objects": catch(dump, np.array([object()])),
        "large int": catch(dump, {"a": 2**70}),
        "from": ser.from_bytes(
            {"a": [jnp.zeros(2), (1,)]}, ser.to_bytes({"a": [big, (5,)]})
        ),
        "from none": ser.from_bytes(None, ser.to_bytes({"a": [big, (5,)]})),
    }


def frozen_cases(flax):
    core = flax.core
    freeze, text = core.freeze, core.pretty_repr
    f = freeze({"b": {"x": 1, "e": {}}, "a": jnp.ones(2), "l": [1, {"q": 2}]})
    small = freeze({"a": 1, "b": {"c": 2}})
    mutable = {"b": {"x": 1}}
    isolated = freeze(mutable)
    mutable["b"]["y"] = 3
    dicts = ({}, {"a": {"b": 1, "c": {}}, "s": "x"}, {1: np.arange(4).reshape(2, 2)})
    return {
        "text": [str(f), repr(f), text(f), f.pretty_repr(2), repr(freeze({}))],
        "text of dicts": [text(x) for x in dicts] + [text([1]), text(dicts[1], 2)],
        "paths": paths(freeze({"b": {"x": 1}, "a": 2, "n": None, "l": [3]})),
        "int keys": paths(freeze({2: {"x": 1}, 1: 2})),
        "structure": jax.tree.structure(freeze({"b": 1, "a": 2}))
        == jax.tree.structure(freeze({"a": 1, "b": 2})),
        "mixed keys": catch(jax.tree.leaves, freeze({2: 1, "a": 2})),
        "map": jax.tree.map(lambda x: x * 2, freeze({"b": 1, "a": {"c": 2}})),
        "items": [type(x).__name__ for x in (f["b"], f["l"][1], f.get("b"))],
        "views": [f.keys(), small.values(), list(small.items()), list(f)],
        "keys equal": small.keys() == {"a", "b"},
        "get": [f.get("z", 3), "a" in f, "z" in f, len(f)],
        "missing": catch(lambda: f["nope"]),
        "set": catch(lambda: f.__setitem__("a", 3)),
        "delete": isinstance(catch(lambda: f.__delitem__("a")), AttributeError),
        "attribute": catch(setattr, f, "q", 1),
        "hash": hash(freeze({"a": 1, "b": {"c": 2}})) == hash(small),
        "unhashable": catch(hash, f),
        "equal": [small == freeze(small), small == {"a": 1, "b": {"c": 2}}, small == 3],
        "copy": [
            small.copy({"d": {"e": 1}}),
            small.copy(add_or_replace=freeze({"a": 5})),
        ],
        "copy of itself": small.copy(),
        "copies": [core.copy({"a": 1}, {"b": 2}), core.copy(small, {"b": 2})],
        "copy of another": catch(core.copy, 3),
        "pop": [small.pop("a"), core.pop({"a": 1, "b": 2}, "a"), core.pop(small, "b")],
        "pop missing": [catch(small.pop, "z"), catch(core.pop, {}, "a")],
        "pop of another": catch(core.pop, 3, "a"),
        "unfreeze": [core.unfreeze(f), f.unfreeze(), core.unfreeze(3)],
        "unfreeze dict": core.unfreeze({"a": {}, "f": freeze({"x": {"y": 1}})}),
        "freeze": [freeze([("a", 1)]), freeze(f) is f, catch(freeze, 3)],
        "isolated": isolated,
        "made": [core.FrozenDict(a=1, b={"c": 2}), core.FrozenDict([("a", 1)], b=2)],
        "pickle": pickle.loads(pickle.dumps(small)),
        "ordered": freeze(collections.OrderedDict(a=collections.OrderedDict(b=1))),
        "jit": jax.jit(lambda x: x.copy({"d": x["a"] + 1}))(small),
        "no union": catch(lambda: small | {"b": 2}),
        "alias": isinstance(core.FrozenDict[str, int], types.GenericAlias)
        or str(core.FrozenDict[str, int]).endswith("FrozenDict[str, int]"),
    }


def rule_cases(flax):
    spmd = flax.core.spmd
    rules = (("a", "x"), ("z", None))

    def in_context():
        with spmd.logical_axis_rules(rules):
            inside = spmd.get_logical_axis_rules()
            return inside, spmd.get_pspec(("a", "q"))

    def set_and_read():
        spmd.set_logical_axis_rules((("a", "b"),))
        try:
            return spmd.get_logical_axis_rules()
        finally:
            spmd.set_logical_axis_rules(())

    return {
        "context": in_context(),
        "set": [spmd.get_logical_axis_rules(), set_and_read()],
        "from": spmd.from_sharding_rules(("a", None, "q", "z"), rules),
        "from spec": spmd.from_sharding_rules(PartitionSpec("a", None), rules),
        "from tuple": spmd.from_sharding_rules(("a",), (("a", ("x", "y")),)),
        "composite": spmd.composite_rules((("a", "x"),), (("b", "y"),)),
        "same": spmd.composite_rules((("b", "y"),), (("b", "y"),)),
        "conflict": catch(spmd.composite_rules, (("b", "y"),), (("b", "x"),)),
        "spec": [spmd.get_pspec(("a",), rules), spmd.get_pspec(None)],
    }


def train_state_cases(flax):
    module, core = flax.training.train_state, flax.core
    params = {"w": jnp.ones(2), "b": jnp.zeros(1)}
    grads = {"w": jnp.ones(2), "b": jnp.ones(1)}
    create = module.TrainState.create
    ts = create(apply_fn=max, params=params, tx=optax.adam(0.1))

    class More(module.TrainState):
        stats: object
        count: int = flax.struct.field(pytree_node=False, default=3)

    more = More.create(apply_fn=None, params=params, tx=optax.sgd(0.1), stats=3)
    frozen = create(apply_fn=None, params=core.freeze(params), tx=optax.sgd(0.1))
    step = jax.jit(lambda ts, grads: ts.apply_gradients(grads=grads))
    stepped = more.apply_gradients(grads=grads, stats=4)
    return {
        "paths": paths(ts),
        "twice": paths(step(ts.apply_gradients(grads=grads), grads)),
        "more": [stepped.stats, stepped.count, paths(stepped)],
        "missing": catch(More.create, apply_fn=None, params=params, tx=optax.sgd(0.1)),
        "positional": catch(ts.apply_gradients, grads),
        "unknown": catch(ts.apply_gradients, grads=grads, other=3),
        "frozen": frozen.apply_gradients(grads=core.freeze(grads)).params,
        "state dict": flax.serialization.to_state_dict(ts),
    }


def device_cases(flax):
    utils = flax.jax_utils
    tree = {"a": jnp.arange(3.0), "b": 2}
    two = jax.devices()[:2]

    def where(tree):
        return jax.tree.map(lambda x: (x, x.sharding), tree)

    def batches(count, size):
        taken = []

        def draw():
            for number in range(count):
                taken.append(number)
                yield {"x": np.full((4, 2), number)}

        found = utils.prefetch_to_device(draw(), size, two)
        return [(where(batch), len(taken)) for batch in found]

    odd = iter([np.ones((3, 2))])
    return {
        "replicate": [where(utils.replicate(tree)), where(utils.replicate(tree, two))],
        "axis": where(utils.replicate(tree, two, axis_name="q")),
        "key": utils.replicate(jax.random.key(0), two).shape,
        "unreplicate": utils.unreplicate(utils.replicate(tree)),
        "unreplicate NumPy": utils.unreplicate({"a": np.arange(4)}),
        "prefetch": [batches(5, 2), batches(1, 2), batches(0, 2)],
        "uneven": catch(list, utils.prefetch_to_device(odd, 2, two)),
    }


def alias_cases(flax):
    t = flax.typing
    size = t.SizeBytes(3000, 12000)
    sizes = [t.SizeBytes(*x) for x in ((1, 999), (1, 1000), (1, 10**6), (2, 2 * 10**9))]
    deque = t.PytreeDeque([1, {"a": 2}])
    return {
        "sizes": [str(size), repr(size + size), bool(t.SizeBytes(0, 0)), sizes],
        "size of": [t.SizeBytes.from_any({"a": jnp.ones(3), "b": 1})],
        "deque": [deque, paths(deque)],
        "mapping": [
            dict(t.HashableMapping({"a": 1})),
            t.HashableMapping({"a": 1}) == t.HashableMapping({"a": 1}),
        ],
        "missing": isinstance(t.MISSING, t.Missing),
        "keys": [t.is_key_like(x) for x in ("a", 1, (1, 2))],
    }


GROUPS = [x for name, x in [*globals().items()] if name.endswith("_cases")]
