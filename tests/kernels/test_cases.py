"""Inputs that broke other two-level indexers, against the oracle, on each kernel set; tests/README.md lists them."""

import dataclasses
import math
import mmap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dsv41.geometry import INT32_MAX, CandidateGeometry
from sglang_dsv41.kernels import PagedKeys, kernel_set_class
from sglang_dsv41.kernels import reference as reference_module
from sglang_dsv41.rows import RowBuffers
from tests.candidates import (
    GARBAGE,
    RELEASED,
    SMALL,
    build,
    check_step,
    consumer_pass,
    dense_scores,
    garbage,
    generator,
    make_problem,
    make_queries,
    poison,
    slot_of,
    source_pass,
    visible_in,
)
from tests.devices import device_of


def whole(problem):
    return slice(0, problem.rows.num_rows)


def reserve(nbytes: int, device: str) -> torch.Tensor:
    """[nbytes] uint8 of address space; on the CPU only the pages that are written take memory."""
    if device == "cuda":
        if torch.cuda.mem_get_info()[0] < nbytes + (1 << 30):
            pytest.skip(f"needs {nbytes >> 30} GiB of free GPU memory")
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python does not name
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


# ---- 64-bit offsets ----


def test_rows_past_2_31_elements(kernels_on):
    """Row 2 of a logits or output tensor starts past 2^31 elements: it is read and written in its own place, and the
    place that a 32-bit offset would name, 2^32 elements before, stays as it was."""
    problem, kernels = build(kernels_on, [200, 65, 130])
    rows, device = problem.rows, device_of(kernels_on)
    dense = source_pass(problem, kernels)
    near = kernels.sparse_logits(problem.queries, problem.keys, rows, whole(problem)).clone()

    stride, base = 2**30 + 64, 2**31
    memory = reserve(4 * (base + 2 * stride + 8192), device)
    halves, words = memory.view(torch.bfloat16), memory.view(torch.int32)

    def far(flat, width, offset):
        return flat.as_strided((3, width), (stride, 1), base + offset)

    problem.buffers._compact = far(halves, SMALL.columns, 0)
    far_dense = far(halves, dense.shape[1], 1024)
    far_dense.copy_(dense)
    tables = far(words, SMALL.topk, 4096), far(words, SMALL.topk, 4096 + 64), far(words, SMALL.topk, 4096 + 128)
    far_picks, far_positions, far_slots = tables
    kernels.select_visible(far_dense, rows, whole(problem), far_picks)
    kernels.select_candidates(
        kernels.sparse_logits(problem.queries, problem.keys, rows, whole(problem)),
        rows,
        whole(problem),
        out_positions=far_positions,
        out_slots=far_slots,
    )
    logits = problem.buffers._compact
    for row, end in enumerate(rows.end.tolist()):
        assert torch.equal(logits[row, :end], near[row, :end])
    poison(rows)
    kernels.publish(far_dense, rows, whole(problem), far_picks)
    check_step(problem, far_dense, far_picks, far_positions, far_slots)
    wrapped = base + 2 * stride - 2**32
    assert not halves[wrapped : wrapped + 8192].any() and not words[wrapped : wrapped + 8192].any()


