"""Small cases of fa3 for compute-sanitizer, forward and backward, each checked.

``compute-sanitizer --tool memcheck python tests/fa3_sanitizer.py``; so with racecheck, synccheck
and initcheck. Exits with an error if an output is wrong.
"""

import fa3_cases
import torch

from fa2_numba import attention, attention_backward

CASES = (  # d, dtype, mask, N_q, N_k
    (64, "fp16", "causal", 130, 200),
    (64, "fp16", "causal", 300, 70),  # rows without keys
    (40, "bf16", "none", 203, 100),  # three consumers; boxes of O end among their rows and columns
    (128, "bf16", "window", 129, 129),
    (128, "bf16", "window", 65, 257),
)
# Their gradients, and whether these are to be the same bits each time: dQ added by the copy unit,
# in a kernel of its own, and all three in kernels of their own. Two key tiles for each row tile.
BACKWARD = (  # d, dtype, mask, N_q, N_k, deterministic
    (64, "fp16", "causal", 130, 200, False),
    (128, "bf16", "window", 129, 129, False),
    (64, "fp16", "causal", 200, 70, True),  # rows without keys
    (256, "bf16", "causal", 65, 129, False),
    (128, "bf16", "window", 65, 400, False),  # tiles of keys that no row sees
)
WINDOW = (100, 20)


def backward(d: int, dtype: str, mask: str, n_q: int, n_k: int, deterministic: bool) -> None:
    """Run one case backward; gradients are checked on the host."""
    draw = fa3_cases.Draw(B=1, H_k=1, group=2, N_q=n_q, N_k=n_k, window=WINDOW)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    given = fa3_cases.backward_inputs(torch, draw, d, kind, "cpu", mask=mask)
    options = {"causal": True} if mask == "causal" else {"window": WINDOW}
    *arrays, dlse = (x.cuda() for x in given)
    got = attention_backward(
        *arrays, dlse=dlse, method="fa3", deterministic=deterministic, **options
    )
    got = tuple(x.cpu() for x in got)
    fa3_cases.check_gradients(torch, got, given, mask=mask, window=WINDOW, dtype=dtype)
    how = "deterministic, " if deterministic else ""
    print(f"gradients, {how}d={d} {dtype} {mask} {n_q} x {n_k}: right")


def main() -> None:
    """Run the cases; outputs are checked on the host."""
    for d, dtype, mask, n_q, n_k in CASES:
        draw = fa3_cases.Draw(B=1, H_k=1, group=2, N_q=n_q, N_k=n_k)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float16
        three = fa3_cases.inputs(torch, draw, d, kind, "cpu")
        options = {"none": {}, "causal": {"causal": True}, "window": {"window": WINDOW}}[mask]
        q, k, v = (x.cuda() for x in three)
        # The copy unit's stores are not seen by initcheck. What they leave out is NaN.
        out = torch.full_like(q, float("nan"))
        _, lse = attention(q, k, v, method="fa3", out=out, return_lse=True, **options)
        fa3_cases.check(torch, out.cpu(), lse.cpu(), *three, mask=mask, window=WINDOW, dtype=dtype)
        print(f"d={d} {dtype} {mask} {n_q} x {n_k}: right")
    for case in BACKWARD:
        backward(*case)


if __name__ == "__main__":
    main()
