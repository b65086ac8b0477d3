"""Paths, patterns of them, and the places by which messages name an object.

The first are parts of the package that no public function gives or takes without a
model. Filters are at the end.
"""

import dataclasses
import pickle
import re
import typing

import jax
import optax
import pytest
from hypothesis import given, strategies as st

import graftree as nnx
from graftree import filterlib as filters
from graftree.core import paths, patterns
from tests import comparisons, strategies, tables, zoo

MATCHES = [
    ("encoder", ["encoder"], ["encoder.mlp", "encoder2", "decoder"]),
    ("encoder.mlp", ["encoder.mlp"], ["encoder", "mlp", "encoder.mlp.out"]),
    ("blocks[3].mlp", ["blocks[3].mlp"], ["blocks[31].mlp", "blocks[2].mlp"]),
    ("blocks.3.mlp", ["blocks[3].mlp", "blocks['3'].mlp"], ["blocks[2].mlp"]),
    ("blocks/3/mlp", ["blocks[3].mlp"], ["blocks[2].mlp"]),
    ("blocks[*]", ["blocks[0]", "blocks.a"], ["blocks", "blocks[0].mlp"]),
    ("blocks.*", ["blocks[0]", "blocks.a"], ["blocks", "blocks[0].mlp"]),
    ("blocks[1:3]", ["blocks[1]", "blocks[2]"], ["blocks[0]", "blocks[3]", "blocks.a"]),
    ("blocks[:1]", ["blocks[0]"], ["blocks[1]"]),
    ("blocks[2:]", ["blocks[2]", "blocks[99]"], ["blocks[1]", "blocks['2']"]),
    ("**", ["", "a", "a.b[0]"], []),
    ("a.**", ["a", "a.b", "a.b[0].c"], ["b", "b.a"]),
    ("**.a", ["a", "b.a", "b[0].c.a"], ["a.b", "ba"]),
    ("a.**.b", ["a.b", "a.c.b", "a.b.b"], ["a", "a.b.c", "b"]),
    ("**.a.**", ["a", "a.b", "c.a.b"], ["b", "ab"]),
    ("*_proj", ["q_proj", "_proj"], ["proj", "a.q_proj", "q_projs"]),
    ("l*r*0", ["layer_0", "lr0"], ["layer_1"]),
    ("{q,v}", ["q", "v"], ["k", "q.v", "qv"]),
    ("**.{q,v}_proj", ["q_proj", "a.v_proj"], ["k_proj"]),
    ("{a.b,c}.d", ["a.b.d", "c.d"], ["a.d", "a.b.c.d"]),
    ("a[{0,2}]", ["a[0]", "a[2]"], ["a[1]"]),
    ("{a,{b,c}.d}", ["a", "b.d", "c.d"], ["b", "c"]),
    ("['my key'].x", ["['my key'].x"], ["my.x"]),
    ("a['{b,c}']", ["a['{b,c}']"], ["a.b", "a.c"]),
    ("a['3']", ["a['3']"], ["a[3]"]),
    ("a[('b', 0)]", ["a[('b', 0)]"], ["a.b"]),
]


def read(text):
    """A path from how it is printed, by means of Python's own parser."""

    class Reader:
        def __init__(self, path):
            object.__setattr__(self, "path", path)

        def __getattribute__(self, name):
            return Reader((*object.__getattribute__(self, "path"), name))

        def __getitem__(self, key):
            return Reader((*object.__getattribute__(self, "path"), key))

    dot = "" if not text or text.startswith("[") else "."
    reader = eval(f"root{dot}{text}", {"root": Reader(())})
    return object.__getattribute__(reader, "path")


@pytest.mark.parametrize(("text", "matching", "others"), MATCHES)
def test_patterns_match_whole_paths(text, matching, others):
    pattern = patterns.Pattern(text)
    for expected, some in ((True, matching), (False, others)):
        assert [pattern(read(path)) for path in some] == [expected] * len(some)


@strategies.examples(20, 300)
@given(st.lists(st.text(min_size=1) | st.integers(0, 99), min_size=1).map(tuple))
def test_a_printed_path_is_the_pattern_of_itself(path):
    assert read(paths.dotted(path)) == path
    assert tuple(map(paths.key_of, paths.steps_of(paths.dotted(path)))) == path
    assert patterns.Pattern(paths.dotted(path))(path)


