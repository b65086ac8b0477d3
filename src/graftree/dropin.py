"""Runs programs written for Flax NNX on Graftree, unchanged.

===========================================  ======================================
``python -m graftree.dropin script.py ...``  one program; ``-m module ...`` as well
``GRAFTREE_DROPIN=1 ./launch.sh``            any launcher, and each Python it starts,
                                             after ``--install-startup``, see `main`
``pytest -p graftree.dropin``                a test suite, pytest-xdist included
``graftree.dropin.install()``                this process, from now on; `uninstall`
===========================================  ======================================

``flax.nnx`` is then the public namespace without the names that Flax lacks, with all
its sub-module paths. The rest of ``flax`` depends on the machine:

- With Flax installed it is Flax's own. The parts that both have are joined:
  exceptions of ``flax.nnx`` are caught as those of ``flax.errors``,
  ``flax.config.update`` reaches the flags of this package; logical axis rules agree.
- Without Flax there are the parts that programs for NNX use (``flax.struct``,
  ``flax.traverse_util``, ...). A missing part raises an ``ImportError`` that says so.

`interop.name_tables` has all names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import runpy
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

import graftree
from graftree import config, errors
from graftree.core import exporting
from graftree.core.variables import sharding
from graftree.interop import flax_names

FLAX_VERSION = "0.12.12"
"""The release of Flax whose API this is; ``flax.__version__`` where Flax is missing."""

VARIABLE = "GRAFTREE_DROPIN"
"""The environment variable under which Pythons that find `STARTUP` do `install`."""

STARTUP = str(pathlib.Path(graftree.__file__).absolute().parent / "startup")
"""The folder with a file ``flax.py`` that does `install` when it is imported."""

_NAMESPACE = "flax.nnx"
# The entry that `pkgutil` finds in the namespace's ``__path__``; no such folder exists.
_NAMESPACE_PATH = f"{__file__}/{_NAMESPACE}"


def install() -> None:
    """Makes ``import flax.nnx`` give Graftree, from now on.

    Processes that this one starts do the same: they get the environment variable
    `VARIABLE`, and `STARTUP` on their path. Installing twice is installing once.

    Raises:
        RuntimeError: If ``flax.nnx`` of Flax has been imported already.

    Example:
        >>> from graftree import dropin
        >>> dropin.VARIABLE
        'GRAFTREE_DROPIN'
    """
    if _installed():
        return
    if _NAMESPACE in sys.modules:
        raise RuntimeError(
            "flax.nnx is already imported, so its name can no longer mean Graftree.\n"
            "Call graftree.dropin.install() before anything imports flax.nnx, or start "
            f"the program with `python -m graftree.dropin` or {VARIABLE}=1."
        )
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    sys.path_hooks.append(_FolderNames)
    finder.undo += [
        lambda: sys.path_hooks.remove(_FolderNames),
        lambda: sys.path_importer_cache.pop(_NAMESPACE_PATH, None),
    ]


def uninstall() -> None:
    """Undoes `install`: the next ``import flax.nnx`` finds Flax, if it is there.

    A program keeps the names it has already imported. Does nothing if nothing is
    installed.

    Example:
        >>> from graftree import dropin
        >>> dropin.uninstall()
    """
    for finder in _installed():
        sys.meta_path.remove(finder)
        for undo in reversed(finder.undo):
            undo()


def _installed() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``flax.nnx`` and all below it; without Flax, all of ``flax``.

    Attributes:
        has_flax: Whether Flax itself is installed.
        undo: The functions that undo installing and importing, in order.
        environment: The values that JAX has read from the environment.
    """

    def __init__(self) -> None:
        self.has_flax = "flax" in sys.modules or _has_origin(_find_flax())
        self.environment = _environment()
        self.undo: list[Callable[[], object]] = [_reach_processes()]
        exporting.withdraw()
        self.undo.append(exporting.install)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, subpath = fullname.partition(".")
        if target is not None and flax_names.is_table(fullname):
            # It is reloaded under its own name.
            return importlib.machinery.ModuleSpec(fullname, self)
        if top != "flax":
            return None
        if subpath == "nnx" or subpath.startswith("nnx."):
            exists = subpath == "nnx" or flax_names.has_path(
                subpath.removeprefix("nnx.")
            )
        elif self.has_flax:
            return None if subpath else _find_flax()
        else:
            exists = not subpath or flax_names.has_beside(subpath)
        if not exists:
            # Without `name`, or `from flax import linen` shows its own message.
            raise ModuleNotFoundError(self._missing(fullname))
        # A package, so that the import system asks for the modules below it.
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname == _NAMESPACE:
            spec.origin = graftree.__file__
            spec.submodule_search_locations = [_NAMESPACE_PATH]
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if flax_names.is_table(name):
            return  # there is nothing to run
        self.undo.append(lambda: _forget(name))
        if name == "flax":
            _fill_top(module)
        elif name == _NAMESPACE:
            _follow_environment(self.environment)
            _fill_namespace(module)
            if self.has_flax:  # which may be another one, after a second import
                self.undo += [_join_errors(), _join_flags(), _join_axis_rules()]
        else:
            # The import system takes the module it finds here: our own, unchanged.
            sys.modules[name] = _own_module(name)

    def _missing(self, name: str) -> str:
        way_out = "Run the program without graftree.dropin"
        if not self.has_flax:
            way_out = "Install Flax beside Graftree (pip install flax)"
        return (
            f"No module named {name!r}: Graftree has no counterpart for it.\n"
            f"{way_out}, or replace this import."
        )


