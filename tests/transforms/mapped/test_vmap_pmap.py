"""Functions mapped over an axis of objects: `vmap` and `pmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo

TRANSFORMS = pytest.mark.parametrize("transform", [nnx.vmap, nnx.pmap])


def two():
    return zoo.Box(a=nnx.Param(jnp.arange(4.0)), b=nnx.BatchStat(jnp.arange(4.0)))


def count(counter, x):
    counter[...] += 1
    return x


def test_new_objects_are_stacked(mode):
    make = nnx.vmap(lambda rngs: nnx.Linear(2, 3, rngs=rngs), **mode)
    stack = make(nnx.Rngs(0).split(4))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 4)
    for i, key in enumerate(keys):
        expected = nnx.Linear(2, 3, rngs=nnx.Rngs(key)).kernel[...]
        np.testing.assert_array_equal(stack.kernel[i], expected)


@TRANSFORMS
def test_shared_variables_are_updated_once(mode, transform):
    counter = nnx.Variable(jnp.array(0))
    transform(count, in_axes=(None, 0), **mode)(counter, jnp.ones(3))
    assert counter[...] == 1


def test_batched_writes_to_shared_variables_name_the_variable(mode):
    foo = two()

    def write(foo, x):
        foo.a[...] = foo.a * x

    with pytest.raises(ValueError, match="at vmap.*'a'.*axis spec None but output was"):
        nnx.vmap(write, in_axes=(None, 0), **mode)(foo, jnp.ones(3))
    np.testing.assert_array_equal(foo.a[...], np.arange(4.0))


def test_state_axes_assign_axes_by_filter():
    class Pair(zoo.Box):
        @nnx.vmap(in_axes=(nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: None}),))
        def product(self):
            product = self.a * self.b
            self.b[...] += 1
            return product

    pair = Pair(a=nnx.Param(jnp.arange(4.0)), b=nnx.BatchStat(jnp.arange(4.0)))
    pair.itself = pair
    expected = np.outer(np.arange(4.0), np.arange(4.0))
    np.testing.assert_array_equal(pair.product(), expected)
    np.testing.assert_array_equal(pair.b[...], np.arange(4.0) + 1)
    assert pair.itself is pair


def test_aliases_with_different_axes_are_refused():
    foo = two()
    phrase = r"(?s)Inconsistent aliasing detected.*Param.*0/a: 0.*1/a: None"
    with pytest.raises(ValueError, match=phrase):
        nnx.vmap(lambda a, b: 0.0, in_axes=(0, None))(foo, foo)
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        nnx.vmap(lambda foo: foo, in_axes=0, out_axes=1)(foo)


def test_aliases_with_equal_axes_stay_aliases():
    foo = two()

    @nnx.vmap(in_axes=(0, nnx.StateAxes({...: 0})))
    def same(first, second):
        assert first is second
        return second

    assert same(foo, foo) is foo


def test_pmap_runs_on_several_devices():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    x = jnp.arange(8.0 * 2).reshape(8, 1, 2)
    y = nnx.pmap(lambda model, x: model(x), in_axes=(None, 0))(model, x)
    assert len(y.devices()) == 8
    np.testing.assert_allclose(y, model(x), rtol=1e-6, atol=1e-6)


# --------------------------------------------------------------------- axes and objects


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.pmap, nnx.scan])
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_any_axis_is_mapped_and_comes_back(mode, transform, axis):
    variable = nnx.Variable(jnp.arange(6.0).reshape(2, 3))

    def step(variable):
        variable[...] += 1
        return nnx.Param(variable[...] * 2)

    out = transform(step, in_axes=axis, out_axes=axis, **mode)(variable)
    expected = np.arange(6.0).reshape(2, 3) + 1
    np.testing.assert_array_equal(variable[...], expected)
    np.testing.assert_array_equal(out[...], 2 * expected)


def test_a_size_is_needed_where_nothing_is_mapped(mode):
    make = nnx.vmap(lambda: nnx.Param(jnp.ones(2)), axis_size=3, **mode)
    assert make().shape == (3, 2)
    counter = nnx.Variable(jnp.array(0))
    once = nnx.vmap(count, in_axes=None, out_axes=None, axis_size=3, **mode)
    assert once(counter, 1.0) == 1.0 and counter[...] == 1


# -------------------------------------------------------------------- keyword arguments


@TRANSFORMS
def test_keywords_are_mapped_over_axis_0_without_graph_updates(value_mode, transform):
    foo, x = two(), jnp.arange(4.0)

    def write(x, *, foo):
        foo.a[...] += x
        return foo.a[...]

    y = transform(write, in_axes=(0,), **value_mode)(x, foo=foo)
    np.testing.assert_array_equal(y, 2 * np.arange(4.0))
    np.testing.assert_array_equal(foo.a[...], y)


# ----------------------------------------------------------- aliases, refs, other forms


def test_aliases_are_checked_before_the_function_runs(graph_mode):
    variable = nnx.Param(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="(?s)Inconsistent aliasing.*0: 0.*1: 1"):
        nnx.vmap(lambda a, b: a[...] + b[...], in_axes=(0, 1), **graph_mode)(
            variable, variable
        )


def test_new_objects_with_two_axes_are_refused(mode):
    def make(x):
        return (new := nnx.Param(jnp.full(2, x))), new

    phrase = "Inconsistent aliasing detected" if mode["graph"] else "Duplicate Param"
    with pytest.raises(ValueError, match=phrase):
        nnx.vmap(make, out_axes=(0, 1), **mode)(jnp.ones(3))


def test_shared_streams_give_one_key_to_all(mode):
    rngs = nnx.Rngs(0)
    draw = nnx.vmap(lambda rngs, x: rngs.uniform(()), in_axes=(None, 0), **mode)
    draws = draw(rngs, jnp.ones(3))
    assert len(np.unique(draws)) == 1 and rngs.default.count[...] == 1


def test_random_streams_without_an_axis_are_told_with_the_way_out(mode):
    """Issue 12, §13."""
    draw = nnx.vmap(lambda rngs, x: x + rngs.normal(), in_axes=(0, 0), **mode)
    with pytest.raises(ValueError, match="rank should be") as caught:
        draw(nnx.Rngs(noise=0, default=1), jnp.ones(3))
    notes = " ".join(caught.value.__notes__)
    assert "args[0].noise.key" in notes and "rngs.split(n)" in notes


def test_the_axis_has_a_name_for_collectives(mode):
    mean = nnx.vmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i", **mode)
    np.testing.assert_array_equal(mean(jnp.arange(3.0)), [-1, 0, 1])


# ---------------------------------------------------------------------- pmap on its own


@pytest.mark.parametrize("in_axes", [0, (0, None, 0), [0, None, 0]])
def test_static_arguments_of_pmap_are_python_values(mode, in_axes):
    seen = []

    @nnx.pmap(in_axes=in_axes, static_broadcasted_argnums=1, **mode)
    def scale(foo, factor, x):
        seen.append(factor)
        foo.a[...] *= factor
        return foo.a * x

    foo = two()
    np.testing.assert_array_equal(scale(foo, 2, jnp.ones(4)), 2 * np.arange(4.0))
    np.testing.assert_array_equal(foo.a[...], 2 * np.arange(4.0))
    assert set(seen) == {2}


def test_donated_objects_of_pmap_stay_readable(mode):
    @nnx.pmap(donate_argnums=(0, 1), **mode)
    def add(foo, x):
        foo.a[...] += x
        return x + 1

    foo, x = two(), jax.pmap(jnp.array)(jnp.ones(4))  # on its devices
    foo.a[...] = foo.a + 0  # buffers of their own
    foo.b[...] = foo.b + 0
    np.testing.assert_array_equal(add(foo, x), np.full(4, 2.0))
    assert x.is_deleted()
    np.testing.assert_array_equal(foo.a[...], np.arange(4.0) + 1)
    np.testing.assert_array_equal(foo.b[...], np.arange(4.0))


def test_a_buffer_that_pmap_donates_twice_is_named(mode):
    def step(pair):
        for variable in (pair.a, pair.b):
            variable[...] += 1

    f = nnx.pmap(step, donate_argnums=0, **mode)
    pair = nnx.Dict(a=nnx.Param(jnp.ones((2, 2))), b=nnx.Param(jnp.ones((2, 2))))
    for _ in range(3):
        f(pair)
    pair.b[...] = pair.a[...]
    message = "nnx.pmap can't donate the same buffer"
    with pytest.raises(ValueError, match=message) as info:
        f(pair)
    assert "args[0].a, donated\n  args[0].b, donated" in str(info.value)
    assert pair.a[...].tolist() == [[4.0, 4.0]] * 2


def test_static_arguments_of_pmap_are_not_donated():
    with pytest.raises(ValueError, match="cannot intersect"):
        nnx.pmap(lambda x: x, static_broadcasted_argnums=0, donate_argnums=0)


# ----------------------------------------------------------------------------- the peer


@pytest.mark.peers
def test_ensembles_compute_what_those_of_flax_do(mode):
    flax = pytest.importorskip("flax.nnx")

    def run(nnx):
        make = nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)), **mode)
        models = make(jax.random.split(jax.random.key(0), 4))
        apply = nnx.vmap(lambda model, x: model(x), in_axes=(0, None), **mode)
        return apply(models, jnp.ones(2))

    np.testing.assert_array_equal(run(nnx), run(flax))
