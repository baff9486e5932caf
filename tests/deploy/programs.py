"""What a program makes of a command line and an environment, without starting it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import click
from click.core import ParameterSource

from deploy.helm.options import COMMANDS
from pd_common.cli.main import main as pdctl

PROGRAMS: Mapping[str, click.Command] = {f"pd-{role}": command for role, command in COMMANDS.items()}


def parsed(command: Sequence[str], environment: Mapping[str, str]) -> click.Context:
    """Raises click's UsageError as the program would print it."""
    program, *words = command
    with patch.dict(os.environ, environment, clear=True):
        if program != "pdctl":
            return PROGRAMS[program].make_context(program, words)
        name, *words = words
        subcommand = pdctl.get_command(click.Context(pdctl), name)
        assert subcommand is not None, name
        return subcommand.make_context(name, words)


def from_environment(context: click.Context) -> set[str]:
    """Parameters whose value was a variable's."""
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.ENVIRONMENT}
