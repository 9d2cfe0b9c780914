"""A test-only SGLang plugin: a fault in the block lists of an extend, for the audit to find.

With DSV41_BREAK_BLOCKS=1 every odd block but the newest is left out of what a source publishes; the schedule stays well
formed, and nothing fails but the selections. Put this folder on PYTHONPATH.
"""

import os


def install() -> None:
    if os.environ.get("DSV41_BREAK_BLOCKS") == "1":
        from sglang_dsv41 import indexer

        break_blocks(indexer.SparseCandidateIndexer)


def break_blocks(cls) -> None:
    """Have ``cls`` publish by half."""
    publish_prefill = cls.publish_prefill

    def publish(self, inputs):
        import torch

        schedule = publish_prefill(self, inputs)
        if schedule is not None:
            rows, geometry = schedule.rows, self.geometry
            # A padding is odd too.
            blocks = rows.sparse_indices // geometry.expansion
            newest = (rows.lens - 1)[:, None] // geometry.block_size
            kept = torch.where((blocks % 2 == 0) | (blocks == newest), blocks, -1)
            self.kernels.expand(kept, rows, slice(0, rows.num_rows))
        return schedule

    cls.publish_prefill = publish
