"""Tilings: which thread computes what, and what shared memory holds.

The one place that knows the sizes B_r, B_c, T_r, T_c of the papers, how a block's threads share a
tile, and how many bytes that takes. Kernels, model and tests all read it from here.

A block of ``n_r * n_c`` threads computes a B_r x B_c tile of S and a B_r x d tile of O. Thread
(ty, tx), ``ty = tid // n_c`` and ``tx = tid % n_c``, owns a register tile of each:

* of S: rows ``ty + r*n_r`` for r < R_r, columns ``tx + c*n_c`` for c < R_c;
* of O: the same rows, columns ``C*(tx + g*n_c) + c`` for g < G, c < C.

A row is shared by n_c neighbouring lanes of one warp, so row maxima are warp shuffles.

In the backward pass the block also computes B_c x d tiles of dK and dV. There thread (ty, tx) owns
the keys ``C_k*(ty + g*n_r) + c`` for g < G_k, c < C_k, and its columns of O.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
MAX_HEAD_DIM = 256
REGISTERS_PER_THREAD = 255
REGISTERS_PER_SM = 65536
BANK_BYTES = 128  # one line of the 32 four-byte banks of shared memory
VECTOR_BYTES = 16  # the widest load or store of one thread
WARPGROUP_ROWS = 64  # rows of a product of a Hopper warpgroup
BOX_COLUMNS = 64  # of a box that the hardware copies: 16-bit elements in a row of 128 bytes
CONSUMER_REGISTERS = {2: 232, 3: 160}  # of a thread of fa3's consumers, by how many there are
WHOLE_HEAD_DIM = 128  # up to here fa3 has dK_j, dV_j and dQ_i in one kernel
HOPPER_SHARED_BYTES = 232_448  # of a block on sm_90
HOPPER_INFO = 128  # bytes of what fa3's producer tells of the row tiles in flight

# The shared tiles of each kernel of a backward method.
ALL_TILES = ("Q", "dO", "K", "V", "P", "dS", "L")
ROW_TILES = ("Q", "dO", "K", "V", "dS", "L")
BACKWARD_TILES: dict[str, tuple[tuple[str, ...], ...]] = {
    "standard_backward": (("Q", "dO", "K", "V", "L"), ("Q", "dO", "P", "dS"), ("K", "dS")),
    "fa1_backward": (("Q", "dO", "K", "V", "P", "dS"),),
    "fa2_backward": (ALL_TILES,),
    "fa2_backward_deterministic": (ALL_TILES, ROW_TILES),
}


def acc_bytes(dtype: str) -> int:
    """Bytes of one element on chip: fp32 for all formats but fp64."""
    return 8 if dtype == "fp64" else 4


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def vector_width(dtype: str) -> int:
    """Elements of one 16-byte access."""
    return VECTOR_BYTES // DTYPE_BYTES[dtype]


class Ring(NamedTuple):
    """Places of `size` bytes each in shared memory, from byte `start` on."""

    start: int
    size: int
    places: int


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and thread grid of a block.

    Parameters
    ----------
    B_r, B_c : int
        Rows of a query tile, rows of a key/value tile.
    n_r, n_c : int
        Thread grid: ``n_r`` divides ``B_r``, ``n_c`` divides ``B_c`` and is a power of two up to
        32. ``n_r * n_c`` is a multiple of 32 and at most 1024, or less than 32.

    Raises
    ------
    TypeError, ValueError
        A size that breaks these rules, with the numbers.
    """

    B_r: int
    B_c: int
    n_r: int
    n_c: int

    def __post_init__(self) -> None:
        for name in ("B_r", "B_c", "n_r", "n_c"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"tiling: {name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"tiling: {name} must be at least 1, got {value}")
        if self.B_r % self.n_r:
            raise ValueError(f"tiling: n_r must divide B_r, got n_r={self.n_r}, B_r={self.B_r}")
        if self.B_c % self.n_c:
            raise ValueError(f"tiling: n_c must divide B_c, got n_c={self.n_c}, B_c={self.B_c}")
        if self.n_c & (self.n_c - 1) or self.n_c > 32:
            raise ValueError(
                f"tiling: n_c must be a power of two up to 32 (one row stays in one warp), "
                f"got {self.n_c}"
            )
        n = self.threads
        if n > 1024 or (n % 32 and n > 32):
            raise ValueError(
                f"tiling: n_r * n_c must be a multiple of 32 up to 1024, or below 32; got {n}"
            )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.n_r * self.n_c

    @property
    def R_r(self) -> int:
        """Rows of a thread's register tile."""
        return self.B_r // self.n_r

    @property
    def R_c(self) -> int:
        """Columns of a thread's register tile of S."""
        return self.B_c // self.n_c

    def T_r(self, N_q: int) -> int:
        """Number of query tiles."""
        return ceil_div(N_q, self.B_r)

    def T_c(self, N_k: int) -> int:
        """Number of key/value tiles."""
        return ceil_div(N_k, self.B_c)

    def columns_of_O(self, d: int, dtype: str) -> tuple[int, int]:
        """(C, G): a thread's columns of O are G groups of C neighbours.

        The narrowest O tile that covers d, and among equals the widest vector.
        """
        return _groups(d, self.n_c, dtype)

    def keys_of_dK(self, dtype: str) -> tuple[int, int]:
        """(C_k, G_k): a thread's keys of dK and dV are G_k groups of C_k neighbours."""
        return _groups(self.B_c, self.n_r, dtype)

    def shared_layout(
        self, d: int, dtype: str, names: str = "QKVP", P_replaces_K: bool = False
    ) -> tuple[dict[str, tuple[int, int, int]], int]:
        """Place the named tiles in shared memory.

        Q_i is B_r x d, K_j is B_c x d, V_j is B_c x d and P_ij is B_r x B_c. Row lengths are padded
        so that no access of the kernels has a bank conflict:

        * Q_i, K_j are read 16 bytes along a row, 8 lanes in 8 rows: a row is an odd number of
          16-byte units;
        * P_ij is written by n_c lanes a row: the next row starts n_c banks further;
        * V_j is read along rows: no padding.

        With `P_replaces_K`, P_ij takes the place of K_j, which no thread reads after S_ij.

        Returns
        -------
        tiles : dict
            Name to (rows, columns, byte offset).
        total : int
            Bytes of dynamic shared memory.
        """
        e = acc_bytes(dtype)
        unit, banks = VECTOR_BYTES // e, BANK_BYTES // e
        C, G = self.columns_of_O(d, dtype)
        ld = ceil_div(d, 4) * 4
        ld += 0 if ld // unit % 2 else unit
        ld_p = ceil_div(self.B_c, unit) * unit
        while self.n_c * e >= VECTOR_BYTES and ld_p % banks != self.n_c % banks:
            ld_p += unit
        shapes = {
            "Q": (self.B_r, ld),
            "K": (self.B_c, ld),
            "V": (self.B_c, C * G * self.n_c),
            "P": (self.B_r, ld_p),
        }
        sizes = {n: ceil_div(r * c * e, BANK_BYTES) * BANK_BYTES for n, (r, c) in shapes.items()}
        if P_replaces_K:
            sizes["K"], sizes["P"] = max(sizes["K"], sizes["P"]), 0
        tiles, total = {}, 0
        for name in names:
            tiles[name] = (*shapes[name], total)
            total += sizes[name]
        if P_replaces_K:
            tiles["P"] = (*shapes["P"], tiles["K"][2])
        return tiles, total

    def hopper_layout(self, d: int) -> tuple[dict[str, Ring], int]:
        """Shared memory of fa3, in the order of its places, and its bytes.

        Q, K and V in boxes of 64 columns of 16-bit elements, at multiples of 1024 bytes; Q in
        pieces of 64 rows, one for each consumer and, if there is space, again for the next row
        tile; two K_j and V_j. For each of these places a barrier that ends when it is full, one
        when it is empty. For d up to 64 a place for O_i, too, in boxes of a warp's 16 rows.
        """
        consumers, row = self.B_r // WARPGROUP_ROWS, ceil_div(d, BOX_COLUMNS) * BANK_BYTES
        q_size, kv_size = WARPGROUP_ROWS * row, self.B_c * row
        for q_stages in (2, 1):
            sizes = {
                "Q": (q_size, q_stages * consumers),
                "K": (kv_size, 2),
                "V": (kv_size, 2),
                **({"O": (q_size // 4, 4 * consumers)} if d <= BOX_COLUMNS else {}),
                **{
                    f"{name} {state}": (8, count)
                    for name, count in (("Q", q_stages * consumers), ("K", 2), ("V", 2))
                    for state in ("full", "empty")
                },
                "info": (HOPPER_INFO, 1),
            }
            rings, end = _placed(sizes)
            if end <= HOPPER_SHARED_BYTES:
                break
        return rings, end

    def hopper_backward_layout(self, d: int) -> tuple[dict[str, Ring], int]:
        """Shared memory of fa3_backward, in the order of its places, and its bytes.

        K_j and V_j; two each of Q_i, dO_i, L_i and D_i, dS_ij, and dQ_i in fp32; the barriers.
        """
        row = ceil_div(d, BOX_COLUMNS) * BANK_BYTES
        return _placed(
            {
                "K": (self.B_c * row, 1),
                "V": (self.B_c * row, 1),
                "Q": (self.B_r * row, 2),
                "dO": (self.B_r * row, 2),
                "dS": (self.B_r * self.B_c * 2, 2),
                "dQ": (self.B_r * row * 2, 2),
                "L, D": (2 * 4 * self.B_r, 2),
                "info": (HOPPER_INFO, 1),
                "K, V full": (8, 2),
                **{f"{of} {is_}": (8, 2) for of in ("Q", "dO", "dQ") for is_ in ("full", "empty")},
            }
        )

    def hopper_registers(self, d: int) -> int:
        """Estimate of the registers of a thread of fa3's consumers: S, P and O, and 28 more."""
        return self.B_c // 2 + self.B_c // 4 + ceil_div(d, 16) * 8 + 28

    def _check_hopper(self) -> None:
        consumers = self.B_r // WARPGROUP_ROWS
        if self.B_r not in (128, 192) or self.B_c % 16 or self.B_c > 256:
            raise ValueError(
                f"tiling: got {self} with method=fa3, accepted: B_r 128 or 192, B_c a multiple of "
                "16 up to 256"
            )
        if (self.n_r, self.n_c) != (32 * consumers, 4):
            raise ValueError(
                f"tiling: got n_r={self.n_r}, n_c={self.n_c} with method=fa3, accepted: "
                f"n_r={32 * consumers}, n_c=4, the rows and columns of warpgroups"
            )

    def backward_layout(
        self, d: int, dtype: str, names: Sequence[str]
    ) -> tuple[dict[str, tuple[int, int, int]], int]:
        """Place the named tiles of a backward kernel in shared memory.

        Q_i and dO_i are B_r x d, K_j and V_j are B_c x d, P_ij and dS_ij are B_r x B_c; "L" holds
        the row of L_i and that of D_i. Rows are padded as in `shared_layout`: those of Q_i, dO_i,
        K_j and V_j are read both across (S, dP) and along (dQ, dK, dV). Each is as wide as the
        threads' columns of O, or keys of dK, together.

        Returns
        -------
        tiles : dict
            Name to (rows, columns, byte offset).
        total : int
            Bytes of dynamic shared memory.
        """
        e = acc_bytes(dtype)
        unit, banks = VECTOR_BYTES // e, BANK_BYTES // e
        C, G = self.columns_of_O(d, dtype)
        C_k, G_k = self.keys_of_dK(dtype)
        ld = ceil_div(max(d, C * G * self.n_c), 4) * 4
        ld += 0 if ld // unit % 2 else unit
        ld_p = ceil_div(max(self.B_c, C_k * G_k * self.n_r), unit) * unit
        while self.n_c * e >= VECTOR_BYTES and ld_p % banks != self.n_c % banks:
            ld_p += unit
        rows, keys, scores = (self.B_r, ld), (self.B_c, ld), (self.B_r, ld_p)
        shapes = {"Q": rows, "dO": rows, "K": keys, "V": keys, "P": scores, "dS": scores}
        shapes["L"] = (2, self.B_r)
        tiles, total = {}, 0
        for name in names:
            tiles[name] = (*shapes[name], total)
            total += ceil_div(math.prod(shapes[name]) * e, BANK_BYTES) * BANK_BYTES
        return tiles, total

    def registers(self, d: int, dtype: str, method: str = "fa2") -> int:
        """Estimate of the registers of a thread: its tiles of S and O, fragments, addresses.

        Backward, dK_j and dV_j stay; beside them are first S_ij and dP_ij, then dQ_i.
        """
        C, G = self.columns_of_O(d, dtype)
        words = acc_bytes(dtype) // 4
        if "backward" in method:
            C_k, G_k = self.keys_of_dK(dtype)
            scores = 2 * self.R_r * self.R_c + 4 * (self.R_r + self.R_c)
            dQ_i = self.R_r * C * G + 4 * self.R_r + C
            held = 2 * C_k * G_k * C * G + max(scores, dQ_i)
            addresses = 80 if method == "fa1_backward" else 40  # it moves O, dQ, L and dL by row
            return addresses + 24 * (words - 1) + held * words
        tiles = self.R_r * (self.R_c + C * G)
        fragments = 4 * (self.R_r + max(self.R_c, C))
        return 40 + 24 * (words - 1) + (tiles + fragments) * words

    def shared_bytes(self, d: int, dtype: str, method: str) -> int:
        """Dynamic shared memory of the largest block that `method` launches."""
        if method in BACKWARD_TILES:
            return max(self.backward_layout(d, dtype, n)[1] for n in BACKWARD_TILES[method])
        if method == "fa3":
            return self.hopper_layout(d)[1]
        if method.startswith("fa3_backward"):
            if d > WHOLE_HEAD_DIM:
                return gradient_layout("dQ", d)[1]
            return self.hopper_backward_layout(d)[1]
        if method == "standard":
            return max(self.shared_layout(d, dtype, names)[1] for names in ("QK", "VP"))
        return self.shared_layout(d, dtype, P_replaces_K=method == "fa2")[1]

    def check(self, d: int, dtype: str, method: str, shared_limit: int) -> None:
        """Raise `ValueError`, with the numbers, unless a block fits `shared_limit` bytes."""
        if method == "fa3":
            self._check_hopper()
            consumers, registers = self.B_r // WARPGROUP_ROWS, self.hopper_registers(d)
            most = CONSUMER_REGISTERS[consumers]
            if registers > most:
                raise ValueError(
                    f"tiling: {self} needs about {registers} registers a thread for method=fa3, "
                    f"d={d}; a thread may have {most}"
                )
        if method.startswith("fa3_backward") and self != hopper_backward(d):
            raise ValueError(
                f"tiling: got {self} with method=fa3, accepted backward: {hopper_backward(d)}"
            )
        need = self.shared_bytes(d, dtype, method)
        if need > shared_limit:
            raise ValueError(
                f"tiling: {self} needs {need} bytes of shared memory for method={method}, d={d}, "
                f"dtype={dtype}; a block may have {shared_limit}"
            )

    def fits(self, d: int, dtype: str, method: str, shared_limit: int, plain: bool = True) -> bool:
        """Whether a block fits shared memory and, by estimate, a thread fits its registers.

        Not `plain` are score changes and masks that ask each score. A long body, theirs or fp64's
        exp, is unrolled by libNVVM for so many scores only; past that S_ij leaves the registers.
        """
        registers = self.registers(d, dtype, method)
        unrolled = 16 if dtype == "fp64" else 64 if plain else 32
        return (
            self.R_r * self.R_c <= unrolled
            and self.shared_bytes(d, dtype, method) <= shared_limit
            and registers <= REGISTERS_PER_THREAD
            and registers * self.threads <= REGISTERS_PER_SM
        )


def _groups(length: int, lanes: int, dtype: str) -> tuple[int, int]:
    """(C, G): how `lanes` share a row of `length`, each G groups of C neighbours."""
    widths = [c for c in (4, 2, 1) if c * acc_bytes(dtype) <= VECTOR_BYTES]
    C = min(widths, key=lambda c: c * ceil_div(length, c * lanes))
    return C, ceil_div(length, C * lanes)


def papers_rule(M: int, d: int) -> tuple[int, int]:
    """Tile sizes of FlashAttention's Algorithm 1, line 1, for M elements of on-chip memory.

    ``B_c = ceil(M / 4d)``, ``B_r = min(ceil(M / 4d), d)`` (Dao et al. 2022).
    """
    B_c = ceil_div(M, 4 * d)
    return min(B_c, d), B_c


# In the order of their speed where they fit. A thread's 8 x 8 register tiles need 16 shared loads
# for 256 multiply-adds; every smaller tile needs more loads for each.
CANDIDATES = (
    Tiling(128, 64, 16, 8),
    Tiling(128, 128, 16, 16),
    Tiling(128, 64, 16, 16),
    Tiling(128, 32, 16, 16),
    Tiling(64, 64, 8, 16),
    Tiling(64, 32, 8, 16),
    Tiling(64, 32, 16, 16),
    Tiling(32, 32, 8, 16),
    Tiling(16, 16, 8, 16),
    Tiling(16, 8, 16, 8),
    Tiling(8, 8, 8, 4),
)
# A block of the backward pass holds twice the tiles. In the order of the multiply-adds that a
# shared load feeds; their speed has not been measured.
CANDIDATES_BACKWARD = (
    Tiling(64, 64, 8, 16),
    Tiling(64, 64, 16, 16),
    Tiling(64, 32, 8, 16),
    Tiling(32, 32, 8, 16),
    Tiling(32, 32, 16, 16),
    Tiling(16, 16, 8, 16),
    Tiling(16, 16, 16, 16),
    Tiling(16, 8, 8, 8),
    Tiling(8, 8, 8, 8),
    Tiling(8, 4, 8, 4),
)


@functools.cache
def choose(d: int, dtype: str, method: str, shared_limit: int, plain: bool = True) -> Tiling:
    """The tiling used when the caller gives none: the first of the candidates that fits.

    Parameters
    ----------
    d : int
        Head dimension.
    dtype : str
        "fp32", "fp64", "fp16" or "bf16".
    method : str
        "standard", "fa1" or "fa2", or a method of the backward pass.
    shared_limit : int
        Bytes of shared memory a block may have on this device.
    plain : bool
        No score changes, and no mask that asks each score.

    Raises
    ------
    ValueError
        No candidate fits.
    """
    candidates = CANDIDATES_BACKWARD if method in BACKWARD_TILES else CANDIDATES
    for tiling in candidates:
        if tiling.fits(d, dtype, method, shared_limit, plain):
            return tiling
    if candidates[-1].shared_bytes(d, dtype, method) <= shared_limit:
        return candidates[-1]  # right, if slow: its register tiles lie in local memory
    raise ValueError(
        f"tiling: none fits {shared_limit} bytes of shared memory at method={method}, d={d}, "
        f"dtype={dtype}"
    )


def hopper_backward(d: int) -> Tiling:
    """Tiling of fa3, backward: 64 keys for each of two warpgroups, 64 or 128 query rows a step."""
    return Tiling(128 if d <= BOX_COLUMNS else 64, 128, 64, 4)


GRADIENT_ROWS = 64  # rows of a step of fa3's kernels of one gradient


def gradient_layout(gradient: str, d: int) -> tuple[dict[str, Ring], int]:
    """Shared memory of fa3's kernel of one gradient, in the order of its places, and its bytes.

    X and Z, which stay, of 128 rows; Y and W, which go by, as many times as there is space for; L
    and D, in twice as many places as Y, whose barriers are theirs. For each place of the others a
    barrier that ends when it is full, one when it is empty, which X and Z share; and one barrier
    that is always open.
    """
    row = ceil_div(d, BOX_COLUMNS) * BANK_BYTES
    x_size, y_size = 2 * WARPGROUP_ROWS * row, GRADIENT_ROWS * row
    for y_stages, w_stages in ((3, 3), (2, 2), (2, 1)):
        sizes = {
            "X": (x_size, 1),
            "Z": (0 if gradient == "dV" else x_size, 1),
            "Y": (y_size, y_stages),
            "W": (y_size, w_stages),
            "L, D": (2 * 4 * GRADIENT_ROWS, 2 * y_stages),
            "info": (HOPPER_INFO, 1),
            "tile": (16, 1),
            "X, Z full": (8, 2),
            "X, Z empty": (8, 1),
            "open": (8, 1),
            **{f"Y {state}": (8, y_stages) for state in ("full", "empty")},
            **{f"W {state}": (8, w_stages) for state in ("full", "empty")},
        }
        rings, end = _placed(sizes)
        if end <= HOPPER_SHARED_BYTES:
            break
    return rings, end


def _placed(sizes: dict[str, tuple[int, int]]) -> tuple[dict[str, Ring], int]:
    """Rings of these sizes and counts one behind the other, and where the last ends."""
    rings, end = {}, 0
    for name, (size, count) in sizes.items():
        rings[name] = Ring(ceil_div(end, 16) * 16, size, count)
        end = rings[name].start + size * count
    return rings, end


@functools.cache
def choose_hopper(d: int, N_q: int, bounded: bool = False, plain: bool = True) -> Tiling:
    """The tiling of fa3 used when the caller gives none: the fastest measured on an H200.

    Parameters
    ----------
    d : int
        Head dimension.
    N_q : int
        Queries.
    bounded : bool
        Whether the mask has bounds, and so leaves rows different numbers of keys.
    plain : bool
        No score changes, and no mask that asks each score: they take registers.
    """
    if d <= 64 and plain and not (bounded and N_q <= 2048):
        # 3 consumers: with d this small their exponentials take as long as their products.
        B_r, B_c = 192, 128
    else:
        B_r, B_c = 128, 128 if d <= 128 else 96 if d <= 192 else 64
    return Tiling(B_r, B_c, B_r // 2, 4)
