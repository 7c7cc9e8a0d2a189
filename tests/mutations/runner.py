"""Applies seeded faults to a copy of the tree, one at a time, and records which test catches each."""

import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: Where a tree keeps its faults.
FAULTS = Path("tests/mutations")
#: Seconds for a fault's named tests, and for the whole suite.
NAMED_LIMIT, SUITE_LIMIT = 900, 3 * 3600
#: Environment name of the folder in which test processes share compiled programs (``tests/processes.py``).
PROGRAMS = "PYTEST_COMPILED_PROGRAMS"
#: How pytest's report starts the message of a failed assertion, or of a ``raises`` that saw no exception.
ASSERTION = re.compile(r"assert\b|AssertionError\b|Failed: ")
CAUGHT = "caught"


@dataclass(frozen=True)
class Fault:
    """A patch, the room whose code it breaks, and the tests that must fail with it."""

    name: str
    room: str
    tests: tuple[str, ...]
    patch: Path

    @property
    def files(self) -> list[str]:
        """Paths of the files that the patch changes."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.patch.read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What became of a fault: ``caught``, or the reason why it does not count; the test, its message."""

    name: str
    room: str
    outcome: str
    test: str = ""
    message: str = ""


def read_faults(root: Path, names: list[str] | None = None) -> list[Fault]:
    """The faults of ``faults.toml``, in its order; those named, if names are given.

    Raises ``ValueError`` for unknown names, and for entries without patches or patches without entries.
    """
    folder = root / FAULTS
    entries = tomllib.loads((folder / "faults.toml").read_text())
    faults = {
        name: Fault(name, entry["room"], tuple(entry["tests"]), folder / "faults" / f"{name}.patch")
        for name, entry in entries.items()
    }
    if alone := {*faults} ^ {patch.stem for patch in (folder / "faults").glob("*.patch")}:
        raise ValueError(f"faults with a patch or an entry in faults.toml, but not both: {sorted(alone)}")
    if unknown := {*(names or [])} - {*faults}:
        raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; faults.toml has {', '.join(faults)}")
    return [faults[name] for name in names or faults]


