"""Keys and values of token sequences computed before, found again by longest common prefix.

One radix tree per adapter: a node holds a run of tokens and their cache, its children continue it. Sequences that
begin alike share the nodes of what they share (a group its prompt, a later turn its conversation), so each token is
held once. Bounded by tokens: what was not used for longest goes first, leaves before what they continue.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

Tokens = npt.NDArray[np.int32]

SLACK = 16
"""An eviction frees a 16th of the capacity beyond what is needed, so that the tree is not searched at each insert."""


@dataclass(eq=False, slots=True)
class _Node:
    tokens: Tokens
    cache: Tensor | None
    """[2, layers, len(tokens), kv_heads, head_dim]; None for a root."""
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0


class PrefixStore:
    """Caches of token prefixes, at most `capacity` tokens of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        """Tokens held now."""
        self._roots: dict[str | None, _Node] = {}
        self._clock = 0

    def match(self, adapter: str | None, tokens: Tokens) -> list[Tensor]:
        """The longest stored prefix of `tokens` under `adapter`, as caches whose token dimension (2) follows on."""
        node, at, pieces = self._roots.get(adapter), 0, list[Tensor]()
        self._clock += 1
        while node is not None and at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None or child.cache is None:
                break
            common = common_prefix(child.tokens, tokens[at:])
            child.used = self._clock
            pieces.append(child.cache[:, :, :common])
            at += common
            node = child if common == len(child.tokens) else None
        return pieces

    def insert(self, adapter: str | None, tokens: Tokens, cache: Tensor) -> None:
        """Keep a copy of `cache` [2, layers, len(tokens), ...] of whatever part of `tokens` is not held already."""
        node = self._roots.setdefault(adapter, _Node(tokens[:0], None, None))
        at = 0
        self._clock += 1
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                leaf = _Node(tokens[at:].copy(), cache[:, :, at:].clone(), node, used=self._clock)
                node.children[int(tokens[at])] = leaf
                self.size += len(leaf.tokens)
                break
            common = common_prefix(child.tokens, tokens[at:])
            if common < len(child.tokens):
                child = self._split(child, common)
            child.used = self._clock
            at += common
            node = child
        if self.size > self.capacity:
            self._evict()

    def drop(self, adapter: str | None) -> None:
        """Forget everything computed under `adapter`."""
        pending = [root] if (root := self._roots.pop(adapter, None)) else []
        while pending:
            node = pending.pop()
            self.size -= len(node.tokens)
            pending.extend(node.children.values())

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut `node` in two after `at` tokens; returns the first part. Copies, so that either can be freed alone."""
        assert node.cache is not None and node.parent is not None
        head = _Node(node.tokens[:at].copy(), node.cache[:, :, :at].clone(), node.parent, used=node.used)
        node.parent.children[int(head.tokens[0])] = head
        node.tokens, node.cache, node.parent = node.tokens[at:].copy(), node.cache[:, :, at:].clone(), head
        head.children[int(node.tokens[0])] = node
        return head

    def _evict(self) -> None:
        goal = self.capacity - self.capacity // SLACK
        leaves: list[tuple[int, int, _Node]] = []
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if not node.children and node.parent is not None:
                leaves.append((node.used, id(node), node))
        heapq.heapify(leaves)
        while leaves and self.size > goal:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.tokens[0])]
            self.size -= len(node.tokens)
            if not parent.children and parent.parent is not None:
                heapq.heappush(leaves, (parent.used, id(parent), parent))


def common_prefix(first: Tokens, second: Tokens) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length