class _FolderNames:
    """Lists the modules below ``flax.nnx``: `pkgutil` looks in its ``__path__``."""

    def __init__(self, path: str) -> None:
        if path != _NAMESPACE_PATH:
            raise ImportError(f"{path} is not the path of {_NAMESPACE}.")

    def find_spec(self, fullname: str, target: Any = None) -> None:
        """Finds nothing: `_Finder` was asked before."""

    def iter_modules(self, prefix: str = "") -> list[tuple[str, bool]]:
        """Lists the names, and whether they are packages."""
        entries = flax_names.list_below("")
        return [(prefix + name, is_package) for name, is_package in entries]


def _find_flax() -> importlib.machinery.ModuleSpec | None:
    """Finds Flax itself, past the file of its name in `STARTUP`."""
    path = [entry for entry in sys.path if entry != STARTUP]
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None or isinstance(finder, _Finder):
            continue
        if spec := find_spec("flax", path):
            return spec
    return None


def _has_origin(spec: importlib.machinery.ModuleSpec | None) -> bool:
    return spec is not None and spec.origin is not None  # a mere folder has none


def _reach_processes() -> Callable[[], object]:
    """Lets the processes that this one starts install the drop-in, until undone."""
    former = os.environ.get(VARIABLE)
    is_inherited = STARTUP in _python_path()
    os.environ[VARIABLE] = "1"
    if not is_inherited:
        _set_variable("PYTHONPATH", os.pathsep.join([STARTUP, *_python_path()]))
    if STARTUP not in sys.path:
        # Where Python puts the entries of PYTHONPATH: after the folder of the program.
        # Processes of `multiprocessing` take over this path.
        sys.path.insert(1, STARTUP)

    def undo() -> None:
        _set_variable(VARIABLE, former)
        if not is_inherited:
            rest = [entry for entry in _python_path() if entry != STARTUP]
            _set_variable("PYTHONPATH", os.pathsep.join(rest) or None)
        sys.path[:] = [entry for entry in sys.path if entry != STARTUP]

    return undo


def _python_path() -> list[str]:
    value = os.environ.get("PYTHONPATH", "")
    return [entry for entry in value.split(os.pathsep) if entry]


def _own_module(name: str) -> types.ModuleType:
    subpath = name.removeprefix("flax.")
    if subpath.startswith("nnx."):
        return importlib.import_module(f"graftree.{subpath.removeprefix('nnx.')}")
    return flax_names.beside(subpath)


