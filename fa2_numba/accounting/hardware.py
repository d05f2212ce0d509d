"""The GPU's own counters, read with NVIDIA's Nsight Compute (``ncu``).

`profile` lets ncu run ``python -m fa2_numba.accounting.launches``, a process that launches the
plain kernels of each `Case` once, and says what the counters read for each launch. How ncu is run
and what it prints is known here alone. What cannot be read raises `HardwareError`; nothing becomes
a silent zero.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa2_numba import doctor, masking
from fa2_numba.problem import METHODS_BACKWARD
from fa2_numba.tiling import Tiling

# The kernels to be profiled, by the beginning of their names; CuPy's own are not among them.
OUR_KERNELS = "^(fa[0-9]|standard_|backward_|tile_map|split_keys|steps)"
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
BLOCK = 96  # side of the blocks of the "boolean" mask: a tile of 64 lies in one or across two
Reading = dict[str, Any]


class HardwareError(RuntimeError):
    """The counters cannot be read; the message is one line that says why and what to do."""


class NotPermitted(HardwareError):
    """This user may not read the counters."""


# What is read -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counter:
    """Something that the hardware counts.

    Attributes
    ----------
    quantity, op : str
        "bytes", "instructions", "requests" or "sectors", with "shared " in front for shared
        memory, which also has "shared wavefronts" and "shared conflicts"; "box copies", "box
        bytes" and "box sectors"; "bulk adds" and "bulk bytes"; "load", "store", "reduction" (an
        atomic add that does not bring the old value back), or an access of another kind, which few
        plain kernels make.
    metric : str
        ncu's name of it.
    patched : str
        A metric with the same meaning that ncu collects by patching the kernel's instructions, for
        users who may not read hardware counters; empty if there is none.
    optional : bool
        Whether there are GPUs without such an access, and so without the metric.
    exact : bool
        Whether addresses alone decide it. If not, it is shown beside the count, not compared.
    """

    quantity: str
    op: str
    metric: str
    patched: str = ""
    optional: bool = False
    exact: bool = True


def _patched(
    quantity: str, op: str, metric: str, optional: bool = False, exact: bool = True
) -> Counter:
    return Counter(quantity, op, metric, metric, optional, exact)


# A warp asks for something where a lane executes the instruction, as in `hbm`: that is what L1 gets
# as a request. Of the instructions, even "predicated on in any lane" also counts a warp in which
# only lanes that took another branch have the predicate on, and of reductions there is only the
# number with all lanes off, too; so they are shown and not compared.
COUNTERS = (
    _patched("bytes", "load", "smsp__sass_data_bytes_mem_global_op_ld.sum"),
    _patched("bytes", "store", "smsp__sass_data_bytes_mem_global_op_st.sum"),
    Counter(
        "instructions", "load", "smsp__inst_executed_op_global_ld_pred_on_any.sum", exact=False
    ),
    Counter(
        "instructions", "store", "smsp__inst_executed_op_global_st_pred_on_any.sum", exact=False
    ),
    Counter("requests", "load", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"),
    Counter("requests", "store", "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"),
    Counter(
        "sectors",
        "load",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld.sum",
    ),
    Counter(
        "sectors",
        "store",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
        "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st.sum",
    ),
    _patched("bytes", "reduction", "smsp__sass_data_bytes_mem_global_op_red.sum"),
    _patched(
        "instructions", "reduction", "smsp__sass_inst_executed_op_global_red.sum", exact=False
    ),
    Counter("requests", "reduction", "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum"),
    Counter(
        "sectors",
        "reduction",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
        "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_red.sum",
    ),
    _patched("instructions", "atomic", "smsp__sass_inst_executed_op_global_atom.sum"),
    _patched("instructions", "local load", "smsp__sass_inst_executed_op_local_ld.sum"),
    _patched("instructions", "local store", "smsp__sass_inst_executed_op_local_st.sum"),
    _patched("instructions", "cp.async", "smsp__sass_inst_executed_op_ldgsts.sum", True),
    _patched("instructions", "TMA", "smsp__sass_inst_executed_op_tma.sum", True),
    # Copies of boxes, which the hardware makes: they do not pass through the unit (lsu) whose
    # requests and sectors are above, and no lane asks for their bytes. Their bytes are 32 for each
    # sector, of loads also for zeros from outside of the array (`hbm.CountedBoxes`).
    Counter("box copies", "load", "smsp__inst_executed_op_tma_ld.sum", optional=True),
    Counter(
        "box bytes",
        "load",
        "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
        optional=True,
    ),
    # Of a box that is stored, what is outside of the array is not written.
    _patched("box copies", "store", "smsp__sass_inst_executed_op_tma_st.sum", True),
    Counter(
        "box bytes",
        "store",
        "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st.sum",
        optional=True,
    ),
    Counter(
        "box sectors",
        "store",
        "l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st.sum",
        optional=True,
    ),
    # Adds of a piece of shared memory, by the same unit.
    _patched("bulk adds", "reduction", "smsp__sass_inst_executed_op_tma_red.sum", True),
    Counter(
        "bulk bytes",
        "reduction",
        "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_red.sum",
        optional=True,
    ),
)


# Bytes are those of the distinct words of an instruction. Wavefronts by patched instructions follow
# from the addresses; the pipe's own counter of conflicts also has those with other traffic.
ON_CHIP = (
    _patched("shared bytes", "load", "smsp__sass_data_bytes_mem_shared_op_ld.sum"),
    _patched("shared bytes", "store", "smsp__sass_data_bytes_mem_shared_op_st.sum"),
    Counter("shared instructions", "load", "smsp__inst_executed_op_shared_ld_pred_on_any.sum"),
    Counter("shared instructions", "store", "smsp__inst_executed_op_shared_st_pred_on_any.sum"),
    _patched(
        "shared wavefronts",
        "load",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    ),
    _patched(
        "shared wavefronts",
        "store",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    ),
    Counter(
        "shared conflicts",
        "load",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        exact=False,
    ),
    Counter(
        "shared conflicts",
        "store",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
        exact=False,
    ),
)


# What is run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One attention call, forward or backward, written in what JSON can hold.

    Attributes
    ----------
    method, dtype : str
        As `Traffic` names them: one of `problem.METHODS`, or of `METHODS_BACKWARD` for a call of
        `attention_backward`.
    batch, heads, heads_kv, n_q, n_k, d : int
        The sizes: q is (batch, heads, n_q, d), k and v are (batch, heads_kv, n_k, d).
    causal, window
        As `attention` takes them.
    mask : str
        One of `MASKS`, all reproducible; empty for none.
    tiling : (B_r, B_c, n_r, n_c), optional
        Default: the one that `attention` chooses.

    Raises
    ------
    ValueError
        A mask that is not among `MASKS`.
    """

    method: str
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    n_q: int
    n_k: int
    d: int
    causal: bool | str = False
    window: tuple[int, int] | None = None
    mask: str = ""
    tiling: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            accepted = ", ".join(name or '""' for name in MASKS)
            raise ValueError(f"mask: got {self.mask!r}, accepted: {accepted}")

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Case":
        """The case that ``dataclasses.asdict`` and JSON made `fields` of."""
        named: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**named)

    @property
    def backward(self) -> bool:
        """Whether it is a call of `attention_backward`."""
        return self.method in METHODS_BACKWARD

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `attention`, or `attention_backward`."""
        method, _, deterministic = self.method.partition("_backward")
        return {
            "method": method,
            "causal": self.causal,
            "window": self.window,
            "tiling": None if self.tiling is None else Tiling(*self.tiling),
            **({"deterministic": bool(deterministic)} if self.backward else {}),
            **MASKS[self.mask](self),
        }

    def arrays(self) -> tuple[Any, ...]:
        """q, k and v, or dout, q, k, v, out and lse: random normal numbers, the same each time.

        out and lse are not those of q, k and v: what moves does not depend on them, and so no
        forward kernel is compiled. CuPy arrays, made on the device; under the simulator NumPy
        arrays.

        Raises
        ------
        HardwareError
            CuPy is not installed.
        """
        from fa2_numba import simulator

        kv = (self.batch, self.heads_kv, self.n_k, self.d)
        rows = (self.batch, self.heads, self.n_q)
        of_q = (*rows, self.d)
        make = _on_host if simulator.ACTIVE else _on_device
        if not self.backward:
            return tuple(make((of_q, kv, kv), self.dtype))
        dout, q, k, v, out = make((of_q, of_q, kv, kv, of_q), self.dtype)
        (lse,) = make((rows,), "fp64" if self.dtype == "fp64" else "fp32")
        return dout, q, k, v, out, lse


def _on_host(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[Any]:
    from fa2_numba.accounting.inputs import DTYPES
    from fa2_numba.accounting.sweep import to_device

    of_name = {name: dtype for dtype, name in DTYPES.items()}
    rng = np.random.default_rng(0)
    return [to_device(rng.standard_normal(s, np.float32).astype(of_name[dtype])) for s in shapes]


def _on_device(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[Any]:
    try:
        import cupy as cp
    except ImportError:
        raise HardwareError("CuPy is not installed (extras cuda13, cuda12)") from None
    import ml_dtypes

    rng = cp.random.default_rng(0)
    out = []
    for shape in shapes:
        x = rng.standard_normal(shape, dtype=cp.float32)
        if dtype == "bf16":  # CuPy keeps bf16 but has no kernel that casts to it: cut the bits off
            x = (x.view(cp.uint32) >> 16).astype(cp.uint16).view(ml_dtypes.bfloat16)
        else:
            x = x.astype({"fp32": cp.float32, "fp64": cp.float64, "fp16": cp.float16}[dtype])
        out.append(x)
    return out


def _blocks(case: Case) -> NDArray[np.bool_]:
    """A mask of blocks that are empty, full or random."""
    rng = np.random.default_rng(0)
    side = min(BLOCK, -(-max(case.n_q, case.n_k, 1) // 3))
    kinds = rng.choice([0.0, 0.5, 1.0], (-(-case.n_q // side), -(-case.n_k // side)))
    share = kinds.repeat(side, 0).repeat(side, 1)[: case.n_q, : case.n_k]
    return rng.random(share.shape) < share


def _eighths(n: int) -> NDArray[np.int64]:
    """Eight documents in n keys, each shorter than the one before."""
    return 8 * np.arange(n) ** 2 // max(n * n, 1)


MASKS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "": lambda case: {},
    "boolean": lambda case: {"mask": _blocks(case)},
    "documents": lambda case: {"mask": masking.documents(_eighths(case.n_k))},
    "prefix": lambda case: {"mask": masking.prefix_lm(case.n_k // 3)},
    "softcap": lambda case: {"softcap": 5.0},
    "alibi": lambda case: {"alibi_slopes": 2.0 ** -np.arange(1, case.heads + 1, dtype=np.float32)},
}


# ncu ----------------------------------------------------------------------------------------------


def require_gpu() -> None:
    """Raise `HardwareError` where kernels cannot run on a GPU."""
    if not doctor.gpu_usable():
        raise HardwareError(
            "no GPU can be used by this process, and only a GPU has counters; "
            "fa2-numba doctor says why"
        )


def find_ncu(given: str | None = None) -> str:
    """The path of ncu: the one `given`, else from ``$PATH``, else where CUDA installs it.

    Raises
    ------
    HardwareError
        There is none.
    """
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise HardwareError(f"ncu: got {given!r}, accepted: the path of an executable")
        return found
    installed = [str(path) for place in PLACES for path in Path("/").glob(place.lstrip("/"))]
    installed.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path)])
    for name in ("ncu", *reversed(installed)):  # the newest first
        found = shutil.which(name)
        if found is not None:
            return found
    raise HardwareError(
        f"ncu: not in PATH, {' or '.join(PLACES)}; install NVIDIA Nsight Compute, alone or with "
        "the CUDA toolkit, or name it with --ncu"
    )


def version(ncu: str) -> str:
    """ncu's version, empty if it does not tell."""
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version (\S+)", said)
    return found[1] if found else ""


