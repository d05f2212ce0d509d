"""Traffic rows: the one table that everything in this package reads and writes.

A row says how much one array moved, in one phase, in one direction, at one memory level, and who
says so. Predicted, counted and hardware rows have the same columns, so they can be compared.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

COLUMNS = (
    "method, dtype, batch, heads, heads_kv, n_q, n_k, d, causal, mask, block_r, block_c, level, "
    "array, phase, op, elements, bytes, requests, sectors, cycles, source"
).split(", ")


@dataclass(frozen=True)
class Traffic:
    """One row of the table.

    Attributes
    ----------
    method, dtype : str
        One of `problem.METHODS` or `problem.METHODS_BACKWARD`; "fp32", "fp64", "fp16" or "bf16".
    batch, heads, heads_kv, n_q, n_k, d : int
        The problem.
    causal : bool
        Whether the mask includes the causal one.
    mask : str
        Mask and score changes, "none" if none.
    block_r, block_c : int
        B_r and B_c.
    level : str
        Where it was counted. "issued": global loads and stores as the warps issue them. "L2 to SM",
        "L2 lookups" and "DRAM": beyond L1, by the GPU's counters (`accounting.levels`).
    array, phase, op : str
        Which array, in which part of the algorithm, "load", "store" or "atomic" (added to). The
        GPU's counters know neither: array "all", and the kernel's name as phase.
    elements, bytes, requests, sectors : int
        Elements moved, their bytes, warp instructions, 32-byte sectors touched by each. Beyond L1
        whole sectors move: bytes are 32 times sectors, and elements and requests are None.
    cycles : int or None
        Time of the phase, where measured.
    source : str
        "predicted" (io_model), "counted" (the kernel) or "hardware" (the GPU's counters).
    """

    method: str
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    n_q: int
    n_k: int
    d: int
    causal: bool
    mask: str
    block_r: int
    block_c: int
    level: str
    array: str
    phase: str
    op: str
    elements: int | None
    bytes: int
    requests: int | None
    sectors: int
    cycles: int | None
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Column to value, in the table's order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the row apart from its source and its numbers."""
        return astuple(self)[: COLUMNS.index("elements")]

    @property
    def numbers(self) -> tuple[int | None, int, int | None, int]:
        """elements, bytes, requests, sectors."""
        return self.elements, self.bytes, self.requests, self.sectors


@dataclass(frozen=True)
class SharedTraffic:
    """What one tile moved between shared memory and registers in one kernel, counted.

    Attributes
    ----------
    kernel, tile, op : str
        "fa2", ...; "Q_i", "K_j", "V_j" or "P_ij"; "load" or "store".
    elements : int
        Summed over the lanes: two lanes that read one word count twice.
    requests : int
        Warp instructions.
    bytes : int
        Of the distinct words that each warp instruction asks for, as the hardware counts them.
    wavefronts, conflicts : int
        Passes over the 32 banks, and those beyond what the width of the access needs
        (`smem.wavefronts` has the rule).
    """

    kernel: str
    tile: str
    op: str
    elements: int
    requests: int
    bytes: int
    wavefronts: int
    conflicts: int


def differences(a: Iterable[Traffic], b: Iterable[Traffic]) -> list[tuple[Traffic, Traffic]]:
    """Pairs of rows with the same key whose numbers differ; a missing row counts as zeros."""
    left, right = {r.key: r for r in a}, {r.key: r for r in b}
    pairs = []
    for key in dict.fromkeys([*left, *right]):
        zero = replace(left.get(key) or right[key], elements=0, bytes=0, requests=0, sectors=0)
        x, y = left.get(key, zero), right.get(key, zero)
        if x.numbers != y.numbers:
            pairs.append((x, y))
    return pairs
