"""A hook of MkDocs: a page's link to a file outside of docs/ opens on the site as it does in the repository.

Every file that a page links to is published with the pages, as text under ``repository/``, and every folder as a page
that lists its files. So the site needs no address of the repository, and shows the files of its own version. A link to
what does not exist stays as it is, and ``mkdocs build --strict`` fails on it.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r"\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")
_FOLDER = "repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to."""
    root = Path(config.docs_dir).parent
    linked = {path for page in files.documentation_pages() for path in _linked_paths(page.content_string, page, config)}
    in_folders = {file for folder in linked if folder.is_dir() for file in _files_of(folder)}
    for path in sorted(linked | in_folders):
        uri = _uri(path, root)
        content = _listing(path) if path.is_dir() else path.read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """The page with its links turned to the published copies."""
    root = Path(config.docs_dir).parent

    def turned(match: re.Match[str]) -> str:
        path = _path(match[1], page.file, config)
        if path is None:
            return match[0]
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(_uri(path, root), start)})"

    return _LINK.sub(turned, markdown)


def _linked_paths(markdown: str, page: File, config: MkDocsConfig) -> Iterator[Path]:
    for match in _LINK.finditer(markdown):
        path = _path(match[1], page, config)
        if path is not None:
            yield path


def _path(link: str, page: File, config: MkDocsConfig) -> Path | None:
    """What the link names, where that exists in the repository and outside of docs/."""
    docs = Path(config.docs_dir)
    # Not ``resolve``: sub-packages are links, and a page means the name that it gives.
    path = Path(posixpath.normpath(docs / posixpath.dirname(page.src_uri) / link))
    is_ours = path.exists() and path.is_relative_to(docs.parent) and not path.is_relative_to(docs)
    return path if is_ours else None


def _uri(path: Path, root: Path) -> str:
    """Where the copy lies among the pages. Browsers show ``.txt``; some save ``.py`` and ``.yaml`` to the disk."""
    name = path.relative_to(root).as_posix()
    return f"{_FOLDER}/{name}/index.md" if path.is_dir() else f"{_FOLDER}/{name}.txt"


def _files_of(folder: Path) -> list[Path]:
    kept = {".py", ".yaml", ".toml", ".md"}
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in kept)


def _listing(folder: Path) -> str:
    lines = "".join(f"- [{path.name}]({path.name}.txt)\n" for path in _files_of(folder))
    return f"# {folder.name}/\n\nFiles of this folder of the repository.\n\n{lines}"
