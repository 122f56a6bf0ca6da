"""docs/commands.md is what `--help` says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_commands_is_up_to_date() -> None:
    """Regenerate it with the command below, its output put into docs/commands.md."""
    main = ROOT / "src" / "memdecay" / "cli" / "main.py"
    command = [sys.executable, "-m", "typer", str(main), "utils", "docs"]
    made = subprocess.run(
        [*command, "--name", "memdecay", "--title", "Commands"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
    )
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert made.stdout.strip() == page.strip()
