"""One chunk of a long prefill through the Hopper kernels: time, kernel shares, peak memory, and no host synchronisation.

    python scripts/profile_extend.py --rows 8192 --context 524288
    python scripts/profile_extend.py --rows 16384 --context 1048576 --out publish.json

The chunk's rows are the last ones of a request of CONTEXT positions with random keys. A step is what one chunk of the
released model asks of the index layers' kernels: the source's publish, a full top-k layer and four consumers. It runs
under torch's synchronisation debug mode, in which a read of device data on the host is an error, then once under the
profiler. Needs one GPU of compute capability 9.0 and SGLang.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

HEADS, CONSUMERS, PAGE, TABLE = 32, 4, 64, 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="rows of the chunk (default: %(default)s)")
    parser.add_argument("--context", type=int, default=524288, help="positions that the last row sees")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.rows > options.context or options.context % TABLE:
        parser.error(f"--context must be a multiple of {TABLE} and at least --rows")
    return options


def main() -> int:
    options = arguments()
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("profile_extend.py: needs a GPU of compute capability 9.0 (H100, H200, H20)", file=sys.stderr)
        return 2
    from sglang_dsv41 import envs
    from sglang_dsv41.geometry import CandidateGeometry
    from sglang_dsv41.kernels import IndexQueries, PagedKeys
    from sglang_dsv41.kernels.hopper import HopperKernels
    from sglang_dsv41.rows import RowBuffers

    device, (rows, context) = torch.device("cuda"), (options.rows, options.context)
    geometry = CandidateGeometry(
        topk_blocks=2048, block_size=8, topk=512, heads=HEADS, source_layer=20, consumer_layers=(24, 28, 32, 36)
    )
    torch.manual_seed(0)
    pool = torch.randint(0, 256, (context // PAGE, PAGE * 68), dtype=torch.uint8, device=device)
    pool[:, PAGE * 64 :] = torch.randint(120, 127, (context // PAGE, PAGE * 4), dtype=torch.uint8, device=device)
    keys = PagedKeys(pool=pool, page_slots=PAGE)
    q = (torch.randint(-6, 7, (rows, HEADS, 128), device=device) / 2).to(torch.bfloat16)
    weights = torch.randn(rows, HEADS, device=device).to(torch.bfloat16)
    queries = IndexQueries(q=q, weights=weights)
    table = torch.randperm(context // TABLE, device=device).to(torch.int32).repeat(rows, 1)
    positions = torch.arange(context - rows, context, device=device)
    out_slots = torch.empty(rows, geometry.topk, dtype=torch.int32, device=device)
    out_positions = torch.empty_like(out_slots)

    torch.cuda.synchronize()
    inputs = torch.cuda.memory_allocated()
    buffers = RowBuffers(
        geometry,
        max_rows=rows,
        scratch_bytes=envs.scratch_bytes(),
        max_context=context,
        dense_rows=64,
        device=device,
    )
    block_ids = 2 * rows * geometry.topk_blocks * 4  # logical and physical, int32
    kernels = HopperKernels(geometry, buffers)
    kernels.prepare_extend()
    if kernels.extend is None:
        return 2
    held = torch.cuda.memory_allocated() - inputs

    def select(publish: bool):
        of = buffers.rows(
            positions,
            ratio=1,
            block_table=table,
            table_slots=TABLE,
            rows_per_request=[rows],
            request_rows=torch.zeros_like(positions),
            scheduled=publish,
            pool_slots=context,
        )
        for tile, logits in kernels.dense_logits_tiles(queries, keys, of):
            (kernels.publish if publish else kernels.select_visible)(logits, of, tile, out_slots, out_positions)
            del logits
        return of

    def consume(of):
        for tile in kernels.passes(of.num_rows):
            logits = kernels.sparse_logits(queries, keys, of, tile)
            kernels.select_candidates(logits, of, tile, out_positions=out_positions, out_slots=out_slots)

    def timed(call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def step():
        of = select(True)
        select(False)
        for _ in range(CONSUMERS):
            consume(of)

    step()  # compile
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        of = select(True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    report = {
        "gpu": torch.cuda.get_device_name(),
        "rows": rows,
        "context": context,
        "host_synchronisations": 0,  # one raises
        "publish_scratch_mib": round((held + peak - block_ids) / 2**20, 1),
        "block_ids_mib": round(block_ids / 2**20, 1),
        "publish_ms": round(statistics.median(timed(lambda: select(True)) for _ in range(options.rounds)), 3),
        "full_ms": round(statistics.median(timed(lambda: select(False)) for _ in range(options.rounds)), 3),
        "consumer_ms": round(statistics.median(timed(lambda: consume(of)) for _ in range(options.rounds)), 3),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events) or 1
    report["kernels"] = [
        {
            "name": e.key[:120],
            "calls": e.count,
            "ms": round(e.device_time_total / 1e3, 3),
            "share": round(e.device_time_total / total, 4),
        }
        for e in events[:16]
    ]
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
