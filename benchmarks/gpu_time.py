"""Calls on the GPU: made, compiled ahead by many processes, timed between CUDA events."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import cupy

from fa2_numba import api, masking
from fa2_numba.accounting.launches import in_processes
from fa2_numba.tiling import Tiling

BURST_MILLISECONDS = 50


def milliseconds(call: Callable[[], Any], burst: int = 1) -> float:
    """Time of one call on the GPU, averaged over a burst."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(burst):
        call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / burst


def take_turns(
    calls: Sequence[Callable[[], Any]],
    rounds: int,
    burst_milliseconds: float = BURST_MILLISECONDS,
) -> list[list[float]]:
    """Milliseconds of each call, `rounds` times, the calls taking turns after two warm-ups each.

    A turn is a burst of up to 16 calls, `burst_milliseconds` long where that suffices.
    """
    bursts = []
    for call in calls:
        call()
        bursts.append(max(1, min(16, math.ceil(burst_milliseconds / milliseconds(call)))))
    turns = [
        [milliseconds(call, burst) for call, burst in zip(calls, bursts, strict=True)]
        for _ in range(rounds)
    ]
    return [list(times) for times in zip(*turns, strict=True)]


def compile_ahead(
    run: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], workers: int | None = None
) -> None:
    """Call ``run(*a)`` for each `a` in worker processes, so that the kernels it needs are cached.

    `run` is a module's function that launches the kernels on a small input.
    """
    for call in in_processes(run, arguments, workers):
        call.result()


def random_call(
    method: str,
    batch: int,
    heads: int,
    N_q: int,
    N_k: int,
    d: int,
    causal: bool | str = False,
    mask: masking.Mask | None = None,
    tiling: Tiling | None = None,
) -> Any:
    """A checked call on random normal data in fp32, ready to run."""
    generator = cupy.random.default_rng(0)
    q, k, v = (
        generator.standard_normal((batch, heads, n, d), dtype=cupy.float32) for n in (N_q, N_k, N_k)
    )
    made = api._Call(q, k, v, method=method, tiling=tiling, scale=None, out=None)
    made.change(causal, None, mask, None, None, None)
    return made
