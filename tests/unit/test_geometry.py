"""CandidateGeometry reads a model's config, and refuses one that does not fit together."""

import types

import pytest

from sglang_dsv41.geometry import CandidateGeometry, GeometryError, kernel_block_of


def released(**changes):
    config = dict(
        compress_ratios=[0, 0] + [2] * 18 + [1] * 20,
        kv_source_layer_ids=[2, 8, 14, 20],
        index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        index_topk=512,
        index_n_heads=32,
        index_head_dim=128,
    )
    return types.SimpleNamespace(**{**config, **changes})


def test_released_topology():
    geometry = CandidateGeometry.from_config(released())
    assert (geometry.source_layer, geometry.consumer_layers) == (20, (24, 28, 32, 36))
    assert (geometry.topk_blocks, geometry.block_size, geometry.kernel_block, geometry.expansion) == (2048, 8, 8, 1)
    assert (geometry.kernel_blocks, geometry.columns, geometry.topk, geometry.ratio) == (2048, 16384, 512, 1)


@pytest.mark.parametrize(
    "block_size, kernel_block, expansion", [(8, 8, 1), (16, 16, 1), (24, 8, 3), (32, 16, 2), (40, 8, 5)]
)
def test_larger_candidate_blocks_expand_by_the_factor(block_size, kernel_block, expansion):
    geometry = CandidateGeometry.from_config(released(candidate_block_size=block_size, candidate_topk_blocks=100))
    assert (geometry.kernel_block, geometry.expansion) == (kernel_block, expansion)
    assert (geometry.kernel_blocks, geometry.columns) == (100 * expansion, 100 * block_size)


@pytest.mark.parametrize("block_size", [0, 4, 12, -8])
def test_block_size_that_no_kernel_scores(block_size):
    with pytest.raises(GeometryError, match="multiple of 8"):
        kernel_block_of(block_size)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(candidate_topk_blocks=0), "no candidate blocks"),
        (dict(candidate_source_layer_id=-1), "no candidate blocks"),
        (dict(candidate_block_size=12), "multiple of 8"),
        (dict(candidate_source_layer_id=21), "not one of index_source_layer_ids"),
        (dict(candidate_source_layer_id=36), "no layer would consume"),
        (dict(compress_ratios=[1] * 30), "lies past them"),
        (dict(compress_ratios=[0, 0] + [2] * 24 + [1] * 14), "must share"),
        (dict(compress_ratios=[4] * 40), "must share"),
        (dict(kv_source_layer_ids=[2, 8, 14, 20, 28]), "must read the index K of the source"),
    ],
)
def test_geometry_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(GeometryError, match=message):
        CandidateGeometry.from_config(released(**changes))
