"""A test-only SGLang plugin: compares our selections with SGLang's own inside a live server.

Every publish and consume of ours also runs SGLang's Hopper code on the same inputs, into outputs of its own, and counts
on the device how the two differ, so that replays of a CUDA graph count too. SGLang's consumers get the blocks that ours
published: which of two equal blocks is published is a free choice, and would change a consumer's picks far from its cut.
In decode and verify SGLang's picks are the exact top-k of its own scores. Its kernel is no oracle: for few rows past 32,768
positions it takes a cluster of thread blocks, which keep no more than 2048 of the scores in the cut's bin, a sixteenth of an
octave wide (`TopKCluster` in SGLang's `topk_impl.cuh` says so); scores of random weights crowd there.
Put this folder on PYTHONPATH and set DSV41_PROBE_OUT to a file; it is rewritten at the start of every extend. `{rank}` in
its name is the process's TP rank: of several ranks each writes a file of its own. One JSON object for each of source,
decode, verify and extend:

    calls    passes that ran, graph replays included
    rows     live rows compared
    overlap  smallest share of SGLang's picks that ours holds too or that equal our cut exactly, over all rows
    same     smallest share that ours holds, exact ties at the cut counted as different
    mean     mean of `same`
    gap      largest amount by which a pick of one side that the other lacks lies off the cut, in units of the row's
             largest score: 0 when all differences are ties
    short    rows whose numbers of picks differ
    blocks   source only: largest difference of the published blocks' maxima, sorted, in units of the row's largest
    missed, stock_missed
             source only: largest amount by which a row's picks, sorted, fall short of the best of its dense logits, ours
             and those of SGLang's kernel, in the same units
    kernel   decode and verify: smallest share of the exact picks that SGLang's kernel holds
    longest  visible positions of the row with the smallest overlap

and `digests`: for each index layer and mode a hash of all its selections so far, step by step, whatever their order in a
row: pool slots in decode and verify, positions in extend. Ranks that do the same work on the same pages have the same.
"""

import json
import os

MODES = ("source", "decode", "verify", "extend")
CALLS, ROWS, OVERLAP, SAME, TOTAL, GAP, SHORT, BLOCKS, MISSED, STOCK_MISSED, LONGEST, KERNEL = range(12)
# Rows compared at once in an extend: [rows, 512, 512] booleans.
COMPARED_ROWS = 256


def install() -> None:
    path = os.environ.get("DSV41_PROBE_OUT")
    if path:
        from sglang_dsv41 import indexer

        Probe(path).wrap(indexer.SparseCandidateIndexer)


