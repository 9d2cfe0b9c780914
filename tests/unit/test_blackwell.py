"""DeepGEMM's calls on SM100, recorded: a stand-in enforces its contract and computes with the torch reference.

What runs for real: SGLang's inputs and index modules, the rows, the schedule, our Triton kernels (interpreted), and every
line of ``BlackwellKernels``. What stands in: the CUDA-only kernels it calls, each with the checks of its host code.
"""

import dataclasses
import itertools
import sys
import types

import pytest
import torch

pytest.importorskip("sglang")

import sglang.kernels.ops.attention.dsv4.topk as dsv4_topk
from sglang.kernels.ops.attention import deep_select
from sglang.kernels.ops.attention.dsv4 import candidate_blocks, index_logits
from sglang.kernels.ops.quantization.fp4_fake_quant import FP4_AMAX_FLOOR, block_scale, round_fp4
from sglang.srt.layers.attention.dsv4.dsv41_sparse import rope_tail
from sglang.srt.layers.attention.dsv4.v41_indexer import scoring

from sglang_dsv41.geometry import INT32_MAX
from sglang_dsv41.kernels import IndexQueries, PagedKeys, reference
from tests.candidates import E2M1
from tests.devices import HAS_GPU
from tests.world import CONSUMER, GEOMETRY, LAST, SOURCE, World, picks, span

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="tensors of the CPU stand in for SM100; a GPU runs Triton natively"),
    pytest.mark.usefixtures("one_thread"),
]

PAGE = 128
GARBAGE = 1e30


# ---- packed MXFP4 queries ----


def pack_queries(q):
    """[rows, heads, 128] as ([rows * heads, 64] int8, [rows * heads] int32), SGLang's rounding."""
    scale = block_scale(q, 32, 6.0, FP4_AMAX_FLOOR)
    values = round_fp4((q.float().unflatten(-1, (-1, 32)) / scale[..., None]).clamp(-6, 6)).flatten(-2)
    magnitudes = torch.tensor(E2M1[:8])
    code = (values.abs()[..., None] == magnitudes).to(torch.int64).argmax(-1) + 8 * (values < 0)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8).view(torch.int8)
    exponents = (torch.log2(scale) + 127).to(torch.int64)
    word = sum(exponents[..., i] << (8 * i) for i in range(4))
    return packed.reshape(-1, 64), word.to(torch.int32).reshape(-1)


def unpack_queries(packed, word):
    """[rows, heads, 128] fp32 of packed queries."""
    codes = torch.stack([packed & 15, (packed >> 4) & 15], dim=-1).to(torch.int64).flatten(-2)
    exponents = torch.stack([(word >> (8 * i)) & 255 for i in range(4)], dim=-1) - 127
    return torch.tensor(E2M1)[codes] * torch.exp2(exponents.float()).repeat_interleave(32, dim=-1)


def rope_pack_weights(q, freqs, positions, head_weights, weight_scale):
    assert q.dtype == torch.bfloat16 and freqs.dtype == torch.float32 and freqs.shape[1] == 64
    freqs = torch.view_as_complex(freqs.unflatten(-1, (-1, 2)))[positions]
    return (*pack_queries(rope_tail(q, freqs, 64)), (head_weights * weight_scale).float())


def test_packed_queries_are_the_modules_own():
    """The stand-in's packing equals what the index module computes, so the oracle may use the module."""
    world = World("reference-cpu")
    inputs = world.decode(SOURCE, span(1, 60, 5))
    indexer = inputs.indexer
    packed, word, weights = rope_pack_weights(
        indexer.wq_b(inputs.q_lora)[0].view(5, 32, 128),
        torch.view_as_real(world.freqs_cis).flatten(-2),
        inputs.positions,
        indexer.head_weights_raw(inputs.x),
        indexer.head_weight_scale,
    )
    q = indexer.queries(inputs.q_lora, inputs.freqs_cis, inputs.positions)
    assert torch.equal(unpack_queries(packed.view(5, 32, 64), word.view(5, 32)), q.float())
    assert torch.equal(weights, indexer.head_weights(inputs.x).float())


