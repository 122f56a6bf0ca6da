"""What memdecay raises when the caller, not memdecay, is at fault."""

from __future__ import annotations


class MemDecayError(ValueError):
    """A user error: one sentence naming the argument, its value and what is allowed."""


class BudgetError(MemDecayError):
    """A token budget that is not valid, or that cannot hold what must stay."""


class ProfileError(MemDecayError):
    """A region or a region profile that is not valid."""


class TraceError(MemDecayError):
    """A trace or a message that cannot be read or labelled."""


class ModelError(MemDecayError):
    """A model that cannot be found, loaded or served exactly."""


class PolicyError(MemDecayError):
    """An eviction policy that is unknown, misconfigured or returned something unusable."""


class SessionError(MemDecayError):
    """A session or a saved session that cannot be used as asked."""


class StudyError(MemDecayError):
    """A scenario, a setting or recorded rows are not usable."""
