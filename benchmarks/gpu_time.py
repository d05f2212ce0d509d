"""Times of calls on the GPU, between CUDA events, and kernels compiled ahead by many processes."""

import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import cupy

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


def take_turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Milliseconds of each call, `rounds` times, the calls taking turns after two warm-ups each."""
    bursts = []
    for call in calls:
        call()
        bursts.append(max(1, min(16, math.ceil(BURST_MILLISECONDS / milliseconds(call)))))
    turns = [
        [milliseconds(call, burst) for call, burst in zip(calls, bursts, strict=True)]
        for _ in range(rounds)
    ]
    return [list(times) for times in zip(*turns, strict=True)]


def compile_ahead(
    run: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], workers: int | None = None
) -> None:
    """Call ``run(*a)`` for each `a` in worker processes, so that the kernels it needs are cached.

    `run` is a module's function that launches the kernels on a small input. Processes are spawned:
    a CUDA context does not survive a fork.
    """
    context = multiprocessing.get_context("spawn")
    workers = workers or max(1, (os.cpu_count() or 1) - 1)
    with ProcessPoolExecutor(min(workers, len(arguments)), mp_context=context) as pool:
        for done in [pool.submit(run, *a) for a in arguments]:
            done.result()
