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
    graphdef = nnx.graphdef(model)
    for copied in (pickled, cloudpickled, copy.deepcopy):
        assert copied(model).layers[0] is getattr(nnx, name)
        again = copied(graphdef)
        assert again == graphdef and hash(again) == hash(graphdef)


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
    "grad": lambda **mode: nnx.grad(loss, **mode),
    "value_and_grad": lambda **mode: nnx.value_and_grad(loss, **mode),
    "remat": lambda **mode: nnx.remat(scaled, **mode),
    "vmap": lambda **mode: nnx.vmap(scaled, in_axes=(None, 0), **mode),
    "scan": lambda **mode: nnx.scan(scaled, in_axes=(None, 0), out_axes=0, **mode),
    "custom_vjp": custom,
    "checkify": lambda **mode: nnx.checkify(scaled, **mode),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_functions_survive_before_and_after_calls(name, mode):
    function = TRANSFORMED[name](**mode)
    x = np.ones((3, 2) if name in ("vmap", "scan") else 2, np.float32)
    loaded = cloudpickled(function)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(function(MODEL, x))]
    for again in (loaded, cloudpickled(function), copy.deepcopy(function)):
        found = [np.asarray(leaf) for leaf in jax.tree.leaves(again(MODEL, x))]
        np.testing.assert_equal(found, expected)


@pytest.mark.parametrize("partial", [nnx.jit_partial, nnx.cached_partial])
def test_partials_survive_with_what_is_bound(partial):
    mode = {"graph": False} if partial is nnx.jit_partial else {}
    function = partial(scaled, MODEL, **mode)
    for _ in range(2):
        np.testing.assert_array_equal(cloudpickled(function)(ROW), scaled(MODEL, ROW))
        function(ROW)


@nnx.jit
def decorated(x):
    return x + 1


def test_plain_pickle_takes_functions_of_a_module():
    assert pickled(decorated) is decorated
    assert pickled(nnx.jit(scaled))(MODEL, ROW).tolist() == scaled(MODEL, ROW).tolist()


def test_another_process_gets_the_same_numbers():
    step = cloudpickle.dumps(nnx.jit(lambda x: jnp.sum(x * 2.0)))
    program = "import sys, pickle\nprint(float(pickle.load(sys.stdin.buffer)(3.0)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=step, capture_output=True, check=True)
    assert float(done.stdout) == 6.0
