"""Gradients of tensor-core attention beside those of its peers, side by side in one process.

``python -m benchmarks.backward`` writes ``benchmarks/results/<gpu>/backward.json``. Setting and
harness are those of `benchmarks.forward`; timed is the backward pass alone, of an output that was
computed before. FLOPs: 2.5 times the forward pass's. How it is timed: `benchmarks.comparison`.

All rows of the first and the last head are compared with float64, and all heads with a trusted peer
(`benchmarks.exact`). The operands of a cell are 537 MB in 16 bits.

Sections: "host", what a call costs the host; "accuracy", errors of every implementation on the same
inputs; "memory"; "cells"; "deterministic", what equal bits cost; "fp32", the readable kernel beside
torch's in single precision.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import comparison, peers_backward
from benchmarks.comparison import host_cell, tokens_cell
from benchmarks.peers_backward import IMPLEMENTATIONS
from fa2_numba.accounting.bench import Cell

if TYPE_CHECKING:
    import torch

BACKWARD = "backward"
OURS, AUTOGRAD = "fa3_backward", "fa3_autograd"
FORMS = (DETERMINISTIC, READABLE) = ("fa3_backward_deterministic", "fa2_backward")
SIZES = (1024, 2048, 4096, 8192, 16384)
DEFAULT = (OURS, "cudnn", "fa4", "torch-fa2", "torch-efficient")
SECTIONS = ("host", "accuracy", "memory", "cells", "deterministic", "fp32")
TRUSTED = ("cudnn", "torch-fa2", "torch-efficient")  # the first that is right is compared with
ACCURACY_N, ACCURACY_HEADS, ACCURACY_DIMS = 1024, 2, (64, 128, 256)
DETERMINISTIC_SIZES, DETERMINISTIC_DIMS = (4096, 16384), (64, 128)
FP32, FP32_SIZES, FP32_DIMS = (READABLE, "torch-efficient"), (1024, 4096, 16384), (64, 128)
MASKS = (False, True)


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
    """The gradients of attention."""

    direction, ours, implementations = BACKWARD, OURS, IMPLEMENTATIONS
    operands = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

    def checking(
        self, cell: Cell, inputs: "tuple[torch.Tensor, ...]", rows: int
    ) -> comparison.Check:
        """Against float64 in whole heads, and whole against a trusted peer."""
        from benchmarks.exact import gradient_differences, gradient_errors, gradients

        exact = {
            (b, h): gradients(*(x[b, h] for x in inputs), cell.causal)
            for b, h in {(0, 0), (cell.batch - 1, cell.heads - 1)}
        }
        trusted = self.trusted(cell, inputs, exact)

        def check(found: "tuple[torch.Tensor, ...]") -> dict[str, Any]:
            errors = gradient_errors(found, exact, cell.dtype)
            if trusted is None:
                return errors
            peer, other = trusted
            return errors | {"peer": peer} | gradient_differences(found, other, cell.dtype)

        return check

    def trusted(
        self, cell: Cell, inputs: "tuple[torch.Tensor, ...]", exact: Any
    ) -> "tuple[str, tuple[torch.Tensor, ...]] | None":
        """The first of `TRUSTED` that runs and is right: its name and its gradients."""
        from benchmarks.exact import gradient_errors

        for name in TRUSTED:
            implementation = IMPLEMENTATIONS[name]
            try:
                call = implementation.call(*inputs, causal=cell.causal)
                found = implementation.output(call())
            except Exception:  # it is recorded when it is its turn
                continue
            if gradient_errors(found, exact, cell.dtype)["right"]:
                return name, found
        return None

    def host_names(self) -> list[str]:
        """What was chosen, and ours as torch's are called."""
        return list(dict.fromkeys([*self.options.implementations, AUTOGRAD]))

    def all_methods(self) -> list[str]:
        """What was chosen, and the other forms of ours."""
        return list(dict.fromkeys([*self.options.implementations, *FORMS]))

    # --- sections ---

    def accuracy(self) -> None:
        """Errors of every implementation against float64, on the same inputs."""
        import torch

        self.record["accuracy"] = []
        for d, causal in itertools.product(ACCURACY_DIMS, MASKS):
            sizes = (1, ACCURACY_HEADS, ACCURACY_N, d)
            cell = Cell(*sizes, causal, self.options.dtype, BACKWARD)
            if self.late("accuracy", cell):
                continue
            known = len(self.record["checks"])
            self.prepare(cell, self.all_methods())
            self.record["accuracy"] += self.record["checks"][known:]
            torch.cuda.empty_cache()

    def deterministic(self) -> None:
        """The form that gives equal bits beside the one that does not."""
        self.record["deterministic"] = []
        for d, causal, n in itertools.product(DETERMINISTIC_DIMS, MASKS, DETERMINISTIC_SIZES):
            cell = tokens_cell(n, d, causal, self.options.dtype, BACKWARD)
            if self.late("deterministic", cell):
                continue
            names, regime = (OURS, DETERMINISTIC), self.options.regime[:1]
            rows, ready = self.rows_of(cell, names, self.options.rounds, regime)
            self.record["deterministic"] += [
                {**row, "equal_bits": equal_bits(ready[row["implementation"]].call)} for row in rows
            ]
            self.write()

    def fp32(self) -> None:
        """The readable kernel beside torch's in single precision, TF32 off."""
        import torch

        self.record["fp32"] = []
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            for d, causal, n in itertools.product(FP32_DIMS, MASKS, FP32_SIZES):
                cell = tokens_cell(n, d, causal, "fp32", BACKWARD)
                if self.late("fp32", cell):
                    continue
                rows, _ = self.rows_of(cell, FP32, self.options.rounds, self.options.regime[:1])
                self.record["fp32"] += rows
                self.write()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32


def equal_bits(call: Any) -> bool:
    """Whether two calls return the same bits."""
    return all(a.equal(b) for a, b in zip(call(), call(), strict=True))


def to_compile(options: argparse.Namespace) -> list[tuple[str, Cell]]:
    """What is called once in other processes, so that this one finds it compiled."""
    chosen, dtype = options.implementations, options.dtype

    def jobs(
        names: Sequence[str], dims: Sequence[int], masks: Sequence[bool], dtype: str = dtype
    ) -> list[tuple[str, Cell]]:
        cells = [tokens_cell(SIZES[0], d, c, dtype, BACKWARD) for d in dims for c in masks]
        return list(itertools.product(names, cells))

    of_section = {
        "host": [(name, host_cell(dtype, BACKWARD)) for name in (*chosen, AUTOGRAD)],
        "accuracy": jobs((*chosen, *FORMS), ACCURACY_DIMS, MASKS),
        "memory": jobs((*chosen, *FORMS), (comparison.MEMORY_D,), (False,)),
        "cells": jobs(chosen, options.dims, [mask == "causal" for mask in options.causal]),
        "deterministic": jobs((OURS, DETERMINISTIC), DETERMINISTIC_DIMS, MASKS),
        "fp32": jobs((READABLE,), FP32_DIMS, MASKS, "fp32"),
    }
    found = dict.fromkeys(job for section in options.sections for job in of_section[section])
    return [job for job in found if job[0] in peers_backward.COMPILED]


def main() -> None:
    """Measure, write the record as it grows, print the comparison."""
    options = arguments()
    comparison.measure(Run, options, peers_backward.warm, to_compile(options))


if __name__ == "__main__":
    main()
