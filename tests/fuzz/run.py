"""Runs the cases of one part in a process of its own, so that a crash or a hang is one finding more."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds that a case may take, and after which its process is ended.
SLOW, HANGS = 30, 120
#: Growth of the memory that is no finding.
MOST_BYTES = 300 * 10**6
#: Cases after which memory counts as what the process needs anyway.
WARM = 30


@dataclass
class Report:
    """What became of a part's cases."""

    outcomes: Counter = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest: float = 0.0
    grown_bytes: int = 0

    @property
    def cases(self):
        """How many cases have ended."""
        return sum(self.outcomes.values())

    def as_json(self):
        """For a file."""
        return {
            "cases": self.cases,
            "outcomes": dict(self.outcomes.most_common()),
            "slowest_seconds": round(self.slowest, 2),
            "grown_megabytes": round(self.grown_bytes / 1e6, 1),
            "findings": self.findings,
        }


def run_cases(part, indices, *, deadline=None, progress=lambda: None):
    """Runs cases of a part one after the other, each process until it ends."""
    report = Report()
    number, stop, seed = indices
    context = multiprocessing.get_context("spawn")
    while number < stop and (deadline is None or time.monotonic() < deadline):
        ours, theirs = context.Pipe()
        child = context.Process(target=_work, args=(part, number, stop, seed, deadline, theirs), daemon=True)
        child.start()
        theirs.close()
        waited = 10 * HANGS  # for the models to be made and compiled
        try:
            while ours.poll(waited):
                message = ours.recv()
                if message[0] == "broken":
                    raise RuntimeError(f"the {part} could not be made:\n{message[1]}")
                if message[0] == "memory":
                    report.grown_bytes = max(report.grown_bytes, message[1])
                    number = stop
                    break
                _, number, ended, said, seconds = message
                report.outcomes[ended] += 1
                report.slowest = max(report.slowest, seconds)
                if said:
                    report.findings.append(f"{number}: {said}")
                number, waited = number + 1, HANGS
                progress()
            else:
                report.outcomes["hang"] += 1
                report.findings.append(f"{number}: nothing for {waited} seconds")
                child.kill()
                number += 1
        except EOFError:
            child.join()
            report.outcomes["crash"] += 1
            report.findings.append(f"{number}: the process ended with {child.exitcode}")
            number += 1
        ours.close()
        child.join()
    if report.grown_bytes > MOST_BYTES:
        report.findings.append(f"memory has grown by {report.grown_bytes / 1e6:.0f} MB")
    return report


def _work(part, start, stop, seed, deadline, pipe):
    """A process's part: messages of cases, and of the memory when it is done."""
    # Libraries print what they also raise.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    from tests.fuzz.outcomes import Finding, resident_bytes

    with tempfile.TemporaryDirectory() as place:
        try:
            cases = make(part, Path(place), seed)
        except BaseException:
            pipe.send(("broken", traceback.format_exc()))
            return
        before = None
        for number in range(start, stop):
            if deadline is not None and time.monotonic() > deadline:
                break
            if number == start + WARM:
                before = resident_bytes()
            began = time.monotonic()
            said = ""
            try:
                _, ended = cases(number)
            except Finding as finding:
                ended, said = "finding", str(finding)
            except BaseException:
                ended, said = "finding", traceback.format_exc()
            seconds = time.monotonic() - began
            if seconds > SLOW:
                ended, said = "slow", f"{said} {seconds:.0f} seconds"
            pipe.send(("case", number, ended, said, seconds))
        pipe.send(("memory", 0 if before is None else resident_bytes() - before))


def make(part, place, seed):
    """The cases of a part; imported here, because a child that is spawned has nothing imported."""
    if part == "checkpoints":
        from tests.fuzz.checkpoints import Checkpoints

        return Checkpoints(place, seed)
    from tests.fuzz.requests import Requests

    return Requests(place, seed)
