"""The tests on a GPU, recorded: ``python -m benchmarks.test_gpu`` (or ``make test-gpu``).

Runs every test marked ``gpu`` with the Hypothesis profile "gpu" and writes
``benchmarks/results/<GPU>/tests.json``: the machine, the versions, how many tests and examples of
properties ran, and what became of them. Exits as pytest does. A part of the tests, or a selection
with a name, has a record of its own: ``--name fa3 --files tests/test_fa3_gpu.py``.

Most of the time goes into compiling kernels, so several workers share the GPU. Tests marked
``alone`` measure time; they run one after the other when the workers are done (in the last part).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environment import environment, results_folder

TESTS = Path(__file__).parent.parent / "tests"
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
TIME_LIMIT = "time limit of this run"  # as tests/conftest.py says where it skips


class Recorder:
    """A pytest plugin that adds up the numbers of terminal summaries."""

    def __init__(self) -> None:
        counted = ("not_reached", "examples", "examples_left_out")
        self.numbers: dict[str, Any] = dict.fromkeys((*OUTCOMES, *counted), 0)
        self.numbers["failures"] = []

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Read what the terminal reports, and the examples that conftest.py counted."""
        stats = terminalreporter.stats
        for outcome in OUTCOMES:
            self.numbers[outcome] += len(stats.get(outcome, ()))
        self.numbers["not_reached"] += sum(
            TIME_LIMIT in str(report.longrepr) for report in stats.get("skipped", ())
        )
        self.numbers["failures"] += [
            report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())
        ]
        plugins = config.pluginmanager.get_plugins()
        counters = (getattr(plugin, "examples_counted", None) for plugin in plugins)
        ran = next((c() for c in counters if callable(c)), {"run": 0, "left_out": 0})
        # A second summary in this process may count on from the first; it has no properties.
        for name, number in (("examples", ran["run"]), ("examples_left_out", ran["left_out"])):
            self.numbers[name] = max(self.numbers[name], number)


def options() -> tuple[argparse.Namespace, list[str]]:
    """Our options, and what is left for pytest."""
    workers = max(1, (os.cpu_count() or 1) - 1)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.test_gpu", description=__doc__)
    parser.add_argument(
        "--time-limit", type=float, metavar="S",
        help="seconds after which no test starts; those left count as skipped (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=workers, help=f"processes (default here {workers})"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="each worker sees one of N GPUs (default: all see all)",
    )
    parser.add_argument("--profile", default=os.environ.get("HYPOTHESIS_PROFILE", "gpu"))
    parser.add_argument(
        "--part", metavar="K/N", help="run the K-th of N parts of the tests, recorded on its own"
    )
    parser.add_argument("--name", help="record what is selected as tests-NAME.json")
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="F", help="the tests of these files alone"
    )
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as pytest's -k")
    parser.add_argument("--no-record", action="store_true", help="write no file")
    ours, for_pytest = parser.parse_known_args()
    if ours.name and ours.part:
        parser.error("--name: a part of the tests has its name already")
    if (ours.files or ours.k) and not (ours.name or ours.no_record):
        parser.error("--files, -k: with --name or --no-record, the record of all tests stays")
    return ours, for_pytest


def main() -> int:
    """Run and record; the exit code of pytest."""
    ours, for_pytest = options()
    started = time.time()
    try:
        about = environment()
    except (OSError, subprocess.CalledProcessError):
        print("test_gpu: no NVIDIA GPU (nvidia-smi does not answer)", file=sys.stderr)
        return 2
    os.environ |= {
        "NUMBA_ENABLE_CUDASIM": "0",
        "HYPOTHESIS_PROFILE": ours.profile,
        # One thread for NumPy in each of the workers: the references are many and small.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if ours.part:
        os.environ["FA2_TEST_PART"] = ours.part
    if ours.gpus:
        os.environ["FA2_TEST_GPUS"] = str(ours.gpus)
    if ours.time_limit:
        os.environ["FA2_TEST_DEADLINE"] = str(started + ours.time_limit)
    recorder, shared = Recorder(), ["-q", "-p", "no:benchmark", "-k", ours.k, *for_pytest]
    files = ours.files or [str(TESTS)]
    workers = ["-n", str(ours.workers), "--dist", "loadgroup"] if ours.workers > 1 else []

    def run(which: str, *more: str) -> int:
        found = int(pytest.main([*files, "-m", which, *more, *shared], plugins=[recorder]))
        return 0 if found == pytest.ExitCode.NO_TESTS_COLLECTED else found

    code = run("gpu and not alone", *workers)
    first, _, last = (ours.part or "1/1").partition("/")
    if first == last:
        os.environ.pop("FA2_TEST_PART", None)
        code = run("gpu and alone") or code
    if code == 0 and not recorder.numbers["passed"]:
        print("test_gpu: no test ran, see the reasons above", file=sys.stderr)
        code = 1

    chosen = ["-k", ours.k] if ours.k else []
    record = {
        **about,
        "command": shlex.join(["pytest", *ours.files, "-m", "gpu", *chosen, *for_pytest]),
        "part": ours.part,
        "files": ours.files,
        "profile": ours.profile,
        "workers": ours.workers,
        "gpus": ours.gpus,
        "exit_code": code,
        **recorder.numbers,
        "seconds": round(time.time() - started, 1),
    }
    if not ours.no_record:
        name = ours.part.replace("/", "of") if ours.part else ours.name
        path = results_folder(about["gpu"]) / f"tests{f'-{name}' if name else ''}.json"
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"written: {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
