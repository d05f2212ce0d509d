"""What attention moves, predicted as integers before any kernel runs.

`predict` gives the rows that the counting kernels give, number for number: elements, bytes, warp
requests and 32-byte sectors of every array in every phase. It takes no time that grows with N^2,
because a phase repeats one access pattern on many tiles:

* a `Pattern` says which element of a tile each lane accesses, warp instruction by instruction;
* what that touches depends on the tile only through its valid rows and columns and through the byte
  of a sector at which it starts;
* `sweep` counts the visits that start at each of the 32 bytes, and multiplies.

`_fa3`, `_fa2`, `_fa1`, `_standard` and those of the backward pass read as lists of their phases.
Which tiles are visited is asked of the mask's own functions (`masking.tile_functions`), called on
the host.

`closed_form` has the element counts as the papers' formulas; `theta`, `theorem_2`, `lower_bound`
and `compulsory` have their bounds. `dram` goes one level down and is a model, with a domain.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fa2_numba import masking
from fa2_numba.masking import EMPTY, FULL, UNCHANGED, BooleanArray, Table, tile_functions
from fa2_numba.problem import METHODS, METHODS_BACKWARD, Layout, Problem
from fa2_numba.tiling import (
    BOX_COLUMNS,
    DTYPE_BYTES,
    GRADIENT_ROWS,
    WARPGROUP_ROWS,
    Tiling,
    acc_bytes,
    ceil_div,
    vector_width,
)
from fa2_numba.traffic import Traffic

WARP = 32  # lanes
SECTOR = 32  # bytes

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Counts = tuple[int, int, int]  # elements, requests, sectors


def predict(problem: Problem) -> list[Traffic]:
    """The traffic rows of a problem, as `api.measure` counts them.

    Parameters
    ----------
    problem : Problem
        Any method, dtype, shape, mask, score change, tiling and layouts. An array without a layout
        is contiguous and starts at a multiple of 32 bytes. Besides Q, K, V, O and L, layouts may
        place S, P, l, m, O_acc and the mask's arrays: "mask" (four axes, of size 1 where it
        broadcasts), "document start" and "document end" (batch or 1, N_k).

    Returns
    -------
    list of Traffic
        Level "issued", source "predicted"; rows of zeros are left out.

    Raises
    ------
    ValueError
        A custom mask or score change has a `Table`: only its author knows which lane reads what.
    """
    moves, mask = _Moves(problem), _Mask(problem)
    _tile_map(moves, mask)
    if problem.method in METHODS_BACKWARD:
        backward: dict[str, Callable[[_Moves, _Mask], None]] = {
            "standard_backward": _standard_backward,
            "fa1_backward": _fa1_backward,
            "fa2_backward": _fa2_backward,
            "fa2_backward_deterministic": partial(_fa2_backward, second_pass=True),
            "fa3_backward": _fa3_backward,
            "fa3_backward_deterministic": _fa3_backward,
        }
        backward[problem.method](moves, mask)
    elif problem.B * problem.H * problem.N_q:
        methods = {"standard": _standard, "fa1": _fa1, "fa2": _fa2, "fa3": _fa3}
        methods[problem.method](moves, mask)
    return moves.rows()


def total(rows: Iterable[Traffic], field: str = "bytes", **filters: Any) -> int:
    """Sum of one column over the rows whose columns equal `filters`: ``total(rows, op="load")``."""
    chosen = (r for r in rows if all(getattr(r, name) == x for name, x in filters.items()))
    return sum(getattr(row, field) for row in chosen)


# ---- the methods, phase by phase --------------------------------------------------------------


def _fa2(moves: "_Moves", mask: "_Mask") -> None:
    """Q_i once a block, K_j and V_j once a visit, O_i and L_i in the epilogue."""
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    Q_i, K_j, O_i = Pattern.of_Q(p), Pattern.of_K(p), Pattern.of_O(p, p.store_width)
    visits = mask.visits()

    _slopes(moves, blocks=p.B * p.H * t.T_r(p.N_q))
    _tile_range(moves, mask, times=1)
    tiles("Q", "load Q_i", "load", Q_i)
    _tile_kind(moves, mask, visits)
    tiles("K", "load K_j, V_j", "load", K_j, visits.per_column)
    tiles("V", "load K_j, V_j", "load", K_j, visits.per_column)
    _finish_scores(moves, mask, visits)
    tiles("O", "epilogue", "store", O_i)
    tiles("L", "epilogue", "store", Pattern.registers(t))


def _fa3(moves: "_Moves", mask: "_Mask") -> None:
    """As fa2, but in boxes, and every tile in range is visited, at least one a row tile.

    In boxes are Q, K and V and, for d up to 64, O.

    Nothing for rows that are computed again because V is not finite: that depends on the data.
    """
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    visits = mask.in_range(t.B_r, t.B_c)

    tiles("Q", "load Q_i", "load", Boxes.of(t.B_r, p.d, t.B_r // WARPGROUP_ROWS))
    tiles("K", "load K_j, V_j", "load", Boxes.of(t.B_c, p.d), visits)
    tiles("V", "load K_j, V_j", "load", Boxes.of(t.B_c, p.d), visits)
    O_i = Pattern.accumulators(t, p.d, p.fa3_store_width)
    if p.fa3_stores_boxes:
        O_i = StoredBoxes.of(t.B_r, p.d, t.B_r // 16)  # one for each warp
    tiles("O", "epilogue", "store", O_i)
    tiles("L", "epilogue", "store", Pattern.rows_of_warps(t))


def _fa1(moves: "_Moves", mask: "_Mask") -> None:
    """K_j and V_j once, Q_i once a visit, O_i, l_i and m_i loaded and stored once a visit."""
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    Q_i, K_j, O_i = Pattern.of_Q(p), Pattern.of_K(p), Pattern.of_O(p, p.o_acc_width)
    O_rows = Pattern.copy(t.B_r, p.d, t.threads, p.o_row_width)
    rows = Pattern.copy(t.B_r, 1, t.threads)
    visits = mask.visits()
    visited = (visits.per_column > 0).astype(np.int64)

    tiles(p.o_acc_name, "init", "store", O_rows)
    tiles("l", "init", "store", rows)
    tiles("m", "init", "store", rows)

    _slopes(moves, blocks=p.B * p.H if p.N_k else 0)
    _tile_range(moves, mask, times=t.T_c(p.N_k))
    _tile_kind(moves, mask, visits)
    tiles("K", "load K_j, V_j", "load", K_j, visited)
    tiles("V", "load K_j, V_j", "load", K_j, visited)
    tiles("Q", "load Q_i", "load", Q_i, visits.per_row)
    _finish_scores(moves, mask, visits)
    for op in ("load", "store"):
        tiles("m", "rescale O_i", op, Pattern.registers(t), visits.per_row)
        tiles("l", "rescale O_i", op, Pattern.registers(t), visits.per_row)
        tiles(p.o_acc_name, "rescale O_i", op, O_i, visits.per_row)

    if p.rounds:
        tiles("O_acc", "finish", "load", O_rows)
        tiles("O", "finish", "store", O_rows)
    tiles("l", "finish", "load", rows)
    tiles("m", "finish", "load", rows)
    tiles("L", "finish", "store", rows)


def _standard(moves: "_Moves", mask: "_Mask") -> None:
    """S stored once and loaded twice, P stored and loaded once; Q, K and V again for each tile."""
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    Q_i, K_j, O_i = Pattern.of_Q(p), Pattern.of_K(p), Pattern.of_O(p, p.store_width)
    P_ij = Pattern.copy(t.B_r, t.B_c, t.threads, p.p_width)
    row = Pattern.copy(1, WARP * p.p_width, WARP, p.p_width)  # a warp's step along a row
    T_r, T_c = t.T_r(p.N_q), t.T_c(p.N_k)

    _slopes(moves, blocks=p.B * p.H * T_r * T_c)
    tiles("Q", "S = Q K^T", "load", Q_i, _each(T_c))
    tiles("K", "S = Q K^T", "load", K_j, _each(T_r))
    _finish_scores(moves, mask, mask.every_tile())
    tiles("S", "S = Q K^T", "store", Pattern.registers(t, t.R_c))

    tiles("S", "row max and sum", "load", row)
    tiles("S", "normalise", "load", row)
    tiles("P", "normalise", "store", row)
    tiles("L", "normalise", "store", Pattern.copy(1, 1, 1))

    tiles("P", "O = P V", "load", P_ij)
    tiles("V", "O = P V", "load", K_j, _each(T_r))
    tiles("O", "O = P V", "store", O_i)


# ---- the backward methods ---------------------------------------------------------------------


def _fa2_backward(moves: "_Moves", mask: "_Mask", second_pass: bool = False) -> None:
    """K_j and V_j once a key head, Q_i, dO_i, L_i and D_i once a visit, dQ_i added once a visit.

    Or not added: the second pass reads as the forward pass does.
    """
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    Q_i, K_j, rows = Pattern.of_Q(p), Pattern.of_K(p), Pattern.copy(t.B_r, 1, t.threads)
    tiles("K", "load K_j, V_j", "load", K_j, heads=p.H_k)
    tiles("V", "load K_j, V_j", "load", K_j, heads=p.H_k)
    _slopes(moves, blocks=p.B * p.H * t.T_c(p.N_k))
    _dK_dV(moves)
    if p.B * p.H * p.N_q == 0:
        return
    visits = mask.visits()
    _rowsum(moves)

    _tile_range(moves, mask, times=t.T_c(p.N_k))
    _tile_kind(moves, mask, visits)
    tiles("Q", "load Q_i, dO_i", "load", Q_i, visits.per_row)
    tiles("dO", "load Q_i, dO_i", "load", Q_i, visits.per_row)
    tiles("L", "load Q_i, dO_i", "load", rows, visits.per_row)
    tiles("D", "load Q_i, dO_i", "load", rows, visits.per_row)
    _finish_scores(moves, mask, visits)
    if not second_pass:
        dQ_i = Pattern.of_O(p, 1)
        tiles(p.dq_acc_name, "dQ_i += dS_ij K_j", "atomic", dQ_i, visits.per_row)
        _accumulator(moves)
        return

    _slopes(moves, blocks=p.B * p.H * t.T_r(p.N_q))
    _tile_range(moves, mask, times=1)
    for array in ("Q", "dO"):
        tiles(array, "again: Q_i, dO_i", "load", Q_i)
    for array in ("L", "D"):
        tiles(array, "again: Q_i, dO_i", "load", rows)
    _tile_kind(moves, mask, visits)
    for array in ("K", "V"):
        tiles(array, "again: K_j, V_j", "load", K_j, visits.per_column)
    _finish_scores(moves, mask, visits)
    tiles("dQ", "epilogue", "store", Pattern.of_O(p, p.gradient_width))


def _fa1_backward(moves: "_Moves", mask: "_Mask") -> None:
    """K_j and V_j once a key head; Q_i, O_i, dO_i, L_i and dQ_i once a visit, dQ_i stored again."""
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    Q_i, K_j = Pattern.of_Q(p), Pattern.of_K(p)
    O_i, row = Pattern.of_O(p, p.gradient_width), Pattern.registers(t)
    tiles("K", "load K_j, V_j", "load", K_j, heads=p.H_k)
    tiles("V", "load K_j, V_j", "load", K_j, heads=p.H_k)
    _slopes(moves, blocks=p.B * p.H * t.T_c(p.N_k))
    _dK_dV(moves)
    if p.B * p.H * p.N_q == 0:
        return
    visits = mask.visits()
    _accumulator(moves)
    _tile_range(moves, mask, times=t.T_c(p.N_k))
    _tile_kind(moves, mask, visits)
    tiles("Q", "load Q_i, O_i, dO_i", "load", Q_i, visits.per_row)
    tiles("dO", "load Q_i, O_i, dO_i", "load", Q_i, visits.per_row)
    tiles("O", "load Q_i, O_i, dO_i", "load", O_i, visits.per_row)
    tiles("L", "load Q_i, O_i, dO_i", "load", row, visits.per_row)
    if p.dlse:
        tiles("dL", "load Q_i, O_i, dO_i", "load", row, visits.per_row)
    _finish_scores(moves, mask, visits)
    for op in ("load", "store"):
        tiles(p.dq_acc_name, "dQ_i += dS_ij K_j", op, O_i, visits.per_row)


def _standard_backward(moves: "_Moves", mask: "_Mask") -> None:
    """P stored once and loaded once, dS stored once and loaded twice."""
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    Q_i, K_j, rows = Pattern.of_Q(p), Pattern.of_K(p), Pattern.copy(t.B_r, 1, t.threads)
    P_ij, S_ij = Pattern.copy(t.B_r, t.B_c, t.threads, p.p_width), Pattern.registers(t, t.R_c)
    T_r, T_c = t.T_r(p.N_q), t.T_c(p.N_k)
    _dK_dV(moves)
    if p.B * p.H * p.N_q == 0:
        return
    _rowsum(moves)
    _slopes(moves, blocks=p.B * p.H * T_r * T_c)
    for array in ("Q", "dO"):
        tiles(array, "P, dS", "load", Q_i, _each(T_c))
        tiles(array, "dV = P^T dO, dK = dS^T Q", "load", Q_i, _each(T_c))
    for array in ("K", "V"):
        tiles(array, "P, dS", "load", K_j, _each(T_r))
    for array in ("L", "D"):
        tiles(array, "P, dS", "load", rows, _each(T_c))
    _finish_scores(moves, mask, mask.every_tile())
    for array in ("P", "dS"):
        tiles(array, "P, dS", "store", S_ij)
        tiles(array, "dV = P^T dO, dK = dS^T Q", "load", P_ij)
    tiles("dS", "dQ = dS K", "load", P_ij)
    tiles("K", "dQ = dS K", "load", K_j, _each(T_r))
    tiles("dQ", "dQ = dS K", "store", Pattern.of_O(p, p.gradient_width))


def _fa3_backward(moves: "_Moves", mask: "_Mask") -> None:
    """K_j and V_j once a key head, Q_i, dO_i, L_i and D_i once a visit, dQ_i added once a visit.

    Or, for d above 128, each gradient by itself; so dQ in the deterministic form. Nothing for rows
    that are computed again because something is not finite: that depends on the data.
    """
    p, t, tiles = moves.problem, moves.problem.tiling, moves.tiles
    if p.B * p.H * p.N_q * p.N_k == 0:
        return
    rows = Tiling(t.B_r, 4, t.B_r, 4)  # four lanes a row
    one = Pattern.registers(rows)
    width = vector_width(p.dtype)
    row = Pattern.registers(rows, ceil_div(p.d, 4 * width), width, p.d_width)
    tiles("dO", "D = rowsum(dO o O)", "load", row)
    tiles("O", "D = rowsum(dO o O)", "load", row)
    if p.dlse:
        tiles("dL", "D = rowsum(dO o O)", "load", one)
    tiles("D", "D = rowsum(dO o O)", "store", one)

    keys = Tiling(t.B_c, 4, t.B_c // 2, 4)  # two of its rows to a thread
    gradient = Pattern.accumulators(keys, p.d, p.fa3_gradient_width)
    by_lane, visits = Pattern.copy(t.B_r, 1, WARP), mask.seen_by(t.B_r, t.B_c)
    if not p.splits_gradients:
        for array in ("K", "V"):
            tiles(array, "load K_j, V_j", "load", Boxes.of(t.B_c, p.d), heads=p.H_k)
            tiles("d" + array, "epilogue", "store", gradient, heads=p.H_k)
        for array in ("Q", "dO"):
            tiles(array, "load Q_i, dO_i", "load", Boxes.of(t.B_r, p.d), visits)
        for array in ("L", "D"):
            tiles(array, "load Q_i, dO_i", "load", by_lane, visits)
    if p.adds_dQ:
        (B, H, T_r, tile), itemsize = p.layout("dQ_acc").shape, acc_bytes(p.dtype)
        copies, per_warp = B * H * T_r, 4 * WARP
        whole = copies * tile, copies * tile // per_warp, copies * tile * itemsize // SECTOR
        sums = int(visits.sum()) * mask.copies
        added = sums * tile, sums, sums * tile * itemsize // SECTOR
        moves.add("dQ_acc", "dQ = 0", "store", itemsize, whole)
        moves.add("dQ_acc", "dQ_i += dS_ij K_j", "atomic", itemsize, added)
        moves.add("dQ_acc", "finish", "load", itemsize, whole)
        quads = Tiling(t.B_r, 4, t.B_r // 2, 4)
        stored = Pattern.accumulators(quads, p.d, p.fa3_gradient_width)
        tiles("dQ", "finish", "store", stored)
        return

    stays = Tiling(2 * WARPGROUP_ROWS, 4, WARPGROUP_ROWS, 4)
    B_m, B_x = GRADIENT_ROWS, stays.B_r
    if p.splits_gradients:
        for name, arrays in (("dV", "K"), ("dK", "KV")):
            for array in arrays:
                boxes = Boxes.of(B_x, p.d)
                tiles(array, f"{name}: load K, V", "load", boxes, heads=p.H_k)
            for array in ("Q", "dO"):
                tiles(array, f"{name}: load Q, dO", "load", Boxes.of(B_m, p.d), visits)
            for array in ("L", "D") if name == "dK" else ("L",):
                tiles(array, f"{name}: load Q, dO", "load", by_lane, visits)
            tiles(name, "epilogue", "store", gradient, heads=p.H_k)
    for array in ("Q", "dO"):
        tiles(array, "dQ: load Q, dO", "load", Boxes.of(B_x, p.d))
    for array in ("L", "D"):
        tiles(array, "dQ: load Q, dO", "load", Pattern.by_quads(stays))
    for array in ("K", "V"):
        visits = mask.in_range(B_x, B_m, least=0)
        tiles(array, "dQ: load K, V", "load", Boxes.of(B_m, p.d), visits)
    tiles("dQ", "epilogue", "store", Pattern.accumulators(stays, p.d, p.fa3_gradient_width))


def _rowsum(moves: "_Moves") -> None:
    """D from dO and O, a warp a row."""
    p, tiles = moves.problem, moves.tiles
    one_warp = Tiling(1, WARP, 1, WARP)
    row = Pattern.registers(one_warp, C=vector_width(p.dtype), width=p.d_width)
    one = Pattern.copy(1, 1, 1)
    tiles("dO", "D = rowsum(dO o O)", "load", row)
    tiles("O", "D = rowsum(dO o O)", "load", row)
    if p.dlse:
        tiles("dL", "D = rowsum(dO o O)", "load", one)
    tiles("D", "D = rowsum(dO o O)", "store", one)


def _accumulator(moves: "_Moves") -> None:
    """What dQ is added to: cleared and, for fp16 and bf16, rounded at the end."""
    p, t = moves.problem, moves.problem.tiling
    rows = Pattern.copy(t.B_r, p.d, t.threads, p.dq_row_width)
    moves.tiles(p.dq_acc_name, "dQ = 0", "store", rows)
    if p.rounds:
        moves.tiles("dQ_acc", "finish", "load", rows)
        moves.tiles("dQ", "finish", "store", rows)


def _dK_dV(moves: "_Moves") -> None:
    """dK_j and dV_j, once a key head."""
    keys = Pattern.of_dK(moves.problem)
    phase = "epilogue"
    if moves.problem.method == "standard_backward":
        phase = "dV = P^T dO, dK = dS^T Q"
    moves.tiles("dK", phase, "store", keys, heads=moves.problem.H_k)
    moves.tiles("dV", phase, "store", keys, heads=moves.problem.H_k)


# ---- what masks and score changes read --------------------------------------------------------


def _tile_map(moves: "_Moves", mask: "_Mask") -> None:
    """Boolean: each element of the mask once, and one byte stored a tile."""
    t = moves.problem.tiling
    for array, layout in mask.arrays.values():
        B, H, N_q, N_k = layout.shape
        tiles = B * H * t.T_r(N_q) * t.T_c(N_k)
        counts = sweep(Pattern.copy(t.B_r, t.B_c, t.threads), layout, H)
        moves.add(array.name, "tile map", "load", 1, counts)
        moves.add(array.map_name, "tile map", "store", 1, (tiles, tiles, tiles))


def _slopes(moves: "_Moves", blocks: int) -> None:
    """ALiBi: every thread of a block reads the slope of its head, at the start."""
    score = moves.problem.score
    for table in _slope_tables(score.change, score.args):
        moves.block(table.name, "load slopes", table.values.itemsize, blocks)


def _slope_tables(change: Any, args: tuple[Any, ...]) -> Iterator[Table]:
    if isinstance(change, masking._Sequence):
        yield from _slope_tables(change.a, args[0])
        yield from _slope_tables(change.b, args[1])
    elif change is masking._ALIBI:
        yield args[0]
    else:
        _check_no_table(args)


def _check_no_table(args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, Table):
            raise ValueError(
                f"table {arg.name!r} of a custom function: got no prediction for it, accepted: "
                "documents and alibi; only the function's author knows which lane reads what"
            )


def _tile_range(moves: "_Moves", mask: "_Mask", times: int) -> None:
    """Documents: every thread reads the bounds of the first and last row, `times` a row tile."""
    p = moves.problem
    rows = sum(int((i >= 0).sum()) for i in mask.ends)  # a row before the keys reads nothing
    for table in mask.tables:
        moves.block(table.name, "tile range", table.values.itemsize, times * p.B * p.H * rows)


def _tile_kind(moves: "_Moves", mask: "_Mask", visits: "Visits") -> None:
    """Boolean: every thread reads the tile map, for each tile in range."""
    for array, _ in mask.arrays.values():
        moves.block(array.map_name, "mask", 1, int(visits.asked.sum()) * mask.copies)


def _finish_scores(moves: "_Moves", mask: "_Mask", visits: "Visits") -> None:
    """In a tile that is not FULL: documents, the row's bounds; boolean, the score's own element.

    A score change asks for the bounds in FULL tiles too (`tile.score_finisher`).
    """
    p, t = moves.problem, moves.problem.tiling
    bounds_asked = visits.masked if p.score.change is UNCHANGED else visits.per_row
    for table in mask.tables:
        place = _layout(p, table.name, table.values)
        s_b, s_i = place.strides
        layout = Layout(
            (p.B, 1, p.N_q, t.n_c),  # the n_c lanes of a row read the same element
            (s_b if len(table.values) > 1 else 0, 0, s_i, 0),
            place.itemsize,
            place.address + (p.N_k - p.N_q) * s_i,
        )
        first_row = max(p.N_q - p.N_k, 0)  # the rows before it precede the keys
        counts = sweep(Pattern.registers(t), layout, p.H, bounds_asked, first_row)
        moves.add(table.name, "mask", "load", place.itemsize, counts)
    for part, (array, _) in mask.arrays.items():
        moves.add(array.name, "mask", "load", 1, mask.reads(part, visits.masked_tiles))


# ---- one tile's accesses ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which element of a tile each lane accesses.

    Attributes
    ----------
    row, column : int arrays, (warp instructions, 32)
        Each lane's element; a lane outside the valid part of the tile is idle.
    shape : (rows, columns)
        Size of the tile.
    width : int
        Neighbours along the row that move together.
    """

    row: Ints
    column: Ints
    shape: tuple[int, int]
    width: int = 1

    @classmethod
    def copy(cls, rows: int, columns: int, threads: int, width: int = 1) -> "Pattern":
        """Neighbouring threads take neighbouring pieces, row after row (`tile.loader`)."""
        pieces = columns // width
        piece = np.arange(ceil_div(rows * pieces, threads) * threads)
        row, column = piece // pieces, piece % pieces * width
        return cls(_warps(row, threads), _warps(column, threads), (rows, columns), width)

    @classmethod
    def registers(cls, tiling: Tiling, groups: int = 1, C: int = 1, width: int = 1) -> "Pattern":
        """Each thread takes its register tile: rows ty + r*n_r, columns C*(tx + g*n_c) + c.

        On a matrix of one column (L, l, m) that is the lane tx = 0 of each row.
        """
        n_r, n_c, threads = tiling.n_r, tiling.n_c, tiling.threads
        loops = range(tiling.R_r), range(groups), range(0, C, width), range(threads)
        r, g, c, tid = np.meshgrid(*loops, indexing="ij")
        row, column = tid // n_c + r * n_r, C * (tid % n_c + g * n_c) + c
        shape = (tiling.B_r, C * groups * n_c)
        return cls(_warps(row, threads), _warps(column, threads), shape, width)

    @classmethod
    def of_Q(cls, problem: Problem) -> "Pattern":
        """Load of a tile of Q."""
        t = problem.tiling
        return cls.copy(t.B_r, problem.d, t.threads, problem.load_width)

    @classmethod
    def of_K(cls, problem: Problem) -> "Pattern":
        """Load of a tile of K or V."""
        t = problem.tiling
        return cls.copy(t.B_c, problem.d, t.threads, problem.load_width)

    @classmethod
    def of_O(cls, problem: Problem, width: int) -> "Pattern":
        """The register tile of O."""
        C, groups = problem.tiling.columns_of_O(problem.d, problem.dtype)
        return cls.registers(problem.tiling, groups, C, width)

    @classmethod
    def of_dK(cls, problem: Problem) -> "Pattern":
        """The register tile of dK and dV: keys C_k*(ty + g*n_r) + c, columns of O."""
        t, width = problem.tiling, problem.gradient_width
        C, groups = t.columns_of_O(problem.d, problem.dtype)
        C_k, G_k = t.keys_of_dK(problem.dtype)
        loops = range(C_k * G_k), range(groups), range(0, C, width), range(t.threads)
        r, g, c, tid = np.meshgrid(*loops, indexing="ij")
        row = C_k * (tid // t.n_c + r // C_k * t.n_r) + r % C_k
        column = C * (tid % t.n_c + g * t.n_c) + c
        shape = (t.B_c, C * groups * t.n_c)
        return cls(_warps(row, t.threads), _warps(column, t.threads), shape, width)

    @classmethod
    def accumulators(cls, tiling: Tiling, d: int, width: int) -> "Pattern":
        """fa3's stores of O: lane l of a quad has the 8 columns from 8 * (4 * g + l) on.

        Of its two rows, the first is ``lane // 4`` of the 16 of its warp.
        """
        threads = tiling.threads
        groups = range(0, ceil_div(d, 16) * 2, 4)
        loops = range(2), groups, range(0, 8, width), range(threads)
        r, g, at, tid = np.meshgrid(*loops, indexing="ij")
        row = tid // WARP * 16 + tid % WARP // 4 + 8 * r
        column = 8 * (g + tid % 4) + at
        shape = (tiling.B_r, 8 * (max(groups) + 4))
        return cls(_warps(row, threads), _warps(column, threads), shape, width)

    @classmethod
    def rows_of_warps(cls, tiling: Tiling) -> "Pattern":
        """fa3's store of L: the first two lanes of a quad have one of its two rows each."""
        tid = np.arange(tiling.threads)
        row = tid // WARP * 16 + tid % WARP // 4 + 8 * (tid % 4)
        row[tid % 4 > 1] = -1
        threads = tiling.threads
        return cls(_warps(row, threads), _warps(0 * row, threads), (tiling.B_r, 1))

    @classmethod
    def by_quads(cls, tiling: Tiling) -> "Pattern":
        """All four lanes of a quad read their two rows' elements of a matrix of one column."""
        r, tid = np.meshgrid(range(2), range(tiling.threads), indexing="ij")
        row = tid // WARP * 16 + tid % WARP // 4 + 8 * r
        threads = tiling.threads
        return cls(_warps(row, threads), _warps(0 * row, threads), (tiling.B_r, 1))

    def counts(
        self, strides: tuple[int, int], rows: tuple[int, int], columns: int, starts: list[int]
    ) -> Counts:
        """What visits to tiles move, of which ``starts[k]`` begin at byte k of a sector.

        `strides` are the bytes from row to row and from column to column; valid are the rows
        ``rows[0] <= row < rows[1]`` and the first `columns` columns.
        """
        active = (self.row >= rows[0]) & (self.row < rows[1]) & (self.column < columns)
        offset = self.row * strides[0] + self.column * strides[1]
        visits = sum(starts)
        return (
            visits * self.width * int(active.sum()),
            visits * int(active.any(axis=-1).sum()),
            sum(n * _sectors(offset + byte, active) for byte, n in enumerate(starts) if n),
        )


@dataclass(frozen=True, eq=False)
class StoredBoxes(Pattern):
    """Copies of boxes of 64 columns to memory: a request each, sectors row by row."""

    boxes: int = 1

    @classmethod
    def of(cls, rows: int, d: int, pieces: int = 1) -> Self:
        """A tile of `rows` x d, its rows in so many pieces."""
        across = ceil_div(d, BOX_COLUMNS)
        axes = range(across), range(rows), range(BOX_COLUMNS)
        box, row, column = (x.reshape(-1, BOX_COLUMNS) for x in np.meshgrid(*axes, indexing="ij"))
        shape = (rows, across * BOX_COLUMNS)
        return cls(row, box * BOX_COLUMNS + column, shape, boxes=across * pieces)

    def counts(
        self, strides: tuple[int, int], rows: tuple[int, int], columns: int, starts: list[int]
    ) -> Counts:
        """As `Pattern.counts`; a box is asked for even if nothing of it exists."""
        elements, _, sectors = super().counts(strides, rows, columns, starts)
        return elements, sum(starts) * self.boxes, sectors


class Boxes(StoredBoxes):
    """Boxes that are loaded: whole, with zeros for what is missing (`hbm.CountedBoxes`)."""

    def counts(
        self, strides: tuple[int, int], rows: tuple[int, int], columns: int, starts: list[int]
    ) -> Counts:
        """As `StoredBoxes.counts`, and the zeros, in pieces of 32 bytes of each row."""
        elements, requests, sectors = super().counts(strides, rows, columns, starts)
        exist, width, itemsize = elements // columns, self.shape[1], DTYPE_BYTES["fp16"]
        missing = sum(starts) * self.shape[0] - exist  # rows
        zeros = ceil_div((width - columns) * itemsize, SECTOR)
        sectors += exist * zeros + missing * width * itemsize // SECTOR
        return elements, requests, sectors


def _warps(place: Ints, threads: int) -> Ints:
    """`place`, its last axis the threads of a block, by warp; lanes without a thread get -1."""
    place = place.reshape(-1, threads)
    missing = np.full((len(place), -threads % WARP), -1)
    return np.concatenate([place, missing], axis=1).reshape(-1, WARP)


def _sectors(address: Ints, active: Bools) -> int:
    """Distinct sectors among the active lanes (last axis), added up over warp instructions."""
    nowhere = np.iinfo(np.int64).max
    sector = np.sort(np.where(active, address // SECTOR, nowhere), axis=-1)
    distinct = (sector[..., 1:] != sector[..., :-1]).sum() + sector[..., 0].size
    return int(distinct - (sector[..., -1] == nowhere).sum())


# ---- all tiles of an array --------------------------------------------------------------------


def _each(n: int) -> Ints:
    """Visits (B, H, tiles), an axis of size 1 standing for all: n each."""
    return np.full((1, 1, 1), n, np.int64)


def sweep(
    pattern: Pattern, layout: Layout, heads: int, visits: Ints | None = None, first_row: int = 0
) -> Counts:
    """Lay a pattern on every tile of an array.

    Parameters
    ----------
    pattern : Pattern
        The accesses of one visit.
    layout : Layout
        Of the array, (B, H_a, N, M); its tiles are cut along N and M.
    heads : int
        Query heads H; head h visits head ``h // (H // H_a)`` of the array.
    visits : int array, (B, H, tiles along N), optional
        How often each is visited; an axis of size 1 stands for all. Default: once.
    first_row : int
        No access before this row.
    """
    (B, H_a, N, M), (s_b, s_h, s_row, s_column) = layout.shape, layout.strides
    rows, columns = pattern.shape
    visits = _each(1) if visits is None else visits
    group = heads // H_a if H_a else 0
    split = (H_a, group) if visits.shape[1] > 1 else (1, 1)
    visits = visits.reshape(visits.shape[0], *split, visits.shape[2], 1)
    sums = [0, 0, 0]
    for i, i_end, *valid_rows in _runs(N, rows, min(first_row, N)):
        here = visits if visits.shape[3] == 1 else visits[:, :, :, i:i_end]
        for j, j_end, _, valid_columns in _runs(M, columns):
            axes = [(B, s_b), (H_a, s_h), (group, 0)]
            axes += [(i_end - i, rows * s_row), (j_end - j, columns * s_column)]
            address = layout.address + i * rows * s_row + j * columns * s_column
            valid = (valid_rows[0], valid_rows[1]), valid_columns
            counts = pattern.counts((s_row, s_column), *valid, _starts(here, axes, address))
            sums = [a + b for a, b in zip(sums, counts, strict=True)]
    return sums[0], sums[1], sums[2]


def _runs(N: int, size: int, first: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """Runs of tiles alike: (tile, end tile, first valid row of each, end of its valid rows)."""
    edges = {0, first // size, ceil_div(first, size), N // size, ceil_div(N, size)}
    for tile, end in pairwise(sorted(edges)):
        row = tile * size
        yield tile, end, min(max(first - row, 0), size), min(N - row, size)


def _starts(visits: Ints, axes: list[tuple[int, int]], address: int) -> list[int]:
    """How many visits start at each byte of a sector.

    Place (x, y, ...) starts at ``address + x*step_x + y*step_y + ...``; `axes` are the pairs
    (n, step). Along an axis, places ``32 / gcd(step, 32)`` apart start at the same byte.
    """
    start = np.array(address % SECTOR)
    for axis, (n, step) in enumerate(axes):
        period = SECTOR // math.gcd(step, SECTOR)
        place = np.arange(period)
        start = start[..., None] + place * (step % SECTOR)
        if visits.shape[axis] == 1:
            alike = (n - place + period - 1) // period
            visits = visits * alike.reshape(-1, *(1,) * (visits.ndim - axis - 1))
        else:
            lead = (slice(None),) * axis
            every = [visits[(*lead, slice(x, None, period))].sum(axis) for x in range(period)]
            visits = np.stack(every, axis)
    starts = np.zeros(SECTOR, np.int64)
    np.add.at(starts, start % SECTOR, visits)
    return [int(n) for n in starts]


# ---- what a mask lets a kernel visit ----------------------------------------------------------

_UNIFORM = (  # masks alike in all batches and heads
    masking._NONE, masking._CAUSAL, masking._CAUSAL_SKIP, masking._WINDOW, masking._PREFIX
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Visits:
    """The tiles (i, j) that a method visits; an axis of size 1 stands for all batches or heads.

    Attributes
    ----------
    per_row : (B, H, T_r)
        Key tiles visited by row tile i.
    per_column : (B, H, T_c)
        Row tiles that visit key tile j.
    masked : (B, H, T_r)
        Those of `per_row` that are not FULL.
    asked : (B, H, T_r)
        Key tiles whose kind is asked.
    masked_tiles : dict of (b, h) to bool (T_r, T_c)
        `masked` tile by tile, for masks that are no intervals.
    """

    per_row: Ints
    per_column: Ints
    masked: Ints
    asked: Ints
    masked_tiles: dict[tuple[int, int], Bools]


class _Mask:
    """A problem's mask, its functions called on the host.

    Attributes
    ----------
    parts : list of (rule, args)
        The masks that are joined, in the order in which a score asks them.
    args : tuple
        Their arguments as the joined functions take them.
    tables : list of Table
        Documents.
    arrays : dict
        Number of a boolean part to its array and the place of that, of size 1 along the axes it
        broadcasts.
    batches, heads : int
        How many may differ, 1 or all.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.parts: list[tuple[Any, tuple[Any, ...]]] = []
        self.tables: list[Table] = []
        self.arrays: dict[int, tuple[BooleanArray, Layout]] = {}
        self.batches = self.heads = 1
        self.args = self._add(problem.mask.rule, problem.mask.args)
        t = problem.tiling
        functions = tile_functions(problem.mask.rule, t.B_r, t.B_c, lambda f: f)
        self.tile_range, _, (self.row_bounds, _) = functions

    def _add(self, rule: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note a mask, or those that it joins; returns its arguments with arrays on the host."""
        if isinstance(rule, masking._Joined):
            return self._add(rule.a, args[0]), self._add(rule.b, args[1])
        p, t, batches, heads = self.problem, self.problem.tiling, False, False
        if rule is masking._BOOLEAN:
            visible = args[0].to_host(args[0].values)
            visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape) != 0
            batches, heads = (n > 1 for n in visible.shape[:2])
            self.arrays[len(self.parts)] = args[0], _layout(p, args[0].name, visible)
            args = (
                np.broadcast_to(visible, (p.B, p.H, p.N_q, p.N_k)),
                np.broadcast_to(_kinds(visible, t), (p.B, p.H, t.T_r(p.N_q), t.T_c(p.N_k))),
                *(t.B_r, t.B_c, p.N_k - p.N_q),
            )
        elif rule is masking._DOCUMENTS:
            self.tables += args
            args = tuple(table.values for table in args)
            batches = len(args[0]) > 1
        else:
            _check_no_table(args)
            args = tuple(p.number(arg) for arg in args)
            batches = heads = rule not in _UNIFORM
        self.batches = p.B if batches else self.batches
        self.heads = p.H if heads else self.heads
        self.parts.append((rule, args))
        return args

    @property
    def copies(self) -> int:
        """Batches and heads for which one of those that may differ stands."""
        return (self.problem.B // self.batches) * (self.problem.H // self.heads)

    @property
    def ends(self) -> tuple[Ints, Ints]:
        """Position on the key axis of the first and of the last row of each row tile."""
        p, B_r = self.problem, self.problem.tiling.B_r
        first = np.arange(0, p.N_q, B_r) + p.N_k - p.N_q
        return first, np.minimum(first + B_r, p.N_k) - 1

    def every_tile(self) -> Visits:
        """All tiles, masked score by score: standard attention."""
        p, t = self.problem, self.problem.tiling
        T_r, T_c = t.T_r(p.N_q), t.T_c(p.N_k)
        tiles: Bools = np.broadcast_to(True, (T_r, T_c))
        masked_tiles = {(b, h): tiles for b in range(self.batches) for h in range(self.heads)}
        return Visits(_each(T_c), _each(T_r), _each(T_c), _each(0), masked_tiles)

    def in_range(self, B_r: int, B_c: int, least: int = 1) -> Ints:
        """How often each key tile is visited, (B, H, T_c), by fa3: (B, H) as in `Visits`.

        By all row tiles in whose range it is; the first `least` also by those that have none.
        """
        p, differ = self.problem, (self.batches, self.heads)
        T_r, T_c = ceil_div(p.N_q, B_r), ceil_div(p.N_k, B_c)
        tile_range, *_ = tile_functions(p.mask.rule, B_r, B_c, lambda f: f)
        per_column = np.zeros((*differ, T_c), np.int64)
        for b, h in np.ndindex(differ):
            ranges = [tile_range(self.args, b, h, i, p.N_q, p.N_k)[:2] for i in range(T_r)]
            begin, end = np.array([r if r[0] < r[1] else (0, least) for r in ranges], np.int64).T
            entered, left = (np.bincount(j, minlength=T_c + 1)[:T_c] for j in (begin, end))
            per_column[b, h] = np.cumsum(entered - left)
        return per_column

    def seen_by(self, B_r: int, B_c: int) -> Ints:
        """How many key tiles each row tile sees, (B, H, T_r), as fa3 counts backward.

        From that of the first row's first key to that of the last row's last.
        """
        p, differ = self.problem, (self.batches, self.heads)
        per_row = np.zeros((*differ, ceil_div(p.N_q, B_r)), np.int64)
        for b, h, i in np.ndindex(per_row.shape):
            first, last = i * B_r, min((i + 1) * B_r, p.N_q) - 1
            _, lo, _ = self.row_bounds(self.args, b, h, first, p.N_q, p.N_k)
            _, _, hi = self.row_bounds(self.args, b, h, last, p.N_q, p.N_k)
            per_row[b, h, i] = max(ceil_div(hi, B_c) - lo // B_c, 0)
        return per_row

    def visits(self) -> Visits:
        """The tiles in the range of their row tile that are not EMPTY: fa1 and fa2."""
        p, B_c, differ = self.problem, self.problem.tiling.B_c, (self.batches, self.heads)
        T_r, T_c = p.tiling.T_r(p.N_q), p.tiling.T_c(p.N_k)
        per_row, masked, asked = (np.zeros((*differ, T_r), np.int64) for _ in range(3))
        per_column = np.zeros((*differ, T_c), np.int64)
        masked_tiles = {}
        i_first, i_last = self.ends
        for b, h in np.ndindex(differ):
            # Row tile i visits begin <= j < end, of which full_begin <= j < full_end are FULL.
            ranges = [self.tile_range(self.args, b, h, i, p.N_q, p.N_k) for i in range(T_r)]
            begin, end, lo_last, hi_first = np.array(ranges, np.int64).T
            asked[b, h] = end - begin
            full_begin, full_end = -(-lo_last // B_c), hi_first // B_c
            kinds = None  # tile by tile, where they are no intervals
            for rule, args in self.parts:
                if rule.tile is masking._causal_tile:
                    end = np.minimum(end, i_last // B_c + 1)
                    full_end = np.minimum(full_end, (i_first + 1) // B_c)
                elif rule.tile is not None:
                    here = self._ask_tiles(rule, args, b, h)
                    kinds = here if kinds is None else np.minimum(kinds, here)
                elif rule.visible is not None:
                    full_end = np.zeros_like(full_end)
            end, full_begin = np.maximum(begin, end), np.maximum(begin, full_begin)
            full_end = np.maximum(full_begin, np.minimum(end, full_end))
            if kinds is None:
                entered, left = (np.bincount(j, minlength=T_c + 1)[:T_c] for j in (begin, end))
                per_row[b, h], per_column[b, h] = end - begin, np.cumsum(entered - left)
                masked[b, h] = end - begin - (full_end - full_begin)
            else:
                visited = _between(begin, end, T_c) & (kinds != EMPTY)
                full = _between(full_begin, full_end, T_c) & (kinds == FULL)
                per_row[b, h], per_column[b, h] = visited.sum(axis=1), visited.sum(axis=0)
                masked_tiles[b, h] = visited & ~full
                masked[b, h] = masked_tiles[b, h].sum(axis=1)
        return Visits(per_row, per_column, masked, asked, masked_tiles)

    def _ask_tiles(self, rule: Any, args: tuple[Any, ...], b: int, h: int) -> Ints:
        """What a rule says of each tile, (T_r, T_c)."""
        N_k, B_c = self.problem.N_k, self.problem.tiling.B_c
        rows = [(int(first), int(last)) for first, last in zip(*self.ends, strict=True)]
        keys = [(j, min(j + B_c, N_k) - 1) for j in range(0, N_k, B_c)]
        kinds = [[rule.tile(args, b, h, *row, *key) for key in keys] for row in rows]
        return np.array(kinds, np.int64).reshape(len(rows), len(keys))

    def reads(self, part: int, tiles: dict[tuple[int, int], Bools]) -> Counts:
        """What a boolean part reads, score by score, in the given tiles."""
        t, (_, place) = self.problem.tiling, self.arrays[part]
        shape_and_steps = zip(place.shape, place.strides, strict=True)
        s_b, s_h, s_row, s_column = (0 if n == 1 else step for n, step in shape_and_steps)
        S_ij = Pattern.registers(t, t.R_c)
        elements = requests = sectors = 0
        for (b, h), masked in tiles.items():
            reach = self._reach(part, b, h)
            for i in np.flatnonzero(masked.any(axis=1)):
                j = np.flatnonzero(masked[i])[:, None, None]
                row, column = i * t.B_r + S_ij.row, j * t.B_c + S_ij.column
                active = (S_ij.row >= 0) & reach[row, column]
                address = place.address + b * s_b + h * s_h + row * s_row + column * s_column
                elements += int(active.sum())
                requests += int(active.any(axis=-1).sum())
                sectors += _sectors(address, active)
        return elements * self.copies, requests * self.copies, sectors * self.copies

    def _reach(self, part: int, b: int, h: int) -> Bools:
        """Which scores get as far as a part: in their row's bounds, visible to the parts before.

        For every place of every tile, (T_r * B_r, T_c * B_c).
        """
        p, t = self.problem, self.problem.tiling
        reach = np.zeros((t.T_r(p.N_q) * t.B_r, t.T_c(p.N_k) * t.B_c), bool)
        bounds = [self.row_bounds(self.args, b, h, row, p.N_q, p.N_k) for row in range(p.N_q)]
        i, lo, hi = np.array(bounds, np.int64).T
        reach[: p.N_q] = _between(lo, hi, reach.shape[1])
        for rule, args in self.parts[:part]:
            if rule.visible is not None:
                row, j = np.nonzero(reach)
                visible: Any = partial(rule.visible, args, b, h)
                if rule not in (masking._CAUSAL_SKIP, masking._BOOLEAN):  # these take arrays
                    visible = np.vectorize(visible, otypes=[bool])
                reach[row, j] = visible(i[row], j)
        return reach


def _between(begin: Ints, end: Ints, n: int) -> Bools:
    """``begin[i] <= j < end[i]`` for j < n."""
    j = np.arange(n)
    return (begin[:, None] <= j) & (j < end[:, None])


def _kinds(visible: Bools, tiling: Tiling) -> Ints:
    """EMPTY, PARTIAL or FULL for each tile of a boolean mask (B, H, N_q, N_k)."""
    some = every = visible
    for axis, size in ((2, tiling.B_r), (3, tiling.B_c)):
        begin = np.arange(0, visible.shape[axis], size)
        some = np.logical_or.reduceat(some, begin, axis)
        every = np.logical_and.reduceat(every, begin, axis)
    return some.astype(np.int64) + every


def _layout(problem: Problem, name: str, values: NDArray[Any]) -> Layout:
    """Where an array of the mask lies."""
    return problem.layouts.get(name) or Layout.contiguous(values.shape, values.itemsize)


# ---- the rows ---------------------------------------------------------------------------------


class _Moves:
    """The traffic of a problem, phase by phase."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._counts: dict[tuple[str, str, str], list[int]] = {}

    def add(self, array: str, phase: str, op: str, itemsize: int, counts: Counts) -> None:
        """Add to the row (array, phase, op)."""
        elements, requests, sectors = counts
        new = elements, elements * itemsize, requests, sectors
        row = self._counts.setdefault((array, phase, op), [0, 0, 0, 0])
        row[:] = [a + b for a, b in zip(row, new, strict=True)]

    def tiles(
        self,
        array: str,
        phase: str,
        op: str,
        pattern: Pattern,
        visits: Ints | None = None,
        heads: int | None = None,
    ) -> None:
        """`pattern` on every tile of an array, as often as the `heads` visit it (default: H)."""
        layout = self.problem.layout(array)
        if len(layout.shape) == 3:  # L, l, m, D and dL are matrices of one column
            shape, strides = (*layout.shape, 1), (*layout.strides, 0)
            layout = Layout(shape, strides, layout.itemsize, layout.address)
        heads = self.problem.H if heads is None else heads
        self.add(array, phase, op, layout.itemsize, sweep(pattern, layout, heads, visits))

    def block(self, array: str, phase: str, itemsize: int, times: int) -> None:
        """`times`, all threads of a block read one element."""
        threads = self.problem.tiling.threads
        warps = ceil_div(threads, WARP)
        self.add(array, phase, "load", itemsize, (times * threads, times * warps, times * warps))

    def rows(self) -> list[Traffic]:
        """A row for each (array, phase, op) that moves anything."""
        columns = tuple(self.problem.columns().values())
        return [
            Traffic(*(*columns, *key, *numbers, None, "predicted"))
            for key, numbers in self._counts.items()
            if any(numbers)
        ]


# ---- the papers' formulas ---------------------------------------------------------------------


def closed_form(problem: Problem) -> dict[str, int]:
    """Elements moved by full or causal attention, or its backward pass, as formulas.

    For each head of each batch, with T_r = ceil(N_q / B_r) and T_c = ceil(N_k / B_c):

    * fa2 (Dao 2023, Algorithm 1) loads ``N_q d + 2 N_k d T_r`` and stores ``N_q d + N_q``: K and V
      once for each row tile, O and L once. B_c does not appear.
    * fa1 (Dao et al. 2022, Algorithm 1) loads ``2 N_k d + T_c (2 N_q d + 2 N_q)`` and stores
      ``(T_c + 1) (N_q d + 2 N_q)``, line 2 included. The pass that writes L, and rounds O, adds
      what it moves.
    * standard (Algorithm 0) moves S and P. A softmax that holds a row loads S once, and the sum is
      ``4 N_q N_k``; here it is loaded twice, ``5 N_q N_k``. The paper counts Q, K and V once; the
      tiled products load ``N_q d T_c + 2 N_k d T_r`` of them.

    fa3 as fa2; but a row tile that sees no key loads one tile of them.

    Backward, K, V, dK and dV count once for each key head, and N_q d T_c are the rows streamed past
    the key tiles:

    * fa2 (Dao 2023, Algorithm 2) loads ``2 N_k d`` of K and V, streams Q and dO and adds as much to
      dQ: ``3 N_q d T_c``. The second pass of the deterministic form loads Q, dO, K and V as the
      forward pass does, and adds nothing.
    * fa1 (Dao et al. 2022, Algorithm 4) streams Q, O and dO, and dQ both ways: ``5 N_q d T_c``.
    * standard stores ``2 N_q N_k`` of P and dS and loads ``3 N_q N_k``.
    * fa3 as fa2, but dQ_acc is of whole tiles, d rounded up to 64. The kernel of dQ alone
      (deterministic, or d > 128) streams K and V past 128 query rows, and four lanes read each L
      and D; with d > 128, those of dK and dV stream Q and dO each.

    Causal fa1 and fa2 visit the tiles up to the diagonal: of row tile i the first
    ``ceil((min((i+1) B_r, N_q) + N_k - N_q) / B_c)``.

    Parameters
    ----------
    problem : Problem
        Mask none, causal or causal_skip.

    Returns
    -------
    dict
        "array op" to elements, all phases, heads and batches together.

    Raises
    ------
    ValueError
        Another mask.
    """
    p, t = problem, problem.tiling
    N_q, N_k, d = p.N_q, p.N_k, p.d
    visits = row_tiles(p)
    keys = sum(min(N_k, tiles * t.B_c) for _, tiles in visits)  # streamed past the row tiles
    rows = sum(rows * tiles for rows, tiles in visits)  # streamed past the key tiles
    if p.method.startswith("fa3_backward"):
        return _closed_form_fa3_backward(p, rows)
    if p.method in METHODS_BACKWARD:
        return _closed_form_backward(p, keys, rows)
    if p.method in ("fa2", "fa3"):
        moved = {"Q load": N_q * d, "K load": keys * d, "V load": keys * d}
        moved |= {"O store": N_q * d, "L store": N_q}
    elif p.method == "fa1":
        O = p.o_acc_name
        once = N_k * d if N_q else 0
        moved = {"Q load": rows * d, "K load": once, "V load": once}
        moved |= {f"{O} load": rows * d, f"{O} store": (rows + N_q) * d, "L store": N_q}
        moved |= {f"{name} {op}": rows + N_q for name in "lm" for op in ("load", "store")}
        if p.rounds:
            moved |= {"O_acc load": (rows + N_q) * d, "O store": N_q * d}
    else:
        moved = {"Q load": rows * d, "K load": keys * d, "V load": keys * d}
        moved |= {"S store": N_q * N_k, "S load": 2 * N_q * N_k}
        moved |= {"P store": N_q * N_k, "P load": N_q * N_k}
        moved |= {"O store": N_q * d, "L store": N_q}
    return {name: p.B * p.H * elements for name, elements in moved.items()}


def _closed_form_backward(problem: Problem, keys: int, rows: int) -> dict[str, int]:
    """`closed_form` of the backward methods, given what is streamed past row and key tiles."""
    p = problem
    N_q, N_k, d = p.N_q, p.N_k, p.d
    once = {f"{name} load": N_k * d for name in "KV"} | {f"d{name} store": N_k * d for name in "KV"}
    moved = {"Q load": rows * d, "dO load": rows * d, "L load": rows}  # per query head
    if p.method == "fa1_backward":
        moved |= {"O load": rows * d, "dL load": rows * p.dlse}
        moved |= {f"{p.dq_acc_name} load": rows * d, f"{p.dq_acc_name} store": (rows + N_q) * d}
    else:
        moved |= {"D load": rows, "D store": N_q, "dL load": N_q * p.dlse}
        moved |= {"O load": N_q * d, "dO load": (rows + N_q) * d}
    if p.method == "fa2_backward":
        moved |= {f"{p.dq_acc_name} atomic": rows * d, f"{p.dq_acc_name} store": N_q * d}
    if p.method == "fa2_backward_deterministic":
        moved |= {"Q load": (rows + N_q) * d, "dO load": (rows + 2 * N_q) * d, "dQ store": N_q * d}
        moved |= {"L load": rows + N_q, "D load": rows + N_q}
        again = {"K load": keys * d, "V load": keys * d}
    elif p.method == "standard_backward":
        moved |= {"Q load": 2 * rows * d, "dO load": (2 * rows + N_q) * d, "dQ store": N_q * d}
        moved |= {"P store": N_q * N_k, "P load": N_q * N_k}
        moved |= {"dS store": N_q * N_k, "dS load": 2 * N_q * N_k}
        once |= {"K load": 0, "V load": 0}
        again = {"K load": 2 * keys * d, "V load": keys * d}
    else:
        again = {}
        if p.rounds:
            moved |= {"dQ_acc load": moved.get("dQ_acc load", 0) + N_q * d, "dQ store": N_q * d}
    total = {name: p.B * p.H * n for name, n in (moved | again).items()}
    return total | {name: p.B * p.H_k * n + total.get(name, 0) for name, n in once.items()}


def _closed_form_fa3_backward(problem: Problem, rows: int) -> dict[str, int]:
    """`closed_form` of fa3 backward, given the rows that are streamed past its key tiles."""
    p, t = problem, problem.tiling
    N_q, N_k, d = p.N_q, p.N_k, p.d
    if not N_q * N_k:
        return {}
    # Those of Q and dO past the keys: of dV and of dK, or of both.
    passes = 2 if p.splits_gradients else 1
    once = {"K load": passes * N_k * d, "V load": N_k * d, "dK store": N_k * d, "dV store": N_k * d}
    moved = {"Q load": passes * rows * d, "L load": passes * rows, "D load": rows}
    moved |= {"dO load": (passes * rows + N_q) * d, "O load": N_q * d, "dL load": N_q * p.dlse}
    moved |= {"D store": N_q, "dQ store": N_q * d}
    if p.adds_dQ:
        tile = p.layout("dQ_acc").shape[-1]
        visits, whole = sum(tiles for _, tiles in row_tiles(p)), t.T_r(N_q) * tile
        moved |= {"dQ_acc atomic": visits * tile, "dQ_acc store": whole, "dQ_acc load": whole}
    else:
        of_dQ = row_tiles(replace(p, tiling=Tiling(2 * WARPGROUP_ROWS, GRADIENT_ROWS, 64, 4)))
        keys = sum(min(N_k, tiles * GRADIENT_ROWS) for _, tiles in of_dQ)
        moved |= {"K load": keys * d, "V load": keys * d}
        more = {"Q": N_q * d, "dO": N_q * d, "L": 4 * N_q, "D": 4 * N_q}
        moved |= {f"{name} load": moved[f"{name} load"] + n for name, n in more.items()}
    total = {name: p.B * p.H * n for name, n in moved.items()}
    return total | {name: p.B * p.H_k * n + total.get(name, 0) for name, n in once.items()}


def row_tiles(problem: Problem) -> list[tuple[int, int]]:
    """Of each row tile, its rows and how many key tiles it visits, from the first key on."""
    p, t = problem, problem.tiling
    if p.mask.rule not in _UNIFORM[:3]:
        raise ValueError(f"mask: got {p.mask.name}, accepted: none, causal, causal-skip")
    fa3 = p.method.startswith("fa3")  # it visits all tiles in range; forward, at least one
    standard = p.method in ("standard", "standard_backward")
    rule = p.mask.rule
    full = rule is masking._NONE or standard or (fa3 and rule is not masking._CAUSAL)
    tiles = []
    for first in range(0, p.N_q, t.B_r):
        end = min(first + t.B_r, p.N_q)
        seen = p.N_k if full else max(0, end + p.N_k - p.N_q)
        tiles.append((end - first, max(ceil_div(seen, t.B_c), p.method == "fa3")))
    return tiles


def compulsory(problem: Problem) -> dict[str, int]:
    """Bytes that any method must move: Q, K and V read once, O and L written once.

    Backward: Q, K, V, O, L, dO and dL, if there is one, read; dQ, dK and dV written.

    What reaches DRAM when the caches hold all that is read again. With grouped heads, K and V count
    once a key/value head.
    """
    names = ["Q", "K", "V", "O", "L"]
    if problem.method in METHODS_BACKWARD:
        names += ["dO", *(["dL"] if problem.dlse else []), "dQ", "dK", "dV"]
    layouts = {name: problem.layout(name) for name in names}
    return {name: math.prod(a.shape) * a.itemsize for name, a in layouts.items()}


def theta(method: str, N: int, d: int, M: int) -> Fraction:
    """The order of accesses to HBM, Theorem 2 of Dao et al. (2022): the expression in its Theta.

    With M elements of on-chip memory, d <= M <= N d: standard attention Theta(N d + N^2),
    FlashAttention Theta(N^2 d^2 / M). FlashAttention-2 (Dao 2023) and -3 claim no
    other order.

    At fixed M both grow as N^2; they differ by d^2 / M. Of FlashAttention-2, the stores, the loads
    of Q and the memory are linear in N.

    Raises
    ------
    ValueError
        Unknown method, or M outside [d, N d], of which the theorem says nothing.
    """
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}, accepted: {', '.join(METHODS)}")
    if not d <= M <= N * d:
        raise ValueError(f"M: got {M}, accepted: d to N d, {d} to {N * d}")
    return Fraction(N * d + N**2) if method == "standard" else Fraction(N**2 * d**2, M)


def theorem_2(N: int, d: int, M: int) -> dict[str, Fraction]:
    """Both sides of Theorem 2 of Dao et al. (2022), arXiv:2205.14135: `theta` by method."""
    return {method: theta(method, N, d, M) for method in ("standard", "fa1")}


def lower_bound(N: int, d: int, M: int) -> float:
    """The order of accesses to HBM below which no exact attention gets.

    Dao et al. (2022), Proposition 3: no algorithm needs o(N^2 d^2 / M) for all M in [d, N d]; the
    proof uses M = Theta(N d) alone. Saha and Ye (2024), arXiv:2402.07443, prove it for each M:
    Omega(N^2 d^2 / M) where M >= d^2, fast matrix multiplication allowed, so FlashAttention is
    optimal up to a constant; where M < d^2, Theta(N^2 d / sqrt(M)) for combinatorial algorithms,
    and FlashAttention is not. The bound is the smaller of the two.
    """
    return N**2 * d * min(d / M, 1 / math.sqrt(M))


# ---- DRAM: a model, not a count ---------------------------------------------------------------

SOFTMAX_ROWS = 4  # rows of a block of standard attention's softmax, a warp each
STREAMING = {  # the kernels whose blocks in flight decide what DRAM moves
    "standard": ("standard_softmax", "standard_output"),
    "fa1": ("fa1_loop",),
    "fa2": ("fa2",),
}

Moved = dict[tuple[str, str, str], int]  # (kernel, array, op) to bytes


def dram(problem: Problem, slots: Mapping[str, int], cache: int = 0) -> Moved:
    """Bytes that each kernel moves between DRAM and the chip: a model of waves, not a count.

    Blocks start in the order of their index. W of them, a wave, are on the GPU at a time and go
    through K and V in step, so that a wave reads K and V of a key/value head once, as far as its
    longest row tile sees. Each kernel starts with an empty L2.

    * fa2: Q once; K and V once for each pair of a wave and a head. One head without a mask reads
      ``N d (1 + 2 ceil(T_r / W))`` elements: 3 N d up to N = B_r W, about 2 N^2 d / (B_r W) beyond,
      which is Theorem 2 with the tiles of the whole GPU as M.
    * fa1, one block a head: K and V once for each pair; Q, O, l and m at each visit of a row tile,
      or once if `cache` holds those of a wave's heads.
    * standard: S and P stored; P loaded once, S twice, or once if `cache` holds the rows in flight;
      K for each row tile, or once if `cache` holds it beside a row of tiles of S; V as fa2's.

    Parameters
    ----------
    problem : Problem
        Mask none, causal or causal_skip; arrays taken as contiguous.
    slots : mapping of str to int
        W by kernel, blocks an SM holds times SMs: of "fa2"; of "fa1_loop"; of "standard_softmax"
        and "standard_output".
    cache : int
        Bytes of L2 in which something read again is still found. With 0 nothing outlasts a wave, a
        visit or a pass over a row, and the loads of fa2 are an upper bound as long as blocks
        keep in step.

    Returns
    -------
    dict
        (kernel, array, "load" or "store") to bytes, zeros left out.

    Raises
    ------
    ValueError
        Another mask or method, or no number of blocks for a kernel.

    Notes
    -----
    Where it holds: the number does not depend on how much of L2 one takes as `cache`, and blocks
    need not keep in step: fa2 in one wave, or with K and V that stay in L2 (docs/levels.md).

    Stores are what has to arrive. A counter of DRAM writes does not show them: at the end of a
    kernel dirty lines are still in L2.
    """
    if problem.method not in STREAMING:
        raise ValueError(f"method: got {problem.method!r}, accepted: {', '.join(STREAMING)}")
    W = {name: slots.get(name, 0) for name in STREAMING[problem.method]}
    if any(blocks < 1 for blocks in W.values()):
        raise ValueError(f"slots: got {dict(slots)}, accepted: 1 block or more of {', '.join(W)}")
    model = {"standard": _standard_dram, "fa1": _fa1_dram, "fa2": _fa2_dram}[problem.method]
    return {key: moved for key, moved in model(problem, W, cache).items() if moved}


def _fa2_dram(problem: Problem, W: dict[str, int], cache: int) -> Moved:
    p, name = problem, "fa2"
    reach = [min(p.N_k, tiles * p.tiling.B_c) for _, tiles in reversed(row_tiles(p))]
    e = DTYPE_BYTES[p.dtype]
    keys = _keys_streamed(p, reach, W[name], 2 * p.d * e, cache)
    rows = p.B * p.H * p.N_q
    return {
        (name, "Q", "load"): rows * p.d * e,
        (name, "K", "load"): keys * p.d * e,
        (name, "V", "load"): keys * p.d * e,
        (name, "O", "store"): rows * p.d * e,
        (name, "L", "store"): rows * acc_bytes(p.dtype),
    }


def _fa1_dram(problem: Problem, W: dict[str, int], cache: int) -> Moved:
    p, O = problem, problem.o_acc_name
    e, acc, heads, visits = DTYPE_BYTES[p.dtype], acc_bytes(p.dtype), p.B * p.H, row_tiles(p)
    visited = sum(rows for rows, tiles in visits if tiles)
    every_visit = sum(rows * tiles for rows, tiles in visits)
    loop = {"K": 0, "Q": 0}  # rows that the loop moves of K, and V; of Q, and O, l and m
    for first in range(0, heads, W["fa1_loop"]):
        end = min(first + W["fa1_loop"], heads)
        rows_and_accumulators = (end - first) * p.N_q * (p.d * (e + acc) + 2 * acc)
        kept = rows_and_accumulators <= cache
        loop["Q"] += (end - first) * (visited if kept else every_visit)
        group = p.H // p.H_k
        loop["K"] += ((end - 1) // group - first // group + 1) * p.N_k if p.N_q else 0
    width = {"Q": p.d * e, "K": p.d * e, "V": p.d * e, O: p.d * acc, "l": acc, "m": acc, "L": acc}
    all_rows = heads * p.N_q
    moved = {("fa1_loop", array, "load"): loop["K"] * width[array] for array in "KV"}
    moved["fa1_loop", "Q", "load"] = loop["Q"] * width["Q"]
    for array in (O, "l", "m"):
        moved["fa1_init", array, "store"] = all_rows * width[array]
        for op in ("load", "store"):
            moved["fa1_loop", array, op] = loop["Q"] * width[array]
        if array != O or p.rounds:
            moved["fa1_finish", array, "load"] = all_rows * width[array]
    moved["fa1_finish", "L", "store"] = all_rows * width["L"]
    if p.rounds:
        moved["fa1_finish", "O", "store"] = all_rows * p.d * e
    return moved


def _standard_dram(problem: Problem, W: dict[str, int], cache: int) -> Moved:
    p, B_r = problem, problem.tiling.B_r
    e, acc, heads, T_r = DTYPE_BYTES[p.dtype], acc_bytes(p.dtype), p.B * p.H, len(row_tiles(p))
    rows, row_of_S, row_of_V = heads * p.N_q, p.N_k * acc, p.d * e
    K_kept = p.N_k * p.d * e + B_r * row_of_S <= cache
    S_kept = min(W["standard_softmax"] * SOFTMAX_ROWS, rows) * row_of_S <= cache
    P_beside = min(W["standard_output"], heads * T_r) * B_r * row_of_S
    keys = _keys_streamed(p, [p.N_k] * T_r, W["standard_output"], row_of_V, cache - P_beside)
    K_passes = (p.B * p.H_k if K_kept else heads * T_r) if p.N_q else 0
    return {
        ("standard_scores", "Q", "load"): rows * p.d * e,
        ("standard_scores", "K", "load"): K_passes * p.N_k * p.d * e,
        ("standard_scores", "S", "store"): rows * row_of_S,
        ("standard_softmax", "S", "load"): rows * row_of_S * (1 if S_kept else 2),
        ("standard_softmax", "P", "store"): rows * row_of_S,
        ("standard_softmax", "L", "store"): rows * acc,
        ("standard_output", "P", "load"): rows * row_of_S,
        ("standard_output", "V", "load"): keys * row_of_V,
        ("standard_output", "O", "store"): rows * p.d * e,
    }


def _keys_streamed(problem: Problem, reach: list[int], W: int, bytes_a_key: int, cache: int) -> int:
    """Keys that waves of W blocks read, all key/value heads together.

    Block s of a head sees the first ``reach[s]`` keys. What the wave before has read is there still
    if it fits `cache` together with what this one reads.
    """
    heads, group, T_r = problem.B * problem.H, problem.H // max(problem.H_k, 1), len(reach)
    waves: dict[int, dict[int, int]] = {}  # wave to key/value head to keys
    for head in range(heads):
        first, end = head * T_r, (head + 1) * T_r
        for wave in range(first // W, ceil_div(end, W)):
            longest = max(reach[max(wave * W - first, 0) : (wave + 1) * W - first])
            keys = waves.setdefault(wave, {})
            keys[head // group] = max(keys.get(head // group, 0), longest)
    streamed = 0
    before: dict[int, int] = {}
    for keys in waves.values():
        both = sum(max(before.get(h, 0), keys.get(h, 0)) for h in before | keys)
        found = before if both * bytes_a_key <= cache else {}
        streamed += sum(max(0, n - found.get(h, 0)) for h, n in keys.items())
        before = keys
    return streamed
