"""The two-level indexer: the publish/consume calls that SGLang's DeepSeek-V4 backend makes, and its full top-k.

A source publishes one ``CandidateSchedule`` a step; the consumers of the step score its blocks only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.dsv4.v41_indexer.scoring import prefill_index_plan
from sglang.srt.layers.attention.dsv4.v41_indexer.sparse_table import SparseTableBackend
from sglang.srt.layers.attention.dsv4.v41_indexer.types import (
    CandidateMetadata,
    CapturedPrefillInputs,
    DecodeInputs,
    PrefillInputs,
)

from .geometry import CandidateGeometry
from .kernels import KernelSet, PagedKeys
from .rows import RowBuffers, SparseRows
from .schedule import CandidateSchedule

if TYPE_CHECKING:
    from .metrics import Metrics


class SparseCandidateIndexer:
    """SGLang's ``PrefillCandidates``, ``DecodeCandidates`` and full top-k indexer in one object.

    Args:
        geometry: candidate geometry of the model.
        kernels: the device's kernel set.
        buffers: scratch shared by all layers.
        token_to_kv_pool: SGLang's pool; index K is read from it, nothing of ours is kept between steps.
        page_size: KV page of SGLang, tokens (256).
        prefill_source: SGLang's own prefill candidates, whose publish scores the source of an extend; None: ours does.
        full_topk: SGLang's full top-k indexer for the extend of the layers outside the scheme; None: ours selects.
        metrics: where the consumers of an extend are counted; None without ``--enable-metrics``.
    """

    def __init__(
        self,
        *,
        geometry: CandidateGeometry,
        kernels: KernelSet,
        buffers: RowBuffers,
        token_to_kv_pool: Any,
        page_size: int,
        prefill_source: Any,
        full_topk: Any,
        metrics: Metrics | None = None,
    ) -> None:
        self.geometry = geometry
        self.kernels = kernels
        self.buffers = buffers
        self.token_to_kv_pool = token_to_kv_pool
        self.page_size = page_size
        self.prefill_source = prefill_source
        self.full_topk = full_topk
        self.metrics = metrics

    # ---- decode and verify ----

    def publish_decode(self, inputs: DecodeInputs) -> CandidateSchedule:
        """Score the visible context of each row, select its own top-k and publish its candidate blocks."""
        kernels = self.kernels
        rows = self._decode_rows(inputs)
        queries, keys = kernels.project(inputs), self._keys(inputs)
        for tile, logits in kernels.dense_logits_tiles(queries, keys, rows):
            kernels.publish(logits, rows, tile, inputs.out_page_indices)
        _pad_rows(inputs.out_page_indices, rows.num_rows)
        return CandidateSchedule(rows=rows, geometry=self.geometry)

    def consume_decode(self, inputs: DecodeInputs, published: CandidateSchedule | None) -> None:
        """Select the top-k of each row among its published blocks."""
        mode = "verify" if inputs.is_verify else "decode"
        schedule = self._checked(published, inputs, mode)
        if schedule is None:
            inputs.reset_outputs()
            return
        self._consume(inputs, schedule, mode, out_positions=None, out_slots=inputs.out_page_indices)
        _pad_rows(inputs.out_page_indices, schedule.rows.num_rows)

    # ---- extend ----

    def publish_prefill(self, inputs: PrefillInputs) -> CandidateSchedule | None:
        """A dense pass over the chunk and the candidate blocks of its rows: ours, or SGLang's whose blocks we expand."""
        if self.prefill_source is None:
            rows = self._select_prefill(inputs, publish=True)
            return None if rows is None else CandidateSchedule(rows=rows, geometry=self.geometry)
        chosen = self.prefill_source.publish_prefill(inputs)
        rows = self._prefill_rows(inputs)
        if rows is None or chosen is None:
            return None
        self.kernels.expand(chosen.blocks[: rows.num_rows], rows, slice(0, rows.num_rows))
        return CandidateSchedule(rows=rows, geometry=self.geometry)

    def consume_prefill(self, inputs: PrefillInputs, published: CandidateSchedule | None) -> None:
        """Select the top-k of each row of the chunk among its published blocks."""
        inputs.reset_outputs()
        schedule = self._checked(published, inputs, "extend")
        if schedule is None:
            return
        self._consume(
            inputs, schedule, "extend", out_positions=inputs.out_raw_indices, out_slots=inputs.out_page_indices
        )
        if self.metrics is not None:
            self.metrics.count_extend(inputs)

    # ---- layers outside the scheme ----

    def topk_decode(self, inputs: DecodeInputs) -> None:
        """Full top-k of a decode or verify row, through the same dense pass as the source."""
        kernels = self.kernels
        rows = self._decode_rows(inputs, scheduled=False)
        queries, keys = kernels.project(inputs), self._keys(inputs)
        for tile, logits in kernels.dense_logits_tiles(queries, keys, rows):
            kernels.select_visible(logits, rows, tile, inputs.out_page_indices)
        _pad_rows(inputs.out_page_indices, rows.num_rows)

    def topk_prefill(self, inputs: PrefillInputs) -> None:
        """Full top-k of an extend: through our dense pass, or SGLang's own way."""
        if self.full_topk is None:
            self._select_prefill(inputs, publish=False)
        else:
            self.full_topk.topk_prefill(inputs)

    # ---- prefill graph ----

    @property
    def serves_prefill_graph(self) -> bool:
        """Whether the calls of a prefill graph can be served: SGLang's own object serves them, where it scores the extend
        (SM100)."""
        return isinstance(self.prefill_source, SparseTableBackend)

    def publish_prefill_graph(self, inputs: PrefillInputs, num_rows: int, table: tuple | None) -> None:
        """A source's eager break; fills ``table``, or makes one."""
        self.prefill_source.publish_prefill_graph(inputs, num_rows, table)

    def prefill_graph_table(self, layer_id: int, num_rows: int) -> tuple | None:
        """The buffers that a source's break fills and the captured consumers read, None before there are any."""
        return self.prefill_source.prefill_graph_table(layer_id, num_rows)

    def bind_prefill_graph_table(self, tensors: tuple) -> CandidateMetadata:
        """What the captured consumers are given."""
        return self.prefill_source.bind_prefill_graph_table(tensors)

    def consume_prefill_captured(self, inputs: CapturedPrefillInputs, published: CandidateMetadata | None) -> None:
        """A consumer inside the graph."""
        self.prefill_source.consume_prefill_captured(inputs, published)

    # ---- shared ----

    def _select_prefill(self, inputs: PrefillInputs, *, publish: bool) -> SparseRows | None:
        """Score the visible context of a chunk's rows, tile by tile, select and, for a source, publish; no host read of
        device data. None where no row sees a position."""
        kernels = self.kernels
        inputs.reset_outputs()
        rows = self._prefill_rows(inputs, scheduled=publish)
        if rows is None:
            return None
        queries, keys = kernels.project(inputs), self._keys(inputs)
        select = kernels.publish if publish else kernels.select_visible
        for tile, logits in kernels.dense_logits_tiles(queries, keys, rows):
            select(logits, rows, tile, inputs.out_page_indices, inputs.out_raw_indices)
            # A set may make each tile anew: this one must not outlive its turn.
            del logits
        return rows

    def _consume(self, inputs, schedule: CandidateSchedule, mode: str, *, out_positions, out_slots) -> None:
        kernels, rows = self.kernels, schedule.rows
        queries, keys = kernels.project(inputs), self._keys(inputs)
        if rows.kernel_metadata is None:
            rows.kernel_metadata = kernels.plan(rows, keys)
        for tile in kernels.passes(rows.num_rows):
            logits = kernels.sparse_logits(queries, keys, rows, tile)
            kernels.select_candidates(logits, rows, tile, out_positions=out_positions, out_slots=out_slots)
        kernels.calls[f"consume_{mode}"] += 1

    def _checked(self, published: CandidateSchedule | None, inputs, mode: str) -> CandidateSchedule | None:
        """The schedule, or None where there is nothing to select.

        Raises:
            RuntimeError: rows that see positions have no schedule, or another row set's.
        """
        count = inputs.positions.shape[0]
        # An idle rank publishes nothing; so does a chunk that sees no compressed position yet. The inputs decide, not the
        # absence of a publish: the metadata of a prefill graph still holds that of its last replay.
        lens = getattr(inputs, "seq_lens_cpu", None)
        if count == 0 or (lens is not None and max(lens, default=0) < inputs.compress_ratio):
            return None
        if published is None:
            raise RuntimeError(
                f"dsv41-sparse: {mode} layer {inputs.layer_id} consumes candidates for {count} rows, but source layer "
                f"{self.geometry.source_layer} published none in this step"
            )
        if published.rows.num_rows != count:
            raise RuntimeError(
                f"dsv41-sparse: {mode} layer {inputs.layer_id} has {count} rows, the published schedule "
                f"{published.rows.num_rows}; a schedule serves only the rows it was made for (see CandidateSchedule.tail)"
            )
        return published

    def _keys(self, inputs) -> PagedKeys:
        pool = self.token_to_kv_pool
        return PagedKeys(
            pool=pool.get_index_k_with_scale_buffer(inputs.layer_id),
            page_slots=pool.get_index_k_page_size(inputs.compress_ratio),
        )

    def _decode_rows(self, inputs: DecodeInputs, scheduled: bool = True) -> SparseRows:
        metadata, keys = inputs.paged_metadata, self._keys(inputs)
        return self.buffers.rows(
            inputs.positions,
            ratio=inputs.compress_ratio,
            block_table=metadata.page_table,
            table_slots=metadata.compressed_page_size,
            request_rows=inputs.req_rows if scheduled or inputs.is_verify else None,
            paged_metadata=metadata,
            is_verify=inputs.is_verify,
            scheduled=scheduled,
            pool_slots=keys.pool.shape[0] * keys.page_slots,
        )

    def _prefill_rows(self, inputs: PrefillInputs, scheduled: bool = True) -> SparseRows | None:
        plans = inputs.index_plans
        plan = plans.get(inputs.compress_ratio) if plans is not None else None
        if plan is None:
            plan = prefill_index_plan(inputs)
            if plan is None:
                return None
            if plans is not None:
                plans[inputs.compress_ratio] = plan
        keys = self._keys(inputs)
        interleaved = inputs.req_rows is None
        request_rows = inputs.req_rows
        if self.prefill_source is not None:
            request_rows = None  # only our own dense pass asks for them
        elif interleaved:
            request_rows = torch.repeat_interleave(
                inputs.req_pool_indices, inputs.rows_per_request_device, output_size=inputs.positions.shape[0]
            )
        return self.buffers.rows(
            inputs.positions,
            ratio=inputs.compress_ratio,
            block_table=inputs.kv_page_table,
            table_slots=self.page_size // inputs.compress_ratio,
            request_rows=request_rows,
            request_starts=plan.request_starts,
            rows_per_request=inputs.rows_per_request,
            interleaved=interleaved,
            scheduled=scheduled,
            pool_slots=keys.pool.shape[0] * keys.page_slots,
        )


def _pad_rows(out, rows: int) -> None:
    """-1 in the output rows past the live ones; no launch where there are none."""
    if out.shape[0] > rows:
        out[rows:] = -1
