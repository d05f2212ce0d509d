"""fa3 under compute-sanitizer, recorded: ``python -m benchmarks.sanitizer``.

Runs ``tests/fa3_sanitizer.py`` under each of the four tools, and each planted fault of
``tests/sanitizer_faults.py`` under the tool that looks for its kind: no errors of a tool mean
something only where it sees such a fault. Writes ``benchmarks/results/<GPU>/sanitizer.json``. Exits
with 1 if a case of fa3 was wrong or had an error, or if a tool saw none of its faults.

``pip install nvidia-cuda-sanitizer-api`` has a later compute-sanitizer than the toolkit may have;
`--compute-sanitizer` says where it is.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, results_folder, write_record

TESTS = Path(__file__).parent.parent / "tests"
CASES, FAULTS = TESTS / "fa3_sanitizer.py", TESTS / "sanitizer_faults.py"
BARRIERS = ("--num-cuda-barriers", "32")  # in inline PTX the compiler does not count them
TOOLS: dict[str, tuple[str, ...]] = {
    # Libraries ask the driver for what it may not have; such calls are no errors of a kernel. Bytes
    # behind each allocation keep the next one away.
    "memcheck": ("--report-api-errors", "no", "--padding", "65536"),
    "racecheck": BARRIERS,
    "synccheck": BARRIERS,
    "initcheck": (),
}
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) .*$", re.MULTILINE)


def environment_of_cases() -> dict[str, str]:
    """An allocation for each tensor: what lies between two of them belongs to nobody."""
    return os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def summary(output: str) -> tuple[int | None, str]:
    """How many errors a tool found (None if it did not say), and its own line about it."""
    found = SUMMARY.search(output)
    return (int(found[1]), found[0].strip("= ")) if found else (None, "")


def faults() -> dict[str, str]:
    """The planted faults and the tool for each, as the file lists them."""
    command = [sys.executable, str(FAULTS)]
    listed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment_of_cases()
    )
    return dict(line.split("\t") for line in listed.stdout.splitlines())


def run(sanitizer: str, n: int, tool: str, arguments: list[str], limit: float) -> dict[str, Any]:
    """One program under one tool; `n` keeps runs beside each other apart."""
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--target-processes", "application-only"]
    command += ["--launch-timeout", "120", "--port", str(49152 + 16 * n)]
    started, code = time.time(), None
    process = subprocess.Popen(
        [*command, sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environment_of_cases(), start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what the tool has started, too
        output, _ = process.communicate()
    errors, line = summary(output)
    print(f"---- {tool} {' '.join(arguments)} (exit code {code})\n{output}", flush=True)
    return {
        "errors": errors,
        "summary": line,
        "exit_code": code,
        "cases_right": len(re.findall(r": right$", output, re.MULTILINE)),
        "seconds": round(time.time() - started, 1),
    }


def main() -> int:
    """Run all of them, a few at a time, and record what they said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compute-sanitizer", default="compute-sanitizer", metavar="PATH")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run")
    options = parser.parse_args()
    sanitizer = shutil.which(options.compute_sanitizer)
    if sanitizer is None:
        parser.error(f"--compute-sanitizer: got {options.compute_sanitizer}, which is no program")
    about = environment()
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"Version (\S+)", said.stdout)
    runs = [(tool, [str(CASES)]) for tool in TOOLS]
    planted = faults()
    runs += [(tool, [str(FAULTS), name]) for name, tool in planted.items()]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(
            pool.map(lambda n: run(sanitizer, n, *runs[n], options.timeout), range(len(runs)))
        )
    of_cases, of_faults = results[: len(TOOLS)], results[len(TOOLS) :]
    told = ("errors", "summary", "exit_code")
    record = {
        **about,
        "compute_sanitizer": version[1] if version else said.stdout.strip(),
        "options": {tool: " ".join(more) for tool, more in TOOLS.items()},
        "tools": [
            {"tool": tool, **found} for tool, found in zip(TOOLS, of_cases, strict=True)
        ],
        "faults": [
            {"fault": name, "tool": tool} | {what: found[what] for what in told}
            for (name, tool), found in zip(planted.items(), of_faults, strict=True)
        ],
    }  # fmt: skip
    path = results_folder(about["gpu"]) / "sanitizer.json"
    write_record(record, path)
    print(f"written: {path}")
    clean = all(found["errors"] == 0 and found["exit_code"] == 0 for found in record["tools"])
    saw = {fault["tool"] for fault in record["faults"] if fault["errors"]}
    return 0 if clean and saw == set(TOOLS) else 1


if __name__ == "__main__":
    sys.exit(main())
