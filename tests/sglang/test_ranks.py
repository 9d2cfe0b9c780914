"""Several ranks without a GPU: SGLang's own padding, row metadata and dispatch of a DeepSeek-V4 backend, over our indexer.

Two real processes, joined by gloo, run the steps of a two-rank DP attention, two more those of context-parallel prefill; a
backend of SGLang is made without a model, its index layers and pool are a World's. The attention itself has no CPU kernel
and is left out.
"""

import functools
import importlib.util
import itertools
import multiprocessing
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("sglang")

import sglang.srt.layers.attention.deepseek_v4_backend as v4
import sglang.srt.layers.attention.dsa.utils as dsa_utils
import sglang.srt.layers.cp.utils as cp
import sglang.srt.layers.dp_attention as dp_attention
import sglang.srt.model_executor.forward_batch_info as batches
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs as sglang_envs
from sglang.srt.layers import linear
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from transformers import PretrainedConfig

from tests.world import CONSUMER, LAST, SOURCE, World, span

ForwardBatch, Mode = batches.ForwardBatch, batches.ForwardMode
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="runs where there is no GPU: SGLang's row kernels on CPU tensors under Triton's interpreter, forked ranks",
    ),
]
PROBE = Path(__file__).parents[1] / "gpu/probe"
WIDTH = 512  # SGLang's metadata knows no smaller top-k; the World's picks are the first columns


@pytest.fixture
def settings():
    """SGLang's settings of one rank, and the logits way that asks DeepGEMM nothing."""
    context = get_context().override_server_args(device="cpu")
    context.install()
    stamp = dict(get_parallel()._stamp)
    get_parallel().override_permanently(attn_cp_rank=0, attn_tp_rank=0, attn_dp_rank=0, tp_rank=0)
    with sglang_envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.override(True):
        yield
    get_parallel()._stamp = stamp
    context.restore()


@pytest.fixture
def no_attention(monkeypatch):
    """The plans of the attention kernels, which load only where there is a GPU."""
    monkeypatch.setattr(v4, "_create_flashmla_metadata", lambda: None)


