"""The files of `deploy/`: units, image, compose file, manifests and alert rules, as far as they can be checked here.

`make deploy-check` installs what the skipped ones need.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedprompt.cli import app

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3] / "deploy"
UNITS = sorted((ROOT / "systemd").glob("*.service"))
MANIFESTS = sorted((ROOT / "kubernetes").glob("*.yaml"))
DOCUMENTS = [each for file in MANIFESTS for each in yaml.safe_load_all(file.read_text())]
MOST_EXPOSED = 2.0  # of systemd-analyze, where 10 is a service without any hardening
METRIC = re.compile(r"fedprompt_[a-z_]+")


def called(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def options_of(command: str) -> set[str]:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    return set(re.findall(r"--[a-z-]+", text))


def check_arguments(arguments: list[str]) -> None:
    """A command that exists, with options it has."""
    command, *rest = arguments
    assert command in ("server", "node")
    given = {each for each in rest if each.startswith("--")}
    assert given <= options_of(command), given
    assert {"--metrics", "--log-format"} <= given


@pytest.fixture(params=UNITS, ids=lambda file: file.stem)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit as this machine could start it: with a program and a user that are here."""
    text = request.param.read_text()
    text = re.sub(
        r"^User=.*", "User=root", text.replace("/opt/fedprompt/bin/fedprompt", "/bin/true"), flags=re.MULTILINE
    )
    copy = tmp_path / request.param.name
    copy.write_text(text)
    return copy


def test_systemd_understands_the_units(unit: Path) -> None:
    said = called("systemd-analyze", "verify", "--man=no", str(unit))
    assert unit.name not in said, said


