"""Plants faults in the package, and lists those that no test sees.

    python -m tests.stress.mutants --seed 0 --count 100 --workers 2
    python -m tests.stress.mutants --compare before/faults.jsonl after/faults.jsonl

Which faults there are says `planting`. Each is planted in a copy of the repository, and
of the tests that run its line those run that see it soonest: a few of each of a few
files, then as many as the seconds allow. What no test that ran has seen *survives*: it
is a hole in the tests, or a program that means the same. Where no test runs the line,
the file's nearest tests may still see it, as what an import runs, or another process;
if they don't, it is *not covered*.

Each outcome is a line of ``faults.jsonl`` in a folder. A run that is given that folder
goes on there; ``--again`` repeats what had survived, after tests were written.
"""

import argparse
import collections
import functools
import itertools
import json
import pathlib
import sys
import tempfile
import time

from tests.stress import forks, planting, recording

FIRST_FILES, FIRST_TESTS = 10, 60
START = 60  # seconds for pytest to begin; longer than 5 times the tests' own is a hang

KILLED, SURVIVED, NOT_COVERED = "killed", "survived", "not covered"


def ordered(fault: planting.Fault, tests: dict[str, float]) -> list[str]:
    """Tests by how soon they see a fault: of each file one, then of each another one.

    The files of its name come first, then those of its chapter, and then by how many
    of their tests run its line.
    """
    files = collections.defaultdict(list)
    for test in sorted(tests, key=tests.get):
        files[test.partition("::")[0]].append(test)
    place = pathlib.Path(fault.path)

    def distance(file):
        is_far = place.parts[2] not in pathlib.Path(file).parts
        return place.stem not in file, is_far, -len(files[file]), file

    nearest = [files[file] for file in sorted(files, key=distance)]
    rounds = itertools.zip_longest(*nearest)
    return [test for tests in rounds for test in tests if test is not None]


def stages(fault: planting.Fault, tests: dict[str, float], seconds: float) -> list:
    """The tests to run first, and those to run if these see nothing."""
    names = ordered(fault, tests)
    files = list(dict.fromkeys(name.partition("::")[0] for name in names))[:FIRST_FILES]
    first = [name for name in names if name.partition("::")[0] in files][:FIRST_TESTS]
    spent = itertools.accumulate(tests[name] for name in names)
    rest = [name for name, total in zip(names, spent, strict=True) if total < seconds]
    return [first, [name for name in rest if name not in {*first}]]


def judged(seconds: float, job: tuple) -> dict:
    """Plants a fault, runs its tests in stages, and says what came of it."""
    fault, is_covered, tests = job
    parts = stages(fault, tests, seconds)[: 2 if is_covered else 1]
    start, count, by = time.monotonic(), 0, ""
    outcome = SURVIVED if is_covered else NOT_COVERED
    copy = forks.copy()
    with copy.planted(fault.path, fault.planted()):
        for names in filter(None, parts):
            limit = START + 5 * sum(tests[name] for name in names)
            chosen = functools.partial(forks.Chosen, names)
            count += len(names)
            code = copy.run(chosen, limit)
            if code != 0:  # once more, as a test may fail by chance
                code = copy.run(chosen, limit)
            if code != 0:
                outcome, by = KILLED, _ending(code, copy)
                break
    told = "key path line kind scope old new".split()
    found = {name: getattr(fault, name) for name in told}
    seconds = round(time.monotonic() - start, 1)
    return {**found, "outcome": outcome, "by": by, "tests": count, "seconds": seconds}


def _ending(code: int | None, copy: forks.Copy) -> str:
    """What saw a fault: a test, or how the run of the tests ended."""
    if code is None:
        return "time-out"
    if copy.file.exists():
        return json.loads(copy.file.read_text())
    return f"signal {-code}" if code < 0 else f"pytest ended with {code}"


# ---------------------------------------------------------------- what is printed


def shown(outcome: dict) -> str:
    """One fault, as lines of a table."""
    place = f"{outcome['path']}:{outcome['line']}"
    first = f"{outcome['outcome']:12}{outcome['seconds']:6.1f} s  {place}"
    lines = [f"{first}  ({outcome['kind']})"]
    lines += [f"    - {outcome['old']}", f"    + {outcome['new']}"]
    lines += [f"    by {outcome['by']}"] if outcome["by"] else []
    return "\n".join(lines)


