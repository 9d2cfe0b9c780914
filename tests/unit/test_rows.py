"""Row buffers: sized once by stated limits, and the lengths of rows computed without a host read."""

import dataclasses
import logging

import pytest
import torch

from sglang_dsv41.rows import ROW_ALIGN_BYTES, RowBuffers, row_stride
from tests.candidates import RELEASED, SMALL

MIB = 2**20
LONGEST = 1_048_576


def buffers(geometry=SMALL, *, max_rows=8, scratch_bytes=MIB, max_context=1024, dense_rows=4, device="cpu"):
    return RowBuffers(
        geometry,
        max_rows=max_rows,
        scratch_bytes=scratch_bytes,
        max_context=max_context,
        dense_rows=dense_rows,
        device=device,
    )


def table(rows, pages=4):
    return torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)


def tensors(owner):
    return {name: t for name, t in vars(owner).items() if isinstance(t, torch.Tensor)}


# ---- sizes; the meta device has shapes and no memory ----


def test_bytes_are_those_of_the_tensors():
    made = buffers()
    assert made.nbytes == sum(t.numel() * t.element_size() for t in tensors(made).values()) > 0


def test_consumer_scratch_is_bounded_whatever_the_context():
    """4096 rows at 1,048,576 positions: compact logits of R * 16,384 bf16, and a part that no context moves."""
    rows = 4096
    options = {"max_rows": rows, "scratch_bytes": 256 * MIB, "dense_rows": 1, "device": "meta"}
    long, short = (buffers(RELEASED, max_context=n, **options) for n in (LONGEST, 8192))
    assert long.rows_per_pass == rows
    compact = long.compact_logits(rows)
    assert compact.shape == (rows, 16384) and compact.dtype == torch.bfloat16
    assert long._compact.numel() * 2 <= rows * 16384 * 2
    # What is left: two lists of 2048 blocks, 512 columns and a few words a row.
    dense = {made: (made._dense.numel() + made._maxima.numel()) * 2 for made in (long, short)}
    rest = long.nbytes - long._compact.numel() * 2 - dense[long]
    assert rest <= rows * (2 * 2048 * 4 + 512 * 4 + 64)
    assert long.nbytes - dense[long] == short.nbytes - dense[short]
    assert long._maxima.numel() <= long._dense.numel() // 8 + 64


def test_scratch_budget_bounds_both_logits_buffers():
    made = buffers(
        RELEASED, max_rows=100_000, scratch_bytes=64 * MIB, max_context=LONGEST, dense_rows=100_000, device="meta"
    )
    assert made._compact.numel() * 2 <= 64 * MIB and made._dense.numel() * 2 <= 64 * MIB
    assert made.rows_per_pass == 64 * MIB // (16384 * 2)
    assert made.dense_rows_per_pass(LONGEST) == 32 and made.dense_rows_per_pass(4096) == 8192


def test_one_row_fits_whatever_the_budget():
    made = buffers(RELEASED, scratch_bytes=1, max_context=LONGEST, device="meta")
    assert made.rows_per_pass == 1 and made.dense_rows_per_pass(LONGEST) == 1


def test_small_limits_take_little():
    """The budget is an upper bound: two rows of a short context do not take it."""
    made = buffers(SMALL, max_rows=2, scratch_bytes=256 * MIB, max_context=64, dense_rows=2)
    assert made.rows_per_pass == 2 and made.nbytes < 8192


def test_no_tensor_of_rows_by_context():
    """1536 rows at a capacity of 1,048,576: nothing above R * 16,384 * 8 bytes beside the dense budget."""
    made = buffers(
        RELEASED, max_rows=1536, scratch_bytes=256 * MIB, max_context=LONGEST, dense_rows=1536, device="meta"
    )
    for name, t in tensors(made).items():
        limit = 256 * MIB if name == "_dense" else 1536 * 16384 * 8
        assert t.numel() * t.element_size() <= limit, name


