"""Portable Triton kernels: SM80 and newer, and Triton's interpreter on the CPU.

One scoring kernel serves the dense and the sparse pass. A row's columns are read through a page table either way:
SGLang's table with ``page_slots`` positions an entry, or the schedule's physical blocks with ``kernel_block`` positions
an entry. The arithmetic of a position is the same code, so a sparse logit equals the dense logit of its position bit
for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ..geometry import INT32_MAX, CandidateGeometry
from ..rows import RowBuffers, SparseRows
from . import IndexQueries, KernelSet, PagedKeys
from .reference import topk_columns

# SGLang's selection kernel for compact rows: at most this many columns.
SELECT_MAX_COLUMNS = 16384

_PAYLOAD = tl.constexpr(64)  # bytes of packed E2M1 a position
_INT32_MAX = tl.constexpr(INT32_MAX)


@triton.jit
def _e2m1_to_fp32(code):
    """A 4-bit E2M1 code as fp32: its three magnitude bits are an fp32 exponent and mantissa 2^126 too small, so one
    exact product decodes normal and subnormal codes alike."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _ue8m0_to_fp32(exponent):
    """2^(exponent - 127) as fp32; exponent 0 is the subnormal 2^-127."""
    return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _dot_bf16(base, offset, inside, q_even, q_odd, PAGE_SLOTS: tl.constexpr, UPCAST: tl.constexpr):
    """[T, H] fp32 products of keys at ``base + offset`` with bf16 queries, scales applied to the keys before."""
    byte = tl.arange(0, 64)
    packed = tl.load((base + offset * _PAYLOAD)[:, None] + byte[None, :], mask=inside[:, None], other=0).to(tl.int32)
    scales = (base + PAGE_SLOTS * _PAYLOAD + offset * 4)[:, None] + (byte // 16)[None, :]
    scale = _ue8m0_to_fp32(tl.load(scales, mask=inside[:, None], other=127).to(tl.int32))
    even = (_e2m1_to_fp32(packed & 15) * scale).to(tl.bfloat16)
    odd = (_e2m1_to_fp32(packed >> 4) * scale).to(tl.bfloat16)
    if UPCAST:  # Triton's interpreter multiplies the raw bits of bf16 operands
        dot = tl.dot(even.to(tl.float32), q_even.to(tl.float32), input_precision="ieee")
        return tl.dot(odd.to(tl.float32), q_odd.to(tl.float32), dot, input_precision="ieee")
    return tl.dot(odd, q_odd, tl.dot(even, q_even))


@triton.jit
def _e2m1_pairs_to_e5m2(packed, UPCAST: tl.constexpr):
    """Bytes [T, 16] of two E2M1 codes as E5M2 [T, 32], 2^14 too small: three bits moved, no arithmetic."""
    if UPCAST:
        low = ((packed & 0x07) << 1) | ((packed & 0x08) << 4)
        high = ((packed & 0x70) >> 3) | (packed & 0x80)
    else:  # four bytes an instruction
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 m, s; and.b32 m, $1, 0x07070707; shl.b32 m, m, 1;"
            " and.b32 s, $1, 0x08080808; shl.b32 s, s, 4; or.b32 $0, m, s; }",
            "=r,r",
            [packed],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 m, s; and.b32 m, $1, 0x70707070; shr.b32 m, m, 3;"
            " and.b32 s, $1, 0x80808080; or.b32 $0, m, s; }",
            "=r,r",
            [packed],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return tl.join(low, high).reshape(packed.shape[0], 32).to(tl.float8e5, bitcast=True)


@triton.jit
def _dot_fp8(base, offset, inside, q0, q1, q2, q3, PAGE_SLOTS: tl.constexpr, UPCAST: tl.constexpr):
    """[T, H] fp32 products of keys with E5M2 queries, 2^14 too small; a 32-group's key scale is applied after it.

    A group's sum is a multiple of 2^-2 below 2^11 in units of its scales, so the FP8 product is exact.
    """
    byte = tl.arange(0, 16)
    scales = tl.load((base + PAGE_SLOTS * _PAYLOAD + offset * 4).to(tl.pointer_type(tl.int32)), mask=inside, other=0)
    dot = tl.zeros((offset.shape[0], q0.shape[1]), dtype=tl.float32)
    for group in tl.static_range(4):
        packed = tl.load(
            (base + offset * _PAYLOAD)[:, None] + (16 * group + byte)[None, :], mask=inside[:, None], other=0
        )
        k = _e2m1_pairs_to_e5m2(packed, UPCAST)
        if group == 0:
            q = q0
        elif group == 1:
            q = q1
        elif group == 2:
            q = q2
        else:
            q = q3
        if UPCAST:  # Triton's interpreter rounds FP8 subnormals in a dot
            part = tl.dot(k.to(tl.float32), q.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(k, q)
        dot += part * _ue8m0_to_fp32((scales >> (8 * group)) & 255)[:, None]
    return dot


@triton.jit
def _group_of_queries(q_ptr, GROUP: tl.constexpr, H: tl.constexpr):
    """[32, H] fp32 of one 32-group of a row's queries."""
    element = 32 * GROUP + tl.arange(0, 32)
    return tl.load(q_ptr + tl.arange(0, H)[None, :] * 128 + element[:, None]).to(tl.float32)


@triton.jit(do_not_specialize=["num_pages", "page_stride", "table_stride", "out_stride"])
def _paged_logits_kernel(
    q_ptr,  # [rows, H, 128] bf16
    weights_ptr,  # [rows, H] bf16
    keys_ptr,  # [pages, PAGE_SLOTS * 68] uint8
    table_ptr,  # [rows, entries] int32, TABLE_SLOTS columns an entry
    lens_ptr,  # [rows] int32, columns to score
    out_ptr,  # [rows, columns] bf16
    num_pages,
    page_stride,
    table_stride,
    out_stride,
    H: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    TABLE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + row)
    first = tl.program_id(1)
    if first * TILE < length:
        head = tl.arange(0, H)
        weights = tl.load(weights_ptr + row * H + head).to(tl.float32)
        q_ptr += row * (H * 128)
        if FP8:
            # A head's queries share one power of two; E5M2 spans the 30 binades that its groups may differ by.
            q0, q1 = _group_of_queries(q_ptr, 0, H), _group_of_queries(q_ptr, 1, H)
            q2, q3 = _group_of_queries(q_ptr, 2, H), _group_of_queries(q_ptr, 3, H)
            largest = tl.maximum(
                tl.maximum(tl.max(tl.abs(q0), axis=0), tl.max(tl.abs(q1), axis=0)),
                tl.maximum(tl.max(tl.abs(q2), axis=0), tl.max(tl.abs(q3), axis=0)),
            )
            exponent = tl.minimum(tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 32), 246)
            shrink = ((254 + 8 - exponent) << 23).to(tl.float32, bitcast=True)
            # Undoes the shrink and the 2^-14 of the keys' E5M2 codes.
            q_scale = ((exponent - 8 + 14) << 23).to(tl.float32, bitcast=True)
            f0, f1 = (q0 * shrink[None, :]).to(tl.float8e5), (q1 * shrink[None, :]).to(tl.float8e5)
            f2, f3 = (q2 * shrink[None, :]).to(tl.float8e5), (q3 * shrink[None, :]).to(tl.float8e5)
        else:
            byte = tl.arange(0, 64)
            q_even = tl.load(q_ptr + head[None, :] * 128 + 2 * byte[:, None])
            q_odd = tl.load(q_ptr + head[None, :] * 128 + 2 * byte[:, None] + 1)
        for tile in range(first, tl.cdiv(length, TILE), tl.num_programs(1)):
            column = tile * TILE + tl.arange(0, TILE)
            live = column < length
            entry = tl.load(table_ptr + row * table_stride + column // TABLE_SLOTS, mask=live, other=0).to(tl.int64)
            slot = entry * TABLE_SLOTS + column % TABLE_SLOTS
            inside = live & (slot >= 0) & (slot < num_pages.to(tl.int64) * PAGE_SLOTS)
            base = keys_ptr + slot // PAGE_SLOTS * page_stride.to(tl.int64)
            offset = slot % PAGE_SLOTS
            if FP8:
                dot = _dot_fp8(base, offset, inside, f0, f1, f2, f3, PAGE_SLOTS, UPCAST) * q_scale[None, :]
            else:
                dot = _dot_bf16(base, offset, inside, q_even, q_odd, PAGE_SLOTS, UPCAST)
            # SGLang's rounding points: bf16(dot) -> relu -> bf16(. * weight) -> fp32 sum over heads -> bf16
            score = tl.maximum(dot.to(tl.bfloat16).to(tl.float32), 0.0)
            score = (score * weights[None, :]).to(tl.bfloat16).to(tl.float32)
            logit = tl.where(inside, tl.sum(score, axis=1), float("-inf"))
            tl.store(out_ptr + row * out_stride + column, logit.to(tl.bfloat16), mask=live)


@triton.jit(do_not_specialize=["width", "logits_stride", "keys_stride"])
def _block_max_kernel(
    logits_ptr,  # [rows, >= width] bf16
    lens_ptr,  # [rows] int32
    keys_ptr,  # [rows, blocks] fp32
    width,
    logits_stride,
    keys_stride,
    BLOCK: tl.constexpr,
    BLOCK_P2: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = tl.arange(0, BLOCK_P2)
    length = tl.minimum(tl.load(lens_ptr + row), width)
    position = block[:, None] * BLOCK + within[None, :]
    visible = (within[None, :] < BLOCK) & (position < length)
    logit = tl.load(logits_ptr + row * logits_stride + position, mask=visible, other=float("-inf")).to(tl.float32)
    # A visible block of NaN or -inf logits stays a block, after every other; the newest comes first.
    lowest = -3.4028234663852886e38
    logit = tl.where(visible & ((logit != logit) | (logit == float("-inf"))), lowest, logit)
    key = tl.max(logit, axis=1)
    key = tl.where((length > 0) & (block == (length - 1) // BLOCK), float("inf"), key)
    tl.store(keys_ptr + row * keys_stride + block, key, mask=block * BLOCK < width)


@triton.jit(do_not_specialize=["num_blocks", "blocks_stride", "table_stride", "table_entries"])
def _expand_kernel(
    blocks_ptr,  # [rows, num_blocks] int32, any order
    lens_ptr,  # [rows] int32
    table_ptr,  # [rows, table_entries] int32
    sparse_ptr,  # [rows, TOPK * EXPANSION] int32
    physical_ptr,  # [rows, TOPK * EXPANSION] int32
    end_ptr,  # [rows] int32
    num_blocks,
    blocks_stride,
    table_stride,
    table_entries,
    TOPK: tl.constexpr,
    TOPK_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL_BLOCK: tl.constexpr,
    EXPANSION: tl.constexpr,
    TABLE_SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + row)
    lane = tl.arange(0, TOPK_P2)
    block = tl.load(blocks_ptr + row * blocks_stride + lane, mask=lane < num_blocks, other=-1)
    count = (length + BLOCK - 1) // BLOCK
    kept = (block >= 0) & (block < count)
    line = table_ptr + row * table_stride
    entry = tl.load(line + tl.where(kept, block, 0) * BLOCK // TABLE_SLOTS, mask=kept, other=-1)
    block = tl.sort(tl.where(kept & (entry >= 0), block, _INT32_MAX))
    kept = block < _INT32_MAX
    block = tl.where(kept, block, 0)
    room = tl.minimum(tl.maximum(length - block * BLOCK, 0), BLOCK)
    tl.store(end_ptr + row, tl.sum(tl.where(kept, room, 0), axis=0))
    out = row * (TOPK * EXPANSION) + lane * EXPANSION
    for step in tl.static_range(EXPANSION):
        position = block * BLOCK + step * KERNEL_BLOCK
        shown = kept & (position < length) & (position // TABLE_SLOTS < table_entries)
        entry = tl.load(line + position // TABLE_SLOTS, mask=shown, other=-1)
        physical = entry * (TABLE_SLOTS // KERNEL_BLOCK) + (position % TABLE_SLOTS) // KERNEL_BLOCK
        tl.store(sparse_ptr + out + step, tl.where(shown, position // KERNEL_BLOCK, _INT32_MAX), mask=lane < TOPK)
        tl.store(physical_ptr + out + step, tl.where(shown & (entry >= 0), physical, -1), mask=lane < TOPK)


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


@dataclasses.dataclass(frozen=True)
class ScoringConfig:
    """How the scoring kernel is launched; the default won the sweep of scripts/bench_variants.py.

    Attributes:
        tile_columns: columns a program scores at once, a power of two.
        warps: warps a program.
        blocks_per_sm: thread blocks a multiprocessor that the grid aims at.
        fp8: multiply in FP8 (exact for the model's queries) or in bf16; None lets the device decide.
    """

    tile_columns: int = 64
    warps: int = 4
    blocks_per_sm: int = 8
    fp8: bool | None = None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def uses_fp8(device: torch.device) -> bool:
    """Whether keys are multiplied as FP8 on ``device``: where it was measured to be faster, that is on Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def paged_index_logits(
    queries: IndexQueries,
    keys: PagedKeys,
    table: torch.Tensor,
    table_slots: int,
    lens: torch.Tensor,
    out: torch.Tensor,
    config: ScoringConfig = ScoringConfig(),
) -> None:
    """Score each row's first ``lens`` columns, read through its page-table line.

    Args:
        queries: q [rows, H, 128] and weights [rows, H], bf16, contiguous; H a power of two from 16. Each 32-group of q
            holds E2M1 values times a power of two, as SGLang's index queries do.
        keys: the index-K pool.
        table: [rows, entries] int32 with unit column stride; entry e covers pool slots ``e * table_slots`` on.
        lens: [rows] int32, at most ``entries * table_slots`` and the width of ``out``.
        out: [rows, columns] bf16; columns past a row's length are left as they are. -inf at slots outside the pool.
        config: how to launch.
    """
    rows, heads, head_dim = queries.q.shape
    if rows == 0:
        return
    assert head_dim == 128 and queries.q.is_contiguous() and queries.weights.is_contiguous()
    assert table.stride(1) == 1 and out.stride(1) == 1 and keys.pool.stride(1) == 1
    tiles = triton.cdiv(out.shape[1], config.tile_columns)
    device = out.device
    workers = max(1, min(tiles, triton.cdiv(_multiprocessors(device) * config.blocks_per_sm, rows)))
    _paged_logits_kernel[(rows, workers)](
        queries.q,
        queries.weights,
        keys.pool,
        table,
        lens,
        out,
        keys.pool.shape[0],
        keys.pool.stride(0),
        table.stride(0),
        out.stride(0),
        H=heads,
        PAGE_SLOTS=keys.page_slots,
        TABLE_SLOTS=table_slots,
        TILE=config.tile_columns,
        FP8=uses_fp8(device) if config.fp8 is None else config.fp8,
        UPCAST=device.type != "cuda",
        num_warps=config.warps,
    )


def block_maxima(logits: torch.Tensor, lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[rows, ceil(width / block_size)] fp32 maxima of each block's visible logits, +inf for the newest block, -inf
    past a row's blocks."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, block_size)
    keys = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    tile = 128
    _block_max_kernel[(rows, triton.cdiv(blocks, tile))](
        logits,
        lens,
        keys,
        width,
        logits.stride(0),
        keys.stride(0),
        BLOCK=block_size,
        BLOCK_P2=triton.next_power_of_2(block_size),
        TILE=tile,
    )
    return keys


def expand_blocks(blocks: torch.Tensor, rows: SparseRows, tile: slice, geometry: CandidateGeometry) -> None:
    """``KernelSet.expand`` in one launch; shared by the sets that run Triton."""
    count = tile.stop - tile.start
    if count == 0:
        return
    lens, table = rows.lens[tile], rows.block_table[tile]
    sparse, physical = rows.sparse_indices[tile], rows.physical_blocks[tile]
    assert blocks.shape[1] <= geometry.topk_blocks and (blocks.shape[1] == 0 or blocks.stride(1) == 1)
    assert sparse.is_contiguous() and physical.is_contiguous() and table.stride(1) == 1
    _expand_kernel[(count,)](
        blocks,
        lens,
        table,
        sparse,
        physical,
        rows.end[tile],
        blocks.shape[1],
        blocks.stride(0),
        table.stride(0),
        table.shape[1],
        TOPK=geometry.topk_blocks,
        TOPK_P2=triton.next_power_of_2(geometry.topk_blocks),
        BLOCK=geometry.block_size,
        KERNEL_BLOCK=geometry.kernel_block,
        EXPANSION=geometry.expansion,
        TABLE_SLOTS=rows.table_slots,
        num_warps=8,
    )


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


class CandidateSelection:
    """Top-k of compact rows through SGLang's ``topk_transform_sparse`` family; a mix-in of the CUDA kernel sets."""

    geometry: CandidateGeometry
    buffers: RowBuffers

    def _init_selection(self, device: torch.device) -> None:
        # A one-entry page table of a page as wide as a row: the selection then writes plain columns.
        self._identity_table = torch.zeros((1, 1), dtype=torch.int32, device=device)

    def _select_on_gpu(self, logits, rows, tile, out_positions, out_slots) -> None:
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


class PortableKernels(CandidateSelection, KernelSet):
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
        per_pass = self.buffers.dense_rows_per_pass(width)
        for start in range(0, rows.num_rows, per_pass):
            self.calls["dense_logits"] += 1
            tile = slice(start, min(start + per_pass, rows.num_rows))
            logits = self.buffers.dense_logits(tile.stop - tile.start, width)
            paged_index_logits(queries[tile], keys, rows.block_table[tile], rows.table_slots, rows.lens[tile], logits)
            yield tile, logits

    def select_visible(self, logits: torch.Tensor, rows: SparseRows, tile: slice, out_slots: torch.Tensor) -> None:
        self.calls["select_visible"] += 1
        topk = self.geometry.topk
        out, table, lens = out_slots[tile], rows.block_table[tile], rows.lens[tile]
        if out.shape[1] > topk:
            out[:, topk:] = -1
        if self._deep_select:
            from sglang.kernels.ops.attention.deep_select import topk_page_transform

            topk_page_transform(
                logits, topk, page_table=table, page_size=rows.table_slots, end=lens, output_idx=out[:, :topk]
            )
            return
        picks = topk_columns(logits, lens, topk)
        entry = table.to(torch.int64).gather(1, picks.clamp_min(0) // rows.table_slots)
        slots = entry * rows.table_slots + picks % rows.table_slots
        out[:, :topk] = torch.where((picks >= 0) & (entry >= 0), slots, -1)

    def choose_blocks(self, logits: torch.Tensor, rows: SparseRows, tile: slice) -> torch.Tensor:
        self.calls["choose_blocks"] += 1
        geometry, lens = self.geometry, rows.lens[tile]
        if self._deep_select and geometry.block_size == 8:
            from sglang.kernels.ops.attention.dsv4.candidate_blocks import amax_topk_blocks, candidate_row_lens

            nblocks, _ = candidate_row_lens(lens, geometry.topk_blocks, geometry.block_size)
            return amax_topk_blocks(logits, lens, nblocks, geometry.topk_blocks)
        keys = block_maxima(logits, lens, geometry.block_size)
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
            self._select_on_gpu(logits, rows, tile, out_positions, out_slots)
            return
        columns = topk_columns(logits, rows.end[tile], self.geometry.topk).to(torch.int32)
        map_columns(columns, rows, tile, self.geometry, out_positions=out_positions, out_slots=out_slots)
