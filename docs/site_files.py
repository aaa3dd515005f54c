"""A hook of mkdocs.yml: the site has the repository's layout.

Each page keeps its path in the repository, and each file that a page links to is copied to its own path. A link from
`docs/records.md` to `../attn_exp/core/record/record.py` therefore works in the repository and in the site.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
_SHOWN = {".md", ".png"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files, README.md, the pages of docs/, and everything that they link to."""
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    theme = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(docs)]
    return Files(
        [*theme, *(_file(path, root, config) for path in _with_linked([root / "README.md", *docs.glob("*.md")]))]
    )


def _file(path: Path, root: Path, config: MkDocsConfig) -> File:
    file = File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path))
    if path.suffix not in _SHOWN:
        file.dest_uri += ".txt"  # browsers show a text file and download most others
    return file


def _with_linked(pages: list[Path]) -> list[Path]:
    """Return the pages and the files that they link to, those of linked pages included."""
    found, waiting = dict.fromkeys(pages), list(pages)
    while waiting:
        page = waiting.pop()
        for target in _LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if path.is_file() and path not in found:
                found[path] = None
                waiting += [path] if path.suffix == ".md" else []
    return list(found)
