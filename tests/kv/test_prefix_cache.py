from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_common.errors import InternalError
from pd_common.kv.pages import PageAllocator
from pd_common.kv.prefix import Prefix, PrefixCache

NUM_PAGES = 12
PAGE_SIZE = 2
SALT = b""

Path = tuple[bytes, tuple[int, ...]]
"""A salt and the tokens of whole pages: what one page of the tree stands for."""


@dataclass
class Holder:
    """A prompt with its pages."""

    tokens: tuple[int, ...]
    salt: bytes
    prefix: Prefix
    own: tuple[int, ...]


def paths(tokens: tuple[int, ...], salt: bytes) -> list[Path]:
    return [(salt, tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)]


class PrefixMachine(RuleBasedStateMachine):
    """Against the plainest model there is: a dictionary from whole prefixes to pages, oldest release first."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.cache = PrefixCache(self.pages, PAGE_SIZE)
        self.cached: dict[Path, int] = {}
        self.holders: list[Holder] = []

    def locked(self) -> set[int]:
        return {page for holder in self.holders for page in holder.prefix.pages}

    def idle(self) -> list[Path]:
        """In the order in which they are to be given up."""
        locked = self.locked()
        return [path for path, page in self.cached.items() if page not in locked]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9).map(tuple), salt=st.sampled_from([b"", b"tenant"]))
    def begin(self, tokens: tuple[int, ...], salt: bytes) -> None:
        expected = []
        for path in paths(tokens, salt):
            if path not in self.cached:
                break
            expected.append(self.cached[path])
        idle = {self.cached[path] for path in self.idle()}
        assert self.cache.match(tokens, salt) == (len(expected), len(idle.intersection(expected)))
        prefix = self.cache.lock(tokens, salt)
        assert prefix.pages == tuple(expected)
        self.holders.append(Holder(tokens, salt, prefix, ()))
        self.take_the_rest(self.holders[-1])

    def take_the_rest(self, holder: Holder) -> None:
        free, idle = self.pages.num_free, self.idle()
        count = -(-len(holder.tokens) // PAGE_SIZE) - len(holder.prefix.pages)
        own = self.cache.alloc(count)
        if count > free + len(idle):
            assert own is None
            assert self.pages.num_free == free
            self.release(holder, computed=0)
            return
        assert own is not None
        for path in idle[: max(count - free, 0)]:
            del self.cached[path]
        taken = {*self.cached.values(), *(page for each in self.holders for page in each.own)}
        assert len(set(own)) == count
        assert not taken & set(own)
        holder.own = own

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        known = len(holder.prefix.pages)
        computed = data.draw(st.integers(known * PAGE_SIZE, len(holder.tokens)))
        prefix = self.cache.share(holder.prefix, holder.tokens[:computed], holder.own)
        fresh = 0
        for path, page in list(zip(paths(holder.tokens[:computed], holder.salt)[known:], holder.own, strict=False)):
            if path in self.cached:
                break
            self.cached[path] = page
            fresh += 1
        assert prefix.pages == (*holder.prefix.pages, *holder.own[:fresh])
        holder.prefix, holder.own = prefix, holder.own[fresh:]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        known = len(holder.prefix.pages) * PAGE_SIZE
        self.release(holder, data.draw(st.one_of(st.just(0), st.integers(known, len(holder.tokens)))))

    def release(self, holder: Holder, computed: int) -> None:
        self.holders.remove(holder)
        self.cache.release(holder.prefix, holder.tokens[:computed], holder.own)
        pages = (*holder.prefix.pages, *holder.own)
        used = max(computed // PAGE_SIZE, len(holder.prefix.pages))
        known = paths(holder.tokens, holder.salt)[:used]
        for path, page in reversed(list(zip(known, pages, strict=False))):
            self.cached[path] = self.cached.pop(path, page)  # a later prompt's is freed; used last, given up last

    @invariant()
    def pages_are_whole(self) -> None:
        own = [page for holder in self.holders for page in holder.own]
        self.cache.check_integrity(own, [holder.prefix for holder in self.holders])
        assert self.cache.num_idle == len(self.idle())
        assert self.cache.num_available == self.pages.num_free + len(self.idle())
        assert self.pages.num_free + len(self.cached) + len(own) == NUM_PAGES
        assert self.locked() <= set(self.cached.values())
        assert len({*self.cached.values(), *own}) == len(self.cached) + len(own)

    def teardown(self) -> None:
        for holder in tuple(self.holders):
            self.release(holder, len(holder.tokens))
        assert self.pages.num_free + self.cache.num_idle == NUM_PAGES


TestPrefixMachine = PrefixMachine.TestCase


@pytest.fixture
def pages() -> PageAllocator:
    return PageAllocator(NUM_PAGES)


@pytest.fixture
def cache(pages: PageAllocator) -> PrefixCache:
    return PrefixCache(pages, PAGE_SIZE)


def put(cache: PrefixCache, tokens: tuple[int, ...], salt: bytes = SALT) -> tuple[int, ...]:
    """As a prompt that is computed and released; gives the pages that it had."""
    prefix = cache.lock(tokens, salt)
    own = cache.alloc(-(-len(tokens) // PAGE_SIZE) - len(prefix.pages))
    assert own is not None
    cache.release(prefix, tokens, own)
    return (*prefix.pages, *own)


def cached_tokens(cache: PrefixCache, tokens: tuple[int, ...], salt: bytes = SALT) -> int:
    prefix = cache.lock(tokens, salt)
    cache.release(prefix, (), ())
    return len(prefix.pages) * PAGE_SIZE


def test_whole_pages_are_found_and_the_rest_of_the_prompt_is_not(cache: PrefixCache, pages: PageAllocator) -> None:
    put(cache, (1, 2, 3, 4, 5))
    assert (pages.num_free, cache.num_idle) == (NUM_PAGES - 2, 2)
    prompts = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4), (1, 2, 3, 9), (1, 2, 3), (1,), (2, 3, 4))
    assert [cached_tokens(cache, prompt) for prompt in prompts] == [4, 4, 2, 2, 0, 0]


def test_prompts_of_another_salt_share_nothing(cache: PrefixCache) -> None:
    put(cache, (1, 2, 3, 4), b"one")
    put(cache, (1, 2), b"two")
    assert [cached_tokens(cache, (1, 2, 3, 4), salt) for salt in (b"one", b"two", b"")] == [4, 2, 0]
    assert cache.num_idle == 3


def test_the_end_of_what_was_unused_for_longest_goes_first(cache: PrefixCache, pages: PageAllocator) -> None:
    shared, second, third = put(cache, (1, 2, 3, 4, 5, 6))
    shared_too, young = put(cache, (1, 2, 7, 8))
    assert shared == shared_too
    pages.alloc(pages.num_free)
    assert [cache.alloc(1) for _ in range(4)] == [(third,), (second,), (young,), (shared,)]
    assert cache.alloc(1) is None


def test_what_is_used_again_is_kept_longer(cache: PrefixCache) -> None:
    put(cache, (1, 2))
    put(cache, (3, 4))
    assert cached_tokens(cache, (1, 2)) == 2
    assert cache.alloc(NUM_PAGES - 1) is not None
    assert [cached_tokens(cache, tokens) for tokens in ((1, 2), (3, 4))] == [2, 0]


def test_locked_pages_are_never_given_up(cache: PrefixCache, pages: PageAllocator) -> None:
    put(cache, (1, 2, 3, 4))
    prefix = cache.lock((1, 2), SALT)
    assert cache.alloc(NUM_PAGES) is None
    assert (pages.num_free, cache.num_idle) == (NUM_PAGES - 2, 1)
    own = cache.alloc(NUM_PAGES - 1)
    assert own is not None
    assert not set(prefix.pages) & set(own)


def test_of_two_that_computed_the_same_one_copy_stays(cache: PrefixCache, pages: PageAllocator) -> None:
    tokens = (1, 2, 3, 4, 5)
    holders = [(cache.lock(tokens, SALT), cache.alloc(3)) for _ in range(2)]
    for prefix, own in holders:
        assert own is not None
        cache.release(prefix, tokens, own)
    assert (pages.num_free, cache.num_idle) == (NUM_PAGES - 2, 2)
    assert holders[0][1] is not None
    assert cache.lock(tokens, SALT).pages == holders[0][1][:2]


def test_only_what_was_computed_is_kept(cache: PrefixCache, pages: PageAllocator) -> None:
    prefix, own = cache.lock((1, 2, 3, 4), SALT), cache.alloc(3)
    assert own is not None
    cache.release(prefix, (1, 2, 3), own)
    assert (pages.num_free, cache.num_idle) == (NUM_PAGES - 1, 1)
    assert cached_tokens(cache, (1, 2, 3, 4)) == 2


def test_what_is_shared_is_found_while_its_owner_has_it(cache: PrefixCache, pages: PageAllocator) -> None:
    tokens = (1, 2, 3, 4, 5, 6, 7)
    prefix, own = cache.lock(tokens, SALT), pages.alloc(4)
    assert own is not None
    prefix = cache.share(prefix, tokens[:5], own)
    assert prefix.pages == own[:2]
    assert cache.match(tokens, SALT) == (2, 0)
    assert cache.match(tokens, b"another") == (0, 0)
    prefix = cache.share(prefix, tokens, own[2:])
    other = cache.lock(tokens, SALT)
    assert other.pages == prefix.pages == own[:3]
    cache.release(prefix, tokens, own[3:])
    assert (cache.match(tokens, SALT), pages.num_free) == ((3, 0), NUM_PAGES - 3)
    cache.release(other, (), ())
    assert cache.match(tokens, SALT) == (3, 3)
    cache.check_integrity((), ())


def test_of_two_that_share_the_same_the_second_keeps_its_own_pages(cache: PrefixCache, pages: PageAllocator) -> None:
    """It reads them, in steps that are under way too."""
    tokens = (1, 2, 3, 4, 5, 6)
    first, second = cache.lock(tokens, SALT), cache.lock(tokens, SALT)
    first_own, second_own = pages.alloc(2), pages.alloc(3)
    assert first_own is not None
    assert second_own is not None
    first = cache.share(first, tokens[:4], first_own)
    second = cache.share(second, tokens, second_own)
    assert second.pages == ()
    cache.check_integrity(second_own, [first, second])
    cache.release(second, tokens, second_own)
    assert cache.match(tokens, SALT) == (3, 1)
    assert pages.num_free == NUM_PAGES - 3
    cache.check_integrity((), [first])


def test_a_cache_that_keeps_nothing(pages: PageAllocator) -> None:
    cache = PrefixCache(pages, PAGE_SIZE, keeps=False)
    put(cache, (1, 2, 3, 4))
    assert (pages.num_free, cache.num_idle) == (NUM_PAGES, 0)
    own = pages.alloc(2)
    assert own is not None
    prefix = cache.share(cache.lock((1, 2, 3, 4), SALT), (1, 2, 3, 4), own)
    assert (prefix.pages, cache.match((1, 2, 3, 4), SALT)) == ((), (0, 0))
    cache.release(prefix, (1, 2, 3, 4), own)
    assert pages.num_free == NUM_PAGES


@pytest.mark.parametrize("damage", ["free as well", "idle and used", "used and idle", "order"])
def test_integrity_check_finds(damage: str, cache: PrefixCache, pages: PageAllocator) -> None:
    put(cache, (1, 2, 3, 4))
    last, _ = cache._idle
    if damage == "free as well":
        pages.free([last.page])
    elif damage == "idle and used":
        last.users += 1
    elif damage == "used and idle":
        del cache._idle[last]
    else:
        cache._idle.move_to_end(last)
    with pytest.raises(InternalError):
        cache.check_integrity()


def test_integrity_check_finds_a_page_that_nobody_or_two_have(cache: PrefixCache, pages: PageAllocator) -> None:
    put(cache, (1, 2))
    own = pages.alloc(2)
    assert own is not None
    cache.check_integrity(own)
    for wrong in (own[:1], (*own, own[0]), (*own, 0), ()):
        with pytest.raises(InternalError, match="have an owner"):
            cache.check_integrity(wrong)


def test_integrity_check_finds_a_lock_that_nobody_has_or_that_was_lost(cache: PrefixCache) -> None:
    put(cache, (1, 2, 3, 4))
    long, short = cache.lock((1, 2, 3, 4), SALT), cache.lock((1, 2), SALT)
    cache.check_integrity((), [short, long])
    for wrong in ([long], [short], [long, long], [long, short, short], []):
        with pytest.raises(InternalError, match="users"):
            cache.check_integrity((), wrong)
