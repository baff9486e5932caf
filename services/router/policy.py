"""Which route a request takes: through a prefill and a decode or to a decode alone, and there where least is to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pd_common.control.waiting import advice_s
from pd_common.errors import CapacityExceeded, InvalidRequest, NoWorkers
from pd_common.generation import ClientRequest
from pd_common.types import BootstrapAddress
from services.router.route import Route, usable, why_none
from services.router.worker import Worker


@dataclass(frozen=True, slots=True)
class Choice:
    """The routes that can take a request, the best first, and why they are of this kind."""

    routes: tuple[Route, ...]
    reason: str


class LeastLoaded:
    """Of the usable routes the one with least to do; those where decode has pages for the prompt come first.

    A prompt shorter than `min_prompt_tokens` goes to a decode alone, and every prompt does where none are
    `disaggregated`; but who names a prefill gets it. A worker with a full queue gets only requests that are more urgent
    than one of those that wait there: it sends that one away.
    """

    def __init__(
        self,
        prefills: Sequence[Worker] = (),
        decodes: Sequence[Worker] = (),
        min_prompt_tokens: int = 0,
        *,
        disaggregated: bool = True,
    ) -> None:
        """With `disaggregated` whoever needs a prefill waits for one, also while there happens to be none."""
        self._min_prompt_tokens = min_prompt_tokens
        self._disaggregated = disaggregated
        self._pairs: tuple[Route, ...] = ()
        self._alone: tuple[Route, ...] = ()
        self.use(prefills, decodes)

    def use(self, prefills: Sequence[Worker], decodes: Sequence[Worker], troubles: Sequence[str] = ()) -> None:
        """These are the workers from now on; what is known of routes that stay is kept.

        `troubles`: for a person, why there may be others.
        """
        self.prefills, self.decodes, self._troubles = tuple(prefills), tuple(decodes), tuple(troubles)
        known = {route.workers: route for route in self.routes}
        serves_alone = self._min_prompt_tokens > 0 or not self._disaggregated
        pairs = [Route(prefill, decode) for prefill in prefills for decode in decodes]
        alone = [Route(None, decode) for decode in decodes] if serves_alone else []
        self._pairs = tuple(known.get(route.workers, route) for route in pairs)
        self._alone = tuple(known.get(route.workers, route) for route in alone)

    @property
    def routes(self) -> tuple[Route, ...]:
        """All that a request may take."""
        return self._pairs + self._alone

    @property
    def _usual(self) -> tuple[Route, ...]:
        """Those that can take every request."""
        return self._pairs if self._disaggregated else self._alone

    @property
    def is_ready(self) -> bool:
        """Any request that came now would find a route through which a real room has gone."""
        return bool(usable(self._usual))

    def why_not_ready(self) -> str:
        """Empty when all is well."""
        return self._why_none(self._usual)

    def _why_none(self, routes: Sequence[Route]) -> str:
        missing = [] if self.prefills or not self._disaggregated else ["no prefill is known"]
        missing += [] if self.decodes else ["no decode is known"]
        return "; ".join((*missing, *self._troubles, *why_none(routes)))

    def choose(self, request: ClientRequest) -> Choice:
        """The routes that can take it.

        Raises:
            NoWorkers: no route is proven, and none was before it came into doubt; or all are about to end.
            InvalidRequest: the router does not have the prefill that is asked for.
            CapacityExceeded: on every route there is a worker that would refuse it.

        """
        routes, reason = self._candidates(request)
        proven = usable(routes)
        if not proven:
            raise NoWorkers(f"no usable {'pair' if self._disaggregated else 'decode'}: {self._why_none(routes)}")
        open_routes = [route for route in proven if not route.refusals(request.priority)]
        if not open_routes:
            raise _all_full(proven, request.priority)
        return Choice(tuple(sorted(open_routes, key=partial(_rank, prompt_tokens=len(request.prompt)))), reason)

    def _candidates(self, request: ClientRequest) -> tuple[Sequence[Route], str]:
        """All that it might take, and why these."""
        if request.bootstrap is not None:
            return self._with_prefill(request.bootstrap), "the client has named the prefill"
        if not self._disaggregated:
            return self._alone, "this router has no prefill"
        prompt = f"prompt of {len(request.prompt)} tokens"
        if len(request.prompt) >= self._min_prompt_tokens:
            return self._pairs, f"{prompt}, pair with least to do"
        prompt = f"{prompt}, fewer than --disaggregation-min-prompt-tokens {self._min_prompt_tokens}"
        if usable(self._alone):
            return self._alone, prompt
        return self._pairs, f"{prompt}, but no decode is proven alone"

    def _with_prefill(self, bootstrap: BootstrapAddress) -> Sequence[Route]:
        """By its own address or by that of its Bootstrap service."""
        named = {prefill for prefill in self.prefills if bootstrap in (prefill.address, prefill.bootstrap)}
        if not named:
            raise InvalidRequest(f"this router has no prefill {bootstrap.target}", field="bootstrap_host")
        return [pair for pair in self._pairs if pair.prefill in named]


def _rank(route: Route, prompt_tokens: int) -> tuple[bool, bool, int]:
    """The lowest is the best."""
    return route.is_full, not route.has_pages_for(prompt_tokens), route.to_do


def _all_full(routes: Sequence[Route], priority: int) -> CapacityExceeded:
    """To come back after as long as the first in the shortest queue has waited; of a pair the longer wait counts."""
    refusals = [route.refusals(priority) for route in routes]
    queues = {worker: load.queued for refusal in refusals for worker, load in refusal.items()}
    waiting = [f"{worker} has {queued} requests waiting" for worker, queued in queues.items()]
    first_s = min(max(load.oldest_wait_s for load in refusal.values()) for refusal in refusals)
    return CapacityExceeded(
        f"no worker takes more requests now: {'; '.join(waiting)}",
        retry_after_s=advice_s(first_s),
    )
