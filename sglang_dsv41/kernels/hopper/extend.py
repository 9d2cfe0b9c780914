"""Dense scoring of the rows of an extend: DeepGEMM's FP8 index logits over keys that are unpacked once for a chunk.

A chunk's rows are many and share their requests' keys, so the work is a matrix product, and DeepGEMM's SM90 kernel is the
better tool for it than ``index_logits.cuh``, which is made for few rows. It reads E4M3 keys with one scale a position. An
MXFP4 key becomes one exactly where the exponents of its four groups lie within 14 of each other, and so does an index
query, which SGLang rounds to MXFP4 too; a group further below adds less than 2^-14 of the largest to a product.

The products are summed as FP8 tensor cores do, and no head's score is rounded to bf16, which SGLang's Hopper kernels do
twice: the scores differ from those, and from the sparse logits, in the last bits of bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ...rows import SparseRows, row_stride
from .. import IndexQueries, PagedKeys

HEADS = (32, 64)  # that DeepGEMM's SM90 kernel is made for
KEY_BYTES = 128 + 4  # of one unpacked position: E4M3 and its scale
_BLOCK = 8  # positions; the unit of the block maxima
_ROWS_A_BLOCK = 4  # rows that one thread block of DeepGEMM's scores, with 32 heads
_TOP = tl.constexpr(6)  # 6 * 2^6 is the largest E2M1 value in E4M3
_PAYLOAD = tl.constexpr(64)  # bytes of packed E2M1 a position
_LOWEST_BF16 = tl.constexpr(-3.3895313892515355e38)


def unusable(heads: int) -> str | None:
    """Why DeepGEMM cannot score an extend of a model with ``heads`` index heads, or None."""
    if heads not in HEADS:
        return f"its SM90 kernel takes {' or '.join(map(str, HEADS))} index heads, the model has {heads}"
    try:
        import deep_gemm
    except Exception as error:  # an installation can be broken in many ways
        return f"deep_gemm cannot be imported ({type(error).__name__}: {error})"
    return None if hasattr(deep_gemm, "fp8_fp4_mqa_logits") else "deep_gemm has no fp8_fp4_mqa_logits"


def mqa_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Each row's logits of keys ``[starts, ends)``: ``scale * sum over heads of weight * relu(q . k)``.

    Args:
        q: [rows, heads, 128] E4M3.
        keys: [positions, 128] E4M3, scales: [positions] fp32.
        weights: [rows, heads] fp32.
        starts, ends: [rows] int32.
        width: largest ``ends - starts``.

    Returns:
        [rows, width] bf16, rows on 512 B; column 0 is the key at ``starts``. Columns past a row's keys are garbage.
    """
    import deep_gemm

    return deep_gemm.fp8_fp4_mqa_logits(
        (q, None), (keys, scales), weights, starts, ends, False, max_seqlen_k=width, logits_dtype=torch.bfloat16
    )


@triton.jit
def _e2m1_to_e4m3(code, down):
    """4-bit E2M1 codes as E4M3 bits of their value times 2^(6 - down); exact while ``down`` is at most 14."""
    magnitude = code & 7
    mantissa = tl.where(magnitude > 1, magnitude & 1, 0)
    exponent = tl.where(magnitude > 1, (magnitude >> 1) + 12, 12) - down
    subnormal = tl.where(
        exponent >= -1,
        (2 + mantissa) << tl.minimum(tl.maximum(exponent + 1, 0), 2),
        (2 + mantissa) >> tl.minimum(tl.maximum(-1 - exponent, 0), 8),
    )
    bits = tl.where(exponent >= 1, (exponent << 3) | (mantissa << 2), subnormal)
    return (tl.where(magnitude == 0, 0, bits) | ((code & 8) << 4)).to(tl.uint8)


