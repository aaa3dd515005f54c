"""Tests of docs/site_files.py and mkdocs.yml: links of a page lead somewhere in the site, or the build fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "# Home\n\n[guide](docs/guide.md#use), [code](attn_exp/cli.py)\n",
    "docs/guide.md": "# Guide\n\n## Use\n\n[code](../attn_exp/cli.py), [changes](../CHANGELOG.md), ![](a.png)\n",
    "CHANGELOG.md": "# Changelog\n\n[home](README.md), [data](results/table.csv)\n",
    "docs/a.png": "",
    "docs/embed.py": "",
    "attn_exp/cli.py": "class Case: ...\n",
    "attn_exp/core/unlinked.py": "",
    "results/table.csv": "a,b\n",
}


def build(folder, **pages):
    """Build a site of PAGES with mkdocs.yml's hook and strictness; return the exit code, the log and the links."""
    for name, text in {**PAGES, **pages}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "docs/site_files.py").write_text((ROOT / "docs/site_files.py").read_text())
    settings = re.sub(r"\n(nav|plugins):\n(?: .*\n)+", "\n", (ROOT / "mkdocs.yml").read_text())
    (folder / "mkdocs.yml").write_text(settings.replace("name: material", "name: mkdocs"))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=folder, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def targets(page):
    """Return the files that the links in a page's text lead to."""
    links = re.findall(r'(?:href|src)="([^":#]+)(?:#[^"]*)?"', page.read_text())
    found = [(page.parent / link).resolve() for link in links if not link.startswith("/")]
    return [path / "index.html" if path.is_dir() else path for path in found]


def test_links_out_of_docs_lead_to_copies_of_the_files(tmp_path):
    code, log = build(tmp_path)
    assert (code, "WARNING" in log) == (0, False), log
    site = tmp_path / "site"
    linked = {path.relative_to(site).as_posix() for page in site.rglob("index.html") for path in targets(page)}
    pages = {"index.html", "docs/guide/index.html", "CHANGELOG/index.html"}
    assert linked >= {*pages, "attn_exp/cli.py.txt", "results/table.csv.txt", "docs/a.png"}
    assert [name for name in linked if not (site / name).is_file()] == []
    assert (site / "attn_exp/cli.py.txt").read_text() == PAGES["attn_exp/cli.py"]
    assert not list(site.rglob("unlinked*")) and not list(site.rglob("embed*"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "../attn_exp/core/gone.py",
            "link '../attn_exp/core/gone.py', but the target 'attn_exp/core/gone.py' is not found",
        ),
        ("../attn_exp/core", "contains an unrecognized relative link '../attn_exp/core'"),
        ("../CHANGELOG.md#gone", "the doc 'CHANGELOG.md' does not contain an anchor '#gone'"),
    ],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path, target, message):
    code, log = build(tmp_path, **{"docs/guide.md": f"# Guide\n\n## Use\n\n[broken]({target})\n"})
    assert code == 1
    assert message in log.replace("\n", " ")
