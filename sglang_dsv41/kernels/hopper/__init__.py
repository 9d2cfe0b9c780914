"""The Hopper kernel set: CUDA C++ for compute capability 9.0."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from ... import envs
from ...geometry import CandidateGeometry
from ...rows import RowBuffers, SparseRows
from .. import IndexQueries, PagedKeys
from ..portable import PortableKernels
from . import ops
from .extend import ExtendScorer, unusable

logger = logging.getLogger(__name__)

_BLOCK = 8  # positions; the unit of the kernels' copies and block maxima


def _brief(text: str) -> str:
    """The first and the last line of a compiler's output, which names what was tried and what went wrong."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return lines[0] + (f" ... {lines[-1]}" if len(lines) > 1 else "") if lines else "no message"


class HopperKernels(PortableKernels):
    """Scoring and publishing in CUDA C++; what a kernel does not take, and a consumer's top-k, goes the portable way."""

    name = "hopper"
    fallback = "portable"

    @classmethod
    def unmet(cls, geometry: CandidateGeometry | None) -> str | None:
        if geometry is not None and geometry.heads > ops.MAX_HEADS:
            return f"its scoring kernel takes at most {ops.MAX_HEADS} index heads, the model has {geometry.heads}"
        try:
            ops.module()
        except Exception as error:  # a compiler that is absent or too old shows in many ways
            return f"its CUDA code could not be built ({type(error).__name__}: {_brief(str(error))})"
        return None

    def __init__(self, geometry: CandidateGeometry, buffers: RowBuffers) -> None:
        super().__init__(geometry, buffers)
        # The block maxima of the last dense pass's tiles, by their first row.
        self._maxima: dict[int, torch.Tensor] = {}
        self.extend: ExtendScorer | None = None
        self._publishes_itself = (
            geometry.block_size == geometry.kernel_block == _BLOCK
            and geometry.topk < geometry.topk_blocks <= ops.MAX_KEPT_BLOCKS
            and geometry.topk_blocks % 2 == 0
        )

    def prepare_extend(self) -> None:
        reason = unusable(self.geometry.heads)
        if reason is not None:
            logger.warning(
                "dsv41-sparse: the decode kernels score the dense layers of an extend, DeepGEMM cannot: %s", reason
            )
            return
        self.extend = ExtendScorer(
            max_context=self.buffers.max_context, tile_bytes=envs.extend_bytes(), device=self.buffers.device
        )
        self.extend.warm_up(self.geometry.heads)
        logger.info(
            "dsv41-sparse: DeepGEMM scores the source and the full layers of an extend; %.1f MiB of unpacked keys, tiles of "
            "up to %.0f MiB",
            self.extend.nbytes / 2**20,
            self.extend.tile_bytes / 2**20,
        )

    def dense_logits_tiles(
        self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        width = rows.block_table.shape[1] * rows.table_slots
        blocks = width // _BLOCK
        self._maxima.clear()
        if self.extend is not None and self.extend.takes(rows):
            for tile, logits, maxima in self.extend.tiles(queries, keys, rows):
                self.calls["extend_logits"] += 1
                if blocks <= ops.MAX_BLOCKS and self.geometry.topk < ops.MAX_KEPT_BLOCKS:
                    self._maxima[tile.start] = maxima
                yield tile, logits
                # Freed before the next tile is made.
                self._maxima.clear()
                del logits, maxima
            return
        # Rows of one request follow each other in a verify step and in an extend.
        shares = rows.row_indices is not None and (rows.is_verify or rows.rows_per_request is not None)
        for tile in self.buffers.dense_passes(rows.num_rows, width):
            self.calls["dense_logits"] += 1
            count = tile.stop - tile.start
            logits = self.buffers.dense_logits(count, width)
            maxima = None
            if blocks <= ops.MAX_BLOCKS and self.geometry.topk < ops.MAX_KEPT_BLOCKS:
                self._maxima[tile.start] = maxima = self.buffers.block_maxima(count, blocks)
            ops.index_logits(
                queries[tile],
                keys,
                rows.block_table[tile],
                rows.table_slots,
                rows.lens[tile],
                logits,
                requests=rows.row_indices[tile] if shares else None,
                long_runs=not rows.is_verify,
                maxima=maxima,
            )
            yield tile, logits

    def select_visible(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        maxima = self._maxima_of(tile, logits)
        if maxima is None:
            super().select_visible(logits, rows, tile, out_slots, out_positions)
            return
        self.calls["select_visible"] += 1
        ops.source_topk(logits, maxima, rows, tile, self.geometry.topk, out_slots, out_positions, publish=False)

    def publish(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        maxima = self._maxima_of(tile, logits) if self._publishes_itself else None
        if maxima is None:
            super().publish(logits, rows, tile, out_slots, out_positions)
            return
        self.calls["publish"] += 1
        ops.source_topk(logits, maxima, rows, tile, self.geometry.topk, out_slots, out_positions, publish=True)

    def sparse_logits(self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows, tile: slice) -> torch.Tensor:
        self.calls["sparse_logits"] += 1
        logits = self.buffers.compact_logits(tile.stop - tile.start)
        ops.index_logits(
            queries[tile], keys, rows.physical_blocks[tile], self.geometry.kernel_block, rows.end[tile], logits
        )
        return logits

    def _maxima_of(self, tile: slice, logits: torch.Tensor) -> torch.Tensor | None:
        """The block maxima of a tile of the last dense pass, where the kernel takes its logits too."""
        maxima = self._maxima.get(tile.start)
        if maxima is None or maxima.shape[0] != tile.stop - tile.start or logits.dtype != torch.bfloat16:
            return None
        return maxima if logits.stride(0) % 8 == 0 and logits.data_ptr() % 16 == 0 else None
