"""``dsv41-sparse doctor``: whether this machine, this SGLang and this model will work, and why not.

It starts no server and loads no weights. What only a running engine knows (its parallel modes, the layout of its
index-K cache) is reported as not checked: the backend checks that itself when it starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import __version__, envs, plugin, seams

OK, FAIL, UNCHECKED = "OK", "FAIL", "not checked"
DISTRIBUTION = "sglang-dsv41"
ENTRY_POINT = "dsv41_sparse"
SGLANG_PYTHON = (3, 11)
INSTALL = f"pip install 'sglang{seams.SUPPORTED}'"
# Distributions that serving stands on: SGLang pins all of them but Triton, which PyTorch pins.
LIBRARIES = ("torch", "triton", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm", "sgl-flash-mla")


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        what: what was looked at.
        status: ``OK``, ``FAIL`` or ``UNCHECKED``.
        found: what was found.
        needed, change: what would be right and how to get there, where it is not ``OK``.
    """

    what: str
    status: str
    found: str
    needed: str = ""
    change: str = ""

    def __str__(self) -> str:
        lines = [f"{self.status:<11}  {self.what}: {self.found}"]
        lines += [f"{'':13}needed: {self.needed}"] if self.needed else []
        lines += [f"{'':13}change: {self.change}"] if self.change else []
        return "\n".join(lines)


def diagnose(model_path: str | None = None) -> list[Check]:
    """Every check, in the order a user would fix things."""
    checks = [check_python(), check_sglang()]
    if seams.installed_version() is not None:  # which brings them
        checks += map(check_library, LIBRARIES)
    checks += [*check_plugin(), *check_seams(), *check_environment()]
    return [*checks, *check_requirements(model_path)]


def main(argv: Sequence[str] | None = None) -> int:
    """``dsv41-sparse doctor``; 0 when nothing stands in the way, else 1."""
    parser = argparse.ArgumentParser(
        prog="dsv41-sparse doctor",
        description="Say whether this machine, SGLang and model will work with --attention-backend dsv41-sparse, and "
        "why not. Starts no server. Exit status 0 when nothing stands in the way, else 1.",
    )
    parser.add_argument("--model-path", metavar="MODEL", help="the model to serve: a folder, or a Hub name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    checks = diagnose(args.model_path)
    failed = [check for check in checks if check.status == FAIL]
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    else:
        print(*checks, sep="\n")
        print()
        print(_verdict(failed, args.model_path))
    return 1 if failed else 0


def _verdict(failed: list[Check], model_path: str | None) -> str:
    if failed:
        return f"It will not work: {len(failed)} of these lines failed ({', '.join(check.what for check in failed)})."
    if model_path is None:
        return "Nothing stands in the way on this machine; name a model with --model-path to have it checked too."
    return f"It will work: --model-path {model_path} --attention-backend {plugin.NAME}"


# ---- installation ----


def check_python() -> Check:
    found = platform.python_version()
    if sys.version_info >= SGLANG_PYTHON:
        return Check("Python", OK, found)
    needed = f"{SGLANG_PYTHON[0]}.{SGLANG_PYTHON[1]} or newer (SGLang)"
    return Check("Python", FAIL, found, needed, "Make the environment with a newer Python.")


def check_sglang() -> Check:
    found, needed = seams.installed_version(), f"sglang{seams.SUPPORTED}"
    if found is None:
        return Check("SGLang", FAIL, "not installed", needed, INSTALL)
    if _satisfies(found, seams.SUPPORTED):
        return Check("SGLang", OK, found)
    return Check(
        "SGLang",
        UNCHECKED,
        f"{found}, which this release was never run with",
        needed,
        f"{INSTALL}, or go by the SGLang interfaces below and watch the first outputs.",
    )


def check_library(name: str) -> Check:
    """A library's presence, and its version against SGLang's pin."""
    pin = _pin(name)
    wanted = f"{name}{pin or ''}"
    install = f"pip install '{wanted}'" if pin else INSTALL
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, FAIL, "not installed", wanted, install)
    if pin and not _satisfies(found, pin):
        return Check(name, UNCHECKED, f"{found}, not SGLang's pin", wanted, install)
    return Check(name, OK, found)


