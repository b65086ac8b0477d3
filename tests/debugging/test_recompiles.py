"""explain_recompile and at_most_traces: each planted cause is named by its path."""

import dataclasses
import functools
import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftree as nnx
from tests import zoo

explain = nnx.debugging.explain_recompile
X = np.ones((4, 2), np.float32)
WEAK = jnp.full((4, 2), 1.0)


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int = 4
    rate: float = 0.1


def rows(step, *calls):
    """What tells the traces of these calls apart: the rows without their trace."""
    for args in calls:
        step(*args)
    return [row[2:] for row in explain(step).rows]


def make_block():
    return zoo.Box(
        up=nnx.Param(np.ones((2, 2), np.float32), tag="x"),
        drop=nnx.Dropout(0.1, deterministic=False),
        config=Config(),
        flag=True,
    )


def make_net():
    return zoo.Box(blocks=nnx.List([make_block(), make_block()]), head=make_block())


def jitted(**options):
    """A jitted function that depends on all of its arguments, and costs nothing."""

    def step(net, x, train=True, **batch):
        return x

    return nnx.jit(step, static_argnames="train", **options)


def changing(change):
    """A cause: a change of the model between two calls."""

    def call(step, net):
        change(net)
        step(net, X)

    return call


def calling(*args, **kwargs):
    """A cause: other arguments."""
    return lambda step, net: step(net, *args, **kwargs)


def under(context):
    """A cause: another configuration of JAX."""

    def call(step, net):
        with context():
            step(net, X)

    return call


CAUSES = {
    "shape": (calling(X[:1]), ("x", "shape", "(4, 2)", "(1, 2)")),
    "dtype": (calling(X.astype(np.int32)), ("x", "dtype", "float32", "int32")),
    "weak type": (calling(WEAK), ("x", "weak type", "False", "True")),
    "shape in the model": (
        changing(lambda net: net.head.up.set_value(jnp.ones(3))),
        ("net.head.up", "shape", "(2, 2)", "(3,)"),
    ),
    "static attribute": (
        changing(lambda net: setattr(net.blocks[1], "flag", False)),
        ("net.blocks[1].flag", "static attribute", "True", "False"),
    ),
    "part of a static attribute": (
        changing(lambda net: setattr(net.blocks[1], "config", Config(heads=8))),
        ("net.blocks[1].config.heads", "static attribute", "4", "8"),
    ),
    "static argument": (
        calling(X, train=False),
        ("train", "argument", "not passed", "False"),
    ),
    "another argument": (
        calling(X, y=X),
        ("batch['y']", "argument", "not passed", "float32[4,2]"),
    ),
    "passed otherwise": (calling(x=X), ("x", "passed", "by position", "by keyword")),
    "another container": (calling([X]), ("x", "argument", "float32[4,2]", "a list")),
    "attribute added": (
        changing(lambda net: setattr(net.blocks[0], "new", nnx.Param(X))),
        ("net.blocks[0].new", "added", "nothing", "a Param"),
    ),
    "attribute removed": (
        changing(lambda net: delattr(net.blocks[0], "drop")),
        ("net.blocks[0].drop", "removed", "a Dropout", "nothing"),
    ),
    "module replaced": (
        changing(lambda net: setattr(net.blocks[0], "drop", nnx.Dict(rate=0.1))),
        ("net.blocks[0].drop", "type", "a Dropout", "a Dict"),
    ),
    "variable replaced": (
        changing(lambda net: setattr(net.blocks[1], "up", nnx.BatchStat(X))),
        ("net.blocks[1].up", "type", "a Param", "a BatchStat"),
    ),
    "metadata": (
        changing(lambda net: net.head.up.set_metadata(tag="y")),
        ("net.head.up", "metadata 'tag'", "'x'", "'y'"),
    ),
    "mode": (
        changing(lambda net: net.eval()),
        ("net.blocks[0].drop.deterministic", "static attribute", "False", "True"),
    ),
    "number of layers": (
        changing(lambda net: net.blocks.append(make_block())),
        ("net.blocks", "length", "2", "3"),
    ),
    "configuration": (
        under(lambda: jax.default_matmul_precision("float32")),
        ("jax_default_matmul_precision", "JAX configuration", "None", "float32"),
    ),
    "scoped default": (
        under(lambda: nnx.set_graph_updates(False)),
        ("set_graph_updates", "JAX configuration", "none", "False"),
    ),
    "mesh": (
        under(lambda: jax.set_mesh(mesh(AxisType.Auto))),
        ("mesh", "JAX configuration", "None", "data=8 (Auto)"),
    ),
}


