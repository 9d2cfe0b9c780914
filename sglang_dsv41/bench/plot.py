"""Draw result files as SVG: kernel times against context and rows, a server's speed stock beside ours.

examples:
  {program} kernels.json server.json --out plots

NAME.json gives NAME-context.svg and NAME-rows.svg if it has kernel cases, NAME-speed.svg if it has server cases. The same
file gives the same bytes (with the same matplotlib). Each drawing holds its data as JSON in its metadata.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from . import results
from .kernels import CaseName

ROWS_CONTEXT = 131072
# Panel -> the kinds of case drawn in it, with their label.
PANELS = {
    "consumer": {"sparse_logits": "logits", "consumer_pass": "whole pass"},
    "source": {"dense_logits": "logits", "source_pass": "whole pass"},
}
SPEEDS = {"decode": ("decode",), "prefill": ("prefill", "prefill_chunk")}
SIDES = {"stock": "stock dsv4", "ours": "dsv41-sparse"}
# Of Okabe and Ito's palette, told apart with any colour vision; marker and line style say the rest.
COLOURS = {"stock": "#D55E00", "ours": "#0072B2"}
STYLES = {"logits": ("o", "-"), "whole pass": ("s", "--")}
CREATOR = "dsv41-sparse bench plot"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
NEEDS_MATPLOTLIB = "matplotlib is not installed here; pip install matplotlib, or this package with its extra `plot`"


def figures(content: dict, file: str) -> dict[str, dict]:
    """What is drawn of a result file: suffix of the drawing -> its data, free of matplotlib.

    Kernel drawings hold ``lines``: {panel, kind, label, side, x, y}, y in us. The speed drawing holds ``bars``: {panel,
    case, stock, ours, ratio, ranges}, in tok/s; ``ranges`` has the least and the largest sample of each side. Both hold
    ``title``, ``x``, ``y`` (axis labels) and ``caption``.
    """
    drawn = {}
    kernels = _kernel_rows(content["rows"])
    rows = _most_contexts(kernels)
    caption = _caption(content, file)
    if rows is not None:
        lines = _lines(kernels, lambda case: case.context if case.requests == rows else None)
        drawn["context"] = {
            "title": f"Kernel time against context, {rows} row{'s' if rows > 1 else ''}",
            "x": "context, positions",
            "y": "time of one layer, us",
            "lines": lines,
            "caption": f"{caption}; medians",
        }
    lines = _lines(kernels, lambda case: case.requests if case.context == ROWS_CONTEXT else None)
    if lines:
        drawn["rows"] = {
            "title": f"Kernel time against rows, context {ROWS_CONTEXT:,}",
            "x": "rows (one a request)",
            "y": "time of one layer, us",
            "lines": lines,
            "caption": f"{caption}; medians",
        }
    bars = [
        {"panel": panel, "ranges": {side: _range(row, side) for side in SIDES}}
        | {key: row[key] for key in ("case", "stock", "ours", "ratio")}
        for panel, kinds in SPEEDS.items()
        for kind in kinds
        for row in sorted(content["rows"], key=lambda row: _sizes(row["case"])[::-1])
        if row["case"].split(" ")[0] == kind and row["unit"] == "tok/s" and row["stock"] and row["ours"]
    ]
    if bars:
        drawn["speed"] = {
            "title": "Server speed, stock beside ours",
            "x": "requests x context",
            "y": "tokens/s",
            "bars": bars,
            "caption": f"{caption}; medians, whiskers: least and largest sample",
        }
    return drawn


def _range(row: dict, side: str) -> list[float]:
    samples = row.get("samples", {}).get(side) or [row[side]]
    return [min(samples), max(samples)]


def _sizes(case: str) -> list[int]:
    """The numbers of a case's shape."""
    return [int(size) for size in re.findall(r"\d+", case)]


def _kernel_rows(rows: Sequence[dict]) -> list[tuple[CaseName, dict]]:
    """The rows of the panels' kinds that both sides measured."""
    kinds = {kind for panel in PANELS.values() for kind in panel}
    found = []
    for row in rows:
        if row["case"].split(" ")[0] in kinds and row["unit"] == "us" and row["stock"] and row["ours"]:
            name = CaseName.parse(row["case"])
            if name.group == 1:
                found.append((name, row))
    return found


def _most_contexts(kernels: Sequence[tuple[CaseName, dict]]) -> int | None:
    """The number of rows measured at most contexts, of several that with the widest range; None without two contexts."""
    contexts: dict[int, set[int]] = {}
    for name, _ in kernels:
        contexts.setdefault(name.requests, set()).add(name.context)
    best = max(
        contexts, key=lambda rows: (len(contexts[rows]), max(contexts[rows]) / min(contexts[rows])), default=None
    )
    return best if best is not None and len(contexts[best]) > 1 else None


def _lines(kernels: Sequence[tuple[CaseName, dict]], at) -> list[dict]:
    """A line for each panel, kind and side, ascending in ``at(case)``; cases where that is None are left out."""
    lines = []
    for panel, kinds in PANELS.items():
        for kind, label in kinds.items():
            points = sorted(
                (at(name), row["stock"], row["ours"]) for name, row in kernels if name.kind == kind and at(name)
            )
            for column, side in enumerate(SIDES, 1):
                if points:
                    xs, ys = [point[0] for point in points], [point[column] for point in points]
                    lines.append({"panel": panel, "kind": kind, "label": label, "side": side, "x": xs, "y": ys})
    return lines


