"""Hook of the documentation site: files of the repository that pages link to become part of it.

Pages link to recipes, results, and pages at the repository's root as a reader of the repository needs them. Here those
files are copied to ``repository/``, Markdown among them as pages, and links lead there. Links to folders become text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
"""Code blocks name the file that they are the content of."""
COPIED = "repository/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of ``docs``, and what those pages link to."""
    todo = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in DOCS.rglob("*.md")]
    found: set[str] = set()
    while todo:
        name, text = todo.pop()
        for match in LINK.finditer(text):
            target = inside(name, match[3])
            if target is None or target in found or target.startswith("docs/") or not (ROOT / target).is_file():
                continue
            found.add(target)
            files.append(File.generated(config, COPIED + target, content=(ROOT / target).read_bytes()))
            if target.endswith(".md"):
                todo.append((target, (ROOT / target).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the files are on the site; show a code block's file name as its title."""
    uri = page.file.src_uri
    name = uri.removeprefix(COPIED) if uri.startswith(COPIED) else f"docs/{uri}"

    def replace(match: re.Match[str]) -> str:
        target = inside(name, match[3])
        if target is None:
            return match[0]
        if not (ROOT / target).is_file():
            return match[2]
        on_site = target.removeprefix("docs/") if target.startswith("docs/") else COPIED + target
        relative = posixpath.relpath(on_site, posixpath.dirname(uri) or ".")
        return f"{match[1]}[{match[2]}]({relative}{match[4] or ''})"

    return LINK.sub(replace, FENCE.sub(r'```\1 title="\2"', markdown))


def inside(name: str, link: str) -> str | None:
    """The path in the repository that a link of the file ``name`` leads to; None for addresses of the web."""
    if "://" in link or link.startswith(("mailto:", "#", "/")):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
