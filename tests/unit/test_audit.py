"""DSV41_SPARSE_AUDIT: a clean step passes, each kind of fault is found and named, and without the variable nothing runs."""

import importlib.util
import logging
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dsv41 import audit as audit_module
from sglang_dsv41 import envs
from sglang_dsv41.audit import CHECKS, MAX_ROWS, REPORT_ROWS, SECONDS, Audit, AuditedIndexer, RowFindings
from sglang_dsv41.geometry import INT32_MAX
from sglang_dsv41.indexer import SparseCandidateIndexer
from tests.world import CONSUMER, LAST, SOURCE, World, span

pytestmark = pytest.mark.usefixtures("one_thread")

# One request past the 8 published blocks, one that sees few positions, one whose first rows see none of ratio 2.
ROWS = [*span(1, 590, 4), *span(2, 40, 3), *span(3, 0, 3)]
PROBE = Path(__file__).parents[1] / "gpu/probe"
PARTS = ("geometry", "kernels", "buffers", "token_to_kv_pool", "page_size", "prefill_source", "full_topk")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Counted:
    """Stands in for the metrics."""

    def __init__(self) -> None:
        self.found = []

    def count_audit(self, layer, findings) -> None:
        self.found += [(layer, row) for row in findings]

    def count_extend(self, inputs) -> None:
        pass


def audited(world, *, every=True, **options):
    """The world's indexer becomes an audited one; ``every``: all rows of each call. Returns its audit."""
    parts = {name: getattr(world.indexer, name) for name in PARTS}
    audit = Audit(options.pop("rate", 1.0), world.geometry, metrics=Counted(), clock=Clock(), **options)
    if every:
        audit.sample = lambda rows: list(range(rows))
    world.indexer = AuditedIndexer(audit=audit, metrics=audit.metrics, **parts)
    return audit


def step(world, rows=ROWS):
    world.extend_step(rows)
    return world.indexer.audit.metrics.found


def failed(found) -> dict[int, set[str]]:
    out = {SOURCE: set(), CONSUMER: set(), LAST: set()}
    for layer, row in found:
        out[layer] |= set(row.failed)
    return out


def patched(world, name, change):
    """``change(result, *arguments)`` after the kernel set's operation ``name``; a result of None keeps it."""
    original = getattr(world.kernels, name)

    def operation(*args, **kwargs):
        result = original(*args, **kwargs)
        changed = change(result, *args, **kwargs)
        return result if changed is None else changed

    setattr(world.kernels, name, operation)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("dense_extend", [False, True], ids=["sglang-source", "our-source"])
def test_a_clean_step_passes(kernels_on, ratio, dense_extend):
    world = World(kernels_on, ratio=ratio, dense_extend=dense_extend)
    audited(world)
    found = step(world)
    seeing = sum(world.visible(row) > 0 for row in ROWS)
    assert [layer for layer, _ in found] == [SOURCE] * seeing + [CONSUMER] * seeing + [LAST] * seeing
    for layer, row in found:
        assert row.failed == () and row.problem == "" and row.measures["selection_overlap"] == 1.0
        if layer == SOURCE:
            assert set(row.measures) == {"selection_overlap", "block_overlap"} and row.measures["block_overlap"] == 1.0
        else:
            assert set(row.measures) == {"selection_overlap", "candidate_recall", "logit_difference"}
            assert row.measures["logit_difference"] <= audit_module.MOST["logit_difference"]


def test_an_audit_changes_no_selection():
    plain, watched = World("reference-cpu"), World("reference-cpu")
    audited(watched)
    for a, b in zip(plain.extend_step(ROWS)[1:], watched.extend_step(ROWS)[1:], strict=True):
        assert torch.equal(a.out_raw_indices, b.out_raw_indices)
        assert torch.equal(a.out_page_indices, b.out_page_indices)
    assert watched.indexer.kernels is watched.kernels


