"""Launches one by one: who launched what, and the process that ncu profiles.

``python -m fa2_numba.accounting.launches CASES.json LOG.json`` runs the plain kernels of each case
exactly once, in order and without a warm-up, and writes for each case the names of its kernels.
"""

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from fa2_numba import api, backward, plan, simulator
from fa2_numba.accounting.hardware import Case
from fa2_numba.launch import Operands


@contextlib.contextmanager
def watched(after: Callable[[Operands, str], None]) -> Iterator[None]:
    """Inside the block, call `after` behind each launch: with its operands, its kernel's name.

    Every launch is one of `Operands` there, none of a plan.
    """
    run = Operands.run

    def watch(
        self: Operands, kernel: Any, blocks: int, threads: int, shared_bytes: int, *args: Any
    ) -> None:
        run(self, kernel, blocks, threads, shared_bytes, *args)
        if blocks:  # else nothing was launched
            after(self, kernel.__name__)

    Operands.run = watch  # type: ignore[method-assign]
    try:
        with plan.unused():
            yield
    finally:
        Operands.run = run  # type: ignore[method-assign]


def launch(case: Case) -> list[str]:
    """Run the plain kernels of a case; their names, in the order of their launch."""
    names: list[str] = []
    with watched(lambda operands, name: names.append(name)):
        call = backward.attention_backward if case.backward else api.attention
        call(*case.arrays(), **case.options())
    return names


def measure(case: Case, on_chip: bool = False) -> None:
    """Run the counted kernels of a case; what they count is for those who watch."""
    call: Callable[..., Any] = backward.measure_backward if case.backward else api.measure
    call(*case.arrays(), **case.options(), on_chip=on_chip)


def in_processes(
    run: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], workers: int | None = None
) -> Iterator["Future[Any]"]:
    """Call ``run(*a)`` for each `a`, many at a time, each in another process.

    A kernel takes seconds to compile; what one process has compiled is in the kernel cache for the
    others. Processes are spawned: a CUDA context does not survive a fork.

    Parameters
    ----------
    run : callable
        A module's function.
    arguments : sequence of tuple
        Those that take longest first.
    workers : int, optional
        Processes; default: one for each processor but one.

    Yields
    ------
    Future
        Of each call, in their order.
    """
    workers = workers or max(1, (os.cpu_count() or 1) - 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(workers, len(arguments))), mp_context=context) as pool:
        yield from [pool.submit(run, *a) for a in arguments]


def main(argv: Sequence[str]) -> None:
    """Run the cases in the file ``argv[0]``, write the file ``argv[1]``."""
    cases, log = map(Path, argv)
    launched = [launch(Case.from_json(fields)) for fields in json.loads(cases.read_text())]
    if not simulator.ACTIVE:
        from numba import cuda

        cuda.synchronize()  # a kernel that failed says so here
    log.write_text(json.dumps(launched))


if __name__ == "__main__":
    main(sys.argv[1:])
