"""Which pages outside a cache new queries would look at; one function an equation.

Nothing here mutates its arguments.
"""

from __future__ import annotations

from torch import Tensor

_LEAST = 1e-3
"""Deviation below which all pages are alike to a query."""


def strength(products: Tensor) -> Tensor:
    """Return how strongly a head looks at each page: a_p = z_p(max_i s_ip).

    Args:
        products: s_ip = max over the tokens t of page p of q_i · k_t, (..., n, num_pages) float32
            for the n queries i of a head.

    Returns:
        (..., num_pages) float32, standardised over the pages, so that the factor of a head's
        logits does not matter.
    """
    return among_pages(products.amax(-2))


def contrast(products: Tensor) -> Tensor:
    """Return how much more one query looks at a page than others do: c_p = z_p(max_i (z - z̄)_ip).

    z_ip = z_p(s_ip) and z̄_p its mean over the queries i. Some keys attract every query; what is
    asked for attracts the query that asks.

    Args:
        products: as for `strength`.

    Returns:
        (..., num_pages) float32; zeros for a single query, which nothing is compared with.
    """
    each = among_pages(products)
    return among_pages((each - each.mean(-2, keepdim=True)).amax(-2))


def claim(products: Tensor) -> Tensor:
    """Return what heads say together: r_p = mean over the heads h of a_hp + c_hp.

    Args:
        products: of each head as for `strength`, (num_heads, n, num_pages) float32.

    Returns:
        (num_pages,) float32, higher for what to bring back.
    """
    return (strength(products) + contrast(products)).mean(0)


def among_pages(value: Tensor) -> Tensor:
    """Return z_p(v) = (v - mean) / std over the pages; zeros where all are alike.

    Args:
        value: v, (..., num_pages) float32.
    """
    distance = value - value.mean(-1, keepdim=True)
    deviation = distance.square().mean(-1, keepdim=True).sqrt_()
    return distance.div_(deviation.clamp_(min=_LEAST))
