"""Block maxima of dense logits, and the expansion of chosen blocks into a schedule, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..geometry import INT32_MAX, CandidateGeometry
from ..rows import SparseRows

_INT32_MAX = tl.constexpr(INT32_MAX)


@triton.jit(do_not_specialize=["width", "logits_stride", "keys_stride"])
def _block_max_kernel(
    logits_ptr,  # [rows, >= width] bf16
    lens_ptr,  # [rows] int32
    keys_ptr,  # [rows, blocks] fp32
    width,
    logits_stride,
    keys_stride,
    BLOCK: tl.constexpr,
    BLOCK_P2: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = tl.arange(0, BLOCK_P2)
    length = tl.minimum(tl.load(lens_ptr + row), width)
    position = block[:, None] * BLOCK + within[None, :]
    visible = (within[None, :] < BLOCK) & (position < length)
    logit = tl.load(logits_ptr + row * logits_stride + position, mask=visible, other=float("-inf")).to(tl.float32)
    # A visible block of NaN or -inf logits stays a block, after every other; the newest comes first.
    largest = 3.4028234663852886e38
    logit = tl.where(visible & ((logit != logit) | (logit == float("-inf"))), -largest, logit)
    # An overflow must not tie with the newest block.
    key = tl.minimum(tl.max(logit, axis=1), largest)
    key = tl.where((length > 0) & (block == (length - 1) // BLOCK), float("inf"), key)
    tl.store(keys_ptr + row * keys_stride + block, key, mask=block * BLOCK < width)


@triton.jit(do_not_specialize=["num_blocks", "blocks_stride", "table_stride", "table_entries", "last_slot"])
def _expand_kernel(
    blocks_ptr,  # [rows, num_blocks] int32, any order
    lens_ptr,  # [rows] int32
    table_ptr,  # [rows, table_entries] int32
    sparse_ptr,  # [rows, TOPK * EXPANSION] int32
    physical_ptr,  # [rows, TOPK * EXPANSION] int32
    end_ptr,  # [rows] int32
    num_blocks,
    blocks_stride,
    table_stride,
    table_entries,
    last_slot,  # of the pool
    TOPK: tl.constexpr,
    TOPK_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL_BLOCK: tl.constexpr,
    EXPANSION: tl.constexpr,
    TABLE_SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + row)
    lane = tl.arange(0, TOPK_P2)
    block = tl.load(blocks_ptr + row * blocks_stride + lane, mask=lane < num_blocks, other=-1)
    count = (length + BLOCK - 1) // BLOCK
    kept = (block >= 0) & (block < count)
    line = table_ptr + row * table_stride
    first = tl.where(kept, block, 0) * BLOCK
    entry = tl.load(line + first // TABLE_SLOTS, mask=kept, other=-1).to(tl.int64)
    # What the pool does not have; 64 bits, since in 32 an entry too large would wrap to another page.
    kept = kept & (entry >= 0) & (entry * TABLE_SLOTS + first % TABLE_SLOTS <= last_slot)
    block = tl.sort(tl.where(kept, block, _INT32_MAX))
    kept = block < _INT32_MAX
    block = tl.where(kept, block, 0)
    room = tl.minimum(tl.maximum(length - block * BLOCK, 0), BLOCK)
    tl.store(end_ptr + row, tl.sum(tl.where(kept, room, 0), axis=0))
    out = row * (TOPK * EXPANSION) + lane * EXPANSION
    for step in tl.static_range(EXPANSION):
        position = block * BLOCK + step * KERNEL_BLOCK
        shown = kept & (position < length) & (position // TABLE_SLOTS < table_entries)
        entry = tl.load(line + position // TABLE_SLOTS, mask=shown, other=-1).to(tl.int64)
        slot = entry * TABLE_SLOTS + position % TABLE_SLOTS
        tl.store(sparse_ptr + out + step, tl.where(shown, position // KERNEL_BLOCK, _INT32_MAX), mask=lane < TOPK)
        physical = tl.where(shown & (entry >= 0) & (slot <= last_slot), slot // KERNEL_BLOCK, -1)
        tl.store(physical_ptr + out + step, physical.to(tl.int32), mask=lane < TOPK)


def block_maxima(logits: torch.Tensor, lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[rows, ceil(width / block_size)] fp32 maxima of each block's visible logits, +inf for the newest block, -inf
    past a row's blocks."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, block_size)
    keys = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    tile = 128
    _block_max_kernel[(rows, triton.cdiv(blocks, tile))](
        logits,
        lens,
        keys,
        width,
        logits.stride(0),
        keys.stride(0),
        BLOCK=block_size,
        BLOCK_P2=triton.next_power_of_2(block_size),
        TILE=tile,
    )
    return keys


def expand_blocks(blocks: torch.Tensor, rows: SparseRows, tile: slice, geometry: CandidateGeometry) -> None:
    """``KernelSet.expand`` in one launch; shared by the sets that run Triton."""
    count = tile.stop - tile.start
    if count == 0:
        return
    lens, table = rows.lens[tile], rows.block_table[tile]
    sparse, physical = rows.sparse_indices[tile], rows.physical_blocks[tile]
    assert blocks.shape[1] <= geometry.topk_blocks and (blocks.shape[1] == 0 or blocks.stride(1) == 1)
    assert sparse.is_contiguous() and physical.is_contiguous() and table.stride(1) == 1
    _expand_kernel[(count,)](
        blocks,
        lens,
        table,
        sparse,
        physical,
        rows.end[tile],
        blocks.shape[1],
        blocks.stride(0),
        table.stride(0),
        table.shape[1],
        rows.pool_slots - 1,
        TOPK=geometry.topk_blocks,
        TOPK_P2=triton.next_power_of_2(geometry.topk_blocks),
        BLOCK=geometry.block_size,
        KERNEL_BLOCK=geometry.kernel_block,
        EXPANSION=geometry.expansion,
        TABLE_SLOTS=rows.table_slots,
        num_warps=8,
    )
