"""Builds the site: runs each page, then has mkdocs make HTML of what that gives.

mkdocs reads ``out/pages``: the pages of ``docs/`` with the outputs and pictures of this
run, the changelog and its like from the root, and the pages of the reference.
"""

import concurrent.futures
import dataclasses
import functools
import http.server
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from website import pages, reference, running, writing

OUT = pages.ROOT / "out" / "pages"
SITE = pages.ROOT / "out" / "site"

# Files of the repository that are pages, too.
FROM_THE_ROOT = {
    "CHANGELOG.md": "look_up/changelog.md",
    "CONTRIBUTING.md": "look_up/contributing.md",
    "SECURITY.md": "look_up/security.md",
    "SUPPORT.md": "look_up/support.md",
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


def build() -> int:
    """Runs all pages and builds the site; gives the exit status, and prints counts."""
    start = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(pages.DOCS, OUT)
    for source, target in FROM_THE_ROOT.items():
        _copy_from_the_root(source, target)
    outcomes = _run_all()
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    print(*faults, sep="\n", end="\n" if faults else "")
    ran = time.perf_counter()
    _write_reference()
    _link_names()
    _rank_for_search()
    failed = _run_mkdocs()
    _print_counts(outcomes, ran - start, time.perf_counter() - ran)
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
    """Runs each page in a process of its own, as many at once as there are cores."""
    paths = [page.path for page in pages.all_pages()]
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=os.cpu_count(),
        max_tasks_per_child=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=running.prepare,
    ) as processes:
        return [*processes.map(run_page, paths)]


def run_page(path: pathlib.Path) -> Outcome:
    """Runs a page, and writes it with its outputs and pictures below ``out``."""
    page = pages.read(path)
    target = OUT / path.relative_to(pages.DOCS)
    results, faults = [], []
    try:
        results = [*running.run(page)]
        faults = running.faults(page, results)
    except Exception as error:  # one page that fails must not hide the others
        faults = [f"{path}: {type(error).__name__}: {error}"]
    text = writing.with_outputs(page, results, keep_right=False)
    target.write_text(without_needs(_without_links_to_code(text, path.parent)))
    return Outcome(
        name=page.name,
        blocks=len(page.blocks),
        run=len(results),
        pictures=writing.save_pictures(target.parent, results),
        commands=page.commands,
        faults=tuple(faults),
    )


def without_needs(text: str) -> str:
    """A page whose blocks are code to mkdocs, which knows no ``needs="..."``.

    Example:
        >>> without_needs('```python needs="torch"')
        '```python'
    """
    return re.sub(r'^( *```python) needs="[\w.]+"$', r"\1", text, flags=re.MULTILINE)


def _without_links_to_code(text: str, folder: pathlib.Path) -> str:
    """A page whose links to files that are not of the site are their words."""

    def words(link: re.Match[str]) -> str:
        target = (folder / link["target"]).resolve()
        for source, page in FROM_THE_ROOT.items():
            if target == pages.ROOT / source:
                place = os.path.relpath(pages.DOCS / page, folder)
                return f"[{link['words']}]({place})"
        return link[0] if target.is_relative_to(pages.DOCS) else link["words"]

    return re.sub(r"\[(?P<words>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)\)", words, text)


def _copy_from_the_root(source: str, target: str) -> None:
    """Copies a file of the root as a page, with its links to ``docs`` made right."""

    def place(link: re.Match[str]) -> str:
        if link[2].startswith("docs/"):
            return f"[{link[1]}](../{link[2].removeprefix('docs/')})"
        page = FROM_THE_ROOT.get(link[2])
        return f"[{link[1]}](../{page})" if page else link[1]

    text = (pages.ROOT / source).read_text()
    text = re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", place, text)
    (OUT / target).write_text(text)


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


# How much a page of a folder counts in a search: who asks how, wants a guide.
_RANKS = {
    "start": 2,
    "guides": 2,
    "coming_from": 3,
    "look_up/errors": 0.7,
    "look_up/api": 0.5,
}


def _rank_for_search() -> None:
    for folder, rank in _RANKS.items():
        for path in (OUT / folder).rglob("*.md"):
            head = f"---\nsearch:\n  boost: {rank}\n---\n\n"
            path.write_text(head + path.read_text())


def _print_counts(outcomes: list[Outcome], running_s: float, mkdocs_s: float) -> None:
    blocks, run = sum(o.blocks for o in outcomes), sum(o.run for o in outcomes)
    size = sum(f.stat().st_size for f in SITE.rglob("*") if f.is_file())
    print(
        f"{len(outcomes)} pages by hand, {len(reference.TOPICS)} of the reference with"
        f" {len(reference.public_names())} names;\n"
        f"{run} of {blocks} blocks run ({blocks - run} need a package that is missing,"
        f" none is excluded), {sum(o.pictures for o in outcomes)} pictures made,\n"
        f"{sum(o.commands for o in outcomes)} blocks of shell commands, not run;\n"
        f"{running_s:.0f} s to run, {mkdocs_s:.0f} s for mkdocs; {size / 1e6:.1f} MB in"
        f" {SITE.relative_to(pages.ROOT)}"
    )
