"""Without Flax the library works, and the bridge says what it needs."""

import subprocess
import sys

PROGRAM = """if True:
    import sys

    sys.modules["flax"] = None  # as if it were not installed
    import graftree as nnx

    assert nnx.wrappers is nnx.bridge.wrappers
    assert nnx.bridge.initializers is nnx.initializers
    assert not hasattr(nnx.bridge, "nothing")


    def message(use):
        try:
            use()
        except ImportError as error:
            assert error.name == "flax", error
            return str(error)
        raise AssertionError("no error")


    def by_import():
        from graftree.bridge.variables import to_linen_var


    for use in (lambda: nnx.bridge.ToNNX, lambda: nnx.wrappers.to_linen, by_import):
        for _ in range(2):
            text = message(use)
            assert "nnx.bridge" in text and "pip install flax" in text, text
"""


def test_the_bridge_is_an_import_error_that_says_what_to_install():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_import_statements_reach_the_bridge_without_loading_flax():
    program = """if True:
        import sys
        import graftree.bridge.wrappers
        import graftree.wrappers as wrappers
        from graftree import bridge, proxy_caller
        assert bridge.wrappers is wrappers
        assert "flax" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_accesses_are_recorded_for_later():
    program = """if True:
        from graftree import proxy_caller as p
        accessor = p.DelayedAccessor().layers[0]
        assert accessor.actions == (p.GetAttr("layers"), p.GetItem(0))
        assert accessor == p.DelayedAccessor().layers[0] != p.DelayedAccessor()
        proxy = p.CallableProxy(lambda accessor, *args: accessor("ab")(*args))
        assert proxy.replace("a", "b") == "bb"
        assert proxy[1].upper() == "B"
    """
    subprocess.run([sys.executable, "-c", program], check=True)
