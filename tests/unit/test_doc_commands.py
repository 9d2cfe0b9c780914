"""Every command in the docs is passed to the parser of its own program, or says above it what it needs.

Those of SGLang's programs: ``tests/sglang/test_doc_commands.py``.
"""

import functools
import re
import runpy
import tomllib

import pytest

from sglang_dsv41 import cli
from tests import doc_commands
from tests.doc_commands import ROOT

COMMANDS = doc_commands.commands()
WORKFLOWS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def kind(command):
    """Which check a command gets, or None."""
    words = command.words
    if doc_commands.server_options(command) is not None or doc_commands.module_call(command) is not None:
        return "sglang"
    if words[0] == "dsv41-sparse":
        return "ours"
    if words[0] == "scripts/run.sh":
        return "run.sh"
    if words[0] == "python" and words[1].startswith("scripts/"):
        return "script"
    if words[:3] == ["python", "-m", "pytest"]:
        return "pytest"
    if words[:2] == ["pip", "install"]:
        return "pip"
    if " ".join(words) in WORKFLOWS:
        return "workflow"
    if re.search(r"\bneeds\b", command.above, re.IGNORECASE):
        return "says what it needs"
    return None


def of(*kinds):
    return pytest.mark.parametrize(
        "command", [pytest.param(one, id=one.where) for one in COMMANDS if kind(one) in kinds]
    )


def test_there_are_commands_of_each_kind():
    assert len(COMMANDS) > 40
    assert {"sglang", "ours", "run.sh", "script", "pytest", "pip"} <= {kind(one) for one in COMMANDS}


def test_each_command_is_checked_or_says_what_it_needs():
    assert [one.where for one in COMMANDS if kind(one) is None] == []


@of("ours")
def test_our_commands_take_their_options(command, monkeypatch):
    rest = command.words[1:]
    if rest[0] == "bench" and rest[1] == "plot":
        pytest.importorskip("matplotlib")
    doc_commands.parses(lambda: cli.main(rest), command.words, monkeypatch)


@of("script")
def test_scripts_take_their_options(command, monkeypatch):
    path = ROOT / command.words[1]
    assert path.is_file()
    if command.words[2:] == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            monkeypatch.setattr("sys.argv", [str(path), "--help"])
            runpy.run_path(str(path), run_name="__main__")
        return
    run = functools.partial(runpy.run_path, str(path), run_name="__main__")
    doc_commands.parses(run, [str(path), *command.words[2:]], monkeypatch)


@of("run.sh", "pytest")
def test_paths_and_markers_of_test_commands_exist(command):
    words = command.words[2:] if command.words[0] == "scripts/run.sh" else command.words[3:]
    markers = {line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    while words:
        word = words.pop(0)
        if word == "-m":
            assert words.pop(0) in markers
        elif not word.startswith("-"):
            assert (ROOT / word.partition("::")[0]).exists(), word


@of("pip")
def test_extras_exist(command):
    assert command.words[-1].startswith(".") or command.words[2] in ("build", "-e"), command.where
    wanted = re.search(r"\[(.+)\]", command.words[-1])
    extras = set(wanted[1].split(",")) if wanted else set()
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_the_scripts_are_there():
    """Those that the text names too."""
    for path in doc_commands.PAGES:
        named = set(re.findall(r"(?<![\w./])scripts/[\w./]+\.(?:py|sh)", path.read_text(encoding="utf-8")))
        if path.name != "CHANGELOG.md":
            assert [one for one in sorted(named) if not (ROOT / one).is_file()] == [], path


@pytest.mark.parametrize(
    "words",
    [
        ["dsv41-sparse", "doctor", "--model", "--jsn"],
        ["dsv41-sparse", "bench", "kernels", "--rouns", "3"],
        ["dsv41-sparse", "modle", "--out", "x"],
    ],
)
def test_a_wrong_command_is_found(words, monkeypatch):
    with pytest.raises(AssertionError):
        doc_commands.parses(lambda: cli.main(words[1:]), words, monkeypatch)
