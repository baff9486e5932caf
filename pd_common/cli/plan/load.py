"""The load of `pdctl bench serve` as the simulation takes it: the same requests at the same moments."""

from __future__ import annotations

from pd_common.cli.bench.serve.workload import Workload, poisson_arrivals
from pd_common.planning.simulation import Arrival


def arrivals_of(workload: Workload, per_s: float, count: int) -> list[Arrival]:
    """The first `count` that `bench serve` sends, those that warm up among them. Prompts must be token ids."""
    arrivals = []
    for number, at_s in zip(range(count), poisson_arrivals(per_s, workload.seed), strict=False):
        request = workload.request(number)
        arrivals.append(Arrival(at_s, len(request.prompt), request.output_tokens))
    return arrivals
