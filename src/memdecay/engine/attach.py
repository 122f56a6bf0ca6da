"""How a model comes to use a memdecay cache, and how it goes back: everything that is switched.

Two hooks sit on the model while a cache for it is alive. They act only in a forward that is given
such a cache: the first makes room and switches the attention implementation, the second, which
runs after an exception too, switches it back. Between forwards the model is as it was; other
caches and other threads on the same model meanwhile get the model's own attention.
"""

from __future__ import annotations

import abc
import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memdecay.errors import ModelError

IMPLEMENTATION = "memdecay"

_running = threading.local()
_lock = threading.RLock()


class AttachedForward(abc.ABC):
    """One forward served by an attached cache."""

    cache: AttachedCache

    @abc.abstractmethod
    def attention(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Attend in one layer; the signature of transformers' attention functions."""

    @abc.abstractmethod
    def mask(self, *args: Any, **kwargs: Any) -> Any:
        """Make the mask of one kind of layer; the signature of transformers' mask functions."""


class AttachedCache(Cache):
    """A cache whose model calls it around every forward."""

    attachment: Attachment

    @abc.abstractmethod
    def begin(self, rows: int, count: int, attention_mask: Tensor | None) -> AttachedForward:
        """Prepare a forward; if this raises, the forward does not run."""

    @abc.abstractmethod
    def end(self, forward: Any) -> None:
        """Take in what a finished forward collected."""

    @abc.abstractmethod
    def abort(self, forward: Any) -> None:
        """Take back a forward that raised."""


class Switch:
    """The attention implementation in one config: whose turn it is, and whose it was."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.original: str = config._attn_implementation
        self._users = 0

    def turn(self) -> None:
        """Use memdecay's attention until `back`, which must be called as often."""
        with _lock:
            if self._users == 0:
                self.original = self.config._attn_implementation
                self.config._attn_implementation_internal = IMPLEMENTATION
            self._users += 1

    def back(self) -> None:
        """Undo one `turn`."""
        with _lock:
            self._users -= 1
            if self._users == 0:
                self.config._attn_implementation_internal = self.original


class Attachment:
    """The hooks on one model, shared by its caches; they go when the last cache goes."""

    def __init__(self, decoder: torch.nn.Module, switch: Switch) -> None:
        self.switch = switch
        self._decoder = weakref.ref(decoder)
        handles = [
            decoder.register_forward_pre_hook(_before, with_kwargs=True),
            decoder.register_forward_hook(_after, with_kwargs=True, always_call=True),
        ]
        weakref.finalize(self, _remove, handles)

    def belongs_to(self, decoder: torch.nn.Module) -> bool:
        """Whether this is the model that the cache was made for."""
        return self._decoder() is decoder


_switches: weakref.WeakValueDictionary[int, Switch] = weakref.WeakValueDictionary()
_attachments: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()


def attach(model: PreTrainedModel) -> Attachment:
    """Return the hooks of a model, made if it has none yet."""
    decoder, config = model.get_decoder(), model.config
    with _lock:
        attachment = _attachments.get(id(decoder))
        if attachment is None or not attachment.belongs_to(decoder):
            switch = _switches.get(id(config)) or Switch(config)
            _switches[id(config)] = switch
            attachment = _attachments[id(decoder)] = Attachment(decoder, switch)
        return attachment


def _running_forward() -> AttachedForward | None:
    return getattr(_running, "forward", None)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _cache_in(kwargs: dict[str, Any]) -> AttachedCache | None:
    for name in ("cache", "past_key_values"):
        cache = kwargs.get(name)
        if isinstance(cache, AttachedCache):
            return cache
    return None


def _before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _cache_in(kwargs)
    inputs = args[0] if args else kwargs.get("input_ids")
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    if cache is None or inputs is None:
        return
    if not cache.attachment.belongs_to(module):
        raise ModelError(
            f"past_key_values was made for another model than this {type(module).__name__}; make "
            f"a MemDecayCache for the model that runs."
        )
    forward = cache.begin(inputs.shape[0], inputs.shape[1], kwargs.get("attention_mask"))
    cache.attachment.switch.turn()
    _running.forward = forward


def _after(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    cache, forward = _cache_in(kwargs), _running_forward()
    if cache is None or forward is None or forward.cache is not cache:
        return
    _running.forward = None
    cache.attachment.switch.back()
    if output is None:
        cache.abort(forward)
    else:
        cache.end(forward)


def _original(config: Any) -> str:
    switch = _switches.get(id(config))
    return switch.original if switch is not None else "sdpa"


def _attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = _running_forward()
    if forward is None or forward.cache.attachment.switch.config is not module.config:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = ALL_ATTENTION_FUNCTIONS.get_interface(_original(module.config), eager)
        return own(module, *args, **kwargs)
    return forward.attention(module, *args, **kwargs)


def _mask(*, config: Any = None, **kwargs: Any) -> Any:
    forward = _running_forward()
    if forward is None or forward.cache.attachment.switch.config is not config:
        return ALL_MASK_ATTENTION_FUNCTIONS[_original(config)](config=config, **kwargs)
    return forward.mask(**kwargs)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
