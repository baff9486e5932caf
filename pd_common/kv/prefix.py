"""Pages of computed prompts, kept for prompts that begin in the same way: a radix tree with one node a page.

Knows tokens and page ids, neither tensors nor requests. Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pages.num_pages

    @property
    def num_idle(self) -> int:
        """Pages in the tree that nobody uses."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `alloc` could take."""
        return self._pages.num_free + len(self._idle)

    def match(self, tokens: Sequence[int], salt: bytes) -> tuple[int, int]:
        """Pages that `lock` would give, and how many of them are idle; changes nothing."""
        found = [node.users for node in self._found(tokens, salt)]
        return len(found), found.count(0)

    def lock(self, tokens: Sequence[int], salt: bytes) -> Prefix:
        """The longest prefix of `tokens` that is cached under this salt, in whole pages; often of no page at all."""
        found = list(self._found(tokens, salt))
        for node in found:
            self._use(node)
        return Prefix(tuple(node.page for node in found), found[-1] if found else self._root, salt)

    def alloc(self, count: int) -> PageIndices | None:
        """Takes `count` pages, and gives up idle ones when too few are free.

        Returns None, and takes and gives up nothing, when that is not enough.
        """
        short = max(count - self._pages.num_free, 0)
        if short > len(self._idle):
            return None
        self._pages.free([self._give_up() for _ in range(short)])
        return self._pages.alloc(count)

    def share(self, prefix: Prefix, tokens: Sequence[int], pages: Sequence[int]) -> Prefix:
        """Lets others find what `pages`, which follow the prefix, hold of `tokens` by now; gives the prefix with them.

        `tokens` begin with those of the prefix, whose place the new one takes. A page stays its owner's alone if the
        tree has another one for the same tokens, and so do those after it.
        """
        node, shared = prefix.last, list(prefix.pages)
        for key, page in zip(self._kept_keys(prefix, tokens), pages, strict=False):
            if key in node.children:
                break
            child = node.children[key] = _Node(key, page, node, users=1)
            shared.append(page)
            node = child
        return Prefix(tuple(shared), node, prefix.salt)

    def release(self, prefix: Prefix, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Takes back a prefix and the `pages` that followed it, which held `tokens` as far as these go.

        `tokens` begin with those of the prefix. Pages that they fill are kept, unless the tree has them by now; all
        other pages are freed.
        """
        node, own, surplus = prefix.last, iter(pages), []
        for key, page in zip(self._kept_keys(prefix, tokens), own, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, page, node)
            else:
                surplus.append(page)
            self._use(child)
            node = child
        self._pages.free([*surplus, *own])
        self._unuse(node)

    def free(self, pages: Sequence[int]) -> None:
        """Takes back pages that hold nothing of use."""
        self._pages.free(pages)

    def check_integrity(self, owned: Iterable[int] | None = None, held: Iterable[Prefix] | None = None) -> None:
        """Raises InternalError when a page is in the tree and free, in it twice, or wrongly locked or idle.

        With `owned`, the pages that are someone's own, also when there is a page that nobody has, or two have; with
        `held`, all prefixes that were not released, also when a page is locked by nobody, or used without a lock.
        """
        self._pages.check_integrity()
        nodes = [node for node in self._nodes() if node is not self._root]
        if owned is not None:
            self._check_owners([*owned, *(node.page for node in nodes)])
        if held is not None:
            _check_locks(nodes, held)
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

    def _check_owners(self, had: list[int]) -> None:
        used = self._pages.num_pages - self._pages.num_free
        if len(set(had)) != len(had) or len(had) != used or not self._pages.are_used(had):
            raise InternalError(f"{used} pages are used, {len(had)} have an owner", used=used, owned=len(had))

    def _found(self, tokens: Sequence[int], salt: bytes) -> Iterator[_Node]:
        """The nodes of the longest cached prefix, from the first page on."""
        node = self._root
        for key in self._keys(tokens, salt):
            child = node.children.get(key)
            if child is None:
                return
            node = child
            yield node

    def _kept_keys(self, prefix: Prefix, tokens: Sequence[int]) -> Iterator[_Key]:
        """Of the pages after the prefix those that may come into the tree."""
        return self._keys(tokens, prefix.salt, len(prefix.pages)) if self._keeps else iter(())

    def _keys(self, tokens: Sequence[int], salt: bytes, first_page: int = 0) -> Iterator[_Key]:
        """One for each page that the tokens fill."""
        size = self._page_size
        for start in range(first_page * size, len(tokens) - size + 1, size):
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


def _check_locks(nodes: Iterable[_Node], held: Iterable[Prefix]) -> None:
    """Every lock holds its own last page and all before it."""
    users = Counter[_Node]()
    for prefix in held:
        node = prefix.last
        while node.parent is not None:
            users[node] += 1
            node = node.parent
    for node in nodes:
        if node.users != users[node]:
            message = f"page {node.page} counts {node.users} users and has {users[node]}"
            raise InternalError(message, page=node.page, counted=node.users, users=users[node])
