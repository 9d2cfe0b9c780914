"""The candidate geometry of a two-level DeepSeek-V4.1 model, read from its config and validated."""

from __future__ import annotations

import dataclasses
from typing import Any

# Positions a sparse kernel scores as one unit; the largest that divides the candidate block is used.
KERNEL_BLOCKS = (16, 8)
HEAD_DIM = 128
# Columns that SGLang's selection kernel for compact rows (topk_bf16_small) takes.
SELECT_MAX_COLUMNS = 16384
INT32_MAX = 2**31 - 1


class GeometryError(ValueError):
    """A model config whose candidate geometry this backend cannot serve; the message says what to change."""


def kernel_block_of(block_size: int) -> int:
    """The kernel block of a candidate block of ``block_size`` positions: the largest of 16 and 8 that divides it.

    Raises:
        GeometryError: neither divides it.
    """
    for kernel_block in KERNEL_BLOCKS:
        if block_size > 0 and block_size % kernel_block == 0:
            return kernel_block
    raise GeometryError(
        f"candidate_block_size is {block_size}; it must be a positive multiple of 8, the smallest block a sparse "
        "kernel scores"
    )


def _whole(name: str, value: Any) -> int:
    """``value`` of the config field ``name``; anything but a whole number is refused, and is never rounded to one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(f"{name} has {value!r:.80}; it must be a whole number")
    return value


@dataclasses.dataclass(frozen=True)
class CandidateGeometry:
    """What a row's candidates look like, in positions, blocks and columns.

    Attributes:
        topk_blocks: candidate blocks a source publishes per row.
        block_size: positions in a candidate block.
        topk: positions an index layer selects per row.
        heads: index heads.
        head_dim: width of an index head.
        ratio: compress ratio of the source and of every consumer.
        source_layer: layer id of the candidate source.
        consumer_layers: layer ids of its consumers, ascending.
    """

    topk_blocks: int
    block_size: int
    topk: int
    heads: int = 32
    head_dim: int = HEAD_DIM
    ratio: int = 1
    source_layer: int = -1
    consumer_layers: tuple[int, ...] = ()

    @property
    def kernel_block(self) -> int:
        return kernel_block_of(self.block_size)

    @property
    def expansion(self) -> int:
        """Kernel blocks in a candidate block."""
        return self.block_size // self.kernel_block

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks in a row's schedule."""
        return self.topk_blocks * self.expansion

    @property
    def columns(self) -> int:
        """Width of a row's compact logits."""
        return self.topk_blocks * self.block_size

    @classmethod
    def from_config(cls, config: Any) -> CandidateGeometry:
        """The geometry of a DeepSeek-V4.1 text config (``model_config.hf_text_config``).

        Raises:
            GeometryError: the model has no two-level scheme, or one that does not fit together.
        """

        def number(name: str, default: int = 0) -> int:
            value = getattr(config, name, None)
            return default if value is None else _whole(name, value)

        def numbers(name: str) -> list[int]:
            values = getattr(config, name, None)
            if values is not None and not isinstance(values, (list, tuple)):
                raise GeometryError(f"{name} is {values!r:.80}; it must be a list of whole numbers")
            return [_whole(name, value) for value in values or ()]

        topk_blocks = number("candidate_topk_blocks")
        block_size = number("candidate_block_size")
        source = number("candidate_source_layer_id", -1)
        if topk_blocks <= 0 or block_size <= 0 or source < 0:
            raise GeometryError(
                "the model configures no candidate blocks (candidate_topk_blocks="
                f"{topk_blocks}, candidate_block_size={block_size}, candidate_source_layer_id={source})"
            )
        kernel_block_of(block_size)
        index_sources = numbers("index_source_layer_ids")
        if source not in index_sources:
            raise GeometryError(
                f"candidate_source_layer_id {source} is not one of index_source_layer_ids {index_sources}"
            )
        consumers = tuple(sorted(layer for layer in index_sources if layer > source))
        if not consumers:
            raise GeometryError(
                f"no index source layer follows candidate source {source} (index_source_layer_ids {index_sources}): "
                "no layer would consume the candidates"
            )
        ratios = numbers("compress_ratios")
        if max(consumers) >= len(ratios):
            raise GeometryError(
                f"compress_ratios names {len(ratios)} layers, but index source {max(consumers)} lies past them"
            )
        used = {ratios[layer] for layer in (source, *consumers)}
        if len(used) != 1 or not used <= {1, 2}:
            raise GeometryError(
                f"source {source} and consumers {list(consumers)} have compress ratios {sorted(used)}; they must share "
                "one ratio, 1 or 2, because they share one schedule of positions"
            )
        between = [layer for layer in numbers("kv_source_layer_ids") if source < layer <= max(consumers)]
        if between:
            raise GeometryError(
                f"kv source layers {between} lie between candidate source {source} and its last consumer "
                f"{max(consumers)}; consumers must read the index K of the source, for which the blocks are resolved"
            )
        return cls(
            topk_blocks=topk_blocks,
            block_size=block_size,
            topk=number("index_topk"),
            heads=number("index_n_heads"),
            head_dim=number("index_head_dim"),
            ratio=used.pop(),
            source_layer=source,
            consumer_layers=consumers,
        )

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"layers {list(self.consumer_layers)} score {self.topk_blocks} blocks of {self.block_size} positions a row "
            f"({self.columns} columns), published by layer {self.source_layer}; top-{self.topk}, {self.heads} heads"
        )
