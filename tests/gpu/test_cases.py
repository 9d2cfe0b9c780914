"""Inputs that broke other two-level indexers and that only a GPU can show; tests/README.md lists them.

Needs a CUDA GPU of compute capability 8.0 or newer and SGLang; the largest need 40 GB. DSV41_TEST_REPLAYS sets the
replays of the soak (default 500).
"""

import dataclasses
import functools
import math
import os
import random

import pytest

pytest.importorskip("sglang")

import msgspec
import torch

from tests.devices import HAS_GPU

if not HAS_GPU:
    pytest.skip("needs a CUDA GPU of compute capability 8.0 or newer", allow_module_level=True)

import triton
import triton.language as tl

from sglang_dsv41.geometry import INT32_MAX
from sglang_dsv41.kernels import kernel_set_class
from sglang_dsv41.rows import RowBuffers
from tests.candidates import (
    RELEASED,
    SMALL,
    Problem,
    assert_selection,
    check_step,
    consumer_pass,
    garbage,
    make_keys,
    make_queries,
    poison,
    slot_of,
    source_pass,
)
from tests.watchdog import HangError, wait_for
from tests.world import CONSUMER, GARBAGE, GEOMETRY, LAST, SOURCE, World, copy_request, picks, positions_of, span

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WATCHDOG_SECONDS = 60.0  # for 50 replays of milliseconds each
EVERY_BLOCK = dataclasses.replace(GEOMETRY, topk_blocks=96)


class Captured:
    """One decode step of a world, source and two consumers, as a CUDA graph over inputs that can be rewritten."""

    def __init__(self, world: World, rows, *, is_verify=False, before=None, positions=None):
        self.world = world
        self.inputs = [world.decode(layer, rows, is_verify=is_verify) for layer in (SOURCE, CONSUMER, LAST)]

        if positions is not None:
            self.inputs = [msgspec.structs.replace(one, positions=positions) for one in self.inputs]

        def step():
            if before is not None:
                before()
            schedule = world.indexer.publish_decode(self.inputs[0])
            world.indexer.consume_decode(self.inputs[1], schedule)
            world.indexer.consume_decode(self.inputs[2], schedule)
            return schedule

        step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.schedule = step()

    @property
    def outs(self):
        return [one.out_page_indices for one in self.inputs]

    def fill(self, rows):
        request, position, x, q_lora, _ = self.world.row_tensors(rows)
        for one in self.inputs:
            fresh = self.world.decode(one.layer_id, rows, is_verify=one.is_verify)
            one.positions.copy_(position)
            one.req_rows.copy_(request)
            one.x.copy_(x)
            one.q_lora.copy_(q_lora)
            one.paged_metadata.page_table.copy_(fresh.paged_metadata.page_table)

    def replay(self, rows=None, *, stale=None):
        if rows is not None:
            self.fill(rows)
        poison(self.schedule.rows)
        if stale is not None:
            self.world.buffers._dense.fill_(stale)
            self.world.buffers._compact.fill_(stale)
            self.world.buffers._maxima.fill_(stale)
            self.world.buffers._columns.fill_(GARBAGE)
        for out in self.outs:
            out.fill_(GARBAGE)
        self.graph.replay()
        torch.cuda.synchronize()
        return [picks(out) for out in self.outs]

    def check(self, rows):
        world, schedule = self.world, self.schedule
        world.check_source(rows, self.outs[0])
        world.check_schedule(rows, schedule)
        world.check_consumer(CONSUMER, rows, schedule, slots=self.outs[1])
        world.check_consumer(LAST, rows, schedule, slots=self.outs[2])


# ---- captured steps ----


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_all_lengths_zero_under_capture(kernels_on_gpu, rows):
    """A graph captured on rows of length 0, as SGLang captures, and replayed on them, after live rows too: every output
    is -1."""
    world = World(kernels_on_gpu, requests=4)
    empty, live = [(0, -1)] * rows, [(1 + i % 4, 7 * i + 5) for i in range(rows)]
    captured = Captured(world, empty)
    for replay in (empty, live, empty):
        outs = captured.replay(replay, stale=math.nan)
        captured.check(replay)
        if replay is empty:
            assert all(pick == -1 for out in outs for line in out for pick in line)
            assert (captured.schedule.rows.end == 0).all()
            assert (captured.schedule.rows.sparse_indices == INT32_MAX).all()


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_replays_over_stale_buffers(kernels_on_gpu, pages):
    """Full, 0, 65, 63, full visible positions at capacities of 256, 512 and 768, the scratch filled with NaN or with a
    huge score before each replay: a replay reads nothing that it did not write."""
    world = World(kernels_on_gpu, requests=3, pages=pages)
    full = pages * 256
    captured = Captured(world, [(r, full - 1) for r in (1, 2, 3)])
    for replay, length in enumerate((full, 0, 65, 63, full)):
        rows = [(1, length - 1), (2, max(0, length - 1) - 1), (3, -1)]
        captured.replay(rows, stale=(math.nan, 3e38)[replay % 2])
        captured.check(rows)


