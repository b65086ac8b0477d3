"""Makes ``flax.nnx`` mean Graftree in every Python that starts under a variable.

``graftree_startup.pth``, which Python reads when it starts, imports this file if the
environment has ``GRAFTREE_DROPIN``. Nothing heavy happens here: the package, and with
it JAX, is imported when a program first asks for Flax.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence


class _Waiting(importlib.abc.MetaPathFinder):
    """Installs the drop-in at the first import of Flax, and is gone."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "flax":  # which is imported before all that is below it
            return None
        sys.meta_path.remove(self)
        from graftree import dropin

        dropin.install()
        return importlib.util.find_spec(fullname)


sys.meta_path.insert(0, _Waiting())
