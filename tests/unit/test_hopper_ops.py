"""The host side of the Hopper kernels: what is refused, what is passed, and what goes the portable way.

A stand-in for the built module records each call under the parameter names of the C++ entry points. Nothing is computed.
"""

import dataclasses
import re
import types
from pathlib import Path

import pytest
import torch

from sglang_dsv41.kernels import PagedKeys
from sglang_dsv41.kernels.hopper import HopperKernels, ops
from sglang_dsv41.kernels.portable import PortableKernels
from tests.candidates import SMALL, garbage, make_keys, make_problem

# Fewer picks than blocks, an even number of blocks of 8: one launch publishes.
FUSED = dataclasses.replace(SMALL, topk=8, topk_blocks=16)
LENGTHS = [200, 64, 130, 9]


def entry_points() -> dict[str, list[tuple[str, str]]]:
    """(type, name) of each parameter of the functions that ``ops.module`` exports, from their C++ text."""
    text = (Path(ops.__file__).with_name("hopper_ffi.cuh")).read_text(encoding="utf-8")
    found = {}
    for name, parameters in re.findall(r"^void (\w+)\(([^)]*)\) \{", text, re.MULTILINE):
        if "TensorView" in parameters:
            found[name] = [tuple(p.split()) for p in parameters.split(",")]
    return found


ENTRY_POINTS = entry_points()
TYPES = {"int64_t": int, "bool": bool, "tvm::ffi::TensorView": torch.Tensor}


@pytest.fixture
def recorded(monkeypatch):
    """The calls that reach the kernels: ``name`` of the entry point and its arguments as attributes."""
    calls = []

    class Module:
        def __getattr__(self, name):
            def call(*arguments):
                parameters = ENTRY_POINTS[name]
                for (kind, parameter), argument in zip(parameters, arguments, strict=True):
                    assert type(argument) is TYPES[kind], f"{name}: {parameter} is a {type(argument).__name__}"
                named = {parameter: a for (_, parameter), a in zip(parameters, arguments, strict=True)}
                calls.append(types.SimpleNamespace(entry=name, **named))

            return call

    monkeypatch.setattr(ops, "module", Module)
    return calls


