"""Top-k of dense and compact logits on a GPU, through SGLang's kernels, and the map of columns back to the pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..geometry import INT32_MAX, SELECT_MAX_COLUMNS, CandidateGeometry
from ..rows import RowBuffers, SparseRows

_INT32_MAX = tl.constexpr(INT32_MAX)


@triton.jit(do_not_specialize=["blocks_stride", "positions_stride", "slots_stride", "positions_width", "slots_width"])
def _map_columns_kernel(
    columns_ptr,  # [rows, TOPK] int32, -1 padded
    sparse_ptr,  # [rows, blocks] int32
    physical_ptr,  # [rows, blocks] int32
    positions_ptr,  # [rows, positions_width] int32 or None
    slots_ptr,  # [rows, slots_width] int32 or None
    columns_stride,
    blocks_stride,
    positions_stride,
    slots_stride,
    positions_width,
    slots_width,
    TOPK: tl.constexpr,
    WIDTH_P2: tl.constexpr,
    KERNEL_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH_P2)
    column = tl.load(columns_ptr + row * columns_stride + lane, mask=lane < TOPK, other=-1)
    chosen = column >= 0
    at = row * blocks_stride + tl.where(chosen, column, 0) // KERNEL_BLOCK
    within = tl.where(chosen, column, 0) % KERNEL_BLOCK
    if positions_ptr is not None:
        block = tl.load(sparse_ptr + at, mask=chosen, other=_INT32_MAX)
        position = tl.where(chosen & (block < _INT32_MAX), block * KERNEL_BLOCK + within, -1)
        tl.store(positions_ptr + row * positions_stride + lane, position, mask=lane < positions_width)
    if slots_ptr is not None:
        block = tl.load(physical_ptr + at, mask=chosen, other=-1)
        slot = tl.where(chosen & (block >= 0), block * KERNEL_BLOCK + within, -1)
        tl.store(slots_ptr + row * slots_stride + lane, slot, mask=lane < slots_width)


def map_columns(
    columns: torch.Tensor,
    rows: SparseRows,
    tile: slice,
    geometry: CandidateGeometry,
    *,
    out_positions: torch.Tensor | None,
    out_slots: torch.Tensor | None,
) -> None:
    """Compact columns [tile, top-k] to positions and/or pool slots of ``out_*[tile]``, the whole width written."""
    positions = None if out_positions is None else out_positions[tile]
    slots = None if out_slots is None else out_slots[tile]
    wanted = [t for t in (positions, slots) if t is not None]
    if not wanted or columns.shape[0] == 0:
        return
    assert all(t.stride(1) == 1 and t.shape[0] == columns.shape[0] for t in wanted)
    width = max(columns.shape[1], *(t.shape[1] for t in wanted))
    _map_columns_kernel[(columns.shape[0],)](
        columns,
        rows.sparse_indices[tile],
        rows.physical_blocks[tile],
        positions,
        slots,
        columns.stride(0),
        geometry.kernel_blocks,
        0 if positions is None else positions.stride(0),
        0 if slots is None else slots.stride(0),
        0 if positions is None else positions.shape[1],
        0 if slots is None else slots.shape[1],
        TOPK=columns.shape[1],
        WIDTH_P2=triton.next_power_of_2(width),
        KERNEL_BLOCK=geometry.kernel_block,
    )


@triton.jit(do_not_specialize=["picks_stride", "table_stride", "slots_stride", "slots_width", "last_slot"])
def _map_positions_kernel(
    picks_ptr,  # [rows, TOPK] int32 positions, -1 padded
    table_ptr,  # [rows, entries] int32
    slots_ptr,  # [rows, slots_width] int32; may be picks_ptr
    picks_stride,
    table_stride,
    slots_stride,
    slots_width,
    last_slot,  # of the pool
    TOPK: tl.constexpr,
    WIDTH_P2: tl.constexpr,
    TABLE_SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH_P2)
    position = tl.load(picks_ptr + row * picks_stride + lane, mask=lane < TOPK, other=-1)
    chosen = position >= 0
    position = tl.where(chosen, position, 0)
    entry = tl.load(table_ptr + row * table_stride + position // TABLE_SLOTS, mask=chosen, other=-1).to(tl.int64)
    slot = entry * TABLE_SLOTS + position % TABLE_SLOTS
    slot = tl.where(chosen & (entry >= 0) & (slot <= last_slot), slot, -1)
    tl.store(slots_ptr + row * slots_stride + lane, slot.to(tl.int32), mask=lane < slots_width)


def map_positions(picks: torch.Tensor, rows: SparseRows, tile: slice, out_slots: torch.Tensor) -> None:
    """Positions [tile, top-k] within their rows, -1 padded, to pool slots of ``out_slots[tile]``, the whole width written
    and -1 where the row's page table names no slot of the pool. ``picks`` may be its first columns."""
    slots, table = out_slots[tile], rows.block_table[tile]
    if picks.shape[0] == 0:
        return
    assert picks.stride(1) == slots.stride(1) == table.stride(1) == 1
    _map_positions_kernel[(picks.shape[0],)](
        picks,
        table,
        slots,
        picks.stride(0),
        table.stride(0),
        slots.stride(0),
        slots.shape[1],
        rows.pool_slots - 1,
        TOPK=picks.shape[1],
        WIDTH_P2=triton.next_power_of_2(max(picks.shape[1], slots.shape[1])),
        TABLE_SLOTS=rows.table_slots,
    )


