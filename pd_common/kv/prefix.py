"""Pages of computed prompts, kept for prompts that begin in the same way: a radix tree with one node a page.

Knows tokens and page ids, neither tensors nor requests. Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pd_common.errors import InternalError
from pd_common.kv.pages import PageAllocator
from pd_common.types import PageIndices

_Key = tuple[bytes, tuple[int, ...]]
"""A salt and the tokens of one page."""


@dataclass(slots=True, eq=False)
class _Node:
    """One page: it holds the KV of these tokens after all those on the way from the root."""

    key: _Key
    page: int
    parent: _Node | None
    users: int = 0
    """Locks that hold it: each of them holds all nodes above it too."""
    children: dict[_Key, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The pages of a prompt's first tokens. They stay as they are until `PrefixCache.release`, which comes once."""

    pages: PageIndices
    last: _Node
    salt: bytes


class PrefixCache:
    """A page of `pages` is free, someone's own, or in the tree, where it is locked by whoever uses it, or idle.

    Only idle pages are given up. They stand in the order in which they fell idle, a page always after those that
    continue it: so the one that has been unused for longest comes first, and nothing in the tree hangs from it.
    """

    def __init__(self, pages: PageAllocator, page_size: int, *, keeps: bool = True) -> None:
        """Without `keeps` nothing comes into the tree, so nothing is ever found in it."""
        self._pages = pages
        self._page_size = page_size
        self._keeps = keeps
        self._root = _Node((b"", ()), -1, None)
        self._idle: OrderedDict[_Node, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Pages in the tree that nobody uses."""
        return len(self._idle)

    def lock(self, tokens: Sequence[int], salt: bytes) -> Prefix:
        """The longest prefix of `tokens` that is cached under this salt, in whole pages; often of no page at all."""
        node, pages = self._root, []
        for key in self._keys(tokens, salt):
            child = node.children.get(key)
            if child is None:
                break
            self._use(child)
            pages.append(child.page)
            node = child
        return Prefix(tuple(pages), node, salt)

    def alloc(self, count: int) -> PageIndices | None:
        """Takes `count` pages, and gives up idle ones when too few are free.

        Returns None, and takes and gives up nothing, when that is not enough.
        """
        short = max(count - self._pages.num_free, 0)
        if short > len(self._idle):
            return None
        self._pages.free([self._give_up() for _ in range(short)])
        return self._pages.alloc(count)

    def release(self, prefix: Prefix, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Takes back a prefix and the `pages` that followed it, which held `tokens` as far as these go.

        `tokens` begin with those of the prefix. Pages that they fill are kept, unless the tree has them by now; all
        other pages are freed.
        """
        node, own, surplus = prefix.last, iter(pages), []
        keys = self._keys(tokens, prefix.salt) if self._keeps else iter(())
        for key, page in zip(islice(keys, len(prefix.pages), None), own, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, page, node)
            else:
                surplus.append(page)
            self._use(child)
            node = child
        self._pages.free([*surplus, *own])
        self._unuse(node)

    def check_integrity(self) -> None:
        """Raises InternalError when a page is in the tree and free, in it twice, or wrongly locked or idle."""
        self._pages.check_integrity()
        nodes = [node for node in self._nodes() if node is not self._root]
        in_tree = [node.page for node in nodes]
        place = {node: number for number, node in enumerate(self._idle)}
        if len(set(in_tree)) != len(in_tree) or not self._pages.are_used(in_tree):
            raise InternalError("a page is in the prefix cache twice, or free as well", pages=len(in_tree))
        if {node for node in nodes if not node.users} != set(place):
            raise InternalError("the prefix cache lost count of its idle pages", idle=len(place))
        for node in nodes:
            below = sum(child.users for child in node.children.values())
            late = [child for child in node.children.values() if not node.users and place[child] > place[node]]
            if node.users < below or late:
                raise InternalError(f"page {node.page} could be given up before its continuation", page=node.page)

    def _keys(self, tokens: Sequence[int], salt: bytes) -> Iterator[_Key]:
        """One for each page that the tokens fill."""
        size = self._page_size
        for start in range(0, len(tokens) - size + 1, size):
            yield salt, tuple(tokens[start : start + size])

    def _use(self, node: _Node) -> None:
        node.users += 1
        self._idle.pop(node, None)

    def _unuse(self, last: _Node) -> None:
        """From the last page to the first: that is the order in which they may be given up."""
        node = last
        while node.parent is not None:
            node.users -= 1
            if not node.users:
                self._idle[node] = None
            node = node.parent

    def _give_up(self) -> int:
        node, _ = self._idle.popitem(last=False)
        if node.parent is None or node.children:
            raise InternalError(f"page {node.page} was to be given up before its continuation", page=node.page)
        del node.parent.children[node.key]
        return node.page

    def _nodes(self) -> Iterator[_Node]:
        found = [self._root]
        while found:
            node = found.pop()
            yield node
            found.extend(node.children.values())
