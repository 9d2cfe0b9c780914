"""The attention backend: SGLang's DeepSeek-V4 backend with our candidate objects in place of its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import DenseBlocksBackend
from sglang.srt.layers.attention.dsv4.v41_indexer.full_topk import FullTopKIndexer
from sglang.srt.runtime_context import (
    attention_backends,
    get_observability,
    get_parallel,
    get_schedule,
    max_speculative_num_draft_tokens,
)

from . import BACKEND_NAME, envs, requirements
from .geometry import CandidateGeometry
from .indexer import SparseCandidateIndexer
from .kernels import KernelSet, make_kernel_set
from .rows import RowBuffers

logger = logging.getLogger(__name__)


class SparseCandidates:
    """What makes a DeepSeek-V4 backend score candidates only; mixed in before the stock class."""

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        facts = requirements.gather(model_runner)
        requirements.check(facts)
        super().__init__(model_runner, *args, **kwargs)
        self.candidate_geometry = geometry = facts.geometry
        self.row_buffers = allocate_rows(self, geometry)
        kernels = make_kernel_set(requirements.kernel_set_of(facts), geometry, self.row_buffers)
        if envs.debug():
            from .kernels.debug import DebugKernels

            logger.warning("%s is set: each kernel is waited for and checked; this server is slow.", envs.DEBUG)
            kernels = DebugKernels(kernels)
        # Either phase may be left to SGLang: --prefill-attention-backend and --decode-attention-backend.
        prefill, decode = (name == BACKEND_NAME for name in attention_backends())
        ours = prefill and envs.dense_extend()
        if ours:
            kernels.prepare_extend()
        prefill_source, full_topk = extend_scorers(self, kernels, geometry, ours=ours)
        metrics = None
        audit_rate = envs.audit_rate() if prefill else 0.0
        if get_observability().enable_metrics:
            from .metrics import count_steps, server_metrics

            metrics = server_metrics(geometry, audited=audit_rate > 0)
            if decode:
                count_steps(model_runner, metrics)
        parts = dict(
            geometry=geometry,
            kernels=kernels,
            buffers=self.row_buffers,
            token_to_kv_pool=self.token_to_kv_pool,
            page_size=self.page_size,
            prefill_source=prefill_source,
            full_topk=full_topk,
            metrics=metrics,
        )
        if audit_rate > 0:
            from .audit import Audit, AuditedIndexer

            audit = Audit(audit_rate, geometry, metrics=metrics)
            self.candidate_indexer = AuditedIndexer(audit=audit, **parts)
        else:
            self.candidate_indexer = SparseCandidateIndexer(**parts)
        if prefill:
            self.prefill_candidates = self.candidate_indexer
        if decode:
            self.decode_candidates = self.full_topk_indexer = self.candidate_indexer
        logger.info(
            "dsv41-sparse: %s. Serves %s. Kernels: %s, index-K pages of %d. "
            "Buffers: %.1f MiB for %d rows, consumers score %d rows a pass. Extends: dense scores by %s.",
            geometry.describe(),
            "prefill and decode" if prefill and decode else "prefill" if prefill else "decode",
            kernels.name,
            facts.index_page,
            self.row_buffers.nbytes / 2**20,
            self.row_buffers.max_rows,
            self.row_buffers.rows_per_pass,
            "our kernels" if prefill_source is None else "SGLang",
        )

    @property
    def low_ratio_prefill_graph(self) -> bool:
        """Whether index layers keep their place in a prefill graph: as SGLang's, which asks for its own class, and where our
        prefill candidates hand the graph's calls to that class (SM100)."""
        ours = getattr(self, "candidate_indexer", None)
        if ours is None or self.prefill_candidates is not ours:
            return super().low_ratio_prefill_graph
        return bool(self.low_ratios) and ours.serves_prefill_graph


class Dsv41SparseAttnBackend(SparseCandidates, DeepseekV4AttnBackend):
    """``--attention-backend dsv41-sparse`` over SGLang's FlashMLA DeepSeek-V4 attention."""


