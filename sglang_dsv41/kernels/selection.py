"""Top-k of dense and compact logits on a GPU, through SGLang's kernels, and the map of columns back to the pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..geometry import INT32_MAX, SELECT_MAX_COLUMNS, CandidateGeometry
from ..rows import RowBuffers, SparseRows
from .reference import table_slots_of, write_padded

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
            picks = out_positions[tile, :topk]
            write_padded(out_slots, tile, table_slots_of(rows.block_table[tile], rows.table_slots, picks))

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
        """SGLang's compact top-k; where only slots are wanted it writes them itself, in one launch."""
        from sglang.kernels.ops.attention.dsv4.topk import topk_transform_bf16_small

        end = rows.end[tile]
        if out_positions is None and out_slots is not None and out_slots.shape[1] == self.geometry.topk:
            topk_transform_bf16_small(
                logits, end, rows.physical_blocks[tile], out_slots[tile], self.geometry.kernel_block
            )
            return
        columns = self.buffers.col_indices(logits.shape[0])
        identity = self._identity_table.expand(logits.shape[0], 1)
        topk_transform_bf16_small(logits, end, identity, columns, SELECT_MAX_COLUMNS)
        map_columns(columns, rows, tile, self.geometry, out_positions=out_positions, out_slots=out_slots)