@given(
    st.lists(st.sampled_from("ab"), max_size=5),
    st.lists(st.sampled_from(["a", "b", "*", "**"]), min_size=1, max_size=4),
)
def test_stars_mean_what_they_mean_in_regular_expressions(path, steps):
    parts = {"*": "[ab]", "**": "[ab]*", "a": "a", "b": "b"}
    expected = re.fullmatch("".join(parts[s] for s in steps), "".join(path))
    assert patterns.Pattern(".".join(steps))(tuple(path)) == (expected is not None)


MALFORMED = {
    "": "a step is missing",
    "a.": "a step is missing",
    ".a": "expected a step at '.a'",
    "a..b": "expected a step at '.b'",
    "a b": "expected a step at ' b'",
    "a[0]b": "expected a step at 'b'",
    "a[": "expected a step at '['",
    "a]": "expected a step at ']'",
    "{a": "a brace is not closed or not opened",
    "a}": "a brace is not closed or not opened",
    "a[-1]": "[-1] counts from the end",
    "a[:-1]": "[:-1] counts from the end",
    "a[b]": "[b] is not an index, range, star or quoted key",
    "a[0:4:2]": "[0:4:2] is not an index",
    "a**": "'**' must be a step by itself, got 'a**'",
    "a.(q|v)": "'(q|v)' is not a name: the only wildcard is '*'",
    r"blocks\d": "is not a name: the only wildcard is '*'",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_patterns_are_refused_with_reason_and_way_out(text):
    told = repr(text), MALFORMED[text], "Write a path such as"
    with comparisons.raises(ValueError, *told):
        patterns.to_predicate(text)


def test_selections_are_patterns_classes_predicates_and_lists_of_these():
    scale, counter = zoo.Scale(), zoo.Counter()
    cases = [("a", scale), ("b", scale), ("a", counter), ("b", counter)]

    def chosen(where):
        predicate = patterns.to_predicate(where)
        return "".join("01"[predicate((name,), x)] for name, x in cases)

    assert chosen("a") == "1010" and chosen(zoo.Scale) == "1100"
    assert chosen(zoo.Scale | zoo.Counter) == chosen(...) == "1111"
    assert chosen(lambda path, x: path == ("b",)) == "0101"
    assert chosen(["a", zoo.Scale]) == "1110"
    assert chosen(nnx.All(patterns.Pattern("a"), zoo.Scale)) == "1000"
    assert chosen([]) == "0000"


@pytest.mark.parametrize("where", [None, True, 3, {"a": 1}, ["a", 3]])
def test_what_selects_nothing_is_refused(where):
    with pytest.raises(TypeError, match="selects no parts of a model.\nPass a pattern"):
        patterns.to_predicate(where)


def test_patterns_are_equal_by_text_and_can_be_pickled():
    pattern, alike = patterns.Pattern("a.{b,c}"), patterns.Pattern("a.{b,c}")
    assert pickle.loads(pickle.dumps(pattern)) == pattern == alike
    assert hash(pattern) == hash(alike)


def test_the_error_for_no_match_names_what_is_near_or_what_there_is():
    known = [("encoder", "blocks", i, "mlp") for i in range(20)]
    error = patterns.no_match_error("f: where", "encoder.blocks[3].mpl", known)
    assert "where='encoder.blocks[3].mpl' matches no module of the model" in str(error)
    assert "similar paths: encoder.blocks[3].mlp" in str(error)
    error = patterns.no_match_error("f: where", nnx.Conv, known)
    assert str(error).startswith("f: where=Conv matches no module of the model.\n")
    assert str(error).endswith("encoder.blocks[11].mlp, and 8 more")


# ------------------------------------------------------------------------------ paths


@given(st.lists(st.integers()) | st.lists(st.text()))
def test_keys_of_one_type_have_the_order_of_python(keys):
    assert paths.sorted_keys(keys) == sorted(keys) == sorted(keys, key=paths.sort_key)


KEYS = st.integers() | st.text() | st.tuples(st.integers() | st.text())


@strategies.examples(40, 300)
@given(st.lists(st.lists(KEYS).map(tuple), unique=True))
def test_order_of_paths_is_that_of_their_keys_and_numbers_come_first(some):
    ordered = [path for path, _ in paths.sorted_by_path([(p, None) for p in some])]
    assert ordered == sorted(some, key=paths.path_sort_key)
    kinds = [type(path[0]) for path in ordered if path]
    assert kinds == sorted(kinds, key=[int, str, tuple].index)


@pytest.mark.parametrize("key", [[1], object()], ids=["unhashable", "unordered"])
def test_invalid_keys_of_jax_are_refused(key):
    with pytest.raises(ValueError, match="Invalid key"):
        paths.from_jax((jax.tree_util.DictKey(key),))


def test_paths_are_printed_with_slashes_or_as_expressions():
    assert paths.to_string(("a", 0, "b")) == "a/0/b"
    assert (paths.to_string(()), paths.to_string((), root="<root>")) == ("", "<root>")
    [(path, _)] = jax.tree.leaves_with_path({"a": [1.0]})
    assert paths.keystr(path) == "['a'][0]"
    for path in [("blocks", 0, "mlp"), ("a",), ("a", "b", 12)]:
        assert patterns.Pattern(paths.to_string(path))(path)


# ------------------------------------------------------------------- places in messages


def message_of(write):
    with pytest.raises(nnx.errors.TraceContextError) as caught:
        jax.jit(lambda x: write())(1.0)
    return str(caught.value)


@pytest.mark.parametrize("transform", [jax.jit, nnx.jit])
def test_an_object_of_another_trace_is_named_by_where_it_was_reached(transform):
    # Issue 12: it said which type, not which of them.
    model = nnx.Dict(layers=nnx.List([zoo.Scale()]))

    def write(layer, x):
        layer.w[...] = layer.w[...] * x

    def rename(layer, x):
        layer.tag = "x"

    for change, where in ((write, "layers[0].w"), (rename, "layers[0]")):
        refused = nnx.errors.TraceContextError
        with comparisons.raises(refused, f"at model.{where}\n"):
            transform(lambda x, change=change: change(model.layers[0], x))(1.0)


def test_the_longest_path_from_a_local_name_is_found():
    weight = nnx.Param(1.0)
    model = nnx.Dict(layers=nnx.List([nnx.Dict(weight=weight)]))
    assert "at model.layers[0].weight\n" in message_of(lambda: weight.set_value(2))
    message = message_of(lambda: setattr(model, "a", 2))
    assert "at model\n" in message and "'a'" in message
    model.back = model
    message = message_of(lambda: setattr(model.back.layers, "a", 2))
    assert "at model.layers\n" in message
    hidden = iter([nnx.Param(1.0)])
    assert "\n  at " not in message_of(lambda: next(hidden).set_value(2))


def test_a_path_begins_at_a_name_of_the_program_not_of_ours():
    loss, rngs = nnx.metrics.Average(), nnx.Rngs(0)
    model = zoo.Scale()
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(0.1))
    grads = nnx.state(nnx.clone(model))
    writes = {
        "loss.total": lambda: loss.update(values=1.0),
        "rngs.default.count": lambda: nnx.Linear(2, 3, rngs=rngs),
        "optimizer.model.w": lambda: optimizer.update(grads),
    }
    for path, write in writes.items():
        assert f"at {path}\n" in message_of(write)


