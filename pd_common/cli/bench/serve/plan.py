"""What is to be sent, as the options say it."""

from __future__ import annotations

from dataclasses import dataclass

from pd_common.cli.bench.serve.lengths import Lengths, Uniform
from pd_common.cli.bench.serve.workload import Kind, Workload

_BACKGROUND_PROMPT = Uniform(64, 64)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come and how many are measured: a number of them, or all that come within some seconds."""

    per_s: float | None
    """None: without pause."""
    concurrency: int | None
    """At most so many at a time, where they come without pause."""
    warm_up: int
    """The first ones, which no figure has."""
    requests: int | None
    seconds: float | None

    def __str__(self) -> str:
        count = f"{self.requests} requests" if self.requests is not None else f"requests for {self.seconds:g} s"
        pace = f"{self.concurrency} at a time" if self.per_s is None else f"Poisson arrivals at {self.per_s:g}/s"
        return f"{count} after {self.warm_up} to warm up, {pace}"


@dataclass(frozen=True, slots=True)
class Background:
    """Long answers that are kept running while the prompts arrive, and some seconds before."""

    streams: int
    output_tokens: int
    alone_s: float

    def __str__(self) -> str:
        return f"{self.streams} background streams of {self.output_tokens} tokens, alone for {self.alone_s:g} s first"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about the load but the server."""

    seed: int
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    prefix_tokens: int
    vocab: int | None
    background: Background | None

    def prompts(self) -> Workload:
        return Workload(self.seed, Kind.PROMPTS, self.prompt, self.output, self.prefix_tokens, self.vocab)

    def streams(self, background: Background) -> Workload:
        output = Uniform(background.output_tokens, background.output_tokens)
        return Workload(self.seed, Kind.BACKGROUND, _BACKGROUND_PROMPT, output, 0, self.vocab)

    def __str__(self) -> str:
        what = "words" if self.vocab is None else f"ids below {self.vocab}"
        prefix = f", the first {self.prefix_tokens} shared" if self.prefix_tokens else ""
        lengths = f"prompts of {self.prompt} {what}{prefix}; answers of {self.output} tokens"
        parts = [str(self.arrivals), lengths, *([str(self.background)] if self.background else []), f"seed {self.seed}"]
        return "; ".join(parts)
