#!/usr/bin/env python3
"""Say what a release of SGLang moved: the interfaces that we stand on, and the patches.

    python scripts/check_upstream.py                     the newest release on the package index
    python scripts/check_upstream.py 0.5.24              a named one
    python scripts/check_upstream.py --package DIR       an unpacked `sglang` package: a checkout's python/sglang

Nothing of SGLang is imported and none of its dependencies is installed, so neither a GPU nor the 10 GB of an
installation is needed. Status 0: nothing moved; 1: something did; 2: there is no such release, or no way to get it.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout's table, not that of an installed release

from sglang_dsv41 import seams
from sglang_dsv41.doctor import LIBRARIES


class UnreachableError(RuntimeError):
    """The release cannot be had; the message says why."""


def download(version: str | None, folder: Path, *, pre: bool = False) -> None:
    """SGLang's wheel, unpacked into ``folder`` without its dependencies.

    Raises:
        UnreachableError: no installer, no such release, or no package index.
    """
    requirement = f"sglang=={version}" if version else "sglang"
    uv = shutil.which("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--python", sys.executable, "--no-build", *(["--prerelease", "allow"] * pre)]
    else:
        command = [sys.executable, "-m", "pip", "install", "--only-binary", ":all:", *(["--pre"] * pre)]
    command += ["--quiet", "--no-deps", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnreachableError(f"cannot get {requirement}: {done.stderr.strip() or ' '.join(command)}")


def metadata_of(folder: Path) -> tuple[str, list[str]]:
    """Version of the SGLang unpacked in ``folder``, and what it requires of the libraries that serving stands on."""
    found = [one for one in importlib.metadata.distributions(path=[str(folder)]) if one.name == "sglang"]
    if not found:
        return "of an unknown version", []
    required = [requirement.partition(";")[0].strip() for requirement in found[0].requires or ()]
    return found[0].version, [one for one in required if _name(one) in LIBRARIES]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].replace("_", "-").lower()


def failing_patches(package: Path) -> list[tuple[str, str]]:
    """(patch, what git says) of each patch that does not apply to ``package``, each alone."""
    failures = []
    for patch in sorted((ROOT / "patches").glob("*.patch")):
        # The ceiling: in a repository's subfolder git would skip files that it takes for another folder's.
        done = subprocess.run(
            ["git", "apply", "--check", "-p3", str(patch)],  # a/python/sglang/
            cwd=package,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(package.resolve().parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            failures.append((patch.name, " ".join(done.stderr.split())))
    return failures


def report(package: Path, version: str, pins: Sequence[str] = ()) -> tuple[str, bool]:
    """The report in Markdown, and whether something moved."""
    table = seams.SEAMS + seams.BENCH_SEAMS
    moved, unapplied = seams.check(table, package), failing_patches(package)
    lines = [f"SGLang {version}; this checkout names {seams.SUPPORTED}.", ""]
    lines += [
        f"Interfaces that moved: {len(moved)} of {len(table)}.",
        *(f"- `{one.seam}`: {_tail(one)}" for one in moved),
    ]
    lines += ["", f"Patches that do not apply: {len(unapplied)}.", *(f"- `{name}`: {why}" for name, why in unapplied)]
    lines += ["", f"It requires {', '.join(f'`{pin}`' for pin in pins)}."] if pins else []
    lines += ["", "What to do: docs/upgrading.md."] if moved or unapplied else []
    return "\n".join(lines), bool(moved or unapplied)


def _tail(mismatch: seams.Mismatch) -> str:
    return str(mismatch).removeprefix(f"{mismatch.seam}: ")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("version", nargs="?", metavar="VERSION", help="release to check (default: the newest)")
    what.add_argument("--package", type=Path, metavar="DIR", help="check this `sglang` package and download nothing")
    parser.add_argument("--pre", action="store_true", help="let the newest be a pre-release")
    args = parser.parse_args(argv)
    if args.package is not None:
        if not (args.package / "srt").is_dir():
            parser.error(
                f"{args.package} is no `sglang` package: it has no folder srt; name a checkout's python/sglang"
            )
        text, moved = report(args.package, f"in {args.package}")
    else:
        with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
            try:
                download(args.version, Path(folder), pre=args.pre)
            except UnreachableError as error:
                print(f"check_upstream: {error}", file=sys.stderr)
                return 2
            text, moved = report(Path(folder, "sglang"), *metadata_of(Path(folder)))
    print(text)
    return int(moved)


if __name__ == "__main__":
    sys.exit(main())
