"""A session on disk: one JSON file and one safetensors file in a folder, nothing executable.

The JSON file names the safetensors file and is replaced last, in one step. So a folder always
holds one whole session, the old one or the new one, whenever saving is interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.engine.cache import MemDecayCache, _lasting
from memdecay.engine.memory import tiers_from_dict
from memdecay.engine.slots import SlotTable
from memdecay.engine.support import check_supported
from memdecay.errors import MemDecayError, SessionError
from memdecay.policy import from_config, policy_config
from memdecay.provenance import versions
from memdecay.regions import Profile

if TYPE_CHECKING:
    from memdecay.engine.session import Session

FORMAT = 1
WITH_TIERS = 2
"""The format where something is outside, which what reads only format 1 must not pass over."""
WITH_CODES = 3
"""Likewise where tokens are at fewer bits."""
_JSON, _TENSORS = "session.json", "session-*.safetensors"
_OUTSIDE = "outside."
_SETTINGS = (
    "page_size",
    "align",
    "clock",
    "observe_every",
    "window",
    "default_region",
    "surprisal_vocabulary",
)
_COUNTERS = (
    "rows",
    "seen",
    "steps",
    "observations",
    "evicted_tokens",
    "evicted_pages",
    "peak_tokens",
)
_SAMPLE = 'Grüße, {"flight": "HAT-204"}\n\n  def f(x):\treturn x**2  # 価格 €19.90 🙂'
_TOKENS_COMPARED = 256
_WEIGHTS_COMPARED = 64


def save_session(session: Session, folder: str | os.PathLike[str]) -> None:
    """Write a session to a folder, which appears whole or not at all.

    Raises:
        SessionError: the folder cannot be written, or holds something else.
    """
    target = _path(folder)
    state, tensors = _session_state(session)
    try:
        if (target / _JSON).is_file():
            _write(target, state, tensors)
            return
        if target.exists() and not _is_empty_folder(target):
            raise SessionError(
                f"folder is {str(target)!r}, but it holds something else; it must be new, empty "
                f"or a saved session."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".memdecay-") as scratch:
            made = Path(scratch) / "session"
            made.mkdir()
            _write(made, state, tensors)
            made.replace(target)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()).rstrip(".")
        raise SessionError(
            f"The session cannot be saved to {str(target)!r}: {reason[:200]}."
        ) from error


def _write(folder: Path, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put a session into a folder; the one that is there already goes when this one is whole."""
    name = _TENSORS.replace("*", uuid.uuid4().hex[:12])
    made = [folder / name, folder / f"{_JSON}.{name}.part"]
    try:
        safetensors.torch.save_file(dict(tensors), made[0])
        document = {
            "format": _format(state),
            "tensors": {"file": name, "sha256": _sha256(made[0])},
            "sha256": _digest(state),
            "session": state,
        }
        made[1].write_text(json.dumps(document, indent=1), encoding="utf-8")
        made[1].replace(folder / _JSON)
    except BaseException:
        for file in made:
            with contextlib.suppress(OSError):
                file.unlink()
        raise
    for old in (*folder.glob(_TENSORS), *folder.glob(f"{_JSON}.*.part")):
        if old.name != name:
            with contextlib.suppress(OSError):
                old.unlink()


def _format(state: Mapping[str, Any]) -> int:
    tiers = state["tiers"]
    if tiers is None:
        return FORMAT
    return WITH_TIERS if tiers.get("quantized", 0) == 0 else WITH_CODES


