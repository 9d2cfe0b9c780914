"""Whether index layers keep their place in a prefill graph, and who serves the graph's calls."""

import types

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.dsv4.v41_indexer.sparse_table import SparseTableBackend

from sglang_dsv41.backend import Dsv41SparseAttnBackend
from tests.world import World

pytestmark = pytest.mark.usefixtures("one_thread")


class Table(SparseTableBackend):
    """SGLang's object of SM100, with its calls written down."""

    def __init__(self):
        self.calls = []

    def publish_prefill_graph(self, *arguments):
        self.calls.append(("publish", *arguments))

    def prefill_graph_table(self, *arguments):
        self.calls.append(("table", *arguments))
        return "table"

    def bind_prefill_graph_table(self, tensors):
        self.calls.append(("bind", tensors))
        return "bound"


def backend(indexer, *, prefill=None, low_ratios=(1, 2)):
    """A backend of ours that has not been initialised; ``prefill`` are the candidates of that phase, ours by default."""
    made = object.__new__(Dsv41SparseAttnBackend)
    made.low_ratios, made.candidate_indexer = low_ratios, indexer
    made.prefill_candidates = indexer if prefill is None else prefill
    return made


def test_only_where_sglangs_sm100_object_scores_the_extend():
    world = World("reference-cpu")
    assert type(world.indexer.prefill_source).__name__ == "DenseBlocksBackend"
    assert not backend(world.indexer).low_ratio_prefill_graph
    world.indexer.prefill_source = None  # our own extend
    assert not backend(world.indexer).low_ratio_prefill_graph
    world.indexer.prefill_source = Table()
    assert backend(world.indexer).low_ratio_prefill_graph
    assert not backend(world.indexer, low_ratios=()).low_ratio_prefill_graph


def test_a_prefill_left_to_sglang_is_asked_as_sglang_does():
    indexer = types.SimpleNamespace(serves_prefill_graph=False)
    assert backend(indexer, prefill=Table()).low_ratio_prefill_graph
    assert not backend(indexer, prefill=object()).low_ratio_prefill_graph


def test_the_graphs_calls_go_to_that_object():
    world, table = World("reference-cpu"), Table()
    world.indexer.prefill_source = table
    inputs, tensors = object(), (torch.zeros(1),)
    world.indexer.publish_prefill_graph(inputs, 3, tensors)
    assert world.indexer.prefill_graph_table(6, 3) == "table"
    assert world.indexer.bind_prefill_graph_table(tensors) == "bound"
    assert table.calls == [("publish", inputs, 3, tensors), ("table", 6, 3), ("bind", tensors)]
