"""Colours on a terminal."""

import io
import sys
import types

from graftree.core.text import colors


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_coloured_and_a_file_is_not(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert colors.default() is colors.COLOR
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert colors.default() is colors.NO_COLOR


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert not colors.supports_color()


def test_ipython_is_coloured(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    shell = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert colors.supports_color()


def test_no_color_is_empty():
    assert set(colors.NO_COLOR) == {""}
