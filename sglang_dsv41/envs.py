"""The package's environment variables, read in one place. Import-light: no torch, no SGLang."""

import os

DISABLE = "DSV41_SPARSE_DISABLE"
KERNELS = "DSV41_SPARSE_KERNELS"
SCRATCH_MB = "DSV41_SPARSE_SCRATCH_MB"
DEBUG = "DSV41_SPARSE_DEBUG"
DENSE_EXTEND = "DSV41_SPARSE_DENSE_EXTEND"
EXTEND_MB = "DSV41_SPARSE_EXTEND_MB"
SHORT_GRAPHS = "DSV41_SPARSE_SHORT_GRAPHS"
AUDIT = "DSV41_SPARSE_AUDIT"

NAMES = (DISABLE, KERNELS, SCRATCH_MB, DEBUG, DENSE_EXTEND, EXTEND_MB, SHORT_GRAPHS, AUDIT)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
DEFAULT_SCRATCH_MB = 256
DEFAULT_EXTEND_MB = 1024


def _flag(name: str) -> bool:
    """A switch; an unreadable value raises rather than guessing."""
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if not value or value in _FALSE:
        return False
    raise ValueError(f"{name}={value!r} is neither true nor false; set it to 1 or 0")


def disabled() -> bool:
    """Whether the off switch is set."""
    return _flag(DISABLE)


def debug() -> bool:
    """Whether each kernel of ours is waited for and its outputs checked."""
    return _flag(DEBUG)


def dense_extend() -> bool:
    """Whether our kernels also score the source and the full top-k layers of an extend."""
    return _flag(DENSE_EXTEND)


def short_graphs() -> bool:
    """Whether Hopper captures decode graphs for short contexts too."""
    return _flag(SHORT_GRAPHS)


def forced_kernels() -> str | None:
    """The kernel set the user forces, or None to choose by GPU capability."""
    return os.environ.get(KERNELS, "").strip() or None


def _mebibytes(name: str, default: int) -> int:
    """A budget in MiB, as bytes."""
    value = os.environ.get(name, "").strip()
    if not value:
        return default << 20
    try:
        megabytes = int(value)
    except ValueError:
        megabytes = 0
    if megabytes < 1:
        raise ValueError(f"{name}={value!r} is not a positive whole number of MiB; for example {name}={default}")
    return megabytes << 20


def scratch_bytes() -> int:
    """Budget in bytes of each logits scratch buffer (dense and compact)."""
    return _mebibytes(SCRATCH_MB, DEFAULT_SCRATCH_MB)


def extend_bytes() -> int:
    """Budget in bytes of a tile of an extend that DeepGEMM scores: logits and block maxima."""
    return _mebibytes(EXTEND_MB, DEFAULT_EXTEND_MB)


def audit_rate() -> float:
    """Share of the rows of an extend that the audit scores again, 0 to 1; 0 is off."""
    value = os.environ.get(AUDIT, "").strip()
    if not value:
        return 0.0
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{AUDIT}={value!r} is not a share of rows from 0 (off) to 1; for example {AUDIT}=0.001")
    return rate
