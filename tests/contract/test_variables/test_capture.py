"""Captures, without the mapped transforms (contract, section 14)."""

import functools

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.threads import run_in_threads


class Block(nnx.Module):
    def __init__(self, scale=2.0):
        self.scale = nnx.Param(jnp.array(scale))

    def __call__(self, x):
        y = self.scale[...] * x
        self.sow(nnx.Intermediate, "y", y)
        return self.perturb("p", y)


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Block(2.0), Block(3.0)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def has_buffers(node):
    return any("__captures__" in vars(m) for _, m in nnx.iter_modules(node))


def values(state):
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def captured(function, *args, **options):
    """The result of a call, and the values of its Intermediates."""
    out, seen = nnx.capture(function, nnx.Intermediate, **options)(*args)
    return out, values(seen)


# ------------------------------------------------------------------------ the results


def test_result_alone_without_types_and_states_in_order():
    model = Model()
    assert nnx.capture(model)(1.0) == 6.0
    both = nnx.capture(model, nnx.Perturbation, nnx.Intermediate)
    out, perturbations, intermediates = both(1.0)
    assert out == 6.0 and type(intermediates) is nnx.State
    expected = {("layers", 0, "y"): (2.0,), ("layers", 1, "y"): (6.0,)}
    assert values(intermediates) == expected
    assert list(values(perturbations)) == [("layers", 0, "p"), ("layers", 1, "p")]


def test_leaves_are_variables_of_the_type():
    _, seen = nnx.capture(lambda m: (m(1.0), m(2.0)), nnx.Intermediate)(Block())
    assert type(seen["y"]) is nnx.Intermediate and seen["y"].get_value() == (2.0, 4.0)


def test_nothing_sown_gives_an_empty_state():
    out, seen = nnx.capture(Block(), nnx.BatchStat)(1.0)
    assert out == 2.0 and len(seen) == 0 and type(seen) is nnx.State


def test_shared_module_is_captured_once_at_its_first_path():
    block = Block()
    model = nnx.Dict(a=block, b=block)
    assert captured(lambda m: m.a(m.b(1.0)), model)[1] == {("a", "y"): (2.0, 4.0)}


def call(m, x):
    return m(x)


