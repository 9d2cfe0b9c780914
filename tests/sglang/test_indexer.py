"""The four publish/consume calls on SGLang's own inputs, pools and index modules.

Every row is checked against a loop oracle over positions, and against the selection that SGLang's own dense candidate
backend makes from the same inputs.
"""

import dataclasses
import types

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.environ import envs as sglang_envs
from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Indexer
from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata, expand_index_page_table
from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import BlockIds, DenseBlocksBackend
from sglang.srt.layers.attention.dsv4.v41_indexer.full_topk import FullTopKIndexer
from sglang.srt.layers.attention.dsv4.v41_indexer.scoring import prefill_k_slots
from sglang.srt.layers.attention.dsv4.v41_indexer.types import DecodeInputs, PrefillInputs
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4IndexerPool, DeepSeekV4TokenToKVPool

from sglang_dsv41.geometry import INT32_MAX, CandidateGeometry
from sglang_dsv41.indexer import SparseCandidateIndexer
from sglang_dsv41.kernels import PagedKeys, kernel_set_class
from sglang_dsv41.rows import RowBuffers
from tests.candidates import assert_selection, generator, key_at, oracle_blocks, visible_in
from tests.devices import DEVICES, device_of

KV_PAGE, INDEX_PAGE, HIDDEN, Q_LORA = 256, 64, 96, 64
SOURCE, CONSUMER, LAST = 6, 8, 9
GARBAGE = 7_654_321
GEOMETRY = CandidateGeometry(
    topk_blocks=8, block_size=8, topk=16, heads=32, source_layer=SOURCE, consumer_layers=(CONSUMER, LAST)
)
# Positions of one draft group, or of one decode batch, on block (8), index-page (64) and KV-page (256) edges.
EDGES = [0, 1, 6, 7, 8, 62, 63, 64, 127, 254, 255, 256, 257, 511, 519, 599]


