"""SM80, SM89, SM110 and SM120 by mocked capability: the start, and the first requests on the set that serves them.

No such GPU runs these tests: on one of another family the portable set is forced, with the bf16 products that they take.
"""

import types

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt import runtime_context
from sglang.srt.layers.attention.dsv4 import v41_indexer
from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import DenseBlocksBackend

from sglang_dsv41 import BACKEND_NAME, backend
from sglang_dsv41.kernels import kernel_set_class, kernel_set_name, scoring
from sglang_dsv41.kernels.portable import PortableKernels
from tests.devices import DEVICES
from tests.world import World, span

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = [(8, 0), (8, 6), (8, 9), (11, 0), (12, 0), (12, 1)]
NEWER = [one for one in FAMILIES if one > (10, 9)]
(PORTABLE,) = [name for name in DEVICES if name.startswith("portable")]
ARGUMENTS = dict(
    token_to_kv_pool=None, req_to_token=None, page_size=256, candidate_topk_blocks=4, candidate_block_size=8
)


@pytest.fixture
def on(monkeypatch):
    """SGLang and ours believe that the GPU is of a capability; DeepGEMM is installed."""
    caches = (v41_indexer.is_sm100_or_newer, v41_indexer.has_dense_fp4_indexer, v41_indexer._use_deep_gemm_prefill)

    def believe(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(v41_indexer, "is_cuda", lambda: True)
        for cache in caches:
            cache.cache_clear()

    yield believe
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def made(monkeypatch):
    """What SGLang's backend module makes its candidate objects with, in a server of the named backend."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers.attention import deepseek_v4_backend

    def make(name):
        monkeypatch.setattr(runtime_context, "attention_backends", lambda: (name, name))
        return deepseek_v4_backend.make_candidate_indexer(**ARGUMENTS)

    return make


@pytest.mark.parametrize("capability", FAMILIES)
def test_the_start_needs_no_sm100_object(on, made, capability):
    on(capability)
    prefill, decode = made(BACKEND_NAME)
    assert type(decode) is DenseBlocksBackend and prefill is decode
    assert not decode.use_deep_gemm_prefill
    assert (decode.topk_blocks, decode.block_size) == (4, 8)


@pytest.mark.parametrize("capability", NEWER)
def test_a_server_of_sglangs_own_is_left_alone(on, made, capability):
    """There the start ends, with SGLang's message."""
    on(capability)
    with pytest.raises(RuntimeError, match="needs DeepGEMM's paged sparse MQA logits"):
        made("dsv4")


@pytest.mark.parametrize("capability,fp8", [*((one, False) for one in FAMILIES), ((9, 0), True), ((10, 0), False)])
def test_products_by_capability(on, capability, fp8):
    on(capability)
    assert scoring.uses_fp8.__wrapped__(torch.device("cuda")) is fp8


@pytest.mark.parametrize("ours", [False, True], ids=["SGLang's extend", "our extend"])
@pytest.mark.parametrize("capability", FAMILIES)
def test_first_requests(monkeypatch, capability, ours):
    """Decode, verify and extend by the oracle, on the set of the family and the extend scorers that the backend gives it."""
    kernels = kernel_set_class(kernel_set_name(capability))
    assert kernels is PortableKernels
    monkeypatch.setattr(scoring, "uses_fp8", lambda device: False)
    world = World(PORTABLE, dense_extend=ours, pages=2)
    assert type(world.kernels) is kernels
    stock = types.SimpleNamespace(token_to_kv_pool=world.pool, req_to_token=world.req_to_token)
    source, full = backend.extend_scorers(stock, kernels, world.geometry, ours=ours)
    world.indexer.prefill_source, world.indexer.full_topk = source, full
    assert (source is None) is (full is None) is ours
    world.check_decode([(1, 300), (2, 64), (3, 0)])
    world.check_decode(span(1, 60, 6) + span(2, 255, 6), is_verify=True)
    world.check_extend(span(1, 250, 8) + span(3, 0, 3))
