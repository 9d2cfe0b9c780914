"""``dsv41-sparse bench``: measure kernels and a server, draw the result files, compare them. One module a command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

USAGE = """\
usage: dsv41-sparse bench COMMAND [ARGS...]

commands:
  kernels   times of the index layers' kernels, SGLang's and ours, case by case (a Hopper GPU)
  server    decode and prefill of two engines, SGLang's backend and ours, sample by sample in turn (a GPU)
  plot      draw result files as SVG (needs matplotlib)
  compare   a result file against an older one: which cases lost against SGLang's backend

`dsv41-sparse bench COMMAND --help` describes each. A first run, a few minutes on one GPU:

  dsv41-sparse bench kernels --cases 'sparse_logits 8x131072' 'consumer_pass 8x131072' --out kernels.json
  dsv41-sparse bench server --quick --out server.json
  dsv41-sparse bench plot kernels.json server.json --out plots
"""

COMMANDS = ("kernels", "server", "plot", "compare")


def main(argv: Sequence[str] | None = None) -> int:
    """``dsv41-sparse bench``; 2 for a wrong call or a machine that cannot measure, else the command's own status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"dsv41-sparse bench: unknown command {argv[0]!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"{__name__}.{argv[0]}").main(argv[1:])
