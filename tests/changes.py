"""All that may change in a model, and in what a call is given, between two calls.

Each change is given a model and 0, and may then be given the same one and 1. The tables
say what the skeleton of the model is afterwards.
"""

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from tests import hostile_values, static_values, strategies, zoo
from tests.hostile_values import EqIsArray, EqLies

ONES, ZEROS = jnp.ones(2), jnp.zeros(2)


def param(value=1, size=2, **metadata):
    return nnx.Param(jnp.full(size, value, jnp.float32), **metadata)


def kernel():
    return param(sizes=[1, 2], tag="x")


def layer(k=1):
    return zoo.Box(w=param(k), bias=param(0))


class Model(zoo.Box):
    """Its name is kept under another one, by a property."""

    @property
    def name(self):
        return self._name

    @name.setter
    def name(self, value):
        self._name = value


class Hidden(Model, pytree=False):
    """No pytree to JAX: the values of its attributes decide what is data."""


def plain(kind=Model):
    """Holds objects, Variables and static values alone."""
    return kind(
        name="model",
        flag=True,
        rate=0.5,
        text="a text",
        none=None,
        tag=static_values.Tag("a"),
        tags=("x", static_values.Tag("a")),
        unhashable=[1, 2],
        kernel=kernel(),
        mapping=nnx.Cache({"a": jnp.ones(1)}, axes=("x",)),
        dropout=nnx.Dropout(0.5),
        child=nnx.Dict(a=1),
        layers=nnx.List([layer(2), "x"]),
        heads=nnx.Dict(a=param(3, 1), flag=0),
    )


def made(kind=Model):
    """Holds all that can change, at places where it may."""
    model = plain(kind)
    model.layers.append(ONES)
    model.heads.b = ONES
    more = {
        "number": 1000,
        "array": ZEROS,
        "items": [param(4, 1), 1000, ONES],
        "named": {"x": param(5, 1), "y": 2},
        "state": (nnx.State({"a": {"b": param(6, 1)}}),),
        "moments": strategies.Moments(variance=ONES, mean=param(7)),
    }
    for name, value in more.items():
        setattr(model, name, nnx.data(value))
    return model


def put_again(model, name, other):
    kept = getattr(model, name)
    setattr(model, name, other)
    setattr(model, name, kept)


def rename(entries, name, other):
    entries[other] = entries.pop(name)


def put_inside(model, content):
    """Changes a static value in place, where its ``==`` does not tell."""
    if isinstance(model.flag, EqLies):
        model.flag.content = content
    else:
        model.flag = EqLies(content)


