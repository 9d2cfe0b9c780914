"""Inputs that broke other two-level indexers, on SGLang's own inputs, pools and index modules; tests/README.md lists
them."""

import dataclasses

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dsv41.kernels import IndexQueries
from tests.candidates import make_problem
from tests.devices import device_of
from tests.world import CONSUMER, GEOMETRY, LAST, SOURCE, World, copy_request, move_pages, picks, positions_of, span

pytestmark = pytest.mark.usefixtures("one_thread")


def exact(world) -> bool:
    """Whether equal rows of two batches select alike to the last tie: a GPU's GEMM rounds by the batch size, and its
    top-k breaks ties by chance. There the oracle decides, row by row."""
    return world.device == "cpu"


def check_decode(world, rows, schedule, outs):
    world.check_source(rows, outs[0])
    world.check_schedule(rows, schedule)
    for layer, out in zip((CONSUMER, LAST), outs[1:], strict=True):
        world.check_consumer(layer, rows, schedule, slots=out)


# ---- groups of draft rows ----


def test_groups_of_one_to_seven(kernels_on):
    """A request's 1 to 7 draft rows select, together, what each selects alone as a decode row."""
    world = World(kernels_on)
    rows = span(2, 250, 7)
    alone = [[picks(out)[0] for out in world.decode_step([row])[1:]] for row in rows]
    for group in range(1, 8):
        schedule, *outs = world.decode_step(rows[:group], is_verify=True)
        check_decode(world, rows[:group], schedule, outs)
        if exact(world):
            assert [picks(out) for out in outs] == [[row[i] for row in alone[:group]] for i in range(3)], group


def test_ragged_groups_with_a_padded_tail(kernels_on):
    """Groups of 6, 1, 3 and 6 rows and a tail of padded rows: each live row by the oracle, the tail selects nothing."""
    world = World(kernels_on)
    live = span(1, 60, 6) + span(2, 255, 1) + span(3, 508, 3) + span(4, 0, 6)
    schedule, *outs = world.decode_step(live + [(0, -1)] * 5, is_verify=True, out_rows=24)
    assert schedule.rows.lens.tolist() == [world.visible(row) for row in live] + [0] * 5
    world.check_schedule(live + [(0, -1)] * 5, schedule)
    check_decode(world, live, schedule, outs)
    assert all((out[len(live) :] == -1).all() for out in outs)


# ---- which rows share a step ----


def test_identical_requests_with_pages_of_their_own(kernels_on):
    """Eight requests of the same content, each on its own pages, select the positions that one selects alone."""
    world = World(kernels_on, requests=8, pages=2)
    copy_request(world, 2, [r for r in range(1, 9) if r != 2])
    alone = [positions_of(world, [(2, 400)], out) for out in world.decode_step([(2, 400)])[1:]]
    rows = [(r, 400) for r in range(1, 9)]
    schedule, *outs = world.decode_step(rows)
    check_decode(world, rows, schedule, outs)
    if exact(world):
        assert [positions_of(world, rows, out) for out in outs] == [one * 8 for one in alone]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("dense_extend", [False, True], ids=["", "own extend"])
def test_rows_dealt_to_two_ranks(kernels_on, dense_extend, ratio):
    """Every other row of a chunk on each of two ranks, of one request a single row: a rank's rows select what they select
    in the whole, though it has no row of a request and is told no row's request."""
    rows = span(1, 250, 9) + span(4, 30, 1) + span(2, 60, 4) + span(3, 0, 3)
    options = dict(dense_extend=dense_extend, ratio=ratio)
    whole = World(kernels_on, **options).extend_step(rows)
    for rank in (0, 1):
        part = rows[rank::2]
        world = World(kernels_on, **options)
        schedule, *outs = world.check_extend(part, chunk=rows)
        assert outs[0].req_rows is None and outs[0].rows_per_request == [[5, 0, 2, 2], [4, 1, 2, 1]][rank]
        assert schedule.rows.lens.tolist() == [world.visible(row) for row in part]
        if dense_extend:
            world.check_source(part, outs[0].out_page_indices)
            assert schedule.rows.row_indices.tolist() == [r for r, _ in part]
            last = schedule.tail([min(1, n) for n in outs[0].rows_per_request])
            assert last.rows.row_indices.tolist() == list(dict.fromkeys(r for r, _ in part))
        for one, all_rows in zip(outs, whole[1:], strict=True) if exact(world) else ():
            assert picks(one.out_raw_indices) == picks(all_rows.out_raw_indices)[rank::2]
            assert picks(one.out_page_indices) == picks(all_rows.out_page_indices)[rank::2]


