"""compose.yaml and Dockerfile agree with the command line, with each other, and with the Compose specification.

No container engine is needed: what a typing mistake could break is checked against the real parser.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from services.cli.main import app
from shared.model.catalogue import catalogue_model

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
ALL: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICES = {name: service for name, service in ALL.items() if service["image"] == "orca-mesh"}
OBSERVERS = {name: service for name, service in ALL.items() if name not in SERVICES}
LONG_RUNNING = sorted(set(SERVICES) - {"models"})
DEPLOY = ROOT / "deploy"

TOP_LEVEL_KEYS = {"name", "services", "volumes"}
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "init", "ports"),
    *("profiles", "restart", "security_opt", "stop_grace_period", "volumes"),
}
HEALTHCHECK_KEYS = {"test", "interval", "timeout", "retries", "start_period"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
DURATION = re.compile(r"(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse with the real command line, environment variables left out; what it would run with."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    return dict(command.make_context(command.name, list(arguments)).params)


def options_of(service: str) -> dict[str, Any]:
    return parse(SERVICES[service]["command"])


def workers() -> dict[str, dict[str, Any]]:
    return {name: options_of(name) for name in SERVICES if SERVICES[name]["command"][0] == "worker"}


def seconds(duration: str) -> int:
    assert DURATION.fullmatch(duration), duration
    return sum(int(count) * {"s": 1, "m": 60}[unit] for count, unit in re.findall(r"(\d+)([sm])", duration))


def test_only_keys_of_the_specification() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == TOP_LEVEL_KEYS
    for service in ALL.values():
        assert set(service) <= SERVICE_KEYS
        assert set(service.get("healthcheck", {})) <= HEALTHCHECK_KEYS
        assert service["restart"] in {"no", "always", "on-failure", "unless-stopped"}
        assert all(isinstance(argument, str) for argument in service.get("command", ())), "numbers need quotes"
        assert all(isinstance(value, str) for value in service.get("environment", {}).values()), "and so do booleans"


def test_the_mesh_is_whole() -> None:
    assert set(SERVICES) == {"models", "scheduler", "stage-0", "stage-1", "gateway"}
    scheduler = options_of("scheduler")
    ranks = sorted((options["stage"], options["tp_rank"]) for options in workers().values())
    assert ranks == [(stage, rank) for stage in range(scheduler["stages"]) for rank in range(scheduler["tp"])]


def test_the_model_that_is_fetched_is_the_one_that_is_served() -> None:
    name = options_of("models")["name"]
    assert catalogue_model(name).name == name
    assert options_of("scheduler")["model"] == name


@pytest.mark.parametrize("service", LONG_RUNNING)
def test_services_listen_where_others_reach_them(service: str) -> None:
    options = options_of(service)
    assert options["host"] == "0.0.0.0"
    assert options["port"] > 0
    if "scheduler" in options:
        host, _, port = options["scheduler"].partition(":")
        assert SERVICES[host]["command"][0] == "scheduler"
        assert options_of(host)["port"] == int(port)
    if "advertise_host" in options:
        assert options["advertise_host"] == service


@pytest.mark.parametrize("service", LONG_RUNNING)
def test_services_are_probed_at_their_own_port(service: str) -> None:
    check = SERVICES[service]["healthcheck"]
    kind, program, command, *arguments = check["test"]
    assert (kind, program, command) == ("CMD", "orca", "health")
    probe = parse([command, *arguments])
    assert probe["address"] == f"127.0.0.1:{options_of(service)['port']}"
    assert probe["timeout"] < seconds(check["timeout"]), "the probe gives up before it is killed, and says why"
    assert seconds(check["start_period"]) >= 60
    assert check["retries"] >= 1


@pytest.mark.parametrize("service", LONG_RUNNING)
def test_services_have_time_to_drain(service: str) -> None:
    assert seconds(SERVICES[service]["stop_grace_period"]) > options_of(service)["grace"]


@pytest.mark.parametrize("service", sorted(ALL))
def test_dependencies_exist_and_can_be_met(service: str) -> None:
    for name, dependency in ALL[service].get("depends_on", {}).items():
        assert dependency["condition"] in CONDITIONS
        one_shot = ALL[name]["restart"] == "no"
        assert (dependency["condition"] == "service_completed_successfully") == one_shot
        if dependency["condition"] == "service_healthy":
            assert "healthcheck" in ALL[name]


def test_who_reads_the_model_waits_for_it() -> None:
    assert SERVICES["models"]["volumes"] == ["models:/var/lib/orca"]
    for name in ("gateway", *workers()):
        assert SERVICES[name]["volumes"] == ["models:/var/lib/orca:ro"]
        assert "models" in SERVICES[name]["depends_on"]
    mounted = {volume.split(":")[0] for service in ALL.values() for volume in service.get("volumes", ())}
    assert set(COMPOSE["volumes"]) == {name for name in mounted if not name.startswith("./")}


def test_only_the_gateway_is_published_and_only_here() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["gateway"]
    grpc, http = (published.split(":") for published in SERVICES["gateway"]["ports"])
    options = options_of("gateway")
    assert grpc == ["127.0.0.1", "50051", str(options["port"])]
    assert http == ["127.0.0.1", "8000", options["http_port"]]


def test_what_is_published_is_published_only_here() -> None:
    for service in OBSERVERS.values():
        (published,) = service["ports"]
        host, outside, inside = published.split(":")
        assert (host, outside) == ("127.0.0.1", inside)


def test_observers_are_there_on_request_only() -> None:
    assert set(OBSERVERS) == {"prometheus", "grafana"}
    for service in OBSERVERS.values():
        assert service["profiles"] == ["observability"]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), "a version, not what is latest"
        assert service["healthcheck"]["test"][0] == "CMD"
    assert not any("profiles" in service for service in SERVICES.values())


def test_what_is_mounted_is_there() -> None:
    for service in OBSERVERS.values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                source, _, mode = volume.split(":")
                assert (ROOT / source).is_dir()
                assert mode == "ro"


def test_prometheus_scrapes_every_process() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target for job in config["scrape_configs"] for group in job["static_configs"] for target in group["targets"]
    }
    serving = {f"{name}:{SERVICES[name]['environment']['ORCA_METRICS_PORT']}" for name in LONG_RUNNING}
    assert targets == serving
    assert all(SERVICES[name]["environment"]["ORCA_METRICS_HOST"] == "0.0.0.0" for name in LONG_RUNNING)


def test_what_the_environment_sets_are_options() -> None:
    for name in LONG_RUNNING:
        command: Any = typer.main.get_command(app)
        known = {parameter.envvar for parameter in command.commands[SERVICES[name]["command"][0]].params}
        assert set(SERVICES[name]["environment"]) <= known


def test_grafana_finds_its_data_and_its_dashboard() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "orca.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in OBSERVERS["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["./deploy/grafana/dashboards"]
    assert OBSERVERS["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == (
        f"{provider['options']['path']}/orca.json"
    )


@pytest.mark.parametrize("service", sorted(ALL))
def test_containers_have_no_rights_they_do_not_need(service: str) -> None:
    assert ALL[service]["cap_drop"] == ["ALL"]
    assert ALL[service]["security_opt"] == ["no-new-privileges:true"]


def test_the_image_runs_the_command_as_nobody_special() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    instructions = [line for line in text.splitlines() if line and not line.startswith("#")]
    final = instructions[max(at for at, line in enumerate(instructions) if line.startswith("FROM ")) :]
    assert [line for line in final if line.startswith("USER ")] == ["USER orca"]
    assert 'ENTRYPOINT ["orca"]' in final
    assert "ORCA_HOME=/var/lib/orca" in "\n".join(final)


def test_what_the_image_copies_is_there_and_reaches_the_builder() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (torch,) = re.findall(r'"(torch[^"]+)"', text)
    assert f'"{torch}"' in project, "the image installs the torch that the project asks for"
