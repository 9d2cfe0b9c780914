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


from tests.devices import DEVICES, KERNELS_ON  # noqa: E402 (after the choice of the interpreter)


@pytest.fixture(params=KERNELS_ON)
def kernels_on(request):
    """Each kernel set, as `<kernel set>-<device>`; skipped where this machine cannot run it."""
    return request.param


@pytest.fixture(params=[name for name in DEVICES if name.endswith("-cuda")])
def kernels_on_gpu(request):
    """Each kernel set that this machine's GPU runs."""
    return request.param


@pytest.fixture
def one_thread():
    """Many tiny operations: a thread pool only adds waiting, most of all on a shared machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
