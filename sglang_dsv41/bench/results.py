"""Result files: one JSON object with how, where and when it was measured, and a row for each case.

    results = ResultFile("benchmarks/results/kernels.json", "kernels")
    results.add("sparse_logits 8x131072", "us", stock=[310.2, 309.8], ours=[19.1, 19.4], bytes=9125888)
    print(results.table())

`add` writes the file at once, so that a run that is cut off leaves its finished cases. Needs no GPU library.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"
# Units in which a smaller value is better; in all others a larger one is.
TIMES = ("us", "ms", "s")
PACKAGES = ("sglang", "torch", "triton")


class ResultError(ValueError):
    """A file that is no result file, or not the right one; the message is for the user."""


def make_row(case: str, unit: str, *, stock: Sequence[float], ours: Sequence[float], **extra) -> dict:
    """One case: medians, their ratio (above 1 is better for ours) and every sample.

    With `bytes` (what ours must move at least), `gb_per_s` follows from the median time.
    """
    row = {"case": case, "unit": unit, "stock": _median(stock), "ours": _median(ours), "ratio": None}
    if row["stock"] and row["ours"]:
        ratio = row["stock"] / row["ours"] if unit in TIMES else row["ours"] / row["stock"]
        row["ratio"] = round(ratio, 3)
    row["samples"] = {"stock": [_round(x) for x in stock], "ours": [_round(x) for x in ours]}
    row.update(extra)
    if "bytes" in row and row["ours"] and unit in TIMES:
        seconds = row["ours"] * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
        row["gb_per_s"] = _round(row["bytes"] / seconds / 1e9)
    return row


def read(path: Path | str) -> dict:
    """The content of a result file.

    Raises:
        ResultError: there is none at `path`.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ResultError(f"{path} is no JSON file: {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    keys = {"case", "unit", "stock", "ours", "ratio"}
    if not isinstance(rows, list) or any(not isinstance(row, dict) or not keys <= set(row) for row in rows):
        raise ResultError(f"{path} is no result file: it needs `rows`, each with {', '.join(sorted(keys))}")
    return content


class ResultFile:
    """The rows of one run, kept equal to the file at `path`. `argv` is the command: a script or a program, then its
    arguments."""

    def __init__(self, path: Path | str, name: str, *, argv: Sequence[str] | None = None, commit: str | None = None):
        self.path = Path(path)
        gpu, driver = gpu_and_driver()
        self.content = {
            "name": name,
            "command": command_line(sys.argv if argv is None else argv),
            "gpu": gpu,
            "versions": {package: version_of(package) for package in PACKAGES} | {"driver": driver},
            "switches": {name: value for name, value in sorted(os.environ.items()) if name.startswith("DSV41_SPARSE_")},
            "commit": commit or commit_of(ROOT),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "rows": [],
        }

    @property
    def rows(self) -> list[dict]:
        return self.content["rows"]

    def add(self, case: str, unit: str, *, stock: Sequence[float], ours: Sequence[float], **extra) -> dict:
        """Append a row (see `make_row`) and write the file."""
        row = make_row(case, unit, stock=stock, ours=ours, **extra)
        self.rows.append(row)
        self.write()
        return row

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = ["| case | unit | stock | ours | ratio |", "|---|---|---|---|---|"]
        for row in self.rows:
            cells = (row["case"], row["unit"], *(_cell(row[key]) for key in ("stock", "ours", "ratio")))
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)


def command_line(argv: Sequence[str]) -> str:
    """The command as a user would type it: a script in the repository, a program by its name."""
    program = Path(argv[0])
    if program.suffix != ".py":
        return shlex.join([program.name, *argv[1:]])
    script = program.resolve()
    name = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", name, *argv[1:]])


def gpu_and_driver() -> tuple[str, str]:
    """Name of the first visible GPU and the driver's version."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    command += ["-i", visible] if visible else []
    lines = _output(command).splitlines()
    name, _, driver = lines[0].partition(",") if lines else (UNKNOWN, "", UNKNOWN)
    return name.strip() or UNKNOWN, driver.strip() or UNKNOWN


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def commit_of(folder: Path) -> str:
    """The commit of a checkout, marked where tracked files differ from it; "unknown" outside one."""
    git = ["git", "-C", str(folder)]
    # An installed package may lie in an environment inside some other repository.
    if not _output([*git, "ls-files", "--", "sglang_dsv41/__init__.py"]):
        return UNKNOWN
    commit = _output([*git, "rev-parse", "HEAD"])
    if not commit:
        return UNKNOWN
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no", "--", "sglang_dsv41"])
    return commit + ("-dirty" if changed else "")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _median(samples: Sequence[float]) -> float | None:
    return _round(median(samples)) if samples else None


def _round(value: float) -> float:
    """Five significant digits: more than any of these measurements holds."""
    return float(f"{value:.5g}")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