class Probe:
    def __init__(self, path: str) -> None:
        self.path = path
        self.stats = None
        self.stock = None
        self.indexer = None
        self.stock_published = {}
        self.kernel_picks = None
        self.digests = {}

    def wrap(self, cls) -> None:
        probe = self
        publish_decode, consume_decode = cls.publish_decode, cls.consume_decode
        publish_prefill, consume_prefill = cls.publish_prefill, cls.consume_prefill

        def decode_publish(self, inputs):
            probe.prepare(self, inputs)
            theirs = with_outputs(inputs)
            stock = probe.stock.publish_decode(theirs)
            published = publish_decode(self, inputs)
            probe.compare(self, inputs, "source", published, inputs.out_page_indices, theirs.out_page_indices)
            probe.stock_published["decode"] = probe.compare_blocks(self, inputs, published, stock)
            mode = "verify" if inputs.is_verify else "decode"
            probe.digest(inputs.layer_id, mode, published, inputs.out_page_indices)
            return published

        def decode_consume(self, inputs, published):
            consume_decode(self, inputs, published)
            theirs = with_outputs(inputs)
            probe.stock.consume_decode(theirs, probe.stock_published["decode"])
            mode = "verify" if inputs.is_verify else "decode"
            probe.compare(self, inputs, mode, published, inputs.out_page_indices, theirs.out_page_indices)
            probe.digest(inputs.layer_id, mode, published, inputs.out_page_indices)

        def prefill_publish(self, inputs):
            probe.prepare(self, inputs)
            probe.write()
            probe.stock_published["extend"] = self.prefill_source.publish_prefill(with_outputs(inputs))
            return publish_prefill(self, inputs)

        def prefill_consume(self, inputs, published):
            consume_prefill(self, inputs, published)
            if published is None:
                return
            theirs = with_outputs(inputs)
            self.prefill_source.consume_prefill(theirs, probe.stock_published["extend"])
            ours = positions_to_slots(self, inputs, published, inputs.out_raw_indices)
            stock = positions_to_slots(self, inputs, published, theirs.out_raw_indices)
            if inputs.out_page_indices is not None:
                probe.same_slots(inputs, ours)
            probe.compare(self, inputs, "extend", published, ours, stock)
            probe.digest(inputs.layer_id, "extend", published, inputs.out_raw_indices)

        cls.publish_decode, cls.consume_decode = decode_publish, decode_consume
        cls.publish_prefill, cls.consume_prefill = prefill_publish, prefill_consume

    def prepare(self, indexer, inputs) -> None:
        if self.stats is not None:
            return
        self.indexer = indexer
        import torch
        from sglang.srt.layers.attention.dsv4.v41_indexer import dense_blocks

        device = inputs.positions.device
        self.stats = torch.zeros((len(MODES), 12), dtype=torch.float64, device=device)
        self.stats[:, OVERLAP] = self.stats[:, SAME] = self.stats[:, KERNEL] = 1.0
        geometry = indexer.geometry
        # All of them now: what is allocated while a graph is captured belongs to the graph.
        for layer in (geometry.source_layer, *geometry.consumer_layers):
            for mode in MODES[1:]:
                self.digests[layer, mode] = torch.zeros((), dtype=torch.int64, device=device)
        dense_blocks.select_decode = self.exact(dense_blocks.select_decode)
        self.stock = dense_blocks.DenseBlocksBackend(
            token_to_kv_pool=indexer.token_to_kv_pool,
            req_to_token=indexer.prefill_source.req_to_token,
            candidate_topk_blocks=geometry.topk_blocks,
            candidate_block_size=geometry.block_size,
            use_deep_gemm_prefill=False,
        )

    def exact(self, by_kernel):
        """SGLang's selection of a decode step with an exact top-k; its kernel's picks are kept beside it."""
        import torch
        from sglang.kernels.ops.attention.dsv4.fp4_indexer import finish_paged_indexer_topk

        def select_decode(inputs, d, topk):
            kernel = with_outputs(inputs)
            by_kernel(kernel, d, topk)
            self.kernel_picks = kernel.out_page_indices
            seen = torch.arange(d.lmax, device=d.scores.device) < d.lens[:, None]
            best = d.scores.masked_fill(~seen, -torch.inf).topk(min(topk, d.lmax), dim=1, sorted=False)
            picks = best.indices.to(torch.int32).masked_fill(best.values == -torch.inf, -1)
            finish_paged_indexer_topk(
                picks,
                d.scores,
                d.lens,
                d.req,
                d.req_to_token,
                inputs.out_page_indices,
                None,
                d.ratio,
                d.has_candidate_mask,
            )

        return select_decode

    def compare_blocks(self, indexer, inputs, published, stock):
        """Compare the block choices by their maxima; returns our blocks as SGLang's publish."""
        import torch
        from sglang.kernels.ops.attention.dsv4.candidate_blocks import candidate_block_mask
        from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import BlockIds

        rows = published.rows
        width = rows.block_table.shape[1] * rows.table_slots
        logits = indexer.buffers.dense_logits(rows.num_rows, width).float()
        ours = torch.where(rows.sparse_indices < 2**31 - 1, rows.sparse_indices, -1)
        sides = []
        for blocks in (ours, stock.blocks):
            position = blocks.long().clamp_min(0)[:, :, None] * 8 + torch.arange(8, device=blocks.device)
            seen = (blocks >= 0)[:, :, None] & (position < rows.lens[:, None, None])
            value = logits.gather(1, position.clamp_max(width - 1).flatten(1)).view(position.shape)
            best = value.masked_fill(~seen, -torch.inf).amax(2)
            sides.append(best.sort(1, descending=True).values)
        largest = sides[1].masked_fill(torch.isinf(sides[1]), 0).abs().amax(1, keepdim=True).clamp_min(1e-30)
        # The newest block is published whatever its maximum, by both; absent ones (-inf) must be as many on both sides.
        off = torch.where(sides[0] == sides[1], 0, (sides[0] - sides[1]).abs() / largest).amax()
        stats = self.stats[MODES.index("source")]
        stats[BLOCKS] = torch.maximum(stats[BLOCKS], off.double())
        lmax = min(
            inputs.paged_metadata.max_compressed_seq_len, self.stock.req_to_token.shape[1] // inputs.compress_ratio
        )
        return BlockIds(blocks=ours, decode_mask=candidate_block_mask(ours, lmax, 8))

    def compare(self, indexer, inputs, mode, published, ours, stock) -> None:
        import torch

        from sglang_dsv41.kernels.reference import paged_index_logits

        stats = self.stats[MODES.index(mode)]
        stats[CALLS] += 1
        queries, keys = indexer.kernels.project(inputs), indexer._keys(inputs)
        total = published.rows.num_rows
        for start in range(0, total, COMPARED_ROWS):
            at = slice(start, min(start + COMPARED_ROWS, total))
            a, b = ours[at].long(), stock[at].long()
            live = published.rows.lens[at] > 0
            held_by_ours = (b[:, :, None] == a[:, None, :]).any(2)
            held_by_stock = (a[:, :, None] == b[:, None, :]).any(2)
            picked_a, picked_b = a >= 0, b >= 0
            count = picked_b.sum(1)
            scores_a = torch.empty(a.shape, dtype=torch.float32, device=a.device)
            scores_b = torch.empty_like(scores_a)
            for row in range(0, a.shape[0], 16):
                part = slice(row, row + 16)
                rows = slice(at.start + row, min(at.start + row + 16, at.stop))
                scores_a[part] = paged_index_logits(queries[rows], keys, a[part])
                scores_b[part] = paged_index_logits(queries[rows], keys, b[part])
            cut_a = scores_a.masked_fill(~picked_a, torch.inf).amin(1, keepdim=True)
            cut_b = scores_b.masked_fill(~picked_b, torch.inf).amin(1, keepdim=True)
            largest = scores_b.masked_fill(~picked_b, 0).abs().amax(1, keepdim=True).clamp_min(1e-30)
            off_a = ((scores_a - cut_b).abs() / largest).masked_fill(~picked_a | held_by_stock, 0).amax(1)
            off_b = ((scores_b - cut_a).abs() / largest).masked_fill(~picked_b | held_by_ours, 0).amax(1)
            tied = held_by_ours | (scores_b == cut_a)
            share = torch.where(live, (held_by_ours & picked_b).sum(1) / count.clamp_min(1), 1.0).double()
            overlap = torch.where(live, (tied & picked_b).sum(1) / count.clamp_min(1), 1.0).double()
            gap = torch.where(live, torch.maximum(off_a, off_b), 0).double()
            stats[ROWS] += live.sum()
            stats[TOTAL] += torch.where(live, share, 0).sum()
            stats[SAME] = torch.minimum(stats[SAME], share.amin())
            worst = published.rows.lens[at][overlap.argmin()].double()
            stats[LONGEST] = torch.where(overlap.amin() < stats[OVERLAP], worst, stats[LONGEST])
            if mode != "extend":
                kernel = self.kernel_picks[at].long()
                held = ((b[:, :, None] == kernel[:, None, :]).any(2) & picked_b).sum(1) / count.clamp_min(1)
                stats[KERNEL] = torch.minimum(stats[KERNEL], torch.where(live, held, 1.0).double().amin())
            if mode == "source":
                scores_k = paged_index_logits(queries[at], keys, kernel)
                self.compare_with_best(stats, published, at, scores_a, scores_k, picked_a, kernel >= 0)
            stats[OVERLAP] = torch.minimum(stats[OVERLAP], overlap.amin())
            stats[GAP] = torch.maximum(stats[GAP], gap.amax())
            stats[SHORT] += (live & (picked_a.sum(1) != count)).sum()

    def compare_with_best(self, stats, published, at, scores_a, scores_b, picked_a, picked_b) -> None:
        """Each side's picks, sorted by score, against the best of the row's dense logits."""
        import torch

        rows = published.rows
        width = rows.block_table.shape[1] * rows.table_slots
        column = torch.arange(width, device=rows.lens.device)
        # The logits of the pass that has just run.
        logits = self.indexer.buffers.dense_logits(rows.num_rows, width)[at].float()
        logits = logits.masked_fill(column >= rows.lens[at][:, None], -torch.inf)
        best = logits.topk(min(scores_a.shape[1], width), dim=1).values
        largest = best.masked_fill(torch.isinf(best), 0).abs().amax(1, keepdim=True).clamp_min(1e-30)
        for place, scores, picked in ((MISSED, scores_a, picked_a), (STOCK_MISSED, scores_b, picked_b)):
            ordered = scores.masked_fill(~picked, -torch.inf).sort(1, descending=True).values[:, : best.shape[1]]
            off = torch.where(ordered == best, 0, (best - ordered) / largest)
            stats[place] = torch.maximum(stats[place], off.amax().double())

    def digest(self, layer: int, mode: str, published, picks) -> None:
        import torch

        lens = published.rows.lens
        picks = picks[: lens.shape[0]].long()
        mixed = (picks ^ (picks << 17)) * 0x9E3779B97F4A7C1
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B
        row = torch.arange(1, lens.shape[0] + 1, device=lens.device)
        step = torch.where(lens > 0, mixed.sum(1) * row, 0).sum()
        self.digests[layer, mode].mul_(1000003).add_(step)

    def same_slots(self, inputs, ours) -> None:
        """The slots that an extend wrote are those of the positions it wrote."""
        rows = ours.shape[0]
        wrong = (inputs.out_page_indices[:rows, : ours.shape[1]].long() != ours.long()).any(1).sum()
        self.stats[MODES.index("extend"), SHORT] += wrong

    def write(self) -> None:
        import torch

        if self.stats is None or torch.cuda.is_current_stream_capturing():
            return
        report = {}
        for mode, values in zip(MODES, self.stats.tolist(), strict=True):
            report[mode] = {
                "calls": int(values[CALLS]),
                "rows": int(values[ROWS]),
                "overlap": values[OVERLAP],
                "same": values[SAME],
                "mean": values[TOTAL] / values[ROWS] if values[ROWS] else None,
                "gap": values[GAP],
                "short": int(values[SHORT]),
                "blocks": values[BLOCKS],
                "missed": values[MISSED],
                "stock_missed": values[STOCK_MISSED],
                "longest": int(values[LONGEST]),
                "kernel": values[KERNEL],
            }
        report["digests"] = {f"{mode} {layer}": int(value) for (layer, mode), value in self.digests.items()}
        path = self.path
        if "{rank}" in path:
            from sglang.srt.runtime_context import get_parallel

            path = path.replace("{rank}", str(get_parallel().tp_rank))
        partial = f"{path}.partial"
        with open(partial, "w") as file:
            json.dump(report, file)
        os.replace(partial, path)


def with_outputs(inputs):
    """The same inputs with poisoned outputs of their own."""
    import msgspec
    import torch

    changes = {}
    for name in ("out_page_indices", "out_raw_indices"):
        value = getattr(inputs, name, None)
        if value is not None:
            changes[name] = torch.full_like(value, 123456789)
    return msgspec.structs.replace(inputs, **changes)


def positions_to_slots(indexer, inputs, published, positions):
    from sglang_dsv41.kernels.reference import table_slots_of

    rows = published.rows
    return table_slots_of(rows.block_table, rows.table_slots, positions[: rows.num_rows, : indexer.geometry.topk])
