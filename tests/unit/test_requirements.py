"""Every requirement's message, for an engine that lacks it; and that no fact goes unchecked."""

import dataclasses
import types

import pytest
import torch

from sglang_dsv41 import requirements
from sglang_dsv41.geometry import CandidateGeometry
from sglang_dsv41.requirements import EngineFacts, RequirementsError, check, kernel_set_of, unmet
from tests.candidates import RELEASED

CONFIG = {
    "model_type": "deepseek_v41_text",
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "candidate_source_layer_id": 20,
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "index_topk": 512,
    "index_n_heads": 32,
    "index_head_dim": 128,
}
HOPPER = EngineFacts(
    model_type="deepseek_v41_text",
    geometry=RELEASED,
    capability=(9, 0),
    deepgemm_error="no SM100 GPU",
    index_page=64,
    pool_stride=4352,
    chunked_prefill_size=8192,
)
BLACKWELL = dataclasses.replace(HOPPER, capability=(10, 0), deepgemm_error=None, index_page=128, pool_stride=8704)


def geometry(**changes) -> CandidateGeometry:
    return dataclasses.replace(RELEASED, **changes)


# base, what it lacks, and parts of: what, found, needed, change
LACKING = {
    "another model": (
        HOPPER,
        {"model_type": "llama"},
        ("model", "model_type 'llama'", "deepseek_v41", "Serve a DeepSeek-V4.1 checkpoint"),
    ),
    "DeepSeek-V4": (
        HOPPER,
        {"model_type": "deepseek_v4"},
        ("model", "model_type 'deepseek_v4'", "two-level DeepSeek-V4.1", "drop the option"),
    ),
    "no model type": (HOPPER, {"model_type": None}, ("model", "model_type None", "DeepSeek-V4.1", "drop the option")),
    "no candidate blocks": (
        HOPPER,
        {"geometry": None, "geometry_error": "the model configures no candidate blocks"},
        ("candidate blocks", "configures no candidate blocks", "candidate_topk_blocks", "config.json"),
    ),
    "head width": (
        HOPPER,
        {"geometry": geometry(head_dim=64)},
        ("index head", "index_head_dim 64", "128", "released checkpoint's config"),
    ),
    "24 heads": (
        HOPPER,
        {"geometry": geometry(heads=24)},
        ("index heads", "index_n_heads 24", "a power of two, at least 16", "released checkpoint's config"),
    ),
    "8 heads": (
        HOPPER,
        {"geometry": geometry(heads=8)},
        ("index heads", "index_n_heads 8", "at least 16", "released checkpoint's config"),
    ),
    "256 heads": (
        HOPPER,
        {"geometry": geometry(heads=256)},
        ("index heads", "index_n_heads 256", "at most 128", "released checkpoint's config"),
    ),
    "old GPU": (
        HOPPER,
        {"capability": (7, 5)},
        ("GPU", "compute capability 7.5", "8.0 or newer", "Run on an H100, H200, H20"),
    ),
    "no GPU": (HOPPER, {"capability": None}, ("GPU", "no CUDA device", "8.0 or newer", "Run on an H100")),
    "ROCm": (HOPPER, {"platform": "hip"}, ("GPU", "platform 'hip'", "an NVIDIA GPU", "Run on an H100")),
    "unknown kernel set": (
        HOPPER,
        {"forced_kernels": "fastest"},
        (
            "kernel set",
            "DSV41_SPARSE_KERNELS=fastest",
            "one of reference, portable, hopper, blackwell",
            "Correct or unset DSV41_SPARSE_KERNELS",
        ),
    ),
    "blackwell forced on Hopper": (
        HOPPER,
        {"forced_kernels": "blackwell", "deepgemm_error": None, "pool_stride": 8704},
        ("GPU", "compute capability 9.0", "10.x", "Unset DSV41_SPARSE_KERNELS"),
    ),
    "no DeepGEMM on SM100": (
        BLACKWELL,
        {"deepgemm_error": "a DeepGEMM without them"},
        ("DeepGEMM", "a DeepGEMM without them", "sgl-deep-gemm >= 0.2.0", "SGLANG_ENABLE_JIT_DEEPGEMM at 1"),
    ),
    "blocks DeepGEMM cannot schedule": (
        BLACKWELL,
        {"geometry": geometry(topk_blocks=1022)},
        ("blocks a row", "1022 kernel blocks of 8 positions", "a multiple of 4, at most 4096", "candidate_topk_blocks"),
    ),
    "candidate block on SM100": (
        BLACKWELL,
        {"geometry": geometry(block_size=16, topk_blocks=1024)},
        ("candidate block", "candidate_block_size 16", "8 on SM100", "candidate_block_size"),
    ),
    "page stride on SM100": (
        BLACKWELL,
        {"pool_stride": 4352},
        ("index-K page stride", "4352 B", "a multiple of 512 B", "128 positions"),
    ),
    "index cache layout": (
        HOPPER,
        {"pool_error": "payload and scales in separate buffers (split layout)"},
        ("index-K cache", "split layout", "MXFP4", "Unset the options and SGLANG_* variables"),
    ),
    "index page": (
        HOPPER,
        {"index_page": 12},
        ("index-K page", "12 positions", "a multiple of the kernel block of 8", "64 on Hopper, 128 on SM100"),
    ),
    "too many columns": (
        HOPPER,
        {"geometry": geometry(topk_blocks=2049)},
        ("candidate columns", "2049 blocks of 8 = 16392 columns", "at most 16384", "candidate_topk_blocks"),
    ),
    "top-k 4096": (
        HOPPER,
        {"geometry": geometry(topk=4096)},
        ("index top-k", "index_topk 4096", "512 or 1024", "index_topk"),
    ),
    "top-k 0": (HOPPER, {"geometry": geometry(topk=0)}, ("index top-k", "index_topk 0", "512 or 1024", "index_topk")),
    "top-k that only our kernels take": (
        HOPPER,
        {"geometry": geometry(topk=256)},
        ("index top-k", "index_topk 256", "512 or 1024", "index_topk"),
    ),
    "top-k past the columns": (
        HOPPER,
        {"geometry": geometry(topk_blocks=32)},
        ("index top-k", "index_topk 512", "at most a row's 256 columns", "index_topk"),
    ),
    "top-k backend torch": (
        HOPPER,
        {"topk_backend": "torch"},
        ("top-k backend", "--dsa-topk-backend torch", "sgl-kernel", "Drop --dsa-topk-backend"),
    ),
    "top-k backend flashinfer": (
        HOPPER,
        {"topk_backend": "flashinfer"},
        ("top-k backend", "--dsa-topk-backend flashinfer", "sgl-kernel", "Drop --dsa-topk-backend"),
    ),
    "decode context parallelism": (
        HOPPER,
        {"dcp_size": 4},
        ("parallel mode", "decode context parallelism over 4 ranks", "one rank", "--dcp-size"),
    ),
    "pipeline parallelism": (
        HOPPER,
        {"pp_size": 2},
        ("parallel mode", "pipeline parallelism over 2 ranks", "one rank", "--pp-size"),
    ),
    "two-batch overlap": (
        HOPPER,
        {"two_batch_overlap": True},
        ("feature", "two-batch overlap", "off", "Drop --enable-two-batch-overlap"),
    ),
    "HiSparse": (HOPPER, {"hisparse": True}, ("feature", "HiSparse", "off", "Drop --enable-hisparse")),
    "another backend's phase": (
        HOPPER,
        {"other_phase": "triton"},
        ("backend of the other phase", "triton", "dsv4 or dsv41-sparse", "--prefill-attention-backend"),
    ),
    "no prefill chunks": (
        HOPPER,
        {"chunked_prefill_size": -1},
        ("chunked prefill", "--chunked-prefill-size -1", "a positive chunk", "Set --chunked-prefill-size"),
    ),
}


