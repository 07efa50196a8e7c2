"""How token sequences are cut into KV-cache blocks and hashed: replicas and routers mean the same by a block."""

from __future__ import annotations

from hashlib import blake2b

from broker.messages import Ids

BLOCK = 16
"""Tokens in a block, as in vLLM's default."""

DIGEST = 8


def chain(adapter: str | None, tokens: Ids, *, salt: str = "") -> list[bytes]:
    """Hashes of the full blocks of `tokens` (int32 [n]), each covering everything before it too.

    The chain starts with the adapter's name, so that one version's blocks never equal another's.
    """
    parent = blake2b(f"{adapter or ''}\0{salt}".encode(), digest_size=DIGEST).digest()
    data = tokens.tobytes()
    step = BLOCK * 4
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        parent = blake2b(data[start : start + step], digest_size=DIGEST, key=parent).digest()
        hashes.append(parent)
    return hashes
