"""Random two-level problems and an oracle that shares no code with the package: positions, loops, float64."""

from __future__ import annotations

import dataclasses
import math

import torch

from sglang_dsv41.geometry import INT32_MAX, CandidateGeometry
from sglang_dsv41.kernels import IndexQueries, PagedKeys, kernel_set_class
from sglang_dsv41.rows import RowBuffers, SparseRows
from tests.devices import device_of

SMALL = CandidateGeometry(topk_blocks=16, block_size=8, topk=24, heads=16, source_layer=6, consumer_layers=(8, 9))
RELEASED = CandidateGeometry(topk_blocks=2048, block_size=8, topk=512, heads=32, source_layer=20, consumer_layers=(24,))
GARBAGE = 7_654_321  # no position, slot or block
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@dataclasses.dataclass
class Problem:
    geometry: CandidateGeometry
    keys: PagedKeys
    queries: IndexQueries
    rows: SparseRows
    buffers: RowBuffers

    @property
    def lens(self) -> list[int]:
        return self.rows.lens.tolist()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_keys(
    pages: int, page_slots: int, seed: int, *, device="cpu", exponents=(120, 130), page_stride: int | None = None
) -> PagedKeys:
    """Random page-planar MXFP4 pages; ``page_stride`` > page bytes makes a padded, strided view."""
    gen = generator(seed)
    page_bytes = page_slots * 68
    stride = page_stride or page_bytes
    pool = torch.randint(0, 256, (pages, stride), dtype=torch.uint8, generator=gen)
    scales = torch.randint(exponents[0], exponents[1] + 1, (pages, page_slots * 4), generator=gen)
    pool[:, page_slots * 64 : page_bytes] = scales.to(torch.uint8)
    return PagedKeys(pool=pool.to(device)[:, :page_bytes], page_slots=page_slots)


