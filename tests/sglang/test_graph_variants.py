"""Decode graphs for short contexts: who gets which, by what length they are chosen, and what their layers then do.

SGLang's own function, dataclass and runner on fake model runners; no GPU.
"""

import json
import logging
import os
import pathlib
import subprocess
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.attention.dsv4.metadata_kernel import fill_all_compressed_indices
from sglang.srt.layers.attention import graph_variants as stock
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runner_module
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_dsv41.backend import Dsv41SparseAttnBackend
from sglang_dsv41.geometry import CandidateGeometry
from tests.world import CONSUMER, KV_PAGE, LAST, SOURCE, World, picks

FILTERED = stock.DSV41_CANDIDATE_FILTERED
BOTH = (("candidate_all", 512), ("candidate_c2_all", 1024))
STOCK_SM100 = (*BOTH, ("candidate_unfiltered", 16384))


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """SGLang's own loading, through the installed entry point."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("DSV41_SPARSE_SHORT_GRAPHS", "1")


def ours(*, decode=True):
    """A backend of ours that has not been initialised; ``decode`` False leaves decode to SGLang."""
    made = object.__new__(Dsv41SparseAttnBackend)
    made.candidate_indexer = object()
    made.decode_candidates = made.candidate_indexer if decode else object()
    return made


def model_runner(backend, *, ratios=(0, 2, 2, 1, 1), device="cuda", dspark=False, **config):
    released = dict(
        model_type="deepseek_v41",
        candidate_source_layer_id=3,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        index_topk=512,
        compress_ratios=list(ratios),
    )
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_text_config=types.SimpleNamespace(**{**released, **config})),
        device=device,
        gpu_id=0,
        attn_backend=backend,
        spec_algorithm=types.SimpleNamespace(is_dspark=lambda: dspark),
        is_draft_worker=False,
    )


def made(monkeypatch, runner, mode=ForwardMode.DECODE, capability=(9, 0), width=1):
    """(what the runner module makes, what SGLang's own function makes)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return (
        runner_module.create_dsv41_candidate_graph_variants(runner, mode, width),
        stock.create_dsv41_candidate_graph_variants(runner, mode, width),
    )


# ---- who gets which ----


@pytest.mark.parametrize(
    "ratios, topk, limits",
    [
        ((0, 2, 2, 1, 1), 512, BOTH),
        ((1, 1), 512, (("candidate_all", 512),)),
        ((2, 2), 512, (("candidate_all", 1024),)),
        ((4, 128, 2, 1), 1024, (("candidate_all", 1024), ("candidate_c2_all", 2048))),
    ],
)
def test_limits_by_ratio(monkeypatch, caplog, ratios, topk, limits):
    caplog.set_level(logging.INFO, "sglang_dsv41.graph_variants")
    variants, without = made(monkeypatch, model_runner(ours(), ratios=ratios, index_topk=topk))
    assert without is None and type(variants) is stock.Dsv41CandidateGraphVariants
    assert variants.graph_limits == limits
    assert variants.capture_labels == (*(label for label, _ in limits), FILTERED)
    assert variants.verify_extra_tokens == 0
    [line] = [record.getMessage() for record in caplog.records]
    assert all(f"{label} up to {limit} tokens" in line for label, limit in limits)


@pytest.mark.parametrize(
    "blocks, limits",
    [(64, (("candidate_all", 512),)), (32, (("candidate_all", 256),)), (100, (BOTH[0], ("candidate_c2_all", 800)))],
)
def test_limits_stay_within_the_candidates(monkeypatch, blocks, limits):
    """Beyond the span of the candidate blocks filtering would drop positions."""
    variants, _ = made(monkeypatch, model_runner(ours(), candidate_topk_blocks=blocks))
    assert variants.graph_limits == limits


@pytest.mark.parametrize("ratios", [(1, 2), (1,), (2,)])
@pytest.mark.parametrize("blocks", [2048, 100, 64, 32])
def test_limits_are_sglangs_without_the_unfiltered_one(monkeypatch, ratios, blocks):
    runner = model_runner(ours(), ratios=ratios, candidate_topk_blocks=blocks)
    variants, _ = made(monkeypatch, runner)
    _, sm100 = made(monkeypatch, runner, capability=(10, 0))
    assert variants.graph_limits == tuple(item for item in sm100.graph_limits if item[0] != "candidate_unfiltered")


