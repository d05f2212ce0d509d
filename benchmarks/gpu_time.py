"""Calls on the GPU: made, and compiled ahead by many processes."""

from collections.abc import Callable, Sequence
from typing import Any

import cupy

from fa2_numba import api, masking
from fa2_numba.accounting.launches import in_processes
from fa2_numba.tiling import Tiling


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