@pytest.fixture(autouse=True)
def one_thread():
    """Many tiny operations: a thread pool only adds waiting, most of all on a shared machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class IndexKPool(DeepSeekV4TokenToKVPool):
    """SGLang's pool cut down to the index K of one ratio; its accessors are SGLang's."""

    def __init__(self, ratio: int, pool: DeepSeekV4IndexerPool, layers) -> None:
        self.index_pools = {ratio: pool}
        self.layer_mapping = {layer: (ratio, 0, None) for layer in layers}

    def wait_layer_transfer(self, layer_id: int) -> None:
        pass


class World:
    """A model's index layers, its pool and requests. A row's inputs depend on its request and position only."""

    def __init__(
        self, kernels_on, *, geometry=GEOMETRY, ratio=1, requests=4, pages=3, scratch_bytes=8 << 20, max_rows=96, seed=0
    ):
        name, self.device = kernels_on.split("-")[0], device_of(kernels_on)
        self.geometry = geometry = dataclasses.replace(geometry, ratio=ratio)
        self.ratio, self.pages, gen = ratio, pages, generator(seed)
        context, layers = pages * KV_PAGE, (SOURCE, CONSUMER, LAST)
        # Page 0 is SGLang's reserved one, three more stay holes; the rest are dealt out shuffled.
        total = requests * pages + 4
        self.pages_of = (torch.randperm(total - 1, generator=gen)[: requests * pages] + 1).view(requests, pages)
        token = torch.arange(context)
        self.req_to_token = torch.zeros(requests + 1, context, dtype=torch.int32)
        self.req_to_token[1:] = self.pages_of[:, token // KV_PAGE] * KV_PAGE + token % KV_PAGE
        self.req_to_token = self.req_to_token.to(self.device)
        index_pool = DeepSeekV4IndexerPool(
            total * KV_PAGE // ratio,
            INDEX_PAGE,
            torch.uint8,
            128,
            1,
            self.device,
            False,
            use_fp4_indexer=True,
            global_page_size=KV_PAGE,
        )
        buffer = index_pool.get_index_k_with_scale_buffer(0)
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=gen))
        scales = torch.randint(120, 127, (buffer.shape[0], INDEX_PAGE * 4), dtype=torch.uint8, generator=gen)
        buffer[:, INDEX_PAGE * 64 :] = scales.to(self.device)
        self.pool, self.keys = IndexKPool(ratio, index_pool, layers), PagedKeys(buffer, INDEX_PAGE)
        self.key_cache, self.score_cache = {}, {}
        config = types.SimpleNamespace(
            index_n_heads=geometry.heads,
            index_head_dim=128,
            qk_rope_head_dim=64,
            index_topk=geometry.topk,
            kv_source_layer_ids=[SOURCE],
            candidate_source_layer_id=SOURCE,
            candidate_topk_blocks=geometry.topk_blocks,
            candidate_block_size=geometry.block_size,
            q_lora_rank=Q_LORA,
            hidden_size=HIDDEN,
            rms_norm_eps=1e-6,
        )
        self.indexers = {}
        for layer in layers:
            module = DeepseekV41Indexer(config, layer, 512, None, "")
            for parameter in module.parameters():
                parameter.data = torch.randn(parameter.shape, generator=gen).to(parameter.dtype) * 0.2
            self.indexers[layer] = module.to(self.device)
        angle = torch.arange(4096)[:, None] * torch.logspace(0, -3, 32)[None]
        self.freqs_cis = torch.polar(torch.ones_like(angle), angle).to(self.device)
        shape = (requests + 1, context)
        self.x = torch.randn(*shape, HIDDEN, generator=gen).to(torch.bfloat16).to(self.device)
        self.q_lora = torch.randn(*shape, Q_LORA, generator=gen).to(torch.bfloat16).to(self.device)
        self.stock = DenseBlocksBackend(
            token_to_kv_pool=self.pool,
            req_to_token=self.req_to_token,
            candidate_topk_blocks=geometry.topk_blocks,
            candidate_block_size=geometry.block_size,
            use_deep_gemm_prefill=False,
        )
        self.buffers = RowBuffers(
            geometry,
            max_rows=max_rows,
            scratch_bytes=scratch_bytes,
            max_context=context // ratio,
            dense_rows=max_rows,
            device=self.device,
        )
        self.build(kernel_set_class(name))

    def build(self, kernel_class):
        self.kernels = kernel_class(self.geometry, self.buffers)
        self.indexer = SparseCandidateIndexer(
            geometry=self.geometry,
            kernels=self.kernels,
            buffers=self.buffers,
            token_to_kv_pool=self.pool,
            page_size=KV_PAGE,
            prefill_source=self.stock,
            full_topk=FullTopKIndexer(
                token_to_kv_pool=self.pool,
                req_to_token=self.req_to_token,
                use_deep_gemm_prefill=False,
                use_deep_gemm_decode=False,
            ),
        )

    # ---- inputs: rows are (request from 1, token position) ----

    def tensor(self, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def row_tensors(self, rows):
        request, position = self.tensor([r for r, _ in rows]), self.tensor([p for _, p in rows])
        at = (request, position.clamp(0, self.pages * KV_PAGE - 1))
        table = self.req_to_token[request][:, ::KV_PAGE] // KV_PAGE
        return request, position, self.x[at], self.q_lora[at], table.to(torch.int32).contiguous()

    def garbage(self, rows, width=None):
        return torch.full((rows, width or self.geometry.topk), GARBAGE, dtype=torch.int32, device=self.device)

    def decode(self, layer, rows, *, is_verify=False, width=None, out_rows=None) -> DecodeInputs:
        request, position, x, q_lora, table = self.row_tensors(rows)
        with sglang_envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.override(True):
            metadata = PagedIndexerMetadata(
                page_size=KV_PAGE,
                compressed_page_size=INDEX_PAGE,
                page_table=expand_index_page_table(
                    table, full_page_size=KV_PAGE, compress_ratio=self.ratio, index_page_size=INDEX_PAGE
                ),
                compressed_seq_lens=((position + 1) // self.ratio).clamp_min(0).to(torch.int32),
                use_topk_v2=False,
                compress_ratio=self.ratio,
            )
        return DecodeInputs(
            indexer=self.indexers[layer],
            layer_id=layer,
            compress_ratio=self.ratio,
            freqs_cis=self.freqs_cis,
            x=x,
            q_lora=q_lora,
            positions=position,
            req_rows=request,
            paged_metadata=metadata,
            is_verify=is_verify,
            out_page_indices=self.garbage(out_rows or len(rows), width),
        )

    def extend(self, layer, rows, *, plans=None, slots=True, width=None, seen=None) -> PrefillInputs:
        """``rows`` grouped by request, positions ascending; ``seen`` overrides each request's newest length."""
        request, position, x, q_lora, table = self.row_tensors(rows)
        order = list(dict.fromkeys(r for r, _ in rows))
        counts = [sum(r == one for r, _ in rows) for one in order]
        lens = seen or [1 + max(p for r, p in rows if r == one) for one in order]
        pool_indices = self.tensor(order)
        return PrefillInputs(
            indexer=self.indexers[layer],
            layer_id=layer,
            compress_ratio=self.ratio,
            freqs_cis=self.freqs_cis,
            x=x,
            q_lora=q_lora,
            positions=position,
            req_rows=request,
            req_pool_indices=pool_indices,
            k_slots=prefill_k_slots(
                req_to_token=self.req_to_token, req_pool_indices=pool_indices, seq_lens_cpu=lens, ratio=self.ratio
            ),
            index_plans=plans,
            kv_page_table=table,
            seq_lens_cpu=lens,
            rows_per_request=counts,
            rows_per_request_device=self.tensor(counts, torch.int32),
            out_raw_indices=self.garbage(len(rows), width),
            out_page_indices=self.garbage(len(rows), width) if slots else None,
        )

    # ---- the oracle ----

    def visible(self, row) -> int:
        return max(0, row[1] + 1) // self.ratio

    def slot(self, request: int, position: int) -> int:
        token = position * self.ratio
        page = int(self.pages_of[request - 1, token // KV_PAGE])
        return (page * KV_PAGE + token % KV_PAGE) // self.ratio

    def scores(self, layer, row):
        """([visible] float64 scores, rounding tolerance) of a row, from the pool's bytes."""
        if (layer, row) not in self.score_cache:
            self.score_cache[layer, row] = self._scores(layer, row)
        return self.score_cache[layer, row]

    def _scores(self, layer, row):
        indexer, (request, position) = self.indexers[layer], row
        slots = [self.slot(request, p) for p in range(self.visible(row))]
        for slot in slots:
            if slot not in self.key_cache:
                self.key_cache[slot] = key_at(self.keys, slot)
        if not slots:
            return torch.empty(0, dtype=torch.float64), 0.0
        at = slice(position, position + 1)
        q = indexer.queries(self.q_lora[request, at], self.freqs_cis[at])[0].cpu().double()
        weights = indexer.head_weights(self.x[request, at])[0].cpu().double()
        terms = (q @ torch.stack([self.key_cache[s] for s in slots]).T).relu() * weights[:, None]
        # Each term is rounded to bf16 twice, and two scores are compared.
        return terms.sum(0), 2**-7 * terms.abs().sum(0).max().item()

    def stock_positions(self, rows, schedule, live) -> list[list[int]]:
        """What SGLang's dense backend selects in CONSUMER for the live rows, as an extend, among our blocks."""
        blocks = schedule.rows.sparse_indices[live] // self.geometry.expansion
        blocks[schedule.rows.sparse_indices[live] == INT32_MAX] = -1
        # Kernel blocks of one candidate block follow each other: keep the first of each.
        blocks[:, 1:][blocks[:, 1:] == blocks[:, :-1].clone()] = -1
        inputs = self.extend(CONSUMER, rows)
        self.stock.consume_prefill(inputs, BlockIds(blocks=blocks))
        return inputs.out_raw_indices.tolist()

    def check_source(self, rows, slots):
        for i, row in enumerate(rows):
            scores, tolerance = self.scores(SOURCE, row)
            by_slot = {self.slot(row[0], p): s for p, s in enumerate(scores.tolist())}
            assert_selection(slots[i].tolist(), by_slot, self.geometry.topk, tolerance=tolerance)

    def check_schedule(self, rows, schedule):
        """Each row's blocks: ascending, INT32_MAX padded, the newest in, no left-out block better, ``end`` theirs."""
        geometry, size = self.geometry, self.geometry.block_size
        for i, row in enumerate(rows):
            length = self.visible(row)
            ids = schedule.rows.sparse_indices[i].tolist()
            listed = [b for b in ids if b != INT32_MAX]
            assert ids == sorted(set(listed)) + [INT32_MAX] * (len(ids) - len(listed))
            positions = visible_in(listed, length, geometry.kernel_block)
            assert int(schedule.rows.end[i]) == len(positions) and int(schedule.rows.lens[i]) == length
            kept = sorted({p // size for p in positions})
            assert positions == visible_in(kept, length, size), "a candidate block is cut"
            assert len(kept) == min(geometry.topk_blocks, -(-length // size))
            if not length:
                continue
            assert (length - 1) // size in kept
            scores, tolerance = self.scores(SOURCE, row)
            best = {b: scores[b * size :][:size].max().item() for b in range(-(-length // size))}
            worst = min(best[b] for b in oracle_blocks(scores, geometry) if b != (length - 1) // size or len(best) == 1)
            assert all(best[b] >= worst - tolerance for b in kept if b != (length - 1) // size)
            physical = [self.slot(row[0], b * geometry.kernel_block) // geometry.kernel_block for b in listed]
            assert schedule.rows.physical_blocks[i].tolist() == physical + [-1] * (len(ids) - len(listed))

    def check_consumer(self, layer, rows, schedule, *, positions=None, slots=None):
        for i, row in enumerate(rows):
            listed = [b for b in schedule.rows.sparse_indices[i].tolist() if b != INT32_MAX]
            candidates = visible_in(listed, self.visible(row), self.geometry.kernel_block)
            scores, tolerance = self.scores(layer, row)
            among = {p: scores[p].item() for p in candidates}
            if positions is not None:
                assert_selection(positions[i].tolist(), among, self.geometry.topk, tolerance=tolerance)
            if slots is not None:
                by_slot = {self.slot(row[0], p): s for p, s in among.items()}
                assert_selection(slots[i].tolist(), by_slot, self.geometry.topk, tolerance=tolerance)

    def check_against_stock(self, rows, schedule, slots):
        """SGLang's own selection among the same blocks: nearly the same picks, the rest within rounding of the cut."""
        live = [i for i, row in enumerate(rows) if self.visible(row)]
        theirs = self.stock_positions([rows[i] for i in live], schedule, live)
        differ = total = 0
        for i, stock in zip(live, theirs, strict=True):
            scores, tolerance = self.scores(CONSUMER, rows[i])
            by_slot = {self.slot(rows[i][0], p): s for p, s in enumerate(scores.tolist())}
            stock = {self.slot(rows[i][0], p) for p in stock if p != -1}
            ours = {s for s in slots[i].tolist() if s != -1}
            assert len(ours) == len(stock)
            cut = min(by_slot[s] for s in ours)
            assert all(abs(by_slot[s] - cut) <= tolerance for s in ours ^ stock)
            differ, total = differ + len(ours - stock), total + len(stock)
        # One pick in a hundred, and one in a batch of fewer. Triton's interpreter truncates to bf16 where all else rounds.
        share = 0.03 if self.kernels.name == "portable" and self.device == "cpu" else 0.01
        assert differ <= max(1, share * total), f"{differ} of {total} picks differ"

    # ---- steps ----

    def decode_step(self, rows, **options):
        source = self.decode(SOURCE, rows, **options)
        schedule = self.indexer.publish_decode(source)
        outs = [source.out_page_indices]
        for layer in (CONSUMER, LAST):
            inputs = self.decode(layer, rows, **options)
            self.indexer.consume_decode(inputs, schedule)
            outs.append(inputs.out_page_indices)
        return schedule, *outs

    def check_decode(self, rows, **options):
        schedule, source, first, last = self.decode_step(rows, **options)
        count = len(rows)
        self.check_source(rows, source)
        self.check_schedule(rows, schedule)
        self.check_consumer(CONSUMER, rows, schedule, slots=first)
        self.check_consumer(LAST, rows, schedule, slots=last)
        self.check_against_stock(rows, schedule, first)
        for out in (source, first, last):
            assert (out[count:] == -1).all() and (out[:, self.geometry.topk :] == -1).all()
        return schedule

    def extend_step(self, rows, **options):
        plans = {}
        source = self.extend(SOURCE, rows, plans=plans, **options)
        schedule = self.indexer.publish_prefill(source)
        outs = [source]
        for layer in (CONSUMER, LAST):
            inputs = self.extend(layer, rows, plans=plans, **options)
            self.indexer.consume_prefill(inputs, schedule)
            outs.append(inputs)
        return schedule, *outs

    def check_extend(self, rows, **options):
        schedule, source, first, last = self.extend_step(rows, **options)
        self.check_schedule(rows, schedule)
        for inputs, layer in ((first, CONSUMER), (last, LAST)):
            self.check_consumer(layer, rows, schedule, positions=inputs.out_raw_indices, slots=inputs.out_page_indices)
            self.check_pair(rows, inputs)
        slots = first.out_raw_indices.clone()
        for i, row in enumerate(rows):
            slots[i] = self.tensor([self.slot(row[0], p) if p != -1 else -1 for p in slots[i].tolist()])
        self.check_against_stock(rows, schedule, slots)
        return schedule, source, first, last

    def check_pair(self, rows, inputs):
        """Positions and slots are the same picks, in the same places."""
        if inputs.out_page_indices is None:
            return
        for i, row in enumerate(rows):
            expected = [self.slot(row[0], p) if p != -1 else -1 for p in inputs.out_raw_indices[i].tolist()]
            assert inputs.out_page_indices[i].tolist() == expected


def span(request: int, start: int, count: int) -> list[tuple[int, int]]:
    return [(request, start + i) for i in range(count)]


def picks(tensor) -> list[list[int]]:
    return [sorted(row) for row in tensor.tolist()]


@pytest.fixture(params=DEVICES)
def kernels_on(request):
    return request.param


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
    slots = world.keys.pool.shape[0] * INDEX_PAGE
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
    assert (idle.out_page_indices == -1).all() and world.kernels.calls["sparse_logits"] == 0
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