class Rank:
    """SGLang's backend over a World: metadata, padding and dispatch of a step are SGLang's, the selections ours."""

    def __init__(self, world: World, bounded_replay: bool = False) -> None:
        self.world = world
        world.pool.request_window = world.pool.swa_req_ring_size = None
        world.pool.full_to_swa_index_mapping = torch.arange(int(world.req_to_token.max()) + 1, dtype=torch.int32)
        self.backend = backend = object.__new__(v4.DeepseekV4AttnBackend)
        backend.__dict__.update(
            device=torch.device("cpu"),
            cuda_int32_kwargs={"device": "cpu", "dtype": torch.int32},
            page_size=256,
            token_to_kv_pool=world.pool,
            req_to_token=world.req_to_token,
            req_to_token_pool=types.SimpleNamespace(req_to_token=world.req_to_token),
            present_ratios=(world.ratio,),
            low_ratios=(world.ratio,),
            has_c4=False,
            has_c128=False,
            prefill_candidates=world.indexer,
            decode_candidates=world.indexer,
            full_topk_indexer=world.indexer,
            MAX_SEQ_LEN_FOR_CAPTURE=world.req_to_token.shape[1],
            index_topk=WIDTH,
            encoder_replay=False,
            encoder_row_floor=None,
            mtp_enabled=False,
            topk=0,
            speculative_num_steps=0,
            speculative_num_draft_tokens=None,
            is_dspark_draft=False,
            trtllm_attn=False,
            mega_attn=False,
            enable_decoder_swa_bounded_replay=bounded_replay,
            model_runner=types.SimpleNamespace(spec_algorithm=types.SimpleNamespace(is_dspark=lambda: False)),
            tail_source_kv_layer_id=None,
            tail_forward_metadata=None,
            forward_metadata=None,
            hisparse_coordinator=None,
            dsa_topk_backend=types.SimpleNamespace(should_use_topk_v2=lambda: False),
            enable_deepseek_v4_fp4_indexer=True,
            needs_cpu_seq_lens=True,
            builds_verify_metadata_early=False,
            _early_verify_metadata_ids=set(),
            online_c128_mtp=types.SimpleNamespace(
                prepare_forward=lambda *_, **__: None, state_slot_offset=lambda: 0, clear=lambda: None
            ),
            cuda_graph_metadata_of_bucket_and_bs={bucket: {} for bucket in v4._GraphBucket},
            cuda_graph_swa_out_cache_loc=None,
            prefill_graph_replay_batch=None,
        )

    def plan(self, batch: ForwardBatch) -> None:
        """The metadata of an eager step, as SGLang's eager runner asks for it."""
        if batch.batch_size:
            self.backend.init_forward_metadata(batch)
        else:
            self.backend.forward_metadata = None

    def forward(self, batch: ForwardBatch) -> list[torch.Tensor]:
        """[rows, WIDTH] selections of the source and two consumers: pool slots in decode, positions in extend."""
        outs = self.run_layers(batch, *self.inputs(batch), batch.positions)
        return [positions if batch.forward_mode.is_extend() else slots for positions, slots in outs]

    def forward_dealt(self, batch: ForwardBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """An extend as SGLang's eager runner and model run it under prefill context parallelism, in the late layers' tail
        where there is one: (this rank's rows, all rows in the batch's order) of each layer's positions and pool slots,
        [rows, 2 * WIDTH]."""
        active = cp.is_cp_active(batch)
        if active:
            cp.prepare_cp_forward(batch)
        self.plan(batch)
        x, q_lora, positions = *self.inputs(batch), batch.positions
        if active:
            x, q_lora = (cp.cp_shard_hidden_states(whole, batch) for whole in (x, q_lora))
            positions = cp.cp_shard_position_ids(positions, batch)
        entered = None
        if self.backend.tail_forward_metadata is not None:
            tail = self.backend.tail_forward_metadata.late_layer_tail
            entered = self.backend.enter_late_layer_tail(batch)
            x, q_lora, positions = tail.rows(x), tail.rows(q_lora), tail.positions
        layers = self.run_layers(batch, x, q_lora, positions)
        local = [torch.cat([out[: x.shape[0]] for out in layer], 1) for layer in layers]
        whole = [cp.cp_gather_full_sequence_states(out, batch) if active else out for out in local]
        if entered is not None:
            self.backend.exit_late_layer_tail(entered, batch)
        return local, whole

    def inputs(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` and ``q_lora`` of every row."""
        rows = batch.positions.shape[0]
        requests = batch.req_pool_indices
        if batch.forward_mode.is_extend():
            requests = torch.repeat_interleave(requests, batch.extend_seq_lens)
        at = (torch.nn.functional.pad(requests, (0, rows - requests.shape[0])), batch.positions)
        return self.world.x[at], self.world.q_lora[at]

    def run_layers(self, batch: ForwardBatch, x, q_lora, positions) -> list[tuple]:
        """(positions, pool slots) of the source's and two consumers' selections; positions are None in decode."""
        world, outs = self.world, []
        for number in (SOURCE, CONSUMER, LAST):
            layer = types.SimpleNamespace(
                layer_id=number,
                compress_ratio=world.ratio,
                indexer=world.indexers[number],
                compressor=None,
                freqs_cis=world.freqs_cis,
            )
            self.backend.forward_low_ratio_sources(
                layer=layer,
                x=x,
                q_lora=q_lora,
                positions=positions,
                forward_batch=batch,
                run_compressor=False,
            )
            metadata = self.backend.forward_metadata
            if metadata is not None:
                core = metadata.core_metadata
                extend = batch.forward_mode.is_extend()
                positions_out = core.sparse_raw_indices(world.ratio).clone() if extend else None
                outs.append((positions_out, core.sparse_page_indices(world.ratio).clone()))
        return outs


def decode_batch(rows, mode=Mode.DECODE) -> ForwardBatch:
    """One row a request: (request, position)."""
    request = torch.tensor([r for r, _ in rows], dtype=torch.int64)
    position = torch.tensor([p for _, p in rows], dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        input_ids=torch.zeros_like(position),
        req_pool_indices=request,
        seq_lens=position + 1,
        seq_lens_cpu=position + 1,
        orig_seq_lens=position + 1,
        out_cache_loc=torch.zeros_like(position),
        seq_lens_sum=int((position + 1).sum()),
        positions=position,
    )


def extend_batch(rows) -> ForwardBatch:
    """Rows grouped by request, positions ascending."""
    requests = list(dict.fromkeys(r for r, _ in rows))
    counts = [sum(r == one for r, _ in rows) for one in requests]
    starts = [min(p for r, p in rows if r == one) for one in requests]
    batch = decode_batch([(one, start + count - 1) for one, start, count in zip(requests, starts, counts)], Mode.EXTEND)
    batch.positions = torch.tensor([p for _, p in rows])
    batch.input_ids = batch.out_cache_loc = torch.zeros_like(batch.positions)
    batch.extend_num_tokens = len(rows)
    batch.extend_seq_lens = torch.tensor(counts, dtype=torch.int32)
    batch.extend_seq_lens_cpu = counts
    batch.extend_prefix_lens = torch.tensor(starts)
    batch.extend_prefix_lens_cpu = batch.extend_logprob_start_lens_cpu = starts
    batch.extend_start_loc = (batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens).to(torch.int32)
    return batch


LONG = [(1, 599), (2, 500), (3, 301), (4, 64), (1, 8)]
CHUNK = span(1, 250, 9) + span(2, 60, 4)
GRAPH_BUCKET = 16
RANKS = 2


class Step(NamedTuple):
    """What each rank has of a step, and what SGLang makes of it: modes, rows after padding."""

    kinds: tuple[str, str]
    rows: tuple[list, list]
    modes: tuple[str, str]
    padded: tuple[int, int]
    prefill_graph: bool = False


# A rank's indexer lives through all of them, in this order.
STEPS = {
    "decode, 5 rows and 1": Step(("decode", "decode"), (LONG, [(2, 0)]), ("DECODE", "DECODE"), (5, 5)),
    "decode, 3 rows and none": Step(("decode", "idle"), (LONG[:3], []), ("DECODE", "IDLE"), (3, 3)),
    "decode, none and 5 rows": Step(("idle", "decode"), ([], LONG), ("IDLE", "DECODE"), (5, 5)),
    "a chunk and nothing": Step(("extend", "idle"), (CHUNK, []), ("EXTEND", "IDLE"), (13, 0)),
    "a chunk and a token": Step(("extend", "extend"), (CHUNK, [(3, 0)]), ("EXTEND", "EXTEND"), (13, 1)),
    "a chunk and decode": Step(("extend", "decode"), (CHUNK, LONG[:2]), ("EXTEND", "DECODE"), (13, 2)),
    # The prefill graph takes every rank to one bucket: an idle rank gets made-up rows, a decode's become extends.
    "graph: a chunk and nothing": Step(("extend", "idle"), (CHUNK, []), ("EXTEND", "EXTEND"), (16, 16), True),
    "graph: nothing and a chunk": Step(("idle", "extend"), ([], CHUNK), ("EXTEND", "EXTEND"), (16, 16), True),
    "graph: a chunk and decode": Step(("extend", "decode"), (CHUNK, LONG[:2]), ("EXTEND", "EXTEND"), (16, 16), True),
    "decode, 2 rows and 5": Step(("decode", "decode"), (LONG[:2], LONG), ("DECODE", "DECODE"), (5, 5)),
}


def join_ranks(rank: int, store: str, **parallelism):
    """A TP group of two over gloo, as a scheduler process makes it: its server's arguments and the group."""
    torch.set_num_threads(1)
    args = get_context().override_server_args(tp_size=RANKS, device="cpu", **parallelism).install()
    parallel_state.init_distributed_environment(RANKS, rank, f"file://{store}", rank, "gloo", timeout=60)
    group = parallel_state.init_model_parallel_group(
        [list(range(RANKS))], rank, "gloo", use_pynccl=False, use_custom_allreduce=False, group_name="tp"
    )
    # What SGLang takes on its CPU platform, which it asks for when it is imported.
    batches._is_cpu = parallel_state._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    v4._create_flashmla_metadata = lambda: None
    sglang_envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)
    return args, group


def run_step(rank: int, one: Rank, runner, step: Step) -> dict:
    kind, rows = step.kinds[rank], step.rows[rank]
    batch = extend_batch(rows) if kind == "extend" else decode_batch(rows, Mode.IDLE if kind == "idle" else Mode.DECODE)
    counts = [len(rows) for rows in step.rows]
    batch.is_extend_in_batch = "extend" in step.kinds
    batch.can_run_dp_prefill_cuda_graph = step.prefill_graph
    batch.global_num_tokens_cpu, batch.global_num_tokens_for_logprob_cpu = list(counts), list(counts)
    batch.global_num_tokens_gpu = torch.tensor(counts)
    batch.prepare_mlp_sync_batch(runner)
    one.plan(batch)
    # The selections take the way of the hidden states: SGLang's gather of all ranks' rows, and back.
    local = torch.full((batch.positions.shape[0], 3 * WIDTH), -1.0)
    for layer, out in enumerate(one.forward(batch)):
        local[: out.shape[0], layer * WIDTH : (layer + 1) * WIDTH] = out[: local.shape[0]]
    gathered = dp_attention.get_global_dp_buffer(get_parallel().tp_group)
    dp_attention.dp_gather_partial(gathered, local.clone(), batch)
    back = torch.empty_like(local)
    dp_attention.dp_scatter(back, gathered, batch)
    return {
        "mode": batch.forward_mode.name,
        "padded": tuple(dp_attention.get_dp_global_num_tokens()),
        "selected": gathered.view(-1, 3, WIDTH).to(torch.int32).tolist(),
        "back": torch.equal(back, local),
    }


def run_steps(rank: int, store: str) -> dict:
    """What a rank of DP attention sees of every step."""
    args, group = join_ranks(rank, store, dp_size=RANKS, attn_dp_size=RANKS, enable_dp_attention=True)
    get_parallel().override_permanently(
        tp_group=group, tp_rank=rank, attn_tp_rank=0, attn_dp_rank=rank, attn_cp_rank=0, pp_rank=0
    )
    dp_attention.initialize_dp_attention(args)
    dp_attention.init_dp_gathered_buffer(
        types.SimpleNamespace(hf_config=types.SimpleNamespace(), hidden_size=3 * WIDTH, dtype=torch.float32)
    )
    graphs = types.SimpleNamespace(prefill=types.SimpleNamespace(bs=[8, GRAPH_BUCKET]))
    seen = {}
    for dense_extend in (False, True):
        one = Rank(World("reference-cpu", dense_extend=dense_extend))
        runner = types.SimpleNamespace(
            attn_tp_sequence_sharded=lambda rows: False,
            attn_backend=one.backend,
            is_draft_worker=False,
            model_config=types.SimpleNamespace(hf_config=PretrainedConfig(), linear_attn_registry_result=None),
        )
        one.backend.get_cpu_graph_seq_len_fill_value = one.backend.get_cuda_graph_seq_len_fill_value
        one.backend.late_layer_num_tokens = lambda batch: None
        with get_exec().graph.override(cuda_graph_config=graphs):
            for name, step in STEPS.items():
                seen[dense_extend, name] = run_step(rank, one, runner, step)
    return seen


def rank_main(run, rank: int, store: str, results) -> None:
    try:
        results.put((rank, run(rank, store)))
    except BaseException as error:
        results.put((rank, error))
        raise


def on_two_ranks(run) -> list[dict]:
    """What ``run(rank, store)`` gives in each of two processes. They are forked: an import of SGLang takes longer than all."""
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [fork.Process(target=rank_main, args=(run, rank, store, results)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        found = dict(results.get() for _ in ranks)
        for process in ranks:
            process.join(60)
    for rank, result in found.items():
        assert isinstance(result, dict), f"rank {rank}: {result!r}"
    return [found[rank] for rank in range(RANKS)]


@pytest.fixture(scope="module")
def seen():
    """What each rank of DP attention saw of every step."""
    return on_two_ranks(run_steps)


@functools.cache
def alone(rows: tuple, extend: bool, dense_extend: bool) -> list:
    """[layers][rows] picks of a rank that has the rows to itself: positions in an extend, pool slots in decode."""
    world = World("reference-cpu", dense_extend=dense_extend)
    if extend:
        return [picked(out.out_raw_indices.tolist()) for out in world.extend_step(list(rows))[1:]]
    return [picked(out.tolist()) for out in world.decode_step(list(rows))[1:]]


def picked(lines) -> list[list[int]]:
    return [sorted(pick for pick in line if pick != -1) for line in lines]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dense_extend", [False, True], ids=["", "own extend"])
@pytest.mark.parametrize("name", STEPS)
def test_two_ranks_select_as_one(seen, name, dense_extend):
    """Rows that are there select what they select alone, whatever the other rank has; rows that SGLang adds select position
    0 of its reserved page, or nothing; and both ranks see the same rows."""
    step, ranks = STEPS[name], [one[dense_extend, name] for one in seen]
    assert tuple(one["mode"] for one in ranks) == step.modes
    assert all(one["padded"] == step.padded and one["back"] for one in ranks)
    assert ranks[0]["selected"] == ranks[1]["selected"]
    selected, start = ranks[0]["selected"], 0
    for rows, mode, padded in zip(step.rows, step.modes, step.padded, strict=True):
        lines, start = selected[start : start + padded], start + padded
        live, added = lines[: len(rows)], lines[len(rows) :]
        expected = alone(tuple(rows), mode == "EXTEND", dense_extend) if rows else [[]] * 3
        assert [picked(line[layer] for line in live) for layer in range(3)] == expected
        for line in added:
            assert all(picks in ([], [0]) for picks in picked(line))
        # Made-up rows of a rank that has none stand at position 0; an idle rank without them runs nothing.
        if not rows and padded:
            assert {str(picked(line)) for line in added} == {"[[], [], []]" if mode == "IDLE" else "[[0], [0], [0]]"}
    assert start == len(selected)


# ---- context-parallel prefill ----

# The rows of all ranks; rank r has every other one from the r-th on, whoever's they are.
CHUNKS = {
    "several requests, one of a single row": span(1, 250, 9) + span(4, 30, 1) + span(2, 60, 4) + span(3, 0, 3),
    "one row a request": [(1, 599), (2, 500), (3, 301), (4, 64)],
    "a row a rank, of two tokens": span(1, 0, 2),
    "fewer rows than ranks": [(3, 300)],
    "longer than the late layers' window": span(1, 40, 150) + span(4, 500, 1) + span(2, 0, 131) + span(3, 64, 3),
}
WINDOW = 128  # tokens of each request that the late layers run over, with bounded replay


def run_chunks(rank: int, store: str) -> dict:
    """What a rank of context-parallel prefill sees of every chunk, and of a decode step after it."""
    _, group = join_ranks(rank, store, attn_cp_size=RANKS, enable_prefill_cp=True, cp_strategy="interleave")
    get_parallel().override_permanently(
        tp_group=group, attn_cp_group=group, tp_rank=rank, attn_tp_rank=0, attn_dp_rank=0, attn_cp_rank=rank, pp_rank=0
    )
    architecture = types.SimpleNamespace(architectures=["DeepseekV4ForCausalLM"])
    dsa_utils.process_model_config = lambda: types.SimpleNamespace(hf_config=architecture)
    seen = {}
    for ratio, dense_extend, replay in itertools.product((1, 2), (False, True), (False, True)):
        one = Rank(World("reference-cpu", ratio=ratio, dense_extend=dense_extend, max_rows=320), bounded_replay=replay)
        for name, rows in CHUNKS.items():
            batch = extend_batch(rows)
            local, whole = one.forward_dealt(batch)
            step = decode_batch(LONG)
            one.plan(step)
            seen[ratio, dense_extend, replay, name] = {
                "local": [out.tolist() for out in local],
                "whole": [out.tolist() for out in whole],
                "dealt": cp.is_cp_active(batch),
                "decode": [picked(out.tolist()) for out in one.forward(step)],
            }
    return seen


@pytest.fixture(scope="module")
def dealt():
    """What each context-parallel rank saw of every chunk."""
    return on_two_ranks(run_chunks)


@functools.cache
def undealt(rows: tuple, dense_extend: bool, ratio: int) -> list:
    """[layers][rows] (positions, pool slots) of a rank that has all rows of a chunk, by the same metadata and dispatch."""
    world, chosen = World("reference-cpu", ratio=ratio, dense_extend=dense_extend, max_rows=320), []
    _, whole = Rank(world).forward_dealt(extend_batch(list(rows)))
    for layer in whole:
        positions = picked(layer[:, :WIDTH].tolist())
        slots = [
            sorted(world.slot(request, p) for p in line) for (request, _), line in zip(rows, positions, strict=True)
        ]
        chosen.append(list(zip(positions, slots)))
    return chosen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replay", [False, True], ids=["", "late layers' tail"])
@pytest.mark.parametrize("dense_extend", [False, True], ids=["", "own extend"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("name", CHUNKS)
def test_rows_dealt_to_context_parallel_ranks(dealt, settings, no_attention, name, ratio, dense_extend, replay):
    """SGLang's interleaved split, row metadata and dispatch, whole chunks and the late layers' tail of them: each rank's
    rows select the positions and slots that they select in one rank's chunk, its padding nothing. A chunk of fewer rows
    than ranks, and decode, is every rank's."""
    rows, ranks = CHUNKS[name], [one[ratio, dense_extend, replay, name] for one in dealt]
    counts = {request: sum(r == request for r, _ in rows) for request, _ in rows}
    ends = {request: max(p for r, p in rows if r == request) for request in counts}
    kept = [i for i, (r, p) in enumerate(rows) if not replay or p > ends[r] - WINDOW]
    assert (len(kept) < len(rows)) == (replay and max(counts.values()) > WINDOW)
    expected = [[layer[i] for i in kept] for layer in undealt(tuple(rows), dense_extend, ratio)]
    active = len(rows) >= RANKS

    def halves(lines):
        return picked(line[:WIDTH] for line in lines), picked(line[WIDTH:] for line in lines)

    for rank, one in enumerate(ranks):
        assert one["dealt"] == active
        mine = [n for n, i in enumerate(kept) if not active or i % RANKS == rank]
        for local, whole, layer in zip(one["local"], one["whole"], expected, strict=True):
            for lines, at in ((local, mine), (whole, range(len(kept)))):
                positions, slots = halves(lines)
                padding = [[]] * (len(lines) - len(at))
                assert positions == [layer[n][0] for n in at] + padding
                # Without context parallelism SGLang's sparse prefill attention asks for positions only.
                assert not (active or replay) or slots == [layer[n][1] for n in at] + padding
            assert len(whole) == len(kept)
    for layer, out in enumerate(World("reference-cpu", ratio=ratio).decode_step(LONG)[1:]):
        assert [one["decode"][layer] for one in ranks] == [picked(out.tolist())] * RANKS


# ---- graphs, heads and weights ----


@pytest.mark.parametrize("ratio", [1, 2])
def test_an_idle_rank_replays_a_decode_graph(settings, no_attention, ratio):
    """A rank without requests replays the graph of the busiest rank's batch size, between replays of its own: each row at
    position 0 of SGLang's reserved page, which a ratio of 2 does not see; its own steps do not notice."""
    rank = Rank(World("reference-cpu", ratio=ratio, max_rows=16))
    backend, sizes = rank.backend, (1, 2, 4, 8, 16)
    captured = {size: decode_batch([(0, 0)] * size) for size in sizes}
    for batch in captured.values():
        backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def replay(size, rows):
        batch = decode_batch([*rows, *[(0, 0)] * (size - len(rows))])
        batch.actual_forward_mode = Mode.DECODE if rows else Mode.IDLE
        backend.init_forward_metadata_out_graph(batch)
        # The rest is what the graph of this size holds.
        backend.init_forward_metadata_in_graph(batch)
        return [picked(out.tolist()) for out in rank.forward(batch)]

    for size in sizes:
        rows = LONG[: size - 1] or LONG[:1]
        expected = [picked(out.tolist()) for out in World("reference-cpu", ratio=ratio).decode_step(rows)[1:]]
        nothing = [[] if ratio == 2 else [0]]
        for live in (rows, [], rows):
            padded = nothing * (size - len(live))
            assert replay(size, live) == [(layer if live else []) + padded for layer in expected]


@pytest.mark.parametrize("width", [2, 8])
def test_index_heads_are_replicated_over_a_tp_group(settings, width):
    """Every rank of an attention-TP group projects all index heads, so selections need no exchange."""
    with (
        get_context().override_server_args(tp_size=width, device="cpu"),
        get_parallel().override(tp_rank=width - 1, attn_tp_rank=width - 1),
    ):
        assert get_parallel().attn_tp_size == width
        world = World("reference-cpu")
        for indexer in world.indexers.values():
            assert indexer.n_local_heads == world.geometry.heads
            assert indexer.wq_b.weight.shape[0] == world.geometry.heads * 128
            assert indexer.weights_proj.weight.shape[0] == world.geometry.heads
        assert world.indexer.kernels.project(world.decode(SOURCE, [(1, 9)])).q.shape == (1, world.geometry.heads, 128)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_shared_weights_are_cut_as_sglang_cuts_them(settings, rank):
    """The parts that tests/gpu/probe/dsv41_weights.py gives a rank are those that SGLang's loaders would take of a whole
    checkpoint."""
    spec = importlib.util.spec_from_file_location("dsv41_weights", PROBE / "dsv41_weights.py")
    weights = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(weights)
    cut = dict(params_dtype=torch.float32, bias=False)
    with (
        get_context().override_server_args(tp_size=2, device="cpu"),
        get_parallel().override(tp_rank=rank, attn_tp_rank=rank),
    ):
        layers = {
            "wq_b.weight": (linear.ColumnParallelLinear(6, 8, **cut), torch.rand(8, 6), None),
            "wo_b.weight": (linear.RowParallelLinear(8, 6, **cut), torch.rand(6, 8), None),
            "mlp.gate_up_proj.weight": (linear.MergedColumnParallelLinear(6, [4, 4], **cut), torch.rand(8, 6), (0, 1)),
        }
        for name, (layer, whole, pieces) in layers.items():
            weight = layer.weight
            if pieces is None:
                weight.weight_loader(weight, whole)
            else:
                for piece, part in zip(pieces, whole.chunk(2)):
                    weight.weight_loader(weight, part, piece)
            assert torch.equal(weights.part(name, whole, weight.shape, rank, 2), weight), name
