"""One step's candidates: published once by the source, shared by every consumer of the step."""

from __future__ import annotations

import dataclasses

from sglang.srt.layers.attention.dsv4.v41_indexer.types import CandidateMetadata, get_tail_row_indices

from .geometry import CandidateGeometry
from .rows import SparseRows


@dataclasses.dataclass
class CandidateSchedule(CandidateMetadata):
    """The expanded candidate blocks of a step's rows.

    A schedule belongs to its row set: rows are cut by a gather (``tail``), never by a slice, because a kernel's work
    plan counts the rows it was made for.
    """

    rows: SparseRows
    geometry: CandidateGeometry

    def tail(self, rows_per_request: list[int]) -> CandidateSchedule:
        """The schedule of each request's last ``rows_per_request`` rows, with a plan of its own.

        Raises:
            ValueError: the schedule has no requests (decode), or a request has fewer rows than asked for.
        """
        rows = self.rows
        if rows.rows_per_request is None:
            raise ValueError("only a prefill publish has a tail: this schedule's rows belong to no extend request")
        short = [(n, t) for n, t in zip(rows.rows_per_request, rows_per_request, strict=True) if t > n]
        if short:
            raise ValueError(f"a tail of {short[0][1]} rows was asked of a request with {short[0][0]} rows")
        index = get_tail_row_indices(
            full_rows_per_request=rows.rows_per_request,
            tail_rows_per_request=rows_per_request,
            device=rows.lens.device,
        )
        gathered = dataclasses.replace(
            rows,
            row_ks=rows.row_ks[index],
            row_ke=rows.row_ke[index],
            lens=rows.lens[index],
            block_table=rows.block_table[index],
            sparse_indices=rows.sparse_indices[index],
            physical_blocks=rows.physical_blocks[index],
            end=rows.end[index],
            row_indices=None if rows.row_indices is None else rows.row_indices[index],
            rows_per_request=list(rows_per_request),
            kernel_metadata=None,
        )
        return CandidateSchedule(rows=gathered, geometry=self.geometry)