@pytest.mark.parametrize("dense_extend", [False, True], ids=["", "own extend"])
def test_a_rank_whose_rows_see_nothing(kernels_on, dense_extend):
    """The first two tokens of a request at ratio 2, dealt to two ranks: one sees no position, the other one."""
    rows = span(1, 0, 2)
    for rank, expected in ((0, [-1] * 16), (1, [-1] * 15 + [0])):
        world = World(kernels_on, dense_extend=dense_extend, ratio=2)
        schedule, *outs = world.extend_step(rows[rank:][:1], chunk=rows)
        world.check_schedule(rows[rank:][:1], schedule)
        assert [picks(out.out_raw_indices) for out in outs] == [[expected]] * 3
        slots = [-1 if p == -1 else world.slot(1, p) for p in expected]
        assert [picks(out.out_page_indices) for out in outs] == [[slots]] * 3


def test_two_ranks_of_unequal_batches(kernels_on):
    """A batch dealt to two data-parallel ranks, five long rows and one short: each row as in one batch of all."""
    rows = [(1, 599), (2, 500), (3, 301), (4, 64), (1, 8), (2, 0)]
    whole = [picks(out) for out in World(kernels_on).decode_step(rows)[1:]]
    dealt = []
    for part in (rows[:5], rows[5:]):
        world = World(kernels_on)
        schedule, *outs = world.decode_step(part)
        check_decode(world, part, schedule, outs)
        dealt.append([picks(out) for out in outs])
    assert not exact(world) or [a + b for a, b in zip(*dealt, strict=True)] == whole


def test_fabricated_rows_of_an_idle_rank(kernels_on):
    """An idle rank runs an extend of made-up rows: request 0, position 0 each. They select in SGLang's reserved page or
    nothing, and leave nothing behind for the next step; made of no row at all, they run no kernel."""
    world = World(kernels_on)
    before = world.extend_step(span(1, 9, 4))[0]
    _, source, first, last = world.extend_step([(0, 0)] * 4, seen=[4])
    for one in (source, first, last):
        assert picks(one.out_raw_indices) == [[-1] * 15 + [0]] * 4
        assert picks(one.out_page_indices) == [[-1] * 15 + [0]] * 4
    rows = [(2, 300), (3, 64)]
    schedule, *outs = world.decode_step(rows)
    check_decode(world, rows, schedule, outs)
    counted = dict(world.kernels.calls)
    chunk = world.extend(CONSUMER, span(1, 9, 1))
    nothing = {name: getattr(chunk, name)[:0] for name in ("x", "q_lora", "positions", "req_rows")}
    fields = {name: getattr(chunk, name) for name in chunk.__struct_fields__}
    for published in (None, before):
        empty = type(chunk)(**{**fields, **nothing, "rows_per_request": [0]})
        world.indexer.consume_prefill(empty, published)
        assert (empty.out_raw_indices == -1).all() and (empty.out_page_indices == -1).all()
    assert dict(world.kernels.calls) == counted


# ---- where index K lives ----


def test_transferred_pages_are_all_the_state(kernels_on):
    """A decode on an indexer that never saw the prefill, from the same bytes on other pages, selects the positions of
    the one that did; so does the first one after its own pages moved."""
    rows = [(1, 300), (2, 64), (3, 599)]
    here, there = World(kernels_on), World(kernels_on)
    here.extend_step(span(1, 290, 10) + span(2, 55, 9))
    expected = [positions_of(here, rows, out) for out in here.decode_step(rows)[1:]]
    for world in (there, here):
        moved = move_pages(world)
        assert moved != 0
        schedule, *outs = world.decode_step(rows)
        check_decode(world, rows, schedule, outs)
        if exact(world):
            assert [positions_of(world, rows, out) for out in outs] == expected


