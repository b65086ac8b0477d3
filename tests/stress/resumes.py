"""Training killed and started again: ``python -m tests.stress.resumes --kills 4``.

For each layout of devices, `trainings` runs once unbroken, and once broken at random
moments: killed by SIGKILL some time after a step, or as soon as an asynchronous save
has returned, or told to stop by SIGTERM. Every start goes on in the same folder. All
losses that any process printed are compared with those of the unbroken run, bit by bit,
those of steps done twice too; then the digests of all values at the end, and the logs,
byte by byte.

At last one run wanders from layout to layout. There sums are taken in another order, so
its losses are compared up to `TOLERANCE`.
"""

import argparse
import dataclasses
import functools
import pathlib
import random
import signal
import tempfile

from tests.stress import starts

# Names of layouts: the mesh, and how many processes share it.
LAYOUTS = {name: (name, 1) for name in ("1x1", "1x8", "2x4")} | {"2x4/2": ("2x4", 2)}
WAY = ("1x8", "2x4", "2x4/2", "1x1")
TOLERANCE = 1e-4  # relative; the losses of different layouts part by 1e-6 in few steps


@dataclasses.dataclass
class Tally:
    """What was counted."""

    kills: int = 0
    unfinished: int = 0  # kills that found a save on its way, which was lost
    stops: int = 0
    losses: int = 0
    repeated: int = 0  # losses of steps that were done before
    farthest: float = 0.0  # the largest relative difference


class Run:
    """A training run in a folder: started, broken, started again.

    Args:
        folder: Of its checkpoints.
        options: Of the command line.
        wanted: The record of an unbroken run, or ``None`` if this is it.
        tolerance: How far losses may be from those.
    """

    def __init__(self, folder, options, wanted=None, tolerance=0.0):
        self.folder, self.options = folder, options
        self.wanted, self.tolerance = wanted, tolerance
        self.tally = Tally()
        self._done = set()
        self._saved = [-1]  # what is on disk for certain, then what may be

    def start(self, layout, moment=None, same_data=False):
        """Starts the processes of a layout, up to the moment or the end."""
        record = starts.start(self._commands(layout, same_data), moment)
        stopped = record.sent and moment.send == signal.SIGTERM
        record.check(-signal.SIGKILL if record.sent and not stopped else 0)
        self._check_start(record)
        if self.wanted is not None:
            self._compare(record)
        self._count(record, stopped)
        return record

    def moment(self, rng):
        """When to break the next start, some steps on."""
        every = self.options.every
        step = self._saved[-1] + 1 + rng.randrange(2 * every)
        kind = rng.choice(["step", "save", "stop"])
        if kind == "stop":
            return starts.Moment(f"loss {step}", 0.0, signal.SIGTERM)
        if kind == "save":
            return starts.Moment(f"saved {-(-step // every) * every}")
        return starts.Moment(f"loss {step}", rng.uniform(0.0, 0.05))

    def _commands(self, layout, same_data):
        mesh, processes = LAYOUTS[layout]
        shared = ["tests.stress.trainings", self.folder, "--mesh", mesh]
        for name in ("steps", "every", "hidden"):
            shared += [f"--{name}", getattr(self.options, name)]
        if same_data:
            shared.append("--same-data")
        if processes > 1:
            shared += ["--processes", processes, "--port", starts.free_port()]
        return [[*shared, "--process", process] for process in range(processes)]

    def _check_start(self, record):
        """All processes begin after the last save, or the last but one."""
        for process in range(len(record.lines)):
            last = int(record.last("start", process)) - 1
            assert last in self._saved, f"begins after {last}, saved {self._saved}"
        self.tally.unfinished += last != self._saved[-1]
        self._saved = [last]

    def _count(self, record, stopped):
        self.tally.stops += stopped
        self.tally.kills += record.sent and not stopped
        # A save begins when the one before is on disk.
        self._saved = [*self._saved, *sorted(record.values("saved"))][-2:]
        if not record.sent or stopped:
            self._saved = self._saved[-1:]

    def _compare(self, record):
        for process in range(len(record.lines)):
            same = min(process, len(self.wanted.lines) - 1)
            wanted = self.wanted.values("loss", same)
            for step, (loss,) in record.values("loss", process).items():
                self._compare_loss(step, loss, wanted[step][0])
                self.tally.repeated += (process, step) in self._done
                self._done.add((process, step))
            if not self.tolerance and not record.sent:
                ends = {x.last("state", process) for x in (record, self.wanted)}
                assert len(ends) == 1, f"process {process} ends with other values"

    def _compare_loss(self, step, found, wanted):
        far = abs(float.fromhex(found) / float.fromhex(wanted) - 1)
        is_right = far <= self.tolerance if self.tolerance else found == wanted
        assert is_right, f"step {step}: loss {found}, unbroken {wanted}"
        self.tally.losses += 1
        self.tally.farthest = max(self.tally.farthest, far)


def break_often(layout, folder, options, rng):
    """Breaks a run at random moments, lets it end, and returns what was counted."""
    unbroken = Run(folder / "unbroken", options).start(layout)
    broken = Run(folder / "broken", options, unbroken)
    for _ in range(options.kills):
        broken.start(layout, broken.moment(rng))
    end = broken.start(layout)
    assert "end" in end.lines[0][-1], f"no end: {end.lines[0][-3:]}"
    logs = [(folder / f"{name}.csv").read_text() for name in ("unbroken", "broken")]
    assert logs[0] == logs[1], logs[1]
    return broken.tally


def wander(folder, options, rng):
    """Goes on in another layout after each kill, and returns what was counted."""
    unbroken = Run(folder / "unbroken", options).start(WAY[0], same_data=True)
    run = Run(folder / "broken", options, unbroken, TOLERANCE)
    for layout in WAY[:-1]:
        run.start(layout, run.moment(rng), same_data=True)
    run.start(WAY[-1], same_data=True)
    rows = (folder / "broken.csv").read_text().splitlines()
    assert [int(row.partition(",")[0]) for row in rows[1:]] == [*range(options.steps)]
    return run.tally


def read_options(arguments=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=4, help="in each layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--no-way", action="store_true", help="stay in each layout")
    options = parser.parse_args(arguments)
    # Enough for each moment to come before the end.
    options.steps = 3 * options.every * (max(options.kills, len(WAY)) + 1)
    return options


def main():
    """Prints a line for each layout of the command line."""
    options = read_options()
    runs = {x: functools.partial(break_often, x) for x in options.layouts}
    if not options.no_way:
        runs["each in turn"] = wander
    for name, run in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            rng = random.Random(f"{options.seed} {name}")
            print(f"{name:13s} {run(pathlib.Path(folder), options, rng)}", flush=True)


if __name__ == "__main__":
    main()