def test_the_units_are_hardened(unit: Path) -> None:
    said = called(
        "systemd-analyze",
        "security",
        "--no-pager",
        "--offline=true",
        f"--threshold={int(MOST_EXPOSED * 10)}",
        str(unit),
    )
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert level is not None
    assert float(level[1]) <= MOST_EXPOSED, said


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_a_unit_starts_what_there_is(file: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", file.read_text(), re.MULTILINE)
    check_arguments(shlex.split(line)[1:])
    assert "User=root" not in file.read_text()


def test_the_image_has_no_root_no_keys_and_a_health_check() -> None:
    text = (ROOT / "container" / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n((?:(?!FROM ).*\n)*)", text, re.MULTILINE))
    assert list(stages) == ["build", "runtime", "cuda", "cpu"], "the last one is built where none is named"
    assert re.search(r"^USER 10001:10001$", stages["runtime"], re.MULTILINE)
    assert "HEALTHCHECK" in stages["runtime"]
    assert "USER" not in stages["cuda"] + stages["cpu"]
    ignored = (ROOT / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored, "everything is left out but what is named"
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    assert copied <= {line[1:] for line in ignored if line.startswith("!")}


COMPOSE = yaml.safe_load((ROOT / "container" / "compose.yaml").read_text())


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_of_the_compose_file_is_locked_down(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "ports" not in service, "a published port may give its clients the rights of the server's machine"
    check_arguments(service["command"])
    mounted = [each.split(":") for each in service["volumes"]]
    if name != "server":
        assert all(mode == ["ro"] for _, target, *mode in mounted if target in ("/site", "/images"))
    assert {target for _, target, *mode in mounted if not mode} <= {
        "/var/lib/fedprompt",
        "/var/lib/fedprompt/server",
        "/var/cache/fedprompt",
    }, "nothing else may be written"


def test_a_node_of_the_compose_file_waits_for_a_healthy_server() -> None:
    for name in ("site-a", "site-b"):
        assert COMPOSE["services"][name]["depends_on"] == {"server": {"condition": "service_healthy"}}


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_the_manifests_fit_the_schemas_of_kubernetes(file: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make deploy-check installs it")
    for document in yaml.safe_load_all(file.read_text()):
        kubernetes_validate.validate(document, "1.34", strict=True)


def containers() -> Iterator[Any]:
    for document in DOCUMENTS:
        if document["kind"] == "StatefulSet":
            pod = document["spec"]["template"]["spec"]
            for each in [*pod["initContainers"], *pod["containers"]]:
                yield pytest.param(pod, each, id=f"{document['metadata']['name']}-{each['name']}")


@pytest.mark.parametrize(("pod", "container"), list(containers()))
def test_a_container_is_restricted(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    kinds = {each["name"]: each for each in pod["volumes"]}
    for mount in container["volumeMounts"]:
        assert mount["name"] in {*kinds, "state"}
        if "secret" in kinds.get(mount["name"], {}):
            assert mount["readOnly"] is True
    if "args" in container:
        check_arguments(container["args"])
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_all_that_belongs_together_has_the_same_labels() -> None:
    for document in DOCUMENTS:
        spec, name = document["spec"], document["metadata"]["name"]
        found = spec.get("selector") or spec.get("podSelector")
        assert found in ({"matchLabels": {"app": name}}, {"app": name})
        if document["kind"] == "StatefulSet":
            assert spec["replicas"] == 1
            assert spec["template"]["metadata"]["labels"] == {"app": name}


RULES = [
    rule
    for group in yaml.safe_load((ROOT / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]


def test_prometheus_understands_the_rules_and_what_to_scrape() -> None:
    called("promtool", "check", "rules", str(ROOT / "prometheus" / "alerts.yaml"))
    called("promtool", "check", "config", str(ROOT / "prometheus" / "prometheus.yaml"))


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    from fedprompt.deploy.federation_state import FederationState, RunState
    from fedprompt.deploy.metrics import PREFIX, NodeFigures, of_server

    state = FederationState((), RunState("r", epsilon=1.0, most_epsilon=2.0), ())
    node = NodeFigures("a", lambda: [], lambda: (0.0, 1.0))
    known = {PREFIX + family.name for family in [*of_server(state, True), *node.families()]}
    asked = {name for rule in RULES for name in METRIC.findall(rule["expr"])}
    assert asked - known == set()
    assert len(RULES) >= 8
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in RULES)


def test_the_rules_fire_when_they_should(tmp_path: Path) -> None:
    """Prometheus's own unit test of the shipped rules."""
    shutil.copy(ROOT / "prometheus" / "alerts.yaml", tmp_path)
    series = {
        'fedprompt_site_connected{site="a"}': "1x3 0x10",
        'fedprompt_site_connected{site="b"}': "1x15",
        'fedprompt_certificate_days_left{certificate="server"}': "29x15",
        'fedprompt_run_epsilon_left{run="r"}': "0.5x15",
        'fedprompt_run_epsilon_spent{run="r"}': "7.5x15",
        'fedprompt_run_refused_total{run="r",rule="finite"}': "0x3 1x12",
    }
    wanted = {
        "FedpromptSiteAbsent": {"site": "a"},
        "FedpromptCertificateExpires": {"certificate": "server"},
        "FedpromptRunBudgetLow": {"run": "r"},
        "FedpromptUpdateRefused": {"run": "r", "rule": "finite"},
        "FedpromptRunStalled": None,
    }
    annotations = {rule["alert"]: rule["annotations"] for rule in RULES}
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in RULES}

    def filled(text: str, labels: dict[str, str]) -> str:
        text = text.replace("{{ $value }}", "29")
        return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)

    tests = [
        {
            "eval_time": "10m",
            "alertname": alert,
            "exp_alerts": []
            if labels is None
            else [
                {
                    "exp_labels": {**labels, "severity": severity[alert]},
                    "exp_annotations": {name: filled(text, labels) for name, text in annotations[alert].items()},
                }
            ],
        }
        for alert, labels in wanted.items()
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    whole = {
        "rule_files": ["alerts.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "alert_rule_test": tests}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(whole))
    called("promtool", "test", "rules", str(tmp_path / "test.yaml"))