def test_keys_that_sglang_writes(kernels_on):
    """Keys stored by SGLang's own writer, an exponent of 120 + slot % 8 in each slot: a logit is that of the keys as
    they were, so writer and reader agree on where payload and exponents lie."""
    world, device = World(kernels_on), device_of(kernels_on)
    problem = make_problem([190], world.geometry, device=device)
    gen = torch.Generator().manual_seed(3)
    slots = torch.arange(190) + 2 * 64
    grid = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    keys = grid[torch.randint(0, 7, (190, 128), generator=gen)]
    keys *= torch.randint(0, 2, keys.shape, generator=gen) * 2 - 1
    keys[:, ::32] = 6.0  # a group's largest value fixes its exponent
    keys *= torch.exp2((120.0 + slots % 8) - 127)[:, None]
    order = torch.randperm(190, generator=gen)
    world.pool.index_pools[1].set_index_fp4(
        0, slots[order].to(device), keys[order].to(torch.bfloat16).to(device).contiguous()
    )
    stored = world.keys.pool[2:5, 64 * 64 :].view(3, 64, 4).flatten(0, 1)[:190]
    assert stored.tolist() == [[120 + s % 8] * 4 for s in slots.tolist()]
    # All weights positive: no cancellation, so a position's own magnitude bounds its rounding.
    queries = IndexQueries(problem.queries.q, problem.queries.weights.abs())
    table = torch.tensor([[2, 3, 4]], dtype=torch.int32, device=device)
    rows = world.buffers.rows(torch.tensor([189], device=device), ratio=1, block_table=table, table_slots=64)
    products = (queries.q[0].cpu().double() @ keys.double().T).relu()
    expected = (products * queries.weights[0].cpu().double()[:, None]).sum(0)
    for _, logits in world.kernels.dense_logits_tiles(queries, world.keys, rows):
        actual = logits[0, :190].cpu().double()
        assert ((actual - expected).abs() <= 2e-2 * expected).all()


def test_a_full_chunk_and_then_the_most_rows(kernels_on):
    """The first long prefill and then the largest batch, both at the stated limit: no buffer moves or grows."""
    world = World(kernels_on, max_rows=24)
    before = {k: v.data_ptr() for k, v in vars(world.buffers).items() if isinstance(v, torch.Tensor)}
    size = world.buffers.nbytes
    world.extend_step(span(1, 100, 24))
    world.decode_step(span(1, 300, 6) + span(2, 60, 6) + span(3, 0, 6) + span(4, 500, 6), is_verify=True)
    assert before == {k: v.data_ptr() for k, v in vars(world.buffers).items() if isinstance(v, torch.Tensor)}
    assert world.buffers.nbytes == size and not world.buffers._retired


def test_page_size_and_pool_stay_as_sglang_made_them(kernels_on):
    """A step reads SGLang's index-K buffer in place: no byte of it changes, and no copy of it is scored."""
    world = World(kernels_on)
    buffer, copy = world.keys.pool, world.keys.pool.clone()
    seen = []

    class Watched(type(world.kernels)):
        def sparse_logits(self, queries, keys, rows, tile):
            seen.append((keys.pool.data_ptr(), keys.page_slots, rows.block_table.shape[1] * rows.table_slots))
            return super().sparse_logits(queries, keys, rows, tile)

    world.build(Watched)
    world.decode_step([(1, 300), (2, 8)])
    world.extend_step(span(1, 9, 3))
    assert seen == [(buffer.data_ptr(), 64, 3 * 256)] * 4
    assert torch.equal(buffer, copy)


def test_source_of_another_length_than_the_consumer(kernels_on):
    """Blocks 0 and 1 of a row that saw 9 positions, consumed by one that sees 19: block 1 gives 8 to 15, all of them,
    and block 2 nothing."""
    world = World(kernels_on, geometry=dataclasses.replace(GEOMETRY, topk=24))
    rows = world.buffers.rows(
        torch.tensor([18], device=world.device),
        ratio=1,
        block_table=world.decode(SOURCE, [(1, 18)]).paged_metadata.page_table,
        table_slots=world.index_page,
    )
    blocks = torch.tensor([[1, 0, -1]], dtype=torch.int32, device=world.device)
    world.kernels.expand(blocks, rows, slice(0, 1))
    inputs = world.decode(CONSUMER, [(1, 18)])
    queries = world.kernels.project(inputs)
    logits = world.kernels.sparse_logits(queries, world.keys, rows, slice(0, 1))
    positions = world.garbage(1)
    world.kernels.select_candidates(logits, rows, slice(0, 1), out_positions=positions, out_slots=None)
    assert sorted(positions[0].tolist()) == [-1] * 8 + list(range(16))
