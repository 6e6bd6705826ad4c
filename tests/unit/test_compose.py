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
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LONG_RUNNING = sorted(set(SERVICES) - {"models"})

TOP_LEVEL_KEYS = {"name", "services", "volumes"}
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "depends_on", "healthcheck", "image", "init", "ports", "restart"),
    *("security_opt", "stop_grace_period", "volumes"),
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
    for service in SERVICES.values():
        assert set(service) <= SERVICE_KEYS
        assert set(service.get("healthcheck", {})) <= HEALTHCHECK_KEYS
        assert service["restart"] in {"no", "always", "on-failure", "unless-stopped"}
        assert all(isinstance(argument, str) for argument in service["command"]), "numbers need quotes"


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


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_dependencies_exist_and_can_be_met(service: str) -> None:
    for name, dependency in SERVICES[service].get("depends_on", {}).items():
        assert dependency["condition"] in CONDITIONS
        one_shot = SERVICES[name]["restart"] == "no"
        assert (dependency["condition"] == "service_completed_successfully") == one_shot
        if dependency["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[name]


def test_who_reads_the_model_waits_for_it() -> None:
    assert SERVICES["models"]["volumes"] == ["models:/var/lib/orca"]
    for name in ("gateway", *workers()):
        assert SERVICES[name]["volumes"] == ["models:/var/lib/orca:ro"]
        assert "models" in SERVICES[name]["depends_on"]
    assert set(COMPOSE["volumes"]) == {"models"}


def test_only_the_gateway_is_published_and_only_here() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["gateway"]
    grpc, http = (published.split(":") for published in SERVICES["gateway"]["ports"])
    options = options_of("gateway")
    assert grpc == ["127.0.0.1", "50051", str(options["port"])]
    assert http == ["127.0.0.1", "8000", options["http_port"]]


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_containers_have_no_rights_they_do_not_need(service: str) -> None:
    assert SERVICES[service]["cap_drop"] == ["ALL"]
    assert SERVICES[service]["security_opt"] == ["no-new-privileges:true"]


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
