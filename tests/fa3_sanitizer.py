"""Small cases of fa3 for compute-sanitizer: two kernels, four calls, each checked.

``compute-sanitizer --tool memcheck python tests/fa3_sanitizer.py``; so with racecheck, synccheck
and initcheck. Exits with an error if an output is wrong.
"""

import fa3_cases
import torch

from fa2_numba import attention

CASES = (  # d, dtype, mask, N_q, N_k
    (64, "fp16", "causal", 130, 200),
    (64, "fp16", "causal", 300, 70),  # rows without keys
    (128, "bf16", "window", 129, 129),
    (128, "bf16", "window", 65, 257),
)
WINDOW = (100, 20)


def main() -> None:
    """Run the cases; outputs are checked on the host."""
    for d, dtype, mask, n_q, n_k in CASES:
        draw = fa3_cases.Draw(B=1, H_k=1, group=2, N_q=n_q, N_k=n_k)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float16
        three = fa3_cases.inputs(torch, draw, d, kind, "cpu")
        options = {"causal": True} if mask == "causal" else {"window": WINDOW}
        out, lse = attention(*(x.cuda() for x in three), method="fa3", return_lse=True, **options)
        fa3_cases.check(torch, out.cpu(), lse.cpu(), *three, mask=mask, window=WINDOW, dtype=dtype)
        print(f"d={d} {dtype} {mask} {n_q} x {n_k}: right")


if __name__ == "__main__":
    main()
