"""Kernel sets: the one seam for devices.

A set implements ``KernelSet``; a new GPU family is a new file here, not a branch in the indexer. ``kernel_set_name``
picks one by GPU capability; ``DSV41_SPARSE_KERNELS`` forces one by name (requirements.py). A set that cannot be had, say
for want of a compiler, leaves its place to its ``fallback``.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import importlib
import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from .. import envs
from ..geometry import CandidateGeometry
from ..rows import RowBuffers, SparseRows

logger = logging.getLogger(__name__)

# name -> (module, class); imported only when chosen.
KERNEL_SETS = {
    "reference": (".reference", "ReferenceKernels"),
    "portable": (".portable", "PortableKernels"),
    "hopper": (".hopper", "HopperKernels"),
    "blackwell": (".blackwell", "BlackwellKernels"),
}


@dataclasses.dataclass(frozen=True)
class PagedKeys:
    """One layer's index-K pool, page-planar MXFP4.

    Attributes:
        pool: [pages, page_slots * 68] uint8; a page holds ``page_slots * 64`` bytes of packed E2M1 (low nibble first),
            then ``page_slots * 4`` UE8M0 exponents, one per 32 elements. Rows may be strided.
        page_slots: positions a page, 64 on Hopper and 128 on SM100.
    """

    pool: torch.Tensor
    page_slots: int


@dataclasses.dataclass(frozen=True)
class IndexQueries:
    """One layer's projected queries.

    Attributes:
        q: [rows, heads, 128] bf16 with RoPE, rounded to MXFP4; on SM100 [rows, heads, 64] int8, packed.
        weights: [rows, heads] head weights with ``head_dim**-0.5 * heads**-0.5`` folded in, bf16 (fp32 on SM100).
        q_scale: [rows, heads] int32 packed UE8M0, SM100 only.
    """

    q: torch.Tensor
    weights: torch.Tensor
    q_scale: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> IndexQueries:
        return IndexQueries(self.q[rows], self.weights[rows], None if self.q_scale is None else self.q_scale[rows])


class KernelSet(abc.ABC):
    """The device operations of the two-level indexer. An implementation may fuse neighbours.

    ``calls`` counts, on the host, how often each operation was launched or recorded, by name: the proof in tests and
    logs of which kernels a server runs.
    """

    name: ClassVar[str]
    # Whether the set's GPUs run SGLang's DeepGEMM scorers of an extend; elsewhere SGLang's torch way scores it.
    deep_gemm_extend: ClassVar[bool] = False
    # The set that serves the same GPU where this one cannot be had; None where there is none.
    fallback: ClassVar[str | None] = None

    @classmethod
    def unmet(cls, geometry: CandidateGeometry | None) -> str | None:
        """Why the set cannot be had for this model (None: for any) on this machine, or None. May build its code."""
        return None

    def __init__(self, geometry: CandidateGeometry, buffers: RowBuffers) -> None:
        self.geometry = geometry
        self.buffers = buffers
        self.calls: collections.Counter[str] = collections.Counter()

    def prepare_extend(self) -> None:  # noqa: B027 (nothing to prepare in most sets)
        """Called once where this set will score the source and the full layers of extends."""

    def project(self, inputs: Any) -> IndexQueries:
        """Queries and head weights of SGLang's ``DecodeInputs`` or ``PrefillInputs``."""
        indexer = inputs.indexer
        return IndexQueries(
            q=indexer.queries(inputs.q_lora, inputs.freqs_cis, inputs.positions).contiguous(),
            weights=indexer.head_weights(inputs.x).to(torch.bfloat16).contiguous(),
        )

    @abc.abstractmethod
    def dense_logits_tiles(
        self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """(row slice, logits) tiles over every visible position; a row's logits past its ``lens`` are garbage."""

    @abc.abstractmethod
    def select_visible(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        """A tile's top-k of dense logits, as pool slots and/or positions of the same picks, unordered, -1 padded, into
        ``out_*[tile]``; either may be absent."""

    @abc.abstractmethod
    def choose_blocks(self, logits: torch.Tensor, rows: SparseRows, tile: slice) -> torch.Tensor:
        """[tile, <= topk_blocks] int32 candidate blocks with the largest maximum over their visible positions, the
        newest always among them; unordered, -1 padded."""

    @abc.abstractmethod
    def expand(self, blocks: torch.Tensor, rows: SparseRows, tile: slice) -> None:
        """Fill ``sparse_indices``, ``physical_blocks`` and ``end`` of ``rows[tile]`` from candidate blocks
        [tile, n] int32 in any order; ids that are negative, INT32_MAX or past the row's newest block are dropped."""

    def publish(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        out_slots: torch.Tensor | None,
        out_positions: torch.Tensor | None = None,
    ) -> None:
        """What a source makes of a tile's dense logits: its own top-k into ``out_*[tile]`` and the tile's schedule.
        ``select_visible``, ``choose_blocks`` and ``expand``, or all in one."""
        self.select_visible(logits, rows, tile, out_slots, out_positions)
        self.expand(self.choose_blocks(logits, rows, tile), rows, tile)

    def plan(self, rows: SparseRows, keys: PagedKeys) -> Any:
        """A work plan for ``sparse_logits``, made once a step; None for a set that needs none."""
        return None

    @abc.abstractmethod
    def sparse_logits(self, queries: IndexQueries, keys: PagedKeys, rows: SparseRows, tile: slice) -> torch.Tensor:
        """[tile, columns] bf16 compact logits of the scheduled blocks; columns past ``end`` are garbage."""

    @abc.abstractmethod
    def select_candidates(
        self,
        logits: torch.Tensor,
        rows: SparseRows,
        tile: slice,
        *,
        out_positions: torch.Tensor | None,
        out_slots: torch.Tensor | None,
    ) -> None:
        """A tile's top-k of compact logits, as positions and/or pool slots of the same picks, unordered, -1 padded,
        into ``out_*[tile]``; either may be absent."""

    def passes(self, num_rows: int) -> Iterator[slice]:
        """Row slices whose compact logits fit the scratch budget."""
        for start in range(0, num_rows, self.buffers.rows_per_pass):
            yield slice(start, min(start + self.buffers.rows_per_pass, num_rows))


def kernel_set_name(capability: tuple[int, int] | None) -> str | None:
    """The kernel set for a CUDA capability (None: no CUDA device), or None where there is none."""
    if capability is None:
        return None
    if capability[0] == 10:
        return "blackwell"
    if capability == (9, 0):
        return "hopper"
    return "portable" if capability >= (8, 0) else None


def kernel_set_class(name: str) -> type[KernelSet]:
    """The class of a kernel set, importing its module."""
    module, attribute = KERNEL_SETS[name]
    return getattr(importlib.import_module(module, __name__), attribute)


def serving_kernel_set(name: str, geometry: CandidateGeometry | None) -> tuple[type[KernelSet] | None, list[str]]:
    """The set that serves where ``name`` was chosen, and what is wrong with those before it, a line each.

    None where a set that ``DSV41_SPARSE_KERNELS`` asks for, or the last one, cannot be had. Builds the set's code.
    """
    wrong = []
    while True:
        kernels = kernel_set_class(name)
        reason = kernels.unmet(geometry)
        if reason is None:
            return kernels, wrong
        if envs.forced_kernels() is not None or kernels.fallback is None:
            return None, [*wrong, f"the {name} kernels cannot be had: {reason}"]
        wrong.append(f"the {name} kernels cannot be had, so the {kernels.fallback} ones serve: {reason}")
        name = kernels.fallback


def make_kernel_set(name: str, geometry: CandidateGeometry, buffers: RowBuffers) -> KernelSet:
    """The kernel set ``name``, or the one that it falls back to with a warning.

    Raises:
        RuntimeError: the set was asked for by ``DSV41_SPARSE_KERNELS`` and cannot be had.
    """
    kernels, wrong = serving_kernel_set(name, geometry)
    if kernels is None:
        raise RuntimeError(f"dsv41-sparse: {'; '.join(wrong)}. Unset {envs.KERNELS}.")
    for line in wrong:
        logger.warning("dsv41-sparse: %s", line)
    return kernels(geometry, buffers)
