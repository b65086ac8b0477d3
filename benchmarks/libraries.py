"""The libraries that are compared, as far as they are installed."""

import importlib
import importlib.util
from typing import Any

RAW = "raw JAX"
GRAFTREE = "Graftree"
FLAX = "Flax NNX"
EQUINOX = "Equinox"

MODULES = {GRAFTREE: "graftree", FLAX: "flax.nnx", EQUINOX: "equinox"}


def installed(*names: str) -> dict[str, Any]:
    """Imports those of the libraries ``names`` that are installed."""
    return {
        name: importlib.import_module(MODULES[name])
        for name in names
        if importlib.util.find_spec(MODULES[name].split(".")[0])
    }
