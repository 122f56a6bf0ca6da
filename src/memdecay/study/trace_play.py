"""One recorded trace under one policy and budget: what foreseeing its assistant's tokens cost."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.calibration.player import Script
from memdecay.calibration.profile import check_profile
from memdecay.engine import Session
from memdecay.engine.saving import fingerprint
from memdecay.engine.support import check_supported
from memdecay.errors import BudgetError, StudyError
from memdecay.policy import Policy, policy_config
from memdecay.policy.full import Full
from memdecay.prompt import Conversation, Message
from memdecay.regions import Profile
from memdecay.tiers import Tiers

_RESULTS = ("tool_out", "retrieval")
"""Regions that a message may name to be a tool's output, whatever its role."""
WITH_TIERS, WITH_LADDER, WITH_CODES = "-tiers", "-tiers-graded", "-tiers-int4"
"""What the name of a policy ends with where its session has tiers: memory below full precision;
4 bits between the two; or 4 bits for all that is not at full precision, and nothing below."""
ENDINGS: Mapping[str, tuple[Mapping[str, Any], float | None]] = {
    WITH_LADDER: ({"bits": 4}, 1.0),
    WITH_CODES: ({"quantized": None, "bits": 4, "host": 0}, None),
    WITH_TIERS: ({}, None),
}
"""Ending -> arguments of `Tiers`, and `TieredPolicy.quantized`."""