def _fill_top(module: types.ModuleType) -> None:
    """Makes the module ``flax`` of a machine without Flax."""

    def attribute(name: str) -> Any:
        try:
            return importlib.import_module(f"flax.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(str(error)) from None

    module.__doc__ = "Graftree under the name of Flax."
    vars(module).update(__version__=FLAX_VERSION, __getattr__=attribute)


def _fill_namespace(module: types.ModuleType) -> None:
    """Makes ``flax.nnx``: the public namespace as programs for Flax know it."""
    beyond = flax_names.names_beyond()
    names = [name for name in vars(graftree)["__all__"] if name not in beyond]
    paths = flax_names.top_level_paths()
    starred = [*names, *sorted({*paths, *flax_names.DEPRECATED}.difference(names))]

    def attribute(name: str) -> Any:
        if name in paths:
            return importlib.import_module(f"{_NAMESPACE}.{name}")
        if name in beyond:
            raise AttributeError(
                f"Module {_NAMESPACE} has no attribute {name!r}: Flax lacks it. "
                f"Graftree has it, as graftree.{name}."
            )
        try:
            return flax_names.look_up(name)
        except AttributeError as error:
            message = str(error).replace("Module graftree", f"Module {_NAMESPACE}")
            raise AttributeError(message) from None

    module.__doc__ = graftree.__doc__
    vars(module).update({name: getattr(graftree, name) for name in names})
    vars(module).update(
        __all__=starred,
        __file__=graftree.__file__,
        __getattr__=attribute,
        __dir__=lambda: sorted({*vars(module), *starred}),
    )


def _join_errors() -> Callable[[], object]:
    """Makes our exceptions those of Flax of the same name, or Flax's in general."""
    theirs = importlib.import_module("flax.errors")
    former = [
        (kind, kind.__bases__, vars(theirs).get(kind.__name__))
        for kind in errors.GraftreeError.__subclasses__()
        if not issubclass(kind, vars(theirs).get(kind.__name__, theirs.FlaxError))
    ]
    init = vars(errors.GraftreeError).get("__init__")
    # The constructor stays that of all exceptions, although Flax's classes take others.
    errors.GraftreeError.__init__ = Exception.__init__  # type: ignore[method-assign]
    for kind, bases, counterpart in former:
        kind.__bases__ = (*bases, counterpart or theirs.FlaxError)
        if counterpart:
            setattr(theirs, kind.__name__, kind)

    def undo() -> None:
        for kind, bases, counterpart in former:
            kind.__bases__ = bases
            if counterpart:
                setattr(theirs, kind.__name__, counterpart)
        if init is None:
            del errors.GraftreeError.__init__

    return undo


def _join_flags() -> Callable[[], object]:
    """Lets ``flax.config.update`` reach our flags, those changed before included."""
    theirs = importlib.import_module("flax.configurations").config
    if "update" in vars(theirs):
        return lambda: None  # they are joined
    update = theirs.update

    def update_both(flag: Any, value: Any, /) -> None:
        name = getattr(flag, "name", flag)  # Flax takes the holder of a flag as well
        # Flax first, for it refuses unknown names; an older one lacks flags of ours.
        if hasattr(theirs, name) or name not in config.flags():
            update(flag, value)
        if name in config.flags():
            config.update(name, value)

    for name in config.flags():
        if hasattr(theirs, name):
            config.update(name, getattr(theirs, name))
    theirs.update = update_both
    return lambda: vars(theirs).pop("update")


def _join_axis_rules() -> Callable[[], object]:
    """Keeps the logical axis rules where Flax does, for Modules of both."""
    theirs = importlib.import_module("flax.core.spmd")

    class FlaxRules:
        @property
        def in_force(self) -> Any:
            return theirs.get_logical_axis_rules()

        @in_force.setter
        def in_force(self, rules: Any) -> None:
            theirs.set_logical_axis_rules(rules)

    former = sharding.keep_rules_in(FlaxRules())
    return lambda: sharding.keep_rules_in(former)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _forget(name: str) -> None:
    """Takes a module of ours out of the import system again."""
    module = sys.modules.pop(name, None)
    package, _, attribute = name.rpartition(".")
    attributes = vars(sys.modules[package]) if package in sys.modules else {}
    if module is not None and attributes.get(attribute) is module:
        del attributes[attribute]


def pytest_addoption() -> None:
    """Installs the drop-in under ``pytest -p graftree.dropin``, before any test file.

    Of pytest's hooks this is the one that it calls before it loads a ``conftest.py``.

    Example:
        >>> from graftree import dropin
        >>> dropin.pytest_addoption.__name__
        'pytest_addoption'
    """
    install()


_NAME = "python -m graftree.dropin"
_USAGE = f"""\
usage: {_NAME} (script.py | -m module) [arguments]
       {_NAME} (--install-startup | --remove-startup)"""
_HELP = f"""\
Runs a program written for flax.nnx on Graftree, unchanged.

  script.py, -m module  the program, as for python, then its arguments
  --install-startup     from now on {VARIABLE}=1 is enough, with this Python
  --remove-startup      removes it again"""

# Python runs a line of such a file that begins with `import` whenever it starts.
_STARTUP_LINE = f"""\
import os, sys; os.environ.get({VARIABLE!r}, "0") not in ("", "0") \
and sys.path.insert(0, {STARTUP!a})
"""


# What to do with the file, and what it then means.
_COMMANDS = {
    "--install-startup": (
        "write",
        f"is installed: every Python of this environment now reads {VARIABLE}.",
    ),
    "--remove-startup": ("remove", f"does not exist: {VARIABLE} alone has no effect."),
}


def _set_startup(verb: str, meaning: str) -> None:
    file = pathlib.Path(sysconfig.get_path("purelib"), "graftree_startup.pth")
    try:
        if verb == "write":
            file.write_text(_STARTUP_LINE, encoding="utf-8")
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise SystemExit(
            f"Cannot {verb} {file}: {error.strerror}. Run this with the Python of an "
            "environment that you can modify, or start programs with "
            "`python -m graftree.dropin`."
        ) from None
    print(f"{file} {meaning}")


def main(arguments: Sequence[str]) -> None:
    """Runs a program with its arguments, as ``python script.py ...`` would.

    Or sets for this environment of Python, from now on, whether `VARIABLE` in the
    environment of a process is enough. ``--install-startup`` writes a file of one line
    into ``site-packages``, which checks the variable whenever Python starts;
    ``--remove-startup`` removes it.

    Args:
        arguments: The path of the program, or ``-m`` and the name of a module, followed
            by the program's own arguments; or only one of the two options.

    Raises:
        SystemExit: If no program is given, or there is none of that name; if the file
            can't be written or removed.

    Example:
        >>> from graftree import dropin
        >>> dropin.main([])
        Traceback (most recent call last):
        SystemExit: usage: python -m graftree.dropin (script.py | -m module) [arguments]
               python -m graftree.dropin (--install-startup | --remove-startup)
    """
    if len(arguments) == 1 and arguments[0] in _COMMANDS:
        return _set_startup(*_COMMANDS[arguments[0]])
    if arguments and arguments[0] in ("-h", "--help"):
        return print(f"{_USAGE}\n\n{_HELP}")
    is_module = list(arguments[:1]) == ["-m"]
    program = list(arguments[1:] if is_module else arguments)
    if not program or program[0].startswith("-"):
        raise SystemExit(_USAGE)
    if not is_module and not os.path.exists(program[0]):
        raise SystemExit(f"{_NAME}: there is no file {program[0]!r}")
    install()
    if is_module:
        _check_module(program[0])
    sys.argv = program
    if is_module:  # the current folder leads sys.path, as it has since `python -m`
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(pathlib.Path(program[0]).resolve().parent)
    runpy.run_path(program[0], run_name="__main__")


def _check_module(name: str) -> None:
    """Raises a `SystemExit` unless a module can be run."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # An import in a package around it may fail for its own reasons.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        raise SystemExit(f"{_NAME}: there is no module {name!r}")
    is_package = spec.submodule_search_locations is not None
    if is_package and importlib.util.find_spec(f"{name}.__main__") is None:
        raise SystemExit(f"{_NAME}: the package {name!r} has no module __main__")


def _environment() -> dict[str, str]:
    """Returns the variables of the environment that JAX reads when it is imported."""
    return {name: os.environ[name] for name in os.environ if name.startswith("JAX_")}


def _follow_environment(former: dict[str, str]) -> None:
    """Gives JAX the settings that are new in the environment since JAX was imported."""
    for name, text in _environment().items():
        option = name.lower()
        if former.get(name) == text or option not in jax.config.values:
            continue
        current = jax.config.values[option]
        value: Any = text
        if isinstance(current, bool):
            value = text.lower() in ("y", "yes", "t", "true", "on", "1")
        elif isinstance(current, (int, float)):
            value = type(current)(text)
        jax.config.update(option, value)


if __name__ == "__main__":
    # Not this copy of the module: a program could not reach it by its name.
    importlib.import_module("graftree.dropin").main(sys.argv[1:])