def test_candidate_recall_is_the_share_of_the_dense_top_k_in_the_candidates():
    """Against the float64 oracle; candidates are the source's, so a consumer's own best lie elsewhere too."""
    world = World("reference-cpu")
    audited(world)
    schedule, *_ = world.extend_step(ROWS)
    shares = []
    for layer in (CONSUMER, LAST):
        rows = [f for found_layer, f in world.indexer.audit.metrics.found if found_layer == layer]
        for i, (row, found) in enumerate(zip(ROWS, rows, strict=True)):
            scores, tolerance = world.scores(layer, row)
            listed = {b for b in schedule.rows.sparse_indices[i].tolist() if b != INT32_MAX}
            k = min(world.geometry.topk, len(scores))
            cut = scores.topk(k).values[-1]
            inside = torch.tensor([p // world.geometry.kernel_block in listed for p in range(len(scores))])
            least = int((inside & (scores > cut + tolerance)).sum())
            most = min(k, int((inside & (scores >= cut - tolerance)).sum()))
            assert least / k <= found.measures["candidate_recall"] <= most / k
            shares.append(found.measures["candidate_recall"])
    assert min(shares) < 0.9 and max(shares) == 1.0, "rows that see more and no more than the candidates"


def test_of_equal_scores_at_the_cut_those_in_the_candidates_count_first():
    """Two of three places are left to four equal scores, of which three are candidates."""
    dense = types.SimpleNamespace(length=7, scores=torch.tensor([5.0, 1.0, 2.0, 2.0, 2.0, 2.0, 0.0]))
    mask = torch.tensor([True, True, True, True, True, False, True])
    assert audit_module.candidate_recall(dense, mask, 3) == 1.0
    assert audit_module.candidate_recall(dense, ~mask, 3) == 1 / 3
    mask[0] = False
    assert audit_module.candidate_recall(dense, mask, 3) == 2 / 3


def test_logits_are_kept_before_the_next_pass_overwrites_them():
    world = World("reference-cpu", scratch_bytes=256)
    assert len(list(world.kernels.passes(len(ROWS)))) > 2
    audited(world)
    found = step(world)
    assert len(found) == 3 * len(ROWS) and all(row.failed == () for _, row in found)


# ---- faults ----


def only_even(blocks, keep):
    return torch.where((blocks % 2 == 0) | keep, blocks, -1)


def test_blocks_left_out_are_found():
    """The blocks that SGLang's scorer chose reach the schedule by half, the newest included."""
    world = World("reference-cpu")
    expand = world.kernels.expand

    def half(blocks, rows, tile):
        newest = (rows.lens[tile] - 1)[:, None] // world.geometry.block_size
        expand(only_even(blocks, blocks == newest), rows, tile)

    world.kernels.expand = half
    audited(world)
    found = step(world)
    assert failed(found) == {SOURCE: {"block_overlap"}, CONSUMER: set(), LAST: set()}
    broken = [row.measures["block_overlap"] for layer, row in found if row.failed]
    assert broken and max(broken) < 0.95
    # Short rows too, and the selection of each layer is right by what it was given.
    assert all(row.measures["selection_overlap"] == 1.0 for _, row in found)


@pytest.mark.parametrize("dense_extend", [False, True], ids=["sglang-source", "our-source"])
def test_the_gpu_tests_broken_block_list_is_found(dense_extend, monkeypatch):
    """The fault that tests/gpu/test_audit.py puts into a server."""
    spec = importlib.util.spec_from_file_location("dsv41_broken", PROBE / "dsv41_broken.py")
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    monkeypatch.setattr(SparseCandidateIndexer, "publish_prefill", SparseCandidateIndexer.publish_prefill)
    monkeypatch.delenv("DSV41_BREAK_BLOCKS", raising=False)
    broken.install()
    world = World("reference-cpu", dense_extend=dense_extend)
    audited(world)
    assert failed(step(world)) == {SOURCE: set(), CONSUMER: set(), LAST: set()}
    monkeypatch.setenv("DSV41_BREAK_BLOCKS", "1")
    broken.install()
    world = World("reference-cpu", dense_extend=dense_extend)
    audited(world)
    assert failed(step(world)) == {SOURCE: {"block_overlap"}, CONSUMER: set(), LAST: set()}


def test_other_blocks_are_found():
    """As many blocks as there should be, but each but the newest the worse neighbour's."""
    world = World("reference-cpu")
    expand = world.kernels.expand

    def worst(blocks, rows, tile):
        count = (rows.lens[tile] + 7) // 8
        other = torch.stack([torch.arange(8) for _ in range(blocks.shape[0])]).to(torch.int32)
        other[:, -1] = count - 1
        expand(
            torch.where(count[:, None] > 8, other, torch.nn.functional.pad(blocks, (0, 8 - blocks.shape[1]), value=-1)),
            rows,
            tile,
        )

    world.kernels.expand = worst
    audited(world)
    found = step(world)
    assert failed(found)[SOURCE] == {"block_overlap"}
    assert sum(bool(row.failed) for layer, row in found if layer == SOURCE) == 4


def spoil_order(rows):
    rows.sparse_indices[1, :2] = rows.sparse_indices[1, :2].flip(0)
    rows.physical_blocks[1, :2] = rows.physical_blocks[1, :2].flip(0)


def spoil_range(rows):
    rows.sparse_indices[1, -1] = 80


def spoil_newest(rows):
    rows.sparse_indices[1, -1] = INT32_MAX
    rows.physical_blocks[1, -1] = -1


def spoil_end(rows):
    rows.end[1] -= 1


def spoil_physical(rows):
    rows.physical_blocks[1, 0] += 1


def spoil_padding(rows):
    rows.sparse_indices[1, 3] = INT32_MAX


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (spoil_order, "blocks do not ascend"),
        (spoil_range, "a block lies outside the 592 visible positions"),
        (spoil_newest, "the newest block, 73, is missing"),
        (spoil_end, "it ends at column 63, its blocks hold 64 positions"),
        (spoil_physical, "physical blocks are not those of the page table"),
        (spoil_padding, "padding lies between blocks"),
    ],
)
def test_a_schedule_that_is_not_well_formed_is_found(spoil, problem, caplog):
    world = World("reference-cpu")
    audited(world)
    patched(world, "expand", lambda _, blocks, rows, tile: spoil(rows))
    found = step(world)
    row = found[1][1]
    assert "schedule" in row.failed and row.problem == problem
    assert f"schedule: {problem}: the published block list is not well formed." in caplog.text
    assert all("schedule" not in row.failed for _, row in [found[0], *found[2 : len(ROWS)]])


