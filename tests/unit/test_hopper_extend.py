"""An extend's dense pass on Hopper around DeepGEMM's kernel; without a Hopper GPU a float64 stand-in holds its contract."""

import dataclasses
import sys
import types

import pytest
import torch

from sglang_dsv41.geometry import CandidateGeometry
from sglang_dsv41.kernels import hopper
from sglang_dsv41.kernels.hopper import HopperKernels, extend
from sglang_dsv41.kernels.hopper.extend import ExtendScorer, fp8_queries
from sglang_dsv41.kernels.portable import PortableKernels
from tests.candidates import (
    check_step,
    consumer_pass,
    dense_scores,
    generator,
    key_at,
    make_keys,
    make_problem,
    source_pass,
)
from tests.devices import DEVICES, HAS_GPU

HOPPER = "hopper-cuda" in DEVICES
DEVICE = "cuda" if HOPPER else "cpu"
pytestmark = pytest.mark.skipif(
    HAS_GPU and not HOPPER, reason="needs a GPU of compute capability 9.0, or none at all: Triton's interpreter is off"
)

# Of a product's sum, in units of its terms' magnitude: FP8 tensor cores keep some 14 bits, the stand-in all of float64.
ACCUMULATION = 2**-12 if HOPPER else 1e-12
GEOMETRY = CandidateGeometry(topk_blocks=16, block_size=8, topk=24, heads=32, source_layer=6, consumer_layers=(8, 9))


