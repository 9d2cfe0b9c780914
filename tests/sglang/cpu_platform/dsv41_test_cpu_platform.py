"""Test-only SGLang platform: the CPU, as an out-of-tree device. Active where this folder is on PYTHONPATH."""

import logging


def activate() -> str:
    return f"{__name__}.CpuTestPlatform"


def show_plugins() -> None:
    """A general plugin that only lets the log say which process executes which plugin."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("(%(processName)s) %(message)s"))
    logger = logging.getLogger("sglang.srt.plugins")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def __getattr__(name: str):
    # The class is made when SGLang asks for it: its base classes import torch.
    if name != "CpuTestPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuTestPlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

    globals()[name] = CpuTestPlatform
    return CpuTestPlatform
