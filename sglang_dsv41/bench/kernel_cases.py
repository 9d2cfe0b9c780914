"""The cases of ``kernels.py`` on the GPU: inputs, SGLang's calls and ours, the checks and the timing."""

from __future__ import annotations

import dataclasses
import statistics

import torch

from ..geometry import CandidateGeometry
from ..kernels import IndexQueries, PagedKeys, kernel_set_class
from ..rows import RowBuffers, SparseRows
from .kernels import PAGE_SLOTS, CaseName
from .progress import Progress
from .results import ResultFile

GEOMETRY = CandidateGeometry(topk_blocks=2048, block_size=8, topk=512, heads=32, source_layer=20, consumer_layers=(24,))
KEY_BYTES = 68
# The input sets of a case together read about this much, several times the L2 cache.
ROTATED_BYTES = 300 << 20
MAX_SETS = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class WrongResult(RuntimeError):
    """Our kernels compute something else than SGLang's: there is nothing to time."""


@dataclasses.dataclass
class Inputs:
    """One input set: ours in `queries` and `rows`, SGLang's in the rest."""

    queries: IndexQueries
    rows: SparseRows
    request: torch.Tensor  # [rows] int64
    mask: torch.Tensor  # [rows, context] bool
    blocks: torch.Tensor  # [rows, 2048] int32
    out_slots: torch.Tensor  # [rows, 512] int32


