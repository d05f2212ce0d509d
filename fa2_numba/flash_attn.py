"""flash-attn's functions: its argument names, its layout (B, N, H, D).

The arrays are viewed with heads before rows and go to `adapters.torch.attention` (torch tensors,
with gradients) or to `api.attention` (CuPy arrays; NumPy arrays under the simulator). Nothing is
copied. Everything after the arrays is keyword-only. As in flash-attn 2.1 and later, causal masks
and windows are bottom-right aligned and windows include both ends. The LSE of a row without a
visible key is -inf here, +inf in flash-attn 2. There are no varlen and no KV-cache functions.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py, 2.8.
"""

from typing import Any

import numpy as np

from fa2_numba import api


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """softmax(softmax_scale Q K^T) V, exactly.

    Parameters
    ----------
    q : array, (B, N_q, H, D)
        torch tensor, CuPy array, or under the simulator a NumPy array or a CPU tensor; fp32, fp64,
        fp16 or bf16; any strides.
    k, v : array, (B, N_k, H_k, D)
        H is a multiple of H_k; query head h reads head h // (H // H_k).
    dropout_p : float
        0.
    softmax_scale : float, optional
        Default ``1 / sqrt(D)``.
    causal : bool
        Key j is visible to row i iff ``j <= i + N_k - N_q``.
    window_size : (left, right)
        Row i sees keys ``i + N_k - N_q - left .. i + N_k - N_q + right``; -1 is unbounded.
    softcap : float
        Scores become ``softcap * tanh(s / softcap)``; 0 is off.
    alibi_slopes : array (H,) or (B, H), optional
        ``-slope * |i + N_k - N_q - j|`` is added to the scores; without gradient.
    deterministic : bool
        Give the same gradients, bit for bit, each time; the forward pass always does so.
    return_attn_probs : bool
        Also return the LSE, and None where flash-attn has the probabilities after dropout.

    Returns
    -------
    out : array, q's shape, dtype and kind
        For contiguous q contiguous, too.
    softmax_lse : array, (B, H, N_q), fp32 (fp64 for fp64 inputs)
        Natural log of the sum of exp(score) over the visible keys.
    S_dmask : None
        These two only with `return_attn_probs`.

    Raises
    ------
    NotImplementedError
        `dropout_p` other than 0; `alibi_slopes` that require grad.
    TypeError, ValueError
        Before any launch; the message names the argument, what was given and what is accepted.
    """
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p: got {dropout_p}, accepted: 0")
    q, k, v = (_heads_first(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    options: dict[str, Any] = {
        "causal": causal,
        "window": None if tuple(window_size) == (-1, -1) else tuple(window_size),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "scale": softmax_scale,
    }
    if type(q).__module__.split(".")[0] == "torch":
        from fa2_numba.adapters import torch

        options["deterministic"] = deterministic
        out, lse = torch.attention(q, k, v, **options, return_lse=True)
    else:
        # empty_like keeps the order of the axes in memory, in CuPy's form for CuPy's arrays.
        out = np.empty_like(q)
        out, lse = api.attention(q, k, v, **options, return_lse=True, out=out)
    out = out.swapaxes(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Any, **options: Any) -> Any:
    """`flash_attn_func` of ``qkv[:, :, 0]``, ``qkv[:, :, 1]`` and ``qkv[:, :, 2]``.

    Parameters
    ----------
    qkv : array, (B, N, 3, H, D)
        Packed along the third axis; read in place.
    **options
        Keyword arguments of `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`; out is (B, N, H, D).

    Raises
    ------
    As `flash_attn_func`.
    """
    return flash_attn_func(*_unpacked("qkv", qkv, 3), **options)


def flash_attn_kvpacked_func(q: Any, kv: Any, **options: Any) -> Any:
    """`flash_attn_func` of q, ``kv[:, :, 0]`` and ``kv[:, :, 1]``.

    Parameters
    ----------
    q : array, (B, N_q, H, D)
        Queries.
    kv : array, (B, N_k, 2, H_k, D)
        Packed along the third axis; read in place.
    **options
        Keyword arguments of `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`.

    Raises
    ------
    As `flash_attn_func`.
    """
    return flash_attn_func(q, *_unpacked("kv", kv, 2), **options)


def _heads_first(name: str, x: Any) -> Any:
    """A view (B, H, N, D) of an array (B, N, H, D)."""
    _check(name, x)
    if len(x.shape) != 4:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, accepted: (B, N, H, D)")
    return x.swapaxes(1, 2)


def _unpacked(name: str, x: Any, count: int) -> list[Any]:
    """Views of the arrays that are packed along the third axis."""
    _check(name, x)
    if len(x.shape) != 5 or x.shape[2] != count:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, accepted: (B, N, {count}, H, D)")
    return [x[:, :, i] for i in range(count)]


def _check(name: str, x: Any) -> None:
    if not hasattr(x, "swapaxes"):
        raise TypeError(
            f"{name}: got {type(x).__qualname__}, accepted: a torch tensor or a CuPy array "
            "(a NumPy array under NUMBA_ENABLE_CUDASIM=1)"
        )