@pytest.fixture
def problem():
    return make_problem(LENGTHS, FUSED)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views name the same elements."""
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def absent(t: torch.Tensor, dtype: torch.dtype) -> bool:
    return t.numel() == 0 and t.dtype == dtype


def test_entry_points_are_those_that_are_asked_for():
    assert set(ENTRY_POINTS) == {"index_logits", "source_topk"}


# ---- index_logits ----


def score(problem, *, keys=None, table_slots=None, **options):
    rows = problem.rows
    out = problem.buffers.dense_logits(rows.num_rows, rows.block_table.shape[1] * rows.table_slots)
    ops.index_logits(
        problem.queries,
        keys or problem.keys,
        rows.block_table,
        table_slots or rows.table_slots,
        rows.lens,
        out,
        **options,
    )
    return out


def off_16_bytes() -> torch.Tensor:
    pool = torch.zeros(3 * 4352 + 8, dtype=torch.uint8)[8:].view(3, 4352)
    assert pool.data_ptr() % 16 == 8 and pool.stride(0) % 16 == 0
    return pool


# keys, table_slots, and what the message says was found
REFUSED = {
    "page stride off 16 bytes": (
        lambda: make_keys(3, 64, 0, page_stride=4360),
        64,
        "index-K pages of 4360 B",
    ),
    "pool off 16 bytes": (lambda: PagedKeys(off_16_bytes(), 64), 64, "index-K pages of 4352 B from address 0x"),
    "slots past 32 bits": (
        lambda: PagedKeys(torch.zeros(1, 4352, dtype=torch.uint8).expand(2**25 + 1, 4352), 64),
        64,
        f"{2**31 + 64} slots",
    ),
    "page of 48": (lambda: make_keys(3, 48, 0), 16, "pages of 48 and table entries of 16 positions"),
    "page of 4": (lambda: make_keys(3, 4, 0), 8, "pages of 4 and table entries of 8 positions"),
    "table entry of 24": (lambda: make_keys(3, 64, 0), 24, "pages of 64 and table entries of 24 positions"),
    "table entry of 4": (lambda: make_keys(3, 64, 0), 4, "pages of 64 and table entries of 4 positions"),
}


@pytest.mark.parametrize("keys,table_slots,found", REFUSED.values(), ids=REFUSED)
def test_pools_and_pages_that_the_kernel_does_not_take(keys, table_slots, found, problem, recorded):
    """Refused before a launch, with what was found and the variable that helps."""
    with pytest.raises(ValueError) as error:
        score(problem, keys=keys(), table_slots=table_slots)
    assert found in str(error.value) and "Set DSV41_SPARSE_KERNELS=portable" in str(error.value)
    assert not recorded


@pytest.mark.parametrize("page_slots,table_slots", [(64, 64), (128, 64), (64, 8), (16, 256), (8, 16)])
def test_pages_that_it_takes(page_slots, table_slots, problem, recorded):
    score(problem, keys=make_keys(3, page_slots, 0), table_slots=table_slots)
    assert (recorded[0].page_slots, recorded[0].table_slots) == (page_slots, table_slots)


def test_logits_without_requests_and_maxima(problem, recorded):
    out = score(problem)
    (call,) = recorded
    rows = problem.rows
    assert absent(call.requests, torch.int32) and absent(call.maxima, torch.bfloat16)
    assert call.q is problem.queries.q and call.weights is problem.queries.weights and call.pool is problem.keys.pool
    assert same(call.table, rows.block_table) and same(call.lens, rows.lens) and same(call.out, out)


def test_logits_with_requests_and_maxima(problem, recorded):
    requests = torch.zeros(len(LENGTHS), dtype=torch.int32)
    maxima = problem.buffers.block_maxima(len(LENGTHS), 32)
    score(problem, requests=requests, maxima=maxima)
    assert recorded[0].requests is requests and recorded[0].maxima is maxima


# ---- no work, no launch ----


def test_no_rows_no_call(problem, recorded):
    none, rows = slice(2, 2), problem.rows
    logits, maxima = problem.buffers.dense_logits(0, 256), problem.buffers.block_maxima(0, 32)
    ops.index_logits(problem.queries[none], problem.keys, rows.block_table[none], 64, rows.lens[none], logits)
    for publish in (False, True):
        ops.source_topk(logits, maxima, rows, none, FUSED.topk, garbage(problem), None, publish=publish)
    assert not recorded


# ---- selections ----


@pytest.mark.parametrize("wanted", [("slots",), ("positions",), ("slots", "positions")], ids="+".join)
@pytest.mark.parametrize("publish", [False, True])
def test_outputs_of_a_source(publish, wanted, problem, recorded):
    """Of the rows of the tile, in the places they have in the whole output."""
    tile, rows = slice(1, 3), problem.rows
    outs = {name: garbage(problem, FUSED.topk + 3) if name in wanted else None for name in ("slots", "positions")}
    logits, maxima = problem.buffers.dense_logits(2, 256), problem.buffers.block_maxima(2, 32)
    ops.source_topk(logits, maxima, rows, tile, FUSED.topk, outs["slots"], outs["positions"], publish=publish)
    (call,) = recorded
    for name, out in outs.items():
        passed = getattr(call, name)
        assert absent(passed, torch.int32) if out is None else same(passed, out[tile])
    schedule = (call.sparse_indices, call.physical_blocks, call.valid_columns)
    if publish:
        expected = (rows.sparse_indices[tile], rows.physical_blocks[tile], rows.end[tile])
        assert all(map(same, schedule, expected)) and call.blocks_kept == FUSED.topk_blocks
    else:
        assert all(absent(t, torch.int32) for t in schedule) and call.blocks_kept == FUSED.topk + 2
    assert same(call.logits, logits) and same(call.maxima, maxima)
    assert same(call.lens, rows.lens[tile]) and same(call.table, rows.block_table[tile])
    assert (call.table_slots, call.topk) == (rows.table_slots, FUSED.topk)


# ---- the kernel set ----


@pytest.fixture
def portable(monkeypatch):
    """The operations that went the portable way; they do nothing."""
    calls = []

    def stand_in(name):
        return lambda self, *args, **kwargs: calls.append(name)

    for name in ("select_visible", "choose_blocks", "expand", "sparse_logits", "select_candidates"):
        monkeypatch.setattr(PortableKernels, name, stand_in(name))
    return calls


def kernels_of(problem) -> HopperKernels:
    return HopperKernels(problem.geometry, problem.buffers)


def published(problem, kernels, change=lambda logits: logits):
    """A source's step; ``change`` is what becomes of a tile's logits in between."""
    slots = garbage(problem)
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        kernels.publish(change(logits), problem.rows, tile, slots)


def test_a_source_publishes_with_the_maxima_of_its_tile(recorded, portable):
    """Three rows, two a pass: each selection reads what the scoring of its own rows wrote."""
    problem = make_problem([200, 64, 130], FUSED, scratch_bytes=2 * 512)
    kernels = kernels_of(problem)
    published(problem, kernels)
    assert [c.entry for c in recorded] == ["index_logits", "source_topk"] * 2 and not portable
    for scored, chosen, tile in zip(recorded[::2], recorded[1::2], (slice(0, 2), slice(2, 3)), strict=True):
        assert same(scored.maxima, chosen.maxima) and same(scored.out, chosen.logits)
        assert same(scored.q, problem.queries.q[tile]) and same(scored.lens, problem.rows.lens[tile])
        assert same(scored.table, problem.rows.block_table[tile])
        assert chosen.maxima.shape == (tile.stop - tile.start, chosen.logits.shape[1] // 8)
        assert same(chosen.lens, problem.rows.lens[tile]) and same(
            chosen.sparse_indices, problem.rows.sparse_indices[tile]
        )
    assert kernels.calls == {"dense_logits": 2, "publish": 2}


def test_a_full_layer_selects_with_them_and_publishes_nothing(problem, recorded, portable):
    kernels = kernels_of(problem)
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        kernels.select_visible(logits, problem.rows, tile, garbage(problem))
    scored, chosen = recorded
    assert same(scored.maxima, chosen.maxima) and absent(chosen.sparse_indices, torch.int32) and not portable
    assert kernels.calls == {"dense_logits": 1, "select_visible": 1}


# What one launch cannot publish; the source's own top-k may still be the kernel's.
OTHER_GEOMETRIES = {
    "blocks of 24": dataclasses.replace(FUSED, block_size=24),
    "blocks of 16": dataclasses.replace(FUSED, block_size=16),
    "an odd number of blocks": dataclasses.replace(FUSED, topk_blocks=15),
    "fewer blocks than picks": SMALL,
    "more blocks than a list holds": dataclasses.replace(FUSED, topk_blocks=2050),
}


@pytest.mark.parametrize("geometry", OTHER_GEOMETRIES.values(), ids=OTHER_GEOMETRIES)
def test_schedules_of_other_geometries_are_portable(geometry, recorded, portable):
    problem = make_problem(LENGTHS, geometry)
    published(problem, kernels_of(problem))
    assert [c.entry for c in recorded] == ["index_logits", "source_topk"]
    assert absent(recorded[1].sparse_indices, torch.int32) and portable == ["choose_blocks", "expand"]


NOT_TAKEN = {
    "a start off 16 bytes": lambda logits: logits[:, 1:],
    "rows off 16 bytes": lambda logits: logits.new_empty(logits.shape[0], logits.shape[1] + 1)[:, :-1],
    "fp32": torch.Tensor.float,
}


@pytest.mark.parametrize("change", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_logits_that_the_selection_does_not_take_are_portable(change, problem, recorded, portable):
    published(problem, kernels_of(problem), change)
    assert [c.entry for c in recorded] == ["index_logits"]
    assert portable == ["select_visible", "choose_blocks", "expand"]


@pytest.mark.parametrize("past,entries", [(0, ["index_logits", "source_topk"]), (64, ["index_logits"])])
def test_contexts_past_a_cluster_are_portable(past, entries, problem, recorded, portable):
    """A context of just what the largest cluster holds, and of a page more: no maxima are written then."""
    width = ops.MAX_BLOCKS * 8 + past
    problem.buffers = type(problem.buffers)(
        FUSED, max_rows=4, scratch_bytes=1, max_context=width, dense_rows=1, device="cpu"
    )
    problem.rows = problem.buffers.rows(
        torch.tensor([99]), ratio=1, block_table=torch.zeros(1, width // 64, dtype=torch.int32), table_slots=64
    )
    problem.queries = problem.queries[:1]
    published(problem, kernels_of(problem))
    assert [c.entry for c in recorded] == entries and recorded[0].out.shape == (1, width)
    assert absent(recorded[0].maxima, torch.bfloat16) == bool(past)
    assert portable == (["select_visible", "choose_blocks", "expand"] if past else [])


def test_more_picks_than_kept_blocks_are_portable(recorded, portable):
    problem = make_problem(LENGTHS, dataclasses.replace(FUSED, topk=ops.MAX_KEPT_BLOCKS + 1))
    published(problem, kernels_of(problem))
    assert [c.entry for c in recorded] == ["index_logits"] and absent(recorded[0].maxima, torch.bfloat16)
    assert portable == ["select_visible", "choose_blocks", "expand"]


def test_maxima_serve_only_the_rows_that_they_were_written_for(problem, recorded, portable):
    kernels, slots = kernels_of(problem), garbage(problem)
    for _, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        kernels.select_visible(logits[:2], problem.rows, slice(0, 2), slots)
        kernels.select_visible(logits[1:], problem.rows, slice(1, 4), slots)
    assert [c.entry for c in recorded] == ["index_logits"] and portable == ["select_visible"] * 2


# Rows of one request follow each other: in a verify step few, in an extend many; a decode has one of each.
MODES = {
    "decode": ({}, False, None),
    "verify": ({"is_verify": True}, True, False),
    "extend": ({"rows_per_request": [3, 1]}, True, True),
    "a context-parallel rank": ({"rows_per_request": [0, 3, 0, 1], "interleaved": True}, True, True),
}


@pytest.mark.parametrize("mode,shares,long_runs", MODES.values(), ids=MODES)
def test_rows_of_a_request_share_keys(mode, shares, long_runs, problem, recorded):
    requests = torch.tensor([3, 3, 3, 5], dtype=torch.int32)
    problem.rows = dataclasses.replace(problem.rows, row_indices=requests, **mode)
    for _ in kernels_of(problem).dense_logits_tiles(problem.queries, problem.keys, problem.rows):
        pass
    (call,) = recorded
    assert same(call.requests, requests) if shares else absent(call.requests, torch.int32)
    assert not shares or call.long_runs == long_runs


@pytest.mark.parametrize("block_size,kernel_block", [(8, 8), (24, 8), (32, 16)])
def test_a_consumer_reads_its_schedule(block_size, kernel_block, recorded, portable):
    """Through the schedule's physical blocks, whatever the candidate block."""
    problem = make_problem(LENGTHS, dataclasses.replace(FUSED, block_size=block_size), scratch_bytes=1)
    kernels, rows, slots = kernels_of(problem), problem.rows, garbage(problem)
    tiles = list(kernels.passes(rows.num_rows))
    for tile in tiles:
        logits = kernels.sparse_logits(problem.queries, problem.keys, rows, tile)
        kernels.select_candidates(logits, rows, tile, out_positions=None, out_slots=slots)
    assert len(tiles) == len(LENGTHS) and portable == ["select_candidates"] * len(tiles)
    for scored, tile in zip(recorded, tiles, strict=True):
        assert scored.entry == "index_logits" and scored.table_slots == kernel_block
        assert same(scored.table, rows.physical_blocks[tile]) and same(scored.lens, rows.end[tile])
        assert absent(scored.requests, torch.int32) and absent(scored.maxima, torch.bfloat16)
    assert kernels.calls == {"sparse_logits": len(tiles)}
