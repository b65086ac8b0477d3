"""The libraries that are compared, as far as they are installed."""

import importlib
import importlib.metadata
import importlib.util
import platform
from typing import Any

import jax

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


def versions(*packages: str) -> str:
    """What figures were measured with: of Python, of JAX, and of these packages."""
    found = [f"Python {platform.python_version()}", f"JAX {jax.__version__}"]
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return f"{', '.join(found)}, {jax.default_backend()}"
