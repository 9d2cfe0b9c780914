"""Compare a result file with an older one, case by case, by ratio: stock and ours of one run, so that a slower or faster
machine moves both sides. A ratio above 1 is better for ours.

examples:
  {program} kernels.json --baseline benchmarks/results/kernels.json
  {program} server.json --baseline benchmarks/results/server.json --warn 0.1 --fail-on-regression

A case whose ratio fell by more than --warn is listed, and in a GitHub workflow (GITHUB_ACTIONS set) printed as a warning
of the run. A case that only one file has is named.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import results

PROGRAM = "dsv41-sparse bench compare"


class Change(NamedTuple):
    """A case with a ratio on both sides; `change` is the share it rose by, negative where it fell."""

    case: str
    old: float
    new: float

    @property
    def change(self) -> float:
        return self.new / self.old - 1


def changes(new: dict, old: dict) -> tuple[list[Change], list[str]]:
    """The cases in both files, in the new one's order, and a line for each that cannot be compared."""
    ours, theirs = ({row["case"]: row["ratio"] for row in content["rows"]} for content in (new, old))
    both = [Change(case, theirs[case], ratio) for case, ratio in ours.items() if ratio and theirs.get(case)]
    left = [f"{case}: not in the baseline" for case in ours if case not in theirs]
    left += [f"{case}: only in the baseline" for case in theirs if case not in ours]
    for where, ratios in (("new file", ours), ("baseline", theirs)):
        left += [f"{case}: no ratio in the {where}" for case, ratio in ratios.items() if not ratio]
    return both, left


def table(found: Sequence[Change]) -> str:
    """The cases as a Markdown table."""
    lines = ["| case | baseline | new | change |", "|---|---|---|---|"]
    lines += [f"| {one.case} | {one.old:.2f}x | {one.new:.2f}x | {one.change:+.1%} |" for one in found]
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__.format(program=PROGRAM),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("new", type=Path, metavar="NEW", help="result file")
    parser.add_argument("--baseline", type=Path, required=True, metavar="OLD", help="result file to compare with")
    parser.add_argument(
        "--warn", type=float, default=0.15, metavar="SHARE", help="a fall to warn of (default: %(default)s, 15%%)"
    )
    parser.add_argument("--fail-on-regression", action="store_true", help="exit status 1 when a case fell that far")
    args = parser.parse_args(argv)
    if not 0 <= args.warn < 1:
        parser.error(f"--warn is a share from 0 to below 1, got {args.warn}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """``dsv41-sparse bench compare``; 1 with --fail-on-regression when a case fell, 2 when there is nothing to compare."""
    args = parse_arguments(argv)
    try:
        new, old = results.read(args.new), results.read(args.baseline)
        found, left = changes(new, old)
        if not found:
            first = [(content["rows"] or [{"case": "no case"}])[0]["case"] for content in (new, old)]
            raise results.ResultError(
                f"{args.new} (first case: {first[0]}) and {args.baseline} ({first[1]}) have no case with a ratio in common"
            )
    except results.ResultError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    print(table(found))
    gpus = [content.get("gpu", results.UNKNOWN) for content in (old, new)]
    if gpus[0] != gpus[1]:
        print(f"\nBaseline on {gpus[0]}, new on {gpus[1]}: ratios need not agree between kinds of GPU.")
    if left:
        print("\nNot compared:", *left, sep="\n  ")
    fallen = [one for one in found if one.change < -args.warn]
    if not fallen:
        print(f"\nNo case fell by more than {args.warn:.0%}.")
        return 0
    print(f"\nFell by more than {args.warn:.0%}:")
    for one in fallen:
        print(f"  {one.case}: {one.old:.2f}x to {one.new:.2f}x ({one.change:+.1%})")
    if os.environ.get("GITHUB_ACTIONS"):
        for one in fallen:
            # A workflow command's text has its percent signs escaped.
            text = f"{one.case} fell from {one.old:.2f}x to {one.new:.2f}x of stock ({one.change:+.1%})"
            print("::warning title=benchmark::" + text.replace("%", "%25"))
    return int(args.fail_on_regression)
