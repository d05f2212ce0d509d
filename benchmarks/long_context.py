"""Long sequences: time, memory and error of fa3 at N = 32k, 128k and 1M, causal, bf16, d = 128.

``python -m benchmarks.long_context`` writes ``benchmarks/results/<gpu>/long_context.json``. It
needs torch.

One head and eight. Extra memory is the peak of torch's allocator in one call beyond what was there
before: beside it stand the bytes of O and LSE, which are all that the method should need. Output
and LSE are compared with float64 (`benchmarks.exact`) on the first, the last and random rows of
every head. A turn is one call, behind matrix products that fill the L2 with other data and keep the
GPU busy until the call is enqueued.
"""

import argparse
import itertools
from typing import Any

from benchmarks import peers
from benchmarks.comparison import REGIMES, extra_bytes, holding, state
from benchmarks.environment import environment, results_folder, write_record
from fa2_numba.accounting.bench import Cell, take_turns

K = 1024
SIZES = (32 * K, 128 * K, K * K)
HEADS = (1, 8)
D, DTYPE, ROWS = 128, "bf16", 16
LSE_BYTES = 4  # of a row, fp32


def out_lse_bytes(cell: Cell) -> int:
    """Size of O in 16 bits and of LSE in fp32."""
    rows = cell.batch * cell.heads * cell.n
    return rows * (2 * cell.d + LSE_BYTES)


def measured(cell: Cell, method: str, rounds: int, hold: Any, watch: Any) -> dict[str, Any]:
    """One row: the method at one size."""
    import fa2_numba
    from benchmarks.exact import errors

    q, k, v = peers.random_inputs(cell)

    def call() -> Any:
        return fa2_numba.attention(q, k, v, causal=True, method=method, return_lse=True)

    extra = extra_bytes(call)
    out, lse = call()
    heads = list(itertools.product(range(cell.batch), range(cell.heads)))
    found = errors(out, q, k, v, True, cell.dtype, lse=lse, heads=heads, count=ROWS)
    (times,) = take_turns([call], rounds, longest=1, hold=hold, watch=watch)
    return {
        **cell.row(method, times),
        **watch.taken(),
        "extra_bytes": extra,
        "out_lse_bytes": out_lse_bytes(cell),
        **found,
    }


def main() -> None:
    """Measure, write the record after each size, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="fa3", help="(default: fa3)")
    parser.add_argument("--rounds", type=int, default=3, help="turns (default: 3)")
    parser.add_argument("--max-n", type=int, default=max(SIZES), help="largest N")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, accepted: 1 or more")
    from fa2_numba import METHODS

    if options.method not in METHODS:
        parser.error(f"--method: got {options.method!r}, accepted: {', '.join(METHODS)}")
    try:
        import torch
    except ImportError:
        raise SystemExit("long_context: needs torch; see CONTRIBUTING.md") from None
    from benchmarks.watch import Watch

    about = environment()
    record: dict[str, Any] = {
        **about,
        "setting": {
            "dtype": DTYPE,
            "d": D,
            "causal": True,
            "data": "normal",
            "l2": "filled with other data before each turn of one call",
        },
        "before": state(),
        "rows": [],
        "skipped": [],
    }
    target = results_folder(about["gpu"]) / "long_context.json"
    watch, hold = Watch(), holding(REGIMES["sustained"])
    for n, heads in itertools.product(SIZES, HEADS):
        cell = Cell(1, heads, n, D, True, DTYPE)
        if n > options.max_n:
            continue
        try:
            row = measured(cell, options.method, options.rounds, hold, watch)
        except RuntimeError as error:  # of torch or the driver: out of memory, a failed launch
            record["skipped"].append({"n": n, "heads": heads, "reason": peers.reason(error)})
            print(f"{cell}: skipped, {peers.reason(error)}", flush=True)
        else:
            record["rows"].append(row)
            print(
                f"{cell}: {row['milliseconds']} ms, {row['tflops']} TFLOP/s, extra "
                f"{row['extra_bytes']:,} B, O + LSE {row['out_lse_bytes']:,} B, rms error "
                f"{row['rms_relative']:.2e}, {'right' if row['right'] else 'NOT right'}",
                flush=True,
            )
        torch.cuda.empty_cache()
        record["after"] = state()
        write_record(record, target)
    watch.close()
    print(f"wrote {target.name}")


if __name__ == "__main__":
    main()
