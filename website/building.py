"""Builds the site: runs each page, then has mkdocs make HTML of what that gives.

mkdocs reads ``out/pages``: the pages of ``docs/`` with the outputs and pictures of this
run, the changelog and its like from the root, and the pages of the reference.

A page that ran without a fault is kept in ``out/page_cache``, under a name made of its
text and of all code that it could run. It runs again once one of these has changed.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import http.server
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable

from website import figures, pages, reference, running, searching, writing

OUT = pages.ROOT / "out" / "pages"
SITE = pages.ROOT / "out" / "site"
CACHE = pages.ROOT / "out" / "page_cache"

# Files of the repository that are pages, too.
FROM_THE_ROOT = {
    "CHANGELOG.md": "look_up/changelog.md",
    "CONTRIBUTING.md": "look_up/contributing.md",
    "SECURITY.md": "look_up/security.md",
    "SUPPORT.md": "look_up/support.md",
}

# What a link leads to in the site; in the repository, these are its targets.
_IN_THE_SITE = {
    **FROM_THE_ROOT,
    "src/graftree/__init__.py": "look_up/api/index.md",
    "src/graftree/nn": "guides/layers.md",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What running a page gave: how many blocks and pictures, and what is wrong."""

    name: str
    blocks: int
    run: int
    pictures: int
    commands: int
    faults: tuple[str, ...]
    seconds: float = 0.0


def build(*, runs: bool = True) -> int:
    """Builds the site; gives the exit status, and prints progress and counts.

    Args:
        runs: Whether to run the pages that changed; if not, they have the outputs and
            pictures that are in ``docs/``.
    """
    start = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(pages.DOCS, OUT)
    for source, target in FROM_THE_ROOT.items():
        text = (pages.ROOT / source).read_text()
        place = pages.DOCS / target
        (OUT / target).write_text(
            with_links_of_the_site(text, pages.ROOT, place.parent)
        )
    outcomes = _run_all() if runs else [*map(_as_it_is, pages.all_pages())]
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    print(*faults, sep="\n", end="\n" if faults else "")
    ran = time.perf_counter()
    _write_reference()
    _link_names()
    searching.write_front_matter(OUT)
    print("mkdocs ...", flush=True)
    failed = _run_mkdocs()
    _print_counts(outcomes, ran - start, time.perf_counter() - ran, runs=runs)
    return 1 if faults or failed else 0


