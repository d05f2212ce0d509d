"""Counted numbers against the hardware's counters, over a grid of problems.

``python -m benchmarks.verify`` writes ``benchmarks/results/<gpu>/verify.json``: for every launch of
every case, what the counted kernel counted, and what the GPU's counters read while the plain kernel
ran under ncu. Exits with 1 if any two numbers differ, with 2 if the counters cannot be read.

The grid has few kernels and many shapes, because a kernel takes seconds to compile. Worker
processes compile: each takes a kernel's cases, counts them, and runs their plain kernels too, which
puts them into the kernel cache for the process that ncu profiles.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
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


def grid(kernels: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[list[Case]]:
    """The cases, those of one kernel together."""
    return [
        [Case(method, dtype, *shape, d, **options) for shape in shapes]
        for method, dtype, d, options in kernels
    ]


def grids() -> tuple[list[list[Case]], list[list[Case]]]:
    """All groups: those whose global memory is compared, those with shared memory besides."""
    return grid(KERNELS, SHAPES), grid(ON_CHIP, ON_CHIP_SHAPES)


def count(cases: Sequence[Case], on_chip: bool) -> list[CountedLaunch]:
    """Count the cases of one kernel, and run them plain, so that both are compiled and cached."""
    for case in cases:
        launch(case)
    return verify.count(cases, on_chip)


def count_all(groups: Sequence[list[Case]], on_chip: Sequence[bool], workers: int) -> list[Any]:
    """What each group's launches counted, by worker processes."""
    order = sorted(range(len(groups)), key=lambda n: not on_chip[n])  # the longest to compile first
    calls = in_processes(count, [(groups[n], on_chip[n]) for n in order], workers)
    found: list[Any] = [None] * len(groups)
    for n, call in zip(order, calls, strict=True):
        found[n], first = call.result(), groups[n][0]
        about = f"{first.method} {first.dtype} d = {first.d}"
        print(f"counted {about}: {len(found[n])} launches", flush=True)
    return found


def joined(groups: Sequence[list[CountedLaunch]], cases: Sequence[list[Case]]) -> list[Any]:
    """The launches of all groups, their cases numbered through."""
    found: list[CountedLaunch] = []
    first = 0
    for launches, of in zip(groups, cases, strict=True):
        found += [replace(launch, case=first + launch.case) for launch in launches]
        first += len(of)
    return found


def main() -> int:
    """Count, profile, compare, write the JSON."""
    workers = max(1, (os.cpu_count() or 1) - 1)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verify", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ncu", metavar="PATH", help="Nsight Compute's ncu (default: searched)")
    parser.add_argument(
        "--workers", type=int, default=workers, help=f"processes that compile (default {workers})"
    )
    options = parser.parse_args()
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # small grids are meant here
    plain, deep = grids()
    started = time.perf_counter()
    try:
        hardware.require_gpu()
        ncu = hardware.find_ncu(options.ncu)
        flags = [False] * len(plain) + [True] * len(deep)
        counted = count_all([*plain, *deep], flags, options.workers)
        counting = time.perf_counter() - started
        found = []
        for groups, launches, on_chip in (
            (plain, counted[: len(plain)], False),
            (deep, counted[len(plain) :], True),
        ):
            cases = [case for group in groups for case in group]
            all_launches = joined(launches, groups)
            found.append(
                (cases, verify.verify(cases, ncu=ncu, counted=all_launches, on_chip=on_chip))
            )
    except hardware.HardwareError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    for _, part in found:
        for line in verify.summary(part):
            print(line)
    about = environment()
    exact = [row for _, part in found for row in part.rows if row.exact]
    differing = sum(len(part.differing) for _, part in found)
    record = {
        **about,
        "ncu": hardware.version(ncu),
        "metrics": {f"{c.quantity} ({c.op})": c.metric for c in found[-1][1].counters},
        "not_on_this_gpu": [
            f"{c.quantity} ({c.op})" for c in hardware.COUNTERS if c not in found[0][1].counters
        ],
        "not_compared": [f"{c.quantity} ({c.op})" for _, part in found for c in part.unread],
        "launches": sum(part.launches for _, part in found),
        "numbers": len(exact),
        "differences": differing,
        "seconds": {
            "counting": round(counting, 1),
            "all": round(time.perf_counter() - started, 1),
        },
    }
    path = results_folder(about["gpu"]) / "verify.json"
    write_record(with_rows(record, found), path)
    print(f"written: {path}")
    return 1 if differing else 0


def with_rows(
    record: dict[str, Any], found: Sequence[tuple[list[Case], verify.Verification]]
) -> dict[str, Any]:
    """The record with its cases and rows; a row names its case by number.

    A row whose "exact" is false shows a counter that addresses alone do not decide.
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
            rows.append(line if row.exact else {**line, "exact": False})
        cases += [asdict(case) for case in part_cases]
        launches += part.launches
    return {**record, "cases": cases, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
