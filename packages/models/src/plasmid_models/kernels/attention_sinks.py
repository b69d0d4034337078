"""Attention with sinks: one learned logit per head in the denominator of the softmax, as gpt-oss has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Compute attention [B, h, n, e] of query [B, h, n, d], key [B, g, L, d] and value [B, g, L, e].

    ``mask`` [..., n, L] is True or 0 where a query attends to a key, and False or minus infinity elsewhere. ``sinks``
    [h] are the logits of one more key per head, whose value is 0.
    """
    import torch
    from torch.nn.functional import pad, scaled_dot_product_attention

    batch, heads, rows, columns = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    bias = torch.cat(
        (
            mask.expand(batch, heads, rows, columns),
            sinks.to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, rows, 1),
        ),
        dim=-1,
    )
    options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
    result: Tensor = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, **options)
    return result
