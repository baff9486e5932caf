"""The only way the chart's schema and README are made, from values.yaml and the processes' options: `make chart`."""

from __future__ import annotations

import json

import click

from deploy.helm.readme import readme
from deploy.helm.schema import schema
from deploy.helm.values import CHART


def files() -> dict[str, str]:
    """What the generated files of the chart have to hold, by name."""
    return {"values.schema.json": json.dumps(schema(), indent=2) + "\n", "README.md": readme()}


@click.command(help=__doc__)
def main() -> None:
    for name, content in files().items():
        (CHART / name).write_text(content)


if __name__ == "__main__":
    main()
