"""The IO figure of the FlashAttention paper (2022, Fig. 2): HBM accesses and time by block size.

``python -m benchmarks.fig2`` writes ``benchmarks/results/<gpu>/fig2.json``.

The paper's problem, GPT-2 medium at N = 1024: 16 heads, batch 64, d = 64; here forward only, fp32,
for square tiles, with fa1 and with fa2. Issued bytes are predicted; DRAM bytes are what ncu reads,
each kernel with empty caches, so that writes which are still in L2 at a kernel's end are missing.
Times are medians of bursts between two CUDA events, the cases taking turns.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import fa2_numba
from benchmarks.environment import environment, nvidia_smi, results_folder, write_record
from fa2_numba.accounting import levels
from fa2_numba.accounting.bench import take_turns
from fa2_numba.io_model import predict, total
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling

N, D, HEADS, BATCH = 1024, 64, 16, 64
TILINGS = {
    16: Tiling(16, 16, 8, 16),
    32: Tiling(32, 32, 8, 16),
    48: Tiling(48, 48, 8, 16),
    64: Tiling(64, 64, 8, 16),
    96: Tiling(96, 96, 16, 16),
    128: Tiling(128, 128, 16, 16),
}


def problems(blocks: list[int]) -> list[Problem]:
    """Both methods at each block size."""
    return [
        levels.problem(method, False, N, TILINGS[block], d=D, heads=HEADS, batch=BATCH)
        for block in blocks
        for method in ("fa1", "fa2")
    ]


def timed(found: list[Problem], rounds: int) -> list[list[float]]:
    """Milliseconds of each problem, on the same random normal data."""
    q, k, v = levels.case_of(found[0]).arrays()

    def call(p: Problem) -> Callable[[], Any]:
        return lambda: fa2_numba.attention(q, k, v, method=p.method, tiling=p.tiling)

    return take_turns([call(p) for p in found], rounds)


def compiled(method: str, block: int) -> None:
    """Run a method's kernels on one head, which puts them into the kernel cache."""
    levels.launched(levels.problem(method, False, N, TILINGS[block], d=D))


def row(p: Problem, times: list[float], SMs: int, l2_bytes: int) -> dict[str, Any]:
    """One method at one block size, without what ncu reads."""
    launches = levels.launched(p)
    slots = levels.slots(launches, SMs)
    return {
        "method": p.method,
        "block": p.tiling.B_r,
        "dtype": p.dtype,
        "batch": p.B,
        "heads": p.H,
        "n": p.N_q,
        "d": p.d,
        "threads": p.tiling.threads,
        "slots": slots,
        "issued": total(predict(p)),
        "model": levels.modelled(p, slots, l2_bytes, levels.code(launches)),
        "in_domain": levels.in_domain(p, slots, l2_bytes),
        "milliseconds": round(statistics.median(times), 4),
        "milliseconds_min": round(min(times), 4),
        "milliseconds_max": round(max(times), 4),
    }


def main() -> None:
    """Time, read the counters, print a table, write the JSON."""
    from benchmarks.gpu_time import compile_ahead  # needs CuPy

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", default=",".join(map(str, TILINGS)), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    blocks = options.blocks.split(",")
    if unknown := set(blocks) - set(map(str, TILINGS)):
        parser.error(f"--blocks: got {unknown.pop()}, accepted: {', '.join(map(str, TILINGS))}")
    found = problems([int(block) for block in blocks])
    compile_ahead(compiled, [(p.method, p.tiling.B_r) for p in found])
    about, (SMs, l2_bytes) = environment(), levels.device()
    rows = [
        row(p, times, SMs, l2_bytes)
        for p, times in zip(found, timed(found, options.rounds), strict=True)
    ]
    clock, power, heat = nvidia_smi("clocks.sm", "power.draw", "temperature.gpu")
    for known, read in zip(rows, levels.measure(found), strict=True):
        for op in ("load", "store"):
            known[f"dram_{op}s"] = total(read, level="DRAM", op=op)
    record = {
        **about,
        "rounds": options.rounds,
        "after": {"sm_clock": clock, "power": power, "temperature": heat},
        "cache_control": "all",
        "rows": rows,
    }
    target = results_folder(about["gpu"]) / "fig2.json"
    write_record(record, target)
    for r in rows:
        dram = r["dram_loads"] + r["dram_stores"]
        print(
            f"{r['method']} block {r['block']:<4} issued {r['issued'] / 1e9:7.2f} GB  "
            f"DRAM {dram / 1e9:6.2f} GB  {r['milliseconds']:8.3f} ms"
        )
    print(f"wrote {target.name}")


if __name__ == "__main__":
    main()
