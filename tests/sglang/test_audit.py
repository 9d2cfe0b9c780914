"""What a backend makes of ``DSV41_SPARSE_AUDIT`` and ``--enable-metrics``, on SGLang's own settings and names."""

import ast
import importlib.util
import logging
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor import forward_batch_info
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_dsv41 import BACKEND_NAME, backend, envs, metrics
from sglang_dsv41.audit import AuditedIndexer
from sglang_dsv41.indexer import SparseCandidateIndexer
from tests.world import KV_PAGE, World, span

pytestmark = pytest.mark.usefixtures("one_thread")


class Stock:
    """In SGLang's backend's place: what ours reads of it."""

    def __init__(self, runner) -> None:
        self.token_to_kv_pool, self.page_size = runner.world.pool, KV_PAGE


class Backend(backend.SparseCandidates, Stock):
    pass


@pytest.fixture
def settings(monkeypatch):
    """SGLang's settings of one rank, published; call it with server arguments."""
    stamp, contexts = dict(get_parallel()._stamp), []

    def publish(**arguments):
        context = get_context().override_server_args(device="cpu", served_model_name="tiny", **arguments)
        context.install()
        contexts.append(context)
        get_parallel().override_permanently(attn_tp_rank=0, attn_cp_rank=0, tp_rank=0, pp_rank=0, dp_rank=None)

    monkeypatch.delenv(envs.AUDIT, raising=False)
    monkeypatch.delenv(envs.DEBUG, raising=False)
    yield publish
    get_parallel()._stamp = stamp
    for context in contexts:
        context.restore()


@pytest.fixture
def make(monkeypatch):
    """A backend over a World, as its constructor builds it; the phases that are ours."""

    def build(prefill=BACKEND_NAME, decode=BACKEND_NAME):
        world = World("reference-cpu")
        facts = types.SimpleNamespace(geometry=world.geometry, index_page=64)
        monkeypatch.setattr(backend.requirements, "gather", lambda runner: facts)
        monkeypatch.setattr(backend.requirements, "check", lambda facts: None)
        monkeypatch.setattr(backend.requirements, "kernel_set_of", lambda facts: "reference")
        monkeypatch.setattr(backend, "allocate_rows", lambda *_: world.buffers)
        monkeypatch.setattr(backend, "attention_backends", lambda: (prefill, decode))
        scorers = (world.indexer.prefill_source, world.indexer.full_topk)
        monkeypatch.setattr(backend, "extend_scorers", lambda *_, **__: scorers)
        runner = types.SimpleNamespace(world=world, forward=lambda batch: None)
        made = Backend(runner)
        world.indexer = made.candidate_indexer
        return made, runner, world

    return build


@pytest.fixture
def registry(monkeypatch):
    prometheus_client = pytest.importorskip("prometheus_client")
    made = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", made)
    metrics._made.cache_clear()
    yield made
    metrics._made.cache_clear()


def test_off_is_the_plain_indexer(settings, make):
    settings()
    made, runner, _ = make()
    forward = runner.forward
    assert type(made.candidate_indexer) is SparseCandidateIndexer and made.candidate_indexer.metrics is None
    assert runner.forward is forward and made.decode_candidates is made.candidate_indexer


@pytest.mark.parametrize("value", ["0", "0.0", ""])
def test_a_rate_of_zero_is_off(settings, make, monkeypatch, value):
    settings()
    monkeypatch.setenv(envs.AUDIT, value)
    assert type(make()[0].candidate_indexer) is SparseCandidateIndexer


