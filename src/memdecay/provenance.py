"""What made a result: the versions it depends on, and the commit."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def versions(*more: str) -> dict[str, str | None]:
    """Return the versions that a result depends on, None for what is not installed.

    Args:
        more: further packages to name.
    """
    found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("memdecay", "torch", "transformers", *more):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """Return the commit of the checkout this package runs from, or None; reads, runs nothing."""
    for folder in Path(__file__).resolve().parents:
        git = folder / ".git"
        if not git.exists() or not (folder / "src" / "memdecay").is_dir():
            continue
        try:
            if git.is_file():  # a worktree: `gitdir: PATH`
                git = folder / git.read_text(encoding="utf-8").split(":", 1)[1].strip()
            common = git
            if (git / "commondir").is_file():
                common = git / (git / "commondir").read_text(encoding="utf-8").strip()
            head = (git / "HEAD").read_text(encoding="utf-8").strip()
            if not head.startswith("ref: "):
                return head
            ref = head[5:]
            for place in (git, common):
                if (place / ref).is_file():
                    return (place / ref).read_text(encoding="utf-8").strip()
            for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
                if line.endswith(" " + ref):
                    return line.split()[0]
        except (OSError, IndexError, UnicodeDecodeError):
            return None
    return None
