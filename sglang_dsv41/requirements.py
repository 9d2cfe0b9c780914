"""Every requirement of the backend, checked once when the engine starts.

``EngineFacts`` is what was found; ``unmet`` compares it with what is needed and names, for each failure, what was
found, what is needed and what to change. There is no fall-back to dense scoring: a requirement not met ends the start.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from . import BACKEND_NAME
from .geometry import HEAD_DIM, SELECT_MAX_COLUMNS, CandidateGeometry, GeometryError
from .kernels import KERNEL_SETS, kernel_set_name

BACKEND = f"--attention-backend {BACKEND_NAME}"
# SGLang's DeepSeek-V4 attention metadata asserts one of these, at its first step.
INDEX_TOPKS = (512, 1024)
# The portable scoring kernel holds a tile of all heads in registers.
MAX_HEADS = 128
# DeepGEMM: kernel blocks a row, and bytes a page stride must be a multiple of.
DEEPGEMM_MAX_BLOCKS = 4096
DEEPGEMM_STRIDE = 512
# SGLang's sparse table asserts this candidate block when the backend is made.
SM100_CANDIDATE_BLOCK = 8


@dataclasses.dataclass
class EngineFacts:
    """What the engine is, as far as it is known; None where it is not known yet (before the pool exists).

    Attributes:
        model_type: ``model_type`` of the text config.
        geometry: the candidate geometry, or None with ``geometry_error`` saying why.
        platform: "cuda", "hip", "npu", "cpu", ...
        capability: CUDA compute capability.
        deepgemm_error: why DeepGEMM's sparse entry points cannot be used, None if they can.
        pool_error: why the index-K pool cannot be read as page-planar MXFP4, None if it can.
        index_page: positions an index-K page of the source's ratio holds.
        pool_stride: bytes from one index-K page to the next.
        topk_backend: SGLang's ``--dsa-topk-backend``.
        chunked_prefill_size: SGLang's ``--chunked-prefill-size``, <= 0 when off.
        dcp_size, pp_size: ranks of decode context and pipeline parallelism.
        two_batch_overlap, hisparse: features that bypass or replace the index path.
        other_phase: the backend of the phase that is not ours, "dsv4" or ours.
        forced_kernels: the ``DSV41_SPARSE_KERNELS`` in force.
    """

    model_type: str | None = None
    geometry: CandidateGeometry | None = None
    geometry_error: str | None = None
    platform: str = "cuda"
    capability: tuple[int, int] | None = None
    deepgemm_error: str | None = None
    pool_error: str | None = None
    index_page: int | None = None
    pool_stride: int | None = None
    topk_backend: str = "sgl-kernel"
    chunked_prefill_size: int | None = None
    dcp_size: int = 1
    pp_size: int = 1
    two_batch_overlap: bool = False
    hisparse: bool = False
    other_phase: str = "dsv4"
    forced_kernels: str | None = None


@dataclasses.dataclass(frozen=True)
class Unmet:
    """One requirement that is not met."""

    what: str
    found: str
    needed: str
    change: str

    def __str__(self) -> str:
        return f"{self.what}: found {self.found}; needed: {self.needed}. {self.change}"


class RequirementsError(RuntimeError):
    """All unmet requirements of an engine in one message; ``unmet`` has them one by one."""

    def __init__(self, unmet: list[Unmet]) -> None:
        self.unmet = unmet
        lines = "\n".join(f"  {i}. {item}" for i, item in enumerate(unmet, 1))
        count = "1 requirement is" if len(unmet) == 1 else f"{len(unmet)} requirements are"
        super().__init__(
            f"{BACKEND} cannot serve this engine; {count} not met:\n{lines}\n"
            "`dsv41-sparse doctor --model-path MODEL` checks them before a start; without the option SGLang uses its own backend."
        )


def kernel_set_of(facts: EngineFacts) -> str | None:
    """The kernel set the facts lead to, or None where no set serves the device."""
    if facts.forced_kernels is not None:
        return facts.forced_kernels if facts.forced_kernels in KERNEL_SETS else None
    return kernel_set_name(facts.capability) if facts.platform == "cuda" else None


def unmet(facts: EngineFacts) -> list[Unmet]:
    """Every requirement that ``facts`` does not meet, in the order a user would fix them."""
    return [*_model(facts), *_device(facts), *_pool(facts), *_selection(facts), *_serving(facts)]


def check(facts: EngineFacts) -> None:
    """Raise one ``RequirementsError`` that names every unmet requirement."""
    failures = unmet(facts)
    if failures:
        raise RequirementsError(failures)


def _model(facts: EngineFacts) -> list[Unmet]:
    if facts.model_type not in ("deepseek_v41", "deepseek_v41_text"):
        return [
            Unmet(
                "model",
                f"model_type {facts.model_type!r}",
                "a two-level DeepSeek-V4.1 model (model_type 'deepseek_v41')",
                "Serve a DeepSeek-V4.1 checkpoint, or drop the option.",
            )
        ]
    if facts.geometry is None:
        return [
            Unmet(
                "candidate blocks",
                facts.geometry_error or "no candidate geometry",
                "candidate_source_layer_id, candidate_topk_blocks and candidate_block_size of a two-level model, one "
                "compress ratio for source and consumers, blocks a multiple of 8 positions",
                "Use the config.json of the released checkpoint, or drop the option for models without candidate blocks.",
            )
        ]
    geometry, failures = facts.geometry, []
    if geometry.head_dim != HEAD_DIM:
        failures.append(
            Unmet(
                "index head",
                f"index_head_dim {geometry.head_dim}",
                str(HEAD_DIM),
                "Use a released checkpoint's config.",
            )
        )
    if not 16 <= geometry.heads <= MAX_HEADS or geometry.heads & (geometry.heads - 1):
        failures.append(
            Unmet(
                "index heads",
                f"index_n_heads {geometry.heads}",
                f"a power of two, at least 16 and at most {MAX_HEADS} (the tile of the scoring kernels)",
                "Use a released checkpoint's config.",
            )
        )
    return failures


def _device(facts: EngineFacts) -> list[Unmet]:
    if facts.forced_kernels is not None and facts.forced_kernels not in KERNEL_SETS:
        return [
            Unmet(
                "kernel set",
                f"DSV41_SPARSE_KERNELS={facts.forced_kernels}",
                f"one of {', '.join(KERNEL_SETS)}",
                "Correct or unset DSV41_SPARSE_KERNELS.",
            )
        ]
    name = kernel_set_of(facts)
    if name is None:
        found = f"platform {facts.platform!r}"
        if facts.platform == "cuda":
            found = "no CUDA device" if facts.capability is None else "compute capability %d.%d" % facts.capability
        return [
            Unmet(
                "GPU",
                found,
                "an NVIDIA GPU of compute capability 8.0 or newer",
                "Run on an H100, H200, H20 or newer (SGLang's own attention has no kernels for this model on 8.x), or use "
                "--attention-backend dsv4.",
            )
        ]
    found = "no CUDA device" if facts.capability is None else "compute capability %d.%d" % facts.capability
    if name == "hopper" and facts.capability != (9, 0):
        return [Unmet("GPU", found, "compute capability 9.0 for the Hopper kernels", "Unset DSV41_SPARSE_KERNELS.")]
    if name != "blackwell":
        return []
    failures = []
    if facts.capability is None or facts.capability[0] != 10:
        # What DeepGEMM needs besides does not matter elsewhere.
        needed = "compute capability 10.x for the DeepGEMM kernels"
        return [Unmet("GPU", found, needed, "Unset DSV41_SPARSE_KERNELS.")]
    if facts.deepgemm_error is not None:
        failures.append(
            Unmet(
                "DeepGEMM",
                facts.deepgemm_error,
                "its paged sparse MQA logits for SM100 (sgl-deep-gemm >= 0.2.0, SGLANG_ENABLE_JIT_DEEPGEMM on)",
                "Install the sgl-deep-gemm that SGLang pins and leave SGLANG_ENABLE_JIT_DEEPGEMM at 1.",
            )
        )
    if facts.geometry is not None:
        if facts.geometry.block_size != SM100_CANDIDATE_BLOCK:
            failures.append(
                Unmet(
                    "candidate block",
                    f"candidate_block_size {facts.geometry.block_size}",
                    f"{SM100_CANDIDATE_BLOCK} on SM100 (SGLang's block choice there has no other)",
                    "Use a released checkpoint's candidate_block_size.",
                )
            )
        blocks = facts.geometry.kernel_blocks
        if blocks > DEEPGEMM_MAX_BLOCKS or blocks % 4:
            failures.append(
                Unmet(
                    "blocks a row",
                    f"{blocks} kernel blocks of {facts.geometry.kernel_block} positions",
                    f"a multiple of 4, at most {DEEPGEMM_MAX_BLOCKS} (DeepGEMM)",
                    "Use a released checkpoint's candidate_topk_blocks and candidate_block_size.",
                )
            )
    if facts.pool_stride is not None and facts.pool_stride % DEEPGEMM_STRIDE:
        failures.append(
            Unmet(
                "index-K page stride",
                f"{facts.pool_stride} B",
                f"a multiple of {DEEPGEMM_STRIDE} B (DeepGEMM on SM100)",
                "Leave the index page size at SGLang's choice for SM100 (128 positions).",
            )
        )
    return failures


def _pool(facts: EngineFacts) -> list[Unmet]:
    failures = []
    if facts.pool_error is not None:
        failures.append(
            Unmet(
                "index-K cache",
                facts.pool_error,
                "MXFP4 (E2M1 with one UE8M0 exponent per 32) in SGLang's page-planar layout",
                "Unset the options and SGLANG_* variables that choose another index cache layout.",
            )
        )
    if facts.index_page is not None and facts.geometry is not None:
        kernel_block = facts.geometry.kernel_block
        if facts.index_page <= 0 or facts.index_page % kernel_block:
            failures.append(
                Unmet(
                    "index-K page",
                    f"{facts.index_page} positions",
                    f"a multiple of the kernel block of {kernel_block} positions",
                    "Leave the index page size at SGLang's own choice (64 on Hopper, 128 on SM100).",
                )
            )
    return failures


def _selection(facts: EngineFacts) -> list[Unmet]:
    failures = []
    if facts.geometry is not None:
        geometry = facts.geometry
        if geometry.columns > SELECT_MAX_COLUMNS or geometry.columns % 8:
            failures.append(
                Unmet(
                    "candidate columns",
                    f"{geometry.topk_blocks} blocks of {geometry.block_size} = {geometry.columns} columns a row",
                    f"a multiple of 8, at most {SELECT_MAX_COLUMNS} (SGLang's compact top-k kernel)",
                    "Use a released checkpoint's candidate_topk_blocks and candidate_block_size.",
                )
            )
        if geometry.topk not in INDEX_TOPKS or geometry.topk > geometry.columns:
            failures.append(
                Unmet(
                    "index top-k",
                    f"index_topk {geometry.topk}",
                    f"512 or 1024 (SGLang's attention takes no other), at most a row's {geometry.columns} columns",
                    "Use a released checkpoint's index_topk.",
                )
            )
    if facts.topk_backend != "sgl-kernel":
        failures.append(
            Unmet(
                "top-k backend",
                f"--dsa-topk-backend {facts.topk_backend}",
                "sgl-kernel: the selection of compact rows has one implementation",
                "Drop --dsa-topk-backend.",
            )
        )
    return failures


def _serving(facts: EngineFacts) -> list[Unmet]:
    failures = []
    for size, name, flag in (
        (facts.dcp_size, "decode context parallelism", "--dcp-size"),
        (facts.pp_size, "pipeline parallelism", "--pp-size"),
    ):
        if size > 1:
            failures.append(
                Unmet(
                    "parallel mode",
                    f"{name} over {size} ranks",
                    "one rank of it; tensor, expert and data parallelism and context-parallel prefill are not affected",
                    f"Drop {flag}, or use --attention-backend dsv4.",
                )
            )
    for on, name, flag in (
        (facts.two_batch_overlap, "two-batch overlap", "--enable-two-batch-overlap"),
        (facts.hisparse, "HiSparse", "--enable-hisparse"),
    ):
        if on:
            failures.append(Unmet("feature", name, "off: it splits the rows that share a schedule", f"Drop {flag}."))
    if facts.other_phase not in ("dsv4", BACKEND_NAME):
        failures.append(
            Unmet(
                "backend of the other phase",
                facts.other_phase,
                f"dsv4 or {BACKEND_NAME} for both prefill and decode",
                "Drop --prefill-attention-backend or --decode-attention-backend, or set it to one of the two.",
            )
        )
    if facts.chunked_prefill_size is not None and facts.chunked_prefill_size <= 0:
        failures.append(
            Unmet(
                "chunked prefill",
                f"--chunked-prefill-size {facts.chunked_prefill_size}",
                "a positive chunk: the row buffers are sized by it once, at start",
                "Set --chunked-prefill-size, for example 8192.",
            )
        )
    return failures


# ---- gathering ----


def model_facts(config: Any) -> dict[str, Any]:
    """``model_type``, ``geometry`` and ``geometry_error`` of a Hugging Face text config."""
    facts: dict[str, Any] = {"model_type": getattr(config, "model_type", None)}
    try:
        facts["geometry"] = CandidateGeometry.from_config(config)
    except GeometryError as error:
        facts["geometry_error"] = str(error)
    return facts


def device_facts(device_index: int | None = None) -> dict[str, Any]:
    """``platform``, ``capability`` and ``deepgemm_error`` of this process's GPU."""
    import torch

    facts: dict[str, Any] = {}
    if torch.version.hip is not None:
        facts["platform"] = "hip"
    if torch.cuda.is_available():
        facts["capability"] = tuple(torch.cuda.get_device_capability(device_index))
    facts["deepgemm_error"] = deepgemm_error(facts.get("capability"))
    return facts