def test_identical_requests_under_a_graph(kernels_on_gpu):
    """Eight requests of one content on pages of their own, in one graph, select what one selects in a graph of one, but
    for a tie at the cut."""
    # Every block is a candidate, so that a tie between blocks moves no pick.
    world = World(kernels_on_gpu, geometry=EVERY_BLOCK, requests=8, pages=2)
    copy_request(world, 2, [1, 3, 4, 5, 6, 7, 8])
    one, eight = Captured(world, [(2, 0)]), Captured(world, [(r, 0) for r in range(1, 9)])
    for position in (400, 63, 255, 511):
        rows = [(r, position) for r in range(1, 9)]
        one.replay([(2, position)])
        one.check([(2, position)])
        alone = [set(positions_of(world, [(2, position)], out)[0]) for out in one.outs]
        eight.replay(rows)
        eight.check(rows)
        for single, out in zip(alone, eight.outs, strict=True):
            assert all(len(single - set(line)) <= 1 for line in positions_of(world, rows, out))


def test_ragged_groups_under_a_graph(kernels_on_gpu):
    """Groups of 6, 1, 3 and 6 draft rows and a padded tail, replayed in a graph that was captured on other groups."""
    world = World(kernels_on_gpu, requests=4)
    captured = Captured(world, span(1, 0, 6) + span(2, 0, 6) + span(3, 0, 6), is_verify=True)
    live = span(1, 60, 6) + span(2, 255, 1) + span(3, 508, 3) + span(4, 0, 6)
    rows = live + [(0, -1)] * 2
    captured.replay(rows, stale=math.nan)
    captured.check(rows)
    assert all((out[len(live) :] == -1).all() for out in captured.outs)


@triton.jit
def _write_positions(batches_ptr, counter_ptr, positions_ptr, ROWS: tl.constexpr, BATCHES: tl.constexpr):
    batch = tl.load(counter_ptr) % BATCHES
    row = tl.arange(0, ROWS)
    tl.store(positions_ptr + row, tl.load(batches_ptr + batch * ROWS + row))
    tl.store(counter_ptr, batch + 1)


def without_programmatic_launch(monkeypatch):
    """SGLang's selection kernels as it compiles them for GPUs that have no programmatic launch."""
    from sglang.kernels.ops.attention.dsv4 import candidate_blocks, topk

    for module, names in (
        (topk, ("_jit_topk_v1_module", "_jit_topk_v2_module", "_jit_topk_bf16_small_module")),
        (candidate_blocks, ("_jit_block_amax_module",)),
    ):
        monkeypatch.setattr(module, "is_arch_support_pdl", lambda: False)
        for name in names:
            monkeypatch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))


