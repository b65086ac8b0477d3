"""Test set-up shared by the tests and by the doctests in ``src``.

JAX runs on the CPU, as eight devices, so that sharding is tested everywhere. It
refuses implicit rank promotion: a missing axis is an error, not a broadcast.

The tests compile thousands of tiny programs, which is most of their time. So these are
compiled with little optimization, as in JAX's own tests, and kept in ``out/jax-cache``,
for all processes of pytest and for the next run. A program that a test starts compiles
for itself, unless it asks for them (``tests/compiled_programs.py``).
"""

import gc
import importlib.util
import os

# For the backend, which is not made yet, and for programs that tests start. JAX itself
# is imported: pytest looks up the warnings that pyproject.toml names.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# A folder named here would be written to by those programs too, in JAX's own way, which
# leaves an entry half-written for a while (tests/compiled_programs.py).
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax
import jax.numpy as jnp
import pytest

from tests import compiled_programs, modes, tables

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# To leave JAX's frames out of each exception takes a tenth of the time of the tests.
jax.config.update("jax_traceback_filtering", "off")

compiled_programs.keep_in_whole_files()
compiled_programs.share_contexts()


# What imports a package that may be missing: Flax, of the bridge to Linen; griffe, of
# the site.
_NEEDED = {
    "flax": [
        "src/graftree/interop/bridge/*",
        "tests/interop/bridge/*",
        "tests/contract/test_bridge/*",
    ],
    "griffe": ["website/docstrings.py"],
}
collect_ignore_glob = [
    pattern
    for package, patterns in _NEEDED.items()
    if importlib.util.find_spec(package) is None
    for pattern in patterns
]


def pytest_addoption(parser):
    """Adds what ``make test`` asks for at each end of the support range."""
    parser.addoption(
        "--end",
        choices=["oldest", "newest"],
        help="leave out the pages that the other end runs; and at the oldest run each "
        "test in one of its modes, with a part of many other parameters",
    )


# Where `make test`, too, runs a test with each pair of its parameters.
_EACH_PAIR = "tests/contract/", "tests/weights/", "tests/core/test_variables.py"
# But not where what is special to a family of layers is tested.
_LAYERS = "tests/contract/test_nn_layers/"
_OF_ALL_LAYERS = f"{_LAYERS}test_common_rules.py", f"{_LAYERS}test_errors.py"
# Where each row of a table compiles a model, `make test` runs a part of them.
_A_MODEL_FOR_EACH_ROW = (
    *(_LAYERS, "tests/nn/", "tests/surgery/", "tests/decoding/", "tests/training/"),
    *("tests/memory/", "tests/precision/", "tests/examples/", "tests/forecast/"),
)


def pytest_collection_modifyitems(config, items):
    """Leaves out what the options leave out, and says what `make test` does."""
    short = [item for item in items if not item.get_closest_marker("long")]
    for item in tables.out_of_turn(short):
        is_of_family = item.nodeid.startswith(_LAYERS)
        has_each_pair = _OF_ALL_LAYERS if is_of_family else _EACH_PAIR
        if not item.nodeid.startswith(has_each_pair):
            item.add_marker(pytest.mark.long)
    costly = [
        item
        for item in short
        if item.nodeid.startswith(_A_MODEL_FOR_EACH_ROW)
        and not item.nodeid.startswith(_OF_ALL_LAYERS)
        and not item.get_closest_marker("long")
    ]
    for item in tables.beyond_a_part(costly):
        item.add_marker(pytest.mark.long)
    _skip_those_of_caches(items)
    left_out = _left_out(config.getoption("--end"), items)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def _skip_those_of_caches(items):
    """Without caches all tests mean the same, but for those of what these remember."""
    import graftree as nnx

    for item in items if not nnx.config.graftree_caches else ():
        mark = item.get_closest_marker("caches")
        if mark:
            item.add_marker(pytest.mark.skip(reason=f"caches are off: {mark.args[0]}"))


def _left_out(end, items):
    """What does not run at this end: each page runs at one of the two."""
    pages = [item for item in items if item.get_closest_marker("pages")]
    of_oldest = {*pages[::8]}
    if end != "oldest":
        return of_oldest if end else set()
    # Whether the shapes of layers are those of their annotations is seen here only.
    whole = {x for x in items if x.nodeid.startswith(_OF_ALL_LAYERS[0])}
    others = [x for x in items if x not in whole and not x.get_closest_marker("pages")]
    return {*items} - whole - of_oldest - {*modes.by_turns(others)}


def pytest_collection_finish():
    """Makes garbage collection rare, and has it pass over all tests and modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace):
    """Gives every doctest ``nnx``, ``jax`` and ``jnp``."""
    import graftree as nnx

    doctest_namespace.update(nnx=nnx, jax=jax, jnp=jnp)


def pytest_runtest_logfinish():
    """Bounds memory after each test: those of the pages are all in one file."""
    compiled_programs.keep_within_bound()


@pytest.fixture(autouse=True, scope="module")
def little_in_memory():
    """Bounds garbage collection to what the file at hand has made."""
    yield
    compiled_programs.forget_those_of_a_file()
    # Tests that collect garbage would else walk through what all files before left.
    gc.collect()
    gc.freeze()