def test_pages_past_2_31_bytes(kernels_on):
    """Pages up to id 3,000 with a stride of 1,000,000 bytes: dense and sparse logits are those of the bytes there."""
    problem, kernels = build(kernels_on, [192, 130, 70])
    stride, base = 1_000_000, 2_150_000_000  # room for what a 32-bit offset would read
    memory = reserve(base + 3001 * stride, device_of(kernels_on))
    pool = memory.as_strided((3001, 64 * 68), (stride, 1), base)
    table = torch.tensor([[3000, 1, 2999], [2150, 3000, 7], [2148, 2149, 0]], dtype=torch.int32)
    used = sorted({p for line in table.tolist() for p in line})
    for i, page in enumerate(used):
        pool[page].copy_(problem.keys.pool[1 + i])
    problem.keys = PagedKeys(pool=pool, page_slots=64)
    problem.rows.block_table.copy_(table)
    picks = garbage(problem)
    dense = source_pass(problem, kernels, picks)
    positions, slots = consumer_pass(problem, kernels)
    check_step(problem, dense, picks, positions, slots)
    # The oracle reads the same bytes through a compact copy of the pages.
    compact = torch.stack([pool[page].cpu() for page in used])
    there = torch.tensor([[used.index(p) for p in line] for line in table.tolist()], dtype=torch.int32)
    rows = dataclasses.replace(problem.rows, block_table=there)
    oracle = dataclasses.replace(problem, rows=rows, keys=PagedKeys(compact, 64))
    for row, length in enumerate(problem.lens):
        expected = dense_scores(oracle, row)
        error = (dense[row, :length].cpu().double() - expected).abs().max()
        assert error <= 2e-2 * expected.abs().max()
    logits = kernels.sparse_logits(problem.queries, problem.keys, problem.rows, whole(problem))
    for row, length in enumerate(problem.lens):
        blocks = [b for b in problem.rows.sparse_indices[row].tolist() if b != INT32_MAX]
        where = visible_in(blocks, length, SMALL.kernel_block)
        assert torch.equal(logits[row, : len(where)], dense[row, where].to(torch.bfloat16))


# ---- selection ----


@pytest.mark.parametrize("select", ["candidates", "visible"])
def test_ties_at_the_released_size(kernels_on, select):
    """16,384 columns, 100 winners and the rest zero: exactly 512 unique valid picks, the winners among them."""
    problem, kernels = build(kernels_on, [16384], RELEASED)
    rows, device = problem.rows, problem.rows.lens.device
    winners = torch.randperm(16384, generator=generator(5))[:100].tolist()
    if select == "visible":
        logits, slots = problem.buffers.dense_logits(1, 16384), garbage(problem)
    else:
        rows.sparse_indices.copy_(torch.arange(2048, device=device))
        rows.end.fill_(16384)
        logits, positions = problem.buffers.compact_logits(1), garbage(problem)
    logits.zero_()
    logits[0, winners] = 1.0
    if select == "visible":
        kernels.select_visible(logits, rows, whole(problem), slots)
        at = {slot_of(rows, 0, p): p for p in range(16384)}
        picks = [at[s] for s in slots[0].tolist()]
    else:
        kernels.select_candidates(logits, rows, whole(problem), out_positions=positions, out_slots=None)
        picks = positions[0].tolist()
    assert len(picks) == len(set(picks)) == 512 and min(picks) >= 0 and max(picks) < 16384
    assert set(winners) <= set(picks)


@pytest.mark.parametrize("field", ["q", "weights"])
def test_nan_row_in_every_output(kernels_on, field):
    """A row of NaN names only places of its own, in the source and in a consumer; its neighbours pick by their
    own scores."""
    problem, kernels = build(kernels_on, [100, 150, 130])
    getattr(problem.queries, field)[1] = math.nan
    picks = garbage(problem)
    dense = source_pass(problem, kernels, picks)
    positions, slots = consumer_pass(problem, kernels)
    check_step(problem, dense, picks, positions, slots, which=[0, 2])
    # One output alone takes another way through the selection.
    alone = garbage(problem)
    logits = kernels.sparse_logits(problem.queries, problem.keys, problem.rows, whole(problem))
    kernels.select_candidates(logits, problem.rows, whole(problem), out_positions=None, out_slots=alone)
    own = {-1} | {slot_of(problem.rows, 1, p) for p in range(150)}
    assert all(set(out[1].tolist()) <= own for out in (picks, slots, alone))
    assert set(positions[1].tolist()) <= set(range(-1, 150))
    blocks = [b for b in problem.rows.sparse_indices[1].tolist() if b != INT32_MAX]
    assert blocks == sorted(set(blocks)) and (150 - 1) // 8 in blocks and len(blocks) == SMALL.topk_blocks


# ---- capacities and what a step before has left ----


