"""The command ``dsv41-sparse``: one subcommand a module, imported only when it is called."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

from . import __version__, seams

USAGE = """\
usage: dsv41-sparse COMMAND [ARGS...]

commands:
  run MODULE [ARGS...]  run an SGLang program that loads no plugins itself, with the plugins loaded
  doctor                say whether this machine, SGLang and model will work, and why not
  try                   serve the small model, or run the indexer on the CPU where there is no GPU
  bench                 measure kernels and a server beside SGLang's, draw and compare the results
  model                 write a small random-weight DeepSeek-V4.1 model

`dsv41-sparse COMMAND --help` describes each, `dsv41-sparse --version` names this release. A server needs none of them:

  python -m sglang.launch_server --model-path MODEL --attention-backend dsv41-sparse
"""

RUN_USAGE = """\
usage: dsv41-sparse run MODULE [ARGS...]

Loads SGLang's plugins in this process and in each process that MODULE spawns, then runs MODULE as `python -m MODULE`
would. SGLang's offline benchmarks load no plugins and would refuse `--attention-backend dsv41-sparse`.

examples:
  dsv41-sparse run sglang.benchmark.one_batch --model-path MODEL --attention-backend dsv41-sparse \\
      --batch-size 8 --input-len 2048 --output-len 64
  dsv41-sparse run sglang.benchmark.offline_throughput --model-path MODEL --attention-backend dsv41-sparse \\
      --dataset-name generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 8

`sglang.bench_NAME`, the place of these programs in older releases, is read as `sglang.benchmark.NAME`.
"""

# Tells the runner, in this process and in each that it spawns, what to run.
RUN_MODULE = "_DSV41_SPARSE_RUN_MODULE"
COMMANDS = {
    "doctor": "sglang_dsv41.doctor",
    "try": "sglang_dsv41.trial",
    "bench": "sglang_dsv41.bench",
    "model": "sglang_dsv41.models",
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command == "--version":
        print(f"sglang-dsv41 {__version__} for SGLang {seams.SUPPORTED}")
        return 0
    if command == "run":
        return run(rest)
    if command in COMMANDS:
        return importlib.import_module(COMMANDS[command]).main(rest) or 0
    return _fail(f"unknown command {command!r}; one of {', '.join(['run', *COMMANDS])}")


def run(argv: Sequence[str]) -> int:
    """Run a module with SGLang's plugins loaded; its own exit status passes through as ``SystemExit``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(RUN_USAGE, end="")
        return 0 if argv else 2
    if argv[0].startswith("-"):
        return _fail(f"run: MODULE comes first, its options after it; got {argv[0]}")
    if importlib.util.find_spec("sglang") is None:
        return _fail("run: SGLang is not installed here; pip install 'sglang>=0.5.23,<0.5.24'")
    module = _present_name(argv[0])
    try:
        module_spec(module)
    except ModuleNotFoundError as error:
        return _fail(f"run: cannot run {module}: {error}")
    os.environ[RUN_MODULE] = module
    sys.argv = [module, *argv[1:]]
    runpy.run_module("sglang_dsv41.runner", run_name="__main__", alter_sys=True)
    return 0


def module_spec(name: str) -> ModuleSpec:
    """The spec of a module that can be run, its package's ``__main__`` for a package.

    Raises:
        ModuleNotFoundError: there is no such module, or no code to run.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    return spec


def _present_name(module: str) -> str:
    """A benchmark's module in this SGLang, where its older name is gone."""
    prefix = "sglang.bench_"
    if module.startswith(prefix) and importlib.util.find_spec(module) is None:
        moved = f"sglang.benchmark.{module[len(prefix) :]}"
        if importlib.util.find_spec(moved) is not None:
            print(f"dsv41-sparse: {module} is {moved} in this SGLang", file=sys.stderr)
            return moved
    return module


def _fail(message: str) -> int:
    print(f"dsv41-sparse: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