FORMS = {
    "function": lambda m: nnx.capture(call, nnx.Intermediate)(m, 1.0),
    "module": lambda m: nnx.capture(m, nnx.Intermediate)(1.0),
    "bound": lambda m: nnx.capture(m.__call__, nnx.Intermediate)(1.0),
    "decorator": lambda m: nnx.capture(nnx.Intermediate)(call)(m, 1.0),
    "keyword": lambda m: nnx.capture(call, nnx.Intermediate)(x=1.0, m=m),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_use(form):
    out, seen = FORMS[form](Block())
    assert out == 2.0 and values(seen) == {("y",): (2.0,)}


def test_containers_of_modules_are_captured():
    _, seen = captured(lambda ms, x: ms["a"][0](x), {"a": [Block()]}, 1.0)
    assert seen == {("a", 0, "y"): (2.0,)}


def test_wrapper_keeps_the_name():
    def forward(model):
        """Runs."""

    assert nnx.capture(forward, nnx.Intermediate).__name__ == "forward"


# ----------------------------------------------------------------- buffers, exceptions


def test_buffers_are_there_during_the_call_only():
    model = Model()
    seen = []
    nnx.capture(lambda m: seen.append(has_buffers(m)), nnx.Intermediate)(model)
    assert seen == [True] and not has_buffers(model)


def test_buffers_hold_a_dict_per_type():
    def f(model):
        model(1.0)
        return [(type(b), b.get_value()) for b in model.__captures__]

    buffers, *_ = nnx.capture(f, nnx.Intermediate, nnx.Cache)(Block())
    assert buffers == [(nnx.Intermediate, {"y": (2.0,)}), (nnx.Cache, {})]


def test_exceptions_leave_nothing_behind():
    def fails(model):
        model(1.0)
        raise RuntimeError("stop")

    model = Model()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop"):
            nnx.capture(fails, nnx.Intermediate)(model)
        assert not has_buffers(model)
    assert len(captured(model, 1.0)[1]) == 2


def test_dicts_can_be_iterated_during_a_capture():
    model = nnx.Dict(a=Block(2.0), b=Block(3.0))

    def f(m, x):
        keys.append(list(m))
        for block in m.values():
            x = block(x)
        return x

    keys = []
    out, seen = captured(f, model, 1.0)
    assert out == 6.0 and keys == [["a", "b"]] and list(model) == ["a", "b"]
    assert seen == {("a", "y"): (2.0,), ("b", "y"): (6.0,)}


def test_values_sown_on_a_list_are_kept():
    sow = lambda m: m.sow(nnx.Intermediate, "z", 1)  # noqa: E731
    assert captured(sow, nnx.List([Block()])) == (True, {("z",): (1,)})


def test_nested_captures_do_not_disturb_each_other():
    def outer(model):
        model(1.0)
        _, inner = captured(model, 10.0)
        model(2.0)
        return inner

    inner, seen = captured(outer, Block())
    assert inner == {("y",): (20.0,)}
    assert seen[("y",)][0] == 2.0 and seen[("y",)][-1] == 4.0


def test_captures_in_threads_do_not_disturb_each_other():
    def work(scale):
        block = Block(scale)
        for _ in range(20):
            _, seen = captured(block, 1.0, method_outputs=nnx.Cache)
            results.append(seen == {("y",): (scale,)})

    results = []
    run_in_threads(*(functools.partial(work, scale) for scale in (2.0, 3.0, 5.0)))
    assert results == [True] * 60


def test_sow_reports_whether_it_stored():
    def f(model):
        given = (nnx.Intermediate, "a", 1), (nnx.Perturbation, "a", 1)
        return [model.sow(*args) for args in (*given, ("intermediates", "scale", 2))]

    model = Block()
    stored, seen = captured(f, model)
    assert stored == [True, False, True]
    assert seen == {("a",): (1,), ("scale",): (2,)}
    assert isinstance(model.scale, nnx.Param) and not hasattr(model, "a")


def test_base_type_does_not_take_the_values_of_its_subtype():
    def f(model):
        model.sow(nnx.Intermediate, "a", 1)
        model.sow(nnx.Perturbation, "b", 2)

    _, base, sub = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(Block())
    assert (list(base), list(sub)) == (["a"], ["b"])


# -------------------------------------------------------------------------------- init


def test_init_feeds_perturbations_and_need_not_be_returned():
    model = Block()
    _, zeros = nnx.capture(model, nnx.Perturbation)(1.0)
    moved = jax.tree.map(lambda x: x + 0.5, zeros)
    assert captured(model, 1.0, init=moved) == (2.5, {("y",): (2.0,)})


@pytest.mark.parametrize("grad", [nnx.grad, jax.grad])
def test_gradients_of_perturbations_are_those_of_the_values(grad):
    model = Model()
    _, zeros = nnx.capture(model, nnx.Perturbation)(1.0)

    def loss(model, perturbations):
        out, seen = nnx.capture(model, nnx.Intermediate, init=perturbations)(1.0)
        return out**2, seen

    grads, seen = grad(loss, argnums=(0, 1), has_aux=True)(model, zeros)
    assert values(nnx.state(grads[0]))[("layers", 0, "scale")] == 36.0
    assert values(grads[1]) == {("layers", 0, "p"): 36.0, ("layers", 1, "p"): 12.0}
    assert len(values(nnx.merge_state(grads[1], seen))) == 4


def test_init_accepts_mappings_and_ignores_what_is_no_variable():
    init = {"p": nnx.Perturbation(jnp.array(1.0)), "q": 3}
    assert nnx.capture(Block(), init=init)(1.0) == 3.0


# ---------------------------------------------------------------------- method_outputs


class Methods(nnx.Module):
    def __call__(self, x):
        return self.first(x) + self._hidden(x) + self.fixed(x) + self.size

    def first(self, x):
        return x + 1

    def _hidden(self, x):
        return x

    @staticmethod
    def fixed(x):
        return 10 * x

    @property
    def size(self):
        return 0


class Outer(nnx.Module):
    def __init__(self):
        self.inner = Methods()

    def __call__(self, x):
        return self.inner(x)


def test_outputs_of_methods_are_recorded_by_name():
    _, found = captured(Outer(), 1.0, method_outputs=nnx.Intermediate)
    assert found[("__call__",)] == (13.0,) and found[("inner", "__call__")] == (13.0,)
    assert found[("inner", "first")] == (2.0,)
    assert ("inner", "_hidden") not in found and ("inner", "size") not in found


def test_entry_method_is_not_recorded_when_it_is_bound():
    _, found = captured(Outer().__call__, 1.0, method_outputs=nnx.Intermediate)
    assert ("__call__",) not in found and ("inner", "__call__") in found


def test_outputs_are_returned_only_for_the_given_types():
    assert nnx.capture(Outer(), method_outputs=nnx.Intermediate)(1.0) == 13.0


# -------------------------------------------------------------------------- transforms


def test_capture_around_jit(mode):
    model = Model()
    out, seen = captured(nnx.jit(call, **mode), model, 1.0)
    assert out == 6.0 and seen[("layers", 1, "y")] == (6.0,)
    assert not has_buffers(model)


def test_capture_inside_jit_and_grad(mode):
    def loss(model, x):
        return nnx.capture(model, nnx.Intermediate)(x)

    model = Block()
    out, seen = nnx.jit(loss, **mode)(model, 1.0)
    assert out == 2.0 and values(seen) == {("y",): (2.0,)}
    grads, seen = nnx.grad(loss, has_aux=True, **mode)(model, 1.0)
    assert jax.tree.leaves(grads) == [1.0] and values(seen) == {("y",): (2.0,)}
    assert not has_buffers(model)


def test_capture_around_grad(mode):
    assert captured(nnx.grad(call, **mode), Block(), 1.0)[1] == {("y",): (2.0,)}


def test_capture_inside_plain_jit():
    f = jax.jit(lambda model, x: nnx.capture(model, nnx.Intermediate)(x))
    out, seen = f(Block(), 1.0)
    assert out == 2.0 and values(seen) == {("y",): (2.0,)}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_jit_inside_a_capture_loses_the_values():
    assert captured(lambda m, x: jax.jit(call)(m, x), Block(), 1.0)[1] == {}


def test_module_of_an_outer_trace_can_not_be_captured():
    model = Block()
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda x: nnx.capture(model, nnx.Intermediate)(x))(1.0)
    assert not has_buffers(model)


def test_sowing_from_a_closure_during_a_capture_leaks_nothing():
    class Mapped(nnx.Module):
        def __call__(self, x):
            return jax.vmap(lambda a: (self.sow(nnx.Intermediate, "a", a), a)[1])(x)

    model = Mapped()
    with pytest.raises(nnx.errors.TraceContextError):
        nnx.capture(model, nnx.Intermediate)(jnp.ones(2))
    assert not has_buffers(model)


def test_buffers_show_nothing_but_what_was_sown():
    class Shown(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "a", x)
            return repr(self.__captures__)

    text, _ = nnx.capture(Shown(), nnx.Intermediate)(1)
    assert "'a': (1,)" in text and "eager_sharding" not in text
