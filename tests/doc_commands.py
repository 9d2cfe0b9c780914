"""The commands of the docs: each line of each ``bash`` block, and what stands above it."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "patches/README.md",
    ROOT / "tests/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SERVERS = (["python", "-m", "sglang.launch_server"], ["sglang", "serve"])
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """One command of a block: page, line, words without leading assignments, and the paragraph above the block."""

    page: str
    line: int
    words: list[str]
    above: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line} {' '.join(self.words[:3])}"


def blocks(path: Path, language: str) -> Iterator[tuple[int, str, str]]:
    """(first line, text, paragraph above) of each block of a language in a page."""
    text = path.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        if match["language"] == language:
            before = text[: match.start()]
            paragraphs = re.split(r"\n\s*\n", before.rstrip())
            body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
            yield before.count("\n") + 2, body, paragraphs[-1]


def commands() -> list[Command]:
    """Every command of every ``bash`` block, continued lines joined, comments dropped."""
    found = []
    for path in PAGES:
        for first, body, above in blocks(path, "bash"):
            joined = body.replace("\\\n", "\0")
            for number, line in enumerate(joined.split("\n")):
                words = shlex.split(line.replace("\0", " "), comments=True)
                while words and re.fullmatch(r"\w+=\S*", words[0]):
                    words = words[1:]
                if (
                    words
                    and words[0] == "scripts/run.sh"
                    and len(words) > 1
                    and words[1] not in ("try", "test", "setup")
                ):
                    words = words[1:]  # it runs the rest in its environment
                offset = number + "\n".join(joined.split("\n")[:number]).count("\0")
                if words:
                    found.append(Command(path.relative_to(ROOT).as_posix(), first + offset, words, above))
    return found


def server_options(command: Command) -> list[str] | None:
    """What a command passes to SGLang's server, or None where it starts none."""
    words = command.words
    for start in SERVERS:
        if words[: len(start)] == start:
            return words[len(start) :]
    if words[0] == "scripts/serve.sh":
        return ["--model-path", words[1], "--attention-backend", "dsv41-sparse", *words[2:]]
    return None


def module_call(command: Command) -> tuple[str, list[str]] | None:
    """(module, arguments) of a command that runs another program of SGLang, or None."""
    words = command.words
    if words[:2] == ["dsv41-sparse", "run"]:
        return words[2], words[3:]
    if words[:2] == ["python", "-m"] and words[2].startswith("sglang.") and words[:3] not in SERVERS:
        return words[2], words[3:]
    return None


class _ParsedError(Exception):
    """A program's own parser took its arguments."""


def parses(run, words: list[str], monkeypatch) -> None:
    """Call ``run`` with ``words`` as the command line, up to the moment that its own parser has taken them.

    Raises:
        AssertionError: the parser refused them, or was never asked.
    """
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        original(self, args, namespace)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", list(words))
    try:
        run()
    except _ParsedError:
        return
    except SystemExit as error:
        raise AssertionError(f"{' '.join(words)}: status {error.code}") from error
    raise AssertionError(f"{' '.join(words)}: it parsed nothing")


def run_module(name: str) -> None:
    """As ``python -m name`` does; ``sglang.bench_NAME`` where SGLang still has it."""
    assert importlib.util.find_spec(name) is not None, f"there is no module {name}"
    runpy.run_module(name, run_name="__main__", alter_sys=True)