def make_queries(rows: int, heads: int, seed: int, *, device="cpu") -> IndexQueries:
    """Queries on the E2M1 grid with power-of-two scales, and signed weights, some of them zero."""
    gen = generator(seed)
    grid = torch.tensor(E2M1)
    q = grid[torch.randint(0, 16, (rows, heads, 128), generator=gen)]
    q = q * torch.exp2(torch.randint(-3, 3, (rows, heads, 4), generator=gen).float()).repeat_interleave(32, dim=-1)
    weights = torch.randn(rows, heads, generator=gen) * 0.05
    weights[:, :: max(1, heads // 4)] = 0
    return IndexQueries(q=q.to(torch.bfloat16).to(device), weights=weights.to(torch.bfloat16).to(device))


def make_problem(
    lens: list[int],
    geometry: CandidateGeometry = SMALL,
    *,
    seed: int = 0,
    page_slots: int = 64,
    table_slots: int | None = None,
    device="cpu",
    scratch_bytes: int = 64 << 20,
    page_stride: int | None = None,
    exponents=(120, 130),
) -> Problem:
    """One row a length; every row has pages of its own, shuffled, with a hole (page 0 and some others unused)."""
    gen = generator(seed + 1)
    table_slots = table_slots or page_slots
    width = max(1, max(math.ceil(n / table_slots) for n in lens))
    entries = len(lens) * width
    total = entries + 3
    order = torch.randperm(total - 1, generator=gen)[:entries] + 1
    table = order.view(len(lens), width).to(torch.int32).to(device)
    pool_pages = total * table_slots // page_slots
    buffers = RowBuffers(
        geometry,
        max_rows=len(lens),
        scratch_bytes=scratch_bytes,
        max_context=width * table_slots,
        dense_rows=len(lens),
        device=device,
    )
    rows = buffers.rows(
        torch.tensor(lens, dtype=torch.int64, device=device) - 1,
        ratio=1,
        block_table=table,
        table_slots=table_slots,
    )
    return Problem(
        geometry=geometry,
        keys=make_keys(pool_pages, page_slots, seed + 2, device=device, page_stride=page_stride, exponents=exponents),
        queries=make_queries(len(lens), geometry.heads, seed + 3, device=device),
        rows=rows,
        buffers=buffers,
    )


def build(kernels_on: str, lens: list[int], geometry: CandidateGeometry = SMALL, **options):
    """A poisoned problem and the kernel set of `kernels_on` for it; options as of ``make_problem``."""
    problem = make_problem(lens, geometry, device=device_of(kernels_on), **options)
    poison(problem.rows)
    return problem, kernel_set_class(kernels_on.split("-")[0])(geometry, problem.buffers)


def poison(rows: SparseRows) -> None:
    """Fill every output of a schedule with values that no correct one has."""
    rows.sparse_indices.fill_(77777777)
    rows.physical_blocks.fill_(-77777777)
    rows.end.fill_(-5)


# ---- the oracle ----


def key_at(keys: PagedKeys, slot: int) -> torch.Tensor:
    """[128] float64 key of one pool slot of a CPU pool, byte by byte."""
    page, offset = divmod(slot, keys.page_slots)
    line = keys.pool[page]
    values = []
    for byte in line[offset * 64 : offset * 64 + 64].tolist():
        values += [E2M1[byte & 15], E2M1[byte >> 4]]
    at = keys.page_slots * 64 + offset * 4
    scales = [2.0 ** (e - 127) for e in line[at : at + 4].tolist()]
    return torch.tensor([v * scales[i // 32] for i, v in enumerate(values)], dtype=torch.float64)


def slot_of(rows: SparseRows, row: int, position: int) -> int:
    entry = int(rows.block_table[row, position // rows.table_slots])
    return entry * rows.table_slots + position % rows.table_slots


def dense_scores(problem: Problem, row: int) -> torch.Tensor:
    """[len] float64 scores of a row's visible positions, unrounded."""
    rows, queries = problem.rows, problem.queries
    length = int(rows.lens[row])
    if length == 0:
        return torch.empty(0, dtype=torch.float64)
    keys = dataclasses.replace(problem.keys, pool=problem.keys.pool.cpu())
    table = rows.block_table[row].tolist()
    slots = [table[p // rows.table_slots] * rows.table_slots + p % rows.table_slots for p in range(length)]
    k = torch.stack([key_at(keys, slot) for slot in slots])
    q, w = queries.q[row].cpu().double(), queries.weights[row].cpu().double()
    return ((q @ k.T).relu() * w[:, None]).sum(0)


def oracle_blocks(scores: torch.Tensor, geometry: CandidateGeometry) -> list[int]:
    """A row's candidate blocks by position arithmetic, ascending."""
    length, size = scores.numel(), geometry.block_size
    count = -(-length // size)
    newest = (length - 1) // size
    best = sorted(
        range(count), key=lambda b: -math.inf if b == newest else -float(scores[b * size : b * size + size].max())
    )
    return sorted(best[: geometry.topk_blocks])


def visible_in(blocks: list[int], length: int, size: int) -> list[int]:
    return [p for b in blocks for p in range(b * size, min(b * size + size, length))]


def assert_selection(picks: list[int], scores: dict[int, float], topk: int, *, tolerance: float) -> None:
    """``picks`` are the top-k of ``scores`` (position -> score): unique, -1 padded, and no left-out position beats a
    picked one by more than ``tolerance``."""
    chosen = [p for p in picks if p != -1]
    assert len(chosen) == len(set(chosen)) == min(topk, len(scores)), (len(chosen), len(set(chosen)), len(scores))
    assert all(p == -1 or p in scores for p in picks), [p for p in picks if p != -1 and p not in scores][:5]
    picked = set(chosen)
    left = [s for p, s in scores.items() if p not in picked]
    if chosen and left:
        worst = min(scores[p] for p in chosen)
        assert max(left) <= worst + tolerance, f"left out {max(left)}, picked {worst}"


# ---- one step ----


def garbage(problem: Problem, width=None) -> torch.Tensor:
    """An output that nothing was written to, its rows on 32 B as SGLang's selection kernels want them."""
    shape = (problem.rows.num_rows, width or -(-problem.geometry.topk // 8) * 8)
    return torch.full(shape, GARBAGE, dtype=torch.int32, device=problem.rows.lens.device)


def source_pass(problem: Problem, kernels, out=None) -> torch.Tensor:
    """The source's pass over all tiles; the dense logits of every row."""
    dense = []
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        kernels.publish(logits, problem.rows, tile, garbage(problem) if out is None else out)
        dense.append(logits.clone())
    return torch.cat(dense)


def consumer_pass(problem: Problem, kernels) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, slots) of a consumer's passes."""
    positions, slots = garbage(problem), garbage(problem)
    for tile in kernels.passes(problem.rows.num_rows):
        logits = kernels.sparse_logits(problem.queries, problem.keys, problem.rows, tile)
        kernels.select_candidates(logits, problem.rows, tile, out_positions=positions, out_slots=slots)
    return positions, slots


def check_step(problem: Problem, dense, picks, positions, slots, which=None) -> None:
    """A step's outputs against its own dense logits: blocks, schedule, both selections; ``which`` rows, or all."""
    rows, geometry = problem.rows, problem.geometry
    size = geometry.block_size
    lens = problem.lens
    for row in range(len(lens)) if which is None else which:
        length = lens[row]
        scores = dense[row, :length].cpu().double()
        assert not scores.isnan().any()
        blocks = [b for b in rows.sparse_indices[row].tolist() if b != INT32_MAX]
        candidates = visible_in(blocks, length, geometry.kernel_block)
        best = {b: float(scores[b * size :][:size].max()) for b in range(-(-length // size))}
        expected = oracle_blocks(scores, geometry) if length else []
        assert sorted(best[b] for b in {p // size for p in candidates}) == sorted(best[b] for b in expected)
        assert int(rows.end[row]) == len(candidates)
        table, per = rows.block_table[row].tolist(), rows.table_slots
        slot = [table[p // per] * per + p % per for p in range(length)]
        values = scores.tolist()
        by_slot = {slot[p]: values[p] for p in range(length)}
        assert_selection(picks[row].tolist(), by_slot, geometry.topk, tolerance=0)
        among = {p: values[p] for p in candidates}
        assert_selection(positions[row].tolist(), among, geometry.topk, tolerance=0)
        assert slots[row].tolist() == [-1 if p == -1 else slot[p] for p in positions[row].tolist()]
