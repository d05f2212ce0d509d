"""One device function per PTX instruction, named as the instruction.

Each carries the section of NVIDIA's PTX ISA manual that defines it. Those on single values
(`scalar`) have a stand-in under the simulator; those of sm_90 (`hopper`) raise there.
"""

# ruff: noqa: F401 - the names are for the other modules

from fa2_numba.ptx.emit import smem_address
from fa2_numba.ptx.hopper import (
    PATTERN_BYTES,
    ROW_BYTES,
    bar_arrive,
    bar_sync,
    cp_async_bulk_commit_group,
    cp_async_bulk_tensor_2d_load,
    cp_async_bulk_tensor_2d_store,
    cp_async_bulk_tensor_3d_load,
    cp_async_bulk_tensor_3d_store,
    cp_async_bulk_tensor_4d_load,
    cp_async_bulk_tensor_4d_store,
    cp_async_bulk_tensor_5d_load,
    cp_async_bulk_tensor_5d_store,
    cp_async_bulk_wait_group,
    cp_async_bulk_wait_group_read,
    cp_reduce_async_bulk_add_f32,
    cvt_rn_bf16x2_f32,
    cvt_rn_f16x2_f32,
    elect_sync,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_tensormap,
    k_major_steps,
    ld_shared_v2_f32,
    ldmatrix_x4,
    matrix_descriptor,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    mn_major_steps,
    setmaxnreg_dec,
    setmaxnreg_inc,
    st_shared_v4_f32,
    stmatrix_x4,
    stmatrix_x4_trans,
    swizzle_128b,
    wgmma_commit_group,
    wgmma_fence,
    wgmma_mma_async,
    wgmma_wait_group,
)
from fa2_numba.ptx.scalar import (
    cvt_rn_bf16_f32,
    ex2_approx_ftz_f32,
    max_f32,
    mov_b32,
    mov_f32_bf16,
    mov_u32_clock,
    mov_u32_smid,
    mov_u64_clock64,
    mov_u64_globaltimer,
    rcp_approx_ftz_f32,
    shfl_bfly,
    shfl_idx,
    trap_if_negative,
    vote_any,
    vote_ballot,
)