def mqa_logits(q, keys, scales, weights, starts, ends, width):
    """DeepGEMM's contract; what it leaves undefined is garbage that would be picked."""
    rows, heads, dim = q.shape
    assert heads in extend.HEADS and dim == 128 and q.dtype == keys.dtype == torch.float8_e4m3fn
    assert q.is_contiguous() and keys.is_contiguous() and scales.is_contiguous() and weights.is_contiguous()
    assert weights.shape == (rows, heads) and weights.dtype == scales.dtype == torch.float32
    assert starts.dtype == ends.dtype == torch.int32 and starts.shape == ends.shape == (rows,)
    assert starts.is_contiguous() and ends.is_contiguous()
    assert (0 <= starts).all() and (ends <= keys.shape[0]).all() and (ends - starts <= width).all()
    stride = -(-width // 256) * 256
    out = torch.full((rows, stride), 1e30, dtype=torch.bfloat16)[:, :width]
    for row in range(rows):
        part = slice(int(starts[row]), int(ends[row]))
        products = (q[row].double() @ keys[part].double().T).relu() * weights[row].double()[:, None]
        out[row, : part.stop - part.start] = (products.sum(0) * scales[part].double()).to(torch.bfloat16)
    return out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    if HOPPER:
        return
    monkeypatch.setattr(extend, "mqa_logits", mqa_logits)
    monkeypatch.setattr(hopper, "unusable", lambda heads: None)


class Kernels(HopperKernels):
    """The set without its CUDA C++, which has no CPU."""

    sparse_logits = PortableKernels.sparse_logits

    def _maxima_of(self, tile, logits):
        assert self._maxima[tile.start].shape == (logits.shape[0], logits.shape[1] // 8)
        return None


def problem_of(*arguments, **options):
    return make_problem(*arguments, device=DEVICE, **options)


def as_extend(problem, counts):
    """The problem's rows as an extend: the rows of a request share its last row's page-table line."""
    assert sum(counts) == problem.rows.num_rows
    table, start = problem.rows.block_table.clone(), 0
    for count in counts:
        table[start : start + count] = table[start + count - 1].clone()
        start += count
    return dataclasses.replace(
        problem, rows=dataclasses.replace(problem.rows, block_table=table, rows_per_request=list(counts))
    )


def scorer_of(problem, *, requests_at_once=1, tile_bytes=1 << 30):
    width = problem.rows.block_table.shape[1] * problem.rows.table_slots
    scorer = ExtendScorer(max_context=requests_at_once * width, tile_bytes=tile_bytes, device=torch.device(DEVICE))
    # What an earlier chunk left: E4M3 NaN.
    scorer._keys.view(torch.uint8).fill_(0x7F)
    scorer._scales.fill_(float("nan"))
    return scorer


def magnitude(problem, row):
    """[len] sums of a row's |terms|, on the CPU."""
    queries = dataclasses.replace(problem.queries, q=problem.queries.q.abs(), weights=problem.queries.weights.abs())
    pool = problem.keys.pool.clone()
    payload = pool[:, : problem.keys.page_slots * 64]
    payload &= 0x77  # without signs
    return dense_scores(
        dataclasses.replace(problem, queries=queries, keys=dataclasses.replace(problem.keys, pool=pool)), row
    )


LENS, COUNTS = [40, 41, 42, 7, 0, 1, 2, 130, 131, 132, 133], [3, 1, 3, 4]


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("tile_bytes", [1, 3000, 1 << 30])
def test_tiles_cover_the_rows_once_with_their_scores(at_once, tile_bytes):
    problem = as_extend(problem_of(LENS, GEOMETRY), COUNTS)
    scorer, seen = scorer_of(problem, requests_at_once=at_once, tile_bytes=tile_bytes), []
    for tile, logits, maxima in scorer.tiles(problem.queries, problem.keys, problem.rows):
        assert logits.shape[0] == maxima.shape[0] == tile.stop - tile.start
        for i, row in enumerate(range(tile.start, tile.stop)):
            seen.append(row)
            length = problem.lens[row]
            scores, got = dense_scores(problem, row), logits[i, :length].cpu().double()
            assert ((got - scores).abs() <= 2**-8 * scores.abs() + ACCUMULATION * magnitude(problem, row)).all(), row
            best = [got[b : b + 8].max().item() for b in range(0, length, 8)]
            assert maxima[i, : len(best)].tolist() == [*best[:-1], float("inf")][-len(best) :] if best else True
    assert seen == list(range(len(LENS)))


def test_one_tile_and_many_give_the_same(monkeypatch):
    problem = as_extend(problem_of(LENS, GEOMETRY), COUNTS)
    whole, parts = ([], [])
    for out, tile_bytes in ((whole, 1 << 30), (parts, 1)):
        for tile, logits, maxima in scorer_of(problem, tile_bytes=tile_bytes).tiles(
            problem.queries, problem.keys, problem.rows
        ):
            for i, length in enumerate(problem.lens[tile]):
                out.append((logits[i, :length].tolist(), maxima[i, : -(-length // 8)].tolist()))
    assert len(whole) == len(LENS) and whole == parts


def test_the_budget_holds_a_tile():
    problem = as_extend(problem_of(LENS, GEOMETRY), COUNTS)
    for tile_bytes in (1000, 3000, 5000, 100_000):
        for _, logits, maxima in scorer_of(problem, tile_bytes=tile_bytes).tiles(
            problem.queries, problem.keys, problem.rows
        ):
            held = 2 * (logits.shape[0] * logits.stride(0) + maxima.shape[0] * maxima.stride(0))
            assert held <= tile_bytes or logits.shape[0] == 1


def test_a_tile_is_whole_waves_of_thread_blocks():
    scorer = ExtendScorer(max_context=1 << 20, tile_bytes=1 << 30, device=torch.device(DEVICE))
    scorer._wave = 528
    assert scorer.rows_per_tile(524_288) == 528 and scorer.rows_per_tile(131_072) == 6 * 528
    assert scorer.rows_per_tile(1 << 20) == 452, "less than a wave fits: whole thread blocks"


def test_step_of_the_kernel_set():
    problem = as_extend(problem_of(LENS, GEOMETRY), COUNTS)
    kernels = Kernels(GEOMETRY, problem.buffers)
    kernels.prepare_extend()
    picks = torch.full((len(LENS), GEOMETRY.topk), 7, dtype=torch.int32, device=DEVICE)
    dense = source_pass(problem, kernels, out=picks)
    assert kernels.calls["extend_logits"] == 4 and not kernels.calls["dense_logits"], "one request fits at once"
    positions, slots = consumer_pass(problem, kernels)
    which = [row for row, length in enumerate(LENS) if length]
    # The consumer scores the same layer's keys here, by another kernel: its picks are compared on the float64 scores.
    exact = [dense_scores(problem, row) for row in range(len(LENS))]
    check_step(problem, dense, picks, *by_dense(dense, positions, slots, problem, exact), which)


def by_dense(dense, positions, slots, problem, exact):
    """The picks, on the CPU, after a check on ``exact`` scores, replaced by those of ``dense`` among the same candidates."""
    dense, positions, slots = dense.cpu(), positions.cpu(), slots.cpu()
    for row, length in enumerate(problem.lens):
        blocks = [b for b in problem.rows.sparse_indices[row].tolist() if b * 8 < length]
        candidates = torch.tensor([p for b in blocks for p in range(b * 8, min(b * 8 + 8, length))], dtype=torch.long)
        picked = [p for p in positions[row].tolist() if p != -1]
        assert len(set(picked)) == len(picked) == min(GEOMETRY.topk, len(candidates))
        if not length:
            continue
        left = sorted(set(candidates.tolist()) - set(picked))
        if left:
            tolerance = 2**-7 * exact[row].abs().max()
            assert exact[row][left].max() <= exact[row][picked].min() + tolerance
        best = candidates[dense[row, candidates].topk(len(picked)).indices]
        positions[row] = -1
        positions[row, : len(picked)] = best.to(torch.int32)
        table = problem.rows.block_table[row].tolist()
        per = problem.rows.table_slots
        slots[row] = torch.tensor(
            [-1 if p == -1 else table[p // per] * per + p % per for p in positions[row].tolist()], dtype=torch.int32
        )
    return positions, slots


def test_other_rows_go_to_the_decode_kernel():
    problem = as_extend(problem_of(LENS, GEOMETRY), COUNTS)
    scorer = scorer_of(problem)
    assert scorer.takes(problem.rows)
    assert not scorer.takes(dataclasses.replace(problem.rows, rows_per_request=None)), "decode and verify"
    assert not scorer.takes(dataclasses.replace(problem.rows, rows_per_request=[3, 1, 3, 3])), "not every row is named"
    long = as_extend(problem_of([5000], GEOMETRY), [1])
    assert not scorer.takes(long.rows), "more keys than it holds"


def test_requests_without_rows():
    problem = as_extend(problem_of(LENS, GEOMETRY), COUNTS)
    rows = dataclasses.replace(problem.rows, rows_per_request=[0, 3, 1, 0, 3, 4, 0])
    seen = [tile for tile, _, _ in scorer_of(problem).tiles(problem.queries, problem.keys, rows)]
    assert [(tile.start, tile.stop) for tile in seen] == [(0, 3), (3, 4), (4, 7), (7, 11)]


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("tile_bytes", [1, 1 << 30])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_a_context_parallel_rank(rank, at_once, tile_bytes, monkeypatch):
    """Every other row of a chunk, a rank without a row of its first or last request: a row scores as in the whole chunk,
    over the keys that the rank's last row of a request sees."""
    lens, counts = [9, 40, 41, 42, 7, 126, 127, 128, 129, 130, 131, 3, 0], [1, 3, 1, 6, 1, 1]
    requests = [request for request, count in enumerate(counts) for _ in range(count)]
    problem = as_extend(problem_of(lens, GEOMETRY), counts)
    whole = {}
    for tile, logits, maxima in scorer_of(problem).tiles(problem.queries, problem.keys, problem.rows):
        for i, row in enumerate(range(tile.start, tile.stop)):
            whole[row] = (logits[i, : lens[row]].tolist(), maxima[i, : -(-lens[row] // 8)].tolist())
    mine = list(range(rank, len(lens), 2))
    dealt = [sum(requests[row] == request for row in mine) for request in range(len(counts))]
    assert dealt == [[1, 1, 1, 3, 0, 1], [0, 2, 0, 3, 1, 0]][rank]
    rows = dataclasses.replace(
        problem.rows,
        lens=problem.rows.lens[mine],
        block_table=problem.rows.block_table[mine],
        rows_per_request=dealt,
        interleaved=True,
    )
    queries = extend.IndexQueries(q=problem.queries.q[mine], weights=problem.queries.weights[mine])
    scorer, seen, unpacked_by = scorer_of(problem, requests_at_once=at_once, tile_bytes=tile_bytes), [], []
    unpack = scorer._unpack
    monkeypatch.setattr(
        scorer,
        "_unpack",
        lambda keys, rows, last, width: unpacked_by.extend(last.tolist()) or unpack(keys, rows, last, width),
    )
    assert scorer.takes(rows)
    for tile, logits, maxima in scorer.tiles(queries, problem.keys, rows):
        for i, row in enumerate(mine[tile]):
            seen.append(row)
            assert (logits[i, : lens[row]].tolist(), maxima[i, : -(-lens[row] // 8)].tolist()) == whole[row]
    assert seen == mine
    assert unpacked_by == [[0, 1, 2, 5, 6], [1, 4, 5]][rank]


def unpacked(keys, slots):
    """The first ``slots`` pool slots, as one request of one row, unpacked."""
    problem = problem_of([slots], GEOMETRY, page_slots=keys.page_slots)
    entries = -(-slots // keys.page_slots)
    table = torch.arange(entries, dtype=torch.int32, device=DEVICE)[None]
    rows = dataclasses.replace(problem.rows, block_table=table)
    scorer = ExtendScorer(max_context=slots, tile_bytes=1, device=torch.device(DEVICE))
    scorer._unpack(keys, rows, torch.zeros(1, dtype=torch.int32, device=DEVICE), entries * keys.page_slots)
    return (scorer._keys[:slots].double() * scorer._scales[:slots].double()[:, None]).cpu()


def exact_keys(keys, slots):
    keys = dataclasses.replace(keys, pool=keys.pool.cpu())
    return torch.stack([key_at(keys, slot) for slot in range(slots)])


@pytest.mark.parametrize("page_slots,page_stride", [(64, None), (64, 64 * 68 + 48), (128, None)])
def test_unpacked_keys_are_exact(page_slots, page_stride):
    """Exponents of a key's groups up to 14 apart."""
    keys = make_keys(3, page_slots, 1, device=DEVICE, exponents=(113, 127), page_stride=page_stride)
    slots = 3 * page_slots
    assert torch.equal(unpacked(keys, slots), exact_keys(keys, slots))


def test_a_group_far_below_the_largest_loses_less_than_a_rounding():
    keys = make_keys(2, 64, 2, device=DEVICE, exponents=(90, 160))
    got, exact = unpacked(keys, 128), exact_keys(keys, 128)
    # Smaller than the largest group's step of 1/2 by 2^-14 or more.
    groups = 2.0 ** (keys.pool[:, 64 * 64 :].cpu().reshape(128, 4).double() - 127)
    assert ((got - exact).abs() <= groups.max(1).values[:, None] * 2.0**-15).all()
    assert (got != exact).any(), "otherwise this shows nothing"


def test_zero_groups_have_no_say_in_the_scale():
    """A group of zeros may have any exponent, also one that would push the others out of E4M3's range."""
    keys = make_keys(1, 64, 3, device=DEVICE, exponents=(118, 122))
    pool = keys.pool
    packed, scales = pool[:, : 64 * 64].view(64, 4, 16), pool[:, 64 * 64 :].view(64, 4)
    packed[:, 1] = torch.tensor([0x00, 0x80, 0x08, 0x88], dtype=torch.uint8, device=DEVICE).repeat(4)
    scales[:, 1] = 254
    packed[5] = 0
    scales[6] = 0
    got, exact = unpacked(keys, 64), exact_keys(keys, 64)
    exact[6] = 0  # 2^-127 times anything: below fp32's normal numbers, counted as zero
    assert torch.allclose(got, exact, rtol=0, atol=2**-118)
    assert torch.equal(got[:5], exact[:5]) and torch.equal(got[7:], exact[7:])


def test_queries_are_exact():
    """SGLang's index queries: E2M1 values times a power of two a group."""
    gen = generator(4)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    q = grid[torch.randint(0, 15, (9, 32, 4, 32), generator=gen)]
    q = q * torch.exp2(torch.randint(-9, 3, (9, 32, 4, 1), generator=gen).double())
    q = q.reshape(9, 32, 128).to(torch.bfloat16)
    q[3, 7] = 0
    weights = torch.randn(9, 32, generator=gen).to(torch.bfloat16)
    fp8, scaled = fp8_queries(extend.IndexQueries(q=q, weights=weights))
    assert fp8.float().isfinite().all() and fp8.is_contiguous()
    product = fp8.double() * scaled.double()[..., None]
    assert torch.equal(product, q.double() * weights.double()[..., None])


def test_entries_outside_the_pool_are_never_chosen():
    """-inf maxima and logits, also for the newest block; the rest as without them."""
    problem = as_extend(problem_of([150, 151], GEOMETRY, table_slots=64), [2])
    table = problem.rows.block_table
    table[:, 0], table[:, 2] = problem.keys.pool.shape[0], 2**31 - 1
    plain = problem_of([150, 151], GEOMETRY, table_slots=64)
    plain = as_extend(plain, [2])
    ((_, logits, maxima),) = scorer_of(problem).tiles(problem.queries, problem.keys, problem.rows)
    ((_, expected, best),) = scorer_of(plain).tiles(plain.queries, plain.keys, plain.rows)
    for row, length in enumerate((150, 151)):
        assert (logits[row, :64] == -torch.inf).all() and (logits[row, 128:length] == -torch.inf).all()
        assert torch.equal(logits[row, 64:128], expected[row, 64:128])
        blocks = -(-length // 8)
        assert (maxima[row, :8] == -torch.inf).all() and (maxima[row, 16:blocks] == -torch.inf).all()
        assert torch.equal(maxima[row, 8:16], best[row, 8:16])


def test_overflow_does_not_tie_with_the_newest_block(monkeypatch):
    """+inf and NaN logits: blocks stay blocks, and only the newest has +inf."""

    scored = extend.mqa_logits

    def overflowing(*arguments):
        out = scored(*arguments)
        out[0, 3], out[0, 8:16], out[0, 16:24] = torch.inf, torch.nan, -torch.inf
        return out

    monkeypatch.setattr(extend, "mqa_logits", overflowing)
    problem = as_extend(problem_of([60], GEOMETRY), [1])
    ((_, _, maxima),) = scorer_of(problem).tiles(problem.queries, problem.keys, problem.rows)
    lowest, highest = torch.finfo(torch.bfloat16).min, torch.finfo(torch.bfloat16).max
    assert maxima[0, :3].tolist() == [highest, lowest, lowest]
    assert maxima[0, 7] == torch.inf and maxima[0, 3:7].isfinite().all()


def test_why_deepgemm_cannot(monkeypatch):
    monkeypatch.undo()
    assert "takes 32 or 64 index heads, the model has 16" in extend.unusable(16)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert extend.unusable(32).startswith("deep_gemm cannot be imported (")
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    assert extend.unusable(32) == "deep_gemm has no fp8_fp4_mqa_logits"
    sys.modules["deep_gemm"].fp8_fp4_mqa_logits = None
    assert extend.unusable(64) is None


def test_without_deepgemm_the_set_is_not_made_for_extends(monkeypatch, caplog):
    monkeypatch.setattr(hopper, "unusable", lambda heads: "it is not here")
    problem = problem_of([9], GEOMETRY)
    kernels = Kernels(GEOMETRY, problem.buffers)
    kernels.prepare_extend()
    assert kernels.extend is None
    assert "the decode kernels score the dense layers of an extend, DeepGEMM cannot: it is not here" in caplog.text
