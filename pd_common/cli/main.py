"""pdctl: tools for a person who runs or tunes pd-handoff."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command is, by its own name, and the first sentence of its help."""

    module: str
    help: str
    function: str | None = None
    """Its name there, where Python keeps the command's own for itself."""

    def load(self, name: str) -> click.Command:
        command: click.Command = getattr(importlib.import_module(self.module), self.function or name)
        return command


COMMANDS: Mapping[str, Command] = {
    "topology": Command("pd_common.cli.topology", "Show every process, the pairings between them, and the routes."),
    "rooms": Command("pd_common.cli.rooms", "List the latest rooms with their states on both sides."),
    "room": Command("pd_common.cli.room", "Show one room as both sides have it on record."),
    "trace": Command("pd_common.cli.trace", "Show where the time of one room went."),
    "watch": Command("pd_common.cli.watch", "Print every change of every room as it happens."),
    "doctor": Command(
        "pd_common.cli.doctor", "Say what is wrong with the system, or with ROOM, and what to do about it."
    ),
    "health": Command("pd_common.cli.health", "Ask one process whether it is ready."),
    "try": Command(
        "pd_common.cli.try_prompt", "Send one prompt through the router, and see what became of its room.", "try_prompt"
    ),
    "abort": Command("pd_common.cli.abort", "End one room on all sides."),
    "estimate": Command(
        "pd_common.cli.estimate", "Work out what one handoff sends: sends, pages, bytes, copies and time."
    ),
    "plan": Command("pd_common.cli.plan.command", "Plan how many prefills and decodes a load needs."),
    "ticket": Command("pd_common.cli.ticket", "Print the ticket of ROOM in base64, as grpcurl wants bytes."),
    "bench": Command("pd_common.cli.bench.command", "Measure on this machine."),
}


class OnDemand(click.Group):
    """Loads a command when it is called: some bring seconds of imports, which `--help` must not wait for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return COMMANDS[cmd_name].load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


@click.group(
    cls=OnDemand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
def main() -> None:
    """Look into pd-prefill, pd-decode and pd-router, work out what they will need, and measure."""


if __name__ == "__main__":
    main()
