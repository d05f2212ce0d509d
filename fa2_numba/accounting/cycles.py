"""A model of kernel time: blocks of phases, on SMs with so many places.

A block of a kernel goes through phases, each so many times (`visits`). What one visit costs is
measured once on the card, with one block on an SM and with as many as fit (`benchmarks.cycles`
calibrates at one small size). From these costs, the tiling and the launch, the model predicts the
time of any other size.

What it leaves out: how blocks on one SM wait for each other at a finer grain than "alone" and
"full", drift between blocks, caches that a larger problem no longer fits, clocks that change under
load, and the host.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa2_numba.io_model import SOFTMAX_ROWS, row_tiles
from fa2_numba.problem import Problem
from fa2_numba.tiling import ceil_div


@dataclass(frozen=True)
class Cost:
    """Measured costs of one kernel.

    Attributes
    ----------
    alone, full : dict
        Phase to cycles of one visit, with one block on an SM and with `places`.
    rest_alone, rest_full : float
        Cycles for each block in which a place of an SM had none of its phases, in the launch that
        was timed: starts and ends of blocks, changes from one to the next, and places that stood
        empty because blocks did not end together.
    places : int
        Blocks that fit on an SM.
    """

    alone: Mapping[str, float]
    full: Mapping[str, float]
    rest_alone: float
    rest_full: float
    places: int

    def block(self, visits: Mapping[str, int], resident: int) -> float:
        """Cycles of a block while `resident` blocks share its SM, interpolated between the two."""
        alone = self.rest_alone + sum(self.alone[p] * n for p, n in visits.items())
        full = self.rest_full + sum(self.full[p] * n for p, n in visits.items())
        if self.places == 1:
            return full
        return alone + (full - alone) * (resident - 1) / (self.places - 1)


def visited_tiles(problem: Problem) -> list[int]:
    """Key tiles that each row tile of a head visits.

    Raises
    ------
    ValueError
        A mask that is not none, causal or causal-skip: the model knows these.
    """
    return [tiles for _, tiles in row_tiles(problem)]


def visits(problem: Problem) -> dict[str, list[tuple[dict[str, int], int]]]:
    """Kernel to its blocks in launch order, as (visits of each phase, how many such blocks)."""
    p, t = problem, problem.tiling
    tiles, heads = visited_tiles(p), p.B * p.H
    T_c = t.T_c(p.N_k)
    if p.method == "fa2":
        every = ("issue K_j, V_j", "land K_j, V_j", "S = Q K^T", "softmax", "P V")
        row = [
            ({"load Q_i": 1, "epilogue": 1} | dict.fromkeys(every, n), 1) for n in reversed(tiles)
        ]
        return {"fa2": row * heads}
    if p.method == "fa1":
        every = ("load Q_i", "S = Q K^T", "softmax", "P V", "rescale O_i")
        block = {"load K_j, V_j": max(tiles, default=0)} | dict.fromkeys(every, sum(tiles))
        return {"fa1_loop": [(block, heads)]}
    scores = dict.fromkeys(("load Q_i, K_j", "S = Q K^T", "store S"), 1)
    softmax = dict.fromkeys(("row max and sum", "normalise"), p.N_k)
    output = dict.fromkeys(("load P_ij, V_j", "O = P V"), T_c) | {"epilogue": 1}
    return {
        "standard_scores": [(scores, t.T_r(p.N_q) * T_c * heads)],
        "standard_softmax": [(softmax, ceil_div(p.N_q * heads, SOFTMAX_ROWS))],
        "standard_output": [(output, t.T_r(p.N_q) * heads)],
    }


def kernel_cycles(blocks: Sequence[tuple[Mapping[str, int], int]], cost: Cost, SMs: int) -> float:
    """Cycles of one launch: blocks take the free places in their order.

    The first blocks go to the SMs in turn, one each, then a second each, and so on; a block that
    ends makes place for the next. Equal blocks run in whole waves and a rest.
    """
    total = sum(n for _, n in blocks)
    if total == 0:
        return 0.0
    if len({tuple(sorted(v.items())) for v, _ in blocks}) == 1:
        block, wave = blocks[0][0], SMs * cost.places
        waves, rest = divmod(total, wave)
        tail = cost.block(block, ceil_div(rest, SMs)) if rest else 0.0
        return waves * cost.block(block, cost.places) + tail
    return _schedule([v for v, n in blocks for _ in range(n)], cost, SMs)


def _schedule(blocks: Sequence[Mapping[str, int]], cost: Cost, SMs: int) -> float:
    """Event by event: on each SM the resident blocks advance, each at its own pace."""
    waiting = iter(blocks)
    resident: list[list[list[Any]]] = [[] for _ in range(SMs)]  # [share left, visits] each
    now = [0.0] * SMs
    for _ in range(cost.places):
        for sm in range(SMs):
            block = next(waiting, None)
            if block is not None:
                resident[sm].append([1.0, block])

    def next_end(sm: int) -> float:
        here = resident[sm]
        return now[sm] + min(left * cost.block(v, len(here)) for left, v in here)

    events = [(next_end(sm), sm) for sm in range(SMs) if resident[sm]]
    heapq.heapify(events)
    end = 0.0
    while events:
        end, sm = heapq.heappop(events)
        here, passed = resident[sm], end - now[sm]
        n = len(here)
        for going in here:
            going[0] -= passed / cost.block(going[1], n)
        now[sm] = end
        resident[sm] = [going for going in here if going[0] > 1e-9]
        while len(resident[sm]) < cost.places:
            block = next(waiting, None)
            if block is None:
                break
            resident[sm].append([1.0, block])
        if resident[sm]:
            heapq.heappush(events, (next_end(sm), sm))
    return end


def milliseconds(
    problem: Problem,
    costs: Mapping[str, Cost],
    SMs: int,
    gigahertz: float,
    bytes_per_second: float,
) -> float:
    """Predicted time of a call's kernels.

    Parameters
    ----------
    problem : Problem
        fp32 or fp64, without mask or causal.
    costs : dict
        Kernel to its measured costs.
    SMs : int
        Of the GPU.
    gigahertz : float
        Cycles per nanosecond, measured.
    bytes_per_second : float
        Rate of a device-to-device copy, bytes read and written: it sets the time of fa1's first
        and last kernel, which only move O, l and m.
    """
    cycles = sum(kernel_cycles(b, costs[k], SMs) for k, b in visits(problem).items())
    time = cycles / (gigahertz * 1e6)
    if problem.method == "fa1":
        rows = problem.B * problem.H * problem.N_q
        itemsize = problem.layout("L").itemsize
        moved = rows * itemsize * ((problem.d + 2) + 3)  # init: O, l, m; finish: l, m, L
        time += 1e3 * moved / bytes_per_second
    return time


def mean_absolute_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    ratios = np.asarray(predicted) / np.asarray(measured)
    return float(np.mean(np.abs(ratios - 1)))


def largest_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The predicted / measured that is farthest from 1."""
    ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
    return max(ratios, key=lambda r: abs(math.log(r)))
