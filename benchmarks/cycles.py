"""The cycle model against the clock: predicted and measured time over 72 configurations.

``python -m benchmarks.cycles`` writes ``benchmarks/results/<gpu>/cycles.json``.

Calibration, once for each method and head dimension: one launch with a block on every SM and one
with every place taken, at a small size, timed by the kernels' own phase marks, give the cycles of
one visit of each phase (`accounting.cycles.Cost`). Then fp32, batch x N = 16,384, hidden 2048: the
model predicts each method at each size, causal or not, and the plain kernels are timed between
CUDA events, in bursts, taking turns. The costs of the unmasked kernel predict the causal one too.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from typing import Any

import cupy
import numpy as np

from benchmarks.environment import environment, nvidia_smi, results_folder
from benchmarks.gpu_time import compile_ahead, random_call
from fa2_numba.accounting import cycles
from fa2_numba.accounting.bench import take_turns
from fa2_numba.accounting.cycles import Cost
from fa2_numba.clock import Timeline
from fa2_numba.problem import PORTABLE

TOKENS, HIDDEN = 16384, 2048
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
CAUSAL = (False, True)


def small(method: str, d: int, causal: bool, timed: bool) -> None:
    """Launch once, so that the kernels are compiled and cached."""
    random_call(method, 1, 1, 256, 256, d, causal).run(timed=timed)


def costs_of(seen: Timeline, visits: dict[str, int], places: int) -> tuple[dict[str, float], float]:
    """Cycles of a visit of each phase, and of a block outside them, with `places` on an SM."""
    phases = seen.cycles.mean(axis=(0, 1))
    spans = []
    for sm in np.unique(seen.smid):
        here = seen.smid == sm
        span = seen.end[here].max() - seen.start[here].min()
        spans.append(span * min(places, here.sum()) / here.sum())
    rest = float(np.mean(spans) - phases.sum())
    return {p: float(c) / visits[p] for p, c in zip(seen.phases, phases, strict=True)}, rest


def calibrate(method: str, d: int, SMs: int) -> tuple[dict[str, Cost], list[float]]:
    """Costs of each kernel of a method, and the cycles of a nanosecond that were seen."""
    tiling = random_call(method, 1, 1, 256, 256, d).tiling
    T_r = max(n for n in range(1, 13) if SMs % n == 0)  # row tiles of a head
    N = T_r * tiling.B_r
    if method == "fa1":
        alone, full = (SMs, N, N), (4 * SMs, N, N)
    else:  # of `standard`, the scores' blocks are what stands alone
        N_k = N if method == "fa2" else SMs // T_r * tiling.B_c
        alone = (SMs // T_r if method == "fa2" else 1, N, N_k)
        full = (4 * SMs // T_r, N, N)
    seen: dict[str, tuple[Any, ...]] = {}
    slopes = []
    for name, (heads, N_q, N_k) in (("alone", alone), ("full", full)):
        ready = random_call(method, 1, heads, N_q, N_k, d)
        for _ in range(3):  # the last of three: warm, and the clock is up
            ran = ready.run(timed=True)
        cupy.cuda.Device().synchronize()
        places = {x.kernel: x.blocks_per_sm for x in ran.launches}
        visits = cycles.visits(ran.problem)
        for timeline in ran.timelines():
            kernel = timeline.kernel
            here = 1 if name == "alone" else places[kernel]
            found = costs_of(timeline, visits[kernel][0][0], here)
            seen.setdefault(kernel, ())
            seen[kernel] += (*found, places[kernel])
            elapsed = timeline.ns[:, 1] - timeline.ns[:, 0]
            slopes.append(float(np.median(np.diff(timeline.pair)[:, 0] / elapsed)))
    costs = {
        kernel: Cost(first, second, rest_first, rest_second, places)
        for kernel, (first, rest_first, _, second, rest_second, places) in seen.items()
    }
    return costs, slopes


def copy_rate() -> float:
    """Bytes per second of a device-to-device copy, read and written."""
    source = cupy.ones(2**28, cupy.float32)
    target = cupy.empty_like(source)
    times = take_turns([lambda: cupy.copyto(target, source)], 7)[0]
    return 2 * source.nbytes / (statistics.median(times) / 1e3)


def rows(
    sizes: list[int], rounds: int, calibration: dict[Any, Any], SMs: int, rate: float
) -> list[Any]:
    """A row for each configuration, predicted and measured; `rate` is that of a copy."""
    found = []
    for d, causal, n in itertools.product(HEAD_DIMS, CAUSAL, sizes):
        calls = {m: random_call(m, TOKENS // n, HIDDEN // d, n, n, d, causal) for m in PORTABLE}
        times = take_turns([c.run for c in calls.values()], rounds)
        for (method, ready), measured in zip(calls.items(), times, strict=True):
            costs, slopes = calibration[method, d]
            gigahertz = statistics.median(slopes)
            predicted = cycles.milliseconds(ready.problem(), costs, SMs, gigahertz, rate)
            median = statistics.median(measured)
            found.append(
                {
                    "method": method,
                    "d": d,
                    "causal": causal,
                    "n": n,
                    "batch": TOKENS // n,
                    "heads": HIDDEN // d,
                    "predicted_ms": round(predicted, 4),
                    "measured_ms": round(median, 4),
                    "measured_min": round(min(measured), 4),
                    "measured_max": round(max(measured), 4),
                    "ratio": round(predicted / median, 4),
                }
            )
            print(
                f"{method:9} d={d:3} causal={causal!s:5} N={n:5} predicted {predicted:9.3f} ms, "
                f"measured {median:9.3f} ms, ratio {predicted / median:.3f}",
                flush=True,
            )
        del calls
        cupy.get_default_memory_pool().free_all_blocks()
    return found


def main() -> int:
    """Calibrate, predict, measure, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cycles", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    started = time.perf_counter()
    about = environment()
    variants = [(False, False), (True, False), (False, True)]  # (causal, timed)
    compile_ahead(small, [(m, d, *v) for m in PORTABLE for d in HEAD_DIMS for v in variants])
    compiled = time.perf_counter() - started
    SMs = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    clock_before = nvidia_smi("clocks.sm")[0]
    calibration = {(m, d): calibrate(m, d, SMs) for m in PORTABLE for d in HEAD_DIMS}
    rate = copy_rate()
    found = rows(options.sizes, options.rounds, calibration, SMs, rate)
    predicted = [r["predicted_ms"] for r in found]
    measured = [r["measured_ms"] for r in found]
    record = {
        **about,
        "setting": f"fp32, batch x N = {TOKENS}, hidden {HIDDEN}",
        "SMs": SMs,
        "copy_bytes_per_second": round(rate),
        "clocks": {"before": clock_before, "after": nvidia_smi("clocks.sm")[0]},
        "calibration": [
            {
                "method": method,
                "d": d,
                "gigahertz": round(statistics.median(slopes), 4),
                "kernels": {
                    kernel: {
                        "places": c.places,
                        "alone": {p: round(x, 2) for p, x in c.alone.items()},
                        "full": {p: round(x, 2) for p, x in c.full.items()},
                        "rest_alone": round(c.rest_alone, 1),
                        "rest_full": round(c.rest_full, 1),
                    }
                    for kernel, c in costs.items()
                },
            }
            for (method, d), (costs, slopes) in calibration.items()
        ],
        "configurations": len(found),
        "mean_absolute_error": round(cycles.mean_absolute_error(predicted, measured), 4),
        "largest_ratio": round(cycles.largest_error(predicted, measured), 4),
        "by_method": {
            m: round(
                cycles.mean_absolute_error(
                    *(
                        [r[x] for r in found if r["method"] == m]
                        for x in ("predicted_ms", "measured_ms")
                    )
                ),
                4,
            )
            for m in PORTABLE
        },
        "rows": found,
        "seconds": {
            "compiling": round(compiled, 1),
            "all": round(time.perf_counter() - started, 1),
        },
    }
    path = results_folder(about["gpu"]) / "cycles.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"mean absolute error {record['mean_absolute_error']:.2%} over {len(found)}")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