def test_a_physical_block_past_the_listed_ones_is_found():
    """In a row that lists fewer blocks than it may."""
    world = World("reference-cpu")
    audited(world)
    patched(world, "expand", lambda _, blocks, rows, tile: rows.physical_blocks[5, -1:].fill_(3))
    found = step(world)[: len(ROWS)]
    assert [row.problem for _, row in found] == [
        "physical blocks are not those of the page table" if i == 5 else "" for i in range(len(ROWS))
    ]


def test_wrong_picks_of_a_consumer_are_found():
    """The worst of the candidates in place of the best."""
    world = World("reference-cpu")
    original = world.kernels.select_candidates
    world.kernels.select_candidates = lambda logits, *args, **out: original(-logits, *args, **out)
    audited(world)
    found = step(world)
    assert failed(found) == {SOURCE: set(), CONSUMER: {"selection_overlap"}, LAST: {"selection_overlap"}}


@pytest.mark.parametrize("fault", ["slot", "duplicate", "missing", "outside"])
@pytest.mark.parametrize("layer", [SOURCE, CONSUMER])
def test_one_wrong_pick_of_sixteen_is_found(layer, fault):
    world = World("reference-cpu", dense_extend=True)
    audited(world)

    def spoil(_, logits, rows, tile, *args, **out):
        slots, positions = args if args else (out["out_slots"], out["out_positions"])
        if fault == "slot":
            slots[2, 3] += 1
        elif fault == "duplicate":
            slots[2, 3], positions[2, 3] = slots[2, 4].clone(), positions[2, 4].clone()
        elif fault == "missing":
            slots[2, 3] = positions[2, 3] = -1
        else:
            positions[2, 3] = 700

    patched(world, "select_visible" if layer == SOURCE else "select_candidates", spoil)
    found = [row for found_layer, row in step(world) if found_layer == layer]
    assert found[2].failed == ("selection_overlap",) and found[2].measures["selection_overlap"] == 15 / 16
    assert all(row.failed == () for i, row in enumerate(found) if i != 2)


