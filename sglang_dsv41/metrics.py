"""What the sparse path does, as Prometheus series beside SGLang's own (``--enable-metrics``).

All counts come from lengths that SGLang keeps on the host; nothing is read from the device. An extend is counted where
the consumers run. A decode or verify step is counted around ``ModelRunner.forward``, because a CUDA graph's replay runs
no Python of ours. Without ``--enable-metrics`` nothing here is imported.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .geometry import CandidateGeometry

if TYPE_CHECKING:
    from .audit import RowFindings

logger = logging.getLogger(__name__)

MODES = ("decode", "verify", "extend")
_SHARES = (0.0, 0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
# Powers of two around what bf16 rounding makes (audit.ROUNDING, 2**-8).
_DIFFERENCES = (0.0, 2**-12, 2**-10, 2**-9, 2**-8, 2**-7, 2**-6, 2**-4, 2**-2, 1.0)


def counts_of(lens: np.ndarray, geometry: CandidateGeometry) -> tuple[int, int, int]:
    """(rows, candidate blocks scored, visible positions not scored) of rows that see ``lens`` positions, one layer."""
    lens = np.maximum(lens, 0)
    size = geometry.block_size
    seen = -(-lens // size)
    blocks = np.minimum(seen, geometry.topk_blocks)
    # Only the newest block, which is always scored, can be partial.
    scored = np.where(seen > geometry.topk_blocks, (blocks - 1) * size + (lens - 1) % size + 1, lens)
    return len(lens), int(blocks.sum()), int((lens - scored).sum())


@functools.lru_cache(maxsize=8)
def extend_counts(
    seq_lens: tuple[int, ...],
    rows_per_request: tuple[int, ...],
    ratio: int,
    geometry: CandidateGeometry,
    stride: int = 1,
) -> tuple[int, int, int]:
    """``counts_of`` the last ``rows_per_request`` tokens of requests of ``seq_lens`` tokens, every ``stride``-th from the
    newest back. The consumers of a step ask for the same."""
    ends = [length - stride * np.arange(rows) for length, rows in zip(seq_lens, rows_per_request, strict=True)]
    return counts_of(np.concatenate(ends) // ratio, geometry) if ends else (0, 0, 0)


class Metrics:
    """The series of one process.

    Args:
        labels: label names and values of every series.
        geometry: candidate geometry of the model.
        counts_rows: whether this rank counts rows; ranks that do the same work would count them again.
        counts_shared: whether it also counts those that every context-parallel rank has: of all steps but the extends
            whose rows are dealt to the ranks.
        cp_size: context-parallel ranks of prefill.
        audited: whether the audit's series are made.
        registry: a ``prometheus_client`` registry; None: the default one, which SGLang's endpoint collects.

    Every series is there from the start at 0, so that a rate or an alarm needs no first event.
    """

    def __init__(
        self,
        labels: dict[str, str],
        geometry: CandidateGeometry,
        *,
        counts_rows: bool = True,
        counts_shared: bool = True,
        cp_size: int = 1,
        audited: bool = False,
        registry: Any | None = None,
    ) -> None:
        # Its value class is chosen by PROMETHEUS_MULTIPROC_DIR when it is imported: SGLang's launcher has set it by now.
        from prometheus_client import REGISTRY, Counter, Histogram

        self.geometry, self.counts_rows = geometry, counts_rows
        self.counts_shared, self.cp_size = counts_shared, cp_size
        self.labels = {name: str(value) for name, value in labels.items()}
        registry = REGISTRY if registry is None else registry

        def make(kind: Any, name: str, text: str, own: tuple[str, ...], **options: Any) -> Any:
            return kind(f"sglang:dsv41_sparse_{name}", text, [*self.labels, *own], registry=registry, **options)

        self._rows: dict[str, tuple] = {}
        if counts_rows:
            series = (
                make(Counter, "rows_total", "Rows whose candidates were scored, once a consumer layer.", ("mode",)),
                make(Counter, "blocks_scored_total", "Candidate blocks scored, over rows and layers.", ("mode",)),
                make(
                    Counter,
                    "positions_skipped_total",
                    "Visible positions not scored, over rows and layers; dense scoring skips none.",
                    ("mode",),
                ),
            )
            self._rows = {mode: tuple(s.labels(**self.labels, mode=mode) for s in series) for mode in MODES}
        self._audit: dict[int, dict[str, Any]] = {}
        self._failures: dict[tuple[int, str], Any] = {}
        if audited:
            from .audit import CHECKS

            rows = make(Counter, "audit_rows_total", "Extend rows that the audit scored again.", ("layer",))
            failures = make(Counter, "audit_failures_total", "Audited rows that failed a check.", ("layer", "check"))
            measures = {
                "selection_overlap": ("Share of a row's picks that a dense score confirms.", _SHARES),
                "block_overlap": ("Share of a source's published blocks that a dense score confirms.", _SHARES),
                "candidate_recall": ("Share of a consumer's dense top-k that lies in its candidates.", _SHARES),
                "logit_difference": (
                    "Largest difference of a sparse and a dense logit, in units of the row's largest sum of |head scores|.",
                    _DIFFERENCES,
                ),
            }
            made = {
                name: make(Histogram, f"audit_{name}", text, ("layer",), buckets=buckets)
                for name, (text, buckets) in measures.items()
            }
            source, consumers = geometry.source_layer, geometry.consumer_layers
            for layer in (source, *consumers):
                here = {**self.labels, "layer": str(layer)}
                absent = ("candidate_recall", "logit_difference") if layer == source else ("block_overlap",)
                self._audit[layer] = {n: h.labels(**here) for n, h in made.items() if n not in absent}
                self._audit[layer]["rows"] = rows.labels(**here)
                for check in CHECKS:
                    if check not in absent:
                        self._failures[layer, check] = failures.labels(**here, check=check)

    def add(self, mode: str, rows: int, blocks: int, skipped: int, layers: int = 1) -> None:
        """Count one step, or one layer of it."""
        for counter, amount in zip(self._rows[mode], (rows, blocks, skipped), strict=True):
            counter.inc(amount * layers)

    def count_extend(self, inputs: Any) -> None:
        """Count one consumer's call on SGLang's ``PrefillInputs``, from its lists of lengths on the host.

        Of a context-parallel rank's rows the lists tell every ``cp_size``-th position, not which one is the newest: a row
        is taken to see up to ``cp_size - 1`` tokens more than it does.
        """
        if not self.counts_rows or inputs.seq_lens_cpu is None or inputs.rows_per_request is None:
            return
        dealt = inputs.req_rows is None
        if not dealt and not self.counts_shared:
            return
        lens, rows = tuple(inputs.seq_lens_cpu), tuple(inputs.rows_per_request)
        stride = self.cp_size if dealt else 1
        self.add("extend", *extend_counts(lens, rows, inputs.compress_ratio, self.geometry, stride))

    def count_audit(self, layer: int, findings: Sequence[RowFindings]) -> None:
        """Count what an audit of rows of one layer found."""
        series = self._audit[layer]
        series["rows"].inc(len(findings))
        for row in findings:
            for name, value in row.measures.items():
                series[name].observe(value)
            for check in row.failed:
                self._failures[layer, check].inc()


def step_lens(batch: Any) -> tuple[str, int, np.ndarray | None] | None:
    """(mode, rows, tokens that each row sees or None where the host does not know) of a decode or verify ``ForwardBatch``;
    None for any other step, and for a rank that idles."""
    mode = batch.forward_mode
    if not (mode.is_decode() or mode.is_target_verify()) or not batch.batch_size:
        return None
    tokens = batch.seq_lens_cpu
    tokens = None if tokens is None else np.asarray(tokens, dtype=np.int64)[: batch.batch_size]
    if mode.is_decode():
        # The length counts the token that the step computes.
        return "decode", batch.batch_size, tokens
    rows = batch.input_ids.shape[0]
    drafts, rest = divmod(rows, batch.batch_size)
    # Ragged groups: which request has how many rows is on the device.
    if tokens is None or rest:
        return "verify", rows, None
    # The lengths end before the draft tokens, which are rows in a chain.
    return "verify", rows, (tokens[:, None] + np.arange(1, drafts + 1)).reshape(-1)


def graph_skips(runner: Any, batch: Any, ratio: int) -> bool:
    """Whether the decode graph that serves ``batch`` is one in which the consumers of ``ratio`` score no candidates."""
    graphs = getattr(runner, "decode_cuda_graph_runner", None)
    variants = getattr(graphs, "attention_graph_variants", None)
    if variants is None:
        return False
    from .graph_variants import ALL, RATIO_2, UNFILTERED

    label = variants.select(batch)
    # In the last the layers of ratio 2 score none.
    return label in (ALL, UNFILTERED) or (ratio == 2 and label == RATIO_2)


def count_steps(runner: Any, metrics: Metrics) -> None:
    """Count each decode and verify step of a model runner; idempotent.

    The rows are those of the batch, without a graph's padding. Where the host does not know the lengths (speculative
    decoding whose lengths stay on the device, ragged drafts) only the rows are counted.
    """
    forward: Callable[..., Any] = runner.forward
    if not (metrics.counts_rows and metrics.counts_shared) or getattr(forward, "counts_steps", False):
        return
    layers, ratio = len(metrics.geometry.consumer_layers), metrics.geometry.ratio

    @functools.wraps(forward)
    def counted(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Before the step: SGLang pads an eager batch in place.
        step = step_lens(forward_batch)
        skips = step is not None and graph_skips(runner, forward_batch, ratio)
        output = forward(forward_batch, *args, **kwargs)
        if step is not None and not (skips and output.can_run_graph):
            mode, rows, tokens = step
            counts = (rows, 0, 0) if tokens is None else counts_of(tokens // ratio, metrics.geometry)
            metrics.add(mode, *counts, layers=layers)
        return output

    counted.counts_steps = True
    runner.forward = counted


@functools.cache
def _made(
    labels: tuple[tuple[str, str], ...],
    geometry: CandidateGeometry,
    counts_rows: bool,
    audited: bool,
    counts_shared: bool,
    cp_size: int,
) -> Metrics:
    """One set a process: a registry takes each name once."""
    return Metrics(
        dict(labels),
        geometry,
        counts_rows=counts_rows,
        counts_shared=counts_shared,
        cp_size=cp_size,
        audited=audited,
    )


def server_metrics(geometry: CandidateGeometry, *, audited: bool) -> Metrics | None:
    """The series of this process of a server, None without ``--enable-metrics``.

    Labels are SGLang's. Rows are counted by the ranks whose statistics SGLang logs, those that context parallelism deals
    out by the rank that has them; audited rows by every rank.
    """
    from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

    observability, parallel = get_observability(), get_parallel()
    if not observability.enable_metrics:
        return None
    labels = {
        "model_name": get_serving().served_model_name,
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(observability.extra_metric_labels or {})
    everywhere = bool(observability.enable_metrics_for_all_schedulers)
    return _made(
        tuple((name, str(value)) for name, value in labels.items()),
        geometry,
        parallel.attn_tp_rank == 0 or everywhere,
        audited,
        parallel.attn_cp_rank == 0 or everywhere,
        parallel.attn_cp_size,
    )
