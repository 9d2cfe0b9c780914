"""Random geometries, lengths, pages and block lists against the loop oracle; hypothesis shrinks what fails.

A short run by default; `DSV41_FUZZ_EXAMPLES=2000 pytest tests/unit/test_fuzz.py` runs longer. The portable set runs under
Triton's interpreter where there is no GPU.
"""

import os

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis (pip install hypothesis)")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_dsv41.geometry import INT32_MAX, CandidateGeometry
from sglang_dsv41.kernels import kernel_set_class
from tests.candidates import assert_selection, make_problem, oracle_blocks, poison, slot_of, visible_in
from tests.devices import DEVICES, device_of

EXAMPLES = int(os.environ.get("DSV41_FUZZ_EXAMPLES", "12"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="DSV41_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def problems(draw):
    block_size = draw(st.sampled_from([8, 16, 24, 32, 40]))
    topk_blocks = draw(st.integers(1, 12))
    geometry = CandidateGeometry(
        topk_blocks=topk_blocks,
        block_size=block_size,
        topk=draw(st.integers(1, min(48, topk_blocks * block_size))),
        heads=draw(st.sampled_from([16, 32])),
    )
    page_slots = draw(st.sampled_from([64, 128]))
    table_slots = page_slots * draw(st.sampled_from([1, 2]))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, page_slots - 1, page_slots, page_slots + 1]
    lens = draw(st.lists(st.one_of(st.sampled_from(edges), st.integers(0, 420)), min_size=1, max_size=5))
    options = dict(
        seed=draw(st.integers(0, 1000)),
        page_slots=page_slots,
        table_slots=table_slots,
        scratch_bytes=draw(st.sampled_from([1, 64 << 20])),
        page_stride=draw(st.sampled_from([None, page_slots * 68 + 60])),
    )
    return lens, geometry, options


@pytest.mark.parametrize("kernels_on", DEVICES)
@given(problems())
@fuzz
def test_a_whole_step(kernels_on, drawn):
    """Dense pass, block choice, expansion, sparse pass and selection of one step."""
    lens, geometry, options = drawn
    problem = make_problem(lens, geometry, device=device_of(kernels_on), **options)
    kernels = kernel_set_class(kernels_on.split("-")[0])(geometry, problem.buffers)
    rows = problem.rows
    poison(rows)
    slots = torch.full((len(lens), geometry.topk + 3), 12345, dtype=torch.int32, device=rows.lens.device)
    positions, dense = slots.clone(), {}
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.select_visible(logits, rows, tile, slots)
        blocks = kernels.choose_blocks(logits, rows, tile)
        kernels.expand(blocks, rows, tile)
        for row in range(tile.start, tile.stop):
            dense[row] = logits[row - tile.start, : lens[row]].float().cpu()
            check_blocks(blocks[row - tile.start].tolist(), dense[row], geometry)
    for row, length in enumerate(lens):
        by_slot = {slot_of(rows, row, p): float(dense[row][p]) for p in range(length)}
        assert_selection(slots[row].tolist(), by_slot, geometry.topk, tolerance=0)
    slots.fill_(12345)
    for tile in kernels.passes(len(lens)):
        logits = kernels.sparse_logits(problem.queries, problem.keys, rows, tile)
        kernels.select_candidates(logits, rows, tile, out_positions=positions, out_slots=slots)
        for row in range(tile.start, tile.stop):
            check_row(problem, row, logits[row - tile.start].float().cpu(), dense[row], positions, slots)


def check_blocks(blocks, scores, geometry):
    chosen = [b for b in blocks if b != -1]
    size, count = geometry.block_size, -(-len(scores) // geometry.block_size)
    assert len(chosen) == len(set(chosen)) == min(count, geometry.topk_blocks)
    if count:
        assert count - 1 in chosen
        best = {b: float(scores[b * size :][:size].max()) for b in range(count)}
        assert sorted(best[b] for b in chosen) == sorted(best[b] for b in oracle_blocks(scores, geometry))


def check_row(problem, row, logits, dense, positions, slots):
    """A row's schedule is its blocks' positions in order, its logits are the dense ones, its picks their top."""
    rows, geometry = problem.rows, problem.geometry
    listed = [b for b in rows.sparse_indices[row].tolist() if b != INT32_MAX]
    candidates = visible_in(listed, len(dense), geometry.kernel_block)
    assert listed == sorted(set(listed)) and int(rows.end[row]) == len(candidates)
    assert torch.equal(logits[: len(candidates)], dense[candidates])
    scores = {p: float(dense[p]) for p in candidates}
    assert_selection(positions[row].tolist(), scores, geometry.topk, tolerance=0)
    expected = [-1 if p == -1 else slot_of(rows, row, p) for p in positions[row].tolist()]
    assert slots[row].tolist() == expected


@pytest.mark.parametrize("kernels_on", DEVICES)
@given(problems(), st.data())
@fuzz
def test_expansion_of_any_block_list(kernels_on, drawn, data):
    """Block ids of any kind in any order: what is visible is kept, once, ascending; the rest is dropped."""
    lens, geometry, options = drawn
    problem = make_problem(lens, geometry, device=device_of(kernels_on), **options)
    kernels = kernel_set_class(kernels_on.split("-")[0])(geometry, problem.buffers)
    rows, size = problem.rows, geometry.block_size
    poison(rows)
    lists = [
        data.draw(st.lists(st.integers(-3, max(lens) // size + 3), unique=True, max_size=geometry.topk_blocks))
        for _ in lens
    ]
    width = max(1, max(map(len, lists)))
    blocks = torch.tensor([one + [-1] * (width - len(one)) for one in lists], dtype=torch.int32)
    kernels.expand(blocks.to(rows.lens.device), rows, slice(0, len(lens)))
    for row, (length, one) in enumerate(zip(lens, lists)):
        kept = sorted(b for b in one if 0 <= b < -(-length // size))
        expected = visible_in(kept, length, size)
        listed = [b for b in rows.sparse_indices[row].tolist() if b != INT32_MAX]
        assert visible_in(listed, length, geometry.kernel_block) == expected and int(rows.end[row]) == len(expected)
        physical = rows.physical_blocks[row].tolist()
        at = [slot_of(rows, row, b * geometry.kernel_block) // geometry.kernel_block for b in listed]
        assert physical == at + [-1] * (len(physical) - len(at))
