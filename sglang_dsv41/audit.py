"""The audit of a live server (``DSV41_SPARSE_AUDIT``): sampled rows of its extends are scored again, densely, in torch.

The score is the oracle's (``kernels/reference.py``), of the queries and index K that the server used. It tells whether the
kernels did what they promise, not whether candidates suit the model; only ``candidate_recall`` says something of that, and
it fails nothing. Extends run by SGLang's prefill graph are not audited. Without the variable nothing here is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.dsv4.v41_indexer.types import PrefillInputs

from . import envs
from .geometry import INT32_MAX, CandidateGeometry
from .indexer import SparseCandidateIndexer
from .kernels import IndexQueries, KernelSet, PagedKeys
from .kernels.reference import dequantize_keys, index_logits, map_columns, slots_in_pool, table_slots_of
from .rows import SparseRows
from .schedule import CandidateSchedule

if TYPE_CHECKING:
    from .metrics import Metrics

logger = logging.getLogger(__name__)

# Rows of one call, whatever the rate. One is scored at a time, KEYS_AT_ONCE keys at once; that and some tens of bytes a
# visible position are what it takes, less than 128 MiB at a context of 1,048,576.
MAX_ROWS = 4
KEYS_AT_ONCE = 8192
# What SGLang's two bf16 roundings of each head's score can add up to, in units of the largest sum of a row's
# |head scores|. What lies that close to the cut of a top-k counts as tied with it. A unit of |score| would not do: heads
# of both signs can cancel, their roundings do not.
ROUNDING = 2**-8
LEAST = {"selection_overlap": 0.95, "block_overlap": 0.95}
MOST = {"logit_difference": 4 * ROUNDING}
CHECKS = (*LEAST, *MOST, "schedule")
_MEANS = {
    "selection_overlap": "positions were selected that a dense score does not select, or slots that are not theirs",
    "block_overlap": "blocks were published that a dense score does not choose",
    "logit_difference": "the sparse logits are not those of the same positions, scored densely",
    "schedule": "the published block list is not well formed",
}
_ADVICE = (
    "Answers of this server may be wrong. Serve with --attention-backend dsv4 meanwhile; start once with "
    f"{envs.KERNELS}=portable and once with {envs.DEBUG}=1 to see whose kernel it is, and report it (docs/troubleshooting.md)."
)
SECONDS = 60.0  # between two lines on the same thing
REPORT_ROWS = 1024  # audited rows after which a summary comes earlier
_TINY = 1e-30
_LARGEST_DIFFERENCE = 1000.0  # a NaN or infinite one would spoil every later mean


@dataclasses.dataclass(frozen=True)
class RowFindings:
    """What the audit found of one row.

    Attributes:
        measures: a source's ``selection_overlap`` and ``block_overlap``; a consumer's ``selection_overlap``,
            ``candidate_recall`` and ``logit_difference``.
        failed: names of ``CHECKS``.
        problem: what is wrong with the schedule; empty where nothing is.
    """

    measures: dict[str, float]
    failed: tuple[str, ...]
    problem: str = ""


class DenseRow:
    """One row's visible context, scored densely.

    Args:
        queries: of the row, one row.
        keys: the layer's pool.
        rows: the row's call.
        row: which of ``rows``.

    Attributes:
        length: visible positions.
        slots: [length] int64 pool slots, -1 where the page table has none.
        scores: [length] fp32; the lowest finite value for NaN, -inf and positions without a slot.
        scale: largest sum of |head scores| at a position, the unit of ``ROUNDING``.
    """

    def __init__(self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows, row: int) -> None:
        self.length = length = int(rows.lens[row])
        table, device = rows.block_table[row : row + 1], rows.lens.device
        self.slots = torch.empty(length, dtype=torch.int64, device=device)
        self.scores = torch.empty(length, dtype=torch.float32, device=device)
        self.scale = _TINY
        for start in range(0, length, KEYS_AT_ONCE):
            part = slice(start, min(start + KEYS_AT_ONCE, length))
            position = torch.arange(part.start, part.stop, device=device)[None]
            slots = table_slots_of(table, rows.table_slots, position, rows.pool_slots)
            inside, k = slots_in_pool(keys, slots), dequantize_keys(keys, slots)
            self.slots[part] = slots[0]
            self.scores[part] = index_logits(queries.q, queries.weights, k).masked_fill(~inside, -torch.inf)[0]
            sums = index_logits(queries.q, queries.weights.abs(), k).masked_fill(~inside, 0).nan_to_num(0, 0, 0)
            self.scale = max(self.scale, float(sums.amax()))
        finite = self.scores.isfinite()
        self.scores.masked_fill_(~finite, torch.finfo(torch.float32).min)


def schedule_problem(rows: SparseRows, row: int, dense: DenseRow, geometry: CandidateGeometry) -> str:
    """What is wrong with a row's schedule, or an empty string."""
    size, length = geometry.kernel_block, dense.length
    ids = rows.sparse_indices[row].to(torch.int64)
    listed = ids < INT32_MAX
    count = int(listed.sum())
    if not bool(listed[:count].all()):
        return "padding lies between blocks"
    ids = ids[:count]
    if bool(((ids < 0) | (ids * size >= length)).any()):
        return f"a block lies outside the {length} visible positions"
    if bool((ids[1:] <= ids[:-1]).any()):
        return "blocks do not ascend"
    newest = (length - 1) // size
    if length and int(dense.slots[newest * size]) >= 0 and (count == 0 or int(ids[-1]) != newest):
        return f"the newest block, {newest}, is missing"
    end = int((length - ids * size).clamp_max(size).sum())
    if int(rows.end[row]) != end:
        return f"it ends at column {int(rows.end[row])}, its blocks hold {end} positions"
    physical = rows.physical_blocks[row].to(torch.int64)
    if not torch.equal(physical[:count], dense.slots[ids * size] // size) or bool((physical[count:] != -1).any()):
        return "physical blocks are not those of the page table"
    return ""


def candidate_mask(rows: SparseRows, row: int, dense: DenseRow, geometry: CandidateGeometry) -> torch.Tensor:
    """[visible] whether a position lies in the row's scheduled blocks."""
    size = geometry.kernel_block
    ids = rows.sparse_indices[row].to(torch.int64)
    ids = ids[(ids >= 0) & (ids * size < dense.length)]
    positions = (ids[:, None] * size + torch.arange(size, device=ids.device)).flatten()
    mask = torch.zeros(dense.length, dtype=torch.bool, device=ids.device)
    mask[positions[positions < dense.length]] = True
    return mask


def selection_overlap(
    dense: DenseRow, allowed: torch.Tensor, topk: int, positions: torch.Tensor, slots: torch.Tensor | None
) -> float:
    """Share of a row's picks that are among its dense top-k of ``allowed`` [visible], ties included, at their slots; a
    pick too few or too many counts as one that is not."""
    expected = min(topk, int(allowed.sum()))
    chosen = positions >= 0
    picks = positions[chosen].to(torch.int64)
    inside = picks < dense.length
    if slots is not None:
        at = torch.where(inside, picks, 0)
        inside &= slots[: positions.shape[0]][chosen].to(torch.int64) == dense.slots[at]
    if expected == 0:
        return 1.0 if picks.numel() == 0 else 0.0
    best = dense.scores.masked_fill(~allowed, -torch.inf)
    cut = best.topk(expected).values[-1]
    confirmed = picks[inside].unique()
    count = int((best[confirmed] >= cut - ROUNDING * dense.scale).sum())
    return count / max(expected, picks.numel())


def block_overlap(dense: DenseRow, mask: torch.Tensor, geometry: CandidateGeometry) -> float:
    """Share of the dense score's candidate blocks that lie in ``mask`` [visible], ties included."""
    size, length = geometry.block_size, dense.length
    blocks = -(-length // size)
    padded = torch.full((blocks * size,), -torch.inf, device=mask.device)
    padded[:length] = dense.scores
    best = padded.view(blocks, size).amax(1)
    best[-1] = torch.inf
    # A block that has no page cannot be published.
    best.masked_fill_(dense.slots[::size] < 0, -torch.inf)
    expected = min(geometry.topk_blocks, int((best > -torch.inf).sum()))
    published = torch.zeros(blocks * size, dtype=torch.bool, device=mask.device)
    published[:length] = mask
    published = published.view(blocks, size).any(1)
    if expected == 0:
        return 0.0 if bool(published.any()) else 1.0
    confirmed = published & (best >= best.topk(expected).values[-1] - ROUNDING * dense.scale)
    return int(confirmed.sum()) / max(expected, int(published.sum()))


def candidate_recall(dense: DenseRow, mask: torch.Tensor, topk: int) -> float:
    """Share of the row's dense top-k that lies in ``mask`` [visible]; of equal scores at the cut those in it come first."""
    expected = min(topk, dense.length)
    cut = dense.scores.topk(expected).values[-1]
    above, equal = dense.scores > cut, dense.scores == cut
    room = expected - int(above.sum())
    return (int((above & mask).sum()) + min(room, int((equal & mask).sum()))) / expected


def logit_difference(
    dense: DenseRow, rows: SparseRows, row: int, logits: torch.Tensor, geometry: CandidateGeometry
) -> float:
    """Largest |sparse - dense| of the row's compact ``logits`` [columns], in units of ``dense.scale``."""
    columns = torch.arange(logits.shape[0], device=logits.device)[None]
    positions = map_columns(columns, rows.sparse_indices[row : row + 1], geometry.kernel_block)[0].to(torch.int64)
    # A column past the row's end is of no block, or of none that is visible.
    inside = (positions >= 0) & (positions < dense.length)
    positions = positions[inside]
    if positions.numel() == 0:
        return 0.0
    sparse = logits[inside].float()
    # As the dense scores: what is not finite is lowest.
    sparse = torch.where(sparse.isfinite(), sparse, torch.finfo(torch.float32).min)
    largest = float((sparse - dense.scores[positions]).abs().nan_to_num().amax())
    return min(largest / dense.scale, _LARGEST_DIFFERENCE)


def failures(measures: dict[str, float], problem: str) -> tuple[str, ...]:
    """The checks that fail."""
    failed = [
        name for name, value in measures.items() if value < LEAST.get(name, value) or value > MOST.get(name, value)
    ]
    return (*failed, "schedule") if problem else tuple(failed)


class Audit:
    """Samples rows, re-scores them and says what it found: to the log, and to ``metrics``.

    Args:
        rate: share of the rows of each call, in (0, 1]; no call has more than ``MAX_ROWS``.
        geometry: candidate geometry of the model.
        metrics: the process's series, None without ``--enable-metrics``.
        seed: of the sampling, which sees counts of rows only.
        clock: seconds, for the log's rate limit.
    """

    def __init__(
        self,
        rate: float,
        geometry: CandidateGeometry,
        *,
        metrics: Metrics | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate, self.geometry, self.metrics = rate, geometry, metrics
        self._random = np.random.default_rng(seed)
        self._clock = clock
        # (layer, check) -> when its last line was, and failures since.
        self._said: dict[tuple[int, str], tuple[float, int]] = {}
        self._last_report = clock()
        self._rows = self._failed = 0
        self._seen: dict[str, list[float]] = {}
        logger.info(
            "dsv41-sparse audit: a share of %g of the rows of each extend, at most %d a layer and step, is scored again; "
            "each one waits for the GPU.",
            rate,
            MAX_ROWS,
        )

    def sample(self, num_rows: int) -> list[int]:
        """Ascending row numbers, below ``num_rows``, of a call to audit."""
        count = min(int(self._random.binomial(num_rows, self.rate)), MAX_ROWS)
        return sorted(self._random.choice(num_rows, count, replace=False).tolist()) if count else []

    def check(
        self,
        indexer: SparseCandidateIndexer,
        inputs: PrefillInputs,
        rows: SparseRows,
        picked: list[int],
        kept: dict[int, torch.Tensor] | None,
    ) -> list[RowFindings]:
        """Findings of the ``picked`` rows of one call that see a position, logged and counted.

        Args:
            kept: compact logits of the picked rows of a consumer; None: the call is the source's.
        """
        layer, found = inputs.layer_id, []
        try:
            # Of all rows: a product of fewer may round otherwise, and one other FP4 code is another query.
            queries = KernelSet.project(indexer.kernels, inputs)
            keys = indexer._keys(inputs)
            for row in picked:
                dense = DenseRow(queries[row : row + 1], keys, rows, row)
                if dense.length:
                    findings = self._row(inputs, rows, row, dense, None if kept is None else kept[row])
                    self._log_failures(inputs, row, dense.length, findings)
                    found.append(findings)
        except torch.OutOfMemoryError:
            logger.warning("dsv41-sparse audit: no memory to score rows of layer %d again; they are left out", layer)
        if found and self.metrics is not None:
            self.metrics.count_audit(layer, found)
        self._summarise(found)
        return found

    def _row(
        self, inputs: PrefillInputs, rows: SparseRows, row: int, dense: DenseRow, logits: torch.Tensor | None
    ) -> RowFindings:
        geometry = self.geometry
        mask = candidate_mask(rows, row, dense, geometry)
        positions, slots = inputs.out_raw_indices[row], inputs.out_page_indices
        slots = None if slots is None else slots[row]
        if logits is None:
            measures = {
                "selection_overlap": selection_overlap(dense, torch.ones_like(mask), geometry.topk, positions, slots),
                "block_overlap": block_overlap(dense, mask, geometry),
            }
        else:
            measures = {
                "selection_overlap": selection_overlap(dense, mask, geometry.topk, positions, slots),
                "candidate_recall": candidate_recall(dense, mask, geometry.topk),
                "logit_difference": logit_difference(dense, rows, row, logits, geometry),
            }
        problem = schedule_problem(rows, row, dense, geometry)
        return RowFindings(measures, failures(measures, problem), problem)

    def _log_failures(self, inputs: PrefillInputs, row: int, length: int, findings: RowFindings) -> None:
        for check in findings.failed:
            key, now = (inputs.layer_id, check), self._clock()
            said, since = self._said.get(key, (None, 0))
            if said is not None and now - said < SECONDS:
                self._said[key] = (said, since + 1)
                continue
            self._said[key] = (now, 0)
            if check == "schedule":
                found = f"schedule: {findings.problem}"
            else:
                bound = f"at least {LEAST[check]:g}" if check in LEAST else f"at most {MOST[check]:g}"
                found = f"{check} is {findings.measures[check]:.4g} and must be {bound}"
            logger.error(
                "dsv41-sparse audit FAILED: layer %d, request row %s, token %d (%d visible positions): %s: %s.%s %s",
                inputs.layer_id,
                "?" if inputs.req_rows is None else int(inputs.req_rows[row]),
                int(inputs.positions[row]),
                length,
                found,
                _MEANS[check],
                f" {since} more rows failed it since the last such line." if since else "",
                _ADVICE,
            )

    def _summarise(self, found: list[RowFindings]) -> None:
        """Count what was found; a line now and then."""
        for findings in found:
            self._rows += 1
            self._failed += bool(findings.failed)
            for name, value in findings.measures.items():
                self._seen.setdefault(name, []).append(value)
        now = self._clock()
        if not self._rows or (self._rows < REPORT_ROWS and now - self._last_report < SECONDS):
            return
        # The worse end of each.
        lines = [
            f"{name} mean {np.mean(values):.4g}, {'largest' if name in MOST else 'least'} "
            f"{max(values) if name in MOST else min(values):.4g}"
            for name, values in self._seen.items()
        ]
        logger.info("dsv41-sparse audit: %d rows, %d failed; %s.", self._rows, self._failed, "; ".join(lines))
        self._last_report, self._rows, self._failed, self._seen = now, 0, 0, {}


class _Keeping:
    """A kernel set that also keeps the compact logits of some rows, as its selection gets them."""

    def __init__(self, kernels: KernelSet, picked: list[int]) -> None:
        self._kernels, self._picked = kernels, picked
        self.kept: dict[int, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def select_candidates(self, logits: torch.Tensor, rows: SparseRows, tile: slice, **out: Any) -> None:
        for row in self._picked:
            if tile.start <= row < tile.stop:
                self.kept[row] = logits[row - tile.start].clone()
        self._kernels.select_candidates(logits, rows, tile, **out)


class AuditedIndexer(SparseCandidateIndexer):
    """The indexer of a server whose extends are audited; decode and verify are the plain one's."""

    def __init__(self, *, audit: Audit, **parts: Any) -> None:
        super().__init__(**parts)
        self.audit = audit

    def publish_prefill(self, inputs: PrefillInputs) -> CandidateSchedule | None:
        schedule = super().publish_prefill(inputs)
        picked = self._sample(inputs, schedule)
        if picked:
            self.audit.check(self, inputs, schedule.rows, picked, None)
        return schedule

    def consume_prefill(self, inputs: PrefillInputs, published: CandidateSchedule | None) -> None:
        picked = self._sample(inputs, published)
        if not picked:
            super().consume_prefill(inputs, published)
            return
        with self._keeping(picked) as keeping:
            super().consume_prefill(inputs, published)
        # Empty where the call found nothing to select.
        if keeping.kept:
            self.audit.check(self, inputs, published.rows, picked, keeping.kept)

    def _sample(self, inputs: PrefillInputs, published: CandidateSchedule | None) -> list[int]:
        # What a stream that is captured computes is not there to look at.
        if published is None or (inputs.positions.is_cuda and torch.cuda.is_current_stream_capturing()):
            return []
        return self.audit.sample(published.rows.num_rows)

    @contextlib.contextmanager
    def _keeping(self, picked: list[int]) -> Iterator[_Keeping]:
        kernels = self.kernels
        self.kernels = keeping = _Keeping(kernels, picked)
        try:
            yield keeping
        finally:
            self.kernels = kernels
