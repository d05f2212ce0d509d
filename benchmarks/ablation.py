"""From FlashAttention to FlashAttention-2 in single steps, each counted and timed.

``python -m benchmarks.ablation`` writes ``benchmarks/results/<gpu>/ablation.json``.

Each idea is one pair of kernels that differ in it alone (`kernels.steps`, `kernels.split_keys`, or
`fa2` with another mask function), on the same fp32 data. Times are medians between CUDA events, in
bursts, the two taking turns; counts are those of the same kernels with counted arrays.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.environment import environment, results_folder
from benchmarks.gpu_time import compile_ahead, random_call
from fa2_numba import masking
from fa2_numba.accounting import cycles
from fa2_numba.accounting.bench import take_turns
from fa2_numba.kernels import fa2, split_keys, steps
from fa2_numba.launch import Operands
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling

D = 64
COUNTED_N = 1024  # of one head, where loads, stores and shared memory are counted
NORMALISED = "O_i divided by l_i after each tile"
WIDE = Tiling(128, 64, 16, 8)
NARROW = Tiling(32, 64, 16, 8)  # split over keys, each of 4 warps holds 32 x 64 of O_i
Launcher = Callable[[Problem, Operands], None]


def below(args, b, h, i, j):
    """The causal predicate alone: it says nothing of whole tiles, so none is skipped."""
    return j <= i


@dataclass(frozen=True)
class Variant:
    """One side of a comparison."""

    name: str
    launch: Launcher
    tiling: Tiling = WIDE
    causal: bool | str = False
    mask: masking.Mask | None = None


def variant(name: str) -> Launcher:
    """`steps` with one idea taken back."""
    return functools.partial(steps.launch, variant=name)


@dataclass(frozen=True)
class Idea:
    """A step from FlashAttention to FlashAttention-2."""

    name: str
    papers: str
    before: Variant
    after: Variant
    batch: int
    heads: int
    n: int


IDEAS = (
    Idea(
        "O_i is normalised once, at the end",
        "FlashAttention-2, 3.1: fewer non-matmul FLOPs, each worth up to 16 of tensor cores",
        Variant(NORMALISED, variant(steps.NORMALISE)),
        Variant("O_i divided by l_i once", variant(steps.AS_FA2)),
        batch=1, heads=32, n=4096,
    ),
    Idea(
        "blocks over row tiles, not over heads alone",
        "FlashAttention-2, 3.2: more blocks fill the GPU where batch and heads are few",
        Variant("one block a head", variant(steps.ONE_BLOCK)),
        Variant("one block a row tile", variant(steps.AS_FA2)),
        batch=1, heads=32, n=4096,
    ),
    Idea(
        "the same with heads enough",
        "FlashAttention-2, 3.2: batch * heads >= 80 or so filled an A100 already",
        Variant("one block a head", variant(steps.ONE_BLOCK)),
        Variant("one block a row tile", variant(steps.AS_FA2)),
        batch=16, heads=33, n=1024,
    ),
    Idea(
        "warps split Q_i, not K_j",
        "FlashAttention-2, 3.3: split-K writes partial results to shared memory and adds them up",
        Variant("warps split K_j, V_j", split_keys.launch, NARROW),
        Variant("warps split Q_i", variant(steps.AS_FA2), NARROW),
        batch=1, heads=32, n=4096,
    ),
    Idea(
        "tiles above the diagonal are skipped",
        "FlashAttention-2, 3.1: about half of the blocks, 1.7x to 1.8x faster",
        Variant("causal mask, every tile computed", fa2.launch,
                mask=masking.custom(below, name="causal without skipping")),
        Variant("causal, loop bound", fa2.launch, causal=True),
        batch=1, heads=32, n=4096,
    ),
    Idea(
        "the loop ends at the diagonal, no tile is asked",
        "none; both are in this package",
        Variant("causal, tiles asked and skipped", fa2.launch, causal="skip"),
        Variant("causal, loop bound", fa2.launch, causal=True),
        batch=1, heads=32, n=4096,
    ),
)  # fmt: skip


def call(v: Variant, batch: int, heads: int, n: int) -> Any:
    """A checked call on random normal data."""
    return random_call("fa2", batch, heads, n, n, D, v.causal, v.mask, v.tiling)


def small(idea: int, side: str, counted: bool) -> None:
    """Launch once, so that the kernels are compiled and cached."""
    v = getattr(IDEAS[idea], side)
    call(v, 1, 1, 256).run(v.launch, counted=counted, on_chip=counted)


def tiles_computed(v: Variant, problem: Problem) -> int:
    """Tiles of S_ij that a call computes."""
    known = masking.causal() if v.causal else masking.none()  # a mask of its own skips nothing
    return problem.B * problem.H * sum(cycles.visited_tiles(replace(problem, mask=known)))


def measured(idea: Idea, v: Variant) -> dict[str, Any]:
    """What one side launches and computes at the idea's size, and what it moves; not its time."""
    plain = call(v, idea.batch, idea.heads, idea.n).run(v.launch)
    counted = call(v, 1, 1, COUNTED_N).run(v.launch, counted=True, on_chip=True)
    tiles, counted_tiles = (tiles_computed(v, ran.problem) for ran in (plain, counted))
    launch = plain.launches[-1]
    rows, shared = counted.rows(), counted.on_chip_rows()
    # of an element of O_i: by alpha; to normalise each tile, by l_i and by 1 / l_i besides
    times = 3 if v.name == NORMALISED else 1
    return {
        "variant": v.name,
        "kernel": launch.kernel,
        "tiling": [v.tiling.B_r, v.tiling.B_c, v.tiling.n_r, v.tiling.n_c],
        "blocks": launch.blocks,
        "blocks_per_sm": launch.blocks_per_sm,
        "registers": launch.registers,
        "local_bytes": launch.local_bytes,
        "tiles_computed": tiles,
        "rescaling_multiplications": times * tiles * v.tiling.B_r * D,
        "counted_at_n": COUNTED_N,
        "issued_bytes": sum(r.bytes for r in rows),
        "shared_bytes_a_tile": sum(r.bytes for r in shared) / counted_tiles,
        "shared_wavefronts_a_tile": sum(r.wavefronts for r in shared) / counted_tiles,
        "exchanged_bytes_a_tile": sum(r.bytes for r in shared if r.tile in "MR") / counted_tiles,
    }


