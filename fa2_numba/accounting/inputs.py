"""Arrays from files: .npy, .npz and .safetensors, cut to what the simulator can run."""

import json
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SUFFIXES = (".npy", ".npz", ".safetensors")
DTYPES = {
    np.dtype(np.float16): "fp16",
    np.dtype(np.float32): "fp32",
    np.dtype(np.float64): "fp64",
    np.dtype(ml_dtypes.bfloat16): "bf16",
}
# Of the types that the format has, those that attention can use.
SAFETENSORS_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "BOOL": np.bool_,
}


class InputError(ValueError):
    """A file or option that cannot be used; the message is one line that names it."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """One attention problem from a file.

    Attributes
    ----------
    name : str
        The file, and the prefix of the arrays where it holds several problems.
    q, k, v : (N, d), (H, N, d) or (B, H, N, d)
    mask : bool, broadcastable to (B, H, N_q, N_k), or None
    out : the output the file gives, or None
    part : str
        What was cut out, empty for everything.
    """

    name: str
    q: Array
    k: Array
    v: Array
    mask: Array | None = None
    out: Array | None = None
    part: str = ""

    def four_dimensions(self) -> "Inputs":
        """The same problem with q, k, v, mask and out of four axes."""

        def expand(x: Array | None) -> Any:
            return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)

        q, k, v, mask, out = map(expand, (self.q, self.k, self.v, self.mask, self.out))
        return replace(self, q=q, k=k, v=v, mask=mask, out=out)

    def cut(self, batches: int, heads: int, tokens: int, first: int = 0, head: int = 0) -> "Inputs":
        """A part: the first `batches`, query heads from `head` on, rows and keys from `first` on.

        Query heads keep the key head they read. `out` goes where keys are cut: it was made from
        all of them.
        """
        x = self.four_dimensions()
        (B, H, N_q, _), (H_k, N_k) = x.q.shape, x.k.shape[1:3]
        group = H // H_k
        first_kv, groups = head // group, heads // group
        if groups == 0:  # some of the query heads that read one key head
            kv = slice(first_kv, first_kv + 1)
            some = slice(head, min(head + heads, (first_kv + 1) * group))
        else:
            kv = slice(first_kv, min(first_kv + groups, H_k))
            some = slice(kv.start * group, kv.stop * group)
        batch = slice(0, batches)
        rows = keys = slice(first, first + tokens)
        if B <= batches and H <= heads and max(N_q, N_k) <= tokens:
            return x
        part = [
            f"batch {_span(batch, B)}" if B > batches else "",
            f"head {_span(some, H)}" if H > heads else "",
            f"{'token' if N_q == N_k else 'query'} {_span(rows, N_q)}" if N_q > tokens else "",
            f"key {_span(keys, N_k)}" if N_k > tokens and N_q != N_k else "",
        ]
        return replace(
            x,
            q=np.ascontiguousarray(x.q[batch, some, rows]),
            k=np.ascontiguousarray(x.k[batch, kv, keys]),
            v=np.ascontiguousarray(x.v[batch, kv, keys]),
            mask=None if x.mask is None else _cut_mask(x.mask, (batch, some, rows, keys)),
            out=x.out[batch, some, rows] if x.out is not None and N_k <= tokens else None,
            part=", ".join(p for p in part if p),
        )


def _cut_mask(mask: Array, parts: tuple[slice, ...]) -> Array:
    """Cut the axes of a mask that do not broadcast."""
    kept = (p if size > 1 else slice(None) for p, size in zip(parts, mask.shape, strict=True))
    return np.ascontiguousarray(mask[tuple(kept)])


def _span(part: slice, size: int) -> str:
    last = min(part.stop, size) - 1
    numbers = str(part.start) if part.start == last else f"{part.start}-{last}"
    return f"{numbers} of {size}"


# Reading ------------------------------------------------------------------------------------------


def shipped() -> list[Inputs]:
    """Layers 0 and 5 of all-MiniLM-L6-v2 on two passages, one padded (`data/minilm_qkv.md`)."""
    with resources.as_file(resources.files("fa2_numba") / "data" / "minilm_qkv.npz") as path:
        return read([path])


def read(paths: Sequence[str | Path]) -> list[Inputs]:
    """The attention problems in one file, or in three .npy files q, k, v.

    Parameters
    ----------
    paths : one or three file names
        .npz and .safetensors: arrays ``q``, ``k``, ``v`` and optionally ``mask`` (bool, True =
        visible) and ``out``; with a prefix (``layer0_q`` ...) for several problems, of which each
        takes its own mask or else the file's. One .npy: q, k, v stacked along the first axis.

    Raises
    ------
    InputError
        A file is missing, broken, of another kind, or its arrays do not fit together.
    """
    files = [Path(p) for p in paths]
    if len(files) not in (1, 3):
        raise InputError(f"FILE: got {len(files)} files, accepted are one, or three .npy (q k v)")
    if len(files) == 3:
        q, k, v = (_single(f) for f in files)
        found = {"q": q, "k": k, "v": v}
    else:
        found = _arrays(files[0])
    name = files[0].name if len(files) == 1 else " ".join(f.name for f in files)
    return [_problem(name, prefix, found) for prefix in _prefixes(name, found)]


def _single(file: Path) -> Array:
    if file.suffix != ".npy":
        raise InputError(f"FILE: got {file.name} as one of three, accepted are .npy files q k v")
    return _load_numpy(file)


def _arrays(file: Path) -> dict[str, Array]:
    if file.suffix not in SUFFIXES:
        raise InputError(f"FILE: got {file.name}, accepted are {', '.join(SUFFIXES)}")
    if file.suffix == ".safetensors":
        return _load_safetensors(file)
    loaded = _load_numpy(file)
    if isinstance(loaded, dict):
        return loaded
    if loaded.ndim < 3 or loaded.shape[0] != 3:
        raise InputError(
            f"FILE: {file.name} has shape {loaded.shape}, accepted in one .npy is (3, ..., N, d): "
            "q, k and v stacked"
        )
    return dict(zip("qkv", loaded, strict=True))


def _load_numpy(file: Path) -> Any:
    """An array, or name to array for .npz."""
    try:
        with file.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return _bits_to_bf16(loaded)
            return {name: _bits_to_bf16(loaded[name]) for name in loaded.files}
    except FileNotFoundError:
        raise InputError(f"FILE: {file} does not exist") from None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"FILE: {file.name} cannot be read: {_line(error)}") from error


def _bits_to_bf16(array: Array) -> Array:
    """NumPy writes ml_dtypes.bfloat16 as two nameless bytes."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _load_safetensors(file: Path) -> dict[str, Array]:
    """A header length (8 bytes, little endian), a JSON header, then raw little-endian arrays."""
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise InputError(f"FILE: {file} does not exist") from None
    except OSError as error:
        raise InputError(f"FILE: {file.name} cannot be read: {_line(error)}") from error
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > len(raw) - 8:
        raise InputError(f"FILE: {file.name} ends before its header does")
    try:
        header = json.loads(raw[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {
            name: _tensor(name, entry, raw[8 + length :])
            for name, entry in entries.items()
            if entry["dtype"] in SAFETENSORS_DTYPES
        }
    except InputError as error:
        raise InputError(f"FILE: {file.name}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"FILE: {file.name} has a broken header: {_line(error)}") from error


def _tensor(name: str, entry: dict[str, Any], data: bytes) -> Array:
    dtype, shape = np.dtype(SAFETENSORS_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise InputError(f"{name} lies at bytes {begin} to {end}, the file has {len(data)}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise InputError(f"{name} has {end - begin} bytes, which is not shape {shape}, {dtype}")
    return np.frombuffer(data[begin:end], dtype).reshape(shape)


def short(name: str) -> str:
    """An input's name without the part that was cut out of it."""
    return name.removesuffix(")").rpartition(" (")[0] if name.endswith(")") else name


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Fitting together ---------------------------------------------------------------------------------


def _prefixes(name: str, found: dict[str, Array]) -> list[str]:
    prefixes = [
        n[:-1] for n in found if n.endswith("q") and {n[:-1] + c for c in "kv"} <= set(found)
    ]
    if not prefixes:
        raise InputError(
            f"FILE: {name} has {', '.join(sorted(found)) or 'no arrays'}, accepted are q, k, v, "
            "alone or with a common prefix"
        )
    return prefixes


def _problem(name: str, prefix: str, found: dict[str, Array]) -> Inputs:
    q, k, v = (found[prefix + c] for c in "qkv")
    label = f"{name}, {prefix.rstrip('_-. ')}" if prefix else name
    for letter, array in zip("qkv", (q, k, v), strict=True):
        if array.dtype not in DTYPES:
            raise InputError(
                f"{prefix}{letter}: got {array.dtype}, accepted are fp16, bf16, fp32, fp64"
            )
    shapes = f"{prefix}q, k, v: got {q.shape}, {k.shape}, {v.shape}"
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        got = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise InputError(f"{prefix}q, k, v: got {got}, accepted is one dtype for all")
    if not (2 <= q.ndim <= 4 and q.ndim == k.ndim and k.shape == v.shape):
        raise InputError(f"{shapes}, accepted are (N, d), (H, N, d) or (B, H, N, d), k and v alike")
    x = Inputs(label, q, k, v).four_dimensions()
    (B, H, N_q, d), (B_k, H_k, N_k, d_k) = x.q.shape, x.k.shape
    if B != B_k or d != d_k or H_k == 0 or H % H_k:
        raise InputError(f"{shapes}, accepted are equal B and d, and H a multiple of H_k")
    mask = _mask(found.get(prefix + "mask", found.get("mask")), (B, H, N_q, N_k))
    out = found.get(prefix + "out", None if len(prefix) else found.get("out"))
    if out is not None and out.shape != q.shape:
        raise InputError(f"{prefix}out: got {out.shape}, accepted is q's {q.shape}")
    return Inputs(label, q, k, v, mask, out)


def _mask(mask: Array | None, shape: tuple[int, int, int, int]) -> Array | None:
    """The mask with four axes; (B, N_k) is a padding mask over the keys."""
    if mask is None:
        return None
    if mask.dtype != np.bool_:
        raise InputError(f"mask: got {mask.dtype}, accepted is bool, True = visible")
    B, _, N_q, N_k = shape
    if mask.shape == (B, N_k) and (B, N_k) != (N_q, N_k):
        return mask[:, None, None, :]
    try:
        np.broadcast_to(mask, shape)
    except ValueError:
        raise InputError(
            f"mask: got {mask.shape}, accepted is (B, N_k) or what broadcasts to {shape}"
        ) from None
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