@dataclass(frozen=True)
class TraceRun:
    """What all rows of a run have in common.

    Args:
        model: what `load_model` takes.
        model_name: how rows call it.
        dtype: "bfloat16" or "float32".
        profile: region policies. Heads that it does not have are not looked for, so that rows of
            one profile are of the same heads.
        score_chunk: assistant tokens that one forward reads, see `Session.append`.
        max_tokens: traces stop before the turn that passes so many tokens; None for never.
        seed: of everything random.
    """

    model: str
    model_name: str
    dtype: str = "bfloat16"
    profile: Profile = field(default_factory=Profile.default)
    score_chunk: int = 32
    max_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a chunk and a cut that are not at least 1."""
        for name in ("score_chunk", "max_tokens"):
            value = getattr(self, name)
            if name == "max_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise StudyError(f"{name} is {value!r}, but it must be an integer of at least 1.")

    def settings(self) -> dict[str, Any]:
        """Return what rows must agree in to be compared; JSON values."""
        return {
            "model": self.model_name,
            "dtype": self.dtype,
            "profile": digest(self.profile.to_dict()),
            "score_chunk": self.score_chunk,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class TieredPolicy:
    """A policy of which what it evicts can come back.

    Args:
        policy: that evicts the same tokens from all heads.
        tiers: arguments of `Tiers`.
        ending: of its name.
        quantized: how many tokens may be kept at fewer bits, as a share of the budget, which those
            at full precision have; None for what `tiers` says.

    Raises:
        StudyError: the policy cannot have tiers.
    """

    policy: Policy
    tiers: Mapping[str, Any] = field(default_factory=dict)
    ending: str = WITH_TIERS
    quantized: float | None = None

    def __post_init__(self) -> None:
        """Refuse a policy that never evicts, or evicts by head."""
        if not self.policy.bounded or self.policy.per_head:
            why = "never evicts" if not self.policy.bounded else "evicts other tokens in every head"
            raise StudyError(
                f"policy is {self.name!r}, but {self.policy.name} {why}; tiers need a policy that "
                f"evicts the same tokens from all heads."
            )

    @property
    def name(self) -> str:
        """What rows call it."""
        return f"{self.policy.name}{self.ending}"

    @property
    def bounded(self) -> bool:
        """Whether it evicts."""
        return True

    @property
    def recalls(self) -> bool:
        """Whether something goes where it must be found again."""
        return self.tiers.get("host") != 0 or self.tiers.get("disk", 0) != 0

    def settings(self, budget: int) -> Tiers:
        """Return the tiers of a session with so many tokens at full precision."""
        if self.quantized is None:
            return Tiers(**self.tiers)
        return Tiers(**self.tiers, quantized=int(self.quantized * budget))


def with_tiers(policy: Policy, ending: str) -> TieredPolicy:
    """Return a policy with the tiers that its name's ending stands for.

    Args:
        policy: that evicts the same tokens from all heads.
        ending: one of `ENDINGS`.

    Raises:
        StudyError: the policy cannot have tiers.
    """
    tiers, quantized = ENDINGS[ending]
    return TieredPolicy(policy, tiers, ending, quantized)


def plain_name(name: str) -> str:
    """Return the name of a policy without the ending of its tiers."""
    ending = next((one for one in ENDINGS if name.endswith(one)), "")
    return name.removesuffix(ending)


@dataclass(frozen=True)
class TraceTask:
    """A piece of work that needs the model; it knows all that a worker elsewhere needs.

    Args:
        kind: "size" or "trace".
        run: the settings.
        script: the trace, a turn a stage, cut already for "trace".
        policy: what decides ("trace").
        share: its budget, as a share of the trace's tokens ("trace").
        tokens: of the trace ("trace").
        provenance: what the row says of its making ("trace").
    """

    kind: str
    run: TraceRun
    script: Script
    policy: Policy | TieredPolicy = field(default_factory=Full)
    share: float = 1.0
    tokens: int = 0
    provenance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Reading:
    """What one session said of a trace: `(scored,)` each, and its report."""

    position: Tensor
    nll: Tensor
    top1: Tensor
    peak: int
    evicted: int
    observations: int
    idle_s: float
    seconds: float


_reference: dict[str, _Reading] = {}
"""The newest trace on the full cache: all rows of a trace are compared with it."""
_weights: dict[int, str] = {}


def do_trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TraceTask,
    advance: Callable[[float], None],
) -> Any:
    """Do a task; `advance` is told of tokens as they are read.

    Returns:
        "size": the tokens after each stage of the script; "trace": one row.

    Raises:
        ProfileError: the profile is of another tokenizer.
        TraceError: the trace cannot be rendered.
    """
    check_profile(task.run.profile, tokenizer)
    if task.kind == "size":
        return stage_ends(tokenizer, task)
    torch.manual_seed(task.run.seed)
    budget = int(task.share * task.tokens) if task.policy.bounded else None
    trained = check_supported(model).trained_positions
    row: dict[str, Any] = {
        "trace": task.script.name,
        "model": task.run.model_name,
        "weights": _weights_of(model),
        "dtype": task.run.dtype,
        "policy": task.policy.name,
        "policy_config": config_of(task.policy),
        "budget": task.share,
        "budget_tokens": budget,
        "tokens": task.tokens,
        "past_trained": max(0, task.tokens - trained) if trained is not None else 0,
        "score_chunk": task.run.score_chunk,
        "seed": task.run.seed,
        "settings": json.dumps(task.run.settings(), sort_keys=True),
        "refused": "",
        **task.provenance,
    }
    full = _full(model, tokenizer, task, advance)
    read = full
    if task.policy != Full():
        try:
            read = _read(model, tokenizer, task, budget, advance)
        except BudgetError as error:  # such as pins that are more than the budget
            return {**row, "refused": str(error), "full_nll": float(full.nll.mean())}
    if not torch.equal(read.position, full.position):
        raise RuntimeError(f"{task.script.name} was scored on different tokens")
    return {
        **row,
        "scored_tokens": len(read.nll),
        "nll": float(read.nll.mean()),
        "full_nll": float(full.nll.mean()),
        "delta_nll": float((read.nll - full.nll).mean()),
        "top1_agreement": float((read.top1 == full.top1).double().mean()),
        "peak_resident_tokens": read.peak,
        "evicted_tokens": read.evicted,
        "observations": read.observations,
        "idle_s": read.idle_s,
        "seconds": read.seconds,
    }


def stage_ends(tokenizer: PreTrainedTokenizerBase, task: TraceTask) -> list[int]:
    """Return how many tokens a script has after each of its stages."""
    script = task.script
    conversation = Conversation(
        tokenizer,
        retrievers=script.retrievers,
        tools=list(script.tools) or None,
        profile=task.run.profile,
    )
    ends: list[int] = []
    for stage in script.stages:
        ends.append((ends[-1] if ends else 0) + len(conversation.append(stage)))
    return ends


def config_of(policy: Policy | TieredPolicy) -> str:
    """Return a policy's name and parameters as JSON."""
    if isinstance(policy, TieredPolicy):
        about = {**policy_config(policy.policy), "name": policy.name, "tiers": dict(policy.tiers)}
        if policy.quantized is not None:
            about["quantized"] = policy.quantized
        return json.dumps(about, sort_keys=True)
    return json.dumps(policy_config(policy), sort_keys=True)


