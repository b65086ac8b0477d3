"""Order, iter_graph and relatives, map, recursive_map, find_duplicates (3 and 8).

Also chains of Modules that are deeper than Python's stack, and classes that are
registered.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, tables
from tests.strategies import Block, Hidden, Moments, Node, Pair, param

NODES, STATE = "_pytree__nodes", "_pytree__state"


def listed(node, graph=None):
    return [path for path, _ in nnx.iter_graph(node, graph=graph)]


# -------------------------------------------------------------------------------- order


def test_order_is_by_key_not_by_insertion(graph):
    m = Block(b=param(), _a=param(), B=param(), a=param())
    assert list(nnx.state(m, graph=graph)) == ["B", "_a", "a", "b"]
    node = {10: param(), 2: param()}
    assert list(nnx.state(node, graph=graph)) == [2, 10]


def test_integer_items_are_in_the_order_of_numbers():
    node = nnx.List([param() for _ in range(12)])
    node.extra = param()
    assert list(nnx.state(node)) == [*range(12), "extra"]


def test_containers_are_sorted_by_field_and_restored_in_place(graph):
    pair, moments = Pair(second=param(2.0), first=param(1.0)), Moments(param(), 3)
    state = nnx.state((pair, moments), graph=graph)
    assert list(state[0]) == ["first", "second"]
    merged = nnx.merge(*nnx.split((pair, moments), graph=graph))
    assert merged[0] == pair and merged[1].variance is moments.variance


def test_mixed_keys_of_a_dict():
    for graph, error in ((True, TypeError), (False, ValueError)):
        with pytest.raises(error):
            nnx.split({1: param(), "a": param()}, graph=graph)


def test_jax_paths_become_paths():
    tu, convert = jax.tree_util, nnx.graphlib.jax_to_nnx_path
    entries = [tu.SequenceKey(1), tu.DictKey((2, "x")), tu.GetAttrKey("name")]
    assert convert((*entries, tu.FlattenedIndexKey(3))) == (1, (2, "x"), "name", 3)
    with pytest.raises(ValueError, match="Invalid key"):
        convert((tu.DictKey(object()),))


# --------------------------------------------------------------------------- iter_graph


class Linear(nnx.Module):
    def __init__(self):
        self.w, self.b = param(), param()
        self.din, self.dout = 2, 3


def test_graph_mode_visits_statics_and_each_object_once():
    m = Linear()
    names = [NODES, STATE, "b", "din", "dout", "w"]
    assert listed([m, m]) == [*[(0, name) for name in names], (0,), ()]


def test_bookkeeping_sorts_before_lower_case_names():
    assert listed(Block(B=1, a=2)) == [("B",), (NODES,), (STATE,), ("a",), ()]


def test_tree_mode_does_not_visit_statics():
    assert listed(Linear(), graph=False) == [(STATE,), ("b",), ("w",), ()]


def test_arrays_statics_and_singletons_come_once_per_path():
    array = jnp.ones(1)
    node = [array, array, 3, 3, None, None, (), ()]
    assert listed(node) == [*[(i,) for i in range(8)], ()]
    assert listed(node, graph=False) == [*[(i,) for i in range(8)], ()]


def test_shared_containers_variables_and_cycles_come_once():
    p, m = param(), Block()
    held, m.me = [p], m
    assert listed([held, held, p]) == [(0, 0), (0,), ()]
    assert listed(m) == [(NODES,), (STATE,), ()]


def test_variables_are_not_entered():
    assert listed([nnx.Variable({"x": param()})]) == [(0,), ()]


def test_iter_graph_is_lazy(graph):
    p = param()
    assert next(nnx.iter_graph([p, p], graph=graph)) == ((0,), p)


def test_duplicates_raise_in_tree_mode_while_iterating():
    p = param()
    told = "Duplicate Param", "found at paths", "- a/0\n", "- b\n"
    with comparisons.raises(ValueError, *told):
        listed({"a": [p], "b": p}, graph=False)


# ------------------------------------------------------------------------ iter_children


def test_iter_children_lists_objects_with_each_key(graph):
    inner, p = Block(), param()
    m = Block(b=inner, a=inner, p=p, array=jnp.ones(1), n=3, held=nnx.data([p]))
    children = [("a", inner), ("b", inner), ("p", p)]
    assert list(nnx.iter_children(m, graph=graph)) == children
    modules = [("a", inner), ("b", inner)]
    assert list(nnx.iter_module_children(m, graph=graph)) == modules


def test_iter_children_takes_containers(graph):
    inner = Block()
    for items in ([inner, 1], nnx.List([inner, 1])):
        assert list(nnx.iter_children(items, graph=graph)) == [(0, inner)]
    assert list(nnx.iter_children({"a": inner}, graph=graph)) == [("a", inner)]


def test_refs_are_children_and_streams_are_nodes():
    m = Block(ref=jax.new_ref(jnp.ones(1)), rngs=nnx.Rngs(0))
    assert [key for key, _ in nnx.iter_children(m)] == ["ref", "rngs"]
    assert [key for key, _ in nnx.iter_module_children(m)] == ["rngs"]


@pytest.mark.parametrize("function", [nnx.iter_children, nnx.iter_module_children])
@pytest.mark.parametrize("x", [param(), jnp.ones(2), 3])
def test_iter_children_refuses_leaves_on_the_first_next(function, x):
    with pytest.raises(ValueError, match="Expected a graph node, got.*graph=False"):
        next(function(x, graph=True))
    with pytest.raises(ValueError, match="Expected a pytree node, got"):
        next(function(x, graph=False))


def test_iter_modules_lists_modules_and_the_root_last(graph):
    held = nnx.data([{"a": Block()}])
    m = Block(a=nnx.List([Block(), Block()]), b=held, node=Node(), p=param())
    found = list(nnx.iter_modules(m, graph=graph))
    paths = [("a", 0), ("a", 1), ("a",), ("b", 0, "a"), ()]
    assert [path for path, _ in found] == paths
    assert found[-1][1] is m


# ---------------------------------------------------------------------------------- map


def test_map_makes_a_new_node(graph):
    m = Block(a=nnx.Param(jnp.ones(2), tag="x"), b=param(), c=jnp.ones(2))

    def f(path, leaf):
        return leaf if path == ("b",) else leaf * 2

    mapped = nnx.map(f, m, graph=graph)
    assert mapped is not m and type(mapped.a) is nnx.Param and mapped.a.tag == "x"
    assert mapped.a[...].tolist() == mapped.c.tolist() == [2.0, 2.0]
    assert mapped.b is m.b and m.a[...].tolist() == [1.0, 1.0]
    raw = lambda _, x: x[...]  # noqa: E731
    assert nnx.map(raw, m, graph=graph, recreate_variables=False).b is m.b[...]


def test_map_calls_once_for_shared_variables():
    p, calls = param(), []
    mapped = nnx.map(lambda path, v: calls.append(path) or v + 1, Block(a=p, b=p))
    assert calls == [("a",)] and mapped.a is mapped.b


def test_map_of_a_single_leaf():
    assert nnx.map(lambda path, x: (path, x.shape), jnp.ones(2)) == ((), (2,))
    mapped = nnx.map(lambda path, v: v + 1, param())
    assert type(mapped) is nnx.Param


# ------------------------------------------------------------------------ recursive_map


def test_recursive_map_goes_bottom_up_and_leaves_the_input(graph):
    p = param()
    m = Block(a=p, inner=Block(b=jnp.ones(2)))

    def f(path, x):
        return x * 2 if isinstance(x, jax.Array) else x

    mapped = nnx.recursive_map(f, m, graph=graph)
    assert mapped.inner.b.tolist() == [2.0, 2.0] and mapped.a is p
    assert m.inner.b.tolist() == [1.0, 1.0] and mapped.inner is not m.inner


def test_the_result_for_the_root_is_returned(graph):
    assert nnx.recursive_map(lambda path, x: path, Block(), graph=graph) == ()


def test_containers_are_rebuilt(graph):
    node = (1, Pair(2, [3]), Moments(4, {"a": 5}), None)

    def f(path, x):
        return x + 1 if isinstance(x, int) else x

    mapped = nnx.recursive_map(f, node, graph=graph)
    assert mapped == (2, Pair(3, [4]), Moments(5, {"a": 6}), None)


def test_static_containers_are_rebuilt_where_something_in_them_changes():
    m = Block(changed={"b": [1], "a": [2]}, same={"b": [3], "a": [4]})
    mapped = nnx.recursive_map(lambda path, x: 5 if x == 2 else x, m, graph=True)
    assert mapped.changed == {"b": [1], "a": [5]} and m.changed["a"] == [2]
    assert mapped.changed["b"] is m.changed["b"] and mapped.same is m.same


def test_new_variables_are_bound_in_the_copy_only(graph):
    m = Block(a=param(), b=[1])

    def f(path, x):
        return nnx.BatchStat(x[...] + 1) if isinstance(x, nnx.Param) else x

    mapped = nnx.recursive_map(f, m, graph=graph)
    assert type(mapped.a) is nnx.BatchStat and mapped.a[...].tolist() == [2.0, 2.0]
    assert type(m.a) is nnx.Param and m.a[...].tolist() == [1.0, 1.0]


def test_nodes_can_be_swapped():
    def f(path, x):
        return Node(inner=x) if isinstance(x, Linear) else x

    m = Block(a=Linear(), b=nnx.List([Linear()]))
    mapped = nnx.recursive_map(f, m)
    assert type(mapped.a) is type(mapped.b[0]) is Node
    assert mapped.a.inner.w is m.a.w and type(m.a) is Linear


def test_shared_nodes_are_mapped_once():
    shared, calls = Linear(), []
    p = param()

    def f(path, x):
        calls.append(path)
        return x

    mapped = nnx.recursive_map(f, Block(a=shared, b=shared, c=p, d=p, e=None, f=None))
    assert mapped.a is mapped.b and mapped.a is not shared and mapped.c is mapped.d
    assert ("a",) in calls and ("b",) not in calls and ("d",) not in calls
    assert {("e",), ("f",)} <= set(calls)


def test_recursive_map_sees_what_iter_graph_yields(graph):
    m, seen = Block(a=param(), n=3, inner=Linear()), []
    nnx.recursive_map(lambda path, x: seen.append(path) or x, m, graph=graph)
    assert seen == listed(m, graph=graph)


def test_cycles_are_refused():
    m = Block(inner=Block())
    m.inner.up = m
    with pytest.raises(ValueError, match="Found cycle in the graph at path 'inner/up'"):
        nnx.recursive_map(lambda path, x: x, m, graph=True)


# ---------------------------------------------------------------------- find_duplicates


def test_groups_and_paths_are_in_visiting_order():
    p, q, inner = param(), param(), Block()
    m = Block(a=q, b=p, c=q, d=inner, e=[1], f=p, g=p, h=inner)
    expected = [[("a",), ("c",)], [("b",), ("f",), ("g",)], [("d",), ("h",)]]
    assert nnx.find_duplicates(m) == expected


def test_what_counts_as_a_duplicate():
    array, numpy, ref = jnp.ones(1), np.ones(1), jax.new_ref(jnp.ones(1))
    m = Block(a=array, b=array, c=numpy, d=numpy, e=ref, f=ref, g="x", h="x")
    pairs = ("ab", "cd", "ef")
    assert nnx.find_duplicates(m) == [[(first,), (other,)] for first, other in pairs]
    assert not nnx.find_duplicates(Block(a=nnx.Param(array), b=nnx.Param(array)))


def test_what_is_in_a_shared_list_is_listed_and_below_a_node_nothing():
    held, inner = [param()], Block(a=param())
    assert nnx.find_duplicates([held, held]) == [[(0, 0), (1, 0)]]
    assert nnx.find_duplicates([inner, inner]) == [[(0,), (1,)]]


def test_cycles_are_duplicates():
    m = Block()
    m.s = m
    assert nnx.find_duplicates(m) == [[(), ("s",)]]
    held = [param()]
    held.append(held)
    assert nnx.find_duplicates(held) == []


def test_only_filters_the_repeated_occurrences():
    p, inner = param(), Block()
    node = [p, p, inner, inner]
    assert nnx.find_duplicates(node, only=nnx.Param) == [[(0,), (1,)]]
    assert nnx.find_duplicates(node, only=nnx.BatchStat) == []
    assert not nnx.find_duplicates([param(), param()])


def test_objects_made_while_listing_are_no_duplicates():
    class Fresh:
        pass

    jax.tree_util.register_pytree_node(
        Fresh, lambda x: ((np.ones(3), np.ones(3)), None), lambda aux, children: Fresh()
    )
    assert nnx.find_duplicates([Fresh() for _ in range(20)]) == []


def test_classes_that_are_no_pytrees_are_nodes_in_graph_mode():
    m = Hidden(a=param())
    assert [p for p, x in nnx.iter_graph([m], graph=True) if x is m.a] == [(0, "a")]


# ---------------------------------- chains as deep as Flax takes them apart (issue 12)


def chain(length):
    model = None
    for _ in range(length):
        model = Block(weight=nnx.Param(jnp.array(1.0)), inner=nnx.data(model))
    return model


def write(model):
    model.weight[...] += 1


@pytest.fixture(scope="module")
def deep():
    # Python's limit is 1000 frames, of which pytest takes some.
    return chain(700)


OPERATIONS = {
    "split": lambda m: nnx.split(m)[1],
    "merge": lambda m: nnx.merge(*nnx.split(m)),
    "pure dict": lambda m: nnx.merge(nnx.graphdef(m), nnx.to_pure_dict(nnx.state(m))),
    "flat state": lambda m: nnx.from_flat_state(nnx.to_flat_state(nnx.state(m))),
    "update": lambda m: nnx.update(m, nnx.state(m)),
    "clone": nnx.clone,
    "iter_graph": lambda m: list(nnx.iter_graph(m)),
    "iter_graph of a tree": lambda m: list(nnx.iter_graph(m, graph=False)),
    "train": lambda m: m.train(),
    "pop": lambda m: nnx.pop(m, nnx.Cache),
    "jax.jit": jax.jit(lambda m: m.weight * 2),
    "jit": nnx.jit(write),
    "jit of a tree": nnx.jit(write, graph=False),
    "grad": nnx.grad(lambda m: m.weight[...] ** 2),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_deep_chain_is_taken_apart(operation, deep):
    for _ in range(3):  # the second time plans and results are made
        OPERATIONS[operation](deep)


# ----------------------------------------------------------------------------- the peer


def example(library):
    """An object made of classes that both libraries have."""
    shared = library.Linear(2, 2, rngs=library.Rngs(0))
    return library.Dict(
        b=library.List([shared, library.Param(1), 3, library.data([shared, 4])]),
        a=shared,
        B=library.Dict(x=library.data({10: jnp.ones(1), 2: (None, np.ones(1))})),
        rngs=library.Rngs(1, dropout=2),
        norm=library.BatchNorm(2, rngs=library.Rngs(0)),
        odd=library.data("text"),
    )


def test_paths_are_those_of_the_peer(peer):
    ours, theirs = example(nnx), example(peer)
    assert nnx.flatten(ours)[1].paths == tuple(peer.flatten(theirs)[1].paths)
    assert nnx.find_duplicates(ours) == peer.find_duplicates(theirs)
    for graph in (True, False):
        found, expected = (
            [path for path, x in library.iter_children(node, graph=graph)]
            for library, node in ((nnx, ours), (peer, theirs))
        )
        assert found == expected


# ---------------------------------------------------------- classes that are registered

graphlib = nnx.graphlib


class Bag:
    """A graph node by registration; the attribute ``kind`` is its metadata."""

    def __init__(self, kind, **items):
        self.kind = kind
        self.items = items


graphlib.register_graph_node_type(
    Bag,
    lambda bag: (list(bag.items.items()), bag.kind),
    lambda bag, key, value: bag.items.__setitem__(key, value),
    lambda bag, key: bag.items.pop(key),
    lambda kind: Bag(kind),
    lambda bag: bag.items.clear(),
    lambda bag, items: bag.items.update(items),
)


class Row:
    """A container by registration, immutable."""

    def __init__(self, *items):
        self.items = items


graphlib.register_pytree_node_type(
    Row,
    lambda row: (list(enumerate(row.items)), None),
    lambda children, aux: Row(*[value for _, value in children]),
)


class Marked:
    """A graph node that says which children are data."""

    def __init__(self):
        self.data = 3
        self.static = 4


def children_of_marked(x):
    data, static = graphlib.DataElem(x.data), graphlib.StaticElem(x.static)
    return [("d", data), ("s", static)], None


graphlib.register_graph_node_type(
    Marked,
    children_of_marked,
    setattr,
    lambda x, key: x.__dict__.pop(key),
    lambda aux: Marked(),
    lambda x: None,
    lambda x, items: vars(x).update(items),
)


# --------------------------------------------------------------------- registered types


def test_update_reaches_below_what_a_registered_node_says_is_data():
    marked = Marked()
    marked.data = [param(), {"b": param()}]
    nnx.update(marked, jax.tree.map(lambda x: x + 1, nnx.state(marked)))
    assert (marked.data[0][...] == param()[...] + 1).all()
    assert (marked.data[1]["b"][...] == param()[...] + 1).all()


def test_a_registered_graph_node_is_shared():
    bag = Bag("paper", w=param(), n=3)
    bag.items["me"] = bag
    merged = nnx.merge(*nnx.split([bag, bag]))
    assert merged[0] is merged[1] and merged[0].items["me"] is merged[0]
    assert merged[0].kind == "paper" and merged[0].items["n"] == 3
    assert merged[0].items["w"] is bag.items["w"]


def test_metadata_of_a_registered_node_is_structure():
    assert nnx.graphdef(Bag("b")) != nnx.graphdef(Bag("a")) == nnx.graphdef(Bag("a"))


def test_registered_nodes_are_updated_popped_and_listed():
    bag = Bag("paper", b=param(), a=nnx.BatchStat(jnp.ones(1)))
    nnx.update(bag, {"b": jnp.zeros(2), "c": jnp.ones(1)})
    assert bag.items["b"][...].tolist() == [0.0, 0.0] and "c" in bag.items
    assert list(nnx.pop(bag, nnx.BatchStat)) == ["a"] and "a" not in bag.items
    assert [path for path, _ in nnx.iter_graph(bag)] == [("b",), ("c",), ()]


def test_marked_children():
    graphdef, state = nnx.split(Marked())
    assert state == nnx.State({"d": 3})
    merged = nnx.merge(graphdef, {"d": 5})
    assert (merged.d, merged.s) == (5, 4)


def test_a_registered_node_that_is_no_pytree_is_a_leaf_in_tree_mode():
    bag = Bag("paper", w=param())
    assert nnx.state([bag], graph=False) == nnx.State({0: bag})


def test_registered_containers_are_rebuilt_and_immutable():
    row = Row(param(), jnp.ones(1), 3)
    graphdef, state = nnx.split([row, row])
    merged = nnx.merge(graphdef, state)
    assert merged[0] is not merged[1] and merged[0].items[0] is merged[1].items[0]
    assert merged[0].items[2] == 3
    nnx.update(row, {0: jnp.zeros(2)})
    assert row.items[0][...].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="Cannot set key 1"):
        nnx.update(row, {1: jnp.zeros(1)})
    with pytest.raises(ValueError, match="Cannot pop key 0"):
        nnx.pop(row, nnx.Param)


@pytest.mark.parametrize("kind", [Bag, Row, Block, nnx.Rngs, list, dict])
def test_types_are_registered_once(kind):
    with pytest.raises(ValueError, match="is already registered"):
        graphlib.register_graph_node_type(kind, *[None] * 6)
    with pytest.raises(ValueError, match="is already registered"):
        graphlib.register_pytree_node_type(kind, None, None)


# --------------------------------------------------------------------------- predicates

PREDICATES = (
    graphlib.is_node,
    graphlib.is_graph_node,
    graphlib.is_node_module,
    graphlib.is_pytree_node,
    graphlib.is_node_leaf,
)


@tables.cases(
    "values, expected",
    ([Block(), Hidden(), nnx.Rngs(0), nnx.List(), Bag("a")], "TTTFF"),
    ([param(), nnx.Param(jnp.ones(1), ref=True)], "FTFFT"),
    ([jax.new_ref(jnp.ones(1))], "FTFFT"),
    ([[], {}, (), None, nnx.State({}), Moments(1, 2), Pair(1, 2), Row()], "TFFTF"),
    ([jnp.ones(1), np.ones(1), jax.random.key(0)], "FFFFT"),
    ([3, "text", jax.ShapeDtypeStruct((), jnp.float32), object()], "FFFFF"),
)
def test_predicates(values, expected):
    for x in values:
        found = "".join("FT"[predicate(x)] for predicate in PREDICATES)
        assert found == expected, type(x)


def test_pytrees_count_as_pytree_nodes_on_request():
    nodes = Block(), Hidden(), Bag("a")
    found = [graphlib.is_pytree_node(x, check_graph_registry=False) for x in nodes]
    assert found == [True, False, False]


def test_predicates_of_types():
    found = [graphlib.is_node_type(kind) for kind in (Block, list, nnx.Param, int)]
    assert found == [True, True, False, False]
    assert graphlib.get_node_impl(Block()) is graphlib.get_node_impl_for_type(Block)
    assert graphlib.get_node_impl(param()) is None


def test_traced_values_are_classified_as_what_they_stand_for():
    seen = []

    def f(x):
        traced = x, jax.new_ref(x)
        seen.extend(
            (graphlib.is_node_leaf(v), graphlib.is_graph_node(v)) for v in traced
        )

    jax.jit(f)(jnp.ones(1))
    assert seen == [(True, False), (True, True)]


class Labeled:
    """A container whose making looks into what it contains."""

    def __init__(self, module):
        self.module = module
        self.label = module.name


graphlib.register_pytree_node_type(
    Labeled,
    lambda x: ([("m", x.module)], None),
    lambda items, aux: Labeled(items[0][1]),
)


def test_containers_are_made_around_complete_nodes():
    merged = nnx.merge(*nnx.split(Block(held=nnx.data(Labeled(Block(name="inner"))))))
    assert merged.held.label == "inner"
