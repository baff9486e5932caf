"""Dashboard and alerts: Prometheus understands them, they fire when they have to, and they say what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from pd_common.errors import Reason
from pd_common.telemetry.metrics import SUCCESS
from tests.deploy.rules import DASHBOARD, DOCS, RULE_TESTS, RULES, alerts, panels, queries, rules

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def promtool(*arguments: str | Path) -> str:
    """Its output; fails if it complains."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


@needs_promtool
def test_the_rules_are_rules_and_do_in_examples_what_they_are_for() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES)
    promtool("test", "rules", RULE_TESTS)


def test_every_alert_has_an_example() -> None:
    examples = RULE_TESTS.read_text()
    without = {alert["alert"] for alert in alerts() if alert["alert"] not in examples}
    assert not without


@needs_promtool
def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    """A rule file is what promtool reads expressions from."""
    recorded = [{"record": f"query:{place}", "expr": query} for place, query in enumerate(queries().values())]
    file = tmp_path / "queries.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", file)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_says_how_bad_it_is_what_it_is_what_to_do_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning"}
    said = alert["annotations"]
    assert said["summary"]
    assert said["description"]
    page, _, heading = said["runbook"].partition("#")
    assert (page, heading in headings(DOCS)) == ("docs/metrics.md", True)
    assert alert["alert"] in DOCS.read_text()


def test_outcomes_and_reasons_that_rules_name_exist() -> None:
    known = {SUCCESS, *(reason.value for reason in Reason)}
    for rule in rules():
        for pattern in re.findall(r'(?:outcome|reason)!?=~?"([^"]+)"', rule["expr"]):
            for name in pattern.split("|"):
                assert any(re.fullmatch(name, reason) for reason in known), (rule, name)


def test_the_dashboard_asks_for_its_data_source_and_shows_no_panel_over_another() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "job", "instance"]
    for panel in panels():
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}, panel["title"]
        assert panel["description"], panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for one, other in combinations((panel["gridPos"] for panel in board["panels"]), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
