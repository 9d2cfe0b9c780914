"""A captured decode or verify step of the indexer, replayed over rewritten inputs in random order, against the oracle.

Needs a CUDA GPU of compute capability 8.0 or newer and SGLang.
"""

import random

import pytest

pytest.importorskip("sglang")

import torch

from tests.devices import HAS_GPU

if not HAS_GPU:
    pytest.skip("needs a CUDA GPU of compute capability 8.0 or newer", allow_module_level=True)

from tests.candidates import poison
from tests.world import CONSUMER, GARBAGE, LAST, SOURCE, World, span

pytestmark = pytest.mark.gpu

# Six rows each: full, all empty, one position, page edges, a mix with padded rows in front and behind.
BATCHES = [
    [(r, 599) for r in range(1, 7)],
    [(r, -1) for r in range(1, 7)],
    [(r, 0) for r in range(1, 7)],
    [(1, 62), (2, 63), (3, 64), (4, 255), (5, 256), (6, 767)],
    [(0, -1), (2, 300), (0, -1), (4, 7), (5, 8), (0, -1)],
    [(6, 130), (5, 129), (4, 128), (3, 127), (2, 9), (1, 599)],
]
GROUPS = [
    span(1, 250, 6),
    span(2, 60, 4) + [(0, -1), (0, -1)],
    span(3, 0, 1) + span(4, 508, 5),
    [(0, -1)] * 6,
]


def refill(world, inputs, rows):
    """Rewrite a captured step's inputs in place and poison its outputs."""
    request, position, x, q_lora, _ = world.row_tensors(rows)
    for one in inputs:
        fresh = world.decode(one.layer_id, rows, is_verify=one.is_verify)
        one.positions.copy_(position)
        one.req_rows.copy_(request)
        one.x.copy_(x)
        one.q_lora.copy_(q_lora)
        one.paged_metadata.page_table.copy_(fresh.paged_metadata.page_table)
        one.out_page_indices.fill_(GARBAGE)


@pytest.mark.parametrize("batches, is_verify", [(BATCHES, False), (GROUPS, True)], ids=["decode", "verify"])
def test_replays_equal_the_oracle(kernels_on_gpu, batches, is_verify):
    world = World(kernels_on_gpu, requests=6)
    inputs = [world.decode(layer, batches[0], is_verify=is_verify) for layer in (SOURCE, CONSUMER, LAST)]
    source, first, last = inputs

    def step():
        schedule = world.indexer.publish_decode(source)
        world.indexer.consume_decode(first, schedule)
        world.indexer.consume_decode(last, schedule)
        return schedule

    step()
    torch.cuda.synchronize()
    launched = world.kernels.calls["sparse_logits"]
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        schedule = step()
    assert world.kernels.calls["sparse_logits"] == launched + 2
    assert schedule.rows.sparse_indices.data_ptr() == world.buffers._sparse_indices.data_ptr()
    order = list(range(len(batches))) * 3
    random.Random(0).shuffle(order)
    for index in order:
        rows = batches[index]
        refill(world, inputs, rows)
        poison(schedule.rows)
        graph.replay()
        torch.cuda.synchronize()
        world.check_source(rows, source.out_page_indices)
        world.check_schedule(rows, schedule)
        world.check_consumer(CONSUMER, rows, schedule, slots=first.out_page_indices)
        world.check_consumer(LAST, rows, schedule, slots=last.out_page_indices)
    assert torch.cuda.memory_allocated() <= before + (64 << 20)


def test_two_graphs_share_the_buffers(kernels_on_gpu):
    """Graphs of different batch sizes, replayed in turn: a small one after a large one sees none of its rows."""
    world = World(kernels_on_gpu, requests=6)
    captured = {}
    for rows in (BATCHES[0], BATCHES[0][:2]):
        inputs = [world.decode(layer, rows) for layer in (SOURCE, CONSUMER)]

        def step(inputs=inputs):
            schedule = world.indexer.publish_decode(inputs[0])
            world.indexer.consume_decode(inputs[1], schedule)
            return schedule

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            schedule = step()
        captured[len(rows)] = (graph, inputs, schedule)
    for rows in (BATCHES[3], BATCHES[4][1:3], BATCHES[5], BATCHES[1][:2], BATCHES[2]):
        graph, inputs, schedule = captured[len(rows)]
        refill(world, inputs, rows)
        graph.replay()
        torch.cuda.synchronize()
        world.check_schedule(rows, schedule)
        world.check_consumer(CONSUMER, rows, schedule, slots=inputs[1].out_page_indices)


def test_capture_past_the_limits_is_refused(kernels_on_gpu):
    world = World(kernels_on_gpu, requests=6, max_rows=4)
    inputs = world.decode(SOURCE, BATCHES[0][:4])
    world.indexer.publish_decode(inputs)
    torch.cuda.synchronize()
    large = world.decode(SOURCE, BATCHES[0])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="row buffers hold 4"), torch.cuda.graph(graph):
        world.indexer.publish_decode(large)