class Case:
    """Shapes, pool, page tables and input sets of one benchmark case."""

    def __init__(self, requests: int, context: int, group: int = 1, *, dense: bool, kernels: str = "hopper") -> None:
        device = torch.device("cuda")
        self.rows, self.context, self.requests = requests * group, context, requests
        read = self.rows * GEOMETRY.columns * KEY_BYTES if not dense else requests * context * KEY_BYTES
        self.num_sets = max(1, min(MAX_SETS, -(-ROTATED_BYTES // read)))
        # Sets of a dense case need keys of their own; those of a sparse case differ by their blocks in a large pool.
        pools = (
            self.num_sets if dense else max(1, min(self.num_sets, ROTATED_BYTES // (requests * context * KEY_BYTES)))
        )
        generator = torch.Generator(device=device).manual_seed(0)
        pages = pools * requests * context // PAGE_SLOTS + 1
        pool = torch.randint(
            0, 256, (pages, PAGE_SLOTS * KEY_BYTES), dtype=torch.uint8, device=device, generator=generator
        )
        pool[:, PAGE_SLOTS * 64 :] = torch.randint(
            118, 128, (pages, PAGE_SLOTS * 4), dtype=torch.uint8, device=device, generator=generator
        )
        self.keys = PagedKeys(pool, PAGE_SLOTS)
        order = torch.randperm(pages - 1, device=device, generator=generator) + 1
        table = order.view(pools * requests, -1).to(torch.int32)
        # SGLang's Hopper kernel reads a token table; ratio 1, so a token is a position.
        within = torch.arange(context, device=device, dtype=torch.int32)
        self.req_to_token = table.repeat_interleave(PAGE_SLOTS, dim=1) * PAGE_SLOTS + within % PAGE_SLOTS
        self.buffers = RowBuffers(
            GEOMETRY,
            max_rows=self.rows * self.num_sets,
            scratch_bytes=1 << 30,
            max_context=context,
            dense_rows=self.rows,
            device=device,
        )
        self.kernels = kernel_set_class(kernels)(GEOMETRY, self.buffers)
        self.portable = kernel_set_class("portable")(GEOMETRY, self.buffers)
        self.sets = [self._inputs(i, i % pools, table, generator) for i in range(self.num_sets)]

    def _inputs(self, index: int, pool: int, table: torch.Tensor, generator: torch.Generator) -> Inputs:
        device, rows, context = table.device, self.rows, self.context
        grid = torch.tensor(E2M1, device=device)
        q = grid[torch.randint(0, 16, (rows, 32, 128), device=device, generator=generator)]
        scale = torch.randint(-3, 3, (rows, 32, 4), device=device, generator=generator)
        q = q * torch.exp2(scale.float()).repeat_interleave(32, dim=-1)
        weights = torch.randn(rows, 32, device=device, generator=generator) * 0.05
        request = torch.arange(pool * self.requests, (pool + 1) * self.requests, device=device)
        request = request.repeat_interleave(rows // self.requests)
        at = slice(index * rows, (index + 1) * rows)
        lens = torch.full((rows,), context, dtype=torch.int32, device=device)
        sparse = SparseRows(
            row_ks=torch.zeros_like(lens),
            row_ke=lens,
            lens=lens,
            block_table=table[request],
            table_slots=PAGE_SLOTS,
            sparse_indices=self.buffers._sparse_indices[at],
            physical_blocks=self.buffers._physical_blocks[at],
            end=self.buffers._end[at],
            row_indices=request.to(torch.int32),
            is_verify=rows > self.requests,
        )
        count = context // GEOMETRY.block_size
        blocks = torch.stack(
            [torch.randperm(count, device=device, generator=generator)[: GEOMETRY.topk_blocks] for _ in range(rows)]
        ).to(torch.int32)
        blocks[:, 0] = torch.where((blocks == count - 1).any(1), blocks[:, 0], count - 1)
        self.kernels.expand(blocks, sparse, slice(0, rows))
        from sglang.kernels.ops.attention.dsv4.candidate_blocks import candidate_block_mask

        return Inputs(
            queries=IndexQueries(q.to(torch.bfloat16), weights.to(torch.bfloat16)),
            rows=sparse,
            request=request,
            mask=candidate_block_mask(blocks, context, GEOMETRY.block_size),
            blocks=blocks,
            out_slots=torch.empty((rows, GEOMETRY.topk), dtype=torch.int32, device=device),
        )

    # ---- ours; `kernels` is the set ----

    def ours_sparse(self, s: Inputs, kernels=None):
        return (kernels or self.kernels).sparse_logits(s.queries, self.keys, s.rows, slice(0, self.rows))

    def ours_consumer(self, s: Inputs, kernels=None):
        logits = self.ours_sparse(s, kernels)
        (kernels or self.kernels).select_candidates(
            logits, s.rows, slice(0, self.rows), out_positions=None, out_slots=s.out_slots
        )

    def ours_dense(self, s: Inputs, kernels=None):
        # one tile at these sizes
        ((_, logits),) = (kernels or self.kernels).dense_logits_tiles(s.queries, self.keys, s.rows)
        return logits

    def ours_source(self, s: Inputs, kernels=None):
        kernels = kernels or self.kernels
        for tile, logits in kernels.dense_logits_tiles(s.queries, self.keys, s.rows):
            kernels.publish(logits, s.rows, tile, s.out_slots)

    def ours_full(self, s: Inputs, kernels=None):
        kernels = kernels or self.kernels
        for tile, logits in kernels.dense_logits_tiles(s.queries, self.keys, s.rows):
            kernels.select_visible(logits, s.rows, tile, s.out_slots)

    # ---- SGLang's ----

    def stock_logits(self, s: Inputs, mask=None):
        from sglang.kernels.ops.attention.dsv4.fp4_indexer import fp4_index_logits_paged

        return fp4_index_logits_paged(
            s.queries.q,
            s.queries.weights,
            s.request,
            self.req_to_token,
            s.rows.lens,
            self.keys.pool,
            PAGE_SLOTS,
            self.context,
            1,
            mask,
        )

    def stock_sparse(self, s: Inputs):
        return self.stock_logits(s, s.mask)

    def stock_select(self, s: Inputs, scores, masked: bool):
        from sglang.kernels.ops.attention.dsv4.fp4_indexer import finish_paged_indexer_topk
        from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2, topk_transform_paged_v2

        plan = plan_topk_v2(s.rows.lens)
        picks = torch.empty((self.rows, GEOMETRY.topk), dtype=torch.int32, device=scores.device)
        topk_transform_paged_v2(scores, s.rows.lens, None, picks, 1, plan)
        finish_paged_indexer_topk(
            picks, scores, s.rows.lens, s.request, self.req_to_token, s.out_slots, None, 1, masked
        )

    def stock_consumer(self, s: Inputs):
        self.stock_select(s, self.stock_sparse(s), True)

    def stock_dense(self, s: Inputs):
        return self.stock_logits(s)

    def stock_source(self, s: Inputs):
        from sglang.kernels.ops.attention.dsv4.candidate_blocks import amax_topk_blocks, candidate_block_mask

        scores = self.stock_logits(s)
        blocks = amax_topk_blocks(scores, s.rows.lens, (s.rows.lens + 7) // 8, GEOMETRY.topk_blocks)
        candidate_block_mask(blocks, self.context, GEOMETRY.block_size)
        self.stock_select(s, scores, False)

    def stock_full(self, s: Inputs):
        self.stock_select(s, self.stock_logits(s), False)

    def check(self, kind: str, say=print) -> float:
        """Both sides must compute the same before they are timed; returns the share of logits equal bit for bit.

        Raises:
            WrongResult: they do not.
        """
        s = self.sets[0]
        if kind in ("dense_logits", "verify_dense", "source_pass", "full_pass"):
            a, b = self.ours_dense(s)[:, : self.context].double(), self.stock_dense(s)[:, : self.context].double()
        else:
            a, b = self.ours_sparse(s).double(), self.stock_sparse(s).double()
            column = torch.arange(GEOMETRY.columns, device=a.device)
            at = s.rows.sparse_indices.long()[:, column // 8] * 8 + column % 8
            b = b.gather(1, at.clamp_max(self.context - 1))
        error = ((a - b).abs() / b.abs().amax(1, keepdim=True)).max().item()
        equal = (a == b).double().mean().item()
        say(f"  checked: {equal:.4%} of logits equal bit for bit, largest difference {error:.2e} of the row's largest")
        if kind in ("consumer_pass", "source_pass", "full_pass"):
            self.check_picks(kind, a, say)
        if not error < 2e-2:
            raise WrongResult(f"{kind}: our logits differ from SGLang's by {error} of the row's largest")
        return equal

    def check_picks(self, kind: str, logits: torch.Tensor, say=print) -> None:
        """The picks of both sides score what the best of our logits score, sorted; eagerly and in a graph."""
        s, side_names = self.sets[0], ("stock", "ours")
        suffix = kind.split("_")[0]
        best = logits.topk(GEOMETRY.topk, dim=1).values
        # A slot's column: dense logits are in position order, compact ones in the order of the listed blocks.
        if kind != "consumer_pass":
            slots = s.rows.block_table.long()[:, :, None] * PAGE_SLOTS + torch.arange(PAGE_SLOTS, device=best.device)
        else:
            slots = s.rows.physical_blocks.long()[:, :, None] * 8 + torch.arange(8, device=best.device)
        slots, order = slots.flatten(1).sort(1)
        for side in side_names:
            method = getattr(self, f"{side}_{suffix}")
            method(s)
            for how in ("eager", "graph"):
                if how == "graph":
                    graph = graph_of(method, [s])
                    s.out_slots.fill_(-7)
                    graph.replay()
                torch.cuda.synchronize()
                at = torch.searchsorted(slots, s.out_slots.long()).clamp_max(slots.shape[1] - 1)
                held = slots.gather(1, at) == s.out_slots
                picked = logits.gather(1, order.gather(1, at)).masked_fill(~held, -torch.inf)
                scale = best.abs().amax(1, keepdim=True)
                gap = ((picked.sort(1, descending=True).values - best).abs() / scale).amax(1)
                wrong = int((gap > 2e-2).sum())
                say(f"  picks of {side}, {how}: {wrong} of {self.rows} rows off the best scores by more than 2%")
                if wrong and side == "ours":
                    raise WrongResult(f"{kind}: our picks are not the best scores ({how})")


# case kind -> (stock method, our method, dense reads)
METHODS = {
    "sparse_logits": ("stock_sparse", "ours_sparse", False),
    "consumer_pass": ("stock_consumer", "ours_consumer", False),
    "dense_logits": ("stock_dense", "ours_dense", True),
    "verify_dense": ("stock_dense", "ours_dense", True),
    "source_pass": ("stock_source", "ours_source", True),
    "full_pass": ("stock_full", "ours_full", True),
}


def graph_of(function, sets) -> torch.cuda.CUDAGraph:
    """A graph that runs `function` once over every input set."""
    for s in sets:
        function(s)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for s in sets:
            function(s)
    return graph


def sample(graph: torch.cuda.CUDAGraph, runs: int) -> float:
    """Microseconds of one run within one replay."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000 / runs


def least_bytes(kind: str, case: Case) -> int:
    if kind in ("sparse_logits", "consumer_pass"):
        logits = case.rows * GEOMETRY.columns * 2
        return case.rows * (GEOMETRY.columns * KEY_BYTES + GEOMETRY.kernel_blocks * 4) + logits
    return case.requests * case.context * KEY_BYTES + case.rows * case.context * 2


def unmet(kernels: str) -> str | None:
    """Why a kernel set cannot be had here, or None; builds its code."""
    return kernel_set_class(kernels).unmet(GEOMETRY)


def run_case(name: CaseName, rounds: int, results: ResultFile, kernels: str, progress: Progress) -> None:
    """Check and time one case, and add its row to ``results``.

    Raises:
        WrongResult: our kernels compute something else than SGLang's.
    """
    progress.at(f"{name}: inputs")
    torch.cuda.empty_cache()  # of the case before
    stock, ours, dense = METHODS[name.kind]
    case = Case(name.requests, name.context, name.group, dense=dense, kernels=kernels)
    progress.say(f"{name}: {case.num_sets} input sets")
    equal = case.check(name.kind, progress.say)
    graphs = {side: graph_of(getattr(case, method), case.sets) for side, method in (("stock", stock), ("ours", ours))}
    graphs["portable"] = graph_of(lambda s: getattr(case, ours)(s, case.portable), case.sets)
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {side: [] for side in graphs}
    for round_ in range(rounds):
        progress.at(f"{name}: round {round_ + 1} of {rounds}")
        for side, graph in graphs.items():
            samples[side].append(sample(graph, case.num_sets))
    portable = round(statistics.median(samples.pop("portable")), 2)
    row = results.add(
        str(name), "us", **samples, bytes=least_bytes(name.kind, case), equal_logits=round(equal, 8), portable=portable
    )
    progress.say(
        f"  stock {row['stock']} us, ours {row['ours']} us, {row['ratio']}x, {row['gb_per_s']} GB/s; "
        f"portable {portable} us"
    )
