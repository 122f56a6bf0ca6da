"""A session on disk: one JSON file and one safetensors file in a folder, nothing executable."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.engine.cache import MemDecayCache
from memdecay.engine.slots import KVPool, SlotTable
from memdecay.errors import MemDecayError, SessionError
from memdecay.policy import from_config, policy_config
from memdecay.regions import Profile

if TYPE_CHECKING:
    from memdecay.engine.session import Session

FORMAT = 1
_JSON, _TENSORS = "session.json", "session.safetensors"
_SETTINGS = ("budget", "page_size", "align", "clock", "observe_every", "window", "default_region")
_COUNTERS = (
    "rows",
    "seen",
    "steps",
    "observations",
    "evicted_tokens",
    "evicted_pages",
    "peak_tokens",
)
_LEDGER = (
    "length",
    "seen",
    "num_pages",
    "latest_page",
    "next_page",
    "filled",
    "last_region",
    "latest_span",
    "num_queries",
)


def save_session(session: Session, folder: str | os.PathLike[str]) -> None:
    """Write a session to a folder, which appears whole or not at all.

    Raises:
        SessionError: the folder cannot be written, or holds something else.
    """
    target = Path(folder)
    if target.exists() and not (target / _JSON).is_file() and not _is_empty_folder(target):
        raise SessionError(
            f"folder is {str(target)!r}, but it holds something else; it must be new, empty or a "
            f"saved session."
        )
    state, tensors = _session_state(session)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            made, old = Path(scratch) / "new", Path(scratch) / "old"
            made.mkdir()
            safetensors.torch.save_file(tensors, made / _TENSORS)
            state["tensors_sha256"] = _sha256(made / _TENSORS)
            (made / _JSON).write_text(json.dumps(state, indent=1), encoding="utf-8")
            if target.exists():
                target.rename(old)
            made.rename(target)
    except OSError as error:
        raise SessionError(
            f"The session cannot be saved to {str(target)!r}: {error.strerror or error}."
        ) from error


def load_session(
    folder: str | os.PathLike[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Session:
    """Read a session that `save_session` wrote.

    Raises:
        SessionError: it is missing, damaged, or belongs to another model or tokenizer.
    """
    source = Path(folder)
    if not (source / _JSON).is_file():
        raise SessionError(
            f"folder is {str(source)!r}, but there is no saved session in it ({_JSON} is missing)."
        )
    try:
        state = json.loads((source / _JSON).read_text(encoding="utf-8"))
        version = state["format"]
        if version != FORMAT:
            raise SessionError(
                f"The session in {str(source)!r} has format {version!r}, but this memdecay reads "
                f"format {FORMAT}."
            )
        if state["model"] != fingerprint(model):
            raise SessionError(
                f"The session in {str(source)!r} belongs to another model "
                f"({state['model']['model_type']}, {state['model']['weights'][:8]}) than the one "
                f"given ({model.config.model_type}, {fingerprint(model)['weights'][:8]})."
            )
        if state["tensors_sha256"] != _sha256(source / _TENSORS):
            raise SessionError(
                f"The session in {str(source)!r} is damaged: {_TENSORS} is not the file that was "
                f"saved."
            )
        tensors = safetensors.torch.load_file(source / _TENSORS, device=str(model.device))
        return _restored(state, tensors, model, tokenizer)
    except SessionError:
        raise
    except MemDecayError as error:
        raise SessionError(f"The session in {str(source)!r} cannot be restored: {error}") from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RuntimeError,
        safetensors.SafetensorError,
    ) as error:
        raise SessionError(
            f"The session in {str(source)!r} is damaged ({type(error).__name__})."
        ) from error


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return what tells one model from another: its shape, and a digest of some weights."""
    config = model.config
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters())[
        :: max(1, len(list(model.parameters())) // 16)
    ]:
        digest.update(parameter.detach().flatten()[:256].float().cpu().numpy().tobytes())
    return {
        "model_type": config.model_type,
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "dtype": str(model.dtype),
        "weights": digest.hexdigest(),
    }


def _session_state(session: Session) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from memdecay import __version__

    cache = session.cache
    tensors: dict[str, Tensor] = {"ids": torch.tensor(session._ids, dtype=torch.int64)}
    if session._last_logits is not None:
        tensors["last_logits"] = session._last_logits
    for number, table in enumerate(cache.tables):
        tensors[f"table.{number}"] = table.index[:, : table.width].contiguous()
    for layer, pool in enumerate(cache.pools):
        width = cache.table_of(layer).width
        tensors[f"pool.{layer}"] = pool.kv[:, :, :, :width].contiguous()
    for row, ledger in enumerate(cache.ledgers):
        for name in ledger.columns:
            tensors[f"ledger.{row}.{name}"] = ledger[name].clone()
        tensors[f"ledger.{row}.queries"] = ledger.queries[: ledger.length].clone()
    state = {
        "format": FORMAT,
        "memdecay": __version__,
        "model": fingerprint(session.model),
        "policy": policy_config(cache.policy),
        "profile": cache.profile.to_dict(),
        "settings": {name: getattr(cache, name) for name in _SETTINGS},
        "prefill_chunk": session.prefill_chunk,
        "counters": {name: getattr(cache, name) for name in _COUNTERS},
        "last_count": cache._last_count,
        "lengths": [table.lengths for table in cache.tables],
        "ledgers": [{name: getattr(ledger, name) for name in _LEDGER} for ledger in cache.ledgers],
        "conversation": session.conversation.state_dict(),
        "empty_conversation": session._empty,
        "seen_by_region": session._seen_by_region,
        "next_span": session._next_span,
        "spans_of": {str(message): spans for message, spans in session._spans_of.items()},
        "pinned_regions": sorted(session._pinned_regions),
        "peak_bytes": session._peak_bytes,
    }
    return state, {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _restored(
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Session:
    from memdecay.engine.session import Session

    settings = dict(state["settings"])
    default_region = settings.pop("default_region")
    session = Session(
        model,
        tokenizer,
        policy=from_config(state["policy"]),
        profile=Profile.from_dict(state["profile"]),
        prefill_chunk=state["prefill_chunk"],
        **settings,
    )
    session.cache.default_region = default_region
    _restore_cache(session.cache, state, tensors)
    session._empty = state["empty_conversation"]
    session.conversation = session._conversation(state["conversation"])
    session._ids = tensors["ids"].tolist()
    session._last_logits = tensors.get("last_logits")
    session._seen_by_region = dict(state["seen_by_region"])
    session._next_span = state["next_span"]
    session._spans_of = {int(message): spans for message, spans in state["spans_of"].items()}
    session._pinned_regions = set(state["pinned_regions"])
    session._peak_bytes = state["peak_bytes"]
    return session


def _restore_cache(
    cache: MemDecayCache, state: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    rows = state["counters"]["rows"]
    if not rows:
        return
    cache._make_tables(rows)
    for name in _COUNTERS:
        setattr(cache, name, state["counters"][name])
    cache._last_count = state["last_count"]
    for number, table in enumerate(cache.tables):
        _fill_table(table, tensors[f"table.{number}"], state["lengths"][number])
    cache.pools = []
    for layer in range(len(cache.layout.windows)):
        saved = tensors[f"pool.{layer}"]
        _, pool_rows, heads, width, head_dim = saved.shape
        capacity = cache.table_of(layer).capacity
        pool = KVPool(pool_rows, heads, capacity, head_dim, saved.dtype, saved.device)
        pool.kv[:, :, :, :width] = saved
        cache.pools.append(pool)
    for row, ledger in enumerate(cache.ledgers):
        for name, value in state["ledgers"][row].items():
            setattr(ledger, name, value)
        ledger.grow(cache.main.capacity)
        for name, column in ledger.columns.items():
            column[: ledger.length] = tensors[f"ledger.{row}.{name}"]
        ledger.queries[: ledger.length] = tensors[f"ledger.{row}.queries"]


def _fill_table(table: SlotTable, index: Tensor, lengths: list[int]) -> None:
    width = index.shape[1]
    if max(lengths) != width:
        raise SessionError("The saved session is damaged: its slot table has another length.")
    table.grow(width)
    table.index[:, :width] = index
    table.lengths = list(lengths)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
