"""The rules of the house that a machine can hold; STYLE and design.md say why."""

import ast
import collections
import graphlib
import inspect
import json
import re
import sys
import types
import typing

import graftree as nnx
from graftree import errors
from tests import catalog, interpreters, sources, tables
from tests.contract.test_transforms import matrix

# STYLE §3: 500 as a rule; a file that is one class with its helpers may reach 700.
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60

# Tests of what nothing but the insides of the package show, each with its reason.
MOST_TESTS_OF_INTERNALS = 26

# Names with an underscore that are public all the same: those that the API publishes,
# and those of named tuples.
PUBLISHED = (
    *("_pytree__", "_object__", "_check_valid_context"),
    *("_asdict", "_fields", "_make", "_replace"),
)


def fails(violations):
    """Fails with all violations in one message, so that one run shows them all."""
    violations = sorted(violations)
    assert not violations, f"{len(violations)} violations:\n" + "\n".join(violations)


# Sub-modules of the public namespace whose names come from files of their own.
PUBLIC_MODULES = (
    *(nnx.checkpoints, nnx.debugging, nnx.decoding, nnx.forecast, nnx.memory),
    *(nnx.metrics, nnx.mixtures, nnx.precision, nnx.sharding, nnx.surgery),
    *(nnx.training, nnx.weights),
)


# ------------------------------------------------------------- the public namespace


def is_submodule(name, value):
    return isinstance(value, types.ModuleType) and value.__name__ == f"graftree.{name}"


def test_all_lists_exactly_the_public_namespace():
    listed = [name for name in nnx.__all__ if name != "__version__"]
    names = {k for k, v in vars(nnx).items() if not is_submodule(k, v)}
    missing = {name for name in names if not name.startswith("_")} - {*listed}
    unknown = {name for name in listed if not hasattr(nnx, name)}
    fails([f"not in __all__: {x}" for x in missing] + [f"no {x}" for x in unknown])
    assert len({*listed}) == len(listed)


def test_every_public_name_has_an_example_that_is_run():
    values = {name: getattr(nnx, name, None) for name in nnx.__all__}
    for module in PUBLIC_MODULES:
        values |= {name: getattr(module, name) for name in dir(module)}
    fails(
        name
        for name, value in values.items()
        if is_ours(value) and ">>>" not in (own_docstring(value) or "")
    )


def test_public_modules_list_what_type_checkers_see():
    for module in PUBLIC_MODULES:
        (source,) = [x for x in sources.package() if x.module == module.__name__]
        # `x as x` tells type checkers that the name is passed on.
        seen = [
            alias.name
            for node in source.walk(ast.ImportFrom)
            for alias in node.names
            if alias.asname == alias.name
        ]
        assert sorted(seen) == dir(module)


def test_annotations_of_all_public_signatures_can_be_evaluated():
    values = [getattr(nnx, name) for name in nnx.__all__]
    for module in PUBLIC_MODULES:
        values += [getattr(module, name) for name in dir(module)]
    for cls in filter(inspect.isclass, [*values]):
        members = [inspect.getattr_static(cls, name) for name in dir(cls)]
        values += filter(inspect.isfunction, map(inspect.unwrap, members))
    fails(
        f"{value.__module__}.{value.__qualname__}: {error}"
        for value in values
        if is_ours(value) and (error := annotations_error(value))
    )


def annotations_error(value):
    try:
        typing.get_type_hints(value)
    except NameError as error:
        return str(error)


def is_ours(value):
    """Whether it is a class or function of this package, not one passed on from JAX."""
    documented = inspect.isclass(value) or inspect.isroutine(value)
    return documented and str(value.__module__).startswith("graftree")


def own_docstring(value):
    # A class without a docstring would show that of its base.
    return vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__


def test_every_definition_without_underscore_has_a_docstring():
    exempt = ("overload", "override", "setter", "deleter")

    def is_exempt(node):
        decorators = [ast.unparse(x).rpartition(".")[2] for x in node.decorator_list]
        return any(decorator in exempt for decorator in decorators)

    fails(
        source.at(node, node.name)
        for source in sources.package()
        for node in sources.public_definitions(source.tree)
        if not ast.get_docstring(node) and not is_exempt(node)
    )


def test_every_file_has_a_docstring():
    fails(
        str(source.path)
        for source in sources.repository()
        if source.text and not ast.get_docstring(source.tree)
    )


# ------------------------------------------------------- the tables of what there is

CATALOG = "tests/catalog.py"
NO_LAYERS = {
    **{"Module": "the base", "RNNCellBase": "the base of cells"},
    **{"List": "has no call", "Dict": "has no call"},
}


def public_modules():
    """The names of the Modules that can be called."""
    values = {name: getattr(nnx, name) for name in nnx.__all__}
    return {
        name
        for name, value in values.items()
        if inspect.isclass(value) and issubclass(value, nnx.Module)
    } - {*NO_LAYERS}


