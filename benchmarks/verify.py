"""Predicted and counted numbers against the hardware's counters, over grids of problems.

``python -m benchmarks.verify`` writes ``verify.json`` (the readable forward kernels),
``verify_backward.json``, ``verify_fa3.json`` and ``verify_fa3_backward.json`` in
``benchmarks/results/<gpu>``; with ``--cases backward,fa3`` those alone. In them, for every launch
of every case: what the model predicted, what the counted kernel counted, and what the GPU's
counters read while the plain kernel ran under ncu. Exits with 1 if any two numbers differ, with 2
if something cannot be read.

A grid has few kernels and many shapes, because a kernel takes seconds to compile. Worker
processes compile: each takes a kernel's cases, counts them, and runs their plain kernels too, which
puts them into the kernel cache for the process that ncu profiles.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.environment import environment, results_folder, write_record
from fa2_numba.accounting import hardware, verify
from fa2_numba.accounting.hardware import Case
from fa2_numba.accounting.launches import in_processes, launch
from fa2_numba.accounting.verify import CountedLaunch

# batch, heads, heads_kv, N_q, N_k: whole and ragged tiles, N_q below and above N_k, grouped heads.
SHAPES = (
    (1, 2, 2, 512, 512),
    (1, 4, 4, 1024, 1024),
    (2, 4, 2, 333, 333),
    (1, 8, 1, 1000, 517),
    (2, 2, 1, 257, 1023),
    (1, 3, 3, 1, 2048),
    (1, 4, 2, 129, 77),
)
# Method, dtype, d and the mask decide what is compiled. d = 33 admits no 16-byte access.
KERNELS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("fa2", "fp32", 64, {}),
    ("fa2", "fp32", 64, {"causal": True}),
    ("fa2", "fp32", 64, {"window": (100, 20)}),
    ("fa2", "fp32", 64, {"mask": "boolean"}),
    ("fa2", "fp32", 128, {"causal": "skip"}),
    ("fa2", "fp32", 33, {"causal": True}),
    ("fa2", "fp64", 48, {"causal": True}),
    ("fa2", "fp16", 64, {"causal": True}),
    ("fa2", "fp16", 64, {"mask": "documents"}),
    ("fa2", "bf16", 128, {}),
    ("fa2", "bf16", 48, {"mask": "alibi"}),
    ("fa2", "bf16", 64, {"mask": "softcap"}),
    ("fa1", "fp32", 64, {}),
    ("fa1", "fp16", 64, {"causal": True}),
    ("standard", "fp32", 64, {"causal": True}),
    ("standard", "bf16", 33, {}),
)


# Those whose shared memory is compared as well, at the first shapes.
ON_CHIP: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("fa2", "fp32", 64, {}),
    ("fa2", "fp32", 64, {"causal": True}),
    ("fa2", "fp32", 128, {"causal": "skip"}),
    ("fa2", "fp32", 33, {"causal": True}),
    ("fa2", "fp64", 48, {"causal": True}),
    ("fa2", "fp16", 64, {"causal": True}),
    ("fa1", "fp32", 64, {}),
    ("standard", "fp32", 64, {"causal": True}),
)
ON_CHIP_SHAPES = (SHAPES[0], SHAPES[2], SHAPES[6])

# With 8 heads and N = 1,024: one row tile a block. Then more row tiles than SMs, and boxes that
# end beyond N or lie there altogether; rows that see no key.
FA3: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("fa3", "bf16", 40, {}),  # rows that start in the middle of a sector
    ("fa3", "bf16", 72, {"causal": True}),  # so do those of the first of two boxes
    ("fa3", "bf16", 64, {}),
    ("fa3", "fp16", 64, {"causal": True}),
    ("fa3", "bf16", 96, {"causal": True}),
    ("fa3", "bf16", 128, {}),
    ("fa3", "fp16", 128, {"causal": True}),
    ("fa3", "bf16", 128, {"window": (100, 20)}),
    ("fa3", "bf16", 256, {"causal": True}),
)
FA3_SHAPES = (
    (1, 8, 8, 1024, 1024),
    (2, 16, 4, 777, 1100),
    (1, 8, 1, 1000, 517),
    (1, 2, 2, 129, 77),
)

# d = 33: dO, O and dQ element by element.
BACKWARD: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("fa2_backward", "fp32", 64, {}),
    ("fa2_backward", "fp32", 33, {"causal": True}),
    ("fa2_backward", "bf16", 128, {"causal": True}),
    ("fa2_backward_deterministic", "fp32", 64, {"causal": True}),
    ("fa2_backward_deterministic", "bf16", 64, {}),
    ("fa1_backward", "fp32", 64, {"causal": True}),
    ("fa1_backward", "bf16", 64, {}),
    ("standard_backward", "fp32", 64, {}),
    ("standard_backward", "bf16", 64, {"causal": True}),
)
BACKWARD_SHAPES = ((1, 2, 2, 512, 512), (2, 4, 2, 333, 257), (1, 4, 1, 129, 300))

# Adds of dQ by the copy unit, and dQ in a second pass; d = 256: each gradient by itself.
FA3_BACKWARD: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("fa3_backward", "bf16", 40, {}),
    ("fa3_backward", "bf16", 64, {}),
    ("fa3_backward", "fp16", 64, {"causal": True}),
    ("fa3_backward", "bf16", 128, {}),
    ("fa3_backward", "bf16", 128, {"causal": True}),
    ("fa3_backward", "bf16", 256, {"causal": True}),
    ("fa3_backward_deterministic", "fp16", 64, {"causal": True}),
    ("fa3_backward_deterministic", "bf16", 128, {}),
)
FA3_BACKWARD_SHAPES = ((1, 8, 8, 1024, 1024), (2, 4, 2, 333, 257), (1, 4, 1, 129, 300))


def grid(kernels: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[list[Case]]:
    """The cases, those of one kernel together."""
    return [
        [Case(method, dtype, *shape, d, **options) for shape in shapes]
        for method, dtype, d, options in kernels
    ]


@dataclass(frozen=True)
class Suite:
    """Cases that are recorded together.

    Attributes
    ----------
    file : str
        Name of the record.
    groups : list of list of Case
        Those whose global memory is compared; a group has one kernel.
    on_chip : list of list of Case
        Those whose shared memory is compared besides.
    """

    file: str
    groups: list[list[Case]]
    on_chip: list[list[Case]] = field(default_factory=list)

    @property
    def parts(self) -> list[tuple[list[list[Case]], bool]]:
        """What one run of ncu reads: groups, and whether shared memory, too."""
        parts = ((self.groups, False), (self.on_chip, True))
        return [(groups, on_chip) for groups, on_chip in parts if groups]


SUITES = {
    "forward": Suite("verify.json", grid(KERNELS, SHAPES), grid(ON_CHIP, ON_CHIP_SHAPES)),
    "backward": Suite("verify_backward.json", grid(BACKWARD, BACKWARD_SHAPES)),
    "fa3": Suite("verify_fa3.json", grid(FA3, FA3_SHAPES)),
    "fa3_backward": Suite("verify_fa3_backward.json", grid(FA3_BACKWARD, FA3_BACKWARD_SHAPES)),
}


def count(cases: Sequence[Case], on_chip: bool) -> list[CountedLaunch]:
    """Count the cases of one kernel, and run them plain, so that both are compiled and cached."""
    for case in cases:
        launch(case)
    return verify.count(cases, on_chip)


def count_all(suites: Sequence[Suite], workers: int) -> dict[str, list["Future[Any]"]]:
    """What the launches of each group counted, by worker processes: by file, futures that are done.

    A group that fails leaves the others alone.
    """
    jobs = [
        (suite.file, cases, on_chip)
        for suite in suites
        for groups, on_chip in suite.parts
        for cases in groups
    ]
    order = sorted(range(len(jobs)), key=lambda n: not jobs[n][2])  # the longest to compile first
    calls = in_processes(count, [jobs[n][1:] for n in order], workers)
    done: dict[int, Future[Any]] = {}
    for n, call in zip(order, calls, strict=True):
        first, error = jobs[n][1][0], call.exception()
        about = f"{first.method} {first.dtype} d = {first.d}"
        found = f"{type(error).__name__}" if error else f"{len(call.result())} launches"
        print(f"counted {about}: {found}", flush=True)
        done[n] = call
    by_file: dict[str, list[Future[Any]]] = {suite.file: [] for suite in suites}
    for n, (file, _, _) in enumerate(jobs):
        by_file[file].append(done[n])
    return by_file


def joined(groups: Sequence[list[CountedLaunch]], cases: Sequence[list[Case]]) -> list[Any]:
    """The launches of all groups, their cases numbered through."""
    found: list[CountedLaunch] = []
    first = 0
    for launches, of in zip(groups, cases, strict=True):
        found += [replace(launch, case=first + launch.case) for launch in launches]
        first += len(of)
    return found


def compared(
    suite: Suite, counted: Sequence["Future[Any]"], ncu: str
) -> list[tuple[list[Case], verify.Verification]]:
    """The cases of each part of a suite, and what was found.

    Raises
    ------
    Exception
        Of a group that could not be counted, or of the counters (`HardwareError`).
    """
    launches = iter([call.result() for call in counted])
    found = []
    for groups, on_chip in suite.parts:
        mine = joined([next(launches) for _ in groups], groups)
        cases = [case for group in groups for case in group]
        found.append((cases, verify.verify(cases, ncu=ncu, counted=mine, on_chip=on_chip)))
    return found


def chosen(names: str) -> list[Suite]:
    """The suites of these names, joined by commas.

    Raises
    ------
    argparse.ArgumentTypeError
        A name that is none.
    """
    given = names.split(",")
    if unknown := [name for name in given if name not in SUITES]:
        raise argparse.ArgumentTypeError(
            f"got {unknown[0]!r}, accepted: {', '.join(SUITES)}, joined by commas"
        )
    return [suite for name, suite in SUITES.items() if name in given]


def main() -> int:
    """Count, profile, compare, write the JSON."""
    workers = max(1, (os.cpu_count() or 1) - 1)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verify", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ncu", metavar="PATH", help="Nsight Compute's ncu (default: searched)")
    parser.add_argument(
        "--cases",
        type=chosen,
        default=",".join(SUITES),
        metavar="NAMES",
        help="what to run and record (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=workers, help=f"processes that compile (default {workers})"
    )
    options = parser.parse_args()
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # small grids are meant here
    started = time.perf_counter()
    try:
        hardware.require_gpu()
        ncu = hardware.find_ncu(options.ncu)
    except hardware.HardwareError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    counted = count_all(options.cases, options.workers)
    counting = time.perf_counter() - started
    codes = []
    for suite in options.cases:
        begun = time.perf_counter()
        try:
            found = compared(suite, counted[suite.file], ncu)
        except Exception as error:  # whatever happens, the other suites are recorded
            if not isinstance(error, hardware.HardwareError):
                traceback.print_exception(error)
            print(f"verify: {suite.file} is not written: {error}", file=sys.stderr)
            codes.append(2)
            continue
        reading = time.perf_counter() - begun
        seconds = {"counting": round(counting, 1), "all": round(counting + reading, 1)}
        codes.append(record(suite, found, {"ncu": hardware.version(ncu), "seconds": seconds}))
    return max(codes)


def record(
    suite: Suite, found: Sequence[tuple[list[Case], verify.Verification]], more: dict[str, Any]
) -> int:
    """Print what was found, and write it; the exit code."""
    for _, part in found:
        for line in verify.summary(part):
            print(line)
    about = environment()
    exact = [row for _, part in found for row in part.rows if row.exact]
    differing = sum(len(part.differing) for _, part in found)
    counters, read = hardware.COUNTERS, found[0][1].counters
    summary = {
        **about,
        **more,
        "metrics": {f"{c.quantity} ({c.op})": c.metric for c in found[-1][1].counters},
        "not_on_this_gpu": [f"{c.quantity} ({c.op})" for c in counters if c not in read],
        "not_compared": [f"{c.quantity} ({c.op})" for _, part in found for c in part.unread],
        "launches": sum(part.launches for _, part in found),
        "numbers": len(exact),
        "differences": differing,
    }
    path = results_folder(about["gpu"]) / suite.file
    write_record(with_rows(summary, found), path)
    print(f"written: {path}")
    return 1 if differing else 0


def with_rows(
    record: dict[str, Any], found: Sequence[tuple[list[Case], verify.Verification]]
) -> dict[str, Any]:
    """The record with its cases and rows; a row names its case by number.

    A row without "predicted" has a number of which the model says nothing. One whose "exact" is
    false shows a counter that addresses alone do not decide.
    """
    columns = ("case", "launch", "kernel", "quantity", "op", "counted", "hardware", "difference")
    cases: list[Any] = []
    rows: list[dict[str, Any]] = []
    launches = 0
    for part_cases, part in found:
        for row in part.rows:
            line = {name: row.as_dict()[name] for name in columns}
            line["case"] += len(cases)
            line["launch"] += launches
            if row.predicted is not None:
                line["predicted"] = row.predicted
            rows.append(line if row.exact else {**line, "exact": False})
        cases += [asdict(case) for case in part_cases]
        launches += part.launches
    return {**record, "cases": cases, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