def _caption(content: dict, file: str) -> str:
    versions = content.get("versions", {})
    parts = [content.get("gpu", results.UNKNOWN), f"SGLang {versions.get('sglang', results.UNKNOWN)}"]
    parts += [f"commit {content.get('commit', results.UNKNOWN)[:7]}", content.get("date", results.UNKNOWN)[:10]]
    return f"{file}: {', '.join(parts)}"


def draw(data: dict, path: Path) -> None:
    """Write the drawing of one of ``figures``' values to ``path``; needs matplotlib."""
    import matplotlib.style

    with matplotlib.style.context(["default", {"svg.hashsalt": CREATOR, "svg.fonttype": "path", "font.size": 10}]):
        figure = build(data)
        figure.savefig(
            path,
            format="svg",
            metadata={
                "Date": None,
                "Creator": CREATOR,
                "Title": data["title"],
                "Description": json.dumps(data, sort_keys=True),
            },
        )


def build(data: dict):
    """The matplotlib ``Figure`` of one of ``figures``' values."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    parts = data.get("lines") or data["bars"]
    panels = list(dict.fromkeys(part["panel"] for part in parts))
    widths = [len({part["case"] for part in parts if part["panel"] == p}) for p in panels] if "bars" in data else None
    axes = figure.subplots(1, len(panels), squeeze=False, sharey="lines" in data, width_ratios=widths)[0]
    for panel, axis in zip(panels, axes):
        chosen = [part for part in parts if part["panel"] == panel]
        (_draw_lines if "lines" in data else _draw_bars)(axis, chosen)
        axis.set_title(panel)
        axis.set_xlabel(data["x"])
        axis.grid(True, axis="y", which="major", color="#DDDDDD")
        axis.set_axisbelow(True)
    axes[0].set_ylabel(data["y"])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=len(labels),
        frameon=False,
        title=data["title"],
        title_fontsize=12,
    )
    figure.supxlabel(data["caption"], fontsize=8)
    figure.get_layout_engine().set(wspace=0.06)
    return figure


def _draw_lines(axis, lines: Sequence[dict]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for line in lines:
        marker, style = STYLES[line["label"]]
        axis.plot(
            line["x"],
            line["y"],
            color=COLOURS[line["side"]],
            marker=marker,
            linestyle=style,
            label=f"{SIDES[line['side']]}, {line['label']}",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted({x for line in lines for x in line["x"]}))
    axis.xaxis.set_minor_locator(NullLocator())
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _draw_bars(axis, bars: Sequence[dict]) -> None:
    from matplotlib.ticker import FuncFormatter

    for offset, side in zip((-0.2, 0.2), SIDES):
        heights = [bar[side] for bar in bars]
        places = [i + offset for i in range(len(bars))]
        hatch = "//" if side == "stock" else None
        axis.bar(places, heights, 0.38, color=COLOURS[side], edgecolor="white", hatch=hatch, label=SIDES[side])
        spread = [[abs(bar["ranges"][side][end] - bar[side]) for bar in bars] for end in (0, 1)]
        axis.errorbar(places, heights, yerr=spread, fmt="none", ecolor="black", capsize=3)
    for i, bar in enumerate(bars):
        top = max(max(limits) for limits in bar["ranges"].values())
        axis.annotate(f"{bar['ratio']:.2f}x", (i, top), (0, 4), textcoords="offset points", ha="center")
    axis.set_xticks(range(len(bars)), [_bar_label(bar["case"]) for bar in bars])
    axis.margins(y=0.1)
    axis.set_xlim(-0.7, len(bars) - 0.3)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _bar_label(case: str) -> str:
    kind = case.split(" ")[0]
    sizes = " x\n".join(f"{size:,}" for size in _sizes(case))
    return f"chunk at\n{sizes}" if kind == "prefill_chunk" else sizes


def data_of(path: Path) -> dict:
    """The data that a drawing holds.

    Raises:
        ValueError: the file is no drawing of ``draw``.
    """
    found = ElementTree.parse(path).getroot().find(f".//{DESCRIPTION}")
    if found is None or not found.text:
        raise ValueError(f"{path} holds no data of {CREATOR}")
    return json.loads(found.text)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=CREATOR,
        description=__doc__.format(program=CREATOR),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the drawings")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """``dsv41-sparse bench plot``; 2 when a file has nothing to draw or matplotlib is missing."""
    args = parse_arguments(argv)
    drawings = {}
    try:
        for file in args.files:
            found = figures(results.read(file), file.name)
            if not found:
                raise results.ResultError(
                    f"{file} has nothing to draw: it needs kernel cases ({', '.join(k for p in PANELS.values() for k in p)})"
                    f" at context {ROWS_CONTEXT} or at two contexts, or server cases (decode, prefill, prefill_chunk)"
                )
            for suffix, data in found.items():
                name = f"{file.stem}-{suffix}.svg"
                if name in drawings:
                    raise results.ResultError(f"two files give {name}; draw them into folders of their own")
                drawings[name] = data
        if importlib.util.find_spec("matplotlib") is None:
            raise results.ResultError(NEEDS_MATPLOTLIB)
    except ValueError as error:
        print(f"{CREATOR}: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for name, data in drawings.items():
        draw(data, args.out / name)
        print(args.out / name)
    return 0