def test_every_public_module_has_its_row():
    fails(
        f"{CATALOG}: add a row to LAYERS, in its family: Layer({name!r}, ...)"
        for name in public_modules() - {*catalog.BY_NAME}
    )
    fails(f"{CATALOG}: there is no nnx.{x}" for x in {*catalog.BY_NAME} - {*dir(nnx)})


def test_numbers_of_each_layer_are_tested():
    faults = []
    for row in catalog.LAYERS:
        file = f"tests/{catalog.FAMILIES[row.family].tests}"
        path = sources.ROOT / file
        text = path.read_text() if path.exists() else ""
        if not row.formula and not re.search(rf"\b{row.name}\b", text):
            where = f"the row of {row.name} a formula, or {file} tests of it"
            faults.append(f"{CATALOG}: give {where}")
    fails(faults)


def test_guides_list_each_layer_where_its_family_is():
    faults = []
    for row in catalog.LAYERS:
        family = catalog.FAMILIES[row.family]
        page = f"docs/guides/{family.page}"
        lines = (sources.ROOT / page).read_text().splitlines()
        text = "\n".join(line for line in lines if line.startswith(family.row))
        if not re.search(rf"`nnx\.{row.name}\b", text):
            faults.append(f"{page}: name `nnx.{row.name}` in the row {family.row!r}")
    (ours,) = [x for x in layers_page() if x.startswith(OURS)]
    named = {*re.findall(r"`nnx\.(\w+)`", ours)}
    expected = {row.name for row in catalog.LAYERS if row.is_ours}
    faults += [
        f"docs/guides/layers.md: {name} in one of {OURS!r} and {CATALOG}"
        for name in named ^ expected
    ]
    fails(faults)


OURS = "Flax NNX does not have"


def layers_page():
    return (sources.ROOT / "docs/guides/layers.md").read_text().split("\n\n")


def test_every_public_transform_has_its_row():
    values = [getattr(nnx, name) for name in nnx.__all__]
    transforms = {
        value.__name__
        for value in values
        if inspect.isroutine(value) or hasattr(value, "defvjp")
        if str(value.__module__).startswith("graftree.transforms.")
        if not str(value.__module__).startswith("graftree.transforms.lifting.")
    }
    rows = {row.transform for row in matrix.ROWS.values()}
    where = "tests/contract/test_transforms/matrix.py: add a row to ROWS"
    fails(f"{where}: {name!r}" for name in transforms - rows)
    assert len(transforms) > 20


# ------------------------------------------------------------------------------ size


def test_no_file_is_longer_than_700_lines():
    lengths = {source.path: source.text.count("\n") for source in sources.repository()}
    fails(f"{path}: {n} lines" for path, n in lengths.items() if n > MAX_FILE_LINES)


def test_no_function_has_more_than_60_lines_of_code():
    def size(source, node):
        return len(source.code_lines & set(range(node.lineno, node.end_lineno + 1)))

    fails(
        source.at(node, f"{node.name} has {size(source, node)} lines")
        for source in sources.repository()
        for node in source.walk(ast.FunctionDef, ast.AsyncFunctionDef)
        if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
        if size(source, node) > MAX_FUNCTION_LINES and not only_assigns(node)
    )


def only_assigns(node):
    """Whether it is a constructor without a branch, as long as its attributes are."""
    branches = (ast.For, ast.While, ast.Try, ast.With)
    return node.name == "__init__" and not any(
        isinstance(part, branches) for part in ast.walk(node)
    )


# --------------------------------------------------------------------------- imports


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {
        source.module: {
            module
            for _, module, _ in sources.imports(source)
            if module in sources.module_names() and module != source.module
        }
        for source in sources.package()
    }
    graphlib.TopologicalSorter(graph).prepare()  # names the circle, if there is one


def test_functions_import_only_packages_from_outside():
    fails(
        source.at(node, f"{function.name} imports {module}")
        for source in sources.package()
        for node, module, _ in sources.imports(source)
        if module.split(".")[0] == "graftree" and node.col_offset
        for function in source.walk(ast.FunctionDef)
        if node in ast.walk(function)
    )


# What one file has another one do at import, besides filling hooks.
WRITTEN_FROM_ELSEWHERE = {
    "config.caches": "the caches to empty where they are switched off",
    "fingerprints.PLAIN": "a method of an object itself, by core/objects/callables.py",
}


def test_links_to_files_above_are_hooks():
    text = (sources.PACKAGE / "core/hooks.py").read_text()
    said = {
        name: path for path, name in re.findall(r"From ([\w/]+)\.\n(\w+): Hook\[", text)
    }
    faults = []
    for name in re.findall(r"^(\w+): Hook\[", text, re.MULTILINE):
        filled, called = (
            {str(x.path)[13:-3] for x in sources.package() if use in x.text}
            for use in (f"hooks.{name}.fill", f"hooks.{name}.call")
        )
        if filled != {said.get(name)} or not called:
            faults.append(f"{name}: filled in {filled}, called in {called}")
    fails(faults)


