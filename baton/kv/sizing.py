"""How many bytes and pages a number of tokens needs.

Owns the KV size formula. Never decides how many workers a load needs (that is routing).
"""

from __future__ import annotations

from baton.kv.layout import KvGeometry


def kv_bytes(*, layers: int, kv_heads: int, head_dim: int, tokens: int, element_bytes: int) -> int:
    """Return the KV bytes of `tokens` tokens: 2 x layers x kv_heads x head_dim x tokens x element.

    The formula of models whose K and V have the same head_dim; scales and padding are not counted.
    """
    assert min(layers, kv_heads, head_dim, element_bytes) > 0
    assert tokens >= 0
    return 2 * layers * kv_heads * head_dim * tokens * element_bytes


def content_bytes(geometry: KvGeometry, tokens: int) -> int:
    """Return the bytes of `tokens` packed tokens, int8 scales included."""
    assert tokens >= 0
    return tokens * geometry.token_bytes


def pages_for(tokens: int, block_tokens: int) -> int:
    """Return the pages that positions 0 to tokens - 1 need."""
    assert tokens >= 0
    assert block_tokens > 0
    return -(-tokens // block_tokens)


def pages_touched(first_position: int, end_position: int, block_tokens: int) -> int:
    """Return the pages that positions [first_position, end_position) touch."""
    assert 0 <= first_position <= end_position
    if first_position == end_position:
        return 0
    return pages_for(end_position, block_tokens) - first_position // block_tokens


def arena_bytes(geometry: KvGeometry, tokens: int) -> int:
    """Return the arena bytes (whole slots of 4 KiB multiples) that `tokens` tokens occupy."""
    return pages_for(tokens, geometry.block_tokens) * geometry.slot_bytes


def tokens_in(geometry: KvGeometry, arena_size_bytes: int) -> int:
    """Return how many tokens fit into an arena of `arena_size_bytes` (whole pages only)."""
    assert arena_size_bytes >= 0
    return arena_size_bytes // geometry.slot_bytes * geometry.block_tokens