def test_a_pick_outside_the_candidates_is_found():
    """A consumer's own best, selected in the whole context."""
    world = World("reference-cpu")
    audited(world)
    full = world.extend(CONSUMER, ROWS)
    world.indexer.full_topk.topk_prefill(full)

    def spoil(_, logits, rows, tile, *, out_positions, out_slots):
        out_positions[tile], out_slots[tile] = full.out_raw_indices[tile], full.out_page_indices[tile]

    patched(world, "select_candidates", spoil)
    found = [row for layer, row in step(world) if layer == CONSUMER]
    for row in found:
        # What lies outside is what the recall misses.
        assert row.measures["selection_overlap"] <= row.measures["candidate_recall"] + 1e-9
    assert any(row.failed == ("selection_overlap",) for row in found)


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, -math.inf])
def test_wrong_logits_are_found(value):
    """One column of one row, below the cut where it is finite enough to be compared."""
    world = World("reference-cpu")
    audited(world)

    def spoil(logits, queries, keys, rows, tile):
        lowest = int(logits[1, : int(rows.end[1])].argmin())
        logits[1, lowest] = logits[1, lowest] - value * logits[1].abs().max()

    patched(world, "sparse_logits", spoil)
    found = [row for layer, row in step(world) if layer == LAST]
    assert "logit_difference" in found[1].failed
    assert audit_module.MOST["logit_difference"] < found[1].measures["logit_difference"] <= 1000
    assert all("logit_difference" not in row.failed for i, row in enumerate(found) if i != 1)


def test_columns_past_the_end_and_unscored_rows_are_not_looked_at():
    world = World("reference-cpu")
    audited(world)

    def spoil(logits, queries, keys, rows, tile):
        column = torch.arange(logits.shape[1])
        logits.masked_fill_(column >= rows.end[tile][:, None], math.nan)

    patched(world, "sparse_logits", spoil)
    assert all(row.failed == () for _, row in step(world))


def test_a_tail_of_the_rows_is_audited_as_what_it_is():
    """Late layers compute the last rows of each request only."""
    world = World("reference-cpu")
    audited(world)
    schedule = world.indexer.publish_prefill(world.extend(SOURCE, ROWS))
    tail = [*ROWS[2:4], ROWS[6], ROWS[9]]
    inputs = world.extend(LAST, tail, seen=[594, 43, 3])
    world.indexer.consume_prefill(inputs, schedule.tail([2, 1, 1]))
    found = [row for layer, row in world.indexer.audit.metrics.found if layer == LAST]
    assert len(found) == 4 and all(row.failed == () for row in found)


# ---- sampling ----


def test_sampling_is_seeded_bounded_and_of_the_rate():
    world = World("reference-cpu")
    audit = audited(world, every=False, rate=0.01, seed=5)
    again = audited(world, every=False, rate=0.01, seed=5)
    drawn = [audit.sample(100) for _ in range(2000)]
    assert drawn == [again.sample(100) for _ in range(2000)]
    assert max(map(len, drawn)) == MAX_ROWS
    assert all(rows == sorted(set(rows)) and all(0 <= r < 100 for r in rows) for rows in drawn)
    assert 1800 < sum(map(len, drawn)) < 2100
    assert {r for rows in drawn for r in rows} == set(range(100))
    everything = audited(world, every=False, rate=1.0)
    assert len(everything.sample(8192)) == MAX_ROWS and everything.sample(2) == [0, 1] and everything.sample(0) == []


