"""view, with_attributes and view_info."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx


class Block(nnx.Module):
    def __init__(self, rngs=None):
        self.deterministic = False
        self.decode = False
        self.weight = nnx.Param(jnp.ones(2))
        self.array = jnp.zeros(2)
        self.rngs = rngs

    def set_view(
        self, deterministic: bool | None = None, *, decode: bool | None = None
    ):
        """Configures the block.

        Args:
            deterministic: whether dropout is off,
                also in the attention.
            decode (bool): whether to use the cache
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode


class Settings(nnx.Pytree):
    def __init__(self):
        self.seen = ()

    def set_view(self, **options):
        self.seen = tuple(sorted(options))


class Model(nnx.Module):
    def __init__(self, rngs=None):
        self.a = Block(rngs)
        self.blocks = nnx.List([Block(rngs)])


# ------------------------------------------------------------------------------ view


def test_view_configures_a_copy():
    model = Model()
    view = nnx.view(model, deterministic=True)
    assert type(view) is Model and view is not model
    assert view.a.deterministic and view.blocks[0].deterministic
    assert not model.a.deterministic and not model.blocks[0].deterministic


def test_view_shares_variables_and_arrays():
    model = Model()
    view = nnx.view(model, deterministic=True)
    assert view.a.weight is model.a.weight
    assert view.a.array is model.a.array


def test_view_is_a_copy_also_without_options():
    model = Model()
    view = nnx.view(model)
    assert view is not model and view.a is not model.a


def test_view_keeps_sharing():
    block = Block()
    view = nnx.view([block, block], decode=True)
    assert view[0] is view[1] is not block


def test_view_passes_each_node_the_options_it_names():
    view = nnx.view([Block(), Settings()], decode=True, other=1)
    assert view[0].decode and view[1].seen == ("decode", "other")


def test_view_configures_only_the_nodes_that_match():
    view = nnx.view(Model(), only=nnx.PathContains("a"), deterministic=True)
    assert view.a.deterministic and not view.blocks[0].deterministic


def test_view_configures_children_first():
    order = []

    class Node(nnx.Module):
        def __init__(self, name, child=None):
            self.name, self.child = name, nnx.data(child)

        def set_view(self, option):
            order.append(self.name)

    nnx.view(Node("parent", Node("child")), option=1)
    assert order == ["child", "parent"]


def test_view_may_make_new_variables():
    class Lazy(nnx.Module):
        def set_view(self, size: int | None = None):
            self.cache = nnx.Cache(jnp.zeros(size))

    model = Lazy()
    assert nnx.view(model, size=3).cache.shape == (3,)
    assert not hasattr(model, "cache")


def test_view_names_the_options_that_nobody_takes():
    message = r"Unused keys found in nnx.view: \['unknown', 'wrong'\]"
    with pytest.raises(ValueError, match=message):
        nnx.view(Model(), wrong=1, unknown=2, decode=True)
    view = nnx.view(Model(), raise_if_not_found=False, wrong=1, decode=True)
    assert view.a.decode


def test_view_does_not_take_rngs_for_configurable():
    rngs = nnx.Rngs(0)
    model = Model(rngs)
    nnx.view(model, deterministic=True)
    with pytest.raises(ValueError, match="Unused keys"):
        nnx.view(rngs, deterministic=True)
    assert rngs.default.count[...] == 0


def test_view_of_a_cycle_raises():
    model = Model()
    model.a.parent = model
    with pytest.raises(ValueError, match="Found cycle"):
        nnx.view(model, decode=True)


def test_view_of_shared_variables_raises_in_tree_mode():
    block = Block()
    with pytest.raises(ValueError, match="found at paths"):
        nnx.view([block, block], decode=True, graph=False)


def test_view_works_on_containers_in_both_modes(graph):
    view = nnx.view({"m": [Block()]}, decode=True, graph=graph)
    assert view["m"][0].decode


def test_view_of_a_closed_over_model_works_in_a_trace():
    model = Model()

    @jax.jit
    def f(x):
        view = nnx.view(model, deterministic=True)
        return x + view.a.deterministic

    assert f(1) == 2


# -------------------------------------------------------------------- with_attributes


def test_with_attributes_sets_them_on_a_copy():
    model = Model()
    copy = nnx.with_attributes(model, decode=True)
    assert copy.a.decode and copy.blocks[0].decode and not model.a.decode
    assert copy.a.weight is model.a.weight


def test_with_attributes_sets_them_on_matching_modules_only():
    copy = nnx.with_attributes(Model(), only=nnx.PathContains("blocks"), decode=True)
    assert copy.blocks[0].decode and not copy.a.decode


def test_with_attributes_names_what_was_found_nowhere():
    message = r"instance of the following attributes: \['unknown'\]"
    with pytest.raises(ValueError, match=message):
        nnx.with_attributes(Model(), unknown=1, decode=True)
    copy = nnx.with_attributes(Model(), raise_if_not_found=False, unknown=1)
    assert not hasattr(copy, "unknown")


def test_with_attributes_works_in_both_modes(graph):
    assert nnx.with_attributes([Model()], decode=True, graph=graph)[0].a.decode


# ------------------------------------------------------------------------- view_info


def test_view_info_lists_parameters_with_their_description():
    expected = """\
Block:
  deterministic: bool | None = None
    whether dropout is off,
    also in the attention.
  decode: bool | None = None
    whether to use the cache"""
    assert nnx.view_info(Model(nnx.Rngs(0))) == expected


def test_view_info_shows_the_signature_of_undocumented_methods():
    class Bare(nnx.Module):
        def set_view(self, a, *, b: int = 3, **kw):
            pass

    assert nnx.view_info(Bare()).splitlines()[1] == (
        "  set_view(self, a, *, b: int = 3, **kw)"
    )


def test_view_info_does_without_descriptions():
    class Undescribed(nnx.Module):
        def set_view(self, a: int, b: str = "x", *args: int, **kwargs: int):
            """Says nothing of the first.

            Args:
                b: the second

            Returns:
                nothing
            """

    lines = nnx.view_info(Undescribed()).splitlines()[1:]
    assert lines == ["  a: <class 'int'>", "  b: <class 'str'> = x", "    the second"]


def test_view_info_lists_each_class_once_by_name():
    lines = nnx.view_info([Settings(), Block(), Block()]).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "Block:",
        "Settings:",
    ]


def test_view_info_describes_matching_nodes_only():
    assert nnx.view_info([Settings(), Block()], only=Settings).startswith("Settings:")


def test_view_info_is_empty_without_configurable_nodes():
    assert nnx.view_info([nnx.Rngs(0), 1]) == ""


@pytest.mark.peers
def test_view_info_equals_that_of_a_peer():
    peer = pytest.importorskip("flax.nnx")

    def set_view(self, a: int | None = None, *, b: "str" = "x", **kwargs) -> None:
        """Configures.

        Args:
          a: first line
            second line
          b: the other
        """

    def info(nnx):
        Documented = type(nnx.Module)("Documented", (nnx.Module,), {})
        Bare = type(nnx.Module)("Bare", (nnx.Module,), {})
        Documented.set_view = set_view
        Bare.set_view = lambda self, a, b=1: None
        return nnx.view_info([Documented(), Bare()])

    assert info(nnx) == info(peer)