def main() -> int:
    """Count and time each idea, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    started = time.perf_counter()
    about = environment()
    sides = ("before", "after")
    compile_ahead(
        small, [(i, s, c) for i in range(len(IDEAS)) for s in sides for c in (False, True)]
    )
    found = []
    for idea in IDEAS:
        pair = [idea.before, idea.after]
        ready = [call(v, idea.batch, idea.heads, idea.n) for v in pair]
        runs = [functools.partial(c.run, v.launch) for c, v in zip(ready, pair, strict=True)]
        times = take_turns(runs, options.rounds)
        row: dict[str, Any] = {
            "idea": idea.name,
            "papers": idea.papers,
            "batch": idea.batch,
            "heads": idea.heads,
            "n": idea.n,
            "d": D,
        }
        for side, v, ms in zip(sides, pair, times, strict=True):
            row[side] = measured(idea, v) | {
                "milliseconds": round(statistics.median(ms), 4),
                "milliseconds_min": round(min(ms), 4),
                "milliseconds_max": round(max(ms), 4),
            }
        row["speedup"] = round(row["before"]["milliseconds"] / row["after"]["milliseconds"], 3)
        found.append(row)
        print(f"{idea.name}: {row['speedup']}x", flush=True)
    record = {**about, "rows": found, "seconds": round(time.perf_counter() - started, 1)}
    path = results_folder(about["gpu"]) / "ablation.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