def _run_mkdocs() -> int:
    """Has mkdocs build the site; prints what it warns of, and fails if it does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(
        command, cwd=pages.ROOT, env=environment, capture_output=True, text=True
    )
    lines = [x for x in run.stderr.splitlines() if x and not x.startswith("INFO")]
    print(*lines, sep="\n", end="\n" if lines else "")
    return run.returncode


def serve() -> int:
    """Shows the site until it is interrupted."""
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(SITE)
    )
    with http.server.ThreadingHTTPServer(("localhost", 8000), handler) as server:
        print("http://localhost:8000 (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0


# ------------------------------------------------------------------------ the pages


def _run_all() -> list[Outcome]:
    """Runs the pages that changed, as many at once as there are cores."""
    code = _code_digest()
    folders = {
        page.path: CACHE / _digest([page.path], code) for page in pages.all_pages()
    }
    for folder in CACHE.glob("*"):
        if folder not in folders.values():
            shutil.rmtree(folder)
    changed = [path for path, folder in folders.items() if not folder.exists()]
    print(f"{len(changed)} of {len(folders)} pages to run", flush=True)
    found = {}
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=os.cpu_count(),
        max_tasks_per_child=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=running.prepare,
    ) as processes:
        started = {
            processes.submit(run_page, path, folders[path]): path for path in changed
        }
        done = concurrent.futures.as_completed(started)
        for number, future in enumerate(done, 1):
            found[started[future]] = outcome = future.result()
            print(
                f"[{number}/{len(changed)}] {outcome.name}: {outcome.run} blocks, "
                f"{outcome.seconds:.0f} s" + ", with faults" * bool(outcome.faults),
                flush=True,
            )
    return [found.get(path) or _known(folder) for path, folder in folders.items()]


def _digest(paths: Iterable[pathlib.Path], *further: str) -> str:
    """A name for the contents of files, and for further texts."""
    digest = hashlib.sha256("\n".join(further).encode())
    for path in paths:
        digest.update(f"\0{path.relative_to(pages.ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _code_digest() -> str:
    """A name for what pages can run: our files, Python, and installed packages."""
    folders = ("src", "website", "examples", "benchmarks", "tests")
    files = [
        path
        for folder in folders
        for path in sorted((pages.ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    packages = sorted(
        f"{package.name} {package.version}"
        for package in importlib.metadata.distributions()
    )
    return _digest(files, sys.version, *packages)


def run_page(path: pathlib.Path, kept: pathlib.Path) -> Outcome:
    """Runs a page, and writes it with its outputs and pictures below ``out``.

    If nothing is wrong with it, that stays in the folder ``kept``.
    """
    start, page = time.perf_counter(), pages.read(path)
    folder = kept.with_suffix(".new")
    shutil.rmtree(folder, ignore_errors=True)
    target = folder / "pages" / path.relative_to(pages.DOCS)
    target.parent.mkdir(parents=True)
    results, faults = [], []
    try:
        results = [*running.run(page)]
        faults = running.faults(page, results)
    except Exception as error:  # one page that fails must not hide the others
        faults = [f"{path}: {type(error).__name__}: {error}"]
    target.write_text(_for_mkdocs(page, results))
    outcome = Outcome(
        name=page.name,
        blocks=len(page.blocks),
        run=len(results),
        pictures=writing.save_pictures(target.parent, results),
        commands=page.commands,
        faults=tuple(faults),
        seconds=time.perf_counter() - start,
    )
    (folder / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
    shutil.copytree(folder / "pages", OUT, dirs_exist_ok=True)
    if faults:
        shutil.rmtree(folder)
    else:
        folder.rename(kept)
    return outcome


def _known(folder: pathlib.Path) -> Outcome:
    """Copies a page that ran before, and says what that gave."""
    shutil.copytree(folder / "pages", OUT, dirs_exist_ok=True)
    found = json.loads((folder / "outcome.json").read_text())
    return Outcome(**{**found, "faults": ()})


def _as_it_is(page: pages.Page) -> Outcome:
    """Writes a page with the outputs that it has."""
    (OUT / page.path.relative_to(pages.DOCS)).write_text(_for_mkdocs(page, []))
    return Outcome(page.name, len(page.blocks), 0, 0, page.commands, ())


def _for_mkdocs(page: pages.Page, results: list[running.Result]) -> str:
    """A page with its outputs, in the form that mkdocs reads."""
    text = writing.with_outputs(page, results, keep_right=False)
    folder = page.path.parent
    text = with_links_of_the_site(text, folder, folder)
    return figures.with_tables(without_needs(text))


def without_needs(text: str) -> str:
    """A page whose blocks are code to mkdocs, which knows no ``needs="..."``.

    Example:
        >>> without_needs('```python needs="torch"')
        '```python'
    """
    fence = re.compile(r'^( *```(?:python|sh)) needs="[\w.]+"$', re.MULTILINE)
    return fence.sub(r"\1", text)


_LINK = re.compile(
    r"\[(?P<words>[^\]]+)\]\((?!\w+:)(?P<file>[^)#\s]+)(?P<rest>[^)]*)\)"
)


def with_links_of_the_site(text: str, folder: pathlib.Path, place: pathlib.Path) -> str:
    """The text of a file in ``folder`` as a page in ``place``, with links made right.

    A file that is also a page of the site gives a link to that page; a link to other
    code becomes plain words.

    Example:
        >>> text = "[Us](../CONTRIBUTING.md), [x](../src)"
        >>> with_links_of_the_site(text, pages.DOCS, pages.DOCS)
        '[Us](look_up/contributing.md), x'
    """

    def moved(link: re.Match[str]) -> str:
        target = (folder / link["file"]).resolve()
        if not target.is_relative_to(pages.DOCS):
            page = _IN_THE_SITE.get(target.relative_to(pages.ROOT).as_posix())
            if page is None:
                return link["words"]
            target = pages.DOCS / page
        return f"[{link['words']}]({os.path.relpath(target, place)}{link['rest']})"

    return _LINK.sub(moved, text)


# -------------------------------------------------------------------- the reference


def _write_reference() -> None:
    folder = OUT / "look_up" / "api"
    folder.mkdir(parents=True, exist_ok=True)
    for name, topic in reference.TOPICS.items():
        (folder / f"{name}.md").write_text(reference.text_of(topic))
    (folder / "index.md").write_text(reference.index())


_CODE = re.compile(r"^ *```.*?^ *```$|\[[^\]]*\]\([^)]*\)|`nnx\.([\w.]+)`", re.M | re.S)


def _link_names() -> None:
    """Makes each public name in a text a link to its place in the reference."""
    places = {
        name: f"api/{page}.md#nnx.{name}" for name, page in reference.page_of().items()
    }
    for path in OUT.rglob("*.md"):
        if "api" not in path.relative_to(OUT).parts:
            root = os.path.relpath(OUT / "look_up", path.parent)

            def link(match: re.Match[str], root: str = root) -> str:
                place = places.get(match[1] or "")
                return f"[{match[0]}]({root}/{place})" if place else match[0]

            path.write_text(_CODE.sub(link, path.read_text()))


def _print_counts(
    outcomes: list[Outcome], running_s: float, mkdocs_s: float, *, runs: bool
) -> None:
    blocks, run = sum(o.blocks for o in outcomes), sum(o.run for o in outcomes)
    size = sum(f.stat().st_size for f in SITE.rglob("*") if f.is_file())
    left = f"{blocks - run} need a package that is missing, none is excluded"
    print(
        f"{len(outcomes)} pages by hand, {len(reference.TOPICS)} of the reference with"
        f" {len(reference.public_names())} names;\n"
        f"{run} of {blocks} blocks run ({left if runs else 'none was asked for'}),"
        f" {sum(o.pictures for o in outcomes)} pictures made,\n"
        f"{sum(o.commands for o in outcomes)} blocks of shell commands without an"
        " output, so not run;\n"
        f"{running_s:.0f} s to run, {mkdocs_s:.0f} s for mkdocs; {size / 1e6:.1f} MB in"
        f" {SITE.relative_to(pages.ROOT)}"
    )
