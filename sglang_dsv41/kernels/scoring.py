"""Index logits of paged MXFP4 keys, in Triton: SM80 and newer, and Triton's interpreter on the CPU.

One kernel serves the dense and the sparse pass. A row's columns are read through a page table either way: SGLang's table
with ``page_slots`` positions an entry, or the schedule's physical blocks with ``kernel_block`` positions an entry. The
arithmetic of a position is the same code, so a sparse logit equals the dense logit of its position bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from . import IndexQueries, PagedKeys
from .reference import LARGEST_LOGIT

_PAYLOAD = tl.constexpr(64)  # bytes of packed E2M1 a position
_LARGEST = tl.constexpr(LARGEST_LOGIT)


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
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + row)
    first = tl.program_id(1)
    page_stride = page_stride.to(tl.int64)
    if WIDE:
        page_stride = tl.multiple_of(page_stride, 16)
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
            base = keys_ptr + slot // PAGE_SLOTS * page_stride
            offset = slot % PAGE_SLOTS
            if FP8:
                dot = _dot_fp8(base, offset, inside, f0, f1, f2, f3, PAGE_SLOTS, UPCAST) * q_scale[None, :]
            else:
                dot = _dot_bf16(base, offset, inside, q_even, q_odd, PAGE_SLOTS, UPCAST)
            # SGLang's rounding points: bf16(dot) -> relu -> bf16(. * weight) -> fp32 sum over heads -> bf16; an overflow
            # is the largest bf16, since +inf would tie with the newest block
            score = tl.maximum(dot.to(tl.bfloat16).to(tl.float32), 0.0)
            score = (score * weights[None, :]).to(tl.bfloat16).to(tl.float32)
            logit = tl.sum(score, axis=1)
            logit = tl.where(logit > _LARGEST, _LARGEST, logit)  # NaN stays
            logit = tl.where(inside, logit, float("-inf"))
            tl.store(out_ptr + row * out_stride + column, logit.to(tl.bfloat16), mask=live)


@dataclasses.dataclass(frozen=True)
class ScoringConfig:
    """How the scoring kernel is launched; the default won the sweep of scripts/bench_variants.py.

    Attributes:
        tile_columns: columns a program scores at once, a power of two.
        warps: warps a program.
        blocks_per_sm: thread blocks a multiprocessor that the grid aims at.
        wide: tell the compiler that pages lie on 16 bytes, so that keys are loaded by more than a byte at once; heeded
            where the pool does lie so.
        fp8: multiply in FP8 (exact for the model's queries) or in bf16; None lets the device decide.
    """

    tile_columns: int = 64
    warps: int = 4
    blocks_per_sm: int = 8
    wide: bool = True
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
        out: [rows, columns] bf16; columns past a row's length are left as they are. -inf at slots outside the pool,
            never +inf.
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
        WIDE=config.wide and keys.pool.stride(0) % 16 == 0 and keys.pool.data_ptr() % 16 == 0,
        UPCAST=device.type != "cuda",
        num_warps=config.warps,
    )