@pytest.mark.parametrize("base,lacks,parts", LACKING.values(), ids=LACKING)
def test_message_of_each_requirement(base, lacks, parts):
    """Exactly this failure, with what was found, what is needed and what to change, also in the error's text."""
    facts = dataclasses.replace(base, **lacks)
    failures = unmet(facts)
    assert len(failures) == 1, [str(f) for f in failures]
    failure, (what, found, needed, change) = failures[0], parts
    assert failure.what == what
    assert found in failure.found and needed in failure.needed and change in failure.change
    with pytest.raises(RequirementsError) as error:
        check(facts)
    text = str(error.value)
    assert "1 requirement is not met" in text and "--attention-backend dsv41-sparse cannot serve this engine" in text
    for part in (f"found {failure.found}", f"needed: {failure.needed}", failure.change, "dsv41-sparse doctor"):
        assert part in text


def test_all_failures_in_one_message():
    facts = dataclasses.replace(
        BLACKWELL,
        geometry=geometry(heads=24, topk=4096),
        deepgemm_error="a DeepGEMM without them",
        pool_stride=4352,
        index_page=12,
        topk_backend="torch",
        dcp_size=2,
        pp_size=2,
        two_batch_overlap=True,
        hisparse=True,
        chunked_prefill_size=-1,
    )
    with pytest.raises(RequirementsError) as error:
        check(facts)
    assert len(error.value.unmet) == 11 and "11 requirements are not met" in str(error.value)
    for number, failure in enumerate(error.value.unmet, 1):
        assert f"  {number}. {failure}" in str(error.value)


