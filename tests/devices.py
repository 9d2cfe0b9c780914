"""Which kernel sets this machine can run: `<kernel set>-<device>` names for test parameters."""

import torch

HAS_GPU = torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)
# Under Triton's interpreter the portable set runs on CPU tensors, and only there.
DEVICES = ["reference-cpu", "portable-cuda" if HAS_GPU else "portable-cpu"]
if HAS_GPU and torch.cuda.get_device_capability() == (9, 0):
    DEVICES.append("hopper-cuda")


def device_of(name: str) -> str:
    return name.split("-")[1]
