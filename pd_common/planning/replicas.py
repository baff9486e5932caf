"""One prefill and one decode as the simulation sees them: their queues, their memory and their steps.

The rules are those of the servers' schedulers, without prefix cache, priorities and limits of queues.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_common.planning.speeds import Chunk, Speeds, chunk_of

Act = Callable[[], None]


class Clock:
    """What happens when. Of two things at the same moment the one that was planned first comes first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._planned: list[tuple[float, int, Act]] = []

    def at(self, moment_s: float, act: Act) -> None:
        heapq.heappush(self._planned, (moment_s, next(self._numbers), act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now_s + seconds, act)

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._planned:
            self.now_s, _, act = heapq.heappop(self._planned)
            act()


@dataclass(slots=True, eq=False)
class Room:
    """One request on its way. `turn` is its place in every line: earlier arrivals come first."""

    turn: int
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    kv_tokens: int
    """For which decode holds pages, or shall: at first those of the prompt. While it runs, as when it joined."""
    granted_s: float = 0.0
    """When decode had pages for the prompt."""
    began_s: float = 0.0
    """When the first chunk was begun."""
    computed: int = 0
    last_chunk_tokens: int = 0
    tokens_at_s: list[float] = field(default_factory=list)
    """When each token of the answer was there."""

    @property
    def longest(self) -> int:
        """Tokens whose KV is needed in the end; that of an answer's last token is not."""
        return self.prompt_tokens + self.output_tokens - 1


def _turn(room: Room) -> int:
    return room.turn


class Prefill:
    """Computes chunks of several prompts a step, in order; a prompt keeps its place and its pages until `release`."""

    def __init__(self, clock: Clock, speeds: Speeds, done: Callable[[Room], None]) -> None:
        """`done` is called when a prompt is computed."""
        self.open_rooms = 0
        self.busy_s = 0.0
        self._clock = clock
        self._speed = speeds.prefill
        self._settings = speeds.settings
        self._done = done
        self._waiting: list[Room] = []
        self._running: list[Room] = []
        self._pages_free = speeds.settings.pages
        self._is_stepping = False

    def enqueue(self, room: Room) -> None:
        insort(self._waiting, room, key=_turn)
        self._step()

    def release(self, room: Room) -> None:
        self._running.remove(room)
        self._pages_free += self._settings.pages_of(room.prompt_tokens)
        self._step()

    def _step(self) -> None:
        if self._is_stepping:
            return
        self._admit()
        work = self._next_work()
        if not work:
            return
        took_s = self._speed.took_s([chunk for _, chunk in work])
        self.busy_s += took_s
        self._is_stepping = True
        self._clock.after(took_s, lambda: self._end(work))

    def _end(self, work: Sequence[tuple[Room, Chunk]]) -> None:
        self._is_stepping = False
        for room, chunk in work:
            room.computed += chunk.tokens
            room.last_chunk_tokens = chunk.tokens
            if room.computed == room.prompt_tokens:
                self._done(room)
        self._step()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._settings.max_running_requests:
            pages = self._settings.pages_of(self._waiting[0].prompt_tokens)
            if pages > self._pages_free:
                return
            self._pages_free -= pages
            insort(self._running, self._waiting.pop(0), key=_turn)

    def _next_work(self) -> list[tuple[Room, Chunk]]:
        budget, work = self._settings.chunked_prefill_size, []
        for room in self._running:
            if not budget:
                break
            if room.computed < room.prompt_tokens:
                chunk = chunk_of(room.computed, room.prompt_tokens, budget, self._settings.last_chunk_tokens)
                if not room.computed:
                    room.began_s = self._clock.now_s
                budget -= chunk.tokens
                work.append((room, chunk))
        return work


class Decode:
    """Every running answer gets one token a step. A step is as much work for the simulation however many run.

    That is why of an answer that runs there is only its base: by the end of step n it has the KV of base + n tokens.
    `_turning` counts answers by the steps, modulo the page size, in which they take their next page.
    """

    def __init__(
        self, clock: Clock, speeds: Speeds, granted: Callable[[Room], None], ended: Callable[[Room], None]
    ) -> None:
        """`granted` is called when a new room has pages, `ended` when its answer is whole."""
        self.open_rooms = 0
        self.busy_s = 0.0
        self.answers_s = 0.0
        """The seconds of all steps, each as often as there were answers in it."""
        self.retractions = 0
        self.pages_most = 0
        self._clock = clock
        self._speed = speeds.decode
        self._settings = speeds.settings
        self._granted = granted
        self._ended = ended
        self._waiting: list[Room] = []
        self._held: dict[Room, None] = {}
        self._pages_held = 0
        self._line: list[Room] = []
        self._base_of: dict[Room, int] = {}
        self._context_tokens = 0
        self._turning: Counter[int] = Counter()
        self._joins = itertools.count()
        self._ends: list[tuple[int, int, int, Room]] = []
        """After which step, which join, base then, and who: one that was retracted meanwhile has another base."""
        self._steps_s: list[float] = []
        """When each step ended."""
        self._is_stepping = False

    # --- memory: rule 1 of docs/scheduling.md, strictly in order ---

    def has_pages_for(self, tokens: int) -> bool:
        return self._settings.pages_of(tokens) <= self._settings.pages - self._pages_held

    def acquire(self, room: Room) -> None:
        """It waits for its pages: those of its prompt, or after a retraction all that it had."""
        insort(self._waiting, room, key=_turn)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            room = self._waiting.pop(0)
            self._held[room] = None
            self._take(self._settings.pages_of(room.kv_tokens))
            if room.tokens_at_s:
                self.start(room)
            else:
                room.granted_s = self._clock.now_s
                self._granted(room)

    def _fits(self, room: Room) -> bool:
        if not self._held:
            return True
        takes = self._settings.pages_of(room.kv_tokens)
        growth = self._growth(room) + sum(map(self._growth, self._held))
        has_place = len(self._held) < 2 * self._settings.max_running_requests
        return has_place and takes + growth <= self._settings.pages - self._pages_held

    def _growth(self, room: Room) -> int:
        tokens = self._kv_tokens(room)
        # The next token at least: who comes back without a page for it would give all up again in the same moment.
        soon = min(tokens + max(self._settings.num_reserved_decode_tokens, 1), room.longest)
        return self._settings.pages_of(soon) - self._settings.pages_of(tokens)

    def _kv_tokens(self, room: Room) -> int:
        base = self._base_of.get(room)
        return room.kv_tokens if base is None else base + len(self._steps_s)

    def _take(self, pages: int) -> None:
        self._pages_held += pages
        self.pages_most = max(self.pages_most, self._pages_held)

    def _give_back(self, room: Room) -> None:
        del self._held[room]
        self._pages_held -= self._settings.pages_of(room.kv_tokens)

    # --- answers ---

    def start(self, room: Room) -> None:
        """It has its first token, now or since before a retraction, and goes on with the next step that has a place."""
        if room.kv_tokens == room.longest:
            self._leave_for_good(room)
            return
        insort(self._line, room, key=_turn)
        self._step()

    def _join(self, room: Room) -> None:
        base = room.kv_tokens - len(self._steps_s)
        self._base_of[room] = base
        self._context_tokens += room.kv_tokens
        self._turning[-base % self._settings.page_size] += 1
        heapq.heappush(self._ends, (room.longest - base, next(self._joins), base, room))

    def _leave(self, room: Room) -> None:
        base = self._base_of.pop(room)
        room.tokens_at_s.extend(self._steps_s[room.kv_tokens - base :])
        room.kv_tokens = base + len(self._steps_s)
        self._context_tokens -= room.kv_tokens
        self._turning[-base % self._settings.page_size] -= 1

    def _leave_for_good(self, room: Room) -> None:
        self._give_back(room)
        self._ended(room)
        self._grant()

    def _retract(self) -> None:
        """The last in order gives its pages up. Host memory keeps what it had: it comes back as it was."""
        self.retractions += 1
        last = max((*self._line, *self._base_of), key=_turn)
        if last in self._base_of:
            self._leave(last)
        else:
            self._line.remove(last)
        self._give_back(last)
        insort(self._waiting, last, key=_turn)

    # --- steps ---

    def _step(self) -> None:
        if self._is_stepping:
            return
        while self._line and len(self._base_of) < self._settings.max_running_requests:
            self._join(self._line.pop(0))
        while self._pages_held + self._pages_short > self._settings.pages:
            self._retract()
        if not self._base_of:
            return
        self._take(self._pages_short)
        took_s = self._speed.took_s(len(self._base_of), self._context_tokens)
        self.busy_s += took_s
        self.answers_s += took_s * len(self._base_of)
        self._is_stepping = True
        self._clock.after(took_s, self._end_step)

    @property
    def _pages_short(self) -> int:
        """That the next step takes."""
        return self._turning[len(self._steps_s) % self._settings.page_size]

    def _end_step(self) -> None:
        self._steps_s.append(self._clock.now_s)
        self._context_tokens += len(self._base_of)
        while self._ends and self._ends[0][0] <= len(self._steps_s):
            _, _, base, room = heapq.heappop(self._ends)
            if self._base_of.get(room) == base:
                self._leave(room)
                self._leave_for_good(room)
        self._is_stepping = False  # not before: whoever comes back for an answer that has ended begins no step yet
        self._step()
