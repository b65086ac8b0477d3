"""Stands where Python looks for Flax, and gives way to the drop-in.

`graftree.dropin` puts the folder of this file on the path of the processes that it
starts. So nothing runs in them before one imports Flax, and nothing at all in those
that never do. This file then takes its folder off the path, installs the drop-in, and
lets Flax be imported again. Where the environment has no ``GRAFTREE_DROPIN`` any more,
or another Python that lacks Graftree was started, it only gets out of the way.
"""

import importlib
import importlib.util
import os
import pathlib
import sys


def _give_way() -> None:
    folder = str(pathlib.Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    del sys.modules[__name__]
    is_wanted = os.environ.get("GRAFTREE_DROPIN", "0") not in ("", "0")
    if is_wanted and importlib.util.find_spec("graftree") is not None:
        importlib.import_module("graftree.dropin").install()
    importlib.import_module(__name__)  # the import system hands out what it finds here


if __name__ == "flax":  # and not where a tool reads it by its path
    _give_way()