def profile(
    cases: Sequence[Case],
    metrics: Sequence[str],
    *,
    ncu: str | None = None,
    cache_control: str = "all",
    kernels: str = OUR_KERNELS,
    optional: Collection[str] = (),
) -> list[Reading]:
    """What the counters read while a process of its own runs the plain kernels of each case once.

    Parameters
    ----------
    cases : sequence of Case
        In the order in which they run.
    metrics : sequence of str
        ncu's names, with their roll-up: ``smsp__inst_executed.sum``.
    ncu : str, optional
        Its path; default: `find_ncu`.
    cache_control : str
        "all": ncu empties the caches before each pass over a kernel. "none": it leaves them.
    kernels : str
        Regular expression for the names of the kernels to profile.
    optional : collection of str
        Metrics that are left out of the rows where this GPU has them not, instead of refused.

    Returns
    -------
    list of dict
        One for each launch, in their order: "case" (index into `cases`), "kernel" (its name), and
        each metric, int or float.

    Raises
    ------
    HardwareError
        No ncu, no permission (`NotPermitted`), a failure in the process, a metric that this GPU
        does not have, or launches other than the process made.
    """
    if not cases:
        return []
    tool = find_ncu(ncu)
    with tempfile.TemporaryDirectory() as folder:
        jobs, log = Path(folder, "cases.json"), Path(folder, "log.json")
        jobs.write_text(json.dumps([asdict(case) for case in cases]))
        command = [tool, "--clock-control", "none", "--cache-control", cache_control]
        command += ["--csv", "--page", "raw", "--print-units", "base"]
        command += ["--kernel-name", f"regex:{kernels}", "--metrics", ",".join(metrics)]
        command += [sys.executable, "-m", "fa2_numba.accounting.launches", str(jobs), str(log)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "LC_ALL": "C"},  # numbers are written as the locale wants
        )
        launched = json.loads(log.read_text()) if log.exists() else None
    complaints = _complaints(done)
    if launched is None:
        reason = next(iter(complaints), "it says nothing")
        raise HardwareError(f"the process that ncu profiles did not finish: {reason}")
    try:
        rows = attribute(parse(done.stdout), launched)
    except HardwareError as error:
        # What ncu had to say is the likelier reason.
        raise HardwareError("; ".join([*complaints[:1], str(error)])) from None
    return [_with_metrics(row, metrics, optional) for row in rows]


