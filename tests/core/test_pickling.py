"""What is public survives pickle, cloudpickle and deepcopy (issue 12, §10)."""

import copy
import pickle
import subprocess
import sys
import types

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

# JAX wraps these, and its wrappers are not what plain pickle finds under their name.
# As attributes of objects they can be pickled.
_WRAPPED_BY_JAX = {
    name for name in nnx.__all__ if hasattr(getattr(nnx, name), "__wrapped__")
}
_NAMES = [
    name
    for name in nnx.__all__
    if not isinstance(getattr(nnx, name), types.ModuleType)  # no module can
]


def cloudpickled(x):
    return pickle.loads(cloudpickle.dumps(x))


def pickled(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("name", _NAMES)
def test_public_names_survive(name):
    value = getattr(nnx, name)
    cloudpickled(value)
    copy.deepcopy(value)
    if name not in _WRAPPED_BY_JAX:
        assert pickled(value) == value


@pytest.mark.parametrize("name", sorted(_WRAPPED_BY_JAX))
def test_activations_survive_as_attributes(name):
    model = nnx.Sequential(getattr(nnx, name))
    for again in (pickled(model), cloudpickled(model), copy.deepcopy(model)):
        assert again.layers[0] is getattr(nnx, name)
    graphdef = nnx.graphdef(model)
    for again in (pickled(graphdef), cloudpickled(graphdef), copy.deepcopy(graphdef)):
        assert again == graphdef
        assert hash(again) == hash(graphdef)


def loss(model, x):
    return (model(x) ** 2).sum()


def scaled(model, x):
    return model(x) * 2


def custom(**mode):
    function = nnx.custom_vjp(loss, **mode)
    function.defvjp(lambda m, x: (loss(m, x), None), lambda r, g: (None, None))
    return function


MODEL = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
ROW = jnp.ones(2)
TRANSFORMED = {
    "jit": lambda **mode: nnx.jit(scaled, **mode),
    "static": lambda **mode: nnx.jit(scaled, static_argnames="no", **mode),
    "grad": lambda **mode: nnx.grad(loss, **mode),
    "value_and_grad": lambda **mode: nnx.value_and_grad(loss, **mode),
    "remat": lambda **mode: nnx.remat(scaled, **mode),
    "vmap": lambda **mode: nnx.vmap(scaled, in_axes=(None, 0), **mode),
    "scan": lambda **mode: nnx.scan(scaled, in_axes=(None, 0), out_axes=0, **mode),
    "custom_vjp": custom,
    "checkify": lambda **mode: nnx.checkify(scaled, **mode),
}


@pytest.mark.parametrize("name", [name for name in TRANSFORMED if name != "static"])
def test_transformed_functions_survive_before_and_after_calls(name, mode):
    function = TRANSFORMED[name](**mode)
    x = jnp.ones((3, 2)) if name in ("vmap", "scan") else ROW
    loaded = cloudpickled(function)
    expected = jax.tree.leaves(function(MODEL, x))
    for again in (loaded, cloudpickled(function), copy.deepcopy(function)):
        found = jax.tree.leaves(again(MODEL, x))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("partial", [nnx.jit_partial, nnx.cached_partial])
def test_partials_survive_with_what_is_bound(partial):
    mode = {"graph": False} if partial is nnx.jit_partial else {}
    function = partial(scaled, MODEL, **mode)
    for again in (
        cloudpickled(function),
        function(ROW) is None or cloudpickled(function),
    ):
        np.testing.assert_array_equal(again(ROW), scaled(MODEL, ROW))


@nnx.jit
def decorated(x):
    return x + 1


def test_plain_pickle_finds_a_decorated_function_by_its_name():
    assert pickled(decorated) is decorated


def test_plain_pickle_takes_a_compiled_function_of_a_module():
    np.testing.assert_array_equal(
        pickled(nnx.jit(scaled))(MODEL, ROW), scaled(MODEL, ROW)
    )


def test_another_process_gets_the_same_numbers():
    step = nnx.jit(lambda x: jnp.sum(x * 2.0))
    program = "import sys, pickle\nprint(float(pickle.load(sys.stdin.buffer)(3.0)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=cloudpickle.dumps(step),
        capture_output=True,
        check=True,
    )
    assert float(done.stdout) == 6.0
