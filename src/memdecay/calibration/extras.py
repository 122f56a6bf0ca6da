"""Says in one sentence which optional package is missing."""

from __future__ import annotations

import importlib.util

from memdecay.errors import StudyError


def require(*packages: str) -> None:
    """Refuse to start without packages of the extra `memdecay[study]`.

    Raises:
        StudyError: one of them is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise StudyError(
                f"This needs the package {package}, which is not installed; "
                f"pip install 'memdecay[study]' brings it."
            )
