"""The torch oracle: every operation of the two-level indexer in plain torch, on any device.

It decides what is right. Other sets are tested against it; without a GPU it is also what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ..geometry import INT32_MAX, CandidateGeometry
from ..rows import MAX_SLOTS, SparseRows
from . import IndexQueries, KernelSet, PagedKeys

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Rows a reference gather dequantises at once; keeps [rows, positions, 128] small.
GATHER_BYTES = 256 << 20
# An overflow counts as the largest bf16: +inf would tie with the newest block, which is always a candidate.
LARGEST_LOGIT = torch.finfo(torch.bfloat16).max


@functools.cache
def _e2m1_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The 16 values by code; made once, since a copy from the host cannot be captured in a CUDA graph."""
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=device)


def dequantize_keys(keys: PagedKeys, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Index K at pool ``slots`` [...] as [..., 128] of ``dtype``; exact in fp32 and wider for exponents 1 to 254.

    A slot outside the pool reads slot 0; ``slots_in_pool`` tells.
    """
    slots = torch.where(slots_in_pool(keys, slots), slots, 0).to(torch.int64)
    page, offset = slots // keys.page_slots, slots % keys.page_slots
    device = keys.pool.device
    payload = keys.pool[page[..., None], offset[..., None] * 64 + torch.arange(64, device=device)]
    scale_at = keys.page_slots * 64 + offset[..., None] * 4 + torch.arange(4, device=device)
    exponents = keys.pool[page[..., None], scale_at].to(torch.int32)
    values = _e2m1_values(dtype, device)
    codes = torch.stack([payload & 0x0F, payload >> 4], dim=-1).to(torch.int64)
    k = values[codes].flatten(-2).unflatten(-1, (4, 32))
    return torch.ldexp(k, (exponents - 127)[..., None]).flatten(-2)


def slots_in_pool(keys: PagedKeys, slots: torch.Tensor) -> torch.Tensor:
    """Whether each of ``slots`` names a slot of the pool."""
    return (slots >= 0) & (slots < keys.pool.shape[0] * keys.page_slots)


def paged_index_logits(queries: IndexQueries, keys: PagedKeys, slots: torch.Tensor, *, rounding: bool = True):
    """[rows, n] fp32 logits of each row's own ``slots`` [rows, n]; -inf where the pool has no such slot."""
    logits = index_logits(queries.q, queries.weights, dequantize_keys(keys, slots), rounding=rounding)
    return logits.masked_fill(~slots_in_pool(keys, slots), -torch.inf)


def index_logits(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, *, rounding: bool = True) -> torch.Tensor:
    """score = sum over heads of weight_h * relu(q_h . k).

    Args:
        q: [rows, heads, 128].
        weights: [rows, heads].
        k: [rows, positions, 128] or [positions, 128], of the dtype to compute in.
        rounding: round as SGLang's Hopper kernels do (bf16 dot, bf16 product, fp32 sum, bf16, no +inf), else not at all.

    Returns:
        [rows, positions] of k's dtype.
    """
    dtype = k.dtype
    q, weights = q.to(dtype), weights.to(dtype)
    if rounding:
        # The stock chain multiplies bf16 keys; a scaled E2M1 value is exact in bf16.
        k = k.to(torch.bfloat16).to(dtype)
    spec = "rhd,rnd->rhn" if k.dim() == 3 else "rhd,nd->rhn"
    dots = torch.einsum(spec, q, k)
    if not rounding:
        return (dots.relu() * weights[:, :, None]).sum(dim=1)
    dots = dots.to(torch.bfloat16).to(dtype).relu()
    products = (dots * weights[:, :, None]).to(torch.bfloat16).to(dtype)
    return products.sum(dim=1).to(torch.bfloat16).to(dtype).clamp_max(LARGEST_LOGIT)


def table_slots_of(
    block_table: torch.Tensor, table_slots: int, positions: torch.Tensor, pool_slots: int = MAX_SLOTS
) -> torch.Tensor:
    """Pool slots [rows, n] int64 of request-local ``positions`` [rows, n]; -1 where the position is negative or past
    the table line, and where the table's entry names no slot below ``pool_slots``."""
    inside = (positions >= 0) & (positions < block_table.shape[1] * table_slots)
    safe = torch.where(inside, positions, 0).to(torch.int64)
    entry = block_table.to(torch.int64).gather(1, safe // table_slots)
    slot = entry * table_slots + safe % table_slots
    return torch.where(inside & (entry >= 0) & (slot < pool_slots), slot, -1)


def choose_candidate_blocks(
    logits: torch.Tensor, lens: torch.Tensor, topk_blocks: int, block_size: int
) -> torch.Tensor:
    """[rows, min(topk_blocks, blocks)] int32: the blocks with the largest maximum over visible positions, the newest
    always among them, -1 past a row's count. NaN logits never win over a number."""
    rows, width = logits.shape
    padded = -(-width // block_size) * block_size
    position = torch.arange(padded, device=logits.device)
    scores = torch.full((rows, padded), -torch.inf, dtype=torch.float32, device=logits.device)
    # An overflow must not tie with the newest block's +inf.
    largest = torch.finfo(torch.float32).max
    scores[:, :width] = logits.float().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    scores.masked_fill_(position >= lens[:, None], -torch.inf)
    # A visible block whose scores are all NaN or -inf still counts as a block, after every other.
    keys = scores.unflatten(1, (-1, block_size)).amax(-1).clamp_min(torch.finfo(torch.float32).min)
    block = torch.arange(keys.shape[1], device=logits.device)
    count = (lens + block_size - 1) // block_size
    keys.masked_fill_(block >= count[:, None], -torch.inf)
    keys.masked_fill_(block == (count - 1)[:, None], torch.inf)
    best = keys.topk(min(topk_blocks, keys.shape[1]), dim=1)
    return best.indices.to(torch.int32).masked_fill_(best.values == -torch.inf, -1)


def expand_candidate_blocks(
    blocks: torch.Tensor,
    lens: torch.Tensor,
    block_table: torch.Tensor,
    table_slots: int,
    geometry: CandidateGeometry,
    pool_slots: int = MAX_SLOTS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sparse_indices, physical_blocks, end) of candidate ``blocks`` [rows, n]; see ``SparseRows``. Blocks that start
    past ``lens``, or on a page that the table or the pool does not have, are dropped."""
    count = (lens + geometry.block_size - 1) // geometry.block_size
    kept = (blocks >= 0) & (blocks < count[:, None])
    first = torch.where(kept, blocks, 0).to(torch.int64) * geometry.block_size
    kept &= table_slots_of(block_table, table_slots, first, pool_slots) >= 0
    ids = torch.where(kept, blocks, INT32_MAX).sort(dim=1).values[:, : geometry.topk_blocks].to(torch.int64)
    room = (lens[:, None] - ids * geometry.block_size).clamp(0, geometry.block_size)
    end = torch.where(ids < INT32_MAX, room, 0).sum(dim=1)
    step = torch.arange(geometry.expansion, device=blocks.device)
    logical = (ids[:, :, None] * geometry.expansion + step).flatten(1)
    visible = (ids < INT32_MAX).repeat_interleave(geometry.expansion, dim=1)
    visible &= logical * geometry.kernel_block < lens[:, None]
    sparse_indices = torch.full((blocks.shape[0], geometry.kernel_blocks), INT32_MAX, device=blocks.device)
    sparse_indices[:, : logical.shape[1]] = torch.where(visible, logical, INT32_MAX)
    first = torch.where(sparse_indices < INT32_MAX, sparse_indices * geometry.kernel_block, -1)
    slots = table_slots_of(block_table, table_slots, first, pool_slots)
    physical = torch.where(slots >= 0, slots // geometry.kernel_block, -1)
    return sparse_indices.to(torch.int32), physical.to(torch.int32), end.to(torch.int32)


def topk_columns(logits: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
    """[rows, topk] int64 columns of the largest of each row's first ``end`` logits, -1 padded; NaN ranks last."""
    width = logits.shape[1]
    column = torch.arange(width, device=logits.device)
    scores = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores = scores.clamp_min(torch.finfo(torch.float32).min)
    scores = scores.masked_fill(column >= end[:, None], -torch.inf)
    best = scores.topk(min(topk, width), dim=1)
    picks = torch.full((logits.shape[0], topk), -1, dtype=torch.int64, device=logits.device)
    picks[:, : best.indices.shape[1]] = best.indices.masked_fill(best.values == -torch.inf, -1)
    return picks


def map_columns(columns: torch.Tensor, blocks: torch.Tensor, kernel_block: int) -> torch.Tensor:
    """Compact ``columns`` [rows, k] through ``blocks`` [rows, n]: ``blocks[c // kernel_block] * kernel_block + c %
    kernel_block``; -1 stays -1, as does a column whose block is absent."""
    chosen = columns >= 0
    safe = torch.where(chosen, columns, 0).to(torch.int64)
    block = blocks.to(torch.int64).gather(1, safe // kernel_block)
    chosen &= (block >= 0) & (block < INT32_MAX)
    return torch.where(chosen, block * kernel_block + safe % kernel_block, -1).to(torch.int32)


def write_padded(out: torch.Tensor, tile: slice, picks: torch.Tensor) -> None:
    """``picks`` into the first columns of ``out[tile]``, -1 in the rest."""
    out[tile, : picks.shape[1]] = picks
    out[tile, picks.shape[1] :] = -1


class ReferenceKernels(KernelSet):
    """Runs anywhere; slow, and allocates. Chosen only by ``DSV41_SPARSE_KERNELS=reference`` or without a GPU."""

    name = "reference"

    def dense_logits_tiles(
        self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        self.calls["dense_logits"] += 1
        width = rows.block_table.shape[1] * rows.table_slots
        per_pass = max(1, min(self.buffers.dense_rows_per_pass(width), GATHER_BYTES // (width * 128 * 4)))
        position = torch.arange(width, device=rows.lens.device)
        for start in range(0, rows.num_rows, per_pass):
            tile = slice(start, min(start + per_pass, rows.num_rows))
            table = rows.block_table[tile]
            slots = table_slots_of(table, rows.table_slots, position.expand(table.shape[0], -1))
            out = self.buffers.dense_logits(table.shape[0], width)
            out.copy_(paged_index_logits(queries[tile], keys, slots))
            yield tile, out

    def select_visible(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        self.calls["select_visible"] += 1
        picks = topk_columns(logits, rows.lens[tile], self.geometry.topk)
        if out_positions is not None:
            write_padded(out_positions, tile, picks)
        if out_slots is not None:
            slots = table_slots_of(rows.block_table[tile], rows.table_slots, picks, rows.pool_slots)
            write_padded(out_slots, tile, slots)

    def choose_blocks(self, logits: torch.Tensor, rows: SparseRows, tile: slice) -> torch.Tensor:
        self.calls["choose_blocks"] += 1
        return choose_candidate_blocks(logits, rows.lens[tile], self.geometry.topk_blocks, self.geometry.block_size)

    def expand(self, blocks: torch.Tensor, rows: SparseRows, tile: slice) -> None:
        self.calls["expand"] += 1
        sparse, physical, end = expand_candidate_blocks(
            blocks, rows.lens[tile], rows.block_table[tile], rows.table_slots, self.geometry, rows.pool_slots
        )
        rows.sparse_indices[tile].copy_(sparse)
        rows.physical_blocks[tile].copy_(physical)
        rows.end[tile].copy_(end)

    def sparse_logits(self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows, tile: slice) -> torch.Tensor:
        self.calls["sparse_logits"] += 1
        geometry = self.geometry
        count = tile.stop - tile.start
        out = self.buffers.compact_logits(count)
        column = torch.arange(geometry.columns, device=out.device)
        per_pass = max(1, GATHER_BYTES // (geometry.columns * 128 * 4))
        for start in range(0, count, per_pass):
            part = slice(start, min(start + per_pass, count))
            at = slice(tile.start + part.start, tile.start + part.stop)
            columns = column.expand(part.stop - part.start, -1)
            slots = map_columns(columns, rows.physical_blocks[at], geometry.kernel_block)
            out[part] = paged_index_logits(queries[at], keys, slots).to(out.dtype)
        return out

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
        picks = topk_columns(logits, rows.end[tile], self.geometry.topk)
        if out_positions is not None:
            write_padded(out_positions, tile, map_columns(picks, rows.sparse_indices[tile], self.geometry.kernel_block))
        if out_slots is not None:
            write_padded(out_slots, tile, map_columns(picks, rows.physical_blocks[tile], self.geometry.kernel_block))
