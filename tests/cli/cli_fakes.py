"""A session without a model: it keeps pages, evicts the oldest and answers from what is left.

Tokens are words. Enough of the engine's behaviour to test the commands in milliseconds; that the
engine itself fits them is tested with SmolLM2 in test_cli_smollm2.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from memdecay.policy import DEFAULT_POLICY

PINNING = (DEFAULT_POLICY, "memdecay-heads", "memdecay-paper")


def words(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content)
    return [f"<{message['role']}>", *content.split()]


def region(message: dict[str, Any]) -> str:
    named = {"system": "system", "user": "user", "assistant": "scratchpad", "tool": "tool_out"}
    return named[message["role"]]


@dataclass
class FakeReport:
    model: str
    policy: dict[str, Any]
    budget_tokens: int | None
    seen_tokens: int
    kept_tokens: int
    peak_resident_tokens: int
    kept_by_region: dict[str, int]
    seen_by_region: dict[str, int]
    pinned_tokens: int = 0
    evicted_tokens: int = 0
    evicted_pages: int = 0
    kv_bytes: int = 0
    peak_kv_bytes: int = 0
    page_size: int = 16
    clock: str = "steps"
    steps: int = 0
    observations: int = 0
    evidence: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class FakeTokenizer:
    """Words are tokens; an id is an index into what has been read."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(self.words[i] for i in ids)


class FakeModel:
    def __init__(self) -> None:
        self.config = SimpleNamespace(max_position_embeddings=600, model_type="llama")
        self.device = "cpu"
        self.name_or_path = "fake"

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(remove=lambda: None)


class FakeSession:
    """As `memdecay.engine.Session`, for words."""

    def __init__(
        self,
        model: FakeModel,
        tokenizer: FakeTokenizer,
        *,
        budget: int | None,
        policy: Any = DEFAULT_POLICY,
        record_timeline: bool = False,
        retrievers: Any = (),
        tools: Any = None,
        **_: Any,
    ) -> None:
        self.model, self.tokenizer, self.budget = model, tokenizer, budget
        self.policy = policy if isinstance(policy, str) else policy.name
        self.page_size = 1 if self.policy in (DEFAULT_POLICY, "memdecay-heads") else 16
        self.messages: list[dict[str, Any]] = []
        self.tokens: list[tuple[str, str]] = []
        self.life: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.kept: set[int] = set()
        self.peak = 0

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def check(self, messages: Any) -> None:
        pass

    def idle(self) -> None:
        pass

    def append(self, messages: Any, *, score: bool = False, **_: Any) -> Any:
        nll, top1, target, position, of = [], [], [], [], []
        start = len(self.tokens)
        for message in messages:
            for word in words(message):
                at = len(self.tokens)
                self.tokens.append((word, region(message)))
                self._keep(at, turn=len(self.messages))
                if score and message["role"] == "assistant":
                    lost = at - len(self.kept) + 1
                    nll.append(2.0 + 0.01 * lost)
                    target.append(at)
                    top1.append(at if lost % 3 == 0 else at + 1)
                    position.append(at)
                    of.append(len(self.messages))
            self.messages.append(message)
        import torch

        scores = SimpleNamespace(
            position=torch.tensor(position),
            nll=torch.tensor(nll),
            top1=torch.tensor(top1),
            target=torch.tensor(target),
            message=torch.tensor(of),
        )
        tokens = len(self.tokens) - start
        return SimpleNamespace(
            tokens=tokens, spans=[], notes=[], scores=scores if score and nll else None
        )

    def _keep(self, at: int, turn: int) -> None:
        page, size = at // self.page_size, self.page_size
        if self.budget is not None and len(self.kept) + 1 > self.budget:
            pinned = {i // size for i in self.kept if self.tokens[i][1] == "system"}
            pinned = pinned if self.policy in PINNING else set()
            gone = min(i // size for i in self.kept if i // size not in pinned)
            self.kept -= {i for i in self.kept if i // size == gone}
            self._event(turn, "evict")
            self.life[gone]["evicted"] = len(self.events) - 1
        self.kept.add(at)
        self.peak = max(self.peak, len(self.kept))
        self._event(turn, "prefill")
        life = self.life.setdefault(
            page,
            {
                "page": page,
                "region": self.tokens[at][1],
                "tokens": 0,
                "born": len(self.events) - 1,
                "evicted": None,
                "pinned": self.policy in PINNING and self.tokens[at][1] == "system",
            },
        )
        life["tokens"] += 1
        if at % 8 == 0:
            here = sorted({i // size for i in self.kept})
            self.samples.append(
                {
                    "event": len(self.events) - 1,
                    "page_scores": {p: 0.5 ** ((page - p) / 8) for p in here},
                    "refreshed": [p for p in here if (p * 7 + at) % 61 == 0],
                }
            )

    def _event(self, turn: int, kind: str) -> None:
        self.events.append(
            {
                "index": len(self.events),
                "step": float(len(self.tokens)),
                "seen": len(self.tokens),
                "kept": len(self.kept),
                "turn": turn,
                "kind": kind,
            }
        )

    def ask(self, text: str, max_new_tokens: int = 16) -> str:
        known = " ".join(self.tokens[i][0] for i in sorted(self.kept))
        return f"I remember: {known}"

    def timeline(self) -> dict[str, Any]:
        return {
            "page_size": self.page_size,
            "regions": ["system", "user", "scratchpad", "tool_out"],
            "pages": list(self.life.values()),
            "events": self.events,
            "scores": self.samples,
        }

    def report(self) -> FakeReport:
        seen: dict[str, int] = {}
        kept: dict[str, int] = {}
        for i, (_, name) in enumerate(self.tokens):
            seen[name] = seen.get(name, 0) + 1
            kept[name] = kept.get(name, 0) + (i in self.kept)
        return FakeReport(
            model="fake",
            policy={"name": self.policy},
            budget_tokens=self.budget,
            seen_tokens=len(self.tokens),
            kept_tokens=len(self.kept),
            peak_resident_tokens=self.peak,
            kept_by_region=kept,
            seen_by_region=seen,
            peak_kv_bytes=46_080 * self.peak,
            page_size=self.page_size,
        )
