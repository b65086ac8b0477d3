"""States and Variables in exported functions (issue 20), and in pickles (issue 12)."""

import copy
import pickle
import types

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import graftree as nnx
from tests import interpreters, tables, zoo

# JAX needs it to write and read files, and does not require it.
pytest.importorskip("flatbuffers")


class Rates(nnx.State):
    pass


class Model(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([zoo.Block() for _ in range(2)])
        self.scale = zoo.Kind(jnp.array(1, jnp.bfloat16))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale.astype(x.dtype)


def written_and_read(tree):
    """What a function that returns its argument is after it was in a file."""
    return export.deserialize(export.export(jax.jit(lambda x: x))(tree).serialize())


def assert_returns(exported, tree):
    """It takes such trees, and returns them as they are."""
    out = exported.call(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)


VARIABLES = {
    kind.__name__: kind
    for kind in (getattr(nnx, name) for name in nnx.__all__)
    if isinstance(kind, type) and issubclass(kind, nnx.Variable)
}


TREES = {
    "state of a model with a list": lambda: nnx.state(Model()),
    "flat state": lambda: nnx.to_flat_state(nnx.state(Model())),
    "all Variables": lambda: {k: kind(jnp.ones(1)) for k, kind in VARIABLES.items()},
    "keys of several types below strings": lambda: nnx.State(
        {"a": {"b": {1: jnp.ones(1), (2, "x"): jnp.ones(2)}}}
    ),
    "class of the user": lambda: Rates({"a": jnp.ones(1)}),
    "frozen Variables": lambda: nnx.state(
        nnx.surgery.freeze(Model(), where="blocks[0].linear")
    ),
}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_trees_of_arrays_are_written_and_read(make):
    tree = make()
    assert_returns(written_and_read(tree), tree)


@tables.cases(
    "entry",
    *(None, True, 1, -0.0, "x", (1, ("y",)), [1.5], {"k": 1, 2: "v"}),
    *(jnp.dtype(jnp.bfloat16), jax.P("a", None, ("b", "c")), zoo.Kind),
    ids=repr,
)
def test_metadata_of_plain_values_is_written_and_read(entry):
    variable = nnx.Param(jnp.ones(1), entry=entry)
    assert_returns(written_and_read(variable), variable)


def test_variables_come_back_as_what_they_were():
    state = nnx.state(Model())
    out = written_and_read(state).call(state)
    assert type(out) is nnx.State and type(out.blocks[1].linear.kernel) is nnx.Param
    count = out.blocks[0].dropout.rngs.count
    assert type(out.scale) is zoo.Kind and count.tag == "default"
    assert type(out.raw_mapping["blocks"]) is dict


def test_exported_function_returns_what_changed():
    graphdef, state = nnx.split(zoo.Block())

    @jax.jit
    def step(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    batch = jax.ShapeDtypeStruct(export.symbolic_shape("b, 2"), jnp.float32)
    exported = export.deserialize(export.export(step)(state, batch).serialize())
    x = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    (y, new), (expected, expected_state) = exported.call(state, x), step(state, x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert new.dropout.rngs.count[...] == 1
    np.testing.assert_allclose(new.norm.mean, expected_state.norm.mean, rtol=1e-6)


def test_derivatives_are_written_if_wanted():
    weight = nnx.Param(jnp.array(3.0))
    exported = export.export(jax.jit(lambda w, x: w * x**2))(weight, 2.0)
    read = export.deserialize(exported.serialize(vjp_order=1))
    gradient = jax.grad(read.call)(weight, 2.0)
    assert type(gradient) is nnx.Param and gradient[...] == 4.0


@tables.cases(
    "make, says",
    (zoo.Scale, r"takes or returns a \w+ can't be saved(?s:.*)nnx\.split"),
    (lambda: nnx.split(zoo.Scale()), r"takes or returns a GraphDef can't be saved"),
    (
        lambda: nnx.Param(jnp.ones(1), init=jnp.ones),
        r"this Param can't be saved(?s:.*)'init': <function ones",
    ),
    (lambda: nnx.State({b"x": jnp.ones(1)}), r"this State (?s:.*)b'x'"),
    (lambda: nnx.State({"a": {b"x": jnp.ones(1)}}), r"this Level (?s:.*)b'x'"),
)
def test_what_is_not_plain_is_refused(make, says):
    exported = export.export(jax.jit(lambda x: jnp.ones(1)))(make())
    with pytest.raises(TypeError, match=says):
        exported.serialize()


def test_types_have_the_name_that_was_registered_or_that_of_their_module():
    class Local(nnx.Variable):
        pass

    def write():
        return export.export(jax.jit(lambda x: x))(Local(jnp.ones(1))).serialize()

    by_place = write()
    nnx.register_variable_name("test_exporting_local", Local)
    by_name = write()
    assert f"{__name__}.{Local.__qualname__}".encode() in by_place
    assert b"test_exporting_local" in by_name and b"Local" not in by_name
    for written in (by_place, by_name):
        assert_returns(export.deserialize(written), Local(jnp.ones(1)))


def test_type_that_is_not_known_is_named_with_the_way_out():
    written = export.export(jax.jit(lambda x: x))(nnx.Param(jnp.ones(1))).serialize()
    assert b"graftree.Param" in written
    unknown = written.replace(b"graftree.Param", b"elsewhere.Kind")
    with pytest.raises(ValueError, match=r"type elsewhere\.Kind\nImport the module"):
        export.deserialize(unknown)


READER = """
import pickle, sys
import numpy as np
from jax import export

inside, beside, step = [
    bytearray(open(f"{sys.argv[1]}/{name}", "rb").read())
    for name in ("in", "beside", "step")
]
x = np.ones((3, 2), np.float32)
y = export.deserialize(inside).call(x)
assert "graftree" not in sys.modules
import graftree as nnx
exported = export.deserialize(beside)
weights = [np.ones(aval.shape, aval.dtype) for aval in exported.in_avals[:-1]]
(state, _), _ = exported.in_tree.unflatten([*weights, x])
assert type(state) is nnx.State and type(state[0].kernel) is nnx.Param
assert np.array_equal(exported.call(state, x), np.full((3, 2), 3.0))
assert float(pickle.loads(step)(3.0)) == 6.0
print(np.asarray(y).tolist())
"""


def test_files_are_read_in_a_process_without_the_model(tmp_path):
    model = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
    graphdef, state = nnx.split(model)
    batch = jax.ShapeDtypeStruct(export.symbolic_shape("b, 2"), jnp.float32)

    @jax.jit
    def inside(x):
        return model[0](x)

    @jax.jit
    def beside(state, x):
        return nnx.merge(graphdef, state)[0](x)

    written = export.export(inside)(batch), export.export(beside)(state, batch)
    for name, exported in zip(("in", "beside"), written, strict=True):
        (tmp_path / name).write_bytes(exported.serialize())
    step = nnx.jit(lambda x: jnp.sum(x * 2.0))
    (tmp_path / "step").write_bytes(cloudpickle.dumps(step))
    out = interpreters.printed("-c", READER, tmp_path)
    np.testing.assert_allclose(eval(out), inside(jnp.ones((3, 2))), rtol=1e-6)


WITH_ITS_OWN_WORDS = """
from graftree import dropin
dropin.install()
from flax import nnx
import jax, jax.numpy as jnp
from jax import export
export.register_pytree_node_serialization(
    nnx.Param,
    serialized_name="mine",
    serialize_auxdata=lambda metadata: b"",
    deserialize_auxdata=lambda text: None,
)
exported = export.export(jax.jit(lambda x: x))(nnx.Param(jnp.ones(1)))
assert b"mine" in exported.serialize()
dropin.uninstall()
exported = export.export(jax.jit(lambda x: x))(nnx.BatchStat(jnp.ones(1)))
assert b"graftree.BatchStat" in exported.serialize()
"""


@pytest.mark.long
def test_programs_for_flax_tell_jax_by_themselves():
    """Flax NNX tells it nothing, and JAX takes no second word on a type."""
    interpreters.printed("-c", WITH_ITS_OWN_WORDS)


# ------------------------------------------------------------------------------ pickles


# JAX wraps these, and its wrappers are not what plain pickle finds under their name.
# As attributes of objects they can be pickled.
_PUBLIC = {name: getattr(nnx, name) for name in nnx.__all__}
_WRAPPED_BY_JAX = {name for name, x in _PUBLIC.items() if hasattr(x, "__wrapped__")}
# No module can.
_NAMES = [x for x, value in _PUBLIC.items() if not isinstance(value, types.ModuleType)]


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
        np.testing.assert_equal(jax.tree.leaves(again(MODEL, x)), expected)


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