def test_a_rate_audits(settings, make, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    settings()
    monkeypatch.setenv(envs.AUDIT, "0.25")
    made, _, _ = make()
    assert type(made.candidate_indexer) is AuditedIndexer and made.prefill_candidates is made.candidate_indexer
    assert made.candidate_indexer.audit.rate == 0.25 and made.candidate_indexer.audit.metrics is None
    assert "a share of 0.25 of the rows of each extend, at most 4 a layer and step" in caplog.text


def test_an_unreadable_rate_ends_the_start(settings, make, monkeypatch):
    settings()
    monkeypatch.setenv(envs.AUDIT, "often")
    with pytest.raises(ValueError, match="DSV41_SPARSE_AUDIT='often' is not a share"):
        make()


def test_extends_that_sglang_serves_are_not_audited(settings, make, monkeypatch):
    settings()
    monkeypatch.setenv(envs.AUDIT, "1")
    assert type(make(prefill="dsv4")[0].candidate_indexer) is SparseCandidateIndexer


def test_a_server_with_metrics_shows_what_a_faulty_step_did(settings, make, monkeypatch, registry):
    """SGLang's own settings name the labels; the consumers' rows and the audit's findings arrive."""
    settings(enable_metrics=True)
    monkeypatch.setenv(envs.AUDIT, "1")
    made, runner, world = make()
    assert runner.forward.counts_steps
    assert made.candidate_indexer.metrics is made.candidate_indexer.audit.metrics is not None
    expand = made.candidate_indexer.kernels.expand
    made.candidate_indexer.kernels.expand = lambda blocks, rows, tile: expand(
        torch.where(blocks % 2 == 0, blocks, -1), rows, tile
    )
    world.extend_step(span(1, 500, 4))
    labels = {"model_name": "tiny", "tp_rank": "0", "pp_rank": "0"}

    def value(name, **more):
        return registry.get_sample_value(f"sglang:dsv41_sparse_{name}", labels | more)

    assert value("rows_total", mode="extend") == 4 * len(world.geometry.consumer_layers)
    source = str(world.geometry.source_layer)
    assert value("audit_rows_total", layer=source) == 4
    assert value("audit_failures_total", layer=source, check="block_overlap") == 4
    assert value("audit_failures_total", layer=source, check="selection_overlap") == 0
    # A second backend of the process, as SGLang makes for speculation, shares the series.
    assert make()[0].candidate_indexer.metrics is made.candidate_indexer.metrics


def test_a_context_parallel_rank_audits_and_counts_its_own_rows(settings, make, monkeypatch, registry, caplog):
    settings(enable_metrics=True, tp_size=2, attn_cp_size=2, enable_prefill_cp=True, cp_strategy="interleave")
    get_parallel().override_permanently(tp_rank=1, attn_cp_rank=1)
    monkeypatch.setenv(envs.AUDIT, "1")
    _, runner, world = make()
    assert not hasattr(runner.forward, "counts_steps"), "decode is every rank's; rank 0 counts it"
    rows = span(1, 500, 7) + span(2, 60, 1) + span(3, 9, 3)
    world.extend_step(rows[1::2], chunk=rows)
    labels = {"model_name": "tiny", "tp_rank": "1", "pp_rank": "0"}
    counted = registry.get_sample_value("sglang:dsv41_sparse_rows_total", labels | {"mode": "extend"})
    assert counted == 5 * len(world.geometry.consumer_layers)
    layers = (world.geometry.source_layer, *world.geometry.consumer_layers)
    audited = [
        registry.get_sample_value("sglang:dsv41_sparse_audit_rows_total", labels | {"layer": str(layer)})
        for layer in layers
    ]
    assert audited == [4, 4, 4] and "FAILED" not in caplog.text


def test_metrics_without_an_audit_load_none(settings, make, registry):
    settings(enable_metrics=True)
    made, _, world = make()
    assert type(made.candidate_indexer) is SparseCandidateIndexer
    world.extend_step(span(1, 500, 4))
    names = {family.name for family in registry.collect()}
    assert len(names) == 3 and not any("audit" in name for name in names)


def test_sglangs_modes_are_the_steps_that_count():
    mode = forward_batch_info.ForwardMode
    for one in mode:
        batch = types.SimpleNamespace(
            forward_mode=one, batch_size=2, seq_lens_cpu=torch.tensor([5, 9]), input_ids=torch.zeros(4)
        )
        step = metrics.step_lens(batch)
        expected = {mode.DECODE: ("decode", 2, [5, 9]), mode.TARGET_VERIFY: ("verify", 4, [6, 7, 10, 11])}.get(one)
        assert (step is None) == (expected is None), one
        if step is not None:
            assert (step[0], step[1], step[2].tolist()) == expected


def test_the_model_runner_keeps_its_decode_graphs_where_they_are_looked_for():
    """An attribute that no ``__init__`` sets, so the seam table cannot name it."""
    [root, *_] = map(Path, importlib.util.find_spec("sglang").submodule_search_locations)
    source = ast.parse((root / "srt/model_executor/model_runner.py").read_text(encoding="utf-8"))
    [runner] = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "ModelRunner"]
    stored = {
        node.attr for node in ast.walk(runner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert "decode_cuda_graph_runner" in stored
