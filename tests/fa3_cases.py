"""What the tests of fa3 on a GPU draw, and how far its output may be from float64. In torch.

Everything happens on the tensors' own device. Small problems of many processes are faster on the
CPU: on one GPU their many small kernels wait for each other.
"""

import math
from dataclasses import dataclass
from typing import Any

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Below it P~ and O may be rounded to 0: half the smallest fp16; the smallest normal fp32, below
# which ex2.approx.ftz gives 0.
TINY = {"bf16": 2.0**-126, "fp16": 2.0**-25}
FP32 = 2.0**-21  # 8 units of roundoff, for exp2, scale, division and log
STEP = 2.0**-23  # of each 16 products that the tensor cores add, which truncates the sum
SIGMAS = 2.0  # of a sum of roundings, whose own size is at most 0.58 u


@dataclass(frozen=True)
class Draw:
    """One problem in numbers and words; a failing one is printed as this."""

    B: int = 1
    H_k: int = 1
    group: int = 1
    N_q: int = 100
    N_k: int = 100
    window: tuple[int, int] = (0, 0)
    scale: float | None = None
    q: str = "BHND"
    k: str = "BHND"
    v: str = "BHND"
    out: str = "new"
    values: str = "normal"
    seed: int = 0


LAYOUTS = ("BHND", "BNHD", "sliced")
OUTS = ("new", "BHND", "BNHD", "sliced")
VALUES = ("normal", "shifted", "heavy", "peaked", "tiny", "constant")


def placed(torch: Any, values: Any, layout: str) -> tuple[Any, Any]:
    """`values` (B, H, N, d) in a layout: the view, and the buffer around it, NaN elsewhere."""
    B, H, N, d = values.shape
    new = {"dtype": values.dtype, "device": values.device}
    if layout == "BNHD":
        buffer = torch.full((B, N, H, d), math.nan, **new)
        view = buffer.transpose(1, 2)
    elif layout == "sliced":  # 16 bytes from the start of a row, rows and heads around it
        buffer = torch.full((B, H + 1, N + 3, d + 16), math.nan, **new)
        view = buffer[:, 1:, 1 : 1 + N, 8 : 8 + d]
    else:
        buffer = torch.full((B, H, N, d), math.nan, **new)
        view = buffer
    view.copy_(values)
    return view, buffer


def moved(view: Any, buffer: Any, device: Any) -> tuple[Any, Any]:
    """The view and the buffer that `placed` returns on another device, bit by bit."""
    there = buffer.to(device)
    return there.as_strided(view.shape, view.stride(), view.storage_offset()), there


def inputs(torch: Any, draw: Draw, d: int, dtype: Any, device: Any) -> tuple[Any, Any, Any]:
    """Values of q, k and v, contiguous."""
    generator = torch.Generator(device=device)
    generator.manual_seed(draw.seed)
    H = draw.H_k * draw.group
    shapes = (draw.B, H, draw.N_q, d), *((draw.B, draw.H_k, draw.N_k, d),) * 2
    q, k, v = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    if draw.values == "shifted":
        k, v = k + 0.5, v + 0.5
    elif draw.values == "heavy":
        q, k, v = q**3, k**3, v**3 * 10
    elif draw.values == "peaked":
        q = q * 8
    elif draw.values == "tiny":
        q, v = q * 1e-3, v * 1e-3
    elif draw.values == "constant":
        q, k, v = torch.ones_like(q), torch.ones_like(k), torch.full_like(v, 0.7)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def seen(torch: Any, mask: str, window: tuple[int, int], N_q: int, N_k: int, device: Any) -> Any:
    """Which keys each row sees, (N_q, N_k): docs/contract.md."""
    i = torch.arange(N_q, device=device)[:, None] + (N_k - N_q)
    j = torch.arange(N_k, device=device)[None, :]
    every = torch.ones((N_q, N_k), dtype=torch.bool, device=device)
    if mask in ("causal", "skip"):
        return j <= i
    if mask == "window":
        left, right = window
        every &= (j >= i - left) if left >= 0 else every
        every &= (j <= i + right) if right >= 0 else every
    return every