def _complaints(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """What went wrong, the likeliest reason first; empty if nothing did."""
    text = f"{done.stdout}\n{done.stderr}"
    if "ERR_NVGPUCTRPERM" in text:
        raise NotPermitted(
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, in a "
            "container with --cap-add=SYS_ADMIN, or load the driver's module with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    _, _, of_program = done.stderr.partition("Traceback (most recent call last)")
    found = [line for line in of_program.splitlines() if line and not line.startswith("==")][-1:]
    said = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    said.sort(key=lambda line: "returned an error code" in line)  # that tells the least
    found += [line.removeprefix("==ERROR==").strip() for line in said]
    if done.returncode:
        found.append(f"exit code {done.returncode}")
    return found


def parse(output: str) -> list[Reading]:
    """The rows of ``ncu --csv --page raw``: "kernel", then each metric by its name.

    A metric is an int, a float, or None where ncu writes that it is not available. Lines that are
    no row (of ncu's progress, of the program itself, the units below the header) are passed over.

    Raises
    ------
    HardwareError
        A row that does not fit its header.
    """
    rows: list[Reading] = []
    header: list[str] = []
    for line in output.splitlines():
        # Line by line: a quotation mark in the program's own output must not swallow what follows.
        cells = next(csv.reader([line]), [])
        if {"ID", "Kernel Name"} <= set(cells):
            header = cells
        elif header and cells and cells[0].isdigit():
            if len(cells) != len(header):
                raise HardwareError(
                    f"ncu: a row of {len(cells)} cells under a header of {len(header)}: {line[:80]}"
                )
            named = dict(zip(header, cells, strict=True))
            metrics = {name: _number(cell) for name, cell in named.items() if "__" in name}
            rows.append({"kernel": _kernel(named["Kernel Name"]), **metrics})
    return rows


def _kernel(displayed: str) -> str:
    """The name of the Python function in ``fa2::fa2[v1,cw51c...](Array<float, ...>, ...)``."""
    return re.split(r"[\[(]", displayed, maxsplit=1)[0].split("::")[-1].strip()


def _number(cell: str) -> int | float | None:
    text = cell.replace(",", "").strip()
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        number = float(text)
    except ValueError:  # "n/a", "(!) n/a", nothing
        return None
    return number if np.isfinite(number) else None


def attribute(rows: Sequence[Reading], launched: Sequence[Sequence[str]]) -> list[Reading]:
    """Give each row the "case" that launched it.

    Parameters
    ----------
    rows : sequence of dict
        As `parse` returns them.
    launched : sequence of sequence of str
        For each case the names of its kernels, in the order of their launch.

    Raises
    ------
    HardwareError
        The rows are not, one by one, the launches.
    """
    made = [(case, name) for case, names in enumerate(launched) for name in names]
    for n, (row, (case, name)) in enumerate(zip(rows, made, strict=False)):
        if row["kernel"] != name:
            raise HardwareError(
                f"ncu: launch {n} is {row['kernel']}, where case {case} launched {name}"
            )
    if len(rows) != len(made):
        names = ", ".join(dict.fromkeys(name for _, name in made))
        raise HardwareError(
            f"ncu: profiled {len(rows)} launches of {len(made)}; does its filter match {names}?"
        )
    return [{"case": case, **row} for row, (case, _) in zip(rows, made, strict=True)]


def _with_metrics(row: Reading, metrics: Sequence[str], optional: Collection[str]) -> Reading:
    """The row with these metrics alone."""
    found = {name: row[name] for name in metrics if row.get(name) is not None}
    missing = [name for name in metrics if name not in found and name not in optional]
    if missing:
        raise HardwareError(f"ncu: {missing[0]} is not available on this GPU (n/a)")
    return {"case": row["case"], "kernel": row["kernel"], **found}
