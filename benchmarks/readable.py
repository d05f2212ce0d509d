"""Speed of the readable kernels in fp32, side by side with torch, in one process.

``python -m benchmarks.readable`` writes ``benchmarks/results/<gpu>/readable.json``.

Setting: batch x N = 16,384, hidden size 2048, TF32 off, random normal data. In each cell the
implementations take turns, so that a drift of the clock hits all alike. A cell's inputs are 384 MB,
several times the L2, and every turn streams them anew. A turn is a burst of up to 16 calls between
two CUDA events, 30 ms where that suffices, so that the host prepares the next call while the GPU
works; the host's cost of one call is recorded on its own. FLOPs: 4 N^2 d per head, half if causal.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    raise SystemExit("bench: compares with torch; install it first (see CONTRIBUTING.md)") from None

import fa2_numba
from benchmarks.environment import environment, nvidia_smi, results_folder
from fa2_numba.accounting.bench import Cell, take_turns
from fa2_numba.launch import shared_limit
from fa2_numba.tiling import choose

TOKENS, HIDDEN = 16384, 2048
PEER = "torch mem-efficient"
BURST_MILLISECONDS = 30


def host_microseconds(call: Callable[[], Any], repeats: int = 50) -> float:
    """Median time that the host spends in one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return round(1e6 * statistics.median(times), 1)


def implementations(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> dict[str, Callable[[], Any]]:
    """What is compared: name to call."""

    def ours(method: str, causal: bool | str) -> Callable[[], Any]:
        return lambda: fa2_numba.attention(q, k, v, causal=causal, method=method)

    def theirs(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    calls = {method: ours(method, causal) for method in ("fa2", "fa1", "standard")}
    if causal:
        calls["fa2 skip"] = ours("fa2", "skip")
    calls[PEER] = theirs(SDPBackend.EFFICIENT_ATTENTION)
    calls["torch math"] = theirs(SDPBackend.MATH)
    return calls


def rows(sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each implementation and cell."""
    generator = torch.Generator("cuda").manual_seed(0)
    for d, causal, n in itertools.product((64, 128), (False, True), sizes):
        heads, batch = HIDDEN // d, TOKENS // n
        q, k, v = (
            torch.randn(batch, heads, n, d, device="cuda", generator=generator) for _ in range(3)
        )
        calls = implementations(q, k, v, causal)
        cell = Cell(batch, heads, n, d, causal, "fp32")
        turns = take_turns(list(calls.values()), rounds, BURST_MILLISECONDS)
        for name, times in zip(calls, turns, strict=True):
            yield cell.row(name, times)
        del q, k, v, calls
        torch.cuda.empty_cache()


def host_costs() -> dict[str, float]:
    """Host microseconds of one call on a small problem."""
    q = torch.randn(1, 8, 128, 64, device="cuda")
    calls = implementations(q, q, q, causal=False)
    for call in calls.values():
        call()
    return {name: host_microseconds(call) for name, call in calls.items()}


def matrix_rate() -> float:
    """TFLOP/s of an 8192^3 fp32 matrix product: the ceiling of fp32 arithmetic here."""
    a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    (times,) = take_turns([lambda: a @ b], 5, BURST_MILLISECONDS)
    return round(2 * 8192**3 / statistics.median(times) / 1e9, 2)


def main() -> None:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1024,2048,4096,8192,16384")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    about = environment()
    limit = shared_limit(None)
    record: dict[str, Any] = {
        **about,
        "setting": {"tokens": TOKENS, "hidden": HIDDEN, "tf32": False, "data": "normal"},
        "matrix_product_tflops": matrix_rate(),
        "host_microseconds_per_call": host_costs(),
        "tilings": {
            f"{method} d={d}": str(choose(d, "fp32", method, limit))
            for method in fa2_numba.PORTABLE
            for d in (64, 128)
        },
        "rows": [],
    }
    for row in rows([int(n) for n in options.sizes.split(",")], options.rounds):
        record["rows"].append(row)
        print(
            f"{row['implementation']:20} d={row['d']:<4} n={row['n']:<6} "
            f"{'causal' if row['causal'] else 'full':7} {row['tflops']:6.1f} TFLOP/s "
            f"({row['tflops_min']:.1f}..{row['tflops_max']:.1f})",
            flush=True,
        )
    clock, power, heat = nvidia_smi("clocks.sm", "power.draw", "temperature.gpu")
    record["after"] = {"sm_clock": clock, "power": power, "temperature": heat}
    target = results_folder(about["gpu"]) / "readable.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    print("host us per call:", record["host_microseconds_per_call"])
    print(f"matrix product: {record['matrix_product_tflops']} TFLOP/s; wrote {target.name}")


if __name__ == "__main__":
    main()
