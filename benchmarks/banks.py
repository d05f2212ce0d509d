"""How shared memory serves a warp: access patterns under the bank counters.

``python -m benchmarks.banks`` writes ``benchmarks/results/<gpu>/banks.json``: for loads and stores
of 4, 8 and 16 bytes a lane, in patterns from one word for all to conflicts of 32 lanes, what the
hardware counted. `smem.wavefronts` is the rule that these readings follow; tests/test_smem.py
compares the two.

The program runs itself under ncu.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.environment import environment, results_folder, write_record
from fa2_numba.accounting import hardware

SIZE = 8192  # floats of shared memory
LANES = np.arange(32)
METRICS = {
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum",
    "bytes": "smsp__sass_data_bytes_mem_shared_op_{}.sum",
}
OPS = {"load": "ld", "store": "st"}


def patterns(width: int) -> dict[str, Any]:
    """Pattern to the first element that each lane asks for; `width` elements a lane."""
    rng = np.random.default_rng(width)
    lane = LANES
    found = {"in a row": lane * width, "one for all": lane * 0}
    for n in (2, 4, 8, 16):
        found[f"{n} words, lanes in groups"] = lane // (32 // n) * width
        found[f"{n} words, lanes in turn"] = lane % n * width
    for pitch in (68, 132):  # rows of Q_i and K_j at d = 64 and 128
        found[f"Q_i, n_c 8, pitch {pitch}"] = lane // 8 * pitch
        found[f"K_j, n_c 8, pitch {pitch}"] = lane % 8 * pitch
        found[f"Q_i, n_c 16, pitch {pitch}"] = lane // 16 * pitch
        found[f"K_j, n_c 16, pitch {pitch}"] = lane % 16 * pitch
        found[f"tile store, pitch {pitch}"] = lane // 16 * pitch + lane % 16 * 4
    for pitch in (72, 80, 144):  # rows of P_ij
        found[f"P_ij, pitch {pitch}"] = lane // 8 * pitch
        found[f"P_ij store, pitch {pitch}"] = lane // 8 * pitch + lane % 8
    for stride in (2, 4, 8, 32):
        found[f"stride {stride}"] = lane * stride * width
    for n in range(6):
        found[f"random {n}"] = rng.integers(0, SIZE // width // 4, 32) * width
    for n in range(3):
        found[f"random, distinct {n}"] = rng.permutation(SIZE // width)[:32] * width
    return {name: x // width * width % (SIZE - 8) // width * width for name, x in found.items()}


def cases() -> Iterator[tuple[str, int, str, Any]]:
    """(op, width, pattern, elements) of each launch; stores of one place by two lanes left out."""
    for op in OPS:
        for width in (1, 2, 4):
            for name, first in patterns(width).items():
                if op == "load" or len(set(first)) == 32:
                    yield op, width, name, first


def launch_all() -> None:
    """One warp, one access, for each case."""
    import cupy
    from numba import cuda

    from fa2_numba import hbm, smem

    def kernel(op: str, width: int) -> Any:
        tile = smem.shared_tile(1, SIZE, np.float32, 0)
        get, put = smem.vector_load(width), smem.vector_store(width)
        loads = op == "load"

        def probe(first, out):
            T, lane = tile(None), cuda.threadIdx.x
            x = cuda.local.array(width, np.float32)
            if loads:
                get(T, (np.uint32(0), np.uint32(first[lane])), x, 0)
            for c in range(width):
                if loads:
                    out[lane * width + c] = x[c]
                else:
                    x[c] = out[lane * width + c]
            if not loads:
                put(T, (np.uint32(0), np.uint32(first[lane])), x, 0)
                cuda.syncthreads()

        return hbm.jit(probe, f"probe_{op}_{width}")

    kernels = {(op, width): kernel(op, width) for op in OPS for width in (1, 2, 4)}
    for op, width, _, first in cases():
        out = cupy.zeros(32 * width, cupy.float32)
        kernels[op, width][1, 32, 0, SIZE * 4](cupy.asarray(first.astype(np.int64)), out)
    cuda.synchronize()


def main() -> int:
    """Run under ncu, write what it read."""
    if sys.argv[1:] == ["launch"]:
        launch_all()
        return 0
    metrics = [m.format(op) for m in METRICS.values() for op in OPS.values()]
    command = [hardware.find_ncu(), "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "-k", "regex:^probe", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "benchmarks.banks", "launch"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = hardware.parse(done.stdout)
    asked = list(cases())
    if len(read) != len(asked):
        print(f"banks: ncu saw {len(read)} launches of {len(asked)}", file=sys.stderr)
        return 2
    rows = [
        {
            "op": op,
            "size": 4 * width,
            "pattern": name,
            "addresses": [int(4 * x) for x in first],
            **{q: reading[m.format(OPS[op])] for q, m in METRICS.items()},
        }
        for (op, width, name, first), reading in zip(asked, read, strict=True)
    ]
    about = environment()
    path = results_folder(about["gpu"]) / "banks.json"
    write_record({**about, "rows": rows}, path)
    print(f"{len(rows)} patterns; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