@pytest.mark.parametrize(
    "facts",
    [
        HOPPER,
        dataclasses.replace(HOPPER, capability=(8, 0)),
        dataclasses.replace(HOPPER, capability=(8, 9)),
        dataclasses.replace(HOPPER, capability=(12, 0)),
        BLACKWELL,
        dataclasses.replace(BLACKWELL, capability=(10, 3)),
        dataclasses.replace(HOPPER, model_type="deepseek_v41"),
        dataclasses.replace(HOPPER, index_page=None, pool_stride=None, chunked_prefill_size=None),
        dataclasses.replace(HOPPER, forced_kernels="reference", capability=None),
        dataclasses.replace(BLACKWELL, forced_kernels="portable"),
    ],
    ids=[
        "Hopper",
        "Ampere",
        "Ada",
        "SM120",
        "SM100",
        "SM103",
        "outer model type",
        "not yet known",
        "forced",
        "portable on SM100",
    ],
)
def test_good_engines(facts):
    assert unmet(facts) == []
    check(facts)


@pytest.mark.parametrize(
    "capability,name",
    [((7, 5), None), (None, None), ((8, 0), "portable"), ((9, 0), "hopper"), ((10, 0), "blackwell")]
    + [((10, 3), "blackwell"), ((12, 0), "portable")],
)
def test_kernel_set_by_capability(capability, name):
    assert kernel_set_of(EngineFacts(capability=capability)) == name
    assert kernel_set_of(EngineFacts(capability=capability, platform="hip")) is None
    assert kernel_set_of(EngineFacts(capability=capability, forced_kernels="reference")) == "reference"
    assert kernel_set_of(EngineFacts(capability=capability, forced_kernels="none such")) is None


# A bad value of every fact, and the engine in which it is bad. geometry_error is the found part of a missing geometry.
BAD = {
    "model_type": (HOPPER, "llama"),
    "geometry": (HOPPER, None),
    "geometry_error": (dataclasses.replace(HOPPER, geometry=None), "four blocks of nothing"),
    "platform": (HOPPER, "npu"),
    "capability": (HOPPER, (7, 0)),
    "deepgemm_error": (BLACKWELL, "not installed"),
    "pool_error": (HOPPER, "split"),
    "index_page": (HOPPER, 0),
    "pool_stride": (BLACKWELL, 4352),
    "topk_backend": (HOPPER, "torch"),
    "chunked_prefill_size": (HOPPER, 0),
    "dcp_size": (HOPPER, 2),
    "pp_size": (HOPPER, 2),
    "two_batch_overlap": (HOPPER, True),
    "hisparse": (HOPPER, True),
    "other_phase": (HOPPER, "flashinfer"),
    "forced_kernels": (HOPPER, "fast"),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EngineFacts)])
def test_every_fact_is_checked(field):
    assert field in BAD, f"EngineFacts.{field} has no bad value here, and perhaps no check"
    base, bad = BAD[field]
    failures = unmet(dataclasses.replace(base, **{field: bad}))
    assert failures and failures != unmet(base)


# ---- gathering ----


def config(**changes):
    return types.SimpleNamespace(**{**CONFIG, **changes})


def test_facts_of_the_released_model():
    facts = requirements.model_facts(config())
    assert facts["model_type"] == "deepseek_v41_text" and "geometry_error" not in facts
    made = facts["geometry"]
    assert (made.topk_blocks, made.block_size, made.topk, made.heads, made.ratio) == (2048, 8, 512, 32, 1)
    assert made.source_layer == 20 and made.consumer_layers == (24, 28, 32, 36)


@pytest.mark.parametrize(
    "changes,parts",
    [
        ({"candidate_topk_blocks": 0}, "no candidate blocks"),
        ({"candidate_source_layer_id": -1}, "no candidate blocks"),
        ({"candidate_block_size": 12}, "a positive multiple of 8"),
        ({"compress_ratios": [0, 0] + [2] * 22 + [1] * 16}, "must share one ratio"),
    ],
    ids=["no blocks", "no source", "block of 12", "two ratios"],
)
def test_v41_without_a_two_level_scheme_is_refused(changes, parts):
    failures = unmet(dataclasses.replace(HOPPER, **{"geometry": None, **requirements.model_facts(config(**changes))}))
    assert len(failures) == 1 and failures[0].what == "candidate blocks" and parts in failures[0].found