UNTOUCHED = {
    "stock backend": dict(backend=object()),
    "decode left to stock": dict(backend=ours(decode=False)),
    "verify": dict(mode=ForwardMode.TARGET_VERIFY, dspark=True, width=6),
    "dllm": dict(mode=ForwardMode.DLLM_EXTEND),
    "capability 8.0": dict(capability=(8, 0)),
    "capability 9.4": dict(capability=(9, 4)),
    "capability 10.0": dict(capability=(10, 0), stock=STOCK_SM100),
    "verify on 10.0": dict(
        mode=ForwardMode.TARGET_VERIFY, dspark=True, width=6, capability=(10, 0), stock=STOCK_SM100[2:]
    ),
    "cpu": dict(device="cpu"),
    "other model": dict(model_type="deepseek_v4"),
    "one level": dict(candidate_source_layer_id=-1),
    "no low ratio": dict(ratios=(4, 128)),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_others_get_what_sglang_makes(monkeypatch, case):
    options = dict(UNTOUCHED[case])
    call = {name: options.pop(name) for name in ("mode", "capability", "width") if name in options}
    expected = options.pop("stock", None)
    variants, without = made(monkeypatch, model_runner(options.pop("backend", None) or ours(), **options), **call)
    assert variants == without
    assert expected == (without and without.graph_limits)


def test_hip_is_not_hopper(monkeypatch):
    """gfx90a has capability 9.0."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert made(monkeypatch, model_runner(ours()))[0] is None


@pytest.mark.parametrize("value, some", [("0", False), ("off", False), ("1", True), ("", False)])
def test_switch(monkeypatch, value, some):
    monkeypatch.setenv("DSV41_SPARSE_SHORT_GRAPHS", value)
    assert (made(monkeypatch, model_runner(ours()))[0] is not None) is some


def test_switch_is_not_read_for_others(monkeypatch):
    monkeypatch.setenv("DSV41_SPARSE_SHORT_GRAPHS", "maybe")
    assert made(monkeypatch, model_runner(object()))[0] is None
    with pytest.raises(ValueError, match="DSV41_SPARSE_SHORT_GRAPHS='maybe'"):
        made(monkeypatch, model_runner(ours()))


# ---- selection ----


@pytest.mark.parametrize(
    "lengths, label",
    [
        ([1], "candidate_all"),
        ([512], "candidate_all"),
        ([3, 512, 1], "candidate_all"),
        ([513], "candidate_c2_all"),
        ([2, 513], "candidate_c2_all"),
        ([1024], "candidate_c2_all"),
        ([1025], FILTERED),
        ([1, 131072], FILTERED),
        ([], FILTERED),
        (None, FILTERED),
    ],
)
def test_longest_request_selects(monkeypatch, lengths, label):
    variants, _ = made(monkeypatch, model_runner(ours()))
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int64)
    assert variants.select(types.SimpleNamespace(seq_lens_cpu=lengths)) == label


# ---- what the layers of a variant do ----


@pytest.fixture
def capturing():
    yield capture_mode._set_capture_attention_variant
    capture_mode._set_capture_attention_variant(None)


@pytest.mark.parametrize(
    "variant, ratio, role, call",
    [
        (FILTERED, 1, "source", "publish"),
        (FILTERED, 1, "consumer", "consume"),
        (FILTERED, 2, "full", "topk"),
        ("candidate_all", 1, "source", None),
        ("candidate_all", 1, "consumer", None),
        ("candidate_all", 2, "full", None),
        ("candidate_c2_all", 1, "source", "topk"),
        ("candidate_c2_all", 1, "consumer", "topk"),
        ("candidate_c2_all", 2, "full", None),
    ],
)
def test_calls_of_a_layer(capturing, variant, ratio, role, call):
    """SGLang's backend in a captured variant: which of our indexer's calls it makes."""
    calls = []
    indexer = types.SimpleNamespace(
        publish_decode=lambda inputs: calls.append("publish"),
        consume_decode=lambda inputs, published: calls.append("consume"),
        topk_decode=lambda inputs: calls.append("topk"),
    )
    backend = types.SimpleNamespace(
        forward_metadata=types.SimpleNamespace(candidate_metadata=None),
        decode_candidates=indexer,
        full_topk_indexer=indexer,
        _make_low_ratio_decode_indexer_inputs=lambda *args: None,
        _publish_candidate_metadata=lambda published: None,
    )
    layer = types.SimpleNamespace(
        compress_ratio=ratio,
        indexer=types.SimpleNamespace(is_candidate_source=role == "source", uses_candidates=role == "consumer"),
    )
    capturing(variant)
    batch = types.SimpleNamespace(forward_mode=ForwardMode.DECODE)
    DeepseekV4AttnBackend._low_ratio_index_topk(backend, layer, None, None, None, None, batch)
    assert calls == ([] if call is None else [call])


def picks_of_all_positions(world, rows, width):
    """What SGLang fills in at the head of the graph for a skipped layer."""
    _, position, _, _, table = world.row_tensors(rows)
    # A GPU machine has no interpreter for a Triton kernel on CPU tensors.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = ((position + 1) // world.ratio).clamp_min(1).to(device, torch.int32)
    out = world.garbage(len(rows), width).to(device)
    fill_all_compressed_indices(table.to(device), lengths, out, compress_ratio=world.ratio, page_size=KV_PAGE)
    return picks(out)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.usefixtures("one_thread")
def test_skipped_layers_select_what_scoring_would(kernels_on, ratio):
    """Up to the limit the filled indices are the selection of every index layer of ours; one token on they are not."""
    geometry = CandidateGeometry(
        topk_blocks=64, block_size=8, topk=512, heads=32, source_layer=SOURCE, consumer_layers=(CONSUMER, LAST)
    )
    world = World(kernels_on, geometry=geometry, ratio=ratio, pages=2 * ratio + 1, requests=4)
    limit = 512 * ratio
    rows = [(1, ratio - 1), (2, 256 * ratio), (3, limit - 2), (4, limit - 1)]
    filled = picks_of_all_positions(world, rows, 512)
    assert [sum(slot >= 0 for slot in row) for row in filled] == [world.visible(row) for row in rows]
    full = world.decode(CONSUMER, rows)
    world.indexer.topk_decode(full)
    _, *scored = world.decode_step(rows)
    for out in (full.out_page_indices, *scored):
        assert picks(out) == filled
    past = [(4, limit - 1 + ratio)]
    assert picks(world.decode_step(past)[1]) != picks_of_all_positions(world, past, 512)


# ---- the hook ----

FRESH = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention import graph_variants as stock
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
create = module.create_dsv41_candidate_graph_variants
print(json.dumps({
    "wraps stock": getattr(create, "__wrapped__", None) is stock.create_dsv41_candidate_graph_variants,
    "is stock": create is stock.create_dsv41_candidate_graph_variants,
    "ours loaded": "sglang_dsv41.graph_variants" in sys.modules,
    "backend loaded": "sglang_dsv41.backend" in sys.modules,
}))
"""


@pytest.mark.parametrize("disabled", [False, True])
def test_hook_comes_with_the_plugin_when_the_runner_is_imported(disabled):
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        env={**os.environ, "DSV41_SPARSE_DISABLE": "1" if disabled else "0"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "wraps stock": not disabled,
        "is stock": disabled,
        "ours loaded": False,
        "backend loaded": False,
    }


class Reached(Exception):
    """The runner has made its variants."""


def variants_of_a_runner(replace, backend, capability=(9, 0)):
    """What SGLang's runner itself holds when it has made its variants, on a model of ours."""
    for name in ("get_exec", "get_flags", "get_parallel", "get_spec", "DeepEPCudaGraphRunnerAdapter", "DllmConfig"):
        replace(runner_module, name, MagicMock())
    runner_module.DllmConfig.from_server_args.return_value = None
    for name in ("require_mlp_tp_gather", "require_attn_tp_gather", "is_dsa_enable_prefill_cp", "is_mla_cp_enabled"):
        replace(runner_module, name, lambda: False)
    replace(runner_module.BaseCudaGraphRunner, "__init__", lambda self, model_runner: None)
    replace(runner_module, "get_batch_sizes_to_capture", MagicMock(side_effect=Reached))
    replace(torch.cuda, "get_device_capability", lambda device=None: capability)
    model = MagicMock(device="cuda", gpu_id=0, attn_backend=backend, is_draft_worker=False, lora_manager=None)
    model.model_config = MagicMock(hf_text_config=model_runner(backend).model_config.hf_text_config)
    model.spec_algorithm.is_speculative.return_value = model.spec_algorithm.is_dspark.return_value = False
    runner = object.__new__(runner_module.DecodeCudaGraphRunner)
    runner.model_runner, runner.return_hidden_states_mode = model, None
    with pytest.raises(Reached):
        runner.__init__(model)
    return runner.attention_graph_variants


def test_runner_holds_the_variants(monkeypatch):
    assert variants_of_a_runner(monkeypatch.setattr, ours()).graph_limits == BOTH
    assert variants_of_a_runner(monkeypatch.setattr, ours(), (10, 0)).graph_limits == STOCK_SM100
    assert variants_of_a_runner(monkeypatch.setattr, types.SimpleNamespace(dllm_attention=None)) is None
