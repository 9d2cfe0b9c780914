"""The Prometheus series: counts against a loop over positions, and what a step counts as."""

import types

import numpy as np
import pytest

pytest.importorskip("torch")
prometheus_client = pytest.importorskip("prometheus_client")

from sglang_dsv41.metrics import Metrics, count_steps, counts_of, extend_counts, graph_skips, step_lens
from tests.candidates import SMALL, visible_in

LABELS = {"model_name": "tiny", "tp_rank": 0}
# 16 blocks of 8: on, before and past each edge.
LENS = [0, 1, 7, 8, 9, 120, 127, 128, 129, 135, 136, 137, 1000, 1001]


def by_loop(lens) -> tuple[int, int, int]:
    """Positions are listed one by one; the newest block and the first ones stand for any choice."""
    blocks = skipped = 0
    for length in lens:
        count = -(-length // 8)
        chosen = range(count) if count <= 16 else [*range(15), count - 1]
        blocks += len(chosen)
        skipped += length - len(visible_in(list(chosen), length, 8))
    return len(lens), blocks, skipped


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def value(registry, name, **labels) -> float:
    found = registry.get_sample_value(f"sglang:dsv41_sparse_{name}", {"model_name": "tiny", "tp_rank": "0", **labels})
    assert found is not None, name
    return found


def rows_of(registry, mode) -> list[float]:
    names = ("rows_total", "blocks_scored_total", "positions_skipped_total")
    return [value(registry, name, mode=mode) for name in names]


@pytest.mark.parametrize("lens", [[n] for n in LENS] + [LENS])
def test_counts_are_those_of_a_loop(lens):
    assert counts_of(np.array(lens), SMALL) == by_loop(lens)


def inputs_of(seq_lens, rows, ratio=1, req_rows=()):
    """What is read of SGLang's ``PrefillInputs``; ``req_rows`` is None where context parallelism deals rows out."""
    return types.SimpleNamespace(seq_lens_cpu=seq_lens, rows_per_request=rows, compress_ratio=ratio, req_rows=req_rows)


def test_a_negative_length_sees_nothing():
    assert counts_of(np.array([-1, 5]), SMALL) == by_loop([0, 5])


@pytest.mark.parametrize("ratio", [1, 2])
def test_an_extend_counts_the_last_rows_of_each_request(registry, ratio):
    metrics = Metrics(LABELS, SMALL, registry=registry)
    seq_lens, rows = [300, 40, 1], [200, 40, 1]
    inputs = inputs_of(seq_lens, rows, ratio)
    # A token at position p sees (p + 1) // ratio positions.
    lens = [(p + 1) // ratio for n, r in zip(seq_lens, rows) for p in range(n - r, n)]
    metrics.count_extend(inputs)
    assert rows_of(registry, "extend") == list(by_loop(lens))
    metrics.count_extend(inputs)
    assert rows_of(registry, "extend") == [2 * n for n in by_loop(lens)]
    assert rows_of(registry, "decode") == rows_of(registry, "verify") == [0, 0, 0]
    assert extend_counts((), (), ratio, SMALL) == (0, 0, 0)


def test_an_extend_whose_lengths_the_host_does_not_know_is_not_counted(registry):
    metrics = Metrics(LABELS, SMALL, registry=registry)
    for seq_lens, rows in ((None, [1]), ([1], None)):
        metrics.count_extend(inputs_of(seq_lens, rows))
    assert rows_of(registry, "extend") == [0, 0, 0]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_context_parallel_rank_counts_its_own_rows(registry, rank, ratio):
    """Its own extends whether or not it counts for all; each row less than cp_size tokens past where it stands."""
    prefixes, extends = [100, 37, 0], [200, 3, 1]
    starts = [sum(extends[:i]) for i in range(3)]
    dealt = [[p + i for i in range(n) if (start + i) % 3 == rank] for p, n, start in zip(prefixes, extends, starts)]
    seq_lens, rows = [p + n for p, n in zip(prefixes, extends)], [len(one) for one in dealt]
    metrics = Metrics(LABELS, SMALL, counts_shared=rank == 0, cp_size=3, registry=registry)
    metrics.count_extend(inputs_of(seq_lens, rows, ratio, req_rows=None))
    counted = rows_of(registry, "extend")
    off = [n - 1 - one[-1] for n, one in zip(seq_lens, dealt) if one]
    assert all(0 <= one < 3 for one in off)
    taken = [(p + 1 + more) // ratio for more, one in zip(off, filter(None, dealt)) for p in one]
    assert counted == list(by_loop(taken)) and counted[0] == sum(rows)
    # What every rank has: a chunk too small to be dealt out, decode and verify.
    metrics.count_extend(inputs_of([9], [1], ratio))
    assert rows_of(registry, "extend")[0] - counted[0] == (rank == 0)
    runner = types.SimpleNamespace(forward=lambda batch: None)
    count_steps(runner, metrics)
    assert hasattr(runner.forward, "counts_steps") == (rank == 0)


def test_a_rank_that_does_the_same_work_counts_no_rows(registry):
    metrics = Metrics(LABELS, SMALL, counts_rows=False, registry=registry)
    metrics.count_extend(inputs_of([9], [9]))
    assert [family.name for family in registry.collect()] == []
    runner = types.SimpleNamespace(forward=lambda batch: None)
    forward = runner.forward
    count_steps(runner, metrics)
    assert runner.forward is forward


# ---- steps ----


class Mode:
    def __init__(self, name):
        self.name = name

    def is_decode(self):
        return self.name == "decode"

    def is_target_verify(self):
        return self.name == "verify"


def batch_of(mode, lens, rows=None):
    """A ``ForwardBatch`` in what is read of it; padded lengths of 1 follow the live ones."""
    return types.SimpleNamespace(
        forward_mode=Mode(mode),
        batch_size=rows if lens is None else len(lens),
        seq_lens_cpu=None if lens is None else np.array([*lens, 1, 1]),
        input_ids=np.zeros(rows or len(lens)),
    )


def runner_of(variants=None, can_run_graph=True, pads=None):
    def forward(batch, *args, **kwargs):
        if pads:
            batch.batch_size = pads
        return types.SimpleNamespace(can_run_graph=can_run_graph, args=(args, kwargs))

    return types.SimpleNamespace(
        forward=forward, decode_cuda_graph_runner=types.SimpleNamespace(attention_graph_variants=variants)
    )


def test_a_decode_step_counts_its_rows_once_a_consumer(registry):
    runner = runner_of(pads=64)
    metrics = Metrics(LABELS, SMALL, registry=registry)
    count_steps(runner, metrics)
    count_steps(runner, metrics)  # a second backend of the same runner
    output = runner.forward(batch_of("decode", [300, 5]), 7, key=8)
    assert output.args == ((7,), {"key": 8})
    assert len(SMALL.consumer_layers) == 2
    assert rows_of(registry, "decode") == [2 * n for n in by_loop([300, 5])]


def test_a_verify_step_counts_each_draft_token(registry):
    """The lengths end before the drafts, which see each other in a chain."""
    runner, metrics = runner_of(), Metrics(LABELS, SMALL, registry=registry)
    count_steps(runner, metrics)
    runner.forward(batch_of("verify", [303, 5], rows=6))
    assert rows_of(registry, "verify") == [2 * n for n in by_loop([304, 305, 306, 6, 7, 8])]


def test_lengths_that_the_host_does_not_know_count_rows_only(registry):
    runner, metrics = runner_of(), Metrics(LABELS, SMALL, registry=registry)
    count_steps(runner, metrics)
    runner.forward(batch_of("decode", None, rows=3))
    runner.forward(batch_of("verify", [300, 5], rows=7))  # ragged drafts
    assert rows_of(registry, "decode") == [6, 0, 0] and rows_of(registry, "verify") == [14, 0, 0]


def test_an_extend_and_an_idle_rank_are_no_step():
    assert step_lens(batch_of("extend", [5])) is None
    assert step_lens(batch_of("decode", [])) is None


@pytest.mark.parametrize(
    "label, ratio, skips",
    [
        ("candidate_all", 1, True),
        ("candidate_unfiltered", 1, True),
        ("candidate_c2_all", 1, False),
        ("candidate_c2_all", 2, True),
        ("candidate_filtered", 1, False),
    ],
)
def test_a_graph_for_short_contexts_counts_nothing(registry, label, ratio, skips):
    import dataclasses

    variants = types.SimpleNamespace(select=lambda batch: label)
    geometry = dataclasses.replace(SMALL, ratio=ratio)
    runner, metrics = runner_of(variants), Metrics(LABELS, geometry, registry=registry)
    assert graph_skips(runner, batch_of("decode", [5]), ratio) is skips
    count_steps(runner, metrics)
    runner.forward(batch_of("decode", [8]))
    assert rows_of(registry, "decode")[0] == (0 if skips else 2)
    # Without a graph the layers score whatever the length.
    eager = runner_of(variants, can_run_graph=False)
    count_steps(eager, metrics)
    eager.forward(batch_of("decode", [8]))
    assert rows_of(registry, "decode")[0] == (2 if skips else 4)


def test_no_graphs_skip_nothing():
    assert graph_skips(types.SimpleNamespace(), batch_of("decode", [5]), 1) is False
    assert graph_skips(runner_of(None), batch_of("decode", [5]), 1) is False


# ---- audit ----


def test_an_audits_findings_are_counted_by_layer(registry):
    pytest.importorskip("sglang")
    from sglang_dsv41.audit import CHECKS, RowFindings

    metrics = Metrics(LABELS, SMALL, audited=True, registry=registry)
    for layer in (6, 8, 9):
        absent = {"logit_difference"} if layer == 6 else {"block_overlap"}
        for check in set(CHECKS) - absent:
            assert value(registry, "audit_failures_total", layer=str(layer), check=check) == 0, "before anything failed"
    good = RowFindings({"selection_overlap": 1.0, "candidate_recall": 0.7, "logit_difference": 2**-11}, ())
    bad = RowFindings(
        {"selection_overlap": 0.4, "candidate_recall": 0.6, "logit_difference": 2.0}, ("selection_overlap", "schedule")
    )
    metrics.count_audit(8, [good, bad, good])
    metrics.count_audit(6, [RowFindings({"selection_overlap": 1.0, "block_overlap": 0.3}, ("block_overlap",))])
    assert [value(registry, "audit_rows_total", layer=layer) for layer in ("6", "8", "9")] == [1, 3, 0]
    failures = {
        (sample.labels["layer"], sample.labels["check"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "sglang:dsv41_sparse_audit_failures_total" and sample.value
    }
    assert failures == {("8", "selection_overlap"): 1, ("8", "schedule"): 1, ("6", "block_overlap"): 1}
    assert value(registry, "audit_selection_overlap_bucket", layer="8", le="0.95") == 1
    assert value(registry, "audit_selection_overlap_bucket", layer="8", le="1.0") == 3
    assert value(registry, "audit_candidate_recall_sum", layer="8") == pytest.approx(2.0)
    assert value(registry, "audit_logit_difference_bucket", layer="8", le="1.0") == 2
    assert value(registry, "audit_block_overlap_count", layer="6") == 1


def test_series_without_an_audit(registry):
    Metrics(LABELS, SMALL, registry=registry)
    names = {family.name for family in registry.collect()}
    assert names == {f"sglang:dsv41_sparse_{n}" for n in ("rows", "blocks_scored", "positions_skipped")}


# ---- a server ----


@pytest.fixture
def served(monkeypatch):
    """SGLang's settings of one rank."""
    pytest.importorskip("sglang")
    from sglang.srt import runtime_context

    from sglang_dsv41 import metrics

    made = types.SimpleNamespace(
        enable_metrics=True,
        enable_metrics_for_all_schedulers=False,
        extra_metric_labels={"zone": "a"},
        served_model_name="tiny",
        tp_rank=1,
        pp_rank=0,
        attn_tp_rank=0,
        attn_cp_rank=0,
        attn_cp_size=1,
        dp_rank=None,
    )
    for name in ("get_observability", "get_parallel", "get_serving"):
        monkeypatch.setattr(runtime_context, name, lambda: made)
    asked = []
    monkeypatch.setattr(metrics, "_made", lambda *arguments: asked.append(arguments) or "metrics")
    made.ask = lambda: (metrics.server_metrics(SMALL, audited=True), asked and asked[-1])
    return made


def test_the_labels_are_sglangs(served):
    made, (labels, geometry, counts_rows, audited, counts_shared, cp_size) = served.ask()
    assert made == "metrics" and geometry is SMALL and counts_rows and audited and counts_shared and cp_size == 1
    assert dict(labels) == {"model_name": "tiny", "tp_rank": "1", "pp_rank": "0", "zone": "a"}
    served.dp_rank, served.extra_metric_labels = 3, None
    assert dict(served.ask()[1][0]) == {"model_name": "tiny", "tp_rank": "1", "pp_rank": "0", "dp_rank": "3"}


def test_ranks_of_one_attention_group_count_its_rows_once(served):
    served.attn_tp_rank = 2
    assert served.ask()[1][2] is False
    served.enable_metrics_for_all_schedulers = True
    assert served.ask()[1][2] is True


def test_context_parallel_ranks_count_what_all_have_once(served):
    served.attn_cp_rank, served.attn_cp_size = 1, 4
    assert served.ask()[1][2:] == (True, True, False, 4)
    served.enable_metrics_for_all_schedulers = True
    assert served.ask()[1][4] is True


def test_no_series_without_the_option(served):
    served.enable_metrics = False
    assert served.ask() == (None, [])


def test_one_set_of_series_a_process(monkeypatch):
    """A registry takes a name once, and a server makes several backends."""
    from sglang_dsv41 import metrics

    made = []
    monkeypatch.setattr(metrics, "Metrics", lambda *args, **options: made.append(1) or object())
    metrics._made.cache_clear()
    key = ((("model_name", "tiny"),), SMALL, True, False, True, 1)
    assert metrics._made(*key) is metrics._made(*key) and made == [1]
    metrics._made.cache_clear()
