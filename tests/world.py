"""A small two-level model on SGLang's own input classes, pools and index modules, with a loop oracle for its selections.

Needs SGLang; a test module skips itself without it before it imports this one.
"""

import dataclasses
import types

import torch
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
from tests.devices import device_of

KV_PAGE, HIDDEN, Q_LORA = 256, 96, 64
SOURCE, CONSUMER, LAST = 6, 8, 9
GARBAGE = 7_654_321
GEOMETRY = CandidateGeometry(
    topk_blocks=8, block_size=8, topk=16, heads=32, source_layer=SOURCE, consumer_layers=(CONSUMER, LAST)
)


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
        self,
        kernels_on,
        *,
        geometry=GEOMETRY,
        ratio=1,
        requests=4,
        pages=3,
        index_page=64,
        scratch_bytes=8 << 20,
        max_rows=96,
        seed=0,
        dense_extend=False,
    ):
        name, self.device = kernels_on.split("-")[0], device_of(kernels_on)
        self.geometry = geometry = dataclasses.replace(geometry, ratio=ratio)
        self.dense_extend = dense_extend
        self.ratio, self.pages, self.index_page, gen = ratio, pages, index_page, generator(seed)
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
            index_page,
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
        scales = torch.randint(120, 127, (buffer.shape[0], index_page * 4), dtype=torch.uint8, generator=gen)
        buffer[:, index_page * 64 :] = scales.to(self.device)
        self.pool, self.keys = IndexKPool(ratio, index_pool, layers), PagedKeys(buffer, index_page)
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
        if self.dense_extend:
            self.kernels.prepare_extend()
        self.indexer = SparseCandidateIndexer(
            geometry=self.geometry,
            kernels=self.kernels,
            buffers=self.buffers,
            token_to_kv_pool=self.pool,
            page_size=KV_PAGE,
            prefill_source=None if self.dense_extend else self.stock,
            full_topk=None
            if self.dense_extend
            else FullTopKIndexer(
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

    def layer_inputs(self, layer, request, position, x, q_lora) -> dict:
        """What decode and extend inputs have in common."""
        return dict(
            indexer=self.indexers[layer],
            layer_id=layer,
            compress_ratio=self.ratio,
            freqs_cis=self.freqs_cis,
            x=x,
            q_lora=q_lora,
            positions=position,
            req_rows=request,
        )

    def decode(self, layer, rows, *, is_verify=False, width=None, out_rows=None) -> DecodeInputs:
        request, position, x, q_lora, table = self.row_tensors(rows)
        with sglang_envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.override(True):
            metadata = PagedIndexerMetadata(
                page_size=KV_PAGE,
                compressed_page_size=self.index_page,
                page_table=expand_index_page_table(
                    table, full_page_size=KV_PAGE, compress_ratio=self.ratio, index_page_size=self.index_page
                ),
                compressed_seq_lens=((position + 1) // self.ratio).clamp_min(0).to(torch.int32),
                use_topk_v2=False,
                compress_ratio=self.ratio,
            )
        return DecodeInputs(
            **self.layer_inputs(layer, request, position, x, q_lora),
            paged_metadata=metadata,
            is_verify=is_verify,
            out_page_indices=self.garbage(out_rows or len(rows), width),
        )

    def extend(self, layer, rows, *, plans=None, slots=True, width=None, seen=None, chunk=None) -> PrefillInputs:
        """``rows`` grouped by request, positions ascending; ``seen`` overrides each request's newest length. With
        ``chunk`` they are one context-parallel rank's of its rows."""
        request, position, x, q_lora, table = self.row_tensors(rows)
        order = list(dict.fromkeys(r for r, _ in chunk or rows))
        counts = [sum(r == one for r, _ in rows) for one in order]
        lens = seen or [1 + max(p for r, p in chunk or rows if r == one) for one in order]
        pool_indices = self.tensor(order)
        return PrefillInputs(
            **self.layer_inputs(layer, None if chunk else request, position, x, q_lora),
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


def positions_of(world: World, rows, slots) -> list[list[int]]:
    """Rows of pool slots as sorted request-local positions; -1 stays."""
    out = []
    for (request, position), line in zip(rows, slots.tolist(), strict=False):
        at = {world.slot(request, p): p for p in range(world.visible((request, position)))}
        out.append(sorted(-1 if s == -1 else at[s] for s in line))
    return out


def copy_request(world: World, source: int, targets: list[int]) -> None:
    """Give the requests ``targets`` the content of ``source``: index K on their own pages, and inputs."""
    pages = world.keys.pool.unflatten(0, (-1, KV_PAGE // world.ratio // world.index_page))
    for target in targets:
        pages[world.pages_of[target - 1].to(world.device)] = pages[world.pages_of[source - 1].to(world.device)]
        world.x[target], world.q_lora[target] = world.x[source], world.q_lora[source]
    world.key_cache, world.score_cache = {}, {}


def move_pages(world: World) -> int:
    """Move every request's index K to other pages and spoil all that is left behind; how many pages moved."""
    pages = world.keys.pool.unflatten(0, (-1, KV_PAGE // world.ratio // world.index_page))
    kept, old = pages.clone(), world.pages_of
    new = old.flip(0).roll(1, 1)
    pages.fill_(255)
    pages[new.flatten().to(world.device)] = kept[old.flatten().to(world.device)]
    world.pages_of = new
    token = torch.arange(world.req_to_token.shape[1])
    table = new[:, token // KV_PAGE] * KV_PAGE + token % KV_PAGE
    world.req_to_token[1:] = table.to(world.device, torch.int32)
    world.key_cache, world.score_cache = {}, {}
    return int((new != old).sum())
