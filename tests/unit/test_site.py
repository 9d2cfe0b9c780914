"""The docs as a site: the navigation names every page, and every link and anchor leads somewhere, on GitHub too."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_commands import PAGES, ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
GENERATOR = ("mkdocs", "material", "mkdocstrings", "mkdocs_source_links")


def prose(path):
    """A page without its blocks and spans of code."""
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def links(path):
    return re.findall(r"\]\(([^)\s]+)\)", prose(path))


def anchors(path):
    """(on the site, on GitHub) of each heading: they differ where a heading has signs between spaces."""
    site, github = set(), set()
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        site.add(re.sub(r"[-\s]+", "-", plain))
        github.add(plain.replace(" ", "-"))
    return site, github


def test_the_navigation_names_every_page_once():
    named = re.findall(r"(?:^|[ :])([\w./-]+\.md)$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_no_page_is_a_stub():
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# ") and len(text.splitlines()) > 3, path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(path):
    for link in links(path):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists() and file.is_relative_to(ROOT), link
        if anchor and file.suffix == ".md":
            for place in anchors(file):
                assert anchor in place, link


def test_each_drawing_is_shown_and_described():
    shown = [pair for path in PAGES for pair in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", prose(path))]
    assert {Path(target).name for _, target in shown} == {path.name for path in (DOCS / "images").iterdir()}
    assert all(len(alternative) > 20 for alternative, _ in shown)


def test_nothing_comes_from_other_hosts():
    """Neither pages nor theme load a font, script or picture from elsewhere."""
    assert "font: false" in CONFIG and "extra_javascript" not in CONFIG and "extra_css" not in CONFIG
    for path in PAGES:
        assert not re.findall(r"!\[[^]]*\]\(\w+://|<(?:script|img|link)\b", prose(path)), path


def test_it_builds(tmp_path):
    absent = [name for name in GENERATOR if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}: pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "DOCS_REPO_URL": "https://forge.invalid/o/r", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    contributing = (tmp_path / "contributing/index.html").read_text(encoding="utf-8")
    assert re.search(r'href="https://forge\.invalid/o/r/blob/[^"]+/tests/README\.md"', contributing)
    indexer = (tmp_path / "reference/indexer/index.html").read_text(encoding="utf-8")
    assert "CandidateGeometry" in indexer and "SparseCandidateIndexer" in indexer