@pytest.mark.parametrize("capacity", [0, 63, 64, 65, 129])
def test_lengths_at_every_capacity(kernels_on, capacity):
    """Lengths on both sides of a tile's edge at capacities that are no multiple of it: all visible positions of a row
    and no other, whatever lies past them."""
    lens = [min(n, capacity) for n in (0, 1, 63, 64, 65, 129)]
    problem, kernels = build(kernels_on, lens)
    picks = garbage(problem)
    dense = torch.full((len(lens), capacity), math.nan, dtype=torch.bfloat16, device=problem.rows.lens.device)
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        column = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(column >= problem.rows.lens[tile, None], 3e38)
        logits = logits[:, : max(capacity, 1)]
        kernels.publish(logits, problem.rows, tile, picks)
        dense[tile] = logits[:, :capacity]
    check_step(problem, dense, picks, *consumer_pass(problem, kernels))


@pytest.mark.parametrize("count", [0, 3])
def test_table_of_no_pages(kernels_on, count):
    """A page table without a column, as of a batch that has no page yet: nothing visible, every output -1."""
    device = device_of(kernels_on)
    problem, kernels = build(kernels_on, [64] * 3)
    table = torch.empty((count, 0), dtype=torch.int32, device=device)
    positions = torch.tensor([0, 63, -1], device=device)[:count]
    rows = problem.buffers.rows(positions, ratio=1, block_table=table, table_slots=64)
    poison(rows)
    problem = dataclasses.replace(problem, rows=rows, queries=problem.queries[:count])
    out = garbage(problem)
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.publish(logits, rows, tile, out)
    assert rows.lens.tolist() == [0] * count and rows.end.tolist() == [0] * count
    for picks in (out, *consumer_pass(problem, kernels)):
        assert (picks == -1).all()


@pytest.mark.parametrize("capacity", [64, 128, 192])
def test_steps_over_stale_buffers(kernels_on, capacity):
    """Full, 0, 65, 63, full rows on the same buffers, each after the scratch was filled with NaN or with a huge score:
    a step reads nothing that it did not write."""
    problem, kernels = build(kernels_on, [capacity] * 3)
    table, buffers = problem.rows.block_table, problem.buffers
    for step, length in enumerate((capacity, 0, 65, 63, capacity)):
        stale = (math.nan, 3e38)[step % 2]
        buffers._dense.fill_(stale)
        buffers._compact.fill_(stale)
        buffers._columns.fill_(GARBAGE)
        positions = torch.tensor([length, max(0, length - 1), 0], device=table.device) - 1
        problem.rows = buffers.rows(positions, ratio=1, block_table=table, table_slots=64)
        poison(problem.rows)
        picks = garbage(problem)
        dense = source_pass(problem, kernels, picks)
        buffers._compact.fill_(stale)
        check_step(problem, dense, picks, *consumer_pass(problem, kernels))


# ---- which kernels run, and what they allocate ----


def test_native_kernels_run_and_the_fallback_does_not(kernels_on, monkeypatch):
    """32 heads: the set's own operations are counted, and no scoring, block choice or expansion of the torch oracle
    runs beneath them."""
    if kernels_on.startswith("reference"):
        pytest.skip("needs a set other than the reference: it is the fallback")
    geometry = dataclasses.replace(SMALL, heads=32)
    problem, kernels = build(kernels_on, [100, 9, 0], geometry)

    def fail(*args, **kwargs):
        raise AssertionError("the torch fallback ran")

    for name in ("dequantize_keys", "index_logits", "choose_candidate_blocks", "expand_candidate_blocks"):
        monkeypatch.setattr(reference_module, name, fail)
    monkeypatch.setattr(reference_module, "paged_index_logits", fail)
    monkeypatch.setattr(reference_module, "map_columns", fail)
    if kernels_on.endswith("cuda"):
        from sglang_dsv41.kernels import portable

        source_pass(problem, kernels, garbage(problem))
        monkeypatch.setattr(portable, "topk_columns", fail)
        consumer_pass(problem, kernels)
    else:
        source_pass(problem, kernels, garbage(problem))
        consumer_pass(problem, kernels)
    names = ["dense_logits", "sparse_logits", "select_candidates"]
    # A set may publish in one launch.
    names += ["publish"] if kernels.calls["publish"] else ["select_visible", "choose_blocks", "expand"]
    assert [kernels.calls[name] for name in names] == [1] * len(names)


