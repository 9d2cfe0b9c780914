#!/usr/bin/env python3
"""Sweep the launch of the portable scoring kernel: tile, warps, grid, width of loads, FP8 or bf16 products.

    python scripts/bench_variants.py                 # -> benchmarks/results/variants.json

Needs one CUDA GPU of compute capability 9.0 and SGLang. Variants are timed in turn, round after round, like the cases
of bench_kernels.py; a row's `stock` is the default launch, so a ratio above 1 is a variant to prefer.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from sglang_dsv41.bench.kernel_cases import Case, graph_of, sample
from sglang_dsv41.bench.kernels import PAGE_SLOTS
from sglang_dsv41.bench.results import ResultFile
from sglang_dsv41.kernels.scoring import ScoringConfig, paged_index_logits

TILES_AND_WARPS = ((32, 2), (64, 4), (128, 8))
BLOCKS_PER_SM = (4, 8)
SHAPES = (("sparse_logits", 8, 131072), ("dense_logits", 8, 131072))


def variants() -> list[ScoringConfig]:
    """Every launch of the sweep but the default's own."""
    sweep = itertools.product((True, False), (True, False), TILES_AND_WARPS, BLOCKS_PER_SM)
    found = [ScoringConfig(tile, warps, blocks, wide, fp8) for fp8, wide, (tile, warps), blocks in sweep]
    return [config for config in found if config != ScoringConfig(fp8=True)]


def scorer(case: Case, kind: str, config: ScoringConfig):
    def run(s):
        rows = s.rows
        if kind == "sparse_logits":
            out = case.buffers.compact_logits(case.rows)
            paged_index_logits(s.queries, case.keys, rows.physical_blocks, 8, rows.end, out, config)
        else:
            out = case.buffers.dense_logits(case.rows, case.context)
            paged_index_logits(s.queries, case.keys, rows.block_table, PAGE_SLOTS, rows.lens, out, config)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved samples of each variant (default 7)")
    parser.add_argument("--out", default="benchmarks/results/variants.json", help="result file")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("bench_variants.py needs a CUDA GPU of compute capability 9.0 (H100, H200, H20)")
    results = ResultFile(args.out, "variants")
    for kind, requests, context in SHAPES:
        case = Case(requests, context, dense=kind == "dense_logits")
        configs = [ScoringConfig(), *variants()]
        graphs = [graph_of(scorer(case, kind, config), case.sets) for config in configs]
        samples: list[list[float]] = [[] for _ in graphs]
        for _ in range(args.rounds):
            for graph, times in zip(graphs, samples):
                times.append(sample(graph, case.num_sets))
        for config, times in zip(configs[1:], samples[1:]):
            products = "fp8" if config.fp8 else "bf16"
            launch = f"{products} {config.tile_columns}x{config.warps} {config.blocks_per_sm}/SM"
            launch += " wide" if config.wide else ""
            results.add(f"{kind} {requests}x{context} {launch}", "us", stock=samples[0], ours=times)
        del graphs, case
        torch.cuda.empty_cache()
    print(results.table())


if __name__ == "__main__":
    main()
