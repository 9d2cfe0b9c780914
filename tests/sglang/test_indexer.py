"""The four publish/consume calls on SGLang's own inputs, pools and index modules.

Every row is checked against a loop oracle over positions, and against the selection that SGLang's own dense candidate
backend makes from the same inputs.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.dsv4.v41_indexer.types import DecodeInputs, PrefillInputs

from sglang_dsv41.geometry import INT32_MAX
from tests.candidates import assert_selection
from tests.world import CONSUMER, GARBAGE, GEOMETRY, LAST, SOURCE, World, picks, span

pytestmark = pytest.mark.usefixtures("one_thread")

# Positions of one draft group, or of one decode batch, on block (8), index-page (64) and KV-page (256) edges.
EDGES = [0, 1, 6, 7, 8, 62, 63, 64, 127, 254, 255, 256, 257, 511, 519, 599]


@pytest.fixture(params=[1, 2], ids=["ratio1", "ratio2"])
def ratio(request):
    return request.param


# ---- decode and verify ----


def test_decode_lengths_on_every_edge(kernels_on, ratio):
    world = World(kernels_on, ratio=ratio, requests=len(EDGES))
    world.check_decode([(i + 1, position) for i, position in enumerate(EDGES)])


@pytest.mark.parametrize("block_size,topk_blocks", [(16, 6), (24, 5), (32, 4)])
def test_decode_with_larger_candidate_blocks(kernels_on, block_size, topk_blocks):
    geometry = dataclasses.replace(GEOMETRY, block_size=block_size, topk_blocks=topk_blocks)
    world = World(kernels_on, geometry=geometry, requests=6)
    world.check_decode([(i + 1, position) for i, position in enumerate([7, 23, 24, 100, 257, 599])])


def test_decode_padded_rows_and_padded_outputs(kernels_on):
    """A graph's padding: rows of length 0, a row of a garbage position, more output rows than rows, wider outputs."""
    world = World(kernels_on)
    live = [(1, 300), (2, 599), (3, 0)]
    padding = [(0, -1), (0, -7), (0, 4000)]
    schedule, *outs = world.decode_step(live + padding, out_rows=9, width=world.geometry.topk + 12)
    assert schedule.rows.lens.tolist() == [301, 600, 1, 0, 0, 768]
    world.check_schedule(live, schedule)
    world.check_source(live, outs[0])
    for layer, out in zip((CONSUMER, LAST), outs[1:], strict=True):
        world.check_consumer(layer, live, schedule, slots=out)
    world.check_against_stock(live, schedule, outs[1])
    slots = world.keys.pool.shape[0] * world.index_page
    for out in outs:
        assert (out[3:5] == -1).all() and (out[6:] == -1).all() and (out[:, world.geometry.topk :] == -1).all()
        assert ((out[5] >= -1) & (out[5] < slots)).all()


def test_verify_groups(kernels_on, ratio):
    world = World(kernels_on, ratio=ratio)
    rows = span(1, 60, 6) + span(2, 255, 1) + span(3, 508, 3)
    schedule = world.check_decode(rows, is_verify=True)
    assert schedule.rows.is_verify and schedule.rows.row_indices.tolist() == [r for r, _ in rows]
    assert schedule.rows.row_ks.tolist() == [0] * len(rows)
    assert world.kernels.calls["consume_verify"] == 2 and world.kernels.calls["consume_decode"] == 0


@pytest.mark.parametrize("group", range(1, 8))
def test_verify_group_equals_row_by_row(group):
    world = World("reference-cpu")
    rows = span(2, 250, group)
    together = world.decode_step(rows, is_verify=True)[2].clone()
    for i, row in enumerate(rows):
        assert picks(together)[i] == picks(world.decode_step([row])[2])[0]


def test_identical_requests_select_alike(kernels_on):
    world = World(kernels_on)
    alone = picks(world.decode_step([(2, 400)])[2])
    assert picks(world.decode_step([(2, 400)] * 8)[2]) == alone * 8