class Dataset(list):
    """So long that nothing should go through it."""

    def __iter__(self):
        raise AssertionError


def test_long_containers_are_not_searched_for_the_path():
    dataset, model = Dataset(range(100_000)), nnx.Dict(weight=nnx.Param(1.0))
    assert "at model.weight\n" in message_of(lambda: model.weight.set_value(2))
    assert len(dataset) == 100_000


def test_the_dict_of_a_programs_names_is_no_part_of_a_path():
    names = {"model": zoo.Scale(), "message_of": message_of}
    exec("found = message_of(lambda: model.w.set_value(2))", names)
    assert "at model.w\n" in names["found"]


# ------------------------------------------------------------------------------ filters


def matches(filter_, value, path=()):
    return filters.to_predicate(filter_)(path, value)


@tables.cases(
    "filter_, text",
    ("x", "WithTag('x')"),
    (int, "OfType(<class 'int'>)"),
    (True, "Everything()"),
    (..., "Everything()"),
    (False, "Nothing()"),
    (None, "Nothing()"),
    ([int, "x"], "Any(OfType(<class 'int'>), WithTag('x'))"),
    ((), "Any()"),
    (filters.Not(...), "Not(Everything())"),
    (filters.All("x", None), "All(WithTag('x'), Nothing())"),
    (filters.PathContains("a"), "PathContains('a', exact=True)"),
    (filters.PathIn(("a",), ("b",)), "PathIn(('a',),('b',))"),
)
def test_filters_become_predicates_that_print_what_they_are(filter_, text):
    assert repr(filters.to_predicate(filter_)) == text