def deepgemm_error(capability: tuple[int, int] | None) -> str | None:
    """Why DeepGEMM's sparse MQA logits cannot run at ``capability``, None if they can.

    An installed DeepGEMM exposes the entry points on every GPU and asserts inside them, so the capability is asked
    first and the names only after.
    """
    if capability is None or capability[0] != 10:
        return "no SM100 GPU (DeepGEMM's sparse MQA logits assert compute capability 10.x)"
    try:
        from sglang.srt.layers.deep_gemm_wrapper.configurer import DEEPGEMM_PAGED_SPARSE_MQA_LOGITS
    except ImportError as error:
        return f"SGLang's DeepGEMM wrapper does not import: {error}"
    if not DEEPGEMM_PAGED_SPARSE_MQA_LOGITS:
        return "a DeepGEMM without them, or SGLANG_ENABLE_JIT_DEEPGEMM off"
    return None


def pool_facts(pool: Any, geometry: CandidateGeometry | None) -> dict[str, Any]:
    """``pool_error``, ``index_page`` and ``pool_stride`` of SGLang's token-to-KV pool at the source layer."""
    if geometry is None:
        return {}
    layer = geometry.source_layer
    try:
        if pool.low_ratio_index_k_is_split(layer):
            return {"pool_error": "payload and scales in separate buffers (split layout)"}
        if pool.low_ratio_index_k_page8(layer):
            return {"pool_error": "row-group pages of 8 positions (page-8 layout)"}
        page = int(pool.get_index_k_page_size(geometry.ratio))
        buffer = pool.get_index_k_with_scale_buffer(layer)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        return {"pool_error": f"{type(pool).__name__} holds no index K for layer {layer} ({error!r})"}
    facts = {"index_page": page, "pool_stride": buffer.stride(0) * buffer.element_size()}
    import torch

    if buffer.dtype != torch.uint8 or buffer.dim() != 2 or buffer.shape[1] != page * 68:
        facts["pool_error"] = (
            f"{buffer.dtype} pages of shape {tuple(buffer.shape[1:])} for {page} positions, not {page} * 68 bytes"
        )
    return facts


def gather(model_runner: Any) -> EngineFacts:
    """The facts of a SGLang ``ModelRunner`` whose pools exist."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.runtime_context import attention_backends, get_exec, get_parallel, get_schedule

    from . import envs

    facts = EngineFacts(
        **model_facts(model_runner.model_config.hf_text_config),
        **device_facts(getattr(model_runner, "gpu_id", None)),
        topk_backend=DSATopKBackend.resolve(model_runner).value,
        chunked_prefill_size=get_schedule().chunked_prefill_size,
        forced_kernels=envs.forced_kernels(),
        two_batch_overlap=get_exec().overlap.enable_two_batch_overlap,
        # Its coordinator is made later; the switch is known.
        hisparse=model_runner.enable_hisparse,
    )
    for name, value in pool_facts(model_runner.token_to_kv_pool, facts.geometry).items():
        setattr(facts, name, value)
    parallel = get_parallel()
    facts.dcp_size = parallel.dcp_size if parallel.dcp_enabled else 1
    facts.pp_size = parallel.pp_size
    facts.other_phase = next((name for name in attention_backends() if name != BACKEND_NAME), BACKEND_NAME)
    return facts