def test_blocks_of_the_source_bound_the_consumers(kernels_on):
    """Consumers pick inside published blocks only, though their own best positions lie elsewhere too."""
    world = World(kernels_on)
    rows = [(1, 599), (2, 500)]
    schedule, _, first, _ = world.decode_step(rows)
    outside = 0
    for i, row in enumerate(rows):
        allowed = {b for b in schedule.rows.sparse_indices[i].tolist() if b != INT32_MAX}
        where = {world.slot(row[0], p): p // 8 for p in range(world.visible(row))}
        assert {where[s] for s in first[i].tolist()} <= allowed
        best = world.scores(CONSUMER, row)[0].topk(world.geometry.topk).indices.tolist()
        outside += len({p // 8 for p in best} - allowed)
    assert outside > 0


def test_full_topk_leaves_a_schedule_alone(kernels_on, ratio):
    """A layer outside the scheme selects among all visible positions, and may run between publish and consume."""
    world = World(kernels_on, ratio=ratio)
    rows, others = [(1, 300), (2, 599)], [(3, 0), (1, 7), (2, 65)]
    schedule = world.indexer.publish_decode(world.decode(SOURCE, rows))
    full = world.decode(SOURCE, others, out_rows=4, width=world.geometry.topk + 4)
    world.indexer.topk_decode(full)
    world.check_source(others, full.out_page_indices)
    assert (full.out_page_indices[3:] == -1).all() and (full.out_page_indices[:, world.geometry.topk :] == -1).all()
    assert schedule.rows.row_indices.tolist() == [1, 2]
    inputs = world.decode(CONSUMER, rows)
    world.indexer.consume_decode(inputs, schedule)
    world.check_schedule(rows, schedule)
    world.check_consumer(CONSUMER, rows, schedule, slots=inputs.out_page_indices)
    chunk = world.extend(SOURCE, span(1, 60, 6))
    world.indexer.topk_prefill(chunk)
    world.check_source(span(1, 60, 6), chunk.out_page_indices)


# ---- extend ----


def test_extend_three_requests_of_different_prefixes(kernels_on, ratio):
    """A cold request, one whose prefix is cached to inside a block, one on a page edge; pages are shuffled."""
    world = World(kernels_on, ratio=ratio)
    rows = span(3, 0, 10) + span(1, 251, 8) + span(2, 512, 4)
    schedule, source, _, _ = world.check_extend(rows)
    starts = [0] * 10 + [10 // ratio] * 8 + [10 // ratio + 259 // ratio] * 4
    assert schedule.rows.row_ks.tolist() == starts
    assert (schedule.rows.row_ke - schedule.rows.row_ks).tolist() == [world.visible(row) for row in rows]
    assert schedule.rows.rows_per_request == [10, 8, 4] and schedule.rows.row_indices is None
    assert world.kernels.calls["consume_extend"] == 2
    assert world.kernels.calls["dense_logits"] == 0, "the source of an extend is SGLang's"
    world.check_source(rows, source.out_page_indices)


@pytest.mark.parametrize("block_size,topk_blocks", [(16, 6), (24, 5)])
def test_extend_with_larger_candidate_blocks(kernels_on, block_size, topk_blocks):
    geometry = dataclasses.replace(GEOMETRY, block_size=block_size, topk_blocks=topk_blocks)
    World(kernels_on, geometry=geometry).check_extend(span(1, 250, 9) + span(2, 40, 3))


def test_extend_without_slots_and_with_wide_outputs(kernels_on):
    world = World(kernels_on)
    rows = span(1, 300, 5)
    width = world.geometry.topk + 12
    _, _, first, _ = world.check_extend(rows, slots=False, width=width)
    assert first.out_page_indices is None and (first.out_raw_indices[:, world.geometry.topk :] == -1).all()
    _, _, both, _ = world.check_extend(rows, width=width)
    assert picks(both.out_raw_indices) == picks(first.out_raw_indices)
    assert (both.out_page_indices[:, world.geometry.topk :] == -1).all()


def test_chunks_of_one_request(kernels_on):
    """Three chunks, one boundary inside a block and one inside a page: the last chunk picks positions of the first."""
    world = World(kernels_on)
    world.check_extend(span(1, 0, 21))
    world.check_extend(span(1, 21, 12))
    rows = span(1, 290, 10)
    _, _, last, _ = world.check_extend(rows)
    assert (((last.out_raw_indices >= 0) & (last.out_raw_indices < 21)).sum(1) > 0).any()
    # A chunk boundary moves no pick.
    parts = [world.extend_step(span(1, 290, 3))[2], world.extend_step(span(1, 293, 7))[2]]
    assert picks(torch.cat([p.out_raw_indices for p in parts])) == picks(last.out_raw_indices)


# ---- extend, the source and the full layers ours too ----


def check_own_extend(world, rows, **options):
    """A step of an extend whose source is ours: its own picks as well as all that check_extend looks at."""
    out = world.check_extend(rows, **options)
    source = out[1]
    world.check_pair(rows, source)
    by_position = source.out_raw_indices
    for i, row in enumerate(rows):
        scores, tolerance = world.scores(SOURCE, row)
        among = dict(enumerate(scores.tolist()))
        assert_selection(by_position[i].tolist(), among, world.geometry.topk, tolerance=tolerance)
    return out


def test_own_extend_of_requests_with_different_prefixes(kernels_on, ratio):
    """Cold, cached to inside a block, on a page edge: source, schedule and consumers, and the rows' requests."""
    world = World(kernels_on, ratio=ratio, dense_extend=True)
    rows = span(3, 0, 10) + span(1, 251, 8) + span(2, 512, 4)
    schedule, _, _, _ = check_own_extend(world, rows)
    assert schedule.rows.rows_per_request == [10, 8, 4]
    assert schedule.rows.row_indices.tolist() == [3] * 10 + [1] * 8 + [2] * 4
    assert world.kernels.calls["dense_logits"] + world.kernels.calls["extend_logits"] > 0


def test_own_extend_equals_sglangs(kernels_on):
    """The picks of the source, ours and SGLang's, but for what rounding moves at the cut."""
    rows = span(1, 290, 8) + span(2, 60, 5)
    ours, stock = World(kernels_on, dense_extend=True), World(kernels_on)
    a, b = ours.extend_step(rows)[1], stock.extend_step(rows)[1]
    for i, row in enumerate(rows):
        scores, tolerance = ours.scores(SOURCE, row)
        mine, theirs = ({p for p in one.out_raw_indices[i].tolist() if p != -1} for one in (a, b))
        assert len(mine) == len(theirs)
        cut = min(float(scores[p]) for p in mine)
        assert all(abs(float(scores[p]) - cut) <= tolerance for p in mine ^ theirs)


@pytest.mark.parametrize("block_size,topk_blocks", [(16, 6), (24, 5)])
def test_own_extend_with_larger_candidate_blocks(kernels_on, block_size, topk_blocks):
    geometry = dataclasses.replace(GEOMETRY, block_size=block_size, topk_blocks=topk_blocks)
    check_own_extend(World(kernels_on, geometry=geometry, dense_extend=True), span(1, 250, 9) + span(2, 40, 3))


def test_own_extend_in_tiles_of_a_row(kernels_on):
    """One dense tile a row against one for all: the same picks and schedule."""
    rows = span(1, 250, 5) + span(2, 60, 4)
    steps = []
    for scratch in (1, 8 << 20):
        world = World(kernels_on, scratch_bytes=scratch, dense_extend=True)
        if kernels_on.startswith("hopper"):
            world.kernels.extend.tile_bytes = scratch
        schedule, *inputs = world.extend_step(rows)
        steps.append([schedule.rows.sparse_indices.tolist(), *(picks(one.out_raw_indices) for one in inputs)])
        steps[-1] += [picks(one.out_page_indices) for one in inputs]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("slots", [True, False])
def test_own_extend_writes_every_output(kernels_on, slots):
    """Wider outputs than picks, with and without slots; a chunk boundary moves no pick."""
    world = World(kernels_on, dense_extend=True)
    rows, width = span(1, 290, 10), world.geometry.topk + 8
    _, source, _, _ = check_own_extend(world, rows, slots=slots, width=width)
    assert (source.out_raw_indices[:, world.geometry.topk :] == -1).all()
    assert (source.out_page_indices is None) == (not slots)
    parts = [world.extend_step(part)[1].out_raw_indices for part in (rows[:3], rows[3:])]
    assert picks(torch.cat(parts)) == picks(source.out_raw_indices[:, : world.geometry.topk])


def test_own_full_topk_of_an_extend_leaves_a_schedule_alone(kernels_on, ratio):
    world = World(kernels_on, ratio=ratio, dense_extend=True)
    rows = span(2, 100, 6)
    schedule = world.indexer.publish_prefill(world.extend(SOURCE, rows))
    others = span(1, 60, 6)
    full = world.extend(SOURCE, others)
    world.indexer.topk_prefill(full)
    world.check_source(others, full.out_page_indices)
    world.check_pair(others, full)
    world.check_schedule(rows, schedule)


def test_own_extend_of_rows_that_see_nothing(kernels_on):
    """A first token of ratio 2 sees no compressed position: nothing published, every output -1, no launch."""
    world = World(kernels_on, ratio=2, dense_extend=True)
    source, full = world.extend(SOURCE, [(1, 0)]), world.extend(SOURCE, [(1, 0)])
    assert world.indexer.publish_prefill(source) is None
    world.indexer.topk_prefill(full)
    for one in (source, full):
        assert (one.out_raw_indices == -1).all() and (one.out_page_indices == -1).all()
    assert not world.kernels.calls["dense_logits"] and not world.kernels.calls["extend_logits"]


def test_extend_builds_its_plan_where_the_step_has_none(kernels_on):
    world = World(kernels_on)
    rows = span(1, 100, 4)
    plans = {}
    one = world.indexer.publish_prefill(world.extend(SOURCE, rows, plans=plans))
    assert set(plans) == {1} and one.rows.row_ks.tolist() == [0] * 4
    two = world.indexer.publish_prefill(world.extend(SOURCE, rows, plans=None))
    world.check_schedule(rows, two)


def test_extend_scratch_budget_of_one_row(kernels_on):
    """One pass a row against one pass for all: identical selections."""
    rows = span(1, 250, 5) + span(2, 60, 4)
    one, many = World(kernels_on, scratch_bytes=1), World(kernels_on)
    assert len(list(one.kernels.passes(len(rows)))) == len(rows) and len(list(many.kernels.passes(len(rows)))) == 1
    small, large = one.extend_step(rows), many.extend_step(rows)
    for a, b in zip(small[1:], large[1:], strict=True):
        assert picks(a.out_raw_indices) == picks(b.out_raw_indices)
        assert picks(a.out_page_indices) == picks(b.out_page_indices)
    assert one.kernels.calls["sparse_logits"] == 2 * len(rows)


def test_decode_scratch_budget_of_one_row(kernels_on):
    rows = [(1, 599), (2, 64), (3, 7)]
    outs = []
    for scratch in (1, 8 << 20):
        world = World(kernels_on, scratch_bytes=scratch)
        outs.append([picks(out) for out in world.decode_step(rows)[1:]])
    assert outs[0] == outs[1]


# ---- tail ----


def test_tail_equals_the_last_rows(kernels_on):
    world = World(kernels_on)
    rows = span(1, 250, 9) + span(2, 60, 4) + span(3, 0, 5)
    keep = [3, 4, 1]
    schedule, _, whole, _ = world.extend_step(rows)
    plan = schedule.rows.kernel_metadata = object()
    tail = schedule.tail(keep)
    last = [i for i in range(18) if i in range(6, 9) or i in range(9, 13) or i == 17]
    tail_rows = [rows[i] for i in last]
    assert tail.rows.num_rows == len(last) and tail.rows.rows_per_request == keep
    assert tail.rows.kernel_metadata is None and schedule.rows.kernel_metadata is plan
    world.check_schedule(tail_rows, tail)
    inputs = world.extend(CONSUMER, tail_rows)
    world.indexer.consume_prefill(inputs, tail)
    assert picks(inputs.out_raw_indices) == [picks(whole.out_raw_indices)[i] for i in last]
    world.check_pair(tail_rows, inputs)
    # A tail of the tail, as a second late layer would take.
    assert tail.tail([1, 1, 1]).rows.lens.tolist() == [259, 64, 5]


def test_tail_refuses_rows_it_does_not_have(kernels_on):
    world = World(kernels_on)
    schedule = world.extend_step(span(1, 0, 3) + span(2, 9, 2))[0]
    with pytest.raises(ValueError, match="a tail of 3 rows was asked of a request with 2 rows"):
        schedule.tail([1, 3])
    with pytest.raises(ValueError):
        schedule.tail([1])
    with pytest.raises(ValueError, match="only a prefill publish has a tail"):
        world.decode_step([(1, 5)])[0].tail([1])


# ---- nothing published ----


def test_nothing_published_for_no_rows(kernels_on):
    """An idle rank: no rows, nothing published, nothing selected."""
    world = World(kernels_on)
    inputs = world.decode(CONSUMER, [(1, 5)])
    idle = DecodeInputs(
        **{
            **{f: getattr(inputs, f) for f in inputs.__struct_fields__},
            **{f: getattr(inputs, f)[:0] for f in ("x", "q_lora", "positions", "req_rows")},
        }
    )
    world.indexer.consume_decode(idle, None)
    assert (idle.out_page_indices == -1).all()
    empty = world.indexer.publish_decode(idle)
    idle.out_page_indices.fill_(GARBAGE)
    world.indexer.consume_decode(idle, empty)
    assert (idle.out_page_indices == -1).all()
    assert world.kernels.calls["sparse_logits"] == world.kernels.calls["consume_decode"] == 0, "no step of no rows"
    chunk = world.extend(CONSUMER, span(1, 9, 1))
    nothing = PrefillInputs(
        **{
            **{f: getattr(chunk, f) for f in chunk.__struct_fields__},
            **{f: getattr(chunk, f)[:0] for f in ("x", "q_lora", "positions", "req_rows")},
        }
    )
    world.indexer.consume_prefill(nothing, None)
    assert (nothing.out_raw_indices == -1).all() and (nothing.out_page_indices == -1).all()


def test_nothing_published_while_nothing_is_visible(kernels_on):
    """One token at ratio 2 sees no compressed position: nothing is published, and every pick is -1."""
    world = World(kernels_on, ratio=2)
    rows = [(1, 0), (2, 0)]
    schedule, source, first, last = world.extend_step(rows)
    assert schedule is None
    for inputs in (source, first, last):
        assert (inputs.out_raw_indices == -1).all() and (inputs.out_page_indices == -1).all()
    # The metadata of a prefill graph still holds what its last replay published.
    stale = world.extend_step([(1, 9), (2, 9)])[0]
    inputs = world.extend(CONSUMER, rows)
    world.indexer.consume_prefill(inputs, stale)
    assert (inputs.out_raw_indices == -1).all() and (inputs.out_page_indices == -1).all()
    # One request that does see a position publishes for the whole batch.
    world.check_extend([(1, 0), (2, 0), (2, 1)])


def test_visible_rows_without_a_publish_are_an_error(kernels_on):
    world = World(kernels_on)
    for mode, consume in (
        ("decode", lambda: world.indexer.consume_decode(world.decode(CONSUMER, [(1, 9)]), None)),
        ("verify", lambda: world.indexer.consume_decode(world.decode(CONSUMER, [(1, 9)], is_verify=True), None)),
        ("extend", lambda: world.indexer.consume_prefill(world.extend(CONSUMER, [(1, 9)]), None)),
    ):
        with pytest.raises(RuntimeError) as error:
            consume()
        text = str(error.value)
        for part in (f"{mode} layer {CONSUMER}", "1 rows", f"source layer {SOURCE} published none"):
            assert part in text


def test_schedule_of_other_rows_is_an_error(kernels_on):
    world = World(kernels_on)
    decode = world.decode_step([(1, 9), (2, 9)])[0]
    with pytest.raises(RuntimeError, match="has 1 rows, the published schedule 2"):
        world.indexer.consume_decode(world.decode(CONSUMER, [(1, 9)]), decode)
    extend = world.extend_step(span(1, 9, 3))[0]
    with pytest.raises(RuntimeError, match=f"extend layer {LAST} has 2 rows, the published schedule 3.*tail"):
        world.indexer.consume_prefill(world.extend(LAST, span(1, 10, 2)), extend)


# ---- one schedule a step ----


def test_plan_is_made_once_a_step_and_shared(kernels_on):
    world = World(kernels_on)
    made, used = [], []

    class Planned(type(world.kernels)):
        def plan(self, rows, keys):
            made.append(rows.num_rows)
            return f"plan {len(made)}"

        def sparse_logits(self, queries, keys, rows, tile):
            used.append(rows.kernel_metadata)
            return super().sparse_logits(queries, keys, rows, tile)

    world.build(Planned)
    world.decode_step([(1, 9), (2, 99)])
    assert made == [2] and used == ["plan 1"] * 2
    world.extend_step(span(1, 9, 3))
    assert made == [2, 3] and used == ["plan 1"] * 2 + ["plan 2"] * 2
    assert world.kernels.calls["expand"] == 2, "consumers expand nothing"


def test_a_step_allocates_no_rows(kernels_on):
    """Every per-row tensor of a decode and an extend step is a view of the buffers made at start."""
    world = World(kernels_on)
    owned = {t.untyped_storage().data_ptr() for t in vars(world.buffers).values() if isinstance(t, torch.Tensor)}
    fields = ("row_ks", "row_ke", "lens", "sparse_indices", "physical_blocks", "end")
    before = world.buffers.nbytes
    decode = world.decode(SOURCE, [(1, 300), (2, 8)])
    for schedule in (world.indexer.publish_decode(decode), world.extend_step(span(1, 9, 3))[0]):
        for field in fields:
            assert getattr(schedule.rows, field).untyped_storage().data_ptr() in owned, field
    rows = world.indexer.publish_decode(decode).rows
    assert rows.row_indices.untyped_storage().data_ptr() in owned
    assert rows.block_table.data_ptr() == decode.paged_metadata.page_table.data_ptr(), "SGLang's table is not copied"
    assert (
        world.kernels.sparse_logits(world.kernels.project(decode), world.keys, rows, slice(0, 2))
        .untyped_storage()
        .data_ptr()
        in owned
    )
    assert world.buffers.nbytes == before


def test_alternating_modes_carry_no_state(kernels_on):
    """Verify of 6, decode, verify of 4, extend, decode on one object, as on fresh ones."""
    steps = [
        ("decode_step", span(1, 60, 6), {"is_verify": True}),
        ("decode_step", [(3, 300), (2, 8)], {}),
        ("extend_step", span(2, 250, 9) + span(1, 0, 3), {}),
        ("decode_step", span(3, 512, 4), {"is_verify": True}),
        ("decode_step", [(1, 599)], {}),
        ("extend_step", span(3, 7, 2), {}),
    ]
    shared = World(kernels_on)
    for step, rows, options in steps:
        fresh = World(kernels_on)
        outcomes = []
        for world in (shared, fresh):
            _, *outs = getattr(world, step)(rows, **options)
            outs = [getattr(out, "out_raw_indices", out) for out in outs]
            outcomes.append([picks(out) for out in outs])
        assert outcomes[0] == outcomes[1], (step, rows)


def test_growing_batch_stays_correct(kernels_on, caplog):
    """A batch past the stated limits grows the rows once, with a warning, and selects as before."""
    world = World(kernels_on, max_rows=2)
    rows = span(1, 250, 5)
    with caplog.at_level("WARNING", logger="sglang_dsv41.rows"):
        world.check_extend(rows)
    assert sum("row buffers grew" in message for message in caplog.messages) == 1
