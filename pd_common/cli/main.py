"""pdctl: tools for a person who runs or tunes pd-handoff; one group of commands per purpose."""

from __future__ import annotations

import click

from pd_common.cli.bench.command import bench
from pd_common.cli.ticket import ticket


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
def main() -> None:
    """Tools around pd-prefill, pd-decode and pd-router."""


main.add_command(bench)
main.add_command(ticket)


if __name__ == "__main__":
    main()
