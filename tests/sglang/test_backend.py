"""What the backend makes of a runner: buffers for its limits, and who scores an extend."""

import dataclasses
import types

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import DenseBlocksBackend
from sglang.srt.layers.attention.dsv4.v41_indexer.full_topk import FullTopKIndexer
from sglang.srt.model_executor.runner import base_cuda_graph_runner
from sglang.srt.runtime_context import get_context, get_exec

from sglang_dsv41 import backend
from sglang_dsv41.kernels import kernel_set_class, kernel_set_name
from tests.candidates import RELEASED


@pytest.fixture
def limits(monkeypatch):
    """SGLang's settings; 32 requests of 1,048,576 tokens and a few more, as it reserves them."""
    made = types.SimpleNamespace(chunked_prefill_size=8192, draft_tokens=None, attn_tp_size=1, attn_cp_size=1)
    monkeypatch.setattr(backend, "get_schedule", lambda: made)
    monkeypatch.setattr(backend, "get_parallel", lambda: made)
    monkeypatch.setattr(backend, "max_speculative_num_draft_tokens", lambda: made.draft_tokens)
    monkeypatch.delenv("DSV41_SPARSE_SCRATCH_MB", raising=False)
    made.backend = types.SimpleNamespace(
        req_to_token=torch.empty(33, 1_048_580, dtype=torch.int32, device="meta"),
        page_size=256,
        low_ratios=(1, 2),
        device="meta",
    )
    return made


def test_buffers_hold_a_chunk_and_the_running_requests(limits):
    rows = backend.allocate_rows(limits.backend, RELEASED)
    assert rows.max_rows == 8192 + 33
    # The page table of a full context is whole pages wide.
    assert rows.dense_rows_per_pass(4097 * 256) >= 33


def test_buffers_hold_the_most_draft_tokens(limits):
    """Adaptive speculation captures graphs of more draft tokens than it starts with."""
    limits.draft_tokens = 512
    assert backend.allocate_rows(limits.backend, RELEASED).max_rows == 33 * 512


@pytest.mark.parametrize("group, context", [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 8), (2, 4), (4, 2)])
@pytest.mark.parametrize("drafts", [1, 6])
def test_buffers_hold_every_batch_that_sglang_captures(limits, group, context, drafts):
    """SGLang rounds its limit of requests up to whole attention-TP and context-parallel groups before it captures; a small
    chunk hides nothing."""
    limits.chunked_prefill_size, limits.draft_tokens = 64, drafts
    limits.attn_tp_size, limits.attn_cp_size = group, context
    whole = group if group % context == 0 else group * context
    for size in (1, 33, 250, 256):
        pool = torch.empty(size + 1, 4096, dtype=torch.int32, device="meta")
        runner = types.SimpleNamespace(server_args=None, req_to_token_pool=types.SimpleNamespace(size=size))
        graphs = types.SimpleNamespace(decode=types.SimpleNamespace(bs=[*range(8, 513, 8)]))
        with (
            get_context().override_server_args(
                tp_size=2 * group * context,
                attn_dp_size=2,
                attn_cp_size=context,
                enable_dp_attention=True,
                device="cpu",
            ),
            get_exec().graph.override(cuda_graph_config=graphs),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(base_cuda_graph_runner.DllmConfig, "from_server_args", lambda _: None)
            captured, _ = base_cuda_graph_runner.get_batch_sizes_to_capture(
                runner, drafts, gathered_buffer_required=True
            )
        assert captured[-1] == -(-size // whole) * whole
        limits.backend.req_to_token = pool
        assert backend.allocate_rows(limits.backend, RELEASED).max_rows >= captured[-1] * drafts


@pytest.mark.parametrize("ratios,width", [((1, 2), 4097 * 256), ((1,), 4097 * 256), ((2,), 4097 * 128)])
def test_one_dense_row_of_every_full_layer_fits(limits, monkeypatch, ratios, width):
    """A source of ratio 2 below full layers of ratio 1, whose rows are twice as wide; the smallest scratch."""
    monkeypatch.setenv("DSV41_SPARSE_SCRATCH_MB", "1")
    limits.backend.low_ratios = ratios
    limits.backend.req_to_token = limits.backend.req_to_token[:1]
    rows = backend.allocate_rows(limits.backend, dataclasses.replace(RELEASED, ratio=2))
    assert rows.dense_rows_per_pass(width) == 1


def test_an_extend_keeps_sglangs_scorers_on_sm100():
    stock = types.SimpleNamespace(prefill_candidates=object(), full_topk_indexer=object())
    kernels = kernel_set_class(kernel_set_name((10, 0)))
    for ours in (False, True):
        scorers = backend.extend_scorers(stock, kernels, RELEASED, ours=ours)
        assert scorers == (stock.prefill_candidates, stock.full_topk_indexer)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (11, 0), (12, 0), (12, 1)])
def test_an_extend_needs_no_sm100_kernel_elsewhere(capability):
    """Past 10.x SGLang takes its DeepGEMM scorers too, which assert compute capability 10.x at the first request."""
    stock = types.SimpleNamespace(
        prefill_candidates=object(), full_topk_indexer=object(), token_to_kv_pool=object(), req_to_token=object()
    )
    kernels = kernel_set_class(kernel_set_name(capability))
    source, full = backend.extend_scorers(stock, kernels, RELEASED)
    assert type(source) is DenseBlocksBackend and not source.use_deep_gemm_prefill
    assert (source.topk_blocks, source.block_size) == (2048, 8)
    assert type(full) is FullTopKIndexer and not full.use_deep_gemm_prefill
    assert source.token_to_kv_pool is full.token_to_kv_pool is stock.token_to_kv_pool
    assert backend.extend_scorers(stock, kernels, RELEASED, ours=True) == (None, None)