@pytest.mark.parametrize("programmatic", [True, False], ids=["programmatic launch", "plain launch"])
def test_lengths_written_right_before(kernels_on_gpu, programmatic, monkeypatch):
    """The kernel that writes the positions is the one before ours in the graph; over 1,000 replays no step selects by
    the positions of another replay."""
    if not programmatic:
        without_programmatic_launch(monkeypatch)
    world = World(kernels_on_gpu, geometry=EVERY_BLOCK, requests=4)
    batches = [[599, 0, 63, 300], [0, 599, 255, 64], [-1, -1, -1, -1], [64, 65, 599, 7]]
    table = torch.tensor(batches, dtype=torch.int64, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    shared = torch.zeros(4, dtype=torch.int64, device="cuda")

    def producer():
        _write_positions[(1,)](table, counter, shared, ROWS=4, BATCHES=4)

    captured = Captured(world, [(r, 0) for r in (1, 2, 3, 4)], before=producer, positions=shared)
    slots = world.keys.pool.shape[0] * world.index_page
    best, score_of = [], []
    for batch in batches:
        # What each layer scores at these positions, by pool slot; the last column stands for no pick.
        counter.fill_(batches.index(batch))
        captured.replay()
        assert captured.schedule.rows.lens.tolist() == [p + 1 for p in batch]
        for one, out in zip(captured.inputs, captured.outs, strict=True):
            queries = world.kernels.project(one)
            rows = world.buffers.rows(
                torch.full_like(shared, 767), ratio=1, block_table=one.paged_metadata.page_table, table_slots=64
            )
            ((_, logits),) = world.kernels.dense_logits_tiles(queries, world.keys, rows)
            position = torch.arange(768, device="cuda")
            slot = rows.block_table.long().gather(1, (position // 64).expand(4, -1)) * 64 + position % 64
            by_slot = torch.full((4, slots + 1), -math.inf, device="cuda").scatter_(1, slot, logits.float())
            visible = logits.float().masked_fill(position >= shared[:, None] + 1, -math.inf)
            score_of.append(by_slot)
            best.append(visible.topk(16, dim=1).values.sort(1).values)
            assert torch.equal(by_slot.gather(1, out.long() % (slots + 1)).sort(1).values, best[-1])
    counter.zero_()
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    for replay in range(1000):
        captured.graph.replay()
        for layer, out in enumerate(captured.outs):
            which = 3 * (replay % 4) + layer
            picked = score_of[which].gather(1, out.long() % (slots + 1)).sort(1).values
            wrong += (picked != best[which]).sum()
    assert int(wrong) == 0


def test_a_long_prefill_and_then_capture(kernels_on_gpu):
    """The first chunk of the largest size, then the capture of the largest batch: no buffer moves, grows or retires."""
    world = World(kernels_on_gpu, requests=6, max_rows=48)
    before = {k: v.data_ptr() for k, v in vars(world.buffers).items() if isinstance(v, torch.Tensor)}
    world.check_extend(span(1, 250, 48))
    rows = [(1 + i % 6, 12 * i) for i in range(48)]
    captured = Captured(world, rows)
    captured.replay(rows)
    captured.check(rows)
    assert before == {k: v.data_ptr() for k, v in vars(world.buffers).items() if isinstance(v, torch.Tensor)}
    assert not world.buffers._retired


def test_more_rows_than_the_prefill_chunk(kernels_on_gpu):
    """A chunk of 8 rows and a batch of 48: the buffers hold what is captured, and select right."""
    world = World(kernels_on_gpu, requests=6, max_rows=48)
    world.check_extend(span(1, 250, 8))
    rows = [(1 + i % 6, 12 * i) for i in range(48)]
    captured = Captured(world, [(0, -1)] * 48)
    captured.replay(rows, stale=3e38)
    captured.check(rows)


# ---- sizes ----


def shared_prefix(lens: list[int], capacity: int, *, scratch_bytes: int, dense_rows: int) -> Problem:
    """Released geometry; the rows are those of one request, so all read one line of pages."""
    device, pages = "cuda", -(-capacity // 64)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1
    table = order.to(device, torch.int32)[None].expand(len(lens), -1)
    buffers = RowBuffers(
        RELEASED,
        max_rows=len(lens),
        scratch_bytes=scratch_bytes,
        max_context=pages * 64,
        dense_rows=dense_rows,
        device=device,
    )
    positions = torch.tensor(lens, device=device) - 1
    rows = buffers.rows(positions, ratio=1, block_table=table, table_slots=64)
    poison(rows)
    keys, queries = make_keys(pages + 1, 64, 2, device=device), make_queries(len(lens), 32, 3, device=device)
    return Problem(geometry=RELEASED, keys=keys, queries=queries, rows=rows, buffers=buffers)


def test_large_ragged_batch(kernels_on_gpu):
    """16,384 rows whose lengths ramp from 1 to 8,192: rows from every pass are selected by their own lengths."""
    lens = [1 + i // 2 for i in range(16384)]
    problem = shared_prefix(lens, 8192, scratch_bytes=128 << 20, dense_rows=16384)
    kernels = kernel_set_class(kernels_on_gpu.split("-")[0])(RELEASED, problem.buffers)
    assert len(list(kernels.passes(len(lens)))) == 4
    slots = garbage(problem)
    dense = source_pass(problem, kernels, slots)
    positions, out = consumer_pass(problem, kernels)
    visible = problem.rows.lens[:, None]
    assert (problem.rows.end == problem.rows.lens).all(), "every block of a row this short is a candidate"
    assert ((positions >= -1) & (positions < visible)).all()
    assert ((positions >= 0).sum(1) == visible[:, 0].clamp_max(512)).all()
    check_step(problem, dense, slots, positions, out, which=[0, 7, 511, 1025, 4095, 4096, 8191, 12289, 16383])


def test_consumer_memory_at_a_long_context(kernels_on_gpu):
    """4,096 rows at 1,048,576 positions: a consumer takes its rows * 16,384 bf16 logits and a fixed part."""
    rows, length = 4096, 1 << 20
    problem = shared_prefix([length] * rows, length, scratch_bytes=rows * 16384 * 2, dense_rows=1)
    kernels = kernel_set_class(kernels_on_gpu.split("-")[0])(RELEASED, problem.buffers)
    assert problem.buffers._compact.numel() * 2 <= rows * 16384 * 2
    gen = torch.Generator().manual_seed(4)
    first = torch.arange(2047, dtype=torch.int32) * 64 + torch.randint(0, 64, (2047,), generator=gen, dtype=torch.int32)
    blocks = torch.cat([first, torch.tensor([131071], dtype=torch.int32)]).cuda()[None].expand(rows, -1).contiguous()
    out = garbage(problem)
    for run in range(2):  # the first one compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernels.expand(blocks, problem.rows, slice(0, rows))
        logits = kernels.sparse_logits(problem.queries, problem.keys, problem.rows, slice(0, rows))
        kernels.select_candidates(logits, problem.rows, slice(0, rows), out_positions=None, out_slots=out)
        torch.cuda.synchronize()
        if run:
            assert torch.cuda.max_memory_allocated() - before <= 64 << 20
    listed = sorted(blocks[0].tolist())
    columns = [(b, b * 8 + i) for b in listed for i in range(8)]
    for row in (0, 2049, 4095):
        assert problem.rows.sparse_indices[row].tolist() == listed
        values = logits[row].tolist()
        scores = {slot_of(problem.rows, row, p): values[c] for c, (_, p) in enumerate(columns)}
        assert_selection(out[row].tolist(), scores, 512, tolerance=0)


# A signal's handler waits for the call that hangs; a thread ends the process.
@pytest.mark.timeout(1800, method="thread")
def test_soak_at_a_long_context(kernels_on_gpu):
    """Six rows at 245,760 positions in one graph, replayed many times under a watchdog: the selection stays."""
    replays = int(os.environ.get("DSV41_TEST_REPLAYS", "500"))
    problem = shared_prefix([245_760 - i for i in range(6)], 245_760, scratch_bytes=256 << 20, dense_rows=6)
    kernels = kernel_set_class(kernels_on_gpu.split("-")[0])(RELEASED, problem.buffers)
    picked, positions, out = garbage(problem), garbage(problem), garbage(problem)
    keep = []

    def step():
        dense = source_pass(problem, kernels, picked)
        logits = kernels.sparse_logits(problem.queries, problem.keys, problem.rows, slice(0, 6))
        kernels.select_candidates(logits, problem.rows, slice(0, 6), out_positions=positions, out_slots=out)
        return dense

    keep.append(step())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = step()
    for tensor in (picked, positions, out):
        tensor.fill_(GARBAGE)
    graph.replay()
    torch.cuda.synchronize()
    check_step(problem, dense, picked, positions, out, which=[0, 5])
    # Ties at the cut may fall differently; the scores picked may not.
    column = positions.long()
    expected = dense.gather(1, column).sort(1).values.clone()
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    done = torch.cuda.Event()
    for replay in range(1, replays + 1):
        graph.replay()
        wrong += (dense.gather(1, positions.long()).sort(1).values != expected).sum()
        if replay % 50 == 0 or replay == replays:
            done.record()
            try:
                wait_for(done, WATCHDOG_SECONDS, f"replay {replay} of {replays}")
            except HangError as error:
                pytest.exit(f"{kernels_on_gpu}: {error}", returncode=1)  # no other test can run on this GPU now
    assert int(wrong) == 0
    print(f"{kernels_on_gpu}: {replays} replays of 6 rows at 245,760 positions, none wrong, none hung")


def test_random_order_of_graphs(kernels_on_gpu):
    """Graphs of 1, 8 and 64 rows over one set of buffers, replayed in random order: each by its own rows."""
    world = World(kernels_on_gpu, requests=6)
    graphs = {count: Captured(world, [(0, -1)] * count) for count in (1, 8, 64)}
    chance = random.Random(1)
    for _ in range(12):
        count = chance.choice((1, 8, 64))
        rows = [chance.choice([(0, -1), (chance.randint(1, 6), chance.randint(0, 767))]) for _ in range(count)]
        graphs[count].replay(rows)
        graphs[count].check(rows)


def test_fallback_does_not_run_on_the_gpu(kernels_on_gpu, monkeypatch):
    """32 heads on a GPU: the consumer's selection and scoring are kernels, never the torch way of the reference."""
    from sglang_dsv41.kernels import portable, reference

    def fail(*args, **kwargs):
        raise AssertionError("the torch fallback ran")

    world = World(kernels_on_gpu)
    assert world.geometry.heads == 32 and world.geometry.topk < SMALL.columns
    rows = [(1, 300), (2, 64)]
    schedule = world.indexer.publish_decode(world.decode(SOURCE, rows))
    monkeypatch.setattr(portable, "topk_columns", fail)
    for name in ("dequantize_keys", "index_logits", "topk_columns", "map_columns", "expand_candidate_blocks"):
        monkeypatch.setattr(reference, name, fail)
    inputs = world.decode(CONSUMER, rows)
    world.indexer.consume_decode(inputs, schedule)
    world.check_consumer(CONSUMER, rows, schedule, slots=inputs.out_page_indices)
    assert world.kernels.name == kernels_on_gpu.split("-")[0] and world.kernels.calls["consume_decode"] == 1
