"""Each operation of a kernel set against the loop oracle.

Runs `reference` on the CPU and `portable` under Triton's interpreter without a GPU, and `portable` on the GPU when there
is one; the same cases serve all.
"""

import math

import pytest
import torch

from sglang_dsv41.geometry import INT32_MAX, CandidateGeometry
from sglang_dsv41.kernels import kernel_set_class
from tests.candidates import (
    RELEASED,
    SMALL,
    assert_selection,
    build,
    dense_scores,
    garbage,
    make_problem,
    oracle_blocks,
    poison,
    slot_of,
    visible_in,
)
from tests.devices import DEVICES

# bf16 rounding of a score relative to the largest of its row, as SGLang's own kernels round.
ROUNDING = 2e-2
LENGTHS = [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 200]
WIDE = CandidateGeometry(topk_blocks=6, block_size=24, topk=20, heads=16)
WIDE16 = CandidateGeometry(topk_blocks=8, block_size=32, topk=20, heads=32)
GEOMETRIES = {"8": SMALL, "24": WIDE, "32": WIDE16}


def whole(problem):
    return slice(0, problem.rows.num_rows)


def close(actual, expected, scale):
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= ROUNDING * max(scale, 1e-30)


@pytest.mark.parametrize("page_slots", [64, 128])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_dense_logits(kernels_on, geometry, page_slots):
    problem, kernels = build(kernels_on, LENGTHS, geometry, page_slots=page_slots)
    seen = 0
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        for row in range(tile.start, tile.stop):
            expected = dense_scores(problem, row)
            seen += 1
            if len(expected):
                actual = logits[row - tile.start, : len(expected)].cpu().double()
                close(actual, expected, expected.abs().max().item())
    assert seen == len(LENGTHS)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_choose_and_expand(kernels_on, geometry):
    problem, kernels = build(kernels_on, LENGTHS, geometry)
    rows = problem.rows
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        blocks = kernels.choose_blocks(logits, rows, tile)
        for row in range(tile.start, tile.stop):
            length = problem.lens[row]
            scores = logits[row - tile.start, :length].cpu().double()
            chosen = [b for b in blocks[row - tile.start].tolist() if b != -1]
            count = -(-length // geometry.block_size)
            assert len(chosen) == len(set(chosen)) == min(count, geometry.topk_blocks)
            if length:
                assert (length - 1) // geometry.block_size in chosen
            best = {b: float(scores[b * geometry.block_size :][: geometry.block_size].max()) for b in range(count)}
            kept = oracle_blocks(scores, geometry) if length else []
            assert sorted(best[b] for b in chosen) == sorted(best[b] for b in kept)
        kernels.expand(blocks, rows, tile)
        check_expansion(problem, blocks, tile)


def check_expansion(problem, blocks, tile):
    """sparse_indices, physical_blocks and end of a tile, whole buffers, from the blocks by position arithmetic."""
    rows, geometry = problem.rows, problem.geometry
    for row in range(tile.start, tile.stop):
        length = problem.lens[row]
        kept = sorted(b for b in blocks[row - tile.start].tolist() if 0 <= b < -(-length // geometry.block_size))
        positions = visible_in(kept, length, geometry.block_size)
        size = geometry.kernel_block
        logical = sorted({p // size for p in positions})
        pad = geometry.kernel_blocks - len(logical)
        assert rows.sparse_indices[row].tolist() == logical + [INT32_MAX] * pad
        physical = [slot_of(rows, row, b * size) // size for b in logical]
        assert rows.physical_blocks[row].tolist() == physical + [-1] * pad
        assert int(rows.end[row]) == len(positions)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_expand_uses_the_rows_own_length(kernels_on, geometry):
    """A block list made for another length: a partial block of then may be whole now, a later block stays absent."""
    size = geometry.block_size
    problem, kernels = build(kernels_on, [2 * size + 3, size + 1, 1, 0], geometry)
    blocks = torch.full((4, geometry.topk_blocks), -1, dtype=torch.int32, device=problem.rows.lens.device)
    blocks[0, 3], blocks[0, 1] = 1, 0  # unordered, holes between; the newest block (2) is absent
    blocks[1, 0], blocks[1, 1] = 1, 5  # 5 lies past the row's length
    blocks[2, 2], blocks[2, 0] = 0, INT32_MAX
    kernels.expand(blocks, problem.rows, whole(problem))
    check_expansion(problem, blocks, whole(problem))
    assert problem.rows.end.tolist() == [2 * size, 1, 1, 0]


@pytest.mark.parametrize("page_slots", [64, 128])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_sparse_equals_dense_bit_for_bit(kernels_on, geometry, page_slots):
    lens = [1, 9, 64, 65, 700, 1000]
    problem, kernels = build(kernels_on, lens, geometry, page_slots=page_slots)
    rows = problem.rows
    dense = torch.cat([logits.clone() for _, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows)])
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.publish(logits, rows, tile, garbage(problem))
    logits = kernels.sparse_logits(problem.queries, problem.keys, rows, whole(problem))
    assert logits.dtype == torch.bfloat16
    for row, length in enumerate(lens):
        end = int(rows.end[row])
        blocks = [b for b in rows.sparse_indices[row].tolist() if b < INT32_MAX]
        positions = visible_in(blocks, length, geometry.kernel_block)
        assert len(positions) == end > 0
        assert torch.equal(logits[row, :end], dense[row, positions].to(torch.bfloat16)), f"row {row} of length {length}"


@pytest.mark.parametrize("wanted", ["positions", "slots", "both"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_selection_of_candidates(kernels_on, geometry, wanted):
    lens = [0, 1, 5, 8, 40, 250, 900]
    problem, kernels = build(kernels_on, lens, geometry)
    rows, device = problem.rows, problem.rows.lens.device
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.publish(logits, rows, tile, garbage(problem))
    logits = kernels.sparse_logits(problem.queries, problem.keys, rows, whole(problem))
    width = geometry.topk + 12  # SGLang pads its outputs; the padding must be written too
    positions = torch.full((len(lens), width), 12345, dtype=torch.int32, device=device)
    slots = torch.full((len(lens), width), 12345, dtype=torch.int32, device=device)
    kernels.select_candidates(
        logits,
        rows,
        whole(problem),
        out_positions=None if wanted == "slots" else positions,
        out_slots=None if wanted == "positions" else slots,
    )
    logits = logits.cpu()
    for row, length in enumerate(lens):
        blocks = [b for b in rows.sparse_indices[row].tolist() if b < INT32_MAX]
        candidates = visible_in(blocks, length, geometry.kernel_block)
        scores = {p: float(logits[row, i]) for i, p in enumerate(candidates)}
        if wanted != "slots":
            assert_selection(positions[row].tolist(), scores, geometry.topk, tolerance=0)
        if wanted != "positions":
            by_slot = {slot_of(rows, row, p): s for p, s in scores.items()}
            assert_selection(slots[row].tolist(), by_slot, geometry.topk, tolerance=0)
        if wanted == "both":
            expected = [-1 if p == -1 else slot_of(rows, row, p) for p in positions[row].tolist()]
            assert slots[row].tolist() == expected


def test_selection_of_visible(kernels_on):
    problem, kernels = build(kernels_on, LENGTHS)
    rows = problem.rows
    slots = torch.full((len(LENGTHS), SMALL.topk), 12345, dtype=torch.int32, device=rows.lens.device)
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.select_visible(logits, rows, tile, slots)
        logits = logits.cpu()
        for row in range(tile.start, tile.stop):
            scores = {slot_of(rows, row, p): float(logits[row - tile.start, p]) for p in range(problem.lens[row])}
            assert_selection(slots[row].tolist(), scores, SMALL.topk, tolerance=0)


def test_tiles_do_not_change_the_result(kernels_on):
    """A scratch budget of one row against one of all: the same logits and picks."""
    results = []
    for scratch in (1, 64 << 20):
        problem, kernels = build(kernels_on, LENGTHS, scratch_bytes=scratch)
        rows = problem.rows
        slots = torch.full((len(LENGTHS), SMALL.topk), 12345, dtype=torch.int32, device=rows.lens.device)
        for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
            kernels.publish(logits, rows, tile, garbage(problem))
        passes = list(kernels.passes(rows.num_rows))
        assert len(passes) == (len(LENGTHS) if scratch == 1 else 1)
        for tile in passes:
            logits = kernels.sparse_logits(problem.queries, problem.keys, rows, tile)
            kernels.select_candidates(logits, rows, tile, out_positions=None, out_slots=slots)
        results.append([sorted(row) for row in slots.tolist()])
    assert results[0] == results[1]


def test_all_lengths_zero(kernels_on):
    problem, kernels = build(kernels_on, [0, 0, 0])
    rows = problem.rows
    slots = torch.full((3, SMALL.topk), 12345, dtype=torch.int32, device=rows.lens.device)
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.publish(logits, rows, tile, slots)
    assert (slots == -1).all() and (rows.end == 0).all() and (rows.sparse_indices == INT32_MAX).all()
    slots.fill_(12345)
    logits = kernels.sparse_logits(problem.queries, problem.keys, rows, whole(problem))
    kernels.select_candidates(logits, rows, whole(problem), out_positions=None, out_slots=slots)
    assert (slots == -1).all()


def test_ties_fill_the_selection_exactly(kernels_on):
    """100 winners and the rest zero: exactly top-k unique valid picks, the winners among them."""
    geometry = CandidateGeometry(topk_blocks=64, block_size=8, topk=200, heads=16)
    problem, kernels = build(kernels_on, [512], geometry)
    rows, device = problem.rows, problem.rows.lens.device
    kernels.expand(torch.arange(64, dtype=torch.int32, device=device)[None], rows, whole(problem))
    logits = problem.buffers.compact_logits(1)
    logits.zero_()
    winners = list(range(3, 503, 5))
    logits[0, winners] = 1.0
    positions = torch.full((1, 200), 12345, dtype=torch.int32, device=device)
    kernels.select_candidates(logits, rows, whole(problem), out_positions=positions, out_slots=None)
    picks = positions[0].tolist()
    assert len(set(picks)) == 200 and min(picks) >= 0 and max(picks) < 512
    assert set(winners) <= set(picks)


def test_nan_row_stays_in_bounds_and_alone(kernels_on):
    problem, kernels = build(kernels_on, [100, 100, 100])
    problem.queries.q[1] = math.nan
    rows, device = problem.rows, problem.rows.lens.device
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.publish(logits, rows, tile, garbage(problem))
    positions = torch.full((3, SMALL.topk), 12345, dtype=torch.int32, device=device)
    logits = kernels.sparse_logits(problem.queries, problem.keys, rows, whole(problem))
    kernels.select_candidates(logits, rows, whole(problem), out_positions=positions, out_slots=None)
    assert ((positions[1] >= -1) & (positions[1] < 100)).all()
    for row in (0, 2):
        blocks = [b for b in rows.sparse_indices[row].tolist() if b < INT32_MAX]
        scores = {p: float(logits[row, i]) for i, p in enumerate(visible_in(blocks, 100, 8))}
        assert_selection(positions[row].tolist(), scores, SMALL.topk, tolerance=0)


def test_page_stride_is_a_run_time_value(kernels_on):
    """The same bytes under two page strides: equal logits."""
    outcomes = []
    for stride in (64 * 68, 128 * 68):
        problem, kernels = build(kernels_on, [200, 65], page_stride=stride)
        contiguous = make_problem([200, 65]).keys
        problem.keys.pool.copy_(contiguous.pool)
        outcomes.append(
            torch.cat([t.clone() for _, t in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows)])
        )
    assert torch.equal(outcomes[0][0, :200], outcomes[1][0, :200])
    assert torch.equal(outcomes[0][1, :65], outcomes[1][1, :65])


def test_every_slot_has_its_own_exponent(kernels_on):
    """Reader and writer agree on the layout: a distinct exponent in every slot."""
    problem, kernels = build(kernels_on, [130])
    page = torch.arange(64, device=problem.keys.pool.device)
    problem.keys.pool[:, 64 * 64 :] = (120 + page % 8).repeat_interleave(4).to(torch.uint8)
    problem.queries.weights.abs_()  # no cancellation, so a position's own magnitude bounds its rounding
    expected = dense_scores(problem, 0)
    for _, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        # Each position against its own magnitude: a neighbour's exponent is off by a factor of two.
        actual = logits[0, :130].cpu().double()
        assert ((actual - expected).abs() <= ROUNDING * expected).all()


@pytest.mark.parametrize("exponent", [0, 1, 10, 127, 252, 254])
def test_extreme_scales_decode_exactly(kernels_on, exponent):
    """One non-zero element a key: the logit is one product, so it must be exact."""
    if exponent < 2 and kernels_on == "portable-cpu":
        pytest.skip("needs a GPU: Triton's interpreter rounds bf16 subnormals to zero")
    problem, kernels = build(kernels_on, [64], exponents=(exponent, exponent))
    pool, queries = problem.keys.pool, problem.queries
    pool[:, : 64 * 64] = 0
    # One of the E2M1 magnitudes in element 2 * slot; 2^127 leaves bf16 room for the first four of them only.
    code = torch.arange(64, device=pool.device) % (4 if exponent == 254 else 8)
    for slot in range(64):
        pool[:, slot * 64 + slot] = code[slot].to(torch.uint8)
    queries.q.zero_()
    # A query of 2^k brings the product back into bf16's range, exactly.
    queries.q[:, 0, :] = 2.0 ** max(-100, min(100, 127 - exponent))
    queries.weights.zero_()
    queries.weights[:, 0] = 1.0
    expected = dense_scores(problem, 0)
    assert expected.max() > 0
    for _, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        assert torch.equal(logits[0, :64].cpu().double(), expected)


def test_page_past_the_pool_is_never_read(kernels_on):
    """A page id outside the pool scores -inf, whatever the row's other pages hold."""
    problem, kernels = build(kernels_on, [128, 128])
    problem.rows.block_table[0, 1] = 2**30
    for _, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        assert torch.isinf(logits[0, 64:128]).all() and torch.isfinite(logits[0, :64]).all()
        assert torch.isfinite(logits[1, :128]).all()


@pytest.mark.gpu
def test_released_geometry_on_gpu():
    """2048 blocks of 8 over 40,000 positions, against the reference set in torch on the same device."""
    if "portable-cuda" not in DEVICES:
        pytest.skip("needs a CUDA GPU of compute capability 8.0 or newer")
    lens = [0, 1, 16383, 16384, 16385, 16393, 40000]
    problem = make_problem(lens, RELEASED, device="cuda", scratch_bytes=1 << 30)
    reference = kernel_set_class("reference")(RELEASED, problem.buffers)
    portable = kernel_set_class("portable")(RELEASED, problem.buffers)
    rows = problem.rows
    poison(rows)
    for tile, logits in portable.dense_logits_tiles(problem.queries, problem.keys, rows):
        portable.publish(logits, rows, tile, garbage(problem))
    ours = portable.sparse_logits(problem.queries, problem.keys, rows, whole(problem)).clone()
    theirs = reference.sparse_logits(problem.queries, problem.keys, rows, whole(problem))
    for row, length in enumerate(lens):
        end = int(rows.end[row])
        assert end == min(length, 16384 if length % 8 == 0 else 16376 + length % 8)
        if end:
            a, b = ours[row, :end].double(), theirs[row, :end].double()
            error = (a - b).abs() / b.abs().max()
            assert error.max() < 2e-2 and error.flatten().kthvalue(max(1, int(0.99 * end))).values < 1e-2


@pytest.mark.parametrize("exponents", [(120, 130), (100, 150)])
def test_fp8_products_equal_bf16_products(exponents):
    """The FP8 path of the scoring kernel, used on Hopper, against the bf16 path: the same logits."""
    from sglang_dsv41.kernels.scoring import ScoringConfig, paged_index_logits

    device = "cuda" if "portable-cuda" in DEVICES else "cpu"
    lens = [200, 65, 1, 0]
    problem = make_problem(lens, device=device, exponents=exponents)
    rows = problem.rows
    outs = []
    for fp8 in (True, False):
        out = torch.full((4, 256), math.nan, dtype=torch.bfloat16, device=device)
        paged_index_logits(problem.queries, problem.keys, rows.block_table, 64, rows.lens, out, ScoringConfig(fp8=fp8))
        outs.append(out)
    for row, length in enumerate(lens):
        a, b = outs[0][row, :length].cpu().double(), outs[1][row, :length].cpu().double()
        if length:
            # Products are exact on both paths; the fp32 sums may round differently, by one bf16 step at most.
            assert ((a - b).abs() <= 2**-7 * b.abs().max()).all()
            expected = dense_scores(problem, row)
            close(a, expected, expected.abs().max().item())
        assert outs[0][row, length:].isnan().all() and outs[1][row, length:].isnan().all()


@pytest.mark.parametrize("page_stride", [None, 64 * 68 + 4], ids=["on 16 bytes", "off 16 bytes"])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_wide_loads_change_no_bit(fp8, page_stride):
    """Keys loaded by more than a byte at once, where the pool lies on 16 bytes, and where it does not."""
    from sglang_dsv41.kernels.scoring import ScoringConfig, paged_index_logits

    device = "cuda" if "portable-cuda" in DEVICES else "cpu"
    lens = [200, 65, 1, 0]
    problem = make_problem(lens, device=device, page_stride=page_stride)
    rows, outs = problem.rows, []
    for wide in (False, True):
        out = torch.full((4, 256), 7.0, dtype=torch.bfloat16, device=device)
        config = ScoringConfig(fp8=fp8, wide=wide)
        paged_index_logits(problem.queries, problem.keys, rows.block_table, 64, rows.lens, out, config)
        outs.append(out)
    assert torch.equal(*outs)
    assert all((outs[0][row, length:] == 7.0).all() for row, length in enumerate(lens))