class Allocations(TorchDispatchMode):
    """The largest tensors that torch operations return: (elements, bytes)."""

    def __init__(self):
        super().__init__()
        self.elements = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in inputs:
                self.elements = max(self.elements, t.numel())
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def only_portable(kernels_on):
    if kernels_on.startswith("reference"):
        pytest.skip("needs a set other than the reference: it gathers keys, a bounded number at once")


def test_no_intermediate_of_heads_or_of_keys(kernels_on):
    """A step makes no tensor of [rows, heads, width] and no copy of [rows, positions, 128], in either pass."""
    only_portable(kernels_on)
    geometry = CandidateGeometry(topk_blocks=64, block_size=8, topk=16, heads=32)
    problem, kernels = build(kernels_on, [700, 650, 0, 512], geometry)
    with Allocations() as seen:
        source_pass(problem, kernels, garbage(problem))
        consumer_pass(problem, kernels)
    rows, narrow = 4, min(geometry.columns, 704)
    assert 0 < seen.elements < rows * geometry.heads * narrow // 2


def test_consumer_memory_follows_the_columns_not_the_capacity(kernels_on):
    """Rows of 8 visible positions in a table for 1,048,576: no tensor above rows * 16,384 * 8 bytes."""
    only_portable(kernels_on)
    device = device_of(kernels_on)
    rows = 1536 if device == "cuda" else 8
    # 16,384 columns in few blocks, which the interpreter sorts in no time.
    geometry = CandidateGeometry(topk_blocks=128, block_size=128, topk=512, heads=32)
    buffers = RowBuffers(
        geometry, max_rows=rows, scratch_bytes=1 << 30, max_context=1 << 20, dense_rows=1, device=device
    )
    kernels = kernel_set_class(kernels_on.split("-")[0])(geometry, buffers)
    pages = make_problem([64], geometry, device=device)
    # Every line of the table is as wide as the capacity, and all name one page.
    table = torch.ones(1, (1 << 20) // 64, dtype=torch.int32, device=device).expand(rows, -1)
    queries = make_queries(rows, 32, 3, device=device)
    live = buffers.rows(torch.full((rows,), 7, device=device), ratio=1, block_table=table, table_slots=64)
    poison(live)
    blocks = torch.zeros(rows, 1, dtype=torch.int32, device=device)
    slots = torch.full((rows, geometry.topk), GARBAGE, dtype=torch.int32, device=device)
    with Allocations() as seen:
        kernels.expand(blocks, live, slice(0, rows))
        logits = kernels.sparse_logits(queries, pages.keys, live, slice(0, rows))
        kernels.select_candidates(logits, live, slice(0, rows), out_positions=None, out_slots=slots)
    assert seen.bytes <= rows * 16384 * 8
    assert slots.sort(1).values.tolist() == [[-1] * 504 + list(range(64, 72))] * rows


def test_short_rows_cost_their_own_columns(kernels_on):
    """A short request's consumer pass scores its visible positions and no column more."""
    only_portable(kernels_on)
    problem, kernels = build(kernels_on, [3, 17, 0, 64, 1])
    source_pass(problem, kernels)
    problem.buffers._compact.fill_(12345.0)
    logits = kernels.sparse_logits(problem.queries, problem.keys, problem.rows, whole(problem))
    for row, length in enumerate(problem.lens):
        assert (logits[row, length:] == 12345.0).all() and (logits[row, :length] != 12345.0).all()


def test_ramp_of_lengths_in_passes(kernels_on):
    """Many rows whose lengths ramp up, over several passes of the scratch: each is selected by its own length."""
    count = 96 if device_of(kernels_on) == "cpu" else 512
    row_bytes = 2 * SMALL.columns
    problem, kernels = build(kernels_on, [1 + 3 * i for i in range(count)], scratch_bytes=40 * row_bytes)
    assert len(list(kernels.passes(count))) == -(-count // 40)
    picks = garbage(problem)
    dense = source_pass(problem, kernels, picks)
    check_step(problem, dense, picks, *consumer_pass(problem, kernels))