class GpuSelection:
    """Selections through SGLang's CUDA kernels; a mix-in of the kernel sets that run on a GPU."""

    geometry: CandidateGeometry
    buffers: RowBuffers

    def _init_selection(self, device: torch.device) -> None:
        # A one-entry page table of a page as wide as a row: the selection then writes plain columns.
        self._identity_table = torch.zeros((1, 1), dtype=torch.int32, device=device)

    def _select_visible_on_gpu(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None,
    ) -> None:
        """DeepSelect over the dense logits, written through the page table, or as positions that are then mapped."""
        from sglang.kernels.ops.attention.deep_select import topk_page_transform

        topk, width = self.geometry.topk, logits.shape[1]
        table, page = rows.block_table[tile], rows.table_slots
        first = out_slots
        if out_positions is not None:
            first = out_positions
            table, page = self._identity_table.expand(logits.shape[0], 1), triton.next_power_of_2(width)
        if first is None:
            return
        first[tile, topk:] = -1
        topk_page_transform(
            logits, topk, page_table=table, page_size=page, end=rows.lens[tile], output_idx=first[tile, :topk]
        )
        if out_positions is not None and out_slots is not None:
            map_positions(out_positions[tile, :topk], rows, tile, out_slots)

    def _choose_blocks_on_gpu(self, logits: torch.Tensor, rows: SparseRows, tile: slice) -> torch.Tensor:
        """SGLang's block choice; its blocks have 8 positions."""
        from sglang.kernels.ops.attention.dsv4.candidate_blocks import amax_topk_blocks, candidate_row_lens

        geometry, lens = self.geometry, rows.lens[tile]
        nblocks, _ = candidate_row_lens(lens, geometry.topk_blocks, geometry.block_size)
        return amax_topk_blocks(logits, lens, nblocks, geometry.topk_blocks)

    def _select_candidates_on_gpu(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_positions: torch.Tensor | None,
        out_slots: torch.Tensor | None,
    ) -> None:
        """SGLang's compact top-k; where only slots are wanted it writes them itself, in one launch, unless a candidate
        block may lie on two pages, of which the pool has one: it would write garbage for the other."""
        from sglang.kernels.ops.attention.dsv4.topk import topk_transform_bf16_small

        end = rows.end[tile]
        whole = rows.table_slots % self.geometry.block_size == 0
        if whole and out_positions is None and out_slots is not None and out_slots.shape[1] == self.geometry.topk:
            topk_transform_bf16_small(
                logits, end, rows.physical_blocks[tile], out_slots[tile], self.geometry.kernel_block
            )
            return
        columns = self.buffers.col_indices(logits.shape[0])
        identity = self._identity_table.expand(logits.shape[0], 1)
        topk_transform_bf16_small(logits, end, identity, columns, SELECT_MAX_COLUMNS)
        map_columns(columns, rows, tile, self.geometry, out_positions=out_positions, out_slots=out_slots)