# It is as it was.
VALUES = {
    "nothing": lambda m, k: None,
    "same value": lambda m, k: setattr(m, "flag", True),
    "there and back": lambda m, k: put_again(m, "flag", 1),
    "equal number": lambda m, k: setattr(m, "rate", float("0.5")),
    "equal text": lambda m, k: setattr(m, "text", "".join(["a ", "text"])),
    "equal data": lambda m, k: setattr(m, "number", int("1000")),
    "same object": lambda m, k: put_again(m, "tag", None),
    "same name": lambda m, k: put_again(m, "name", "other"),
    "same Variable": lambda m, k: put_again(m, "kernel", param()),
    "same child": lambda m, k: put_again(m, "child", nnx.Dict(a=1)),
    "same list": lambda m, k: put_again(m, "items", nnx.data([])),
    "array": lambda m, k: setattr(m, "array", jnp.full(2, k, jnp.float32)),
    "type of an array": lambda m, k: setattr(m, "array", jnp.full(k + 1, 2)),
    "NumPy array": lambda m, k: setattr(m, "array", np.full(2, k, np.float32)),
    "array in a List": lambda m, k: m.layers.__setitem__(2, ZEROS),
    "array in a Dict": lambda m, k: m.heads.__setitem__("b", ZEROS),
    "[...]": lambda m, k: m.kernel.__setitem__(..., 0.0),
    "[0]": lambda m, k: m.kernel.__setitem__(0, 1.0),
    "['a']": lambda m, k: m.mapping.__setitem__("a", jnp.zeros(1)),
    "set_value": lambda m, k: m.kernel.set_value(jnp.full(2, k, jnp.float32)),
    "shape": lambda m, k: m.kernel.set_value(jnp.full(k + 1, 2.0)),
    "set_raw_value": lambda m, k: m.kernel.set_raw_value(ZEROS),
    "update_from_state": lambda m, k: m.kernel.update_from_state(kernel()),
    "update": lambda m, k: nnx.update(m, {"kernel": ZEROS}),
    "update by itself": lambda m, k: nnx.update(m, nnx.state(m, nnx.Variable)),
    "jit": nnx.jit(lambda m, k: m.kernel.set_value(m.kernel * 2)),
    "vars": lambda m, k: vars(m).update(flag=True),
    "touch": lambda m, k: [nnx.touch(x) for x in (m, m.layers, m.layers[0], m.heads)],
    "something else": lambda m, k: setattr(zoo.Box(a=1), "a", 2),
    "leaves": lambda m, k: jax.tree.leaves(m),
    "repr": lambda m, k: repr(m),
    "view": lambda m, k: nnx.view(m, raise_if_not_found=False),
}
# Its own static values are others, and may come again.
STATICS = {
    "static": lambda m, k: setattr(m, "flag", bool(k)),
    "equal static": lambda m, k: setattr(m, "flag", 1 - k),
    "equal float": lambda m, k: setattr(m, "flag", 1.0 - k),
    "sign of zero": lambda m, k: setattr(m, "flag", 0.0 if k else -0.0),
    "static in vars": lambda m, k: vars(m).__setitem__("flag", bool(k)),
    "by object": lambda m, k: (object.__setattr__(m, "flag", k + 5), nnx.touch(m)),
    "number": lambda m, k: setattr(m, "rate", 0.25 + k),
    "None": lambda m, k: setattr(m, "none", k),
    "property": lambda m, k: setattr(m, "name", f"other{k}"),
}
# Equal parts are other objects.
OBJECTS = {
    "equal object": lambda m, k: setattr(m, "tag", static_values.Tag("a")),
    "Variable": lambda m, k: setattr(m, "kernel", kernel()),
    "child": lambda m, k: setattr(m, "child", nnx.Dict(a=1)),
    "own dict": lambda m, k: setattr(m, "__dict__", dict(vars(m))),
    "data of another type": lambda m, k: setattr(m, "number", 1000.0 + k),
    "jit of an array": nnx.jit(lambda m, k: setattr(m, "array", m.array * 2)),
    "list": lambda m, k: setattr(m, "items", nnx.data([*m.items])),
    "Variable in a list": lambda m, k: m.items.__setitem__(0, param(k, 1)),
    "array in a list": lambda m, k: m.items.__setitem__(2, ZEROS),
    "Variable in a dict": lambda m, k: m.named.__setitem__("x", param(k, 1)),
    "Variable in a State": lambda m, k: m.state[0].a.__setitem__("b", param(k, 1)),
    "Variable in a pytree": lambda m, k: setattr(m.moments, "mean", param(k)),
}
# Another one.
STRUCTURES = {
    "mode": lambda m, k: m.train() if k else m.eval(),
    "static below": lambda m, k: m.heads.__setitem__("flag", 1 - k),
    "object": lambda m, k: setattr(m, "tag", static_values.Tag(f"b{k}")),
    "unhashable": lambda m, k: setattr(m, "flag", [k]),
    "new": lambda m, k: setattr(m, f"new{k}", 1),
    "new Variable": lambda m, k: setattr(m, f"new{k}", param(k, 1)),
    "new in vars": lambda m, k: vars(m).__setitem__(f"new{k}", k),
    "new data": lambda m, k: setattr(m, f"new{k}", nnx.data(ZEROS)),
    "deleted": lambda m, k: delattr(m, "tag"),
    "another name": lambda m, k: rename(vars(m), "flag", "flags"),
    "static to data": lambda m, k: setattr(m, "flag", nnx.data(True)),
    "data to static": lambda m, k: setattr(m, "number", nnx.static(1000)),
    "static in place": lambda m, k: m.unhashable.append(k),
    "hash": lambda m, k: setattr(m.tag, "name", f"b{k}"),
    "hash in a tuple": lambda m, k: setattr(m.tags[1], "name", f"b{k}"),
    "no array": lambda m, k: setattr(m, "array", None),
    "array to Variable": lambda m, k: setattr(m, "array", param()),
    "Variable to array": lambda m, k: setattr(m, "kernel", nnx.data(ONES)),
    "Variable to array below": lambda m, k: setattr(
        m.layers[0], "bias", nnx.data(ONES)
    ),
    "no Variable": lambda m, k: setattr(m.layers[0], "bias", None),
    "kind of Variable": lambda m, k: setattr(m, "kernel", nnx.Cache(ONES)),
    "== that raises": lambda m, k: setattr(m, "flag", hostile_values.EqRaises(k)),
    "== that gives arrays": lambda m, k: setattr(m, "flag", [EqIsArray(k)]),
    "hash that raises": lambda m, k: setattr(m, "flag", hostile_values.HashRaises(k)),
    "== that lies, in place": put_inside,
    "metadata that lies": lambda m, k: m.kernel.set_metadata(tag=EqLies(k)),
    "metadata": lambda m, k: m.kernel.set_metadata(tag=k),
    "metadata in place": lambda m, k: m.kernel.sizes.append(k),
    "no metadata": lambda m, k: m.kernel.del_metadata("tag"),
    "copy_from": lambda m, k: m.kernel.copy_from(param(k, tag="y")),
    "metadata of a state": lambda m, k: m.kernel.update_from_state(param(k, tag="y")),
    "add_axis": lambda m, k: nnx.spmd.add_axis(
        m.mapping, 0, {nnx.PARTITION_NAME: "layers", "axes": "y"}
    ),
    "child to Variable": lambda m, k: setattr(m, "child", param()),
    "no child": lambda m, k: setattr(m, "child", None),
    "class": lambda m, k: setattr(m.layers[0], "__class__", Model),
    "flags": lambda m, k: (setattr(m._pytree__state, "is_setup", True), nnx.touch(m)),
    "List append": lambda m, k: m.layers.append(layer(k)),
    "List insert": lambda m, k: m.layers.insert(0, layer(k)),
    "List item": lambda m, k: m.layers.__setitem__(0, param()),
    "static item": lambda m, k: m.layers.__setitem__(1, nnx.static(f"y{k}")),
    "List pop": lambda m, k: m.layers.pop(),
    "List reverse": lambda m, k: m.layers.reverse(),
    "List clear": lambda m, k: m.layers.clear(),
    "Dict item": lambda m, k: m.heads.__setitem__(str(k), param(k, 1)),
    "Dict pop": lambda m, k: m.heads.pop("a"),
    "list append": lambda m, k: m.items.append(param(k, 1)),
    "list of more": lambda m, k: m.items.append(k),
    "list static": lambda m, k: m.items.__setitem__(1, 1001 + k),
    "list pop": lambda m, k: m.items.pop(),
    "dict item": lambda m, k: m.named.__setitem__(str(k), ONES),
    "dict array": lambda m, k: m.named.__setitem__("x", jnp.ones(1)),
    "dict key": lambda m, k: rename(m.named, "y", "w"),
    "State item": lambda m, k: m.state[0].__setitem__(f"c{k}", param(1, 1)),
    "State array": lambda m, k: m.state[0].a.__setitem__("b", ONES),
    "State float": lambda m, k: m.state[0].a.__setitem__("b", 1.0),
    "State type": lambda m, k: m.state[0].a.__setitem__("b", nnx.Cache(ONES)),
    "State key": lambda m, k: rename(m.state[0].a, "b", "c"),
    "update by more": lambda m, k: nnx.update(m, {f"new{k}": 1}),
    "pop": lambda m, k: nnx.pop(m, nnx.PathContains("kernel")),
    "jit of more": nnx.jit(lambda m, k: setattr(m, "new", nnx.Param(ONES))),
    "set_attributes": lambda m, k: m.set_attributes(flag=3 + k),
}
# After these a value has another type, or is data in tree mode.
TYPES = {"type of an array", "shape", "data of another type", "ref"}
DATA_IN_TREES = {"list static"}
# What tree mode refuses.
ALIASES = {
    "alias": lambda m, k: setattr(m, "same", m.kernel),
    "alias below": lambda m, k: m.heads.__setitem__("same", m.kernel),
    "a way back": lambda m, k: setattr(m.layers[0], "model", nnx.data(m)),
}


def changed(x, change, k):
    """Whether a change can be made: what it is about may be gone."""
    try:
        change(x, k)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return True


def variables_in(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [x for x in leaves if isinstance(x, nnx.Variable)]
