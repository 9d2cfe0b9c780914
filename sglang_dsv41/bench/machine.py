"""What this machine can measure, found out before anything slow is imported."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os

from .. import seams

# Of the CUDA driver's interface.
_MAJOR, _MINOR = 75, 76


class MachineError(RuntimeError):
    """The machine cannot run a benchmark; the message says what was found and what is needed."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {'.'.join(map(str, self.capability))})"


def first_gpu() -> Gpu:
    """The first GPU that CUDA shows, asked of the driver itself.

    Raises:
        MachineError: there is none; says what was found instead.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise MachineError("no NVIDIA driver (libcuda.so.1 cannot be loaded)") from None

    def call(function: str, *arguments) -> None:
        status = getattr(cuda, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(status, ctypes.byref(text))
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hidden = "" if visible is None else f", with CUDA_VISIBLE_DEVICES={visible!r}"
            reason = text.value.decode() if text.value else "unknown error"
            raise MachineError(f"an NVIDIA driver without a usable GPU ({function}: {reason}{hidden})")

    call("cuInit", 0)
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(256)
    call("cuDeviceGetName", name, len(name), device)
    numbers = [ctypes.c_int(), ctypes.c_int()]
    for number, attribute in zip(numbers, (_MAJOR, _MINOR)):
        call("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
    return Gpu(name.value.decode(), (numbers[0].value, numbers[1].value))


def require_gpu(needed: str, capability: tuple[int, int] | None = None) -> Gpu:
    """The first GPU, of the given compute capability if there is one.

    Raises:
        MachineError: says what was found and, in the words of ``needed``, what is needed.
    """
    try:
        gpu = first_gpu()
    except MachineError as error:
        raise MachineError(f"found: {error}; needed: {needed}") from None
    if capability is not None and gpu.capability != capability:
        raise MachineError(f"found: {gpu}; needed: {needed}")
    return gpu


def require_sglang(table: tuple[seams.Seam, ...] = ()) -> None:
    """That SGLang is installed and has the names of ``table``.

    Raises:
        MachineError: says what is missing.
    """
    if importlib.util.find_spec("sglang") is None:
        raise MachineError(f"found: no SGLang; needed: pip install 'sglang{seams.SUPPORTED}'")
    mismatches = seams.check(table) if table else []
    if mismatches:
        listed = "\n  ".join(map(str, mismatches))
        version = seams.installed_version()
        raise MachineError(
            f"found: SGLang {version}, without what this measures; needed: sglang{seams.SUPPORTED}\n  {listed}"
        )
