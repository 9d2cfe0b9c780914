"""The docs' command lines of SGLang's programs, by SGLang's own parsers and argument resolution. No GPU, no server."""

import ast
import functools
import json
import re
from pathlib import Path

import pytest

from sglang_dsv41 import envs, models
from tests import doc_commands
from tests.doc_commands import PAGES, ROOT

pytest.importorskip("sglang")

COMMANDS = doc_commands.commands()
SERVERS = [one for one in COMMANDS if doc_commands.server_options(one) is not None]
MODULES = [one for one in COMMANDS if doc_commands.module_call(one) is not None]
RELEASED = "deepseek-ai/"


@pytest.fixture(scope="module", autouse=True)
def loaded():
    from sglang.srt.plugins import load_plugins

    load_plugins()


@functools.cache
def server_parser():
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.mark.parametrize("command", [pytest.param(one, id=one.where) for one in SERVERS])
def test_a_server_takes_the_options(command):
    """Whole names only: SGLang takes a beginning too, and the next release may have two names that begin so."""
    options = doc_commands.server_options(command)
    known = server_parser()._option_string_actions
    assert [word for word in options if word.startswith("--") and word.partition("=")[0] not in known] == []
    server_parser().parse_args(options)


@pytest.mark.parametrize("command", [pytest.param(one, id=one.where) for one in MODULES])
def test_a_program_takes_the_options(command, monkeypatch):
    module, options = doc_commands.module_call(command)
    if module == "sglang.bench_one_batch":
        module = "sglang.benchmark.one_batch"
    run = functools.partial(doc_commands.run_module, module)
    doc_commands.parses(run, [module, *options], monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The released topology with a draft, as far as resolution reads it: its config."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = models.model_config("topology", dspark=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, id=one.where)
        for one in SERVERS
        if any(word.startswith(RELEASED) for word in one.words) and one.page != "docs/index.md"
    ],
)
def test_a_deployment_resolves(command, checkpoint):
    """To our backend for both phases, and to the sizes that the line names."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.server_args import prepare_server_args

    options = [str(checkpoint) if word.startswith(RELEASED) else word for word in doc_commands.server_options(command)]
    args = prepare_server_args([*options, "--device", "cuda", "--skip-tokenizer-init"])
    args.resolve_once()
    args.check_server_args()
    view = resolved_view(args)
    assert attention_backends_of(view) == ("dsv41-sparse", "dsv41-sparse")
    assert (view.tp_size, view.ep_size, view.pp_size, view.attn_cp_size) == (8, 8, 1, 1)
    chunk = int(options[options.index("--chunked-prefill-size") + 1])
    assert view.chunked_prefill_size == chunk // view.attn_dp_size > 0
    if "DSPARK" in options:
        assert view.speculative_num_draft_tokens == 6


def test_python_blocks_name_fields_of_the_server():
    from sglang.srt.server_args import ServerArgs

    calls = []
    for path in PAGES:
        for line, text, _ in doc_commands.blocks(path, "python"):
            calls += [(path, line, node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert calls
    for path, line, call in calls:
        unknown = {keyword.arg for keyword in call.keywords} - set(ServerArgs.__struct_fields__)
        assert not unknown, f"{path}:{line}"


def own_options():
    """Every ``--option`` in our own sources, and those of the tools that the docs name."""
    files = [*ROOT.glob("sglang_dsv41/**/*.py"), *ROOT.glob("scripts/*"), *ROOT.glob("patches/*")]
    found = {"--strict", "--help", "--timeout", "--no-deps", "--check"}
    for path in files:
        if path.is_file():
            found |= set(re.findall(r"--[a-z][\w-]*", path.read_text(encoding="utf-8")))
    return found


def sglang_options():
    import sglang

    found = set(server_parser()._option_string_actions)
    for path in Path(sglang.__file__).parent.glob("benchmark/*.py"):
        found |= set(re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_options_and_variables_in_the_text_exist(path):
    """Those in code spans."""
    import sglang

    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", path.read_text(encoding="utf-8"))
    options = {word.partition("=")[0] for span in spans for word in re.findall(r"(?<![\w-])--[a-z][\w=-]*", span)}
    assert sorted(options - own_options() - sglang_options()) == []

    variables = {word for span in spans for word in re.findall(r"\b(?:SGLANG|DSV41_SPARSE)_[A-Z0-9_]*[A-Z0-9]\b", span)}
    known = set((Path(sglang.__file__).parent / "srt/environ.py").read_text(encoding="utf-8").split())
    known |= {value for value in vars(envs).values() if isinstance(value, str)} | {"SGLANG_PLUGINS"}
    assert sorted(variables - known) == []


def test_a_wrong_option_is_found(monkeypatch):
    with pytest.raises(SystemExit):
        server_parser().parse_args(["--model-path", "M", "--attention-backend", "dsv41-spars"])
    with pytest.raises(AssertionError):
        run = functools.partial(doc_commands.run_module, "sglang.benchmark.one_batch")
        doc_commands.parses(run, ["one_batch", "--model-path", "M", "--batchsize", "8"], monkeypatch)
