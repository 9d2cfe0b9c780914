"""A kernel set that synchronises and checks after each operation of another, and names the one that failed.

A CUDA fault shows at some later call, and SGLang then blames whatever ran there. With ``DSV41_SPARSE_DEBUG=1`` every
operation of ours is waited for and its outputs are checked, so the first error names its operation. Slow: host reads
after each launch. While a CUDA graph is captured nothing can be waited for, so start the server with
``--cuda-graph-backend-decode disabled`` to check decode too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..geometry import INT32_MAX
from ..rows import SparseRows
from . import IndexQueries, KernelSet, PagedKeys


class KernelCheckError(RuntimeError):
    """An operation of ours failed, or wrote what it must not; the message names it."""


class DebugKernels(KernelSet):
    """Wraps ``inner``; every operation is ``inner``'s, followed by a synchronisation and a check of what it wrote."""

    def __init__(self, inner: KernelSet) -> None:
        super().__init__(inner.geometry, inner.buffers)
        self.inner = inner
        self.name = inner.name
        self.deep_gemm_extend = inner.deep_gemm_extend
        self.calls = inner.calls

    def _run(self, operation: str, call: Callable[[], Any], check: Callable[[Any], str | None] | None = None) -> Any:
        """``call()``, waited for; ``check`` returns what is wrong with its result, or None."""
        where = f"dsv41-sparse: {operation} of the {self.inner.name} kernels"
        try:
            result = call()
            if not self._observable():
                return result
            if self.buffers.device.type == "cuda":
                torch.cuda.synchronize(self.buffers.device)
        except Exception as error:
            raise KernelCheckError(f"{where} failed: {type(error).__name__}: {error}") from error
        problem = check(result) if check is not None else None
        if problem is not None:
            raise KernelCheckError(f"{where} wrote {problem}")
        return result

    def _observable(self) -> bool:
        return self.buffers.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def prepare_extend(self) -> None:
        self._run("prepare_extend", self.inner.prepare_extend)

    def project(self, inputs: Any) -> IndexQueries:
        return self._run("project", lambda: self.inner.project(inputs))

    def dense_logits_tiles(
        self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        tiles = self.inner.dense_logits_tiles(queries, keys, rows)
        while True:
            tile = self._run("dense_logits", lambda: next(tiles, None))
            if tile is None:
                return
            yield tile

    def select_visible(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        self._run(
            "select_visible",
            lambda: self.inner.select_visible(logits, rows, tile, out_slots, out_positions),
            lambda _: self._visible_picks(rows, tile, out_slots, out_positions),
        )

    def choose_blocks(self, logits: torch.Tensor, rows: SparseRows, tile: slice) -> torch.Tensor:
        def check(blocks: torch.Tensor) -> str | None:
            size = self.geometry.block_size
            count = (rows.lens[tile] + size - 1) // size
            if ((blocks < -1) | (blocks >= count[:, None])).any():
                return f"block ids outside [-1, {int(count.max())})"
            newest = (blocks == (count - 1)[:, None]).any(1) | (count == 0)
            return None if newest.all() else f"no newest block in row {tile.start + int((~newest).nonzero()[0])}"

        return self._run("choose_blocks", lambda: self.inner.choose_blocks(logits, rows, tile), check)

    def expand(self, blocks: torch.Tensor, rows: SparseRows, tile: slice) -> None:
        self._run("expand", lambda: self.inner.expand(blocks, rows, tile), lambda _: self._schedule(rows, tile))

    def publish(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        if type(self.inner).publish is KernelSet.publish:  # its operations are checked one by one
            super().publish(logits, rows, tile, out_slots, out_positions)
            return
        self._run(
            "publish",
            lambda: self.inner.publish(logits, rows, tile, out_slots, out_positions),
            lambda _: self._visible_picks(rows, tile, out_slots, out_positions) or self._schedule(rows, tile),
        )

    def plan(self, rows: SparseRows, keys: PagedKeys) -> Any:
        return self._run("plan", lambda: self.inner.plan(rows, keys))

    def sparse_logits(self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows, tile: slice) -> torch.Tensor:
        def check(logits: torch.Tensor) -> str | None:
            column = torch.arange(logits.shape[1], device=logits.device)
            wrong = (logits.isnan() & (column < rows.end[tile, None])).any(1)
            return f"NaN in row {tile.start + int(wrong.nonzero()[0])}" if wrong.any() else None

        return self._run("sparse_logits", lambda: self.inner.sparse_logits(queries, keys, rows, tile), check)

    def select_candidates(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        *,
        out_positions: torch.Tensor | None,
        out_slots: torch.Tensor | None,
    ) -> None:
        def check(_: None) -> str | None:
            for name, out, limit in (("positions", out_positions, rows.lens[tile]), ("slots", out_slots, None)):
                problem = None if out is None else self._picks(name, out[tile], rows.end[tile], limit)
                if problem is not None:
                    return problem
            return None

        self._run(
            "select_candidates",
            lambda: self.inner.select_candidates(logits, rows, tile, out_positions=out_positions, out_slots=out_slots),
            check,
        )

    def passes(self, num_rows: int) -> Iterator[slice]:
        return self.inner.passes(num_rows)

    def _visible_picks(self, rows, tile, out_slots, out_positions) -> str | None:
        for name, out, limit in (("positions", out_positions, rows.lens[tile]), ("slots", out_slots, None)):
            problem = None if out is None else self._picks(name, out[tile], rows.lens[tile], limit)
            if problem is not None:
                return problem
        return None

    def _picks(self, name: str, out: torch.Tensor, available: torch.Tensor, limit: torch.Tensor | None) -> str | None:
        """What is wrong with rows of picks: out of range, or more than a row has to give."""
        wrong = (out < -1).any(1)
        if limit is not None:
            wrong |= (out >= limit[:, None]).any(1)
        if wrong.any():
            return f"{name} out of range in row {int(wrong.nonzero()[0])} of the tile"
        expected = available.clamp_max(self.geometry.topk)
        count = (out >= 0).sum(1)
        wrong = count > expected
        if wrong.any():
            row = int(wrong.nonzero()[0])
            return f"{int(count[row])} {name} in row {row} of the tile, which has {int(expected[row])} to give"
        return None

    def _schedule(self, rows: SparseRows, tile: slice) -> str | None:
        blocks, end = rows.sparse_indices[tile], rows.end[tile]
        listed = blocks < INT32_MAX
        size = self.geometry.kernel_block
        if (listed & ((blocks < 0) | (blocks.long() * size >= rows.lens[tile, None]))).any():
            return "sparse_indices past a row's visible positions"
        if (listed[:, 1:] & (blocks[:, 1:] <= blocks[:, :-1])).any() or (listed[:, 1:] & ~listed[:, :-1]).any():
            return "sparse_indices that do not ascend"
        full = listed.sum(1) * size
        if ((end > full) | (end <= full - size) & (full > 0) | (end < 0)).any():
            return "an end that disagrees with sparse_indices"
        if (listed != (rows.physical_blocks[tile] >= 0)).any():
            return "physical_blocks that disagree with sparse_indices"
        return None
