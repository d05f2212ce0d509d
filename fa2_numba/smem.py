"""Shared-memory tiles: named places in the block's one dynamic allocation.

``cuda.shared.array`` takes at most 48 KB and cannot place two arrays in dynamic shared memory. A
`Tile` is a (rows, columns) array at a fixed byte offset of the dynamic allocation, so ptxas sees
plain shared loads with known alignment and merges four neighbouring ones into one ``LDS.128``.
"""

from typing import Any

import numpy as np

from fa2_numba import simulator

ALIGNMENT = 128  # bytes: one line of the 32 four-byte banks


def shared_tile(rows: int, columns: int, dtype: Any, offset: int) -> Any:
    """A device function without arguments that returns the tile at byte `offset`.

    Parameters
    ----------
    rows, columns : int
        Shape of the C-contiguous tile.
    dtype : np.dtype
        Element type.
    offset : int
        Bytes from the start of the dynamic shared memory; a multiple of 16.
    """
    if simulator.ACTIVE:
        return lambda: simulator.shared_tile((rows, columns), dtype, offset)

    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.numpy_support import from_dtype

    element = from_dtype(np.dtype(dtype))
    itemsize = np.dtype(dtype).itemsize

    @intrinsic
    def tile(typingctx):
        def codegen(context, builder, signature, args):
            module = builder.module
            if "fa2_smem" in module.globals:
                memory = module.globals["fa2_smem"]
            else:
                memory = ir.GlobalVariable(
                    module, ir.ArrayType(ir.IntType(8), 0), "fa2_smem", addrspace=3
                )
                memory.linkage = "external"
                memory.align = ALIGNMENT
            i32, i64 = ir.IntType(32), ir.IntType(64)
            start = builder.gep(memory, [i32(0), i32(offset)], inbounds=True)
            llvm_type = context.get_data_type(element)
            pointer = builder.bitcast(start, ir.PointerType(llvm_type, 3))
            array = context.make_array(signature.return_type)(context, builder)
            context.populate_array(
                array,
                data=builder.addrspacecast(pointer, ir.PointerType(llvm_type)),
                shape=cgutils.pack_array(builder, [i64(rows), i64(columns)]),
                strides=cgutils.pack_array(builder, [i64(columns * itemsize), i64(itemsize)]),
                itemsize=i64(itemsize),
                meminfo=None,
            )
            return array._getvalue()

        return types.Array(element, 2, "C")(), codegen

    return tile