@pytest.mark.parametrize("model_type", ["deepseek_v4", "llama"])
def test_other_models_are_refused(model_type):
    facts = requirements.model_facts(types.SimpleNamespace(model_type=model_type))
    failures = unmet(dataclasses.replace(HOPPER, **{"geometry": None, **facts}))
    assert len(failures) == 1 and f"model_type {model_type!r}" in failures[0].found


class Pool:
    """The index-K accessors of SGLang's token-to-KV pool."""

    def __init__(self, buffer=None, *, page=64, split=False, page8=False):
        self.buffer = torch.zeros(3, 64 * 68, dtype=torch.uint8) if buffer is None else buffer
        self.page, self.split, self.page8, self.layers = page, split, page8, []

    def low_ratio_index_k_is_split(self, layer):
        self.layers.append(layer)
        return self.split

    def low_ratio_index_k_page8(self, layer):
        return self.page8

    def get_index_k_page_size(self, ratio):
        assert ratio == RELEASED.ratio
        return self.page

    def get_index_k_with_scale_buffer(self, layer):
        self.layers.append(layer)
        return self.buffer


def test_pool_of_hopper_and_of_sm100():
    pool = Pool()
    assert requirements.pool_facts(pool, RELEASED) == {"index_page": 64, "pool_stride": 4352}
    assert set(pool.layers) == {RELEASED.source_layer}
    wide = torch.zeros(3, 128 * 68, dtype=torch.uint8)
    assert requirements.pool_facts(Pool(wide, page=128), RELEASED) == {"index_page": 128, "pool_stride": 8704}
    # Pages may be strided: what counts is the distance between them.
    assert requirements.pool_facts(Pool(wide[:, : 64 * 68]), RELEASED) == {"index_page": 64, "pool_stride": 8704}


@pytest.mark.parametrize(
    "pool,part",
    [
        (Pool(split=True), "separate buffers (split layout)"),
        (Pool(page8=True), "row-group pages of 8 positions (page-8 layout)"),
        (Pool(torch.zeros(3, 64 * 68, dtype=torch.bfloat16)), "torch.bfloat16 pages of shape (4352,) for 64 positions"),
        (
            Pool(torch.zeros(3, 64 * 132, dtype=torch.uint8)),
            "pages of shape (8448,) for 64 positions, not 64 * 68 bytes",
        ),
        (Pool(torch.zeros(3, 64, 68, dtype=torch.uint8)), "pages of shape (64, 68) for 64 positions"),
        (object(), "object holds no index K for layer 20"),
    ],
    ids=["split", "page-8", "bf16", "fp8 width", "3-D", "another pool"],
)
def test_pools_of_another_layout_are_refused(pool, part):
    facts = requirements.pool_facts(pool, RELEASED)
    assert part in facts["pool_error"]
    failures = unmet(dataclasses.replace(HOPPER, **facts))
    assert [f.what for f in failures] == ["index-K cache"] and part in failures[0].found


def test_pool_without_a_layer_is_refused():
    class Empty(Pool):
        def low_ratio_index_k_is_split(self, layer):
            raise KeyError(layer)

    assert "Empty holds no index K for layer 20" in requirements.pool_facts(Empty(), RELEASED)["pool_error"]
    assert requirements.pool_facts(Empty(), None) == {}


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (12, 0), None])
def test_deepgemm_is_asked_by_capability_not_by_name(capability):
    """The installed DeepGEMM has the entry points; off SM100 they assert, so the names prove nothing."""
    deep_gemm = pytest.importorskip("deep_gemm")
    for name in ("get_paged_sparse_mqa_logits_metadata", "fp8_fp4_paged_sparse_mqa_logits"):
        assert hasattr(deep_gemm, name)
    assert "compute capability 10.x" in requirements.deepgemm_error(capability)


@pytest.mark.parametrize("usable,error", [(True, None), (False, "a DeepGEMM without them")])
def test_deepgemm_on_sm100(monkeypatch, usable, error):
    configurer = pytest.importorskip("sglang.srt.layers.deep_gemm_wrapper.configurer")
    monkeypatch.setattr(configurer, "DEEPGEMM_PAGED_SPARSE_MQA_LOGITS", usable)
    found = requirements.deepgemm_error((10, 0))
    assert found is None if error is None else error in found


