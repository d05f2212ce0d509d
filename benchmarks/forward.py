"""Tensor-core attention beside its peers, side by side in one process.

``python -m benchmarks.forward`` writes ``benchmarks/results/<gpu>/forward.json``. It needs torch;
peers that are not installed are left out, with the reason. Setting: bf16, batch x N = 16,384,
hidden size 2048, random normal data. How it is timed: `benchmarks.comparison`.

Each output is compared with float64 on some rows, and whole with a trusted peer
(`benchmarks.exact`). q, k, v and the output of a cell are 268 MB in 16 bits.
"""

import argparse
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import comparison, peers
from benchmarks.comparison import extra_bytes, host_cell, tokens_cell
from benchmarks.peers import IMPLEMENTATIONS
from fa2_numba.accounting.bench import Cell

if TYPE_CHECKING:
    import torch

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
DEFAULT = ("fa3", "cudnn", "fa4", "torch-fa2", "torch-efficient", "flex", "fa2", "torch-math")
SECTIONS = ("host", "memory", "headline", "cells", "crossover")  # the long ones last
HEADLINE_N, HEADLINE_DIMS, HEADLINE_ROWS = 4096, (128, 64), 64
CROSSOVER = ("fa3", "fa2", "standard", "torch-math")
CROSSOVER_SIZES, CROSSOVER_D, CROSSOVER_ROUNDS = tuple(2**n for n in range(7, 15)), 128, 3


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to run."""
    return comparison.arguments(
        argv,
        __doc__.splitlines()[0],
        sizes=SIZES,
        implementations=tuple(IMPLEMENTATIONS),
        default=DEFAULT,
        sections=SECTIONS,
    )


class Run(comparison.Run):
    """Attention itself."""

    direction, ours, implementations = "forward", "fa3", IMPLEMENTATIONS
    operands = ("q", "k", "v", "out")

    def checking(
        self, cell: Cell, inputs: "tuple[torch.Tensor, ...]", rows: int
    ) -> comparison.Check:
        """Against float64 in some rows, and whole against a trusted peer."""
        from benchmarks.exact import differences, errors

        q, k, v = inputs
        trusted = self.trusted(q, k, v, cell.causal)

        def check(out: "torch.Tensor") -> dict[str, Any]:
            found = errors(out, q, k, v, cell.causal, cell.dtype, count=rows)
            if trusted:
                found |= {"peer": trusted[0]}
                found |= differences(out, trusted[1], trusted[2], cell.dtype)
            return found

        return check

    def trusted(
        self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool
    ) -> "tuple[str, torch.Tensor, torch.Tensor] | None":
        """The first of `peers.TRUSTED` that runs: its name, its output, and that of ``|v|``."""
        for name in peers.TRUSTED:
            call = functools.partial(IMPLEMENTATIONS[name].call, causal=causal)
            try:
                return name, call(q, k, v)(), call(q, k, v.abs())()
            except RuntimeError:  # of torch, where no kernel is available: the next
                continue
        return None

    def all_methods(self) -> list[str]:
        """What was chosen, and the older methods of the package."""
        return list(dict.fromkeys([*self.options.implementations, "fa2", "fa1", "standard"]))

    # --- sections ---

    def headline(self) -> None:
        """Every method beside the peers at one size: speed, memory, error."""
        self.record["headline"] = []
        for d in HEADLINE_DIMS:
            cell = tokens_cell(HEADLINE_N, d, False, self.options.dtype)
            if d not in self.options.dims or self.late("headline", cell):
                continue
            names, regime = self.all_methods(), self.options.regime[:1]
            rows, ready = self.rows_of(cell, names, self.options.rounds, regime, HEADLINE_ROWS)
            for row in rows:
                each = ready[row["implementation"]]
                found = {name: each.check[name] for name in ("max_error", "rms_relative")}
                found |= {"rows_compared": each.check["rows"]}
                self.record["headline"].append(
                    {**row, "extra_bytes": extra_bytes(each.call), **found}
                )
                print(f"headline: {row['implementation']} {row['tflops']} {found}", flush=True)

    def crossover(self) -> None:
        """From which N on tiling is faster than S and P in memory."""
        self.record["crossover"] = []
        for n in CROSSOVER_SIZES:
            cell = tokens_cell(n, CROSSOVER_D, False, self.options.dtype)
            if self.late("crossover", cell):
                continue
            rows, _ = self.rows_of(cell, CROSSOVER, CROSSOVER_ROUNDS, self.options.regime[:1])
            self.record["crossover"] += rows
            self.write()


def to_compile(options: argparse.Namespace) -> list[tuple[str, Cell]]:
    """What is called once in other processes, so that this one finds it compiled."""
    masks = [mask == "causal" for mask in options.causal]
    names = list(dict.fromkeys([*options.implementations, *CROSSOVER, "fa1"]))
    jobs = []
    for name in sorted(names, key=lambda name: name not in peers.COMPILED_BY_SIZE):
        sizes = IMPLEMENTATIONS[name].sizes
        if name in peers.COMPILED_BY_SIZE:
            chosen = [n for n in options.sizes if not sizes or n in sizes]
        elif name in peers.COMPILED:
            chosen = [min(options.sizes)]
        else:
            continue
        jobs += [
            (name, tokens_cell(n, d, causal, options.dtype))
            for n, d, causal in itertools.product(chosen, options.dims, masks)
            if name in options.implementations or not causal
        ]
        jobs.append((name, host_cell(options.dtype)))
    return jobs


def main() -> None:
    """Measure, write the record as it grows, print the comparison."""
    options = arguments()
    comparison.measure(Run, options, peers.warm, to_compile(options))


if __name__ == "__main__":
    main()
