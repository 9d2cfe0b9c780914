"""Without a GPU, Triton kernels run under its interpreter: the choice must be made before Triton is imported."""

import os

import pytest


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if not _has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config, items):
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU (A100, H100, H200, ... of compute capability 8.0 or newer)")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