@pytest.mark.parametrize("width", [1, 63, 64, 65, 1000])
def test_logits_rows_start_on_128_bytes(width):
    assert row_stride(width, 2) >= width and row_stride(width, 2) * 2 % ROW_ALIGN_BYTES == 0
    assert row_stride(width, 2) - width < 64
    made = buffers(dataclasses.replace(SMALL, topk_blocks=5), max_rows=3)
    for logits in (made.dense_logits(3, width), made.compact_logits(3)):
        assert logits.stride(1) == 1 and logits.stride(0) * 2 % ROW_ALIGN_BYTES == 0
        assert all(logits[i].data_ptr() % ROW_ALIGN_BYTES == logits.data_ptr() % ROW_ALIGN_BYTES for i in range(3))
    assert made.dense_logits(3, width).shape == (3, width) and made.compact_logits(3).shape == (3, 40)


def test_dense_passes_follow_the_width():
    made = buffers(scratch_bytes=4096, max_context=1024, dense_rows=4)
    # At 64 positions it is the block maxima, a line a row, that bound a pass; the 4 rows stated still fit.
    assert [made.dense_rows_per_pass(n) for n in (1024, 1000, 512, 64)] == [2, 2, 4, 8]
    whole = made.dense_logits(2, 1024)
    for rows, width in ((2, 1024), (4, 512), (8, 64)):
        maxima = made.block_maxima(rows, width // 8)
        assert maxima.shape == (rows, width // 8) and maxima.stride(0) * 2 % ROW_ALIGN_BYTES == 0
    assert whole.untyped_storage().data_ptr() == made._dense.untyped_storage().data_ptr()


def test_a_longer_context_than_stated_is_refused():
    made = buffers(scratch_bytes=1, max_context=1024)
    with pytest.raises(ValueError, match=r"1025 positions of dense logits need 2176 B, the buffer has 2048 B") as error:
        made.dense_rows_per_pass(1025)
    assert "the server was started for a shorter context" in str(error.value)


# ---- growth ----


def test_limits_hold_without_growth(caplog):
    made = buffers(max_rows=8)
    before = {name: t.data_ptr() for name, t in tensors(made).items()}
    made.rows(torch.arange(8), ratio=1, block_table=table(8), table_slots=64)
    assert before == {name: t.data_ptr() for name, t in tensors(made).items()} and not caplog.records


def test_growth_warns_once_and_old_views_stay(caplog):
    made = buffers(max_rows=2)
    old = made.rows(
        torch.tensor([9, 70]), ratio=1, block_table=table(2), table_slots=64, request_rows=torch.tensor([3, 4])
    )
    old.sparse_indices.fill_(5)
    before = made.nbytes
    with caplog.at_level(logging.WARNING, logger="sglang_dsv41.rows"):
        new = made.rows(torch.arange(300), ratio=1, block_table=table(300), table_slots=64)
        again = made.rows(torch.arange(500), ratio=1, block_table=table(500), table_slots=64)
    new.sparse_indices.fill_(6)
    assert [r.levelname for r in caplog.records] == ["WARNING"], "the second batch fits what the first one made"
    assert "a batch of 300 rows exceeds the server's stated limits" in caplog.messages[0]
    # What is held is what is reported: the outgrown buffers stay.
    grown = sum(
        t.numel() * t.element_size()
        for n, t in tensors(made).items()
        if n not in ("_dense", "_maxima", "_compact", "_columns")
    )
    assert made.max_rows == 512 and made.nbytes == before + grown
    assert new.num_rows == 300 and again.num_rows == 500 and made.row_ids(500).tolist() == list(range(500))
    # A captured graph reads the tensors it was recorded with: they are alive, and no later step writes them.
    assert old.lens.tolist() == [10, 71] and old.row_indices.tolist() == [3, 4] and (old.sparse_indices == 5).all()
    assert any(t.data_ptr() == old.lens.data_ptr() for t in made._retired)


def test_growth_is_refused_during_capture(monkeypatch):
    made = buffers(max_rows=2)
    made.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph of 3 rows is being captured, but the row buffers hold 2") as e:
        made.reserve(3)
    assert "--max-running-requests" in str(e.value) and "--chunked-prefill-size" in str(e.value)
    assert made.max_rows == 2
    made.reserve(2)


# ---- rows ----

POSITIONS = [
    -(2**40),
    -(2**31),
    -(2**31) - 1,
    -300,
    -2,
    -1,
    0,
    1,
    2,
    7,
    8,
    254,
    255,
    256,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_lengths(ratio, dtype):
    """(position + 1) // ratio inside the page table; a padded row may hold anything and stays inside it."""
    limits = torch.iinfo(dtype)
    positions = [p for p in POSITIONS if limits.min <= p <= limits.max]
    made = buffers(max_rows=32)
    rows = made.rows(
        torch.tensor(positions, dtype=dtype), ratio=ratio, block_table=table(len(positions)), table_slots=64
    )
    assert rows.lens.dtype == torch.int32
    for position, length in zip(positions, rows.lens.tolist(), strict=True):
        if 0 <= position < 256 * ratio:
            assert length == (position + 1) // ratio, position
        elif -(2**31) <= position < 0:
            assert length == 0, position
        assert 0 <= length <= 256, position
    # A long row is cut at the table, the last position it could read.
    assert made.rows(torch.tensor([100_000]), ratio=ratio, block_table=table(1), table_slots=64).lens.tolist() == [256]


def test_decode_rows():
    made = buffers()
    block_table = table(5)
    request = torch.tensor([7, 3, 9])
    metadata = object()
    rows = made.rows(
        torch.tensor([0, 63, 64]),
        ratio=1,
        block_table=block_table,
        table_slots=64,
        request_rows=request,
        paged_metadata=metadata,
        is_verify=True,
    )
    assert rows.num_rows == 3 and rows.is_verify and rows.paged_metadata is metadata
    assert rows.row_ks.tolist() == [0, 0, 0] and rows.row_ke.tolist() == rows.lens.tolist() == [1, 64, 65]
    assert rows.row_indices.tolist() == [7, 3, 9] and rows.row_indices.dtype == torch.int32
    assert rows.block_table.shape == (3, 4) and rows.block_table.data_ptr() == block_table.data_ptr()
    assert rows.rows_per_request is None and rows.kernel_metadata is None


def test_extend_rows_cover_their_requests_range():
    made = buffers()
    starts = torch.tensor([0, 0, 100, 100], dtype=torch.int32)
    rows = made.rows(
        torch.tensor([8, 9, 60, 61]),
        ratio=2,
        block_table=table(4),
        table_slots=128,
        request_starts=starts,
        rows_per_request=[2, 2],
    )
    assert rows.row_ks.tolist() == [0, 0, 100, 100] and rows.row_ke.tolist() == [4, 5, 130, 131]
    assert rows.lens.tolist() == [4, 5, 30, 31] and rows.row_indices is None and rows.rows_per_request == [2, 2]


def test_decode_after_extend_starts_at_zero():
    """The ranges of an extend do not stay behind in a decode."""
    made = buffers()
    made.rows(
        torch.tensor([5, 6]),
        ratio=1,
        block_table=table(2),
        table_slots=64,
        request_starts=torch.tensor([40, 50], dtype=torch.int32),
        rows_per_request=[1, 1],
    )
    rows = made.rows(torch.tensor([5, 6]), ratio=1, block_table=table(2), table_slots=64)
    assert rows.row_ks.tolist() == [0, 0] and rows.row_ke.tolist() == [6, 7]


def test_rows_of_full_layers_leave_a_schedule_alone():
    made = buffers()
    step = made.rows(
        torch.tensor([5, 6]), ratio=1, block_table=table(2), table_slots=64, request_rows=torch.tensor([3, 4])
    )
    full = made.rows(torch.tensor([90, 91]), ratio=2, block_table=table(2), table_slots=64, scheduled=False)
    assert step.lens.tolist() == [6, 7] and step.row_ke.tolist() == [6, 7] and full.lens.tolist() == [45, 46]


def test_a_page_table_of_too_few_lines_is_refused():
    """Kernels take a line a row: a shorter table would be read past its end."""
    made = buffers()
    with pytest.raises(ValueError, match="3 rows have a page table of 2 lines"):
        made.rows(torch.tensor([5, 6, 7]), ratio=1, block_table=table(2), table_slots=64)


def test_every_tensor_of_a_row_set_is_a_view():
    made = buffers()
    owned = {t.untyped_storage().data_ptr() for t in tensors(made).values()}
    for extra in ({"request_rows": torch.tensor([1, 2])}, {"request_starts": torch.tensor([0, 9], dtype=torch.int32)}):
        rows = made.rows(torch.tensor([3, 4]), ratio=1, block_table=table(2), table_slots=64, **extra)
        for name, t in tensors(rows).items():
            if name != "block_table":
                assert t.untyped_storage().data_ptr() in owned, name
    assert made.col_indices(2).shape == (2, SMALL.topk) and made.col_indices(2).dtype == torch.int32