def test_files_change_no_other_one_when_they_are_imported():
    faults = []
    for source in sources.package():
        names = {
            alias.asname or alias.name
            for node in source.walk(ast.ImportFrom)
            if (node.module or "").startswith("graftree")
            for alias in node.names
        }
        for node in source.tree.body:
            written = changed_by(node)
            if written.partition(".")[0] in names:
                if written not in WRITTEN_FROM_ELSEWHERE:
                    faults.append(source.at(node, f"changes {written}"))
    fails(faults)


def changed_by(statement):
    """The name of what a statement of a module writes into; empty if it is its own."""
    match statement:
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target]):
            return ast.unparse(target.value)
        case ast.AugAssign(target=ast.Attribute() as target):
            return ast.unparse(target)
        case ast.Expr(ast.Call(ast.Attribute(value=value, attr=method))):
            return ast.unparse(value) if method in MUTATING else ""
    return ""


MUTATING = {"add", "append", "extend", "insert", "setdefault", "update"}


def test_private_names_stay_in_their_file():
    owners = {x.path: sources.private_names(x) for x in sources.package()}
    owned = frozenset().union(*owners.values())
    fails(
        source.at(node, ast.unparse(node))
        for source in sources.package()
        for node in source.walk(ast.Attribute)
        if node.attr in owned - owners[source.path]
        if not node.attr.startswith(PUBLISHED)
    )


def test_private_names_are_not_imported():
    fails(
        source.at(node, f"{module}.{name}")
        for source in sources.package()
        for node, module, name in sources.imports(source)
        if module.split(".")[0] == "graftree" and (name or "").startswith("_")
    )


def test_no_module_is_named_like_one_of_the_standard_library():
    names = {module.rpartition(".")[2] for module in sources.module_names()}
    fails(names & sys.stdlib_module_names)


# Names that the API of another library gives to two classes; and a layer that adds the
# scale of PEFT to the one of the same name.
NAMED_TWICE = {"LoRALinear", "Module", "Object", "Scope", "TrainState"}


def test_no_two_classes_and_no_two_files_have_the_same_name():
    classes = collections.Counter(
        node.name.lstrip("_")
        for source in sources.package()
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    )
    files = collections.Counter(source.path.name for source in sources.package())
    repeated = {name for name, n in [*classes.items(), *files.items()] if n > 1}
    fails(repeated - NAMED_TWICE - {"__init__.py", "__main__.py"})


def test_flax_is_imported_by_one_file_only():
    fails(
        source.at(node, module)
        for source in sources.package()
        if source.module != "graftree.interop.bridge.linen_side"
        for node, module, _ in sources.imports(source)
        if module.split(".")[0] == "flax"
    )


def test_few_tests_import_internals():
    """They pin how it is done today; modules just below ``graftree`` are public."""
    found = {
        str(source.path)
        for source in sources.repository()
        if source.path.parts[0] == "tests"
        for _, module, _ in sources.imports(source)
        if module.startswith("graftree.")
        if module.count(".") > 1 or module.startswith("graftree._")
    }
    assert 0 < len(found) <= MOST_TESTS_OF_INTERNALS, "\n".join(sorted(found))


def test_folders_hold_a_docstring_and_nothing_else():
    fails(
        str(source.path)
        for source in sources.package()
        if source.path.name == "__init__.py"
        if source.module not in ("graftree", *[x.__name__ for x in PUBLIC_MODULES])
        if len(source.tree.body) != 1
    )


def test_maps_of_folders_name_each_file_and_no_other():
    faults = []
    for source in sources.package():
        if source.path.name != "__init__.py" or source.module == "graftree":
            continue
        folder = sources.ROOT / source.path.parent
        chart = source.text.partition("\nfrom ")[0]
        files = {path.stem for path in folder.iterdir()}
        here = {name for name in files if not name.startswith("__")}
        words = {*re.findall(r"\w+", chart)}
        gone = {*re.findall(r"(?<![\w/])(\w+)\.py\b", chart)} - files
        faults += [f"{source.path}: no word of {name}" for name in here - words]
        faults += [f"{source.path}: there is no {name}.py" for name in gone]
    fails(faults)


def test_import_loads_nothing_that_jax_does_not_load():
    program = "import jax, json, sys; before = {*sys.modules}; import graftree; "
    program += "print(json.dumps([*{*sys.modules} - before]))"
    names = json.loads(interpreters.printed("-c", program))
    packages = {name.partition(".")[0] for name in names}
    assert packages - sys.stdlib_module_names == {"graftree"}


# ------------------------------------------------------------------------------- errors


def test_all_errors_of_the_library_have_one_base():
    assert errors.FlaxError is errors.GraftreeError
    for error in (errors.TraceContextError, errors.ImmutableVariableError):
        assert error.__mro__[1:3] == (errors.GraftreeError, Exception)


@tables.cases(
    "parts, text",
    ({}, "What."),
    ({"where": "a\nb"}, "What.\n  a\n  b"),
    ({"way_out": "Do."}, "What.\nDo."),
    ({"where": "a", "way_out": "Do\nit."}, "What.\n  a\nDo\nit."),
)
def test_message_says_what_where_and_the_way_out(parts, text):
    assert errors.message("What.", **parts) == text