# A chunk's tiles start at any row: pointers into per-row tensors have any alignment.
@triton.jit(
    do_not_specialize=["width", "num_pages", "page_stride", "table_stride"],
    do_not_specialize_on_alignment=["last_ptr", "lens_ptr", "table_ptr"],
)
def _unpack_kernel(
    last_ptr,  # [requests] int32, the last row of each request
    lens_ptr,  # [rows] int32
    table_ptr,  # [rows, width / TABLE_SLOTS] int32
    pool_ptr,  # [pages, PAGE_SLOTS * 68] uint8
    keys_ptr,  # [requests * width, 128] E4M3 bits
    scales_ptr,  # [requests * width] fp32
    width,
    num_pages,
    page_stride,
    table_stride,
    TABLE_SLOTS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(1)
    row = tl.load(last_ptr + request).to(tl.int64)
    # A request's last row sees most; keys past it are read by nobody.
    length = tl.minimum(tl.load(lens_ptr + row), width)
    first = tl.program_id(0) * TILE
    if first < length:
        position = first + tl.arange(0, TILE)
        visible = position < length
        entry = tl.load(table_ptr + row * table_stride + position // TABLE_SLOTS, mask=visible, other=-1).to(tl.int64)
        slot = entry * TABLE_SLOTS + position % TABLE_SLOTS
        page, offset = slot // PAGE_SLOTS, slot % PAGE_SLOTS
        inside = visible & (entry >= 0) & (page < num_pages)
        base = pool_ptr + tl.where(inside, page, 0) * page_stride
        offset = tl.where(inside, offset, 0)
        byte = tl.arange(0, 64)
        packed = tl.load((base + offset * _PAYLOAD)[:, None] + byte[None, :], mask=inside[:, None], other=0).to(
            tl.int32
        )
        group = (base + PAGE_SLOTS * _PAYLOAD + offset * 4)[:, None] + (byte // 16)[None, :]
        exponent = tl.load(group, mask=inside[:, None], other=0).to(tl.int32)
        # A group of zeros has no say in the scale.
        largest = tl.max(tl.where((packed & 0x77) != 0, exponent, -1), axis=1)
        down = largest[:, None] - exponent
        low, high = _e2m1_to_e4m3(packed & 15, down), _e2m1_to_e4m3(packed >> 4, down)
        at = request.to(tl.int64) * width + position
        element = tl.arange(0, 128)
        tl.store(
            keys_ptr + at[:, None] * 128 + element[None, :],
            tl.join(low, high).reshape(TILE, 128),
            mask=visible[:, None],
        )
        # 2^(largest - 127 - 6); below 2^-126 a key counts as zero.
        scale = (tl.maximum(largest - _TOP, 0) << 23).to(tl.float32, bitcast=True)
        tl.store(scales_ptr + at, scale, mask=visible)


@triton.jit(
    do_not_specialize=["num_pages", "logits_stride", "maxima_stride", "table_stride"],
    do_not_specialize_on_alignment=["lens_ptr", "table_ptr"],
)
def _maxima_kernel(
    logits_ptr,  # [rows, width] bf16, -inf is written outside the pool
    lens_ptr,  # [rows] int32
    table_ptr,  # [rows, width / TABLE_SLOTS] int32
    maxima_ptr,  # [rows, width / 8] bf16
    num_pages,
    logits_stride,
    maxima_stride,
    table_stride,
    TABLE_SLOTS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + row)
    first = tl.program_id(1) * TILE
    if first * 8 < length:
        block = first + tl.arange(0, TILE)
        kept = block * 8 < length
        position = block[:, None] * 8 + tl.arange(0, 8)[None, :]
        visible = position < length
        logit = tl.load(logits_ptr + row * logits_stride + position, mask=visible, other=float("-inf")).to(tl.float32)
        # A visible block of NaN or -inf logits stays a block, after every other; an overflow must not tie with the newest.
        largest = tl.max(tl.where(logit > _LOWEST_BF16, logit, _LOWEST_BF16), axis=1)
        largest = tl.minimum(largest, -_LOWEST_BF16)
        largest = tl.where(block == (length - 1) // 8, float("inf"), largest)
        entry = tl.load(table_ptr + row * table_stride + block * 8 // TABLE_SLOTS, mask=kept, other=-1).to(tl.int64)
        page = (entry * TABLE_SLOTS + block * 8 % TABLE_SLOTS) // PAGE_SLOTS
        inside = (entry >= 0) & (page < num_pages)
        largest = tl.where(inside, largest, float("-inf"))
        outside = visible & (inside == 0)[:, None]
        tl.store(logits_ptr + row * logits_stride + position, float("-inf"), mask=outside)
        tl.store(maxima_ptr + row * maxima_stride + block, largest.to(tl.bfloat16), mask=kept)


def fp8_queries(queries: IndexQueries) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [rows, heads, 128] as E4M3 and head weights [rows, heads] fp32, into which each head's power of two goes."""
    q = queries.q.float()
    # amax = fraction * 2^exponent with a fraction of at least a half; 2^9 times that is at most 384 for E2M1 values.
    exponent = torch.frexp(q.abs().amax(-1)).exponent
    q = torch.ldexp(q, (9 - exponent)[..., None]).to(torch.float8_e4m3fn)
    return q, torch.ldexp(queries.weights.float(), exponent - 9)


class ExtendScorer:
    """Dense tiles of an extend.

    Args:
        max_context: most positions of a row; that many unpacked keys are held, 132 B each.
        tile_bytes: budget of a tile's logits and block maxima.
        device: the GPU.
    """

    def __init__(self, *, max_context: int, tile_bytes: int, device: torch.device) -> None:
        self.capacity = -(-max(1, max_context) // 256) * 256
        self.tile_bytes = tile_bytes
        self._keys = torch.empty(self.capacity, 128, dtype=torch.float8_e4m3fn, device=device)
        self._scales = torch.empty(self.capacity, dtype=torch.float32, device=device)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._wave = _ROWS_A_BLOCK * multiprocessors

    def warm_up(self, heads: int) -> None:
        """Have DeepGEMM compile its kernel, so that the first request does not wait for it."""
        row = torch.zeros(1, dtype=torch.int32, device=self._keys.device)
        q = torch.zeros(1, heads, 128, dtype=torch.float8_e4m3fn, device=row.device)
        mqa_logits(q, self._keys, self._scales, torch.zeros(1, heads, device=row.device), row, row, 256)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps; a tile's logits and maxima come from torch's allocator."""
        return self.capacity * KEY_BYTES

    def takes(self, rows: SparseRows) -> bool:
        """Whether ``rows`` are an extend's, whole requests whose keys fit."""
        counts, width = rows.rows_per_request, rows.block_table.shape[1] * rows.table_slots
        # A page table of one zero entry stands for none.
        return counts is not None and sum(counts) == rows.num_rows and _BLOCK <= width <= self.capacity

    def rows_per_tile(self, width: int) -> int:
        """Rows whose logits and maxima fit the budget, whole waves of thread blocks where one fits."""
        row_bytes = 2 * (row_stride(-(-width // 256) * 256, 2) + row_stride(width // _BLOCK, 2))
        rows = max(1, self.tile_bytes // row_bytes)
        return rows // self._wave * self._wave if rows >= self._wave else max(1, rows // _ROWS_A_BLOCK * _ROWS_A_BLOCK)

    def tiles(
        self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """(row slice, logits [tile, width], block maxima [tile, width / 8]) of rows that it ``takes``.

        Keys of as many requests as fit are unpacked at once, each request's from a multiple of ``width`` on. The host
        knows the rows of each request, nothing of the device is read.
        """
        device, counts = rows.lens.device, [count for count in rows.rows_per_request if count]
        width = rows.block_table.shape[1] * rows.table_slots
        together = self.capacity // width
        step = self.rows_per_tile(width)
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0)
        last = (ends - 1).to(torch.int32)
        if device.type == "cuda":
            last = last.pin_memory().to(device, non_blocking=True)
        places = torch.arange(len(counts), dtype=torch.int32, device=device) % together * width
        repeats = torch.diff(last, prepend=last.new_full((1,), -1))
        starts = torch.repeat_interleave(places, repeats, output_size=rows.num_rows)
        stops = starts + rows.lens
        first = 0
        for group in range(0, len(counts), together):
            of_group = counts[group : group + together]
            self._unpack(keys, rows, last[group : group + together], width)
            end = first + sum(of_group)
            for start in range(first, end, step):
                tile = slice(start, min(start + step, end))
                q, weights = fp8_queries(queries[tile])
                logits = mqa_logits(q, self._keys, self._scales, weights, starts[tile], stops[tile], width)
                maxima = self._maxima(logits, keys, rows, tile)
                del q, weights
                yield tile, logits, maxima
                # Whoever takes the tiles lets go of them too, so that one is held at a time.
                del logits, maxima
            first = end

    def _unpack(self, keys: PagedKeys, rows: SparseRows, last: torch.Tensor, width: int) -> None:
        tile = 64
        _unpack_kernel[(triton.cdiv(width, tile), last.shape[0])](
            last,
            rows.lens,
            rows.block_table,
            keys.pool,
            self._keys.view(torch.uint8),
            self._scales,
            width,
            keys.pool.shape[0],
            keys.pool.stride(0),
            rows.block_table.stride(0),
            TABLE_SLOTS=rows.table_slots,
            PAGE_SLOTS=keys.page_slots,
            TILE=tile,
        )

    def _maxima(self, logits: torch.Tensor, keys: PagedKeys, rows: SparseRows, tile: slice) -> torch.Tensor:
        count, blocks = logits.shape[0], logits.shape[1] // _BLOCK
        stride = row_stride(blocks, 2)
        maxima = torch.empty(count, stride, dtype=torch.bfloat16, device=logits.device)[:, :blocks]
        table, block_tile = rows.block_table[tile], 256
        _maxima_kernel[(count, triton.cdiv(blocks, block_tile))](
            logits,
            rows.lens[tile],
            table,
            maxima,
            keys.pool.shape[0],
            logits.stride(0),
            maxima.stride(0),
            table.stride(0),
            TABLE_SLOTS=rows.table_slots,
            PAGE_SLOTS=keys.page_slots,
            TILE=block_tile,
        )
        return maxima
