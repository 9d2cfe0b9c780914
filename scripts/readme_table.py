#!/usr/bin/env python3
"""Render the README's table of measured gain from the result files, between its markers.

    python scripts/readme_table.py           rewrite README.md
    python scripts/readme_table.py --check   status 1 where it is not up to date

Needs no GPU and no other package.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table:gain -->", "<!-- /table:gain -->"
RESULTS = ("kernels.json", "server.json")
LABELS = {
    "sparse_logits": "consumer's logits",
    "consumer_pass": "consumer's whole pass",
    "dense_logits": "source's logits",
    "source_pass": "source's whole pass",
    "full_pass": "full top-k layer's whole pass",
    "verify_dense": "source's logits, verify rows",
    "decode": "decode",
    "prefill": "prefill",
    "ttft": "first token of a prompt of",
    "prefill_chunk": "prefill chunk at context",
}


def render(folder: Path) -> str:
    """The table, with where its numbers come from; a sentence where nothing was measured yet."""
    files = {
        name: json.loads((folder / name).read_text(encoding="utf-8")) for name in RESULTS if (folder / name).exists()
    }
    missing = [name for name in RESULTS if name not in files]
    lines = []
    rows = [row for content in files.values() for row in content["rows"]]
    if rows:
        lines += ["| what | stock `dsv4` | `dsv41-sparse` | gain |", "|---|---|---|---|", *map(_line, rows), ""]
    for name, content in files.items():
        versions = content["versions"]
        lines.append(
            f"`benchmarks/results/{name}`: {content['gpu']}, SGLang {versions['sglang']}, torch {versions['torch']}, "
            f"commit {_commit(content['commit'])}, {content['date'][:10]}, by `{content['command']}`."
        )
        lines.append("")
    lines += [f"Not measured yet: `benchmarks/results/{name}` is absent.\n" for name in missing]
    return "\n".join(lines).strip()


def _commit(name: str) -> str:
    return name[:7] + (" with uncommitted changes" if name.endswith("-dirty") else "")


def _line(row: dict) -> str:
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    return f"| {describe(row['case'])} | {_value(row, 'stock')} | {_value(row, 'ours')} | {ratio} |"


def describe(case: str) -> str:
    """`decode 8x131072` as words."""
    kind, _, shape = case.partition(" ")
    sizes = [f"{int(size):,}" if size.isdigit() else size for size in shape.split("x")]
    return f"{LABELS.get(kind, kind)}, {' x '.join(sizes)}" if shape else LABELS.get(kind, kind)


def _value(row: dict, side: str) -> str:
    value = row[side]
    return "-" if value is None else f"{value:,.0f} {row['unit']}" if value >= 100 else f"{value:.3g} {row['unit']}"


def replace(text: str, table: str) -> str:
    """The README with the table between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where the table is out of date")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", metavar="DIR")
    args = parser.parse_args(argv)
    text = args.readme.read_text(encoding="utf-8")
    new = replace(text, render(args.results))
    if args.check:
        if new != text:
            print(
                "README.md: the table is not that of the result files; run python scripts/readme_table.py",
                file=sys.stderr,
            )
        return int(new != text)
    args.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