# ---- the stand-in ----


class DeepGemm(types.ModuleType):
    """DeepGEMM's paged MXFP4 MQA logits, dense and sparse: the recorded contract, and torch arithmetic."""

    def __init__(self):
        super().__init__("deep_gemm")
        self.made, self.scored, self.dense, self.plans = [], [], [], {}

    @staticmethod
    def check_operands(q, q_sf, cache, weights, rows, group=1):
        heads = q.shape[2]
        assert q.dtype == torch.int8 and q.shape == (rows // group, group, heads, 64) and q.is_contiguous()
        assert q_sf.dtype == torch.int32 and q_sf.shape == (rows // group, group, heads) and q_sf.is_contiguous()
        assert cache.dtype == torch.uint8 and cache.shape[1:] == (PAGE, 1, 68)
        assert cache.stride(0) % 512 == 0 and cache.stride()[1:] == (68, 68, 1)
        assert weights.dtype == torch.bfloat16 and weights.shape == (rows, heads) and weights.is_contiguous()

    @staticmethod
    def score(q, q_sf, cache, weights, slots):
        """[rows, n] bf16 of ``slots`` [rows, n]."""
        rows, heads = weights.shape
        queries = IndexQueries(unpack_queries(q.reshape(rows, heads, 64), q_sf.reshape(rows, heads)), weights)
        keys = PagedKeys(cache.flatten(1), PAGE)
        assert reference.slots_in_pool(keys, slots).all(), "a key outside the pool is read"
        return reference.paged_index_logits(queries, keys, slots).to(torch.bfloat16)

    def get_paged_sparse_mqa_logits_metadata(self, lens, table, request_ids, page_kv, ids, qk_dtype, block):
        rows, n = ids.shape
        assert rows > 0 and lens.shape == request_ids.shape == (rows,) and table.shape[0] == rows
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (lens, table, request_ids, ids))
        assert page_kv == PAGE and qk_dtype == torch.int8 and block in (8, 16) and page_kv % block == 0
        assert n % 4 == 0 and n <= 4096
        for row in range(rows):
            listed = ids[row, : min(n, -(-int(lens[row]) // block))].tolist()
            assert all(a < b for a, b in itertools.pairwise(listed)), f"row {row}: {listed} do not increase"
            assert not listed or (listed[0] >= 0 and listed[-1] * block < table.shape[1] * page_kv)
            if row and request_ids[row] == request_ids[row - 1]:
                assert torch.equal(table[row], table[row - 1]), "rows of one id read one page-table line"
        metadata = torch.zeros(16, dtype=torch.uint8)
        # A schedule is a snapshot: DeepGEMM reads neither lengths nor ids again.
        self.plans[id(metadata)] = (metadata, lens.clone(), table.clone(), ids.clone(), block)
        self.made.append(types.SimpleNamespace(rows=rows, request_ids=request_ids.tolist(), table=table.clone()))
        return metadata

    def fp8_fp4_paged_sparse_mqa_logits(self, q, cache, weights, metadata, n, block):
        assert id(metadata) in self.plans, "not a schedule of this library"
        _, lens, table, ids, made_block = self.plans[id(metadata)]
        rows = ids.shape[0]
        assert (n, block) == (ids.shape[1], made_block), "the schedule was made for another width"
        self.check_operands(*q, cache, weights, rows)
        out = torch.full((rows, n * block), GARBAGE, dtype=torch.bfloat16)
        for row in range(rows):
            listed = ids[row, : min(n, -(-int(lens[row]) // block))].to(torch.int64)
            position = (listed[:, None] * block + torch.arange(block)).flatten()[None]
            slots = table[row][position // PAGE].to(torch.int64) * PAGE + position % PAGE
            one = slice(row, row + 1)
            out[one, : position.shape[1]] = self.score(q[0][one], q[1][one], cache, weights[one], slots)
        self.scored.append(rows)
        return out

    def fp8_fp4_paged_mqa_logits(self, q, cache, weights, lens, table, schedule, width, clean, *, logits_dtype):
        group, rows = lens.shape[1], lens.numel()
        assert lens.dtype == table.dtype == torch.int32 and table.shape[0] == lens.shape[0] and not clean
        self.check_operands(*q, cache, weights, rows, group)
        out = torch.full((rows, width), GARBAGE, dtype=logits_dtype)
        for row, length in enumerate(lens.flatten().tolist()):
            position = torch.arange(min(length, width))
            slots = table[row // group][position // PAGE].to(torch.int64) * PAGE + position % PAGE
            one, flat = slice(row, row + 1), (q[0].flatten(0, 1), q[1].flatten(0, 1))
            out[row, : len(position)] = self.score(flat[0][one], flat[1][one], cache, weights[one], slots[None])[0]
        self.dense.append((rows, group, schedule))
        return out


def select_small(scores, lens, table, out, page_size):
    """SGLang's compact top-k through a page table, with its host checks."""
    rows, k = out.shape
    assert scores.dtype == torch.bfloat16 and scores.stride(1) == 1 and scores.stride(0) % 8 == 0
    assert scores.shape[0] == lens.shape[0] == table.shape[0] == rows and scores.shape[1] <= 16384 and k <= 2048
    assert lens.dtype == table.dtype == out.dtype == torch.int32 and out.stride(1) == table.stride(1) == 1
    assert page_size & (page_size - 1) == 0
    picked = reference.topk_columns(scores, lens, k)
    entry = table.to(torch.int64).gather(1, picks_page := picked.clamp_min(0) // page_size)
    assert picks_page.max() < table.shape[1]
    out.copy_(torch.where(picked >= 0, entry * page_size + picked % page_size, -1))


def select_pages(scores, topk, *, page_table, page_size, end, output_idx):
    assert output_idx.shape[1] == topk and page_table.shape[1] * page_size >= scores.shape[1]
    select_small(scores, end, page_table, output_idx, page_size)


def choose_blocks(scores, lens, nblocks, topk_blocks):
    assert torch.equal(nblocks, (lens + 7) // 8) and nblocks.dtype == torch.int32
    blocks = torch.full((scores.shape[0], topk_blocks), -1, dtype=torch.int32)
    best = reference.choose_candidate_blocks(scores, lens, topk_blocks, 8)
    blocks[:, : best.shape[1]] = best
    return blocks


@pytest.fixture
def deep_gemm(monkeypatch):
    module = DeepGemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(scoring, "index_q_rope_pack_weights", rope_pack_weights)
    monkeypatch.setattr(index_logits, "index_logits_dtype", lambda: torch.bfloat16)
    monkeypatch.setattr(index_logits, "index_weights_dtype", lambda: torch.bfloat16)
    monkeypatch.setattr(dsv4_topk, "topk_transform_bf16_small", select_small)
    monkeypatch.setattr(deep_select, "topk_page_transform", select_pages)
    monkeypatch.setattr(candidate_blocks, "amax_topk_blocks", choose_blocks)
    # Programmatic launch is a property of the GPU; the kernel itself runs interpreted.
    monkeypatch.setattr(candidate_blocks, "is_arch_support_pdl", lambda: False)
    return module


@pytest.fixture
def world(deep_gemm):
    return World("blackwell-cpu", index_page=PAGE)


# ---- decode, verify, extend ----


def test_decode(world, deep_gemm):
    rows = [(1, 300), (2, 599), (3, 0), (4, 127), (1, 128), (2, 63)]
    world.check_decode(rows)
    assert deep_gemm.dense == [(6, 1, None)] and deep_gemm.scored == [6, 6]
    assert [m.request_ids for m in deep_gemm.made] == [list(range(6))], "decode rows are requests of their own"
    assert world.kernels.calls == {
        "dense_logits": 1,
        "select_visible": 1,
        "choose_blocks": 1,
        "expand": 1,
        "plan": 1,
        "sparse_logits": 2,
        "select_candidates": 2,
        "consume_decode": 2,
    }


def test_decode_padding(world, deep_gemm):
    """Padded rows of a graph share request 0 and must not form one long run; wide outputs are filled."""
    live = [(1, 300), (3, 5)]
    schedule, *outs = world.decode_step(live + [(0, -1)] * 4, out_rows=8, width=world.geometry.topk + 12)
    world.check_schedule(live, schedule)
    world.check_source(live, outs[0])
    world.check_consumer(CONSUMER, live, schedule, slots=outs[1])
    for out in outs:
        assert (out[2:] == -1).all() and (out[:, world.geometry.topk :] == -1).all()
    assert deep_gemm.made[0].request_ids == list(range(6))


def test_verify_rows_carry_their_request(world, deep_gemm):
    rows = span(2, 125, 6) + span(1, 255, 1) + span(3, 508, 3)
    world.check_decode(rows, is_verify=True)
    assert deep_gemm.made[0].request_ids == [r for r, _ in rows]


def test_verify_source_scores_groups_of_rows(world, deep_gemm):
    """SGLang's metadata groups a request's draft rows; the dense pass hands them over as groups."""
    rows = span(2, 125, 4) + span(1, 255, 4)
    inputs = world.decode(SOURCE, rows, is_verify=True)
    inputs.paged_metadata.rows_per_request = 4
    schedule = world.indexer.publish_decode(inputs)
    assert deep_gemm.dense == [(8, 4, None)]
    world.check_source(rows, inputs.out_page_indices)
    world.check_schedule(rows, schedule)


def test_source_follows_sglangs_row_chunks(world, deep_gemm):
    rows = [(1, 300), (2, 599), (3, 0), (4, 127), (1, 128)]
    inputs = world.decode(SOURCE, rows)
    inputs.paged_metadata.rows_per_chunk = 2
    inputs.paged_metadata.deep_gemm_metadata = ["first", "second", "third"]
    schedule = world.indexer.publish_decode(inputs)
    assert deep_gemm.dense == [(2, 1, "first"), (2, 1, "second"), (1, 1, "third")]
    world.check_source(rows, inputs.out_page_indices)
    world.check_schedule(rows, schedule)


def test_extend_pairs_rows_and_expands_the_table(world, deep_gemm):
    """SGLang's page table of an extend has 256 tokens an entry; DeepGEMM reads pages of 128. Ids pair rows of a request."""
    rows = span(3, 0, 5) + span(1, 251, 6) + span(2, 512, 3)
    world.check_extend(rows)
    assert deep_gemm.dense == [] and deep_gemm.scored == [14, 14] and len(deep_gemm.made) == 1
    plan = deep_gemm.made[0]
    assert plan.request_ids == [0, 0, 2, 2, 4, 5, 5, 7, 7, 9, 9, 11, 11, 13]
    expected = world.pages_of[[r - 1 for r, _ in rows]]
    assert torch.equal(plan.table, torch.stack([2 * expected, 2 * expected + 1], dim=2).flatten(1).to(torch.int32))


def test_a_context_parallel_ranks_rows_are_not_paired(world, deep_gemm):
    """They are no neighbours: each has an id of its own, as a decode row has, and so have those of a tail."""
    rows = span(3, 0, 5) + span(4, 9, 1) + span(1, 251, 6)
    part = rows[::2]
    schedule, *_ = world.check_extend(part, chunk=rows)
    assert deep_gemm.made[0].request_ids == list(range(6))
    tail = schedule.tail([2, 0, 2])
    last = [part[i] for i in (1, 2, 4, 5)]
    world.indexer.consume_prefill(world.extend(LAST, last, chunk=rows), tail)
    assert deep_gemm.made[1].request_ids == list(range(4))


def test_extend_at_ratio_2(deep_gemm):
    """Ratio 2: an entry of SGLang's table is one page of 128 positions, and is passed on as it is."""
    world = World("blackwell-cpu", index_page=PAGE, ratio=2)
    world.check_extend(span(1, 251, 6) + span(2, 0, 3))
    assert deep_gemm.made[0].table.shape == (9, 3)


def test_tail_plans_for_its_own_rows(world, deep_gemm):
    rows = span(1, 250, 5) + span(2, 60, 4)
    schedule, _, whole, _ = world.extend_step(rows)
    tail, last = schedule.tail([2, 3]), [3, 4, 6, 7, 8]
    inputs = world.extend(LAST, [rows[i] for i in last])
    world.indexer.consume_prefill(inputs, tail)
    assert [m.rows for m in deep_gemm.made] == [9, 5] and deep_gemm.made[1].request_ids == [0, 0, 2, 2, 4]
    world.check_consumer(LAST, [rows[i] for i in last], tail, positions=inputs.out_raw_indices)
    assert whole.out_raw_indices.shape[0] == 9


def test_plan_is_made_once_a_step(world, deep_gemm):
    for step in range(3):
        world.decode_step([(1, 300 + step), (2, 64)])
        assert len(deep_gemm.made) == step + 1 and len(deep_gemm.scored) == 2 * (step + 1)


def test_one_schedule_a_pass_of_rows(deep_gemm):
    """A scratch budget of one row: a schedule a row, the same selection."""
    rows = span(1, 250, 4) + span(2, 60, 3)
    outs = []
    for scratch in (1, 8 << 20):
        deep_gemm.made.clear()
        world = World("blackwell-cpu", index_page=PAGE, scratch_bytes=scratch)
        outs.append(picks(world.extend_step(rows)[2].out_raw_indices))
        assert [m.rows for m in deep_gemm.made] == ([1] * 7 if scratch == 1 else [7])
    assert outs[0] == outs[1]


@pytest.mark.parametrize("block_size,topk_blocks", [(16, 8), (24, 4), (32, 4)])
def test_larger_candidate_blocks(deep_gemm, block_size, topk_blocks):
    """A candidate block of several kernel blocks whose newest one is short: only listed ids are read."""
    geometry = dataclasses.replace(GEOMETRY, block_size=block_size, topk_blocks=topk_blocks)
    world = World("blackwell-cpu", index_page=PAGE, geometry=geometry)
    rows = span(1, 5 * block_size, 3) + span(2, 250, 4)
    schedule, _, _, _ = world.check_extend(rows)
    listed = (schedule.rows.sparse_indices != INT32_MAX).sum(1).tolist()
    if block_size != geometry.kernel_block:
        assert listed[0] < min(geometry.kernel_blocks, -(-(5 * block_size + 1) // geometry.kernel_block))


def test_stand_in_refuses_what_deepgemm_refuses(deep_gemm):
    """The contract itself is enforced: ids that repeat, a wrong page, another row count."""
    lens, table = torch.tensor([40], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2, 3, 4, INT32_MAX, INT32_MAX, INT32_MAX]], dtype=torch.int32)
    request = torch.zeros(1, dtype=torch.int32)
    make = deep_gemm.get_paged_sparse_mqa_logits_metadata
    make(lens, table, request, PAGE, ids, torch.int8, 8)
    for change in (
        {"ids": ids.clone().fill_(1)},
        {"lens": lens + 40},
        {"page": 64},
        {"ids": ids[:, :6]},
        {"table": table.long()},
        {"block": 24},
    ):
        with pytest.raises(AssertionError):
            make(
                change.get("lens", lens),
                change.get("table", table),
                request,
                change.get("page", PAGE),
                change.get("ids", ids).contiguous(),
                torch.int8,
                change.get("block", 8),
            )