def digest(value: Any) -> str:
    """Return what tells one JSON value from another."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _full(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TraceTask,
    advance: Callable[[float], None],
) -> _Reading:
    """Return the trace on the full cache; it is read once for all rows that this process makes."""
    key = digest([task.run.settings(), _weights_of(model), asdict(task.script)])
    if key not in _reference:
        _reference.clear()
        told = advance if task.policy == Full() else lambda count: None
        _reference[key] = _read(model, tokenizer, task, None, told, Full())
    return _reference[key]


@torch.no_grad()
def _read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TraceTask,
    budget: int | None,
    advance: Callable[[float], None],
    policy: Policy | None = None,
) -> _Reading:
    """Append every stage of a trace, the assistant's tokens teacher-forced and scored.

    Raises:
        BudgetError: the budget cannot hold the pins.
    """
    script, tiers = task.script, None
    decides = policy or task.policy
    if isinstance(decides, TieredPolicy):
        assert budget is not None
        chosen, tiers = decides.policy, decides.settings(budget)
    else:
        chosen = decides
    profile = task.run.profile
    if not profile.evidence_given:
        profile = profile.with_evidence({})
    session = Session(
        model,
        tokenizer,
        budget=budget,
        policy=chosen,
        profile=profile,
        retrievers=script.retrievers,
        tools=list(script.tools) or None,
        tiers=tiers,
    )
    scores = []
    idle_s, began, peak = 0.0, time.perf_counter(), 0

    def ran(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        nonlocal peak
        if kwargs.get("cache") is session.cache and kwargs.get("input_ids") is not None:
            advance(int(kwargs["input_ids"].shape[-1]))
            peak = max(peak, session.cache.kept() - session.cache.coded_tokens)

    with session:
        session.check([message for stage in script.stages for message in stage])
        hook = model.register_forward_hook(ran, with_kwargs=True)
        try:
            for stage in script.stages:
                if "replay" in chosen.needs and any(map(_is_result, stage)):
                    idle_s += _idle(session)
                result = session.append(stage, score=True, score_chunk=task.run.score_chunk)
                if result.scores is not None:
                    scores.append(result.scores)
        finally:
            hook.remove()
        report = session.report()
    if not scores:
        raise StudyError(
            f"The trace {script.name!r} has no assistant tokens to score (in its first "
            f"{report.seen_tokens:,} tokens); leave it out."
        )
    return _Reading(
        position=torch.cat([one.position for one in scores]),
        nll=torch.cat([one.nll for one in scores]),
        top1=torch.cat([one.top1 for one in scores]),
        # Where others are at fewer bits, the budget is of those at full precision.
        peak=report.peak_resident_tokens if session.cache.full_precision is None else peak,
        evicted=report.evicted_tokens,
        observations=report.observations,
        idle_s=idle_s,
        seconds=time.perf_counter() - began,
    )


def _is_result(message: Message) -> bool:
    """Whether an agent waited for this message: the output of a tool."""
    return message["role"] == "tool" or message.get("region") in _RESULTS


def _idle(session: Session) -> float:
    """Let a session use the time in which a tool works; returns seconds, 0 if it has no use."""
    idle = getattr(session, "idle", None)
    if idle is None:
        return 0.0
    began = time.perf_counter()
    idle()
    return time.perf_counter() - began


def _weights_of(model: PreTrainedModel) -> str:
    if id(model) not in _weights:
        _weights.clear()
        _weights[id(model)] = str(fingerprint(model)["weights"])[:16]
    return _weights[id(model)]
