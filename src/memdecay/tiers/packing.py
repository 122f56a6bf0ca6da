"""A page as one run of bytes, so that a store holds exactly what it says and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import TypeAlias

    from memdecay.engine.moving import Moved
    from memdecay.tiers.quantized import Quantized

    Page: TypeAlias = Moved | Quantized


@dataclass(frozen=True)
class Layout:
    """How to read a packed page.

    Args:
        kind: the page's class.
        tensors: of each tensor the field, its key if the field is a mapping, its type and shape,
            in the order of their bytes.
        mappings: the fields that are mappings of tensors.
        plain: the other fields, as they are.
        tokens: of the page.
        nbytes: of its tensors.
    """

    kind: type[Any]
    tensors: tuple[tuple[str, str | None, torch.dtype, torch.Size], ...]
    mappings: tuple[str, ...]
    plain: Mapping[str, Any]
    tokens: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, for `from_dict`."""
        plain = {name: _told(value) for name, value in self.plain.items()}
        tensors = [[name, key, _told(dtype), [*shape]] for name, key, dtype, shape in self.tensors]
        return {
            "kind": self.kind.__name__,
            "tensors": tensors,
            "mappings": [*self.mappings],
            "plain": plain,
            "tokens": self.tokens,
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """Return what `to_dict` told."""
        from memdecay.engine.moving import Moved
        from memdecay.tiers.quantized import Quantized

        kinds = {kind.__name__: kind for kind in (Moved, Quantized)}
        return cls(
            kind=kinds[data["kind"]],
            tensors=tuple(
                (name, key, getattr(torch, dtype), torch.Size(shape))
                for name, key, dtype, shape in data["tensors"]
            ),
            mappings=tuple(data["mappings"]),
            plain={
                name: getattr(torch, value)
                if isinstance(value, str)
                else tuple(value)
                if isinstance(value, list)
                else value
                for name, value in data["plain"].items()
            },
            tokens=data["tokens"],
            nbytes=data["nbytes"],
        )


def nbytes(page: Page) -> int:
    """Return the bytes of a page's tensors, packed or not."""
    return sum(tensor.nbytes for _, _, tensor in _tensors(page))


def pack(page: Page, *, pinned: bool = False) -> tuple[Tensor, Layout]:
    """Copy a page into one buffer, bit for bit.

    Args:
        page: on any device; it is not changed, and nothing of it is kept alive.
        pinned: True to let a GPU read the buffer without another copy.

    Returns:
        (nbytes,) uint8 on the CPU, and how to read it.
    """
    # The widest types first, so that each tensor begins at a multiple of its own width.
    tensors = sorted(_tensors(page), key=lambda one: -one[2].itemsize)
    sizes = [tensor.nbytes for _, _, tensor in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    for part, (_, _, tensor) in zip(buffer.split(sizes), tensors, strict=True):
        part.copy_(tensor.contiguous().flatten().view(torch.uint8))
    fields = {field.name: getattr(page, field.name) for field in dataclasses.fields(page)}
    layout = Layout(
        kind=type(page),
        tensors=tuple((name, key, one.dtype, one.shape) for name, key, one in tensors),
        mappings=tuple(name for name, value in fields.items() if isinstance(value, Mapping)),
        plain={
            name: value for name, value in fields.items() if not isinstance(value, Tensor | Mapping)
        },
        tokens=len(page.positions),
        nbytes=buffer.nbytes,
    )
    return buffer, layout


def unpack(buffer: Tensor, layout: Layout) -> Any:
    """Return the page that was packed; its tensors are views of the buffer.

    Args:
        buffer: (nbytes,) uint8, as `pack` returned it.
        layout: likewise.
    """
    fields: dict[str, Any] = {**layout.plain, **{name: {} for name in layout.mappings}}
    sizes = [shape.numel() * dtype.itemsize for _, _, dtype, shape in layout.tensors]
    for part, (name, key, dtype, shape) in zip(buffer.split(sizes), layout.tensors, strict=True):
        tensor = part.view(dtype).view(shape)
        if key is None:
            fields[name] = tensor
        else:
            fields[name][key] = tensor
    return layout.kind(**fields)


def _told(value: Any) -> Any:
    """Return a value as JSON has it: a type by its name, a shape as a list."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [*value] if isinstance(value, tuple) else value


def _tensors(page: Page) -> list[tuple[str, str | None, Tensor]]:
    """Return field, key and tensor of all that a page is made of."""
    found: list[tuple[str, str | None, Tensor]] = []
    for field in dataclasses.fields(page):
        value = getattr(page, field.name)
        if isinstance(value, Tensor):
            found.append((field.name, None, value))
        elif isinstance(value, Mapping):
            found += [(field.name, key, tensor) for key, tensor in value.items()]
    return found
