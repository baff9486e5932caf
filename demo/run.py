"""`make demo`: one prompt through prefill, decode and router on this machine, and its timeline.

`make serve` leaves the three running.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import click
import grpc
from pd.v1 import generation_pb2, generation_pb2_grpc
from rich.console import Console
from rich.markup import escape

from demo import timeline
from demo.cluster import LOOPBACK, Cluster, ClusterError, Ports, cluster
from pd_common.telemetry.collector import Collector

HERE = Path(__file__).resolve().parent
MODEL = HERE / "shakespeare"
ENGINE_FLAGS = ("--threads", "1", "--dtype", "float32", "--page-size", "16", "--kv-cache-tokens", "16384")
PREFILL_FLAGS = ("--chunked-prefill-size", "256")
ANSWER_TOKENS = 120
WIDTH = 120
"""Columns that the timeline needs; a narrower terminal wraps lines, which is better than losing them."""
SERVE_PORTS = Ports(prefill=8998, decode=8999, http=8000, grpc=8001)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--serve", is_flag=True, help="Leave the three processes running until Ctrl-C, on their default ports.")
@click.option("--model", type=click.Path(path_type=Path), default=MODEL, help="Another Hugging Face model directory.")
def main(serve: bool, model: Path) -> None:
    """Show the prefill/decode handoff on this machine."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    _require(model)
    try:
        if serve:
            run_serve(console, model)
        else:
            run_demo(console, model)
    except ClusterError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)


def run_demo(console: Console, model: Path) -> None:
    """Starts the three, streams one answer, prints where its time went, stops them."""
    prompt = (HERE / "prompt.txt").read_text(encoding="utf-8")
    with (
        Collector() as collector,
        cluster(
            model,
            Ports.free(),
            engine_flags=ENGINE_FLAGS,
            prefill_flags=PREFILL_FLAGS,
            environment=collector.environment,
        ) as running,
    ):
        _wait(console, running)
        room = _stream_answer(console, running, prompt)
        spans = collector.wait_for(room, timeline.EXPECTED, timeout_s=10)
        console.rule(f"timeline of room {room}")
        timeline.show(spans, console)


def run_serve(console: Console, model: Path) -> None:
    """Starts the three and waits for Ctrl-C."""
    ports = SERVE_PORTS
    with cluster(model, ports, engine_flags=ENGINE_FLAGS, prefill_flags=PREFILL_FLAGS) as running:
        _wait(console, running)
        console.print(
            f"prefill  {LOOPBACK}:{ports.prefill}   grpcurl -plaintext {LOOPBACK}:{ports.prefill} list\n"
            f"decode   {LOOPBACK}:{ports.decode}\n"
            f"router   http://{LOOPBACK}:{ports.http}   gRPC {LOOPBACK}:{ports.grpc}\n\n"
            f"curl -s http://{LOOPBACK}:{ports.http}/generate -d "
            '\'{"text": "ROMEO.\\n", "sampling_params": {"max_new_tokens": 60, "temperature": 0.8}}\'\n\n'
            "Ctrl-C stops all three.",
            soft_wrap=True,
        )
        watch_until_signal(running)


def watch_until_signal(running: Cluster) -> None:
    """Returns on SIGINT or SIGTERM.

    Raises:
        ClusterError: one of the processes has ended by itself.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(0.5):
        for process in running.processes:
            if not process.is_alive:
                raise ClusterError(f"{process.name} has ended:\n{process.log()}")


def _wait(console: Console, running: Cluster) -> None:
    began = time.monotonic()
    with console.status("starting prefill, decode and router; ready means that a page has gone from one to the other"):
        running.wait_ready()
    console.print(
        f"three processes are ready after {time.monotonic() - began:.1f} s: a real page has gone through them"
    )


def _stream_answer(console: Console, running: Cluster, prompt: str) -> int:
    """Prints the end of the prompt and the answer as it comes; gives the room."""
    room, outputs = 0, []
    with grpc.insecure_channel(f"{LOOPBACK}:{running.ports.grpc}") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(
            text=prompt,
            sampling_params=generation_pb2.SamplingParams(
                max_new_tokens=ANSWER_TOKENS, temperature=0.8, top_k=50, seed=7, ignore_eos=True
            ),
        )
        console.rule("prompt (its end) and answer")
        console.print(f"[dim]{escape(prompt[-160:])}[/dim]", end="", soft_wrap=True)
        for response in stub.Generate(request, timeout=120):
            console.print(response.output.text, end="", markup=False, soft_wrap=True)
            room = response.output.bootstrap_room
            outputs.append(response.output)
    console.print()
    usage = outputs[-1].usage
    console.print(f"[dim]{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} answer tokens[/dim]")
    return room


def _require(model: Path) -> None:
    if not (model / "config.json").is_file():
        raise click.ClickException(f"{model} is not a model directory: config.json is missing")


if __name__ == "__main__":
    main()