def load_session(
    folder: str | os.PathLike[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Session:
    """Read a session that `save_session` wrote.

    Raises:
        SessionError: it is missing, damaged, or belongs to another model or tokenizer.
    """
    source = _path(folder)
    if not (source / _JSON).is_file():
        raise SessionError(
            f"folder is {str(source)!r}, but there is no saved session in it ({_JSON} is missing)."
        )
    check_supported(model)
    try:
        document = json.loads((source / _JSON).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or "format" not in document:
            raise SessionError(f"{str(source / _JSON)!r} is not a saved session.")
        if document["format"] not in (FORMAT, WITH_TIERS, WITH_CODES):
            raise SessionError(
                f"The session in {str(source)!r} has format {document['format']!r}, but this "
                f"memdecay reads formats {FORMAT} to {WITH_CODES}."
            )
        state, file = document["session"], document["tensors"]["file"]
        if document["sha256"] != _digest(state):
            raise SessionError(
                f"The session in {str(source)!r} is damaged: {_JSON} was changed after saving."
            )
        _check_same(source, state, model, tokenizer)
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(file)
        if not (source / file).is_file() or document["tensors"]["sha256"] != _sha256(source / file):
            raise SessionError(
                f"The session in {str(source)!r} is damaged: {file} is missing, or not the file "
                f"that was saved."
            )
        tensors = _tensors(source / file, str(model.device))
        try:
            return _restored(state, tensors, model, tokenizer)
        except MemDecayError as error:
            raise SessionError(
                f"The session in {str(source)!r} cannot be restored: {error}"
            ) from error
    except SessionError:
        raise
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        safetensors.SafetensorError,
    ) as error:
        raise SessionError(
            f"The session in {str(source)!r} is damaged ({type(error).__name__})."
        ) from error


def _tensors(file: Path, device: str) -> dict[str, Tensor]:
    """Read tensors to a device, but those outside to memory."""
    found: dict[str, Tensor] = {}
    for where in dict.fromkeys((device, "cpu")):
        with safetensors.safe_open(file, framework="pt", device=where) as stored:
            for name in stored.keys():  # noqa: SIM118
                if where == ("cpu" if name.startswith(_OUTSIDE) else device):
                    found[name] = stored.get_tensor(name)
    return found


def _check_same(
    source: Path,
    state: Mapping[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    saved, given = state["model"], fingerprint(model)
    if saved != given:
        different = next(name for name in given if saved.get(name) != given[name])
        raise SessionError(
            f"The session in {str(source)!r} belongs to another model "
            f"({saved['model_type']}, {different} {str(saved.get(different))[:80]}) than the one "
            f"given ({given['model_type']}, {different} {str(given[different])[:80]})."
        )
    if state["tokenizer"] != tokenizer_digest(tokenizer):
        raise SessionError(
            f"The session in {str(source)!r} belongs to another tokenizer than the one given "
            f"({type(tokenizer).__name__}, {len(tokenizer)} tokens)."
        )


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return what tells one model from another: its shape, and some of each weight."""
    config = model.config
    some = [
        parameter.detach().flatten()[:: max(1, parameter.numel() // _WEIGHTS_COMPARED)].float()
        for _, parameter in sorted(model.named_parameters())
    ]
    digest = hashlib.sha256(torch.cat(some).cpu().numpy().tobytes())
    return {
        "model_type": config.model_type,
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "dtype": str(model.dtype),
        "positions": _plain(getattr(config, "rope_parameters", None)),
        "sliding_window": getattr(config, "sliding_window", None),
        "weights": digest.hexdigest(),
    }


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what tells one tokenizer from another: its size, some tokens, a sample encoded."""
    size = len(tokenizer)
    some = range(0, size, max(1, size // _TOKENS_COMPARED))
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens([*some])]
    ids = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    return _digest([size, tokens, ids])


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _session_state(session: Session) -> tuple[dict[str, Any], dict[str, Tensor]]:
    cache = session.cache
    tensors: dict[str, Tensor] = {"ids": torch.tensor(session._ids, dtype=torch.int64)}
    if session._last_logits is not None:
        tensors["last_logits"] = session._last_logits
    for number, table in enumerate(cache.tables):
        tensors[f"table.{number}"] = table.index[:, : table.width].contiguous()
    for layer, pool in enumerate(cache.pools):
        for end, tensor in pool.saved(cache.table_of(layer).width).items():
            tensors[f"pool.{layer}{end}"] = tensor
    for row, ledger in enumerate(cache.ledgers):
        for name in ledger.columns:
            tensors[f"ledger.{row}.{name}"] = ledger[name].clone()
        tensors[f"ledger.{row}.queries"] = ledger.queries[: ledger.length].clone()
        hidden = ledger.trail.hidden() if ledger.trail is not None else None
        if hidden is not None:
            tensors[f"ledger.{row}.hidden"] = hidden
    outside = None
    if session._memory is not None:
        outside, held = session._memory.state()
        tensors.update({f"{_OUTSIDE}{name}": tensor for name, tensor in held.items()})
    state = {
        "memdecay": versions()["memdecay"],
        "model": fingerprint(session.model),
        "tokenizer": tokenizer_digest(session.tokenizer),
        "policy": policy_config(cache.policy),
        "profile": cache.profile.to_dict(),
        "settings": {
            "budget": session.budget,
            **{name: getattr(cache, name) for name in _SETTINGS},
        },
        "prefill_chunk": session.prefill_chunk,
        "counters": {name: getattr(cache, name) for name in _COUNTERS},
        "last_count": cache._last_count,
        "tables": [
            {"lengths": table.lengths, "capacity": table.capacity, "floor": table.floor}
            for table in cache.tables
        ],
        "ledgers": [{**ledger.mark(), "starts": ledger.starts} for ledger in cache.ledgers],
        "conversation": session.conversation.state_dict(),
        "empty_conversation": session._empty,
        "seen_by_region": session._seen_by_region,
        "next_span": session._next_span,
        "spans_of": {str(message): [*spans] for message, spans in session._spans_of.items()},
        "pinned_regions": sorted(session._pinned_regions),
        "peak_bytes": session._peak_bytes,
        "tiers": session.tiers.to_dict() if session.tiers is not None else None,
        "outside": outside,
    }
    return _plain(state), {name: tensor.detach().cpu() for name, tensor in tensors.items()}


@_lasting
def _restored(
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Session:
    from memdecay.engine.session import Session

    settings = dict(state["settings"])
    default_region = settings.pop("default_region")
    policy, profile = from_config(state["policy"]), Profile.from_dict(state["profile"])
    if "heads" in policy.needs and not profile.evidence_given:
        # Of before the package knew any heads: it was saved without, and goes on without.
        profile = profile.with_evidence({})
    if (state.get("outside") or {}).get("heads") == [] and not profile.evidence_given:
        # Likewise: what is outside was found by words, and has no keys by which heads find it.
        profile = profile.with_evidence({})
    session = Session(
        model,
        tokenizer,
        policy=policy,
        profile=profile,
        prefill_chunk=state["prefill_chunk"],
        tiers=tiers_from_dict(state.get("tiers")),
        **settings,
    )
    session.cache.default_region = default_region
    _restore_cache(session.cache, state, tensors)
    session._empty = state["empty_conversation"]
    session.conversation = session._conversation(state["conversation"])
    session._ids.extend(tensors["ids"].tolist())
    session._last_logits = tensors.get("last_logits")
    session._seen_by_region = dict(state["seen_by_region"])
    session._next_span = state["next_span"]
    session._spans_of = {int(key): tuple(spans) for key, spans in state["spans_of"].items()}
    session._pinned_regions = set(state["pinned_regions"])
    session._peak_bytes = state["peak_bytes"]
    if session._memory is not None:
        held = {name: tensor for name, tensor in tensors.items() if name.startswith(_OUTSIDE)}
        session._memory.restore(
            state["outside"],
            {name.removeprefix(_OUTSIDE): tensor for name, tensor in held.items()},
        )
    return session


def _restore_cache(
    cache: MemDecayCache, state: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    rows = state["counters"]["rows"]
    if rows:
        cache._make_tables(rows)
    for name in _COUNTERS:
        setattr(cache, name, state["counters"][name])
    cache._last_count = state["last_count"]
    for number, table in enumerate(cache.tables):
        _fill_table(table, tensors[f"table.{number}"], state["tables"][number])
    cache.pools = []
    for layer in range(len(cache.layout.windows) if rows else 0):
        name = f"pool.{layer}"
        saved = {end.removeprefix(name): tensors[end] for end in tensors if _is_of(end, name)}
        cache.pools.append(cache.restored_pool(layer, saved))
    for row, ledger in enumerate(cache.ledgers):
        mark = dict(state["ledgers"][row])
        ledger.starts = [(position, region) for position, region in mark.pop("starts")]
        ledger.back_to(mark)
        ledger.grow(cache.main.capacity)
        for name, column in ledger.columns.items():
            if f"ledger.{row}.{name}" not in tensors and name.startswith("state."):
                raise SessionError(
                    f"policy {cache.policy.name!r} has a column {name.removeprefix('state.')!r} "
                    f"here and had none when the session was saved, by another version of it."
                )
            _fill(column[: ledger.length], tensors[f"ledger.{row}.{name}"])
        _fill(ledger.queries[: ledger.length], tensors[f"ledger.{row}.queries"])
        hidden = tensors.get(f"ledger.{row}.hidden")
        if ledger.trail is not None and hidden is not None:
            ledger.trail = ledger.trail.restored(hidden, ledger.seen)


def _is_of(tensor: str, name: str) -> bool:
    return tensor == name or tensor.startswith(f"{name}.")


def _fill_table(table: SlotTable, index: Tensor, saved: Mapping[str, Any]) -> None:
    table.grow(saved["capacity"])
    table.lengths, table.floor = list(saved["lengths"]), saved["floor"]
    _fill(table.index[:, : table.width], index)


def _fill(into: Tensor, saved: Tensor) -> None:
    """Copy, never broadcast or convert."""
    if into.shape != saved.shape or into.dtype != saved.dtype:
        raise ValueError(f"{tuple(saved.shape)} {saved.dtype}")
    into.copy_(saved)


def _path(folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise SessionError(f"folder is {folder!r}, but it must be the path of a folder.")
    path = os.fspath(folder)
    if not isinstance(path, str) or "\0" in path:
        raise SessionError(f"folder is {folder!r}, but it must be the path of a folder.")
    return Path(path).expanduser()


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
