"""Runs the pages of the documentation, and builds the site.

python -m website check [PAGE ...]    run them; is what they say what they print?
python -m website write [PAGE ...]    run them; write outputs and pictures into them
python -m website figures             write what was recorded into the pages
python -m website session             draw the session of the home page
python -m website build [--no-run]    run those that changed, and build out/site
python -m website serve               the same, and show it on http://localhost:8000
"""

import argparse
import pathlib
import sys

from website import building, figures, pages, running, sessions, writing

TASKS = "check", "write", "figures", "session", "build", "serve"


def main() -> int:
    """Does what the command line asks for; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m website",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("pages", nargs="*", type=pathlib.Path, help="all by default")
    words = "build with the outputs that the pages have"
    parser.add_argument("--no-run", action="store_true", help=words)
    arguments = parser.parse_args()
    running.prepare()
    if arguments.task in ("build", "serve"):
        failed = building.build(runs=not arguments.no_run)
        return failed or (arguments.task == "serve" and building.serve())
    if arguments.task == "figures":
        return figures.write()
    if arguments.task == "session":
        return sessions.draw()
    chosen = [pages.read(p.resolve()) for p in arguments.pages] or pages.all_pages()
    act = write if arguments.task == "write" else check
    return max([act(page) for page in chosen], default=0)


def check(page: pages.Page) -> int:
    """Prints what a page says wrongly; gives 1 if there is any."""
    faults = running.faults(page, running.run(page))
    print(f"{page.name}: {len(page.blocks)} blocks, {len(faults)} faults")
    print(*faults, sep="\n", end="\n" if faults else "")
    return bool(faults)


def write(page: pages.Page) -> int:
    """Writes outputs and pictures into a page; gives 0."""
    results = [*running.run(page)]
    page.path.write_text(writing.with_outputs(page, results, keep_right=True))
    pictures = writing.save_pictures(page.path.parent, results)
    print(f"{page.name}: {len(results)} blocks, {pictures} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
