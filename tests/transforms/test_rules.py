"""Rules of several transforms for which the contract's table of all has no row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import modes, zoo
from tests.contract.test_transforms.matrix import cases

MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))


def takes(*names):
    return cases(lambda row: row.transform in names)


@takes("jit", "remat", "checkify", "cond", "switch")
def test_numbers_become_arrays(case):
    def f(model, x):
        model.a.set_value(7)
        return 1.0, nnx.Cache(2), None

    model = zoo.Parts()
    number, variable, nothing = case(f, model)
    values = number, variable.get_value(), model.a.get_value()
    assert all(isinstance(x, jax.Array) for x in values) and nothing is None
    assert values == (1.0, 2, 7)


NO_KEYWORDS = {
    "checkify": (nnx.checkify, modes.VALUES),
    "pmap": (nnx.pmap, {"graph_updates": modes.GRAPH_UPDATES}),
    "shard_map": (
        lambda f, **mode: nnx.shard_map(
            f, mesh=MESH, in_specs=P("d"), out_specs=P("d"), **mode
        ),
        modes.BY_NAME,
    ),
}


@pytest.mark.parametrize("name", NO_KEYWORDS)
def test_keywords_are_refused_by_name(name):
    transform, refusing = NO_KEYWORDS[name]
    message = rf"nnx.{name} takes no keyword arguments.*'model'"
    for mode in refusing.values():
        model = zoo.Counter()
        with pytest.raises(TypeError, match=message):
            transform(lambda model: model(), **mode)(model=model)
        assert model.count[...] == 0


NAMED_TWICE = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "vmap": nnx.vmap,
    "eval_shape": lambda f, **mode: lambda *x, **y: nnx.eval_shape(f, *x, **y, **mode),
}


@pytest.mark.parametrize("name", NAMED_TWICE)
def test_trees_name_an_alias_among_the_keywords(name):
    f = NAMED_TWICE[name](lambda a, b: 0.0, **modes.TREE)
    variable = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="Duplicate Param") as error:
        f(zoo.Box(w=variable), b=variable)
    assert "  - .args[0].w\n  - .kwargs['b']" in str(error.value)
