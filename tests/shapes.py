"""A pytest plugin that checks the array annotations of ``nn/`` and ``training/``.

``python -m pytest -p tests.shapes PATH...`` wraps the functions of both. When a call
returns, arguments and result must have the dtypes and shapes of their annotations; an
axis name stands for one size within a call. A call that raises is not checked, because
tests pass wrong arguments on purpose; nor are those of tests marked ``any_arguments``.
"""

import functools
import importlib
import inspect
import pkgutil
import typing

import jaxtyping
import pytest
from beartype.door import is_bearable

import graftree as nnx

PACKAGES = ("graftree.nn", "graftree.training")


def pytest_configure():
    """Wraps all functions, before the first test module is imported."""
    wrapped = {}
    for module in modules():
        for owner, function in functions(module):
            wrapped[function] = checked(function)
            setattr(owner, function.__name__, wrapped[function])
    for name, value in list(vars(nnx).items()):
        if inspect.isfunction(value) and value in wrapped:
            setattr(nnx, name, wrapped[value])


# Whether the calls of the present test are checked.
_checks = [True]


@pytest.fixture(autouse=True)
def checks_of_marked_tests_are_off(request):
    """Leaves out the tests that are marked so."""
    _checks[0] = request.node.get_closest_marker("any_arguments") is None
    yield
    _checks[0] = True


def modules():
    """The modules of both packages."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            yield importlib.import_module(found.name)


def functions(module):
    """The functions and methods written in a module, with their owners."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    classes = [owner for owner in classes if owner.__module__ == module.__name__]
    for owner in [module, *classes]:
        for name, value in list(vars(owner).items()):
            if (
                inspect.isfunction(value)
                and value.__name__ == name
                and inspect.unwrap(value).__code__.co_filename == module.__file__
            ):
                yield owner, value


def checked(function):
    """The function, with its annotations checked after each call."""
    hints = typing.get_type_hints(function)
    hints = {name: hint for name, hint in hints.items() if has_shapes(hint)}
    if not hints:
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        if not _checks[0]:
            return result
        given = signature.bind(*args, **kwargs).arguments
        with jaxtyping.jaxtyped("context"):
            for name, value in [*given.items(), ("return", result)]:
                for part in parts(signature.parameters.get(name), value):
                    if name in hints and not is_bearable(part, hints[name]):
                        call_name = f"{function.__module__}.{function.__qualname__}"
                        raise AssertionError(
                            f"{call_name}: `{name}` is {describe(part)}, annotated as "
                            f"{hints[name]}"
                        )
        return result

    return call


def has_shapes(hint):
    """Whether an annotation, or a part of it, says the shape of an array."""
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(has_shapes, typing.get_args(hint)))


def parts(parameter, value):
    """The values of ``*args`` and of ``**kwargs``, and the one of other parameters."""
    kind = parameter and parameter.kind
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return value
    return value.values() if kind is inspect.Parameter.VAR_KEYWORD else [value]


def describe(value):
    """Shape and dtype of an array, and the text of anything else."""
    return f"{value.dtype}{value.shape}" if hasattr(value, "shape") else repr(value)
