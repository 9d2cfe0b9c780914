"""The portable kernel set: Triton on SM80 and newer, and Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..geometry import CandidateGeometry
from ..rows import RowBuffers, SparseRows
from . import IndexQueries, KernelSet, PagedKeys
from .expansion import block_maxima, expand_blocks
from .reference import table_slots_of, topk_columns, write_padded
from .scoring import paged_index_logits
from .selection import GpuSelection, map_columns, map_positions


class PortableKernels(GpuSelection, KernelSet):
    """Triton scoring, with SGLang's CUDA kernels for top-k where the device runs them."""

    name = "portable"

    def __init__(self, geometry: CandidateGeometry, buffers: RowBuffers) -> None:
        super().__init__(geometry, buffers)
        self._on_cuda = buffers.device.type == "cuda"
        self._deep_select = False
        if self._on_cuda:
            from sglang.kernels.ops.attention.deep_select import is_deep_select_supported

            self._deep_select = is_deep_select_supported()
            self._init_selection(buffers.device)

    def dense_logits_tiles(
        self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        width = rows.block_table.shape[1] * rows.table_slots
        for tile in self.buffers.dense_passes(rows.num_rows, width):
            self.calls["dense_logits"] += 1
            logits = self.buffers.dense_logits(tile.stop - tile.start, width)
            paged_index_logits(queries[tile], keys, rows.block_table[tile], rows.table_slots, rows.lens[tile], logits)
            yield tile, logits

    def select_visible(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        self.calls["select_visible"] += 1
        if self._deep_select:
            # Positions first: SGLang's kernel writes slots from any page id, in 32 bits.
            first = out_slots if out_positions is None else out_positions
            self._select_visible_on_gpu(logits, rows, tile, None, first)
            if out_slots is not None:
                map_positions(first[tile, : self.geometry.topk], rows, tile, out_slots)
            return
        picks = topk_columns(logits, rows.lens[tile], self.geometry.topk).to(torch.int32)
        if out_positions is not None:
            write_padded(out_positions, tile, picks)
        if out_slots is not None:
            slots = table_slots_of(rows.block_table[tile], rows.table_slots, picks, rows.pool_slots)
            write_padded(out_slots, tile, slots)

    def choose_blocks(self, logits: torch.Tensor, rows: SparseRows, tile: slice) -> torch.Tensor:
        self.calls["choose_blocks"] += 1
        geometry = self.geometry
        if self._deep_select and geometry.block_size == 8:
            return self._choose_blocks_on_gpu(logits, rows, tile)
        keys = block_maxima(logits, rows.lens[tile], geometry.block_size)
        best = keys.topk(min(geometry.topk_blocks, keys.shape[1]), dim=1, sorted=False)
        return best.indices.to(torch.int32).masked_fill_(best.values == -torch.inf, -1)

    def expand(self, blocks: torch.Tensor, rows: SparseRows, tile: slice) -> None:
        self.calls["expand"] += 1
        expand_blocks(blocks, rows, tile, self.geometry)

    def sparse_logits(self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows, tile: slice) -> torch.Tensor:
        self.calls["sparse_logits"] += 1
        logits = self.buffers.compact_logits(tile.stop - tile.start)
        paged_index_logits(
            queries[tile], keys, rows.physical_blocks[tile], self.geometry.kernel_block, rows.end[tile], logits
        )
        return logits

    def select_candidates(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        *,
        out_positions: torch.Tensor | None,
        out_slots: torch.Tensor | None,
    ) -> None:
        self.calls["select_candidates"] += 1
        if logits.shape[0] == 0:
            return
        if self._on_cuda:
            self._select_candidates_on_gpu(logits, rows, tile, out_positions, out_slots)
            return
        columns = topk_columns(logits, rows.end[tile], self.geometry.topk).to(torch.int32)
        map_columns(columns, rows, tile, self.geometry, out_positions=out_positions, out_slots=out_slots)
