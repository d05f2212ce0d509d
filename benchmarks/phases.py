"""Phases of the readable kernels in cycles, and what timing them costs.

``python -m benchmarks.phases`` writes ``benchmarks/results/<gpu>/phases.json``.

Setting: fp32, batch 1, hidden size 2048 (32 heads of d = 64, 16 of d = 128), so that fa2 and
standard fill the GPU (fa1 has one block a head). Each cell is one table of `accounting.timing`: 20
timed launches, and 20 bursts of the plain and the timed kernels in turns. Two things are demanded
of every cell and recorded as failures otherwise: phases cover 95 % of the blocks' residency (of its
warps', in the softmax of standard attention), and fa2's timed kernel is at most 5 % slower than the
plain one.
"""

import argparse
import itertools
import sys
import time
from typing import Any

import cupy

from benchmarks.environment import environment, results_folder, write_record
from benchmarks.gpu_time import compile_ahead
from fa2_numba import api, attention
from fa2_numba.accounting import timing
from fa2_numba.problem import PORTABLE

HIDDEN = 2048
SIZES = (4096, 1024)
HEAD_DIMS = (64, 128)
CAUSAL = (False, True)
DIGITS = 6  # of a recorded number


def arrays(n: int, d: int, heads: int) -> list[Any]:
    """q, k and v: random normal numbers."""
    rng = cupy.random.default_rng(0)
    return [rng.standard_normal((1, heads, n, d), dtype=cupy.float32) for _ in range(3)]


def small(method: str, d: int, causal: bool, capacity: int | None) -> None:
    """Launch once, so that the kernels are compiled and cached; timed if there is a capacity."""
    q, k, v = arrays(256, d, 1)
    if capacity is None:
        attention(q, k, v, causal=causal, method=method)
    else:
        api.trace(q, k, v, causal=causal, method=method, capacity=capacity)


def failures(method: str, table: timing.PhaseTable) -> list[str]:
    """What was demanded and is not so."""
    found = []
    for kernel in table.kernels:
        covered = kernel.covered
        if kernel.kernel == "standard_softmax":  # its warps never meet: one that is done has ended
            covered += kernel.idle / kernel.residency
        if covered < timing.COVERED:
            found.append(f"{kernel.kernel}: phases cover {covered:.1%} of the residency")
    assert table.overhead is not None
    slower = table.overhead.ratio["timed"]
    if method == "fa2" and slower > timing.OVERHEAD:
        found.append(f"fa2: timed {slower:.1%} slower than plain")
    return found


def rounded(x: Any) -> Any:
    """The same, each float with `DIGITS` digits."""
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}")
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return [rounded(value) for value in x] if isinstance(x, list | tuple) else x


def main() -> int:
    """Time, print, write the JSON; 1 if something demanded is not so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.phases", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=60, help="start no cell after these (default: %(default)s)"
    )
    options = parser.parse_args()
    about = environment()
    started = time.perf_counter()
    compile_ahead(small, list(itertools.product(PORTABLE, HEAD_DIMS, CAUSAL, (None, 0, 1))))
    compiled = time.perf_counter() - started
    tables: list[dict[str, Any]] = []
    failed: list[str] = []
    left_out: list[str] = []
    for n, d, causal, method in itertools.product(options.sizes, HEAD_DIMS, CAUSAL, PORTABLE):
        name = f"{method} d={d} n={n} {'causal' if causal else 'full'}"
        if time.perf_counter() - started - compiled > options.seconds:
            left_out.append(name)
            continue
        q, k, v = arrays(n, d, HIDDEN // d)
        table = timing.time_phases(
            q, k, v, method=method, causal=causal, repeats=options.repeats, capacity=0
        )
        assert table.overhead is not None
        tables.append(rounded(table.as_dict()))
        print(f"{name}: {timing.summary(table.overhead)}", flush=True)
        for kernel in table.kernels:
            shares = (f"{r.phase} {r.share:.1%}" for r in table.rows if r.kernel == kernel.kernel)
            print(f"  {kernel.kernel}: {', '.join(shares)}; covered {kernel.covered:.2%}")
        for text in table.warnings:
            print(f"  warning: {text}")
        failed += [f"{name}: {text}" for text in failures(method, table)]
        del q, k, v, table
        cupy.get_default_memory_pool().free_all_blocks()
    record = {
        **about,
        "setting": {"dtype": "fp32", "batch": 1, "hidden": HIDDEN, "data": "normal"},
        "failures": failed,
        "left_out": left_out,
        "seconds": {
            "compiling": round(compiled, 1),
            "all": round(time.perf_counter() - started, 1),
        },
        "tables": tables,
    }
    path = results_folder(about["gpu"]) / "phases.json"
    write_record(record, path, allow_nan=False)
    for text in (*failed, *(f"left out: {name}" for name in left_out)):
        print(text)
    print(f"written: {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
