"""Decode graphs for short contexts on Hopper: index layers skip the scoring where all positions are selected anyway.

A layer of compress ratio ``r`` sees ``length // r`` positions and selects ``index_topk`` of them, so up to ``index_topk *
r`` tokens it selects every one. SGLang captures such variants of each decode graph, and picks one a batch by its longest
request (``srt/layers/attention/graph_variants.py``, ``create_dsv41_candidate_graph_variants``); below compute capability
10 it makes none. Nothing else in them is of that capability: the skipped layers read indices that one Triton kernel fills
at the head of the graph (``DeepseekV4AttnBackend.init_forward_metadata_in_graph`` and ``_low_ratio_index_topk``), and
their keys are written all the same.

Ours leave out ``candidate_unfiltered``, in which consumers score densely up to the candidate span: our consumers score no
more than the candidates that are there.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from sglang.srt.layers.attention.graph_variants import DSV41_CANDIDATE_FILTERED, Dsv41CandidateGraphVariants

from . import envs

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)
# SGLang's own labels: its layers skip by them (``runner_utils/capture_mode.py``).
ALL = "candidate_all"
RATIO_2 = "candidate_c2_all"
UNFILTERED = "candidate_unfiltered"  # not among ours


def short_context_variants(model_runner: Any, capture_forward_mode: Any) -> Dsv41CandidateGraphVariants | None:
    """The variants of a decode graph runner, None where SGLang's one graph a batch size stays.

    Never for verify, whose rows need a top-k each.
    """
    config = model_runner.model_config.hf_text_config
    if not (
        capture_forward_mode.is_decode()
        and model_runner.device == "cuda"
        and torch.version.hip is None
        and serves_decode(model_runner.attn_backend)
        and getattr(config, "model_type", None) == "deepseek_v41"
        and getattr(config, "candidate_source_layer_id", -1) >= 0
        and torch.cuda.get_device_capability(model_runner.gpu_id) == CAPABILITY
        and envs.short_graphs()
    ):
        return None
    limits = graph_limits(config)
    if not limits:
        return None
    logger.info(
        "dsv41-sparse: decode graphs for short contexts, by the longest request: %s. %s=0 makes none.",
        ", ".join(f"{label} up to {limit} tokens" for label, limit in limits),
        envs.SHORT_GRAPHS,
    )
    return Dsv41CandidateGraphVariants(
        graph_limits=limits, capture_labels=(*(label for label, _ in limits), DSV41_CANDIDATE_FILTERED)
    )


def serves_decode(backend: Any) -> bool:
    """Whether a runner's attention backend is ours and decode is not left to SGLang."""
    # A backend of ours has loaded its module; for any other there is nothing to import.
    ours = sys.modules.get(f"{__package__}.backend")
    return (
        ours is not None
        and isinstance(backend, ours.SparseCandidates)
        and backend.decode_candidates is backend.candidate_indexer
    )


def graph_limits(config: Any) -> tuple[tuple[str, int], ...]:
    """(label, longest request in tokens) of each variant, ascending; as SGLang's, without ``candidate_unfiltered``."""
    topk, ratios = config.index_topk, {1, 2} & set(config.compress_ratios)
    # Within this many tokens every block is a candidate, whatever the ratio.
    span = config.candidate_topk_blocks * config.candidate_block_size
    if min(topk, span) <= 0 or not ratios:
        return ()
    limits = [(ALL, topk * min(ratios))]
    if ratios == {1, 2}:
        limits.append((RATIO_2, topk * 2))
    kept = []
    for label, limit in limits:
        kept.append((label, min(limit, span)))
        if limit >= span:
            break
    return tuple(kept)