def mesh(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_named_by_its_path(name, mode):
    cause, expected = CAUSES[name]
    step, net = jitted(**mode), make_net()
    step(net, X)
    cause(step, net)
    found = explain(step)
    first, *others = [row[2:] for row in found.rows if row[:2] == (2, 1)]
    assert first == expected and found.traces == 2
    # Only what the cause consists of is listed besides.
    each = "net.blocks[1].drop.deterministic", "net.head.drop.deterministic"
    assert {row[0] for row in others} <= {*each, "net.blocks[2]"}
    lines = str(found).splitlines()
    assert len(lines) <= 10 and all(len(line) < 120 for line in lines)
    assert expected[0] in lines[2]


def test_a_shared_reference_is_named_when_it_is_made_and_when_it_is_broken():
    step, net = jitted(graph=True), make_net()
    step(net, X)
    net.head = net.blocks[0]
    step(net, X)
    net.head = make_block()
    net.blocks[1].up = net.blocks[0].up
    assert rows(step, (net, X)) == [
        ("net.head", "sharing", "a Box", "the same as net.blocks[0]"),
        ("net.blocks[1].up", "sharing", "a Param", "the same as net.blocks[0].up"),
    ]


def test_objects_shared_between_arguments_are_named():
    step, net = nnx.jit(lambda net, other: None, graph=True), make_net()
    assert rows(step, (net, net.head), (net, make_block())) == [
        ("other", "sharing", "the same as net.head", "a Box")
    ]


def over(kind, *axes):
    return NamedSharding(mesh(kind), PartitionSpec(*axes))


def test_sharding_over_explicit_axes_is_part_of_a_type():
    places = over(AxisType.Explicit), over(AxisType.Explicit, "data")
    calls = [(jax.device_put(np.ones(8, np.float32), place),) for place in places]
    one, both = "P() on data=8 (Explicit)", "P('data',) on data=8 (Explicit)"
    assert rows(nnx.jit(lambda x: x), *calls) == [("x", "sharding", one, both)]


def test_a_compilation_for_another_sharding_without_a_trace_is_listed():
    step, net = nnx.jit(lambda net, x: net.head.up + x), make_net()
    x, divided = (
        jax.device_put(np.ones(8, np.float32), over(AxisType.Auto, *axes))
        for axes in ((), ("data",))
    )
    net.head.up.set_value(x)
    step(net, x)
    step(net, divided)
    net.head.up.set_value(divided)
    one, both = "P() on data=8 (Auto)", "P('data',) on data=8 (Auto)"
    assert rows(step, (net, x), (net, x)) == [
        ("x", "sharding", one, both),
        ("net.head.up", "sharding", one, both),
    ]
    found = explain(step)
    assert {row[:2] for row in found.rows} == {(1, 1)}
    assert (found.traces, found.recompiles) == (1, 2)
    text = "<lambda> was traced once and compiled again twice, be"
    assert str(found).startswith(text)


def test_a_compilation_in_a_repeated_call_is_listed_wherever_its_argument_is():
    step, net = nnx.jit(lambda x, net: -x), make_net()
    x, divided = (
        jax.device_put(np.ones(8, np.float32), over(AxisType.Auto, *axes))
        for axes in ((), ("data",))
    )
    one, both = "P() on data=8 (Auto)", "P('data',) on data=8 (Auto)"
    assert rows(step, (x, net), (x, net), (x, net), (divided, net)) == [
        ("x", "sharding", one, both)
    ]


def test_a_trace_is_compared_with_the_nearest_earlier_one():
    step, net = jitted(), make_net()
    step(net, X)
    step(net, X[:1], train=False)
    step(net, X, y=X)
    step(net, X[:2], train=False)
    assert [row[:4] for row in explain(step).rows] == [
        (2, 1, "x", "shape"),
        (2, 1, "train", "argument"),
        (3, 1, "batch['y']", "argument"),
        (4, 2, "x", "shape"),
    ]


def test_many_differences_of_one_kind_are_one_line():
    step, net = jitted(), make_net()
    step(net, X)
    for block in (*net.blocks, net.head):
        block.up.set_value(jnp.ones((2, 2), jnp.bfloat16))
    paths = "net.blocks[0].up", "net.blocks[1].up", "net.head.up"
    assert tuple(row[0] for row in rows(step, (net, X))) == paths
    assert str(explain(step)).splitlines()[2:] == [
        "  2      1        net.blocks[0].up (+2 alike)  dtype  float32  bfloat16"
    ]


def test_a_long_table_says_what_it_leaves_out():
    step = nnx.jit(lambda **kw: 0)
    for count in range(9):
        step(**{f"x{i}": X for i in range(count * count)})
    found = explain(step)
    *_, rest = lines = str(found).splitlines()
    assert found.traces == 9 and len(lines) < 40
    assert rest == "  ... and those of 2 earlier traces"
    assert "  9               ... and 10 more" in lines
    assert max(row.trace for row in found.rows) == 9


def test_a_function_that_is_made_anew_is_told_from_its_twin():
    step = nnx.jit(lambda f: None, static_argnums=0)
    for _ in range(2):
        step(lambda: None)
    ((_, what, was, now),) = rows(step)
    assert what == "static argument" and was.startswith("<lambda> (test_rec")
    assert now == "a different one, not equal"


def test_values_and_keys_in_containers_have_their_paths():
    step = nnx.jit(lambda batch, *rest: None)
    key = jax.random.key(0)
    first = {"a": [X, {"b": X}], "k": key}, X
    second = {"a": [X, {"b": X[0]}], "k": jax.random.key_data(key)}, X, X
    assert [row[:2] for row in rows(step, first, second)] == [
        ("batch['a'][1]['b']", "shape"),
        ("batch['k']", "shape"),
        ("batch['k']", "dtype"),
        ("rest[1]", "argument"),
    ]


def test_variables_that_hold_containers_and_refs_are_named():
    def make(**options):
        table = nnx.Variable({"p": jnp.ones(2), "q": jnp.ones(2)})
        return zoo.Box(table=table, kernel=nnx.Param(jnp.ones(2), **options))

    step, holder = nnx.jit(lambda holder: None), make()
    step(holder)
    holder.table.set_value({"p": jnp.ones(2), "q": jnp.ones(3)})
    step(holder)
    step(make(ref=True))
    assert [row[1:] for row in explain(step).rows] == [
        (1, "holder.table.q", "shape", "(2,)", "(3,)"),
        (1, "holder.kernel", "type", "float32[2]", "Ref{float32[2]}"),
    ]


def test_an_array_added_to_the_container_of_a_variable_is_one_line():
    step, model = nnx.jit(lambda model: 1), nnx.Dict(v=nnx.Variable({"a": X}))
    step(model)
    model.v.set_value({"a": X, "b": jnp.ones(3)})
    assert rows(step, (model,)) == [("model['v'].b", "added", "nothing", "float32[3]")]


def test_a_graphdef_and_a_state_as_arguments_are_looked_into():
    step, net = nnx.jit(lambda graphdef, state: None), make_net()
    calls = [nnx.split(net)]
    net.head.flag = False
    calls += [nnx.split(net)]
    net.head.up = nnx.Param(jnp.ones(3), tag="x")
    paths = [row[0] for row in rows(step, *calls, nnx.split(net))]
    assert paths == ["graphdef.head.flag", "state['head']['up']"]


# ------------------------------------------------------------------- what is accepted


class Runner(zoo.Scale):
    @nnx.jit
    def run(self, x):
        return self.w[...]


def run(runner, x):
    return runner.w[...]


RUNNER = Runner()
ACCEPTED = {
    "method": RUNNER.run,
    "partial": functools.partial(nnx.jit(run), RUNNER),
    "cached_partial": nnx.cached_partial(nnx.jit(run), RUNNER),
    "jit_partial": nnx.jit_partial(run, RUNNER, graph=False),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_functions_with_bound_arguments_are_accepted(name):
    assert rows(ACCEPTED[name], (X[0],), (X,)) == [("x", "shape", "(2,)", "(4, 2)")]


@pytest.mark.parametrize(
    "f",
    [jax.jit(lambda x: x), nnx.grad(sum), print, Runner(), 3],
    ids=["jax.jit", "grad", "built in", "module", "number"],
)
def test_what_was_not_made_by_jit_is_refused(f):
    with pytest.raises(TypeError, match="expects a function made by nnx.jit") as caught:
        explain(f)
    assert "@nnx.jit" in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(TypeError, match="at_most_traces expects"):
        with nnx.debugging.at_most_traces(f, 1):
            raise AssertionError("not reached")


def test_functions_without_a_second_trace_have_nothing_to_explain():
    step = jitted()
    assert str(explain(step)) == "step was not traced." and not explain(step).rows
    step(make_net(), X)
    step(make_net(), X)
    assert str(explain(step)) == "step was traced once."


# --------------------------------------------------------------------- at_most_traces


def test_more_traces_than_allowed_fail_with_the_table():
    step, net = jitted(), make_net()
    step(net, X[:3])
    with pytest.raises(AssertionError) as caught:
        with nnx.debugging.at_most_traces(step, 1):
            step(net, X)
            step(net, X[:1])
    title, _, *lines = str(caught.value).splitlines()
    assert title == "step was traced twice in a block that allows 1, because of:"
    assert [line.split() for line in lines] == [
        ["2", "1", "x", "shape", "(3,", "2)", "(4,", "2)"],
        ["3", "2", "x", "shape", "(4,", "2)", "(1,", "2)"],
    ]


def test_traces_before_the_block_do_not_count():
    step, net = jitted(), make_net()
    step(net, X)
    with nnx.debugging.at_most_traces(step, 0):
        step(net, X)
    with pytest.raises(AssertionError, match="traced once in a block that allows 0"):
        with nnx.debugging.at_most_traces(step, 0):
            step(net, X[:1])


def test_an_error_in_the_block_is_the_one_that_is_raised():
    step = jitted()
    with pytest.raises(ZeroDivisionError):
        with nnx.debugging.at_most_traces(step, 0):
            step(make_net(), X)
            raise ZeroDivisionError


# ------------------------------------------------------------------- what is recorded


def test_what_jax_had_dropped_is_told():
    step, net = jitted(), make_net()
    step(net, X)
    jax.clear_caches()
    gc.collect()
    step(net, X)
    assert "JAX had dropped" in str(explain(step)) and explain(step).traces == 2


def test_a_list_that_was_changed_in_place_is_not_called_a_dropped_trace():
    # What it was before is not known any more: both traces refer to the same list.
    net = make_net()
    net.log = nnx.static([])
    step = nnx.jit(lambda net, x: net.log.append(1))
    step(net, X)
    step(net, X)
    assert "list or dict in a static attribute was changed" in str(explain(step))


def test_calls_without_jit_and_traces_that_raise_do_not_count():
    def fail(x):
        raise ZeroDivisionError

    step, failing = jitted(), nnx.jit(fail)
    with jax.disable_jit():
        step(make_net(), X)
    with pytest.raises(ZeroDivisionError):
        failing(X)
    assert explain(step).traces == explain(failing).traces == 0


def test_a_trace_by_another_thread_while_placements_are_noted_is_no_error():
    step = nnx.jit(lambda x: x)
    step(X)
    noted, (trace,) = step.traces, step.traces.latest

    class Elsewhere:
        def signature(self):
            noted.latest.append(trace)

    noted.latest.append(Elsewhere())
    jax.jit(lambda x: -x).lower(X).compile()
    noted.called(trace.signature(), [jnp.array(X)], count=0)
    assert len(noted.latest) == 3 and len(trace.placements) == 2


def test_traces_inside_other_transforms_are_seen():
    step = nnx.jit(lambda x: x)
    jax.vmap(step)(X)
    jax.vmap(step, axis_name="i")(X)
    jax.jit(step)(X[0])  # as in the first one
    (row,) = explain(step).rows
    assert row == (2, 1, "axis_env", "JAX configuration", "no axes", "i=4")


def test_records_are_bounded_and_keep_nothing_alive():
    step, given = nnx.jit(lambda x: x), []
    with jax.checking_leaks():
        for size in range(1, 41):
            x = jax.device_put(np.ones(size))
            step(x)
            given.append(weakref.ref(x))
    del x
    gc.collect()
    assert [ref() for ref in given] == [None] * 40
    found = explain(step)
    traces = [row.trace for row in found.rows]
    assert found.traces == traces[-1] == 40 and len({*traces}) < 20


# ------------------------------------------------------------------- the log of JAX


def test_the_log_of_jax_shows_calls_in_short(caplog):
    step, net = jitted(), make_net()
    with jax.explain_cache_misses(True), caplog.at_level(logging.WARNING):
        step(net, X)
        step(net, X, train=False)
    assert "<call with net: Box of 3 leaves, x: array>" in caplog.text
    assert "<call with net: Box of 3 leaves, x: array, train=False>" in caplog.text
    assert "object at 0x" not in caplog.text


def test_a_call_is_shortened_to_two_hundred_characters(caplog):
    step = nnx.jit(lambda text, x: x, static_argnums=0)
    with jax.explain_cache_misses(True), caplog.at_level(logging.WARNING):
        for letter in "st":
            step(letter * 1000, X)
    assert "<call with text='ttt" in caplog.text and "t" * 200 not in caplog.text


# ------------------------------ a static attribute that makes all traces, is told once


@pytest.fixture
def told():
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("graftree")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def train(model, x):
    return x


def test_a_static_attribute_that_counts_is_told_of_once(mode, told):
    step, model = nnx.jit(train, **mode), zoo.Box(inner=nnx.Dict(step=0))
    for count in range(6):
        assert len(told) == (count > 2)
        model.inner.step = count
        step(model, 1.0)
    for words in ("train", "model.inner.step, most recently 0, 1, 2", "Variable"):
        assert words in told[0]


def test_static_arguments_are_meant_so(mode, told):
    step = nnx.jit(lambda x, n: x, static_argnames="n", **mode)
    for count in range(5):
        step(1.0, n=count)
    assert told == []


def test_nothing_is_told_of_shapes_settings_or_changes_of_several_kinds(mode, told):
    step, model = nnx.jit(train, **mode), zoo.Box(inner=nnx.Dict(step=0))
    for count in range(5):
        step(model, np.ones(count))
    for count in range(5):
        model.inner.step, model.inner.other = count, -count
        step(model, 1.0)
    for count in range(5):
        model.inner = nnx.Dict({f"step{count}": 1})
        step(model, 1.0)
    assert told == []


def test_values_that_come_back_are_not_told_of(told):
    step, model = nnx.jit(train), nnx.Dict(step=0)
    for count in range(8):
        model.step = count % 2
        step(model, 1.0)
    assert told == []
