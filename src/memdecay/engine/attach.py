"""How a model comes to use a memdecay cache, and how it goes back: everything that is switched.

A guard stands in for the decoder's `forward` while a cache for it is alive. It acts only in a
forward that is given such a cache: it makes room, switches the attention implementation, and
switches it back whatever happens. (Module hooks would not do: torch runs them after an
`Exception`, but not after a KeyboardInterrupt.) Between forwards the model is as it was; other
caches and other threads on the same model meanwhile get the model's own attention.
"""

from __future__ import annotations

import abc
import sys
import threading
import types
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memdecay.engine.interrupts import HeldInterrupts
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
    def only_new(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a forward without the tokens that were seen."""

    @abc.abstractmethod
    def begin(
        self,
        rows: int,
        count: int,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> AttachedForward:
        """Prepare a forward; if this raises, the forward does not run."""

    @abc.abstractmethod
    def end(self, forward: Any, output: Any = None, ids: Tensor | None = None) -> None:
        """Take in what a finished forward collected, gave out, and the ids it was given."""

    @abc.abstractmethod
    def abort(self, forward: Any) -> None:
        """Take back a forward that raised."""


class Switch:
    """The attention implementation in one config: whose turn it is, and whose it was."""

    def __init__(self, config: Any) -> None:
        self.config = config
        own = config._attn_implementation
        # A model that was copied in the middle of a forward may still have ours.
        self.original: str = "sdpa" if own == IMPLEMENTATION else own
        self._users = 0

    def turn(self) -> None:
        """Use memdecay's attention until `back`, which must be called as often."""
        with _lock:
            if self._users == 0:
                if self.config._attn_implementation != IMPLEMENTATION:
                    self.original = self.config._attn_implementation
                self.config._attn_implementation_internal = IMPLEMENTATION
            self._users += 1

    def back(self) -> None:
        """Undo one `turn`."""
        with _lock:
            self._users -= 1
            if self._users == 0:
                self.config._attn_implementation_internal = self.original


class Guard:
    """Stands in for the `forward` of a decoder, and serves those forwards that have our cache."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        self._decoder = weakref.ref(decoder)
        self._replaced = decoder.__dict__.get("forward")  # of another library, such as accelerate
        decoder.forward = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the guard out of a copied or pickled model."""
        return _own_forward, (self._decoder(), self._replaced)

    def remove(self) -> None:
        """Give the decoder its own `forward` back."""
        decoder = self._decoder()
        if decoder is not None and decoder.__dict__.get("forward") is self:
            del decoder.forward
            if self._replaced is not None:
                decoder.forward = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder's own forward; with our cache, inside `begin` and `end`."""
        decoder = self._decoder()
        own = _own_forward(decoder, self._replaced)
        cache = _cache_in(kwargs)
        if cache is None:
            return own(*args, **kwargs)
        if not cache.attachment.belongs_to(decoder):
            raise ModelError(
                f"The cache was made for another model than this {type(decoder).__name__}; make a "
                f"MemDecayCache for the model that runs."
            )
        switch, before = cache.attachment.switch, _running_forward()
        if len(args) == 1:  # GPT-2 and GPT-NeoX give the ids without their name
            kwargs = {**kwargs, "input_ids": args[0]}
        rest = args if len(args) > 1 else ()
        kwargs = cache.only_new(kwargs)
        ids = rest[0] if rest else kwargs.get("input_ids")
        inputs = kwargs["inputs_embeds"] if ids is None else ids
        # A Ctrl-C is let through only while the model runs: what is around it is done in whole.
        with HeldInterrupts() as held:
            forward = cache.begin(
                inputs.shape[0],
                inputs.shape[1],
                kwargs.get("attention_mask"),
                kwargs.get("position_ids"),
            )
            try:
                switch.turn()
                try:
                    _running.forward = forward
                    with held.delivered():
                        output = own(*rest, **kwargs)
                finally:
                    _running.forward = before
                    switch.back()
                cache.end(forward, output, ids)
            except BaseException:
                cache.abort(forward)
                raise
        return output


def _own_forward(decoder: Any, replaced: Any) -> Any:
    return types.MethodType(type(decoder).forward, decoder) if replaced is None else replaced


class Attachment:
    """The guard of one model, shared by its caches; it goes when the last cache goes."""

    def __init__(self, decoder: torch.nn.Module, switch: Switch) -> None:
        self.switch = switch
        self._decoder = weakref.ref(decoder)
        weakref.finalize(self, Guard(decoder).remove)

    @property
    def decoder(self) -> torch.nn.Module:
        """The model without its head.

        Raises:
            ModelError: it is gone.
        """
        decoder = self._decoder()
        if decoder is None:
            raise ModelError("The model of this cache is gone; keep it alive.")
        return decoder

    def belongs_to(self, decoder: torch.nn.Module | None) -> bool:
        """Whether this is the model that the cache was made for."""
        return self._decoder() is decoder


_switches: weakref.WeakValueDictionary[int, Switch] = weakref.WeakValueDictionary()
_attachments: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()


def attach(model: PreTrainedModel) -> Attachment:
    """Return the attachment of a model, made if it has none yet."""
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


def _cache_in(kwargs: dict[str, Any]) -> AttachedCache | None:
    for name in ("cache", "past_key_values"):
        cache = kwargs.get(name)
        if isinstance(cache, AttachedCache):
            return cache
    return None


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
