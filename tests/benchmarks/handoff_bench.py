"""How much of a handoff shows: the time from the end of compute to decode's commit, beside the whole of the transfer.

Three real processes with a random model whose KV is large for its compute (28 layers, 8 KV heads x 128, float32:
3.5 MiB a page of 16 tokens), prompts of four chunks, over CMA and over tcp, interleaved. The times are those of the
rooms' own spans.

Run: python tests/benchmarks/handoff_bench.py [--rounds 5] [--tokens 2048] [--no-digest]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from demo.cluster import LOOPBACK, Cluster, Ports, cluster
from pd_common.telemetry.collector import Collector, RecordedSpan
from pd_common.telemetry.spans import SpanName
from tests.tiny_models import byte_level_tokenizer

VOCABULARY = 512
LAYERS = 28
PATHS = {"same host": {}, "tcp": {"UCX_TLS": "tcp,self"}}
SPANS = frozenset({SpanName.ROUTE, SpanName.PREFILL, SpanName.DECODE, SpanName.GATE})


@dataclass(frozen=True, slots=True)
class Handoff:
    """One room: bytes that moved, by what, and seconds."""

    bytes: int
    carrier: str
    compute_s: float
    transfer_s: float
    """Sum over the chunks' writes."""
    exposed_s: float
    """From the end of the last chunk's compute to decode's commit."""

    @staticmethod
    def of(spans: list[RecordedSpan]) -> Handoff:
        writes = [span for span in spans if span.name == SpanName.CHUNK_TRANSFER]
        computes = [span for span in spans if span.name == SpanName.CHUNK_COMPUTE]
        commit_ns = max(span.end_ns for span in spans if span.name == SpanName.GATE)
        return Handoff(
            sum(int(span.attributes["bytes"]) for span in writes),
            str(writes[0].attributes["carrier"]),
            sum(span.milliseconds for span in computes) / 1e3,
            sum(int(span.attributes["bytes"]) / 1e9 / float(span.attributes["gb_per_s"]) for span in writes),
            (commit_ns - max(span.end_ns for span in computes)) / 1e9,
        )


def save_model(directory: Path) -> None:
    """Large KV, little compute."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=16384,
        initializer_range=0.2,
    )
    LlamaForCausalLM(shape).save_pretrained(directory)
    byte_level_tokenizer().save_pretrained(directory)


def hand_off(running: Cluster, collector: Collector, prompt: list[int]) -> Handoff:
    """Sends one prompt through the pair."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{running.ports.http}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310  our own address
        room = int(json.load(response)["meta_info"]["bootstrap_room"])
    return Handoff.of(collector.wait_for(room, SPANS, timeout_s=20))


def measure(rounds: int, tokens: int, flags: list[str]) -> dict[str, list[Handoff]]:
    """The first round warms up."""
    found: dict[str, list[Handoff]] = {path: [] for path in PATHS}
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(model)
        engine = ("--threads", "1", "--kv-cache-tokens", str(2 * tokens), "--page-size", "16", *flags)
        chunks = ("--chunked-prefill-size", str(tokens // 4))
        collector = stack.enter_context(Collector())
        clusters = {
            path: stack.enter_context(
                cluster(
                    model,
                    Ports.free(),
                    engine_flags=engine,
                    prefill_flags=chunks,
                    environment=collector.environment | environment,
                )
            )
            for path, environment in PATHS.items()
        }
        for running in clusters.values():
            running.wait_ready()
        for number in range(rounds + 1):
            prompt = random.Random(number).choices(range(1, VOCABULARY), k=tokens)
            for path, running in clusters.items():
                handoff = hand_off(running, collector, prompt)
                if number:
                    found[path].append(handoff)
    return found


def report(found: dict[str, list[Handoff]]) -> None:
    table = Table(title="handoff of a prompt in four chunks, medians")
    for head in ("path", "carrier", "MB", "compute ms", "transfer ms", "GB/s", "exposed ms", "exposed / transfer"):
        table.add_column(head, justify="left" if head in {"path", "carrier"} else "right")
    for path, each in found.items():
        transfer_s = statistics.median(handoff.transfer_s for handoff in each)
        exposed_s = statistics.median(handoff.exposed_s for handoff in each)
        table.add_row(
            path,
            each[0].carrier,
            f"{each[0].bytes / 1e6:.0f}",
            f"{statistics.median(handoff.compute_s for handoff in each) * 1e3:.0f}",
            f"{transfer_s * 1e3:.1f}",
            f"{each[0].bytes / transfer_s / 1e9:.2f}",
            f"{exposed_s * 1e3:.1f}",
            f"{exposed_s / transfer_s:.2f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048, help="prompt tokens, a multiple of 64")
    parser.add_argument("--no-digest", action="store_true")
    arguments = parser.parse_args()
    report(measure(arguments.rounds, arguments.tokens, ["--no-digest"] if arguments.no_digest else []))


if __name__ == "__main__":
    main()
