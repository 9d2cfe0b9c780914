"""SGLang's attention unittest kit (DSV4), as the wheel ships it, on our backend; scripts/run_upstream_tests.py runs this.

A case computes attention over a cache that the kit writes and compares it with the kit's torch reference. The kit names
the compressed entries a row attends to itself, so index layers do not run: what is shown is that our class changes
nothing else. Not collected by itself: importing the kit overrides SGLang's parallel state for the whole process.
"""

import unittest

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit
from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graphs
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verify

from sglang_dsv41.backend import SparseCandidates
from tests.devices import HAS_GPU
from tests.upstream import swap

HAS_FLASH_MLA = HAS_GPU and torch.cuda.get_device_capability()[0] in (9, 10)
needs_gpu = pytest.mark.skipif(
    not HAS_FLASH_MLA, reason="needs a CUDA GPU of compute capability 9.0 or 10.x, which FlashMLA has kernels for"
)


def case(mode, ratio, prefix, extend=()):
    """A case of the kit: prefix and extend lengths of its requests."""
    return kit.DSV4AttentionCase(
        name=f"{mode.name.lower()}_ratio_{ratio}",
        backend="dsv4",
        forward_mode=mode,
        num_heads=64,
        page_size=kit.DSV4_PAGE_SIZE,
        prefix_lens=prefix,
        extend_lens=extend,
        compress_ratio=ratio,
    )


SWA = kit.make_dsv4_cases("dsv4")
# The kit fills 32 compressed entries, more at ratios 1 and 2; a row at ratio 128 needs as many tokens to see one.
PREFIX = {1: (64, 200), 2: (65,), 4: (64,), 128: (128,)}
EXTEND = [case(ForwardMode.EXTEND, ratio, PREFIX[ratio][:1], (15,)) for ratio in PREFIX]
DECODE = [case(ForwardMode.DECODE, ratio, PREFIX[ratio]) for ratio in PREFIX]
PAIRS = {0: (64, 96), 4: (64, 96), 128: (128, 160)}
VERIFY = [case(ForwardMode.TARGET_VERIFY, ratio, pair, (3, 3)) for ratio, pair in PAIRS.items()]
GRAPH = [case(ForwardMode.DECODE, ratio, prefix) for ratio, prefix in ((0, (32, 96)), (4, (64,)), (128, (128,)))]


def named(cases):
    return {"argvalues": cases, "ids": [one.name for one in cases]}


class Kit(unittest.TestCase):
    """What the kit asserts and skips with."""

    __test__ = False

    def runTest(self):
        pass


@pytest.fixture(autouse=True)
def ran_ours():
    """Every case built a backend of ours; where none was, the kit tested something else."""
    swap.install()
    swap.built.clear()
    yield
    assert swap.built and all(isinstance(one, SparseCandidates) for one in swap.built)
    assert all(one.decode_candidates is one.prefill_candidates is one.candidate_indexer for one in swap.built)


@pytest.mark.parametrize("one", **named(SWA))
@needs_gpu
def test_sliding_window(one):
    kit.run_dsv4_attention_case(Kit(), one)


@pytest.mark.parametrize("one", **named(EXTEND + DECODE))
@needs_gpu
def test_compressed(one):
    kit.run_dsv4_compress_attention_case(Kit(), one)


@pytest.mark.parametrize("one", **named(EXTEND))
@needs_gpu
def test_compressed_sparse_prefill(one):
    kit.run_dsv4_compress_attention_case(Kit(), one, sparse_prefill=True)


@pytest.mark.parametrize("one", **named(VERIFY))
@needs_gpu
def test_target_verify(one):
    kit.run_dsv4_target_verify_attention_case(Kit(), one, topk=1)


@pytest.mark.parametrize("one", **named(GRAPH))
@needs_gpu
def test_decode_graph(one):
    graphs.run_dsv4_cuda_graph_decode_case(Kit(), one)


@pytest.mark.parametrize("one", **named(VERIFY))
@needs_gpu
def test_target_verify_graph(one):
    verify.run_dsv4_eagle_verify_cuda_graph_case(Kit(), one, topk=1, force_gpu_only_seq_lens=True)


# The metadata of other ratios, and of decode at ratios 1 and 2, is made by CUDA kernels.
@pytest.mark.parametrize("one", **named([*SWA, *EXTEND[:2]]))
@pytest.mark.skipif(HAS_GPU, reason="the cases above cover it on a GPU")
def test_metadata_without_a_gpu(one, monkeypatch):
    """The kit builds our backend, and it makes a step's metadata of the lengths that the case has."""
    from sglang.srt.layers.attention import deepseek_v4_backend

    monkeypatch.setenv("DSV41_SPARSE_KERNELS", "reference")
    monkeypatch.setattr(deepseek_v4_backend, "_create_flashmla_metadata", lambda: object())
    made = kit.build_dsv4_attention_fixture(Kit(), one, device="cpu")
    made.backend.init_forward_metadata(made.forward_batch)
    lens = [prefix + i + 1 for prefix, n in zip(one.prefix_lens, one.input_lens) for i in range(n)]
    seen = made.backend.forward_metadata.core_attn_metadata
    assert seen.seq_lens_casual.tolist()[: len(lens)] == lens
    assert seen.swa_topk_lengths.tolist()[: len(lens)] == [min(n, kit.DSV4_SWA_WINDOW) for n in lens]
