"""What a call is given, and all that may change in it between two calls."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from tests import zoo
from tests.static_values import Tag


def param(value, size=2, **metadata):
    return nnx.Param(jnp.full(size, float(value)), **metadata)


def layer(k, size=2):
    return zoo.Box(kernel=param(k, (2, size)), bias=param(0, size))


class Plain(nnx.Module):
    """Holds objects, Variables and static values alone."""

    def __init__(self):
        self.kernel = param(1, config=[1])
        self.tag = Tag("a")
        self.flag = 0
        self.dropout = nnx.Dropout(0.5)
        self.layers = nnx.List([layer(2)])
        self.heads = nnx.Dict(a=param(3, 1), flag=0)


class Model(Plain):
    """Holds all that can change between two calls, at places where it may."""

    def __init__(self):
        super().__init__()
        self.array = jnp.arange(3.0)
        self.items = nnx.data([param(4, 1), 2])
        self.named = nnx.data({"x": param(5, 1)})
        self.state = nnx.data(nnx.State({"a": {"b": param(6, 1)}}))


def arguments():
    """A model, a State, Variables in containers, and an array."""
    state = nnx.State(
        {"a": {"x": param(1), "y": nnx.Cache(jnp.zeros(1))}, "b": param(2)}
    )
    loose = [param(7, 1), (param(8, tag=1), None)]
    return {"model": Model(), "state": state, "loose": loose, "x": jnp.ones(())}


# Each is given a model, and 0 or 1.
SWITCHES = {
    "mode": lambda m, k: m.eval() if k else m.train(),
    "static": lambda m, k: setattr(m, "flag", k),
    "equal static": lambda m, k: setattr(m, "flag", float(k)),
    "other equal static": lambda m, k: setattr(m, "flag", -0.0 if k else False),
    "static below": lambda m, k: m.heads.__setitem__("flag", k),
}
IN_PLAIN = {
    "value": lambda m, k: m.kernel.set_value(jnp.full(2, float(k))),
    "shape": lambda m, k: m.kernel.set_value(jnp.full(k + 1, 2.0)),
    "Variable": lambda m, k: setattr(m, "kernel", param(k, config=[1])),
    "kind of Variable": lambda m, k: setattr(
        m, "kernel", nnx.Cache(m.kernel.get_value(), config=[1])
    ),
    "None for a Variable": lambda m, k: setattr(m.layers[0], "bias", None),
    "metadata": lambda m, k: m.kernel.set_metadata(tag=k),
    "metadata in place": lambda m, k: m.kernel.config.append(k),
    "unhashed static": lambda m, k: setattr(m, "tag", Tag(str(k))),
    "static in place": lambda m, k: setattr(m.tag, "name", str(k)),
    "no static": lambda m, k: delattr(m, "tag"),
    "new Variable": lambda m, k: setattr(m, f"new{k}", param(k, 1)),
    "new static": lambda m, k: setattr(m, f"size{k}", k),
    "past setattr": lambda m, k: vars(m).__setitem__("flag", k),
    "new past setattr": lambda m, k: vars(m).__setitem__(f"past{k}", k),
    "by object": lambda m, k: (object.__setattr__(m, "flag", k + 5), nnx.touch(m)),
    "append": lambda m, k: m.layers.append(layer(k, k + 1)),
    "insert": lambda m, k: m.layers.insert(0, layer(k)),
    "reverse": lambda m, k: m.layers.reverse(),
    "pop": lambda m, k: m.layers.pop(),
    "head": lambda m, k: m.heads.__setitem__(str(k), param(k, 1)),
    "no head": lambda m, k: m.heads.pop("a"),
    **SWITCHES,
    "update": lambda m, k: nnx.update(m, nnx.state(m)),
    "something else": lambda m, k: zoo.Scale(),
    "nothing": lambda m, k: None,
}
IN_MODEL = IN_PLAIN | {
    "array": lambda m, k: setattr(m, "array", jnp.full(3, float(k))),
    "type of an array": lambda m, k: setattr(m, "array", jnp.full(k + 1, 2)),
    "array for a Variable": lambda m, k: setattr(m.layers[0], "bias", jnp.ones(2)),
    "data for static": lambda m, k: setattr(m, f"size{k}", nnx.data(jnp.zeros(2))),
    "list of data": lambda m, k: m.items.append(param(k, 1)),
    "static in a list": lambda m, k: m.items.append(k),
    "member of a list": lambda m, k: m.items.__setitem__(0, param(1, 1)),
    "shorter list": lambda m, k: m.items.pop(),
    "new in a dict": lambda m, k: m.named.__setitem__(str(k), param(1, 1)),
    "member of a dict": lambda m, k: m.named.__setitem__("x", param(1, 1)),
    "array in a dict": lambda m, k: m.named.__setitem__("x", jnp.ones(1)),
    "member of a State": lambda m, k: m.state["a"].__setitem__("b", param(k, 1)),
    "new in a State": lambda m, k: m.state["a"].__setitem__(str(k), param(1, 1)),
}
# What tree mode refuses.
ALIASES = {
    "alias": lambda m, k: setattr(m, "same", m.kernel),
    "alias below": lambda m, k: m.heads.__setitem__("same", m.kernel),
    "a way back": lambda m, k: setattr(m.layers[0], "model", nnx.data(m)),
}


def in_model(change):
    return lambda tree, k: change(tree["model"], k)


# Each is given what `arguments` gives, and 0 or 1.
CHANGES = {name: in_model(change) for name, change in IN_MODEL.items()} | {
    "value in a State": lambda tree, k: tree["state"]["b"].set_value(jnp.ones(k + 1)),
    "dict as a value": lambda tree, k: tree["state"]["b"].set_value(
        {"p": jnp.ones(k + 1)}
    ),
    "Variable in a State": lambda tree, k: tree["state"].__setitem__("b", param(1)),
    "kind in a State": lambda tree, k: tree["state"].__setitem__(
        "b", nnx.BatchStat(jnp.ones(2))
    ),
    "array in a State": lambda tree, k: tree["state"].__setitem__("b", jnp.ones(2)),
    "more in a State": lambda tree, k: tree["state"].__setitem__(f"c{k}", param(1, 1)),
    "less in a State": lambda tree, k: tree["state"].__setitem__("a", {"x": param(1)}),
    "nested in a State": lambda tree, k: tree["state"]["a"].__setitem__("x", param(3)),
    "metadata of all": lambda tree, k: [
        x.set_metadata(tag=k) for x in variables_in(tree["state"])
    ],
    "mapped State": lambda tree, k: tree.update(
        state=jax.tree.map(lambda x: x + 1, tree["state"])
    ),
    "longer": lambda tree, k: tree["loose"].append(param(1, 1)),
    "reversed": lambda tree, k: tree["loose"].reverse(),
    "tuple": lambda tree, k: tree["loose"].__setitem__(0, (param(1, 1), ())),
    "dict": lambda tree, k: tree["loose"].__setitem__(0, {"q": param(1, 1)}),
    "None": lambda tree, k: tree["loose"].__setitem__(0, None),
    "array": lambda tree, k: tree["loose"].__setitem__(0, jnp.full(2, float(k))),
    "given array": lambda tree, k: tree.update(x=jnp.full(k, 2.0)),
    "new vars": lambda tree, k: setattr(
        tree["model"], "__dict__", dict(vars(tree["model"]))
    ),
    "another model": lambda tree, k: tree.update(model=Model()),
    "dict for a State": lambda tree, k: tree.update(state={"a": param(1, k + 1)}),
    "empty State": lambda tree, k: tree.update(state=nnx.State({})),
}
SHARING = {name: in_model(change) for name, change in ALIASES.items()} | {
    "loose alias": lambda tree, k: tree["loose"].__setitem__(0, tree["model"].kernel),
}


def changed(tree, change, k):
    """Whether a change can be made: what it is about may be gone."""
    try:
        change(tree, k)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return True


def variables_in(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [x for x in leaves if isinstance(x, nnx.Variable)]


def number(x):
    """A small integer for any static value."""
    return zlib.crc32(repr(x).encode()) % 31


def visit(tree):
    """A number that depends on all in a tree; writes into each of its Variables.

    All numbers are small integers, so that sums are exact in any order; and they are
    summed as one vector, so that little is to be compiled.
    """
    model, terms = tree["model"], []
    for path, leaf in nnx.to_flat_state(nnx.state(tree)):
        if isinstance(leaf, nnx.Variable):
            metadata, value = leaf.get_metadata(), leaf.get_value()
            known = type(leaf).__name__, metadata.get("tag"), metadata.get("config")
            factor = number((path, known))
            terms += [(factor, x) for x in jax.tree.leaves(value)]
            leaf.set_value(jax.tree.map(lambda x, f=factor: taken_from(f, x), value))
        elif path[:2] != ("model", "items"):
            terms.append((number(path), leaf))
    # Numbers in containers are static, and data in tree mode.
    items = [x for x in getattr(model, "items", []) if not isinstance(x, nnx.Variable)]
    terms += [(3 + place, x) for place, x in enumerate(items)]
    statics = [getattr(model, "tag", Tag("")).name, model.dropout.deterministic]
    statics += [model.flag, model.heads.flag, len(model.layers)]
    return weighted_sum(terms) + sum(map(number, enumerate(statics)))


# By NumPy where nothing is traced: JAX would compile an operation for each shape.


def taken_from(number, x):
    if isinstance(x, jax.core.Tracer):
        return number - x
    return jnp.asarray(number - np.asarray(x))


def weighted_sum(terms):
    """The sum of factors times the sums of arrays."""
    is_traced = any(isinstance(x, jax.core.Tracer) for _, x in terms)
    np_or_jnp = jnp if is_traced else np
    flat = [np_or_jnp.ravel(x).astype("float32") for _, x in terms]
    weights = [
        np.full(x.size, f, np.float32) for (f, _), x in zip(terms, flat, strict=True)
    ]
    return jnp.asarray(np_or_jnp.concatenate(flat) @ np.concatenate(weights))