def test_device_facts_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, index or 0))
    facts = requirements.device_facts(0)
    assert facts["capability"] == (9, 0) and "compute capability 10.x" in facts["deepgemm_error"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = requirements.device_facts()
    assert "capability" not in facts and facts["deepgemm_error"]
    assert [f.found for f in unmet(dataclasses.replace(HOPPER, capability=None, **facts))] == ["no CUDA device"]
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert requirements.device_facts()["platform"] == "hip"


class Runner:
    """A model runner of SGLang, as far as the facts go."""

    gpu_id = 0
    is_draft_worker = False
    enable_hisparse = False

    def __init__(self):
        self.model_config = types.SimpleNamespace(hf_text_config=config())
        self.token_to_kv_pool = Pool()


@pytest.fixture
def engine(monkeypatch):
    """SGLang's resolved settings on a Hopper GPU, to be changed by a test before it gathers."""
    context = pytest.importorskip("sglang.srt.runtime_context")
    from sglang.srt.layers.attention.dsa import dsa_topk_backend

    made = types.SimpleNamespace(
        runner=Runner(),
        overlap=types.SimpleNamespace(enable_two_batch_overlap=False),
        kernel=types.SimpleNamespace(
            dsa_topk_backend="sgl-kernel",
            attention_backend="dsv4",
            prefill_attention_backend=None,
            decode_attention_backend="dsv41-sparse",
        ),
        schedule=types.SimpleNamespace(chunked_prefill_size=8192),
        parallel=types.SimpleNamespace(attn_cp_size=1, dcp_size=1, dcp_enabled=False, pp_size=1),
        capability=(9, 0),
    )
    for module in (context, dsa_topk_backend):
        monkeypatch.setattr(module, "get_exec", lambda: made)
    monkeypatch.setattr(context, "get_schedule", lambda: made.schedule)
    monkeypatch.setattr(context, "get_parallel", lambda: made.parallel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: made.capability)
    monkeypatch.delenv("DSV41_SPARSE_KERNELS", raising=False)
    return made


def test_gathered_facts_of_a_good_engine(engine):
    facts = requirements.gather(engine.runner)
    assert unmet(facts) == []
    assert facts == dataclasses.replace(HOPPER, geometry=facts.geometry, deepgemm_error=facts.deepgemm_error)
    assert facts.geometry.source_layer == 20 and facts.geometry.topk == 512


@pytest.mark.parametrize(
    "path,value,what",
    [
        ("runner.model_config.hf_text_config.model_type", "deepseek_v4", "model_type 'deepseek_v4'"),
        ("runner.model_config.hf_text_config.index_n_heads", 24, "index_n_heads 24"),
        ("runner.token_to_kv_pool.split", True, "split layout"),
        ("runner.token_to_kv_pool.page8", True, "page-8 layout"),
        ("runner.enable_hisparse", True, "HiSparse"),
        ("overlap.enable_two_batch_overlap", True, "two-batch overlap"),
        ("kernel.dsa_topk_backend", "torch", "--dsa-topk-backend torch"),
        ("kernel.prefill_attention_backend", "triton", "triton"),
        ("schedule.chunked_prefill_size", -1, "--chunked-prefill-size -1"),
        ("parallel.pp_size", 4, "pipeline parallelism over 4 ranks"),
        ("capability", (7, 5), "compute capability 7.5"),
    ],
)
def test_gathered_facts_reach_their_requirement(engine, path, value, what):
    *owners, name = path.split(".")
    owner = engine
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    failures = unmet(requirements.gather(engine.runner))
    assert len(failures) == 1 and what in failures[0].found


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_context_parallel_prefill_is_served(engine, capability):
    engine.parallel.attn_cp_size, engine.capability = 8, capability
    engine.parallel.enable_prefill_cp, engine.parallel.cp_strategy = True, "interleave"
    assert unmet(requirements.gather(engine.runner)) == []


def test_gathered_decode_context_parallelism_and_forced_kernels(engine, monkeypatch):
    engine.parallel.dcp_size = 2
    assert unmet(requirements.gather(engine.runner)) == []
    engine.parallel.dcp_enabled = True
    assert "decode context parallelism" in unmet(requirements.gather(engine.runner))[0].found
    engine.parallel.dcp_size, engine.parallel.dcp_enabled = 1, False
    monkeypatch.setenv("DSV41_SPARSE_KERNELS", "fastest")
    assert "DSV41_SPARSE_KERNELS=fastest" in unmet(requirements.gather(engine.runner))[0].found