@dataclass(frozen=True)
class Expected:
    """The output and LSE in float64, and what roundings may do to them."""

    O: Any  # (B, H, N_q, d)
    lse: Any  # (B, H, N_q)
    most: Any  # of each element's error
    square: Any  # of the size of each element's error
    most_lse: Any


def allowed(
    torch: Any, q: Any, k: Any, v: Any, visible: Any, scale: float, softcap: float, dtype: str
) -> Expected:
    """Attention in float64, and how far an exact kernel may be from it.

    A kernel that multiplies in the dtype and adds in fp32 rounds every p_j and O itself, each by a
    relative u at most. That moves an element of O by at most ``u (A + |O|)``, with
    A = sum_j p_j |v_j|; and as the roundings of the keys are independent, its typical size is
    below ``u sqrt(sum_j p_j^2 v_j^2 + O^2)``. p~ below the smallest number add `TINY` |v_j| each.

    In fp32, a score errs by ``8 FP32 + (FP32 + d / 16 STEP) scale |q| . |k|`` at most; p by the
    same, relatively, O by that times ``A + |O|``, and the LSE by it alone. The sum of P V itself
    errs by ``N_k / 16 STEP A`` at most, and by far less where signs differ.
    """
    u, tiny = UNIT_ROUNDOFF[dtype], TINY[dtype]
    group = q.shape[1] // k.shape[1]
    Q, K, V = q.double(), k.double(), v.double()
    K, V = K.repeat_interleave(group, 1), V.repeat_interleave(group, 1)
    S = scale * (Q @ K.mT)
    inner = abs(scale) * (Q.abs() @ K.abs().mT)
    inner = inner.masked_fill(~visible, 0).amax(-1, keepdim=True)
    inner = 8 * FP32 + (FP32 + -(-q.shape[3] // 16) * STEP) * inner
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    S = S.masked_fill(~visible, -math.inf)
    m = S.amax(-1, keepdim=True)
    m = torch.where(m == -math.inf, torch.zeros_like(m), m)
    P = (S - m).exp()
    l = P.sum(-1, keepdim=True)
    some = torch.where(l == 0, torch.ones_like(l), l)
    O, A = P @ V / some, P @ V.abs() / some
    squares = (P * P) @ (V * V) / some**2
    small = tiny * (visible.double() @ V.abs() / some + 1)
    rounding = inner * (A + O.abs()) + small
    lse = (m + l.log())[..., 0]
    return Expected(
        O,
        lse,
        1.01 * u * (A + O.abs()) + rounding + -(-k.shape[2] // 16) * STEP * A,
        (u**2) * (squares + O * O) + rounding**2,
        inner[..., 0] + FP32 * lse.abs().nan_to_num(posinf=0),
    )


def failures(torch: Any, out: Any, lse: Any, want: Expected, rows: Any = None) -> Any:
    """Numbers above 1 are errors, in one tensor, so that a test waits for the GPU once.

    Of out: the largest error, as a share of what is allowed, and the root mean square, of
    `SIGMAS` times what is typical. Of the LSE: the largest, and whether -inf is where it should be.
    `rows` selects rows (a boolean tensor (N_q,)).
    """
    pick = slice(None) if rows is None else rows
    error = (out.double() - want.O)[:, :, pick].abs()
    most, square = want.most[:, :, pick], want.square[:, :, pick]
    share = torch.where(error == 0, error, error / most).nan_to_num(nan=math.inf)
    typical = square.mean().sqrt() * SIGMAS
    rms = error.square().mean().sqrt()
    rms = torch.where(rms == 0, rms, rms / typical).nan_to_num(nan=math.inf)
    got, ref, most_lse = lse.double()[:, :, pick], want.lse[:, :, pick], want.most_lse[:, :, pick]
    finite = torch.isfinite(ref)
    off = torch.where(finite, (got - ref).abs() / most_lse, torch.zeros_like(ref))
    places = ((got != ref) & ~finite).any().double() * math.inf
    return torch.stack(
        [share.max(), rms, off.nan_to_num(nan=math.inf).max(), places.nan_to_num(nan=0.0)]
    )


def check(
    torch: Any,
    out: Any,
    lse: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: str = "none",
    window: tuple[int, int] = (0, 0),
    scale: float | None = None,
    softcap: float = 0.0,
    dtype: str,
    rows: Any = None,
) -> None:
    """Assert that out and LSE are right; the message has the shares of what is allowed."""
    assert out.dtype == q.dtype and out.shape == q.shape and lse.dtype == torch.float32
    visible = seen(torch, mask, window, q.shape[2], k.shape[2], q.device)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    want = allowed(torch, q, k, v, visible, factor, softcap, dtype)
    found = failures(torch, out, lse, want, rows).tolist()
    names = ("largest error", "rms error", "error of the LSE", "places of -inf")
    shares = dict(zip(names, (round(x, 3) for x in found), strict=True))
    assert max(found) <= 1, f"shares of what is allowed: {shares}"


# ---- gradients --------------------------------------------------------------------------------


def backward_inputs(
    torch: Any,
    draw: Draw,
    d: int,
    dtype: Any,
    device: Any,
    *,
    mask: str = "none",
    scale: float | None = None,
    softcap: float = 0.0,
    dlse: bool = True,
) -> tuple[Any, ...]:
    """dout, q, k, v, out, LSE and dlse (or None); out and LSE are float64's, rounded."""
    q, k, v = inputs(torch, draw, d, dtype, device)
    visible = seen(torch, mask, draw.window, draw.N_q, draw.N_k, device)
    factor = 1 / math.sqrt(d) if scale is None else scale
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    forward = allowed(torch, q, k, v, visible, factor, softcap, name)
    generator = torch.Generator(device=device)
    generator.manual_seed(draw.seed + 1)
    dout, dL = (
        torch.randn(shape, generator=generator, device=device) + 0.3
        for shape in (q.shape, q.shape[:3])
    )
    return dout.to(dtype), q, k, v, forward.O.to(dtype), forward.lse.float(), dL if dlse else None


@dataclass(frozen=True)
class Gradient:
    """One of dQ, dK and dV in float64, and what roundings may do to it."""

    exact: Any
    most: Any  # of each element's error
    square: Any  # of the size of each element's error


def allowed_backward(
    torch: Any,
    given: tuple[Any, ...],
    visible: Any,
    scale: float,
    softcap: float,
    dtype: str,
) -> tuple[Gradient, Gradient, Gradient]:
    """dQ, dK and dV of dout, q, k, v, out, lse and dlse (None: 0), and what may be off.

    A kernel takes out and LSE as they are, so this does. It rounds P where dV, and dS where dQ and
    dK are made of it, and each gradient at the end, by a relative u: as in `allowed`, that moves
    ``dV_j = sum_i P_ij dO_i`` by ``u (sum_i P_ij |dO_i| + |dV_j|)`` at most, and typically by
    ``u sqrt(sum_i P_ij^2 dO_i^2 + dV_j^2)``; the others alike, with dS.

    In fp32, P errs relatively by what `allowed` says of a score, and by FP32 |L|; dP by
    ``(FP32 + d / 16 STEP) |dO| . |V|``, D by ``FP32 (|dO| . |O| + |dL|)``, the derivative of
    softcap by FP32. What a sum of n products loses is at most ``n / 16 STEP`` of its terms; dQ is
    summed over tiles in memory besides.
    """
    dout, q, k, v, out, lse, dlse = given
    u, tiny = UNIT_ROUNDOFF[dtype], TINY[dtype]
    H_k, d = k.shape[1], q.shape[3]
    group = q.shape[1] // H_k
    Q, dO, O, L = q.double(), dout.double(), out.double(), lse.double()[..., None]
    K, V = (x.double().repeat_interleave(group, 1) for x in (k, v))
    dL = torch.zeros_like(L) if dlse is None else dlse.double()[..., None]
    product = FP32 + -(-d // 16) * STEP

    S = scale * (Q @ K.mT)
    relative = 8 * FP32 + product * abs(scale) * (Q.abs() @ K.abs().mT)
    derivative = torch.ones_like(S)
    if softcap:
        t = torch.tanh(S / softcap)
        S, derivative = softcap * t, 1 - t * t
    seen_at_all = visible & (L != -math.inf)
    P = torch.where(seen_at_all, (S - L).exp(), 0.0)
    relative = torch.where(seen_at_all, relative + FP32 * L.abs(), 0.0)
    G = dO @ V.mT - (dO * O).sum(-1, keepdim=True) + dL
    off_G = product * (dO.abs() @ V.abs().mT) + FP32 * (
        (dO * O).abs().sum(-1, keepdim=True) + dL.abs()
    )
    dS = P * G * derivative
    off_dS = P * (relative * G.abs() + off_G + FP32 * G.abs())

    def gradient(W: Any, off: Any, X: Any, factor: float, n: int) -> tuple[Any, Any, Any, Any]:
        """W X in float64, the sum of its terms' sizes and of their squares, and what fp32 does."""
        terms = W.abs() @ X.abs()
        small = tiny * ((W != 0).double() @ X.abs()) + off @ X.abs()
        fp32 = small + (-(-n // 16) * STEP + -(-n // 64) * FP32) * terms
        return factor * W @ X, factor * terms, factor**2 * (W**2 @ X**2), factor * fp32

    def settled(parts: tuple[Any, ...]) -> Gradient:
        exact, terms, squares, fp32 = parts
        return Gradient(
            exact,
            1.01 * u * (terms + exact.abs()) + fp32 + tiny,
            u**2 * (squares + exact**2) + (fp32 + tiny) ** 2,
        )

    def of_keys(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """The sum over the query heads that read a key head."""
        return tuple(x.unflatten(1, (H_k, group)).sum(2) for x in parts)

    rows, keys = q.shape[2] * group, k.shape[2]
    factor = abs(scale)
    sign = 1.0 if scale > 0 else -1.0
    return (
        settled(gradient(sign * dS, off_dS, K, factor, keys)),
        settled(of_keys(gradient(sign * dS.mT, off_dS.mT, Q, factor, rows))),
        settled(of_keys(gradient(P.mT, (P * relative).mT, dO, 1.0, rows))),
    )


def check_gradients(
    torch: Any,
    got: tuple[Any, Any, Any],
    given: tuple[Any, ...],
    *,
    mask: str = "none",
    window: tuple[int, int] = (0, 0),
    scale: float | None = None,
    softcap: float = 0.0,
    dtype: str,
) -> None:
    """Assert that dQ, dK and dV of dout, q, k, v, out, lse and dlse are right.

    The message has the shares of what is allowed: of the largest error, and of the rms error.
    """
    q, k = given[1:3]
    visible = seen(torch, mask, window, q.shape[2], k.shape[2], q.device)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    shares = {}
    want = allowed_backward(torch, given, visible, factor, softcap, dtype)
    for name, x, like, expected in zip(("dQ", "dK", "dV"), got, given[1:4], want, strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape, name
        error = (x.double() - expected.exact).abs()
        share = torch.where(error == 0, error, error / expected.most)
        rms = error.square().mean().sqrt() / (expected.square.mean().sqrt() * SIGMAS)
        found = torch.stack([share.max(), rms]).nan_to_num(nan=math.inf)
        shares[name] = [round(n, 3) for n in found.tolist()]
    assert max(map(max, shares.values())) <= 1, f"shares of what is allowed: {shares}"
