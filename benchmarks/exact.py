"""How far an output is from attention in float64, on some of its rows; and from another output.
How far gradients are from those in float64, in whole heads.

Both bounds of an output are derived from the rounding of the dtype. With u its unit roundoff, p a
row of softmax(S) and v the values, a kernel that multiplies in the dtype and adds in fp32 rounds

    every p_j, which moves an element of O by at most   u A,  A = sum_j p_j |v_j|,
    the element itself, which moves it by at most       u |O|,

so that ``|O - exact| <= u (A + |O|)``, and two such outputs differ by at most twice that. The rest
(products, exponentials and sums in fp32) is far smaller; `SLACK` covers it. At large N that bound
is loose, for roundings cancel. So the root mean square is looked at, too: of random data each of
the two roundings leaves about 0.41 u of it, together 0.58 u, and of two outputs 0.82 u; the bounds
are u and 2 u.

Gradients are compared in whole heads, by the root mean square alone. A kernel rounds P and dS (some
P before they form dS of it), the output that D = rowsum(dO o O) is of, and the gradient. Each
leaves about 0.4 u of random data, two to four of them 0.6 u to 0.8 u. The bound is 1.5 u, and 3 u
from one kernel to another; a single row of 16,384 that is wrong by its own size is 2 u (bf16). fp32
kernels round each of their sums of d and of N numbers as they go: at random that leaves
sqrt(N + d) u, and the bound is four times that, 16 times below TF32's rounding at N = 16,384.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.summary import GRADIENTS

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
SLACK = 1.1
ROWS_AT_ONCE = 1024  # of S in float64


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


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of one head in float64.

    FlashAttention-2 (Dao 2023), section 2.2, without rounding: P = softmax(S), dV = P^T dO,
    dS = P o (dO V^T - D) with D = rowsum(dO o O), dQ = dS K, dK = dS^T Q, both scaled.

    Parameters
    ----------
    q, k, v, dout : Tensor (N, d)
    causal : bool
    """
    Q, K, V, dO = (x.double() for x in (q, k, v, dout))
    scale = 1 / math.sqrt(Q.shape[-1])
    dQ, dK, dV = (torch.zeros_like(Q) for _ in range(3))
    for start in range(0, len(Q), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        seen = slice(start + ROWS_AT_ONCE if causal else None)  # of the keys
        S = Q[rows] @ K[seen].T * scale
        if causal:
            i, j = (torch.arange(n, device=q.device) for n in S.shape)
            S.masked_fill_(j > start + i[:, None], -math.inf)
        P = S.softmax(-1)
        dP = dO[rows] @ V[seen].T
        D = (P * dP).sum(-1, keepdim=True)
        dS = P * (dP - D) * scale
        dQ[rows] = dS @ K[seen]
        dK[seen] += dS.T @ Q[rows]
        dV[seen] += P.T @ dO[rows]
    return dQ, dK, dV


def gradient_bound(dtype: str, n: int, d: int) -> float:
    """Relative root mean square up to which gradients of random data are right."""
    u = UNIT_ROUNDOFF[dtype]
    return 4 * u * math.sqrt(n + d) if dtype == "fp32" else 1.5 * u


def gradient_errors(
    found: Sequence[torch.Tensor],
    exact: Mapping[tuple[int, int], Sequence[torch.Tensor]],
    dtype: str,
) -> dict[str, Any]:
    """Errors of gradients against those of some heads in float64.

    Parameters
    ----------
    found : three Tensors (B, H, N, d)
        dq, dk, dv.
    exact : mapping of (b, h) to three Tensors (N, d)
        As `gradients` returns them.
    dtype : str
        Whose roundings are allowed.

    Returns
    -------
    dict
        ``rows`` that were compared; for each gradient ``dq_max``, the largest error, and
        ``dq_rms``, relative; ``right``.
    """
    result: dict[str, Any] = {"rows": sum(len(heads[0]) for heads in exact.values())}
    *_, n, d = found[0].shape
    right = True
    for place, name in enumerate(GRADIENTS):
        worst = squares = norm = 0.0
        for (b, h), heads in exact.items():
            error = found[place][b, h].double() - heads[place]
            worst = _largest(worst, error)
            squares += float(error.square().sum())
            norm += float(heads[place].square().sum())
        rms = math.sqrt(squares / norm)
        result |= {f"{name}_max": worst, f"{name}_rms": rms}
        right = right and rms <= gradient_bound(dtype, n, d)  # NaN is not
    return {**result, "right": right}


def gradient_differences(
    found: Sequence[torch.Tensor], other: Sequence[torch.Tensor], dtype: str
) -> dict[str, Any]:
    """Gradients of the same call, head by head.

    Parameters
    ----------
    found, other : three Tensors (B, H, N, d)
    dtype : str
        As for `gradient_errors`.

    Returns
    -------
    dict
        ``rms_difference``, the largest relative one of a head and gradient, and ``alike``.
    """
    *_, n, d = found[0].shape
    rms = 0.0
    for a, b in zip(found, other, strict=True):
        apart = (a.float() - b.float()).norm(dim=(-2, -1))
        rms = _largest(rms, _share(apart, b.float().norm(dim=(-2, -1))))
    return {"rms_difference": rms, "alike": rms <= 2 * gradient_bound(dtype, n, d)}


def _share(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """error / bound; 0 where there is no error, for a bound may be 0 (one visible key, v = 0)."""
    return torch.where(error == 0, error, error / bound)


def _largest(known: float, values: torch.Tensor) -> float:
    """The largest magnitude, also of what is known; NaN counts as infinite."""
    return max(known, float(values.abs().nan_to_num(math.inf).max()))
