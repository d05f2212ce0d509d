"""Attention in NumPy: the definition of right, and how far from it a kernel may be.

The semantics, in the order in which a score meets them (``i = row + N_k - N_q`` is the place of a
query row on the key axis)::

    S_ij = scale * q_i . k_j              scale = 1/sqrt(d) unless given
    S_ij = softcap * tanh(S_ij / softcap)
    S_ij = S_ij - slope_h * |i - j|       ALiBi
    S_ij = S_ij + bias_ij
    S_ij = -inf unless key j is visible   causal AND window AND mask
    L_i  = log sum_j exp(S_ij)            natural logarithm; -inf for a row without a visible key
    O_i  = sum_j exp(S_ij - L_i) v_j      0 for such a row

A key that a row cannot see never influences the row, whatever bits its K and V hold.
`attention_backward` defines the gradients by q, k and v.
No CUDA here, and no kernel imports this file.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]
Window = tuple[int, int]

# Six tokens, two dimensions, three row tiles by three key tiles: small enough for paper and pencil.
WORKED_EXAMPLE: dict[str, Any] = {
    "q": np.array([[2, -1], [-2, 5], [4, 1], [0, 2], [3, 0], [1, -3]], dtype=np.float64),
    "k": np.array([[1, 0, 4, -1, 5, 2], [-2, 3, 1, 2, 0, -4]], dtype=np.float64).T,
    "v": np.array([[3, 0], [1, 2], [-2, 1], [5, -3], [4, 0], [-1, 2]], dtype=np.float64),
    "B_r": 2,
    "B_c": 2,
    "scale": 1.0,
}


# Masks: boolean arrays, True = the row may look at the key ---------------------------------------


def _positions(n_q: int, n_k: int) -> tuple[Array, Array]:
    """Place i (N_q, 1) of every query row on the key axis, and j (N_k,) of every key."""
    return np.arange(n_q)[:, None] + (n_k - n_q), np.arange(n_k)


def _in_window(i: Array, j: Array, window: Window) -> Array:
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window: got {window}, accepted are two integers >= -1 (-1: unbounded)")
    visible = np.ones(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
    if left >= 0:
        visible &= j >= i - left
    if right >= 0:
        visible &= j <= i + right
    return visible


def causal_mask(n_q: int, n_k: int) -> Array:
    """Keys up to the row's own position, ``j <= i``: bottom-right aligned, (N_q, N_k)."""
    i, j = _positions(n_q, n_k)
    return j <= i


def window_mask(n_q: int, n_k: int, left: int, right: int) -> Array:
    """Keys ``i - left <= j <= i + right``, both ends included, -1 = unbounded, (N_q, N_k)."""
    return _in_window(*_positions(n_q, n_k), (left, right))


def prefix_lm_mask(n_q: int, n_k: int, prefix: int) -> Array:
    """Causal, and the first `prefix` keys are visible to every row, (N_q, N_k)."""
    i, j = _positions(n_q, n_k)
    return (j <= i) | (j < prefix)


def document_mask(ids: ArrayLike, n_q: int, n_k: int) -> Array:
    """Keys of the row's own document, (B, 1, N_q, N_k).

    Parameters
    ----------
    ids : integers (N_k,) or (B, N_k)
        Document of every key. A row belongs to the document of its aligned position i; a row with
        a negative i belongs to none and sees nothing.
    """
    of_key = np.atleast_2d(np.asarray(ids))
    if of_key.shape[1] != n_k:
        raise ValueError(f"ids: got {of_key.shape[1]} keys, accepted is N_k = {n_k}")
    of_row = of_key[:, max(n_k - n_q, 0) :]  # of the rows with i >= 0, which are the last ones
    visible = np.zeros((len(of_key), 1, n_q, n_k), dtype=bool)
    visible[:, 0, max(n_q - n_k, 0) :] = of_row[:, :, None] == of_key[:, None, :]
    return visible


