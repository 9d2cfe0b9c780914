"""Which kernel sets this machine can run: `<kernel set>-<device>` names for test parameters."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)
# Under Triton's interpreter the portable set runs on CPU tensors, and only there.
DEVICES = ["reference-cpu", "portable-cuda" if HAS_GPU else "portable-cpu"]
if HAS_GPU and torch.cuda.get_device_capability() == (9, 0):
    DEVICES.append("hopper-cuda")
# For test parameters: a set that is not here is skipped by name, not left out.
_no_hopper = pytest.mark.skip(reason="needs a CUDA GPU of compute capability 9.0 (H100, H200)")
KERNELS_ON = [*DEVICES, *([] if "hopper-cuda" in DEVICES else [pytest.param("hopper-cuda", marks=_no_hopper)])]


def device_of(name: str) -> str:
    return name.split("-")[1]