@dataclass
class Pass:
    """One pass over faults of the tree at ``root``.

    ``work`` has the copies of the tree and the results of caught faults. A later pass takes these over if the
    tree, the patch and the named tests are the same.
    """

    root: Path
    work: Path
    jobs: int = 1
    suite: tuple[str, ...] | None = ("-n", "2", "--dist", "loadfile")
    _running: set[subprocess.Popen] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, faults: list[Fault], progress=lambda result: None) -> list[Result]:
        """Results in the order of ``faults``; ``progress`` gets each as soon as it is known."""
        self.work.mkdir(parents=True, exist_ok=True)
        paths = tracked_files(self.root)
        tree = hash_files(self.root, [path for path in paths if not path.is_relative_to(FAULTS)])
        store = self.work / "results.json"
        kept = json.loads(store.read_text()) if store.exists() else {}
        copies = queue.SimpleQueue()
        for job in range(min(self.jobs, len(faults))):
            copies.put(copy_files(self.root, paths, self.work / f"tree-{job}"))

        def run_one(fault: Fault) -> Result:
            digest = hashlib.sha256(fault.patch.read_bytes())
            digest.update(repr((tree, fault.room, fault.tests)).encode())
            key = digest.hexdigest()
            if key in kept:
                result = Result(**kept[key])
            else:
                copy = copies.get()
                result = self.try_fault(fault, copy)
                copies.put(copy)
            with self._lock:
                if result.outcome == CAUGHT:
                    kept[key] = asdict(result)
                    write_json(store, kept)
                progress(result)
            return result

        pool = ThreadPoolExecutor(self.jobs)
        try:
            return list(pool.map(run_one, faults))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*self._running]:
                kill(process)

    def try_fault(self, fault: Fault, tree: Path) -> Result:
        """Runs the named tests without and with the patch, then the whole suite if none of them failed."""

        def result(outcome: str, test: str = "", message: str = "") -> Result:
            return Result(fault.name, fault.room, outcome, test, message)

        limited, failed = self.pytest(tree, [*fault.tests, "-m", ""], NAMED_LIMIT, skips=True)
        if limited or failed:
            return result("time limit without the patch" if limited else "fails without the patch", *failed)
        if apply(fault, tree):
            return result("the patch does not apply")
        try:
            if error := self.import_files(tree, fault.files):
                return result("the patched tree does not import", "", error)
            limited, failed = self.pytest(tree, [*fault.tests, "-m", ""], NAMED_LIMIT)
            if limited:
                return result("time limit")
            if failed:
                return result(
                    CAUGHT if ASSERTION.match(failed[1]) else "failed without an assertion", *failed
                )
            if self.suite is None:
                return result("not caught by its tests")
            limited, failed = self.pytest(tree, [*self.suite], SUITE_LIMIT)
            if limited:
                return result("time limit of the whole suite")
            return result("caught by another test", *failed) if failed else result("not caught")
        finally:
            if apply(fault, tree, "--reverse"):
                raise RuntimeError(f"{fault.patch} could not be taken back in {tree}")

    def pytest(
        self, tree: Path, arguments: list[str], limit: float, skips: bool = False
    ) -> tuple[bool, list[str]]:
        """Whether the time limit was reached; the first failed test and its message, if any failed.

        With ``skips`` a skipped test counts as failed: it could not catch anything.
        """
        report = tree.with_suffix(".xml")
        report.unlink(missing_ok=True)
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code, output = self.call(tree, ["-m", "pytest", *options, *arguments], limit)
        if code is None:
            return True, []
        kinds = ("failure", "error", "skipped") if skips else ("failure", "error")
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            for kind in kinds:
                if (found := case.find(kind)) is not None:
                    message = (found.get("message") or "")[:2000]
                    test = f"{case.get('classname')}::{case.get('name')}"
                    return False, [test, message if kind == "failure" else f"{kind}: {message}"]
        return False, ["pytest", f"exit code {code}: {output[-2000:]}"] if code else []

    def import_files(self, tree: Path, files: list[str]) -> str:
        """The error of importing the modules of ``files``, or an empty text."""
        modules = [".".join(Path(file).with_suffix("").parts) for file in files if file.endswith(".py")]
        lines = [f"import {module.removesuffix('.__init__')}" for module in modules]
        code, output = self.call(tree, ["-c", "\n".join(lines)], NAMED_LIMIT)
        return output[-2000:] if code != 0 else ""

    def call(self, tree: Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
        """Exit code of Python, or None at the time limit, and what it wrote."""
        environment = os.environ | {"PYTHONPATH": str(tree), PROGRAMS: str(self.work / "programs")}
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            self._running.add(process)
            try:
                output, _ = process.communicate(timeout=limit)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                kill(process)  # whatever its tests have left, too
                self._running.discard(process)


def kill(process: subprocess.Popen) -> None:
    """Ends a process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def tracked_files(root: Path) -> list[Path]:
    """Paths of the files that git tracks and that exist, relative to ``root``."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
    return [Path(path) for path in listed.stdout.split("\0") if path and (root / path).is_file()]


def hash_files(root: Path, paths: list[Path]) -> str:
    """A digest of the files' paths and contents."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0{hashlib.sha256((root / path).read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


def copy_files(root: Path, paths: list[Path], to: Path) -> Path:
    """A fresh copy of the files in the folder ``to``."""
    shutil.rmtree(to, ignore_errors=True)
    for path in paths:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, to / path)
    return to


def apply(fault: Fault, tree: Path, *options: str) -> bool:
    """Applies a fault's patch with git; whether that failed."""
    # Inside a repository git would take the paths for the repository's, and skip them without a word.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, str(fault.patch)]
    failed = subprocess.run(command, cwd=tree, env=environment, capture_output=True).returncode != 0
    for file in map(Path, fault.files):
        # Python takes a file of the same size and second for unchanged.
        for compiled in (tree / file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
    return failed


def write_json(path: Path, value: object) -> None:
    """Writes a file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)