def stock_candidates(original: Callable[..., tuple[Any, Any]], **arguments: Any) -> tuple[Any, Any]:
    """SGLang's (prefill, decode) candidate objects: what ``original`` makes of ``arguments``, but the dense ones past compute
    capability 10.x, where it would make those of SM100 and end the start."""
    if (requirements.device_facts().get("capability") or (0, 0))[0] <= 10:
        return original(**arguments)
    del arguments["page_size"]
    dense = DenseBlocksBackend(**arguments, use_deep_gemm_prefill=False)
    return dense, dense


def extend_scorers(
    backend: Any, kernels: KernelSet, geometry: CandidateGeometry, *, ours: bool = False
) -> tuple[Any | None, Any | None]:
    """SGLang's prefill candidates and full top-k indexer, which score the source and the full layers of an extend; None
    for each where ``ours`` do (``DSV41_SPARSE_DENSE_EXTEND``).

    SGLang takes DeepGEMM's kernels from compute capability 10 on, and they assert 10.x; so the kernel set says whether
    they are to be had, and where not SGLang's torch way scores.
    """
    if kernels.deep_gemm_extend:
        return backend.prefill_candidates, backend.full_topk_indexer
    if ours:
        return None, None
    source = DenseBlocksBackend(
        token_to_kv_pool=backend.token_to_kv_pool,
        req_to_token=backend.req_to_token,
        candidate_topk_blocks=geometry.topk_blocks,
        candidate_block_size=geometry.block_size,
        use_deep_gemm_prefill=False,
    )
    full_topk = FullTopKIndexer(
        token_to_kv_pool=backend.token_to_kv_pool,
        req_to_token=backend.req_to_token,
        use_deep_gemm_prefill=False,
        use_deep_gemm_decode=False,
    )
    return source, full_topk


def allocate_rows(backend: Any, geometry: CandidateGeometry) -> RowBuffers:
    """Row buffers for the server's own limits: its requests, draft tokens, prefill chunk and context."""
    # SGLang captures and pads decode batches to whole attention-TP and context-parallel groups, past its own limit of
    # requests too.
    group = get_parallel().attn_tp_size * get_parallel().attn_cp_size
    requests = -(-backend.req_to_token.shape[0] // group) * group
    # Adaptive speculation may verify more draft tokens later than it starts with.
    decode_rows = requests * (max_speculative_num_draft_tokens() or 1)
    # A mixed chunk adds the running requests' rows.
    extend_rows = get_schedule().chunked_prefill_size + requests
    # Whole KV pages: the dense pass reads SGLang's page table, which is that wide. It also serves the full top-k layers,
    # whose ratio may be smaller than the source's.
    ratio = min(backend.low_ratios, default=geometry.ratio)
    context = -(-backend.req_to_token.shape[1] // backend.page_size) * backend.page_size // ratio
    return RowBuffers(
        geometry,
        max_rows=max(decode_rows, extend_rows),
        scratch_bytes=envs.scratch_bytes(),
        max_context=context,
        dense_rows=max(decode_rows, extend_rows) if envs.dense_extend() else decode_rows,
        device=backend.device,
    )


@functools.cache
def sparse_backend_class(base: type) -> type:
    """Our backend over ``base``, SGLang's DeepSeek-V4 backend or one of its attention variants (SM100)."""
    if base is DeepseekV4AttnBackend:
        return Dsv41SparseAttnBackend
    return type(f"Dsv41Sparse{base.__name__}", (SparseCandidates, base), {"__doc__": SparseCandidates.__doc__})


def create_backend(model_runner: Any) -> DeepseekV4AttnBackend:
    """The backend of a runner: ours for the target model, SGLang's own for a draft model.

    Raises:
        RequirementsError: the engine cannot be served; one message names every unmet requirement.
    """
    from sglang.srt.layers.attention.deepseek_v4_trtllm_backend import (
        DeepseekV4MegaAttnBackend,
        DeepseekV4TrtllmAttnBackend,
        create_deepseek_v4_attn_backend,
        is_dsv4_mega_attn_enabled,
        is_dsv4_trtllm_attn_enabled,
    )

    if model_runner.is_draft_worker:
        return create_deepseek_v4_attn_backend(model_runner)
    base = DeepseekV4AttnBackend
    if is_dsv4_trtllm_attn_enabled():
        base = DeepseekV4TrtllmAttnBackend
    elif is_dsv4_mega_attn_enabled():
        base = DeepseekV4MegaAttnBackend
    return sparse_backend_class(base)(model_runner)