def totals(outcomes: list[dict]) -> str:
    """How many of each outcome there are, by folder."""
    counts = collections.Counter(
        (name, outcome["outcome"])
        for outcome in outcomes
        for name in (outcome["path"].split("/")[2], "all")
    )
    columns = (KILLED, SURVIVED, NOT_COVERED)
    rows = [f"{'':12}" + "".join(f"{column:>12}" for column in columns)]
    for name in [*sorted({name for name, _ in counts} - {"all"}), "all"]:
        numbers = [counts[name, column] for column in columns]
        rows.append(f"{name:12}" + "".join(f"{number:12}" for number in numbers))
    return "\n".join(rows)


def compared(before: dict[str, dict], after: dict[str, dict]) -> str:
    """What became of the faults that two runs planted in the same text."""
    both = [key for key in before if key in after]
    moves = collections.Counter(
        (before[key]["outcome"], after[key]["outcome"]) for key in both
    )
    lines = [f"{len(both)} faults in both"]
    lines += [f"{count:6}  {a} -> {b}" for (a, b), count in sorted(moves.items())]
    lost = [after[key] for key in both if before[key]["outcome"] == KILLED]
    lines += [shown(outcome) for outcome in lost if outcome["outcome"] != KILLED]
    for title, ones, others in (("before", before, after), ("after", after, before)):
        alone = [outcome for key, outcome in ones.items() if key not in others]
        if alone:
            lines.append(f"only {title}:\n{totals(alone)}")
    return "\n".join(lines)


# ---------------------------------------------------------------- a run


def outcomes_in(file: pathlib.Path) -> dict[str, dict]:
    """The outcomes that a file holds, by key; of several of one fault the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {outcome["key"]: outcome for outcome in map(json.loads, lines)}


def run(faults, files, folder, workers=1, seconds=60) -> list[dict]:
    """Plants faults one by one.

    Args:
        faults: To plant; see `planting.chosen`.
        files: With the tests to choose from.
        folder: Where ``faults.jsonl`` grows.
        workers: How many faults are tried at once.
        seconds: Of tests for a fault that nothing has seen yet.

    Returns:
        The outcomes, in the order in which they came.
    """
    found = []
    with tempfile.TemporaryDirectory() as copies, forks.pool(workers, copies) as pool:
        tests = recording.recorded(pool, files)
        judge = functools.partial(judged, seconds)
        jobs = [_job(fault, tests) for fault in faults]
        for outcome in pool.imap_unordered(judge, jobs):
            found.append(outcome)
            with (folder / "faults.jsonl").open("a") as lines:
                lines.write(json.dumps(outcome) + "\n")
            print(shown(outcome), flush=True)
    return found


def _job(fault, tests):
    """A fault, whether a test runs its line, and the tests of that line or file."""
    seeing = recording.seeing(tests, fault.path, *fault.covered)
    if seeing:
        return fault, True, seeing
    return fault, False, recording.seeing(tests, fault.path, 1, 10_000)


def main(arguments=None):
    """Plants the faults that are missing in a folder, and prints all that it holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="of faults")
    parser.add_argument("--file", help="the only file to plant in: src/graftree/...")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="of tests per fault")
    parser.add_argument("--resume", type=pathlib.Path, default=recording.KEPT / "run")
    parser.add_argument("--again", action="store_true", help="repeats the survivors")
    parser.add_argument("--compare", type=pathlib.Path, nargs=2, help="faults.jsonl")
    options = parser.parse_args(arguments)
    if options.compare:
        print(compared(*map(outcomes_in, options.compare)))
        return 0
    options.resume.mkdir(parents=True, exist_ok=True)
    file = options.resume / "faults.jsonl"
    known = outcomes_in(file)
    faults = planting.chosen(options.seed, options.count, options.file)
    missed = {key for key, x in known.items() if x["outcome"] != KILLED}
    wanted = missed if options.again else {x.key for x in faults} - {*known}
    faults = [fault for fault in faults if fault.key in wanted]
    files = recording.files_of_tests()
    run(faults, files, options.resume, options.workers, options.seconds)
    print(totals(list(outcomes_in(file).values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