def test_only_sampled_rows_are_scored(monkeypatch):
    world = World("reference-cpu")
    audit = audited(world)
    scored = []
    dense = audit_module.DenseRow
    monkeypatch.setattr(audit_module, "DenseRow", lambda q, k, rows, row: scored.append(row) or dense(q, k, rows, row))
    calls = iter(([], [5, 8], []))
    audit.sample = lambda rows: next(calls)
    step(world)
    assert scored == [5, 8] and [layer for layer, _ in audit.metrics.found] == [CONSUMER, CONSUMER]


def test_a_call_that_sees_nothing_and_an_idle_rank_are_left_alone():
    world = World("reference-cpu", ratio=2)
    audited(world)
    assert step(world, span(1, 0, 1)) == []
    world.indexer.consume_prefill(world.extend(CONSUMER, span(1, 0, 1)), None)


def test_a_gpu_without_memory_serves_on(monkeypatch, caplog):
    world = World("reference-cpu")
    audited(world)

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(audit_module, "DenseRow", no_memory)
    assert step(world) == []
    assert f"no memory to score rows of layer {SOURCE} again" in caplog.text


# ---- the log ----


def test_a_failure_is_logged_once_a_minute_for_each_layer_and_check(caplog):
    world = World("reference-cpu")
    original = world.kernels.select_candidates
    world.kernels.select_candidates = lambda logits, *args, **out: original(-logits, *args, **out)
    audit = audited(world)
    lines = lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]  # noqa: E731
    found = list(step(world))
    assert len(lines()) == 2
    first = next(row for layer, row in found if layer == CONSUMER and row.failed)
    value = first.measures["selection_overlap"]
    assert lines()[0].startswith(
        f"dsv41-sparse audit FAILED: layer {CONSUMER}, request row 1, token 590 (591 visible positions): "
        f"selection_overlap is {value:.4g} and must be at least 0.95: "
    )
    assert "--attention-backend dsv4" in lines()[0] and "DSV41_SPARSE_DEBUG=1" in lines()[0]
    assert f"layer {LAST}" in lines()[1]
    audit._clock.now = SECONDS - 1
    step(world)
    assert len(lines()) == 2
    audit._clock.now = SECONDS
    step(world)
    assert len(lines()) == 4
    of_layer = sum("selection_overlap" in row.failed for layer, row in found if layer == CONSUMER)
    assert f" {2 * of_layer - 1} more rows failed it since the last such line." in lines()[2]


def test_a_summary_after_enough_rows_or_a_minute(caplog):
    caplog.set_level(logging.INFO)
    world = World("reference-cpu")
    audit = audited(world)
    lines = lambda: [r.getMessage() for r in caplog.records if " failed; " in r.getMessage()]  # noqa: E731
    good = RowFindings({"selection_overlap": 1.0, "logit_difference": 0.001}, ())
    bad = RowFindings({"selection_overlap": 0.5, "logit_difference": 0.003}, ("selection_overlap",))
    audit._summarise([good] * (REPORT_ROWS - 2) + [bad])
    assert lines() == []
    audit._summarise([good])
    assert lines() == [
        f"dsv41-sparse audit: {REPORT_ROWS} rows, 1 failed; selection_overlap mean 0.9995, least 0.5; "
        "logit_difference mean 0.001002, largest 0.003."
    ]
    audit._clock.now = SECONDS
    audit._summarise([])
    assert len(lines()) == 1, "nothing was audited"
    audit._summarise([good])
    assert lines()[1].startswith("dsv41-sparse audit: 1 rows, 0 failed; selection_overlap mean 1, least 1;")


# ---- off ----


def test_nothing_is_imported_without_the_variable():
    script = (
        "import sys, sglang_dsv41.backend, sglang_dsv41.indexer\n"
        "print([m for m in sys.modules if m in ('sglang_dsv41.audit', 'sglang_dsv41.metrics')])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_each_check_has_a_bound_and_a_meaning():
    assert set(CHECKS) == {*audit_module.LEAST, *audit_module.MOST, "schedule"} == set(audit_module._MEANS)
    assert envs.AUDIT == "DSV41_SPARSE_AUDIT"