def alibi_bias(slopes: ArrayLike, n_q: int, n_k: int) -> Array:
    """``-slope * |i - j|`` in float64: (H, N_q, N_k) for slopes (H,), (B, H, N_q, N_k) for (B, H).

    Source: Press, Smith, Lewis, "Train Short, Test Long" (2022), made symmetric in i - j.
    """
    i, j = _positions(n_q, n_k)
    return -np.asarray(slopes, dtype=np.float64)[..., None, None] * abs(i - j)


# Attention ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    """One (b, h): Q (R, d) already scaled, K and V (N_k, d), S (R, N_k) with -inf where masked."""

    index: tuple[int, int]
    index_k: tuple[int, int]  # of the K and V that it reads
    scale: float
    Q: Array
    K: Array
    V: Array
    S: Array
    visible: Array

    def softmax(self) -> tuple[Array, Array, Array]:
        """Row maximum m (R, 1), unnormalised P = exp(S - m) (R, N_k) and its row sum l (R, 1)."""
        m = self.S.max(axis=-1, keepdims=True, initial=-np.inf)
        P = np.exp(self.S - np.where(m == -np.inf, 0, m))  # a row without keys: exp(-inf) = 0
        return m, P, P.sum(axis=-1, keepdims=True)


def _weigh(P: Array, V: Array, visible: Array) -> Array:
    """P V without the terms of masked keys, so that 0 * NaN cannot occur in them."""
    finite = np.isfinite(V).all(axis=-1, keepdims=True)
    total: Array = P @ np.where(finite, V, 0)
    for j in np.flatnonzero(~finite):
        rows = visible[:, j]
        total[rows] += P[rows, j, None] * V[j]
    return total