def test_callable_is_its_own_predicate():
    assert filters.to_predicate(matches) is matches


@pytest.mark.parametrize("invalid", [3, 1.5, {"a"}], ids=str)
def test_anything_else_is_refused(invalid):
    with comparisons.raises(TypeError, "Invalid collection filter", repr(invalid)):
        filters.to_predicate(invalid)


@tables.cases(
    "filter_, matching, others",
    (nnx.Param[jax.Array], [nnx.Param(1)], [nnx.BatchStat(1), "text"]),
    (nnx.Param | int, [nnx.Param(1), 1], [nnx.BatchStat(1), "text"]),
    (typing.Union[int, nnx.Param], [nnx.Param(1), 1], ["text"]),  # noqa: UP007
    (int | nnx.Param[jax.Array], [nnx.Param(1), 1], [nnx.BatchStat(1)]),
    ("a", [nnx.Variable(0, tag="a")], [nnx.Variable(0, tag="b"), nnx.Variable(0)]),
    (nnx.Variable, [nnx.Param(0)], [0]),
    (nnx.Param, [nnx.Param(0)], [nnx.Variable(0)]),
    (filters.OfType((int, str)), [1, "a"], [1.0]),
    ([int, str], ["a"], [1.0]),
    ([], [], ["a"]),
    (filters.All(), ["a"], []),
    (filters.All(str, filters.Not(int)), ["a"], [1]),
    (filters.Any(), [], ["a"]),
    ids=str,
)
def test_filters_match_values(filter_, matching, others):
    for expected, values in ((True, matching), (False, others)):
        assert [matches(filter_, value) for value in values] == [expected] * len(values)


@tables.cases(
    "filter_, path, expected",
    (filters.PathContains("a"), ("b", "a"), True),
    (filters.PathContains("a"), ("ab",), False),
    (filters.PathContains(1), ("1",), False),
    (filters.PathContains(1, exact=False), ("10",), True),
    (filters.PathContains("in", exact=False), ("linear", 0), True),
    (filters.PathContains("x", exact=False), ("linear", 0), False),
    (filters.PathIn(("a",), ("b", 1)), ("b", 1), True),
    (filters.PathIn(("a",), ("b", 1)), ("b",), False),
    ("a", ("a",), False),
)
def test_filters_match_paths(filter_, path, expected):
    assert matches(filter_, None, path) is expected


def test_combinations_stop_at_the_first_answer():
    def fails(path, value):
        raise AssertionError("was called")

    assert filters.Any(..., fails)((), 1) and not filters.All(None, fails)((), 1)


@tables.cases(
    "make",
    lambda: filters.WithTag("a"),
    lambda: filters.OfType(int),
    lambda: filters.PathContains("a"),
    lambda: filters.PathIn(("a",), ("b",)),
    lambda: filters.Any(int, "a"),
    lambda: filters.All(int, "a"),
    lambda: filters.Not(int),
    filters.Everything,
    filters.Nothing,
)
def test_filters_equal_and_hash_by_content(make):
    assert make() == make() and hash(make()) == hash(make())
    assert make() != filters.Not(make())


def test_different_kinds_with_equal_content_differ():
    assert filters.Any(int) != filters.All(int)
    assert filters.PathIn(("a",), ("b",)) == filters.PathIn(("b",), ("a",))


def test_filters_are_frozen_and_take_what_they_combine_by_position():
    with pytest.raises(dataclasses.FrozenInstanceError):
        filters.WithTag("a").tag = "b"
    with pytest.raises(TypeError):
        filters.Not(collection_filter=int)


@pytest.mark.parametrize("rest", [..., True])
def test_rest_must_come_last(rest):
    told = "can only be used as the last filters", f"{rest!r} at index 1"
    with comparisons.raises(ValueError, *told):
        filters.filters_to_predicates(["a", rest, int])


def test_rest_may_follow_rest_and_predicates_may_stand_anywhere():
    assert filters.filters_to_predicates([..., True]) == (filters.Everything(),) * 2
    assert len(filters.filters_to_predicates([filters.Everything(), int])) == 2
    (found,) = filters.filters_to_predicates(filters=["a"])
    assert found == filters.to_predicate(filter="a")
