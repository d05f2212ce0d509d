"""How far an output is from attention in float64, on some of its rows; and from another output.

Both bounds are derived from the rounding of the dtype. With u its unit roundoff, p a row of
softmax(S) and v the values, a kernel that multiplies in the dtype and adds in fp32 rounds

    every p_j, which moves an element of O by at most   u A,  A = sum_j p_j |v_j|,
    the element itself, which moves it by at most       u |O|,

so that ``|O - exact| <= u (A + |O|)``, and two such outputs differ by at most twice that. The rest
(products, exponentials and sums in fp32) is far smaller; `SLACK` covers it. At large N that bound
is loose, for roundings cancel. So the root mean square is looked at, too: of random data each of
the two roundings leaves about 0.41 u of it, together 0.58 u, and of two outputs 0.82 u; the bounds
are u and 2 u.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SLACK = 1.1


def some_rows(n: int, count: int = 16, seed: int = 0) -> list[int]:
    """`count` of `n` rows: the first, the last, and random ones between them; ascending."""
    inner = range(1, n - 1)
    chosen = random.Random(seed).sample(inner, max(0, min(count - 2, len(inner))))
    return sorted({0, n - 1, *chosen})


def attention_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[int], causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some rows of one head in float64.

    Parameters
    ----------
    q, k, v : Tensor (N, d)
    rows : sequence of int
        Which rows of q.
    causal : bool

    Returns
    -------
    O, A : Tensor (rows, d), float64
        The output, and the same with the magnitudes of v.
    lse : Tensor (rows,), float64
    """
    index = torch.tensor(rows, device=q.device)
    S = q[index].double() @ k.double().T / math.sqrt(q.shape[-1])
    if causal:
        S.masked_fill_(torch.arange(len(k), device=q.device) > index[:, None], -math.inf)
    lse = S.logsumexp(-1)
    P = (S - lse[:, None]).exp_()
    V = v.double()
    return P @ V, P @ V.abs(), lse


def errors(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    dtype: str,
    *,
    lse: torch.Tensor | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    count: int = 16,
) -> dict[str, Any]:
    """Errors of some rows of an output against float64.

    Parameters
    ----------
    out, q, k, v : Tensor (B, H, N, d)
    causal : bool
    dtype : str
        "bf16" or "fp16": whose roundings are allowed.
    lse : Tensor (B, H, N), optional
        Compared as well.
    heads : sequence of (b, h), optional
        Default: the first and the last.
    count : int
        Rows of each head.

    Returns
    -------
    dict
        ``rows`` that were compared, ``max_error``, ``error_of_bound`` (the largest share of its
        bound that an element used), ``rms_relative``, ``right``; with `lse`, ``lse_error``.
    """
    u = UNIT_ROUNDOFF[dtype]
    B, H, N, _ = q.shape
    pairs = heads or sorted({(0, 0), (B - 1, H - 1)})
    worst = share = squares = norm = lse_error = 0.0
    total = 0
    for b, h in pairs:
        rows = some_rows(N, count, seed=b * H + h)
        O, A, L = attention_rows(q[b, h], k[b, h], v[b, h], rows, causal)
        error = out[b, h][rows].double() - O
        worst = _largest(worst, error)
        share = _largest(share, _share(error, SLACK * u * (A + O.abs())))
        squares += float(error.square().sum())
        norm += float(O.square().sum())
        total += len(rows)
        if lse is not None:
            lse_error = _largest(lse_error, lse[b, h][rows].double() - L)
    rms = math.sqrt(squares / norm)
    found = {
        "rows": total,
        "max_error": worst,
        "error_of_bound": share,
        "rms_relative": rms,
        "right": share <= 1 and rms <= u,
    }
    return found if lse is None else {**found, "lse_error": lse_error}


def differences(
    out: torch.Tensor, other: torch.Tensor, magnitude: torch.Tensor, dtype: str
) -> dict[str, Any]:
    """Two outputs of the same call, element by element.

    Parameters
    ----------
    out, other : Tensor
        Of one shape.
    magnitude : Tensor
        The call with the magnitudes of v: A.
    dtype : str
        As for `errors`.

    Returns
    -------
    dict
        ``max_difference``, ``difference_of_bound``, ``rms_difference`` (relative), ``alike``.
    """
    u = UNIT_ROUNDOFF[dtype]
    a, b = out.float(), other.float()
    apart = a - b
    share = _largest(0.0, _share(apart, SLACK * 2 * u * (magnitude.float() + b.abs())))
    rms = float(apart.norm() / b.norm())
    return {
        "max_difference": _largest(0.0, apart),
        "difference_of_bound": share,
        "rms_difference": rms,
        "alike": share <= 1 and rms <= 2 * u,
    }


def _share(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """error / bound; 0 where there is no error, for a bound may be 0 (one visible key, v = 0)."""
    return torch.where(error == 0, error, error / bound)


def _largest(known: float, values: torch.Tensor) -> float:
    """The largest magnitude, also of what is known; NaN counts as infinite."""
    return max(known, float(values.abs().nan_to_num(math.inf).max()))
