"""The CUDA kernels of the Hopper set, built once by SGLang's JIT loader and kept in its cache."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from ...rows import SparseRows
from .. import IndexQueries, PagedKeys

MAX_HEADS = 64
MAX_BLOCKS = 8 * 16384  # of a source's row: a cluster of 8 thread blocks
MAX_KEPT_BLOCKS = 2048
_MAX_SLOTS = 1 << 31  # slots are 32-bit in the kernels, bytes are 64-bit


@functools.cache
def module() -> Any:
    """The loaded kernels; builds them on first use (about 20 s, then cached by SGLang on disk)."""
    from sglang.kernels.jit.utils import load_jit

    return load_jit(
        "dsv41_hopper",
        cuda_files=[str(Path(__file__).with_name("hopper_ffi.cuh"))],
        cuda_wrappers=[(name, f"dsv41::{name}") for name in ("index_logits", "source_topk")],
    )


@functools.cache
def _absent(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def index_logits(
    queries: IndexQueries,
    keys: PagedKeys,
    table: torch.Tensor,
    table_slots: int,
    lens: torch.Tensor,
    out: torch.Tensor,
    *,
    requests: torch.Tensor | None = None,
    long_runs: bool = False,
    maxima: torch.Tensor | None = None,
) -> None:
    """Score each row's first ``lens`` columns, read through its page-table line.

    Args:
        queries: q [rows, H, 128] and weights [rows, H], bf16, contiguous; H at most 64. Each 32-group of q holds E2M1
            values times a power of two, as SGLang's index queries do.
        keys: the index-K pool; pages of a power of two slots, on 16 B, fewer than 2^31 slots.
        table: [rows, entries] int32 with unit column stride; entry e covers pool slots ``e * table_slots`` on. A power of
            two of at least 8.
        lens: [rows] int32, at most ``entries * table_slots`` and the width of ``out``.
        out: [rows, columns] bf16; columns past a row's length are left as they are. -inf at slots outside the pool.
        requests: [rows] int32; consecutive rows of one id have the same table line, and share key reads, 8 at a time.
        long_runs: cut a request's rows at multiples of 8 of the row's index, not counted from the request's first row,
            which takes a walk back to it: for the chunks of an extend.
        maxima: [rows, >= columns / 8] bf16, also written where given: the largest logit of each block of 8 visible
            columns, +inf for a row's newest block, -inf for a block outside the pool. NaN and -inf logits count as the
            lowest finite value.

    Raises:
        ValueError: the pool or a page size that the kernel does not take.
    """
    pool = keys.pool
    if queries.q.shape[0] == 0:
        return
    if pool.stride(0) % 16 or pool.data_ptr() % 16 or pool.shape[0] * keys.page_slots > _MAX_SLOTS:
        raise ValueError(
            f"dsv41-sparse: index-K pages of {pool.stride(0)} B from address {pool.data_ptr():#x}, "
            f"{pool.shape[0] * keys.page_slots} slots; the Hopper kernels need pages on 16 B and at most {_MAX_SLOTS} "
            "slots. Set DSV41_SPARSE_KERNELS=portable"
        )
    if (
        keys.page_slots & (keys.page_slots - 1)
        or table_slots & (table_slots - 1)
        or min(keys.page_slots, table_slots) < 8
    ):
        raise ValueError(
            f"dsv41-sparse: pages of {keys.page_slots} and table entries of {table_slots} positions; the Hopper kernels "
            "need powers of two from 8. Set DSV41_SPARSE_KERNELS=portable"
        )
    assert queries.q.shape[2] == 128 and queries.q.is_contiguous() and queries.weights.is_contiguous()
    assert table.stride(1) == 1 and out.stride(1) == 1 and pool.stride(1) == 1 and lens.is_contiguous()
    device = out.device
    module().index_logits(
        queries.q,
        queries.weights,
        pool,
        keys.page_slots,
        table,
        table_slots,
        lens,
        _absent(device, torch.int32) if requests is None else requests,
        long_runs,
        out,
        _absent(device, torch.bfloat16) if maxima is None else maxima,
    )


def _blocks_for(topk: int) -> int:
    """Blocks that hold the ``topk`` largest logits and the newest block, an even number."""
    return topk + 2 - topk % 2


def source_topk(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    rows: SparseRows,
    tile: slice,
    topk: int,
    out_slots: torch.Tensor | None,
    out_positions: torch.Tensor | None,
    *,
    publish: bool,
) -> None:
    """A tile's top-k of dense logits as pool slots and/or positions, and with ``publish`` its schedule too, in one launch.

    The blocks with the largest maxima hold the largest logits, so only those blocks' logits are read again; more than
    ``topk`` of them, since the newest is among them whatever its maximum. Blocks and kernel blocks of 8; of equal blocks,
    and of equal logits, at the cut the first are taken.

    Args:
        logits: [tile, width] bf16, rows on 16 B.
        maxima: [tile, >= blocks] bf16 as ``index_logits`` writes them, rows on 16 B, at most 131,072 blocks.
        publish: write ``sparse_indices``, ``physical_blocks`` and ``end`` of ``rows[tile]``.
    """
    if tile.stop == tile.start:
        return
    table = rows.block_table[tile]
    outs = [None if out is None else out[tile] for out in (out_slots, out_positions)]
    sparse, physical, end = rows.sparse_indices[tile], rows.physical_blocks[tile], rows.end[tile]
    assert sparse.is_contiguous() and physical.is_contiguous() and table.stride(1) == 1
    assert all(out is None or (out.stride(1) == 1 and out.shape[1] >= topk) for out in outs)
    assert all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (logits, maxima))
    assert maxima.shape[1] <= MAX_BLOCKS
    absent = _absent(logits.device, torch.int32)
    module().source_topk(
        logits,
        maxima,
        rows.lens[tile],
        table,
        rows.table_slots,
        topk,
        sparse.shape[1] if publish else _blocks_for(topk),
        *(absent if out is None else out for out in outs),
        sparse if publish else absent,
        physical if publish else absent,
        end if publish else absent,
    )
