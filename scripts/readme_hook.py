"""Hatchling metadata hook that adapts the README for package indexes.

A package index shows the README without the repository, so relative links and pictures would be broken. If
``[project.urls]`` names the ``Repository``, they become links to it. Otherwise links become plain text, and pictures
are replaced by their descriptions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
BRANCH = "main"


class ReadmeHook(MetadataHookInterface):
    """Sets ``readme`` in the metadata of the distribution `plasmid`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README, with links that work on a package index."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": convert_links(text, repository)}


def convert_links(text: str, repository: str = "") -> str:
    """Make relative links absolute, or remove them if there is no repository; code blocks stay as they are."""

    def convert(match: re.Match[str]) -> str:
        picture, shown, target = match.groups()
        if "://" in target or (target.startswith("#") and not picture):
            return match[0]
        if repository:
            kind = "raw" if picture else "blob"
            return f"{picture}[{shown}]({repository.rstrip('/')}/{kind}/{BRANCH}/{target})"
        return f"*{shown}*" if picture else shown

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(convert, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(convert, text[end:])])
