"""Rows: one query token each, with views of scratch that is allocated once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch

from .geometry import CandidateGeometry

logger = logging.getLogger(__name__)

# Compact and dense logits rows start on 128 B, which the selection kernels' vector loads rely on.
ROW_ALIGN_BYTES = 128
MAX_SLOTS = 1 << 31  # slots are 32-bit


@dataclasses.dataclass
class SparseRows:
    """One call's rows, in batch order: a decode row a request, a verify row a draft token, an extend row a token.

    Attributes:
        row_ks: [rows] int32, start of the row's K range: 0 in decode and verify, in extend the first flattened-K
            column of its request.
        row_ke: [rows] int32, its end: ``row_ks + lens``.
        lens: [rows] int32, visible compressed positions, ``(token position + 1) // ratio``.
        block_table: [rows, pages] int32, SGLang's page table, one line a row.
        table_slots: positions that one entry of ``block_table`` covers.
        pool_slots: slots of the pool that ``block_table`` names; an entry past them names none, and gives -1.
        sparse_indices: [rows, kernel blocks] int32, logical kernel blocks, ascending, INT32_MAX padded.
        physical_blocks: [rows, kernel blocks] int32, the same blocks as pool slot // kernel block, -1 padded.
        end: [rows] int32, valid columns of the row's compact logits.
        row_indices: [rows] int32, ``req_to_token`` row of each row; None where
            no kernel asks for it: a decode that publishes nothing, an extend that SGLang scores.
        is_verify: whether rows are draft tokens, several a request.
        scheduled: whether the rows carry a schedule; a full top-k layer's do not.
        rows_per_request: query rows of each request in row order; None in decode and verify.
        interleaved: whether an extend's rows are those of one context-parallel rank: grouped by request with positions
            ascending, but not consecutive, and a request may have none.
        paged_metadata: SGLang's ``PagedIndexerMetadata`` of the step; None in extend.
        kernel_metadata: a kernel's work plan, made by the first consumer of the step and reused by the later ones.
    """

    row_ks: torch.Tensor
    row_ke: torch.Tensor
    lens: torch.Tensor
    block_table: torch.Tensor
    table_slots: int
    sparse_indices: torch.Tensor
    physical_blocks: torch.Tensor
    end: torch.Tensor
    row_indices: torch.Tensor | None = None
    is_verify: bool = False
    scheduled: bool = True
    rows_per_request: list[int] | None = None
    interleaved: bool = False
    paged_metadata: Any | None = None
    kernel_metadata: Any | None = None
    pool_slots: int = MAX_SLOTS

    @property
    def num_rows(self) -> int:
        return self.lens.shape[0]


def row_stride(width: int, itemsize: int) -> int:
    """Elements from one logits row to the next: ``width`` rounded up to 128 B."""
    per_line = ROW_ALIGN_BYTES // itemsize
    return -(-width // per_line) * per_line


class RowBuffers:
    """The scratch of every step, allocated when the backend starts.

    Args:
        geometry: candidate geometry of the model.
        max_rows: most rows of one step, from the server's own limits.
        scratch_bytes: budget of each logits buffer, the dense one of the source and the compact one of a consumer.
        max_context: most compressed positions of a row; bounds the dense buffer.
        dense_rows: most rows that the source scores densely in one step (decode and verify; extend too where it is ours).
        device: where the buffers live.
    """

    def __init__(
        self,
        geometry: CandidateGeometry,
        *,
        max_rows: int,
        scratch_bytes: int,
        max_context: int,
        dense_rows: int,
        device: torch.device | str,
    ) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self.max_context = max_context
        row_bytes = row_stride(geometry.columns, 2) * 2
        self.rows_per_pass = max(1, min(max_rows, scratch_bytes // row_bytes))
        dense_row_bytes = row_stride(max(1, max_context), 2) * 2
        # At least one row must fit whatever the context; the rest of the budget goes to more rows a pass.
        dense_bytes = max(dense_row_bytes, min(scratch_bytes, max(1, dense_rows) * dense_row_bytes))
        self._dense = torch.empty(dense_bytes // 2, dtype=torch.bfloat16, device=self.device)
        # An eighth of it, and room to start each of dense_rows on 128 B.
        maxima = dense_bytes // 2 // 8 + max(1, dense_rows) * row_stride(1, 2)
        self._maxima = torch.empty(maxima, dtype=torch.bfloat16, device=self.device)
        self._compact = self._empty(self.rows_per_pass, row_stride(geometry.columns, 2), dtype=torch.bfloat16)
        self._columns = self._empty(self.rows_per_pass, geometry.topk)
        # Captured graphs keep reading the tensors they were recorded with, so outgrown ones stay alive.
        self._retired: list[torch.Tensor] = []
        self._allocate_rows(max_rows)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _allocate_rows(self, max_rows: int) -> None:
        geometry = self.geometry
        self.max_rows = max_rows
        self._zeros = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self._row_ks = self._empty(max_rows)
        self._row_ke = self._empty(max_rows)
        self._lens = self._empty(max_rows)
        # Full top-k layers run between steps' schedules; their lengths must not overwrite a schedule in use.
        self._full_lens = self._empty(max_rows)
        self._end = self._empty(max_rows)
        self._row_indices = self._empty(max_rows)
        self._row_ids = torch.arange(max_rows, dtype=torch.int32, device=self.device)
        self._sparse_indices = self._empty(max_rows, geometry.kernel_blocks)
        self._physical_blocks = self._empty(max_rows, geometry.kernel_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, outgrown ones that are kept included."""
        held = {id(t): t for t in [*vars(self).values(), *self._retired] if isinstance(t, torch.Tensor)}
        return sum(t.numel() * t.element_size() for t in held.values())

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows.

        The limits the buffers were sized by hold for every graph and for chunked prefill, so growth is an event worth
        a warning. It is refused while a CUDA graph is captured: earlier graphs read the buffers they saw.

        Raises:
            RuntimeError: ``rows`` exceed the buffers during capture.
        """
        if rows <= self.max_rows:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"dsv41-sparse: a CUDA graph of {rows} rows is being captured, but the row buffers hold {self.max_rows}; "
                "raise --max-running-requests or --chunked-prefill-size, or lower the largest captured batch"
            )
        before = self.nbytes
        self._retired += [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        self._allocate_rows(-(-rows // 256) * 256)
        logger.warning(
            "dsv41-sparse: a batch of %d rows exceeds the server's stated limits; row buffers grew from %.1f to %.1f MiB",
            rows,
            before / 2**20,
            self.nbytes / 2**20,
        )

    def rows(
        self,
        positions: torch.Tensor,
        *,
        ratio: int,
        block_table: torch.Tensor,
        table_slots: int,
        request_rows: torch.Tensor | None = None,
        request_starts: torch.Tensor | None = None,
        rows_per_request: list[int] | None = None,
        interleaved: bool = False,
        paged_metadata: Any | None = None,
        is_verify: bool = False,
        scheduled: bool = True,
        pool_slots: int = MAX_SLOTS,
    ) -> SparseRows:
        """The rows of one call, their lengths computed on the device without a host read.

        Args:
            positions: [rows] int, absolute token position of each row; padded rows may hold anything.
            ratio: compress ratio of the layer.
            block_table: [>= rows, pages] int32 with unit column stride.
            table_slots: positions an entry of ``block_table`` covers; its width bounds ``lens``.
            request_rows: [rows] int, ``req_to_token`` row of each row (decode and verify).
            request_starts: [rows] int32, first flattened-K column of each row's request (extend).
            scheduled: whether the rows carry a schedule; a full top-k layer's do not, and leave the step's alone.
            pool_slots: slots of the layer's pool; what ``block_table`` names past them gives -1.

        Raises:
            ValueError: the page table has fewer lines than there are rows; kernels would read past it.
        """
        count = positions.shape[0]
        if block_table.shape[0] < count:
            raise ValueError(
                f"dsv41-sparse: {count} rows have a page table of {block_table.shape[0]} lines; it needs one a row"
            )
        self.reserve(count)
        lens = (self._lens if scheduled else self._full_lens)[:count]
        torch.add(positions, 1, out=lens)
        if ratio != 1:
            lens.floor_divide_(ratio)
        # A poisoned position of a padded row must not reach past its page-table line.
        lens.clamp_(0, block_table.shape[1] * table_slots)
        if block_table.shape[1] == 0:
            # Nothing is visible; the kernels still find a page to look at.
            block_table = self._zeros[:count, None]
        if request_starts is None:
            row_ks, row_ke = self._zeros[:count], lens
        else:
            row_ks, row_ke = self._row_ks[:count], self._row_ke[:count]
            row_ks.copy_(request_starts)
            torch.add(row_ks, lens, out=row_ke)
        row_indices = None
        if request_rows is not None:
            row_indices = self._row_indices[:count]
            row_indices.copy_(request_rows)
        return SparseRows(
            row_ks=row_ks,
            row_ke=row_ke,
            lens=lens,
            block_table=block_table[:count],
            table_slots=table_slots,
            sparse_indices=self._sparse_indices[:count],
            physical_blocks=self._physical_blocks[:count],
            end=self._end[:count],
            row_indices=row_indices,
            is_verify=is_verify,
            scheduled=scheduled,
            rows_per_request=rows_per_request,
            interleaved=interleaved,
            paged_metadata=paged_metadata,
            pool_slots=min(pool_slots, MAX_SLOTS),
        )

    def row_ids(self, rows: int) -> torch.Tensor:
        """[rows] int32, 0, 1, 2, ..."""
        return self._row_ids[:rows]

    def compact_logits(self, rows: int) -> torch.Tensor:
        """[rows, columns] bf16 scratch for one pass of a consumer; ``rows <= rows_per_pass``."""
        return self._compact[:rows, : self.geometry.columns]

    def col_indices(self, rows: int) -> torch.Tensor:
        """[rows, top-k] int32 scratch of the compact top-k of one pass."""
        return self._columns[:rows]

    def dense_rows_per_pass(self, width: int) -> int:
        """Rows whose dense logits of ``width`` positions fit the dense buffer, at least one.

        Raises:
            ValueError: a single row does not fit, so the context is longer than the server was started for.
        """
        rows = min(self._dense.numel() // row_stride(width, 2), self._maxima.numel() // row_stride(-(-width // 8), 2))
        if rows < 1:
            raise ValueError(
                f"dsv41-sparse: {width} positions of dense logits need {row_stride(width, 2) * 2} B, the buffer has "
                f"{self._dense.numel() * 2} B; the server was started for a shorter context"
            )
        return rows

    def dense_passes(self, num_rows: int, width: int) -> Iterator[slice]:
        """Row slices whose dense logits of ``width`` positions fit the dense buffer."""
        per_pass = self.dense_rows_per_pass(width)
        for start in range(0, num_rows, per_pass):
            yield slice(start, min(start + per_pass, num_rows))

    def block_maxima(self, rows: int, blocks: int) -> torch.Tensor:
        """[rows, blocks] bf16 scratch for the block maxima of one dense pass, each row on 128 B."""
        stride = row_stride(blocks, 2)
        return self._maxima[: rows * stride].view(rows, stride)[:, :blocks]

    def dense_logits(self, rows: int, width: int) -> torch.Tensor:
        """[rows, width] bf16 scratch for one pass of the source, each row on 128 B."""
        stride = row_stride(width, 2)
        return self._dense[: rows * stride].view(rows, stride)[:, :width]
