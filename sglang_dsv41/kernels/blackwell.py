"""DeepGEMM's kernels on SM100: dense and sparse MXFP4 MQA logits over the paged pool.

Not run on an SM100 GPU yet: its calls are tested against the recorded contract of DeepGEMM (tests/unit/test_blackwell.py).
The selections are SGLang's; the schedule is ours, so it lives in buffers allocated once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..geometry import CandidateGeometry
from ..rows import RowBuffers, SparseRows
from . import IndexQueries, KernelSet, PagedKeys
from .expansion import expand_blocks
from .selection import GpuSelection


class BlackwellKernels(GpuSelection, KernelSet):
    """Paged DeepGEMM kernels for decode, verify and extend; extend rows read the pool through their page-table line."""

    name = "blackwell"
    deep_gemm_extend = True

    def __init__(self, geometry: CandidateGeometry, buffers: RowBuffers) -> None:
        super().__init__(geometry, buffers)
        self._init_selection(buffers.device)

    def project(self, inputs: Any) -> IndexQueries:
        from sglang.srt.layers.attention.dsv4.v41_indexer.scoring import _index_q_and_weights

        q, q_scale, weights = _index_q_and_weights(
            indexer=inputs.indexer,
            x=inputs.x,
            q_lora=inputs.q_lora,
            freqs_cis=inputs.freqs_cis,
            positions=inputs.positions,
        )
        return IndexQueries(q=q, weights=weights, q_scale=q_scale)

    def dense_logits_tiles(
        self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        from sglang.kernels.ops.attention.dsv4.index_logits import deep_gemm_fp4_paged_mqa_logits
        from sglang.srt.layers.attention.dsv4.v41_indexer.scoring import DeepGEMMDecodeData

        metadata = rows.paged_metadata
        count, heads = queries.weights.shape
        data = DeepGEMMDecodeData(
            queries.q.view(count, 1, heads, 64),
            queries.q_scale.view(count, 1, heads),
            queries.weights,
            _key_cache(keys),
        )
        for tile, schedule in metadata.row_chunks():
            self.calls["dense_logits"] += 1
            q, lens, table = data.paged_logits_args(metadata, tile)
            yield (
                tile,
                deep_gemm_fp4_paged_mqa_logits(
                    q, data.k_cache, data.weights[tile], lens, table, schedule, metadata.max_compressed_seq_len
                ),
            )

    def select_visible(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        self.calls["select_visible"] += 1
        self._select_visible_on_gpu(logits, rows, tile, out_slots, out_positions)

    def choose_blocks(self, logits: torch.Tensor, rows: SparseRows, tile: slice) -> torch.Tensor:
        self.calls["choose_blocks"] += 1
        return self._choose_blocks_on_gpu(logits, rows, tile)

    def expand(self, blocks: torch.Tensor, rows: SparseRows, tile: slice) -> None:
        self.calls["expand"] += 1
        expand_blocks(blocks, rows, tile, self.geometry)

    def plan(self, rows: SparseRows, keys: PagedKeys) -> dict[int, torch.Tensor]:
        """DeepGEMM's schedules, one a pass of rows, by the pass's first row."""
        import deep_gemm

        self.calls["plan"] += 1
        page_slots = keys.page_slots
        table = rows.block_table
        if rows.table_slots != page_slots:
            from sglang.srt.layers.attention.dsv4.metadata import expand_index_page_table

            table = expand_index_page_table(
                table, full_page_size=rows.table_slots, compress_ratio=1, index_page_size=page_slots
            ).contiguous()
        request_ids = self._request_ids(rows)
        # DeepGEMM derives from the length only how many ids of a row to read, ceil(length / kernel block). ``end`` counts
        # the listed blocks; ``lens`` would count more, and padding be read, where the newest candidate block is short.
        return {
            tile.start: deep_gemm.get_paged_sparse_mqa_logits_metadata(
                rows.end[tile],
                table[tile],
                request_ids[tile],
                page_slots,
                rows.sparse_indices[tile],
                torch.int8,
                self.geometry.kernel_block,
            )
            for tile in self.passes(rows.num_rows)
        }

    def sparse_logits(self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows, tile: slice) -> torch.Tensor:
        import deep_gemm

        self.calls["sparse_logits"] += 1
        part = queries[tile]
        count, heads = part.weights.shape
        return deep_gemm.fp8_fp4_paged_sparse_mqa_logits(
            (part.q.view(count, 1, heads, 64), part.q_scale.view(count, 1, heads)),
            _key_cache(keys),
            part.weights.to(torch.bfloat16),
            rows.kernel_metadata[tile.start],
            self.geometry.kernel_blocks,
            self.geometry.kernel_block,
        )

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
        self._select_candidates_on_gpu(logits, rows, tile, out_positions, out_slots)

    def _request_ids(self, rows: SparseRows) -> torch.Tensor:
        """[rows] int32 ids; consecutive rows of one id share a K pass.

        Verify rows carry their request. Extend rows carry an id a pair, because DeepGEMM walks a run of equal ids once
        a row: quadratic in a request's rows. Those of a context-parallel rank carry an id each, as decode rows do: no
        caller of DeepGEMM in SGLang pairs rows of an extend that are not neighbours.
        """
        count = rows.num_rows
        if rows.rows_per_request is not None and not rows.interleaved:
            pairs, start = [], 0
            for request_rows in rows.rows_per_request:
                pairs += [start + (row & ~1) for row in range(request_rows)]
                start += request_rows
            return torch.tensor(pairs, dtype=torch.int32).to(rows.lens.device, non_blocking=True)
        if rows.is_verify:
            return rows.row_indices
        # Such rows are requests of their own; a graph's padded rows must not form one long run.
        return self.buffers.row_ids(count)


def _key_cache(keys: PagedKeys) -> torch.Tensor:
    """The pool as DeepGEMM takes it: [pages, page_slots, 1, 68] uint8."""
    return keys.pool.view(keys.pool.shape[0], keys.page_slots, 1, 68)