def _four_dimensions(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Q (B, H, N_q, d) and K, V (B, H_k, N_k, d), checked."""
    if not (2 <= q.ndim <= 4 and q.ndim == k.ndim and k.shape == v.shape):
        raise ValueError(
            f"q, k, v: got {q.shape}, {k.shape}, {v.shape}, accepted are (N, d), (H, N, d) or "
            "(B, H, N, d) with k and v alike"
        )
    Q, K, V = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (q, k, v))
    (B, H, _, d), (B_k, H_k, _, d_k) = Q.shape, K.shape
    if B != B_k or d != d_k or (H % H_k if H_k else H):
        raise ValueError(
            f"q, k: got {q.shape}, {k.shape}, accepted are equal B and d, and H a multiple of H_k"
        )
    return Q, K, V


def _heads(
    q: Array,
    k: Array,
    v: Array,
    dtype: DTypeLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    mask: ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    rows: ArrayLike | None = None,
) -> Iterator[_Head]:
    """Every head of 4-D arrays, its scores computed in `dtype`; one head in memory at a time."""
    (B, H, N_q, d), (H_k, N_k) = q.shape, k.shape[1:3]
    if mask is not None and np.asarray(mask).dtype != bool:
        raise TypeError(f"mask: got {np.asarray(mask).dtype}, accepted is bool, True = visible")

    # Python floats below: beside a float32 array they are rounded to float32, and do not promote it
    scale = 1 / math.sqrt(max(d, 1)) if scale is None else float(scale)
    r = np.arange(N_q)[slice(None) if rows is None else np.asarray(rows, np.intp)]
    i, j = r[:, None] + (N_k - N_q), np.arange(N_k)
    allowed = _in_window(i, j, (-1, -1) if window is None else window)
    if causal:
        allowed &= j <= i
    masks = np.broadcast_to(True if mask is None else np.asarray(mask), (B, H, N_q, N_k))
    biases = None if bias is None else np.broadcast_to(np.asarray(bias), (B, H, N_q, N_k))
    slopes = None if alibi_slopes is None else np.broadcast_to(np.asarray(alibi_slopes), (B, H))

    for b, h in np.ndindex(B, H):
        h_k = h // (H // H_k)
        Q_h = q[b, h, r].astype(dtype) * scale
        K_h, V_h = k[b, h_k].astype(dtype), v[b, h_k].astype(dtype)
        S, visible = Q_h @ K_h.T, allowed & masks[b, h, r]
        if softcap:
            S = float(softcap) * np.tanh(S / float(softcap))
        if slopes is not None:
            S = S - slopes[b, h].astype(dtype) * abs(i - j).astype(dtype)
        if biases is not None:
            S = S + biases[b, h, r].astype(dtype)
            visible = visible & (biases[b, h, r] != -np.inf)
        S = np.where(visible, S, -np.inf)
        yield _Head((b, h), (b, h_k), scale, Q_h, K_h, V_h, S, visible)


def attention_reference(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    mask: ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """Attention by its formula, untiled, in float64.

    Parameters
    ----------
    q : (N_q, d), (H, N_q, d) or (B, H, N_q, d)
    k, v : (N_k, d), (H_k, N_k, d) or (B, H_k, N_k, d)
        Query head h reads key head ``h // (H // H_k)``.
    scale : float, default 1/sqrt(d)
    causal : bool
        Row sees keys ``j <= i = row + N_k - N_q``.
    window : (left, right)
        Row sees keys ``i - left <= j <= i + right``; -1 = unbounded.
    mask : bool, broadcastable to (B, H, N_q, N_k)
        True = visible; all masks hold at once.
    softcap : float
        None or 0: no cap.
    alibi_slopes : (H,) or (B, H)
    bias : float, broadcastable to (B, H, N_q, N_k)
        Added to the scores; -inf hides the key like the mask does.
    rows : integers (R,)
        Compute these query rows only, for samples of large problems: the results have R rows,
        all other arguments keep N_q.
    dtype : default float64
        What everything is computed in. The definition is float64.

    Returns
    -------
    out : (..., N_q, d), in `dtype`
    lse : (..., N_q), in `dtype`
        Natural logarithm of the sum of exponentials; -inf for a row without a visible key.

    Raises
    ------
    ValueError
        Shapes do not fit, H is no multiple of H_k, or a window bound is below -1.
    TypeError
        The mask is not boolean.
    """
    Q, K, V = _four_dimensions(q, k, v)
    B, H, N_q, d = Q.shape
    R = N_q if rows is None else len(np.asarray(rows))
    out, lse = np.zeros((B, H, R, d), dtype), np.zeros((B, H, R), dtype)
    with np.errstate(all="ignore"):  # NaN and inf are data here
        for head in _heads(
            Q, K, V, dtype, scale=scale, causal=causal, window=window, mask=mask, softcap=softcap,
            alibi_slopes=alibi_slopes, bias=bias, rows=rows,
        ):  # fmt: skip
            m, P, l = head.softmax()
            out[head.index] = _weigh(P, head.V, head.visible) / np.where(l == 0, 1, l)
            lse[head.index] = (m + np.log(l))[:, 0]
    return out.reshape(*q.shape[:-2], R, d), lse.reshape(*q.shape[:-2], R)


def accumulation_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype in which kernels compute: float64 for float64 inputs, float32 for all others."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def attention_same_precision(q: Array, k: Array, v: Array, **problem: Any) -> tuple[Array, Array]:
    """`attention_reference` rounded where the kernels round.

    Scale times Q, scores, exp, sums and lse live in the accumulation dtype, P unnormalised; only
    ``out`` is rounded to the dtype of `q`, once, at the end. Same arguments, same shapes.
    """
    out, lse = attention_reference(q, k, v, **problem, dtype=accumulation_dtype(q.dtype))
    with np.errstate(over="ignore"):
        return out.astype(q.dtype), lse


def merge(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[Array, Array]:
    """Attention over two disjoint sets of keys from the results over each, in float64.

    Parameters
    ----------
    out_a, out_b : (..., N_q, d)
    lse_a, lse_b : (..., N_q)

    Returns
    -------
    out, lse
        ``(0, -inf)``, the result over no keys, is the identity, exactly.
    """
    a, b = (np.asarray(x, dtype=np.float64)[..., None] for x in (lse_a, lse_b))
    m = np.maximum(a, b)
    finite_m = np.where(m == -np.inf, 0, m)
    w_a, w_b = np.exp(a - finite_m), np.exp(b - finite_m)
    w = w_a + w_b
    out = w_a * np.asarray(out_a, np.float64) + w_b * np.asarray(out_b, np.float64)
    with np.errstate(divide="ignore"):
        return out / np.where(w == 0, 1, w), (m + np.log(w))[..., 0]


# Gradients ---------------------------------------------------------------------------------------


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    mask: ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    rows: ArrayLike | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of a loss by q, k and v, untiled, in float64.

    FlashAttention-2, Algorithm 2 (Dao 2023), with P computed anew from the scores, and two terms
    that the paper does not have: L has a gradient of its own, dL, and softcap a derivative ::

        P  = exp(S - L)                       0 where masked
        dV = P^T dO
        dP = dO V^T
        D  = rowsum(dO o O)
        dS = P o (dP - D + dL)                since dL_i/dS_ij = P_ij
        dS = dS / cosh^2(scale Q K^T / softcap)   with softcap: tanh' = 1/cosh^2
        dQ = scale dS K
        dK = scale dS^T Q

    dK and dV of a key head are sums over the query heads that read it. ALiBi and `bias` are
    constants: they change S and get no gradient. A score change of your own is a `bias` if it adds
    a constant; there is no argument for one that does not.

    Parameters
    ----------
    dout : (..., N_q, d)
        Gradient of the loss by out.
    q, k, v, scale, causal, window, mask, softcap, alibi_slopes, bias
        As in `attention_reference`. Arrays are float16, bfloat16, float32 or float64, not
        necessarily alike.
    dlse : (..., N_q)
        Gradient of the loss by lse; None is 0.
    rows : integers (R,)
        The loss of these query rows only: dout, dlse and dq have R rows. dk and dv are sums over
        rows, so those of disjoint sets of rows add up.

    Returns
    -------
    dq : (..., N_q, d)
    dk, dv : the shape of k
        A pair that is masked contributes exactly nothing, whatever its row or key holds: 0 for a
        row without a visible key, and for a key that no row sees.

    Raises
    ------
    ValueError
        Shapes do not fit, H is no multiple of H_k, or a window bound is below -1.
    TypeError
        An array is of another dtype, or the mask is not boolean.

    Notes
    -----
    ``exp(S - L)`` is computed as ``exp(S - m) / l``: the same number, without the rounding of L,
    which at scores of 1e16 swallows log l.
    """
    _four_dimensions(q, k, v)
    of_rows = (*q.shape[:-2], q.shape[-2] if rows is None else len(np.asarray(rows)))
    dlse = np.zeros(of_rows) if dlse is None else dlse
    for name, x, shape in (("dout", dout, (*of_rows, q.shape[-1])), ("dlse", dlse, of_rows)):
        if x.shape != shape:
            raise ValueError(f"{name}: got {x.shape}, accepted is {shape}")
    for name, x in {"dout": dout, "q": q, "k": k, "v": v, "dlse": dlse}.items():
        if x.dtype not in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            raise TypeError(
                f"{name}: got {x.dtype}, accepted are float16, bfloat16, float32, float64"
            )
    problem: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "mask": mask}
    problem |= {"softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias}
    return _gradients(np.float64, dout, q, k, v, None, None, dlse, rows=rows, **problem)


def _gradients(
    dtype: DTypeLike,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array | None,
    dlse: Array | None,
    **problem: Any,
) -> tuple[Array, Array, Array]:
    """dQ, dK and dV in `dtype`; P and D from the given out and lse, or else from the scores."""
    Q, K, V = _four_dimensions(q, k, v)
    softcap = problem.get("softcap")
    shape = (*Q.shape[:2], dout.shape[-2], Q.shape[3])
    dO = dout.reshape(shape).astype(dtype)
    dL = np.zeros(shape[:3], dtype) if dlse is None else dlse.reshape(shape[:3]).astype(dtype)
    dQ, dK, dV = np.zeros(shape, dtype), np.zeros(K.shape, dtype), np.zeros(V.shape, dtype)
    with np.errstate(all="ignore"):  # NaN and inf are data here
        for head in _heads(Q, K, V, dtype, **problem):
            dO_h, dL_h, visible = dO[head.index], dL[head.index][:, None], head.visible
            if out is None or lse is None:
                _, P, l = head.softmax()
                P = np.where(visible, P / l, 0)
                O = _weigh(P, head.V, visible)
            else:
                O = out.reshape(shape)[head.index].astype(dtype)
                L = lse.reshape(shape[:3])[head.index][:, None].astype(dtype)
                P = np.where(visible & (L != -np.inf), np.exp(head.S - L), 0)
            dP = dO_h @ head.V.T
            D = (dO_h * O).sum(axis=-1, keepdims=True)
            dS = P * (dP - D + dL_h)
            if softcap:
                dS = dS / np.cosh(head.Q @ head.K.T / float(softcap)) ** 2
            dS = np.where(visible, dS, 0)  # a masked V_j may have made dP_ij NaN
            dQ[head.index] = head.scale * _weigh(dS, head.K, visible)
            dK[head.index_k] += _weigh(dS.T, head.Q, visible.T)  # head.Q is scale Q
            dV[head.index_k] += _weigh(P.T, dO_h, visible.T)
    return dQ.reshape(dout.shape), dK.reshape(k.shape), dV.reshape(v.shape)


def attention_backward_same_precision(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    **problem: Any,
) -> tuple[Array, Array, Array]:
    """`attention_backward` rounded where the kernels round.

    As Algorithm 2 does, it takes `out` and `lse` from the forward pass: ``P = exp(S - L)``,
    ``D = rowsum(dO o O)``. Everything lives in the accumulation dtype, and the gradients are
    rounded to the dtype of `q` at the end.
    """
    acc = accumulation_dtype(q.dtype)
    made = _gradients(acc, dout, q, k, v, out, lse, dlse, **problem)
    with np.errstate(over="ignore"):
        dq, dk, dv = (x.astype(q.dtype) for x in made)
    return dq, dk, dv


# How far a kernel may be off ---------------------------------------------------------------------


def rounding_error(q: Array, k: Array, v: Array, **problem: Any) -> tuple[float, float]:
    """First-order rounding error of out and lse inside a kernel, whatever its order of summation.

    The error of one same-precision run can be zero by luck: one key, small integers, float64. This
    is the size such an error has for these inputs, with u half the eps of the accumulation dtype.

    A sum of n terms t in any order errs by about ``u * (sum |t| + sqrt(n) |sum t|)``: the first
    term is the random walk of partial sums that cancel, the second that of sums that only grow.
    (Thousands of equal terms err by more, ``n u |t|``: there every rounding has the same sign.)
    For a score this is ``u * (scale |q| . |k| + sqrt(d) |S|)``, plus 2u |S| for scale and log2(e).
    exp2 is good to 2 ulp = 4u, the division, the rescaling by alpha and log take the other 4:
    together a relative error of P_ij ::

        e_ij = u * (8 + scale |q_i| . |k_j| + (2 + sqrt(d)) |S_ij|)

    It moves O_i by ``sum_j P_ij e_ij (v_j - O_i)`` and L_i by ``sum_j P_ij e_ij``. The errors of
    different keys are independent, so their squares add up; ``(v - O)^2 <= 2 v^2 + 2 O^2``. To
    these come the sums over the N_k keys in P V, l and log l.

    Returns
    -------
    out, lse : float
        The largest over all finite entries, absolute.

    Notes
    -----
    Sources: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), 4.2; Higham and Mary,
    "A New Approach to Probabilistic Rounding Error Analysis" (2019), for sqrt(n) instead of n.
    """
    u = float(ml_dtypes.finfo(accumulation_dtype(q.dtype)).eps) / 2
    worst = [0.0, 0.0]
    with np.errstate(all="ignore"):
        for head in _heads(*_four_dimensions(q, k, v), np.float64, **problem):
            d, N_k = head.Q.shape[1], head.K.shape[0]
            _, P, l = head.softmax()
            P /= np.where(l == 0, 1, l)
            e = 8 + abs(head.Q) @ abs(head.K).T + (2 + math.sqrt(d)) * abs(head.S)
            var = (P * np.where(head.visible, e, 0)) ** 2  # of P_ij, in units of u^2
            sum_var = var.sum(axis=-1, keepdims=True)
            O = _weigh(P, head.V, head.visible)
            out = _weigh(2 * (var + P), head.V**2, head.visible) + 2 * (sum_var + N_k) * O**2
            for n, square in enumerate((out, sum_var + N_k)):
                finite = square[np.isfinite(square)]
                worst[n] = max(worst[n], u * math.sqrt(finite.max(initial=0.0)))
    return worst[0], worst[1]


def rounding_error_backward(
    dout: Array, q: Array, k: Array, v: Array, *, dlse: Array | None = None, **problem: Any
) -> tuple[float, float, float]:
    """First-order rounding error of dq, dk and dv, as `rounding_error` estimates that of out.

    ``P = exp(S - L)`` also has the rounding of S - L, so its relative error is ``e + u |L|``. With
    G = dP - D + dL and F the derivative of softcap, dS = P G F errs by ::

        P F (e |G|  +  u (|dO| . |v| + sqrt(d) |dP|)  +  u (|dP| + |D| + |dL|))

    for each pair on its own, and by P F times the error of D for all keys of a row together. A
    sum of n terms t adds ``u (sum |t| + sqrt(n) |sum t|)``. Independent errors add as squares.

    Returns
    -------
    dq, dk, dv : float
        The largest over all finite entries, absolute.
    """
    u = float(ml_dtypes.finfo(accumulation_dtype(q.dtype)).eps) / 2
    Q, K, V = _four_dimensions(q, k, v)
    dO = dout.reshape(Q.shape).astype(np.float64)
    dL = np.zeros(Q.shape[:3]) if dlse is None else dlse.reshape(Q.shape[:3]).astype(np.float64)
    cap = problem.get("softcap") or np.inf
    largest = 0.0
    var, size, total = (np.zeros((2, *K.shape)) for _ in range(3))  # of dK and dV
    with np.errstate(all="ignore"):
        for head in _heads(Q, K, V, np.float64, **problem):
            visible, dO_h, dL_h = head.visible, dO[head.index], dL[head.index][:, None]
            d, N_k = head.Q.shape[1], head.K.shape[0]
            m, P, l = head.softmax()
            P = np.where(visible, P / l, 0)
            F = 1 / np.cosh(head.Q @ head.K.T / cap) ** 2
            e = 8 + abs(head.Q) @ abs(head.K).T + (2 + math.sqrt(d)) * abs(head.S)
            e = np.where(visible, e * (1 + 2 / cap) + abs(m + np.log(l)), 0)
            O = _weigh(P, head.V, visible)
            dP, D = dO_h @ head.V.T, (dO_h * O).sum(axis=-1, keepdims=True)
            e_dP = abs(dO_h) @ abs(head.V).T + math.sqrt(d) * abs(dP)
            e_D = (abs(dO_h) * abs(O)).sum(axis=-1, keepdims=True) + math.sqrt(d) * abs(D)
            G = dP - D + dL_h
            square = (e * G) ** 2 + e_dP**2 + (abs(dP) + abs(D) + abs(dL_h)) ** 2
            var_dS = np.where(visible, (P * F) ** 2 * (square + e_D**2), 0) + 2 * (P * G) ** 2
            var_dS = np.where(visible, var_dS, 0)
            dS = np.where(visible, P * G * F, 0)

            dQ = _weigh(var_dS, head.K**2, visible) + N_k * _weigh(dS, head.K, visible) ** 2
            dQ += _weigh(abs(dS), abs(head.K), visible) ** 2
            dQ += (e_D * _weigh(P * F, head.K, visible)) ** 2
            finite = dQ[np.isfinite(dQ)]
            largest = max(largest, abs(head.scale) * u * math.sqrt(finite.max(initial=0.0)))
            for n, (of, X) in enumerate(((dS, head.Q), (P, dO_h))):
                variance = var_dS if n == 0 else (P * e) ** 2
                var[n][head.index_k] += _weigh(variance.T, X**2, visible.T)
                size[n][head.index_k] += _weigh(abs(of).T, abs(X), visible.T)
                total[n][head.index_k] += _weigh(of.T, X, visible.T)
        terms = Q.shape[2] * Q.shape[1] / max(K.shape[1], 1)
        square = var + size**2 + terms * total**2
    dk, dv = (u * math.sqrt(x[np.isfinite(x)].max(initial=0.0)) for x in square)
    return largest, dk, dv


def tolerance(out_ref: Array, out_same: Array, inner: float | None = None) -> float:
    """The largest error a kernel may have against the float64 reference.

    ::

        2 * max|same - ref|  +  eps * max|ref|  +  2 * inner

    The rule is the first two terms: twice the error of the same precision in NumPy, and one
    rounding to the dtype of ``out_same``. The third is for the part of the error that the
    NumPy run may lack by luck (`rounding_error`), doubled because that is a standard deviation,
    and because a float64 reference has the error too. In float16 and bfloat16 it is far below the
    second term; in float32 it is about 1e-6 relative, where a wrong scale or key shows as 1e-3.

    Parameters
    ----------
    out_ref : float64
    out_same : the dtype of the kernel's output
        Non-finite entries of either count for nothing.
    inner : float
        From `rounding_error`. Without the inputs at hand, ``4 eps max|ref|`` of the accumulation
        dtype: exp2's 2 ulp in numerator and denominator. That is for data large enough that
        ``same`` has its share of bad luck.
    """
    out_ref, wide = np.asarray(out_ref, np.float64), np.asarray(out_same, np.float64)
    finite = np.isfinite(out_ref) & np.isfinite(wide)
    largest = abs(out_ref[finite]).max(initial=0.0)
    limits = ml_dtypes.finfo(out_same.dtype)
    if inner is None:
        inner = 4 * float(ml_dtypes.finfo(accumulation_dtype(out_same.dtype)).eps) * largest
    error = abs(wide[finite] - out_ref[finite]).max(initial=0.0)
    return float(
        2 * error + float(limits.eps) * max(largest, float(limits.smallest_normal)) + 2 * inner
    )


def assert_close_to_reference(
    out: Array, ref64: Array, same: Array, *, name: str, inner: float | None = None
) -> tuple[float, float]:
    """Check shape, dtype, the places of NaN and inf, and ``max|out - ref64| <= tolerance``.

    Parameters
    ----------
    out : what a kernel gave, on the host
    ref64, same : the same array from `attention_reference` and from `attention_same_precision`
    name : what the message calls it
    inner : see `tolerance`

    Returns
    -------
    error, allowed : float

    Raises
    ------
    AssertionError
        Naming what differs, where, and both numbers.
    """
    if out.shape != ref64.shape or out.dtype != same.dtype:
        raise AssertionError(
            f"{name}: got {out.dtype} {out.shape}, the reference is {same.dtype} {ref64.shape}"
        )
    wide, allowed = out.astype(np.float64), tolerance(ref64, same, inner)
    with np.errstate(all="ignore"):
        rounded = ref64.astype(same.dtype).astype(np.float64)  # may be inf in float16
        differs = (wide != rounded) & ~(np.isnan(wide) & np.isnan(rounded))
        special = differs & ~(np.isfinite(wide) & np.isfinite(rounded))
        error = np.where(np.isfinite(wide) & np.isfinite(ref64), abs(wide - ref64), 0)
    if special.any():
        at = tuple(int(n) for n in np.argwhere(special)[0])
        raise AssertionError(
            f"{name}: {special.sum()} of {out.size} entries are NaN or inf in one only, first at "
            f"{at}: got {wide[at]}, the reference is {ref64[at]}"
        )
    largest = float(error.max(initial=0.0))
    if largest > allowed:
        at = tuple(int(n) for n in np.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{name}: max|out - ref64| = {largest:.3e} > {allowed:.3e} allowed, at {at}: "
            f"got {wide[at]}, the reference is {ref64[at]}"
        )
    return largest, allowed


def assert_attention(
    out: Array, lse: Array | None, q: Array, k: Array, v: Array, *, name: str, **problem: Any
) -> None:
    """`assert_close_to_reference` for out and, if given, lse of one problem, with its own `inner`.

    `problem` is what `attention_reference` takes; with `rows`, out and lse have only these.
    """
    ref = attention_reference(q, k, v, **problem)
    same = attention_same_precision(q, k, v, **problem)
    inner = rounding_error(q, k, v, **problem)
    assert_close_to_reference(out, ref[0], same[0], name=f"{name}: out", inner=inner[0])
    if lse is not None:
        assert_close_to_reference(lse, ref[1], same[1], name=f"{name}: lse", inner=inner[1])


def assert_attention_backward(
    got: tuple[Array, Array, Array],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    name: str,
    **problem: Any,
) -> None:
    """`assert_close_to_reference` for dq, dk and dv of one problem, with its own `inner`.

    `problem` is what `attention_backward` takes, without `rows`; `out` and `lse` are those that
    the kernel got.
    """
    ref = attention_backward(dout, q, k, v, **problem)
    same = attention_backward_same_precision(dout, q, k, v, out, lse, **problem)
    inner = rounding_error_backward(dout, q, k, v, **problem)
    for which, x, exact, rounded, e in zip(("dq", "dk", "dv"), got, ref, same, inner, strict=True):
        assert_close_to_reference(x, exact, rounded, name=f"{name}: {which}", inner=e)


# FlashAttention-2, step by step ------------------------------------------------------------------


@dataclass(frozen=True)
class InnerStep:
    """What the chip holds after line 10 of step (i, j); tiles are numbered from 1 as in the paper.

    S_ij, P_ij: (rows of tile i, keys of tile j); m_i, l_i: (rows,); acc: (rows, d), not yet
    divided by l_i.
    """

    i: int
    j: int
    S_ij: Array
    m_i: Array
    P_ij: Array
    l_i: Array
    acc: Array


@dataclass(frozen=True)
class RowTile:
    """What row tile i writes at the end: O_i (rows, d) and L_i (rows,)."""

    i: int
    O_i: Array
    L_i: Array


def flash_attention_2_trace(
    q: Array, k: Array, v: Array, B_r: int, B_c: int, scale: float, causal: bool = False
) -> Iterator[InnerStep | RowTile]:
    """FlashAttention-2, Algorithm 1 (Dao 2023), one head (N, d) in float64, every step shown.

    Causal leaves out the key tiles that no row of the tile sees, and masks the others.

    Yields
    ------
    InnerStep
        For every pair of tiles (i, j), j running first.
    RowTile
        After the last j of every i.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    N_q, N_k = len(q), len(k)
    for i, row in enumerate(range(0, N_q, B_r), start=1):  # line 3
        Q_i = q[row : row + B_r]  # line 4
        acc = np.zeros(Q_i.shape)  # line 5
        l_i, m_i = np.zeros(len(Q_i)), np.full(len(Q_i), -np.inf)
        last = min(row + B_r, N_q) + N_k - N_q if causal else N_k  # keys any row of the tile sees
        for j, col in enumerate(range(0, last, B_c), start=1):  # line 6
            K_j, V_j = k[col : col + B_c], v[col : col + B_c]  # line 7
            S_ij = scale * Q_i @ K_j.T  # line 8
            if causal:
                visible = causal_mask(N_q, N_k)[row : row + B_r, col : col + B_c]
                S_ij = np.where(visible, S_ij, -np.inf)
            m_old, m_i = m_i, np.maximum(m_i, S_ij.max(axis=1))  # line 9
            finite_m = np.where(m_i == -np.inf, 0, m_i)
            P_ij = np.exp(S_ij - finite_m[:, None])
            alpha = np.exp(m_old - finite_m)
            l_i = alpha * l_i + P_ij.sum(axis=1)
            acc = alpha[:, None] * acc + P_ij @ V_j  # line 10
            yield InnerStep(i, j, S_ij, m_i, P_ij, l_i, acc)
        with np.errstate(divide="ignore"):
            L_i = m_i + np.log(l_i)  # line 13
        yield RowTile(i, acc / np.where(l_i == 0, 1, l_i)[:, None], L_i)  # lines 12, 14, 15
