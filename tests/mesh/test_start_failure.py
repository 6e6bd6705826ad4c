"""A mesh that cannot start says which process ended, and that process says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import transformers

from services.mesh.exits import MeshError
from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.config import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path


async def started_wrongly(model: str) -> MeshError:
    with pytest.raises(MeshError) as failure:
        async with LocalMesh(MeshOptions(engine=EngineConfig(model=model))):
            pass
    return failure.value


@pytest.mark.slow
async def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it leaves a thread behind
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    failure = await started_wrongly(str(tmp_path))
    assert failure.exit is not None
    assert failure.exit.name == "gateway"
    assert any("tokenizer.json" in line for line in failure.exit.last_lines)


@pytest.mark.slow
async def test_a_shape_that_nobody_knows() -> None:
    failure = await started_wrongly("random:no-such-shape")
    assert failure.exit is not None
    assert failure.exit.name == "scheduler"
    assert any("no-such-shape" in line and "Known shapes" in line for line in failure.exit.last_lines)