def _pin(name: str) -> str | None:
    """The version specifier that SGLang's metadata gives for a library."""
    try:
        required = importlib.metadata.requires("sglang") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    # SGLang's own dependency: here once SGLang is.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for requirement in map(Requirement, required):
        wanted_here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted_here and canonicalize_name(requirement.name) == name:
            return str(requirement.specifier) or None
    return None


def _satisfies(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


# ---- plugin ----


def check_plugin() -> list[Check]:
    """Whether SGLang will find our entry point, and load it."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if ENTRY_POINT not in points.names:
        return [
            Check(
                "plugin",
                FAIL,
                "Python knows no entry point of it; the package is on the path but not installed",
                f"an installed {DISTRIBUTION}",
                "pip install it (`pip install -e .` in a checkout) into the environment that runs SGLang.",
            )
        ]
    checks = [Check("plugin", OK, f"{DISTRIBUTION} {__version__}, entry point {ENTRY_POINT}")]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    if names and ENTRY_POINT not in names:
        needed = f"{ENTRY_POINT} among its names, or the variable unset"
        change = f"export SGLANG_PLUGINS={','.join([*sorted(names), ENTRY_POINT])}"
        checks.append(Check("plugin list", FAIL, f"SGLANG_PLUGINS={allowed}", needed, change))
    return checks


def check_seams() -> list[Check]:
    """Whether SGLang has the interfaces that the plugin stands on."""
    if seams.installed_version() is None:
        return [Check("SGLang interfaces", UNCHECKED, "SGLang is not installed")]
    mismatches = seams.check()
    if not mismatches:
        return [Check("SGLang interfaces", OK, f"all {len(seams.SEAMS)} as expected")]
    change = "Install sglang==0.5.23, or a release of sglang-dsv41 that names your SGLang version."
    return [
        Check("SGLang interface", FAIL, f"{mismatch.seam}: {mismatch.found}", mismatch.expected, change)
        for mismatch in mismatches
    ]


def check_environment() -> list[Check]:
    """The package's own environment variables."""
    checks = []
    try:
        if envs.disabled():
            found, needed = f"{envs.DISABLE}={os.environ[envs.DISABLE]}", "0 or unset"
            checks.append(Check("off switch", FAIL, found, needed, f"unset {envs.DISABLE}"))
    except ValueError as error:
        checks.append(Check("off switch", FAIL, str(error), "0 or unset", f"unset {envs.DISABLE}"))
    for name, read, needed in (
        (envs.SCRATCH_MB, envs.scratch_bytes, "a positive whole number of MiB"),
        (envs.EXTEND_MB, envs.extend_bytes, "a positive whole number of MiB"),
        (envs.DEBUG, envs.debug, "0 or 1"),
        (envs.DENSE_EXTEND, envs.dense_extend, "0 or 1"),
        (envs.SHORT_GRAPHS, envs.short_graphs, "0 or 1"),
        (envs.AUDIT, envs.audit_rate, "a share of rows from 0 to 1"),
    ):
        try:
            read()
        except ValueError as error:
            checks.append(Check("environment variable", FAIL, str(error), needed, f"unset {name}"))
    kernels = envs.forced_kernels()
    found = f"{envs.KERNELS}={kernels} is set" if kernels else "none in the way"
    return checks or [Check("environment variables", OK, found)]


# ---- device and model ----


def check_requirements(model_path: str | None) -> list[Check]:
    """The backend's own requirements, as far as the facts are known before a start."""
    try:
        from . import requirements
    except (ImportError, OSError) as error:
        return [Check("GPU and model", UNCHECKED, f"PyTorch does not import: {error}", "PyTorch", INSTALL)]

    facts = requirements.EngineFacts(forced_kernels=envs.forced_kernels(), **requirements.device_facts())
    model: list[Check] = []
    if model_path is None:
        model.append(Check("model", UNCHECKED, "no --model-path given"))
    else:
        try:
            config, how = load_text_config(model_path)
        except (OSError, ValueError) as error:
            model.append(_unreadable_model(model_path, error))
        else:
            for name, value in requirements.model_facts(config).items():
                setattr(facts, name, value)
            if facts.geometry is not None:
                model.append(Check("model", OK, f"{facts.model_type}, config read by {how}"))
                model.append(Check("candidate blocks", OK, facts.geometry.describe()))

    unmet = requirements.unmet(facts)
    if any(item.what == "kernel set" for item in unmet):
        # What else is in the way once that is corrected.
        unmet += [
            item for item in requirements.unmet(dataclasses.replace(facts, forced_kernels=None)) if item not in unmet
        ]
    if facts.model_type is None:
        unmet = [item for item in unmet if item.what != "model"]
    failed = {item.what for item in unmet}
    device: list[Check] = []
    if not failed & {"GPU", "kernel set", "DeepGEMM"}:
        device.append(_device(facts, requirements.kernel_set_of(facts)))
    checks = [*device, *(check for check in model if check.what not in failed)]
    checks += [Check(item.what, FAIL, item.found, item.needed, item.change) for item in unmet]
    start = "the parallel modes, top-k backend and index-K cache of the server; the backend checks them when it starts"
    return [*checks, Check("server arguments", UNCHECKED, start)]


def _device(facts: Any, kernels: str) -> Check:
    """The GPU, where the requirements do not object to it."""
    if facts.capability is None:
        return Check(
            "GPU",
            FAIL,
            f"no CUDA device ({envs.KERNELS}={kernels} is set, but the rest of the model needs one too)",
            "an NVIDIA GPU of compute capability 8.0 or newer, and a driver that this PyTorch can use",
            f"Run on such a machine; without one, `dsv41-sparse try` runs the indexer alone. Unset {envs.KERNELS}.",
        )
    import torch

    from .kernels import serving_kernel_set

    count = torch.cuda.device_count()
    name = f"{count} x {torch.cuda.get_device_name(0)}, compute capability {facts.capability[0]}.{facts.capability[1]}"
    serving, wrong = serving_kernel_set(kernels, facts.geometry)
    if serving is None:
        change = f"Correct that, or unset {envs.KERNELS}."
        return Check("kernel set", FAIL, f"{name}; {'; '.join(wrong)}", f"what {envs.KERNELS} asks for", change)
    return Check("GPU", OK, "; ".join([f"{name}, kernel set {serving.name}", *wrong]))


def _unreadable_model(model_path: str, error: Exception) -> Check:
    return Check(
        "model config",
        FAIL,
        f"{model_path}: {' '.join(str(error).split())}",
        "a folder with the config.json of a DeepSeek-V4.1 checkpoint, or a Hub name that can be reached",
        "Correct the path; `dsv41-sparse model --out DIR` writes a small one to try with.",
    )


def load_text_config(model_path: str) -> tuple[Any, str]:
    """A model's text config and who read it: SGLang, or this package where SGLang cannot.

    Raises:
        OSError: there is no such model.
        ValueError: its ``config.json`` is not readable.
    """
    path = Path(model_path) / "config.json"
    local = Path(model_path).is_dir()
    if not local and (model_path.startswith((".", "~", "/")) or model_path.count("/") > 1):
        raise FileNotFoundError("no such folder")  # and no Hub name to ask the network for
    if local:
        # SGLang's own error for a bad file is a long one.
        if not path.exists():
            raise FileNotFoundError("the folder has no config.json")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no JSON object")
    try:
        from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

        return get_hf_text_config(get_config(model_path, trust_remote_code=False)), "SGLang"
    except Exception as error:
        if not local:
            raise OSError(f"not a folder here, and SGLang cannot read it ({type(error).__name__}: {error})") from error
        text = content.get("text_config", content)
        return SimpleNamespace(**text), f"us from config.json, since SGLang could not ({type(error).__name__}: {error})"


if __name__ == "__main__":
    sys.exit(main())
