"""What `bench.peers` makes of runs and of a peer's requirements; the peers themselves are not needed."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

from bench import peers
from bench.comparison import hf_export, systems
from bench.comparison.environments import kept_requirements, write_dist_info
from bench.comparison.machine import Machine
from bench.comparison.results import RunResult, append, latest, read, table
from bench.load.metrics import summarize
from bench.load.records import Outcome, RequestRecord
from bench.load.traces import TraceRequest
from services.worker.model.gguf_weights import GgufWeights
from shared.config import DEFAULT_MODEL
from shared.errors import ConfigError, ModelError, OrcaError, UnavailableError
from shared.model.config import ModelConfig
from shared.model.source import GgufFile
from shared.model.store import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RESULT = RunResult(
    comparison="2026-01-02T03:04:05+00:00",
    system="orca",
    product="orca",
    repetition=1,
    in_flight=1,
    num_requests=12,
    seed=0,
    duration_s=10.0,
    output_tokens_per_s=100.0,
    input_tokens_per_s=300.0,
    ttft_p50_ms=50.0,
    ttft_p99_ms=90.0,
    tpot_p50_ms=10.0,
    tpot_p99_ms=12.0,
    normalised_p50_ms=11.0,
    client_cores=0.02,
    versions={"orca": "1a2b3c"},
    settings={"options": "defaults"},
    machine={"cpu_model": "Some CPU", "num_cores": 2, "instruction_set": ["avx2"]},
)


def runs(
    system: str, product: str, throughputs: list[float], *, in_flight: int = 1, ttft: float = 50
) -> list[RunResult]:
    return [
        replace(
            RESULT,
            system=system,
            product=product,
            in_flight=in_flight,
            repetition=index,
            output_tokens_per_s=value,
            ttft_p50_ms=ttft,
            versions={product: "1"},
        )
        for index, value in enumerate(throughputs, start=1)
    ]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


class TestTable:
    def test_medians_of_runs_with_their_spread(self) -> None:
        [_, _, orca, *_] = rows(table(runs("orca", "orca", [90.0, 250.0, 100.0])))
        assert orca == ["orca", "100 (90.0–250)"]

    def test_ratios_are_to_the_best_setting_of_the_best_peer_at_each_load(self) -> None:
        results = [
            *runs("orca", "orca", [120.0]),
            *runs("orca", "orca", [300.0], in_flight=16),
            *runs("vLLM, one", "vLLM", [30.0]),
            *runs("vLLM, two", "vLLM", [40.0]),
            *runs("vLLM, one", "vLLM", [200.0], in_flight=16),
            *runs("vLLM, two", "vLLM", [150.0], in_flight=16),
            *runs("OpenVINO", "OpenVINO", [80.0]),
            *runs("OpenVINO", "OpenVINO", [100.0], in_flight=16),
        ]
        lines = rows(table(results))
        assert lines[0] == ["output tokens/s", "1 in flight", "16 in flight"]
        assert ["orca / best peer", "1.50", "1.50"] in lines
        assert ["orca / vLLM", "3.00", "1.50"] in lines

    def test_first_tokens_are_compared_with_the_quickest_setting(self) -> None:
        results = [
            *runs("orca", "orca", [1.0], ttft=60),
            *runs("vLLM, one", "vLLM", [1.0], ttft=100),
            *runs("vLLM, two", "vLLM", [1.0], ttft=80),
        ]
        assert rows(table(results))[-1] == ["orca / vLLM", "0.75"]

    def test_what_was_not_run_is_a_dash(self) -> None:
        results = [*runs("orca", "orca", [100.0]), *runs("OpenVINO", "OpenVINO", [80.0], in_flight=16)]
        lines = rows(table(results))
        assert ["orca", "100 (100–100)", "–"] in lines
        assert ["orca / best peer", "–", "–"] in lines

    def test_the_heading_tells_machine_and_versions(self) -> None:
        heading = table(runs("orca", "orca", [1.0, 2.0])).splitlines()[0]
        for told in (RESULT.comparison, "of 2 alternating runs", "12 requests", "Some CPU, 2 cores, avx2", "orca 1"):
            assert told in heading

    def test_no_runs(self) -> None:
        assert table([]).startswith("no runs")


class TestResults:
    def test_a_file_gives_back_what_was_added(self, tmp_path: Path) -> None:
        path = tmp_path / "results" / "peers.jsonl"
        results = runs("orca", "orca", [1.0, 2.0])
        for result in results:
            append(path, result)
        assert read(path) == results

    def test_only_the_last_comparison_counts(self) -> None:
        old = replace(RESULT, comparison="2026-01-01T00:00:00+00:00")
        assert latest([RESULT, old, RESULT]) == [RESULT, RESULT]

    @pytest.mark.parametrize("text", ["{", '{"system": "orca"}', "[]"])
    def test_other_files_are_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="no results of a comparison"):
            read(path)

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no results of a comparison"):
            read(tmp_path / "none.jsonl")

    def test_a_line_sums_up_a_run(self) -> None:
        record = RequestRecord(
            index=0,
            outcome=Outcome.OK,
            started_ns=0,
            sent_ns=0,
            ended_ns=2_000_000_000,
            event_times_ns=(1_000_000_000, 2_000_000_000),
            num_prompt_tokens=7,
            num_output_tokens=2,
            max_tokens=2,
        )
        identity = {
            name: getattr(RESULT, name)
            for name in ("comparison", "system", "product", "repetition", "in_flight", "seed", "client_cores")
        }
        result = RunResult.of(
            summarize([record]), **identity, versions=RESULT.versions, settings=RESULT.settings, machine=RESULT.machine
        )
        assert (result.output_tokens_per_s, result.input_tokens_per_s) == (1.0, 3.5)
        assert (result.ttft_p50_ms, result.tpot_p50_ms, result.num_requests) == (1000.0, 1000.0, 1)


class TestRequirements:
    WANTED = (
        "regex",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        'torchvision; platform_machine != "riscv64"',
        "torchaudio",
        "torchcodec>=0.14",
        "torchcodec==0.14",
        "torchcodec~=0.14; platform_machine == 'x86_64'",
        "torchvision<1",
        "torchaudio[all]",
        "torchaudio >=2",
        'torchao>=1; extra == "bench"',
        "zentorch==2.13.0.1; extra == 'zen'",
    )

    def test_pictures_and_sound_and_extras_are_left_out(self) -> None:
        assert kept_requirements(self.WANTED) == ["regex", 'torch==2.13.0+cpu; platform_machine == "x86_64"']

    def test_an_extra_comes_without_its_marker(self) -> None:
        assert kept_requirements(self.WANTED, extra="zen")[-1] == "zentorch==2.13.0.1"


def test_the_metadata_that_is_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dist_info(tmp_path, name="a-peer", version="0.32.0+cpu")
    write_dist_info(tmp_path, name="a-peer", version="0.32.0+cpu")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert importlib.metadata.version("a-peer") == "0.32.0+cpu"


class TestMachine:
    def test_this_one(self) -> None:
        machine = Machine.this()
        assert machine.num_cores >= 1
        assert machine.memory_gib >= 1
        assert machine.cpu_model
        assert machine.instruction_set

    @pytest.mark.parametrize(
        ("vendor", "flags", "expected"),
        [
            ("AuthenticAMD", ("avx2", "avx512f"), True),
            ("AuthenticAMD", ("avx2",), False),
            ("GenuineIntel", ("avx2", "avx512f"), False),
        ],
    )
    def test_who_has_a_plugin_of_vllm(self, vendor: str, flags: tuple[str, ...], expected: bool) -> None:
        assert Machine(vendor, "x", flags, 2, 8).is_zen_with_avx512 is expected


class TestSystems:
    TRACE = (TraceRequest((1, 2, 3), 2),)

    def record(self, *line: Any) -> RequestRecord:
        return systems.record_of(json.loads(json.dumps(line)), self.TRACE)

    def test_a_line_of_the_driver_becomes_a_record(self) -> None:
        record = self.record(0, 1_000_000, [2_000_000, 5_000_000], 2)
        assert (record.ttft_ms, record.e2e_ms, record.tpot_ms) == (1.0, 4.0, 3.0)
        assert (record.num_prompt_tokens, record.max_tokens) == (3, 2)

    def test_a_run_counts_only_whole(self) -> None:
        whole = self.record(0, 0, [1, 2], 2)
        systems.check_whole("x", [whole])
        with pytest.raises(OrcaError, match="x: request 0 has 1 output tokens of 2"):
            systems.check_whole("x", [replace(whole, num_output_tokens=1)])
        with pytest.raises(OrcaError, match="x: request 0 failed: no"):
            systems.check_whole("x", [replace(whole, outcome=Outcome.FAILED, error="no")])

    def test_settings_of_others_do_not_reach_a_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ORCA_THREADS", "OMP_NUM_THREADS", "VLLM_X", "LD_PRELOAD"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("ORCA_HOME", "somewhere")
        environment = systems.clean_environment()
        assert environment["ORCA_HOME"] == "somewhere"
        assert not environment.keys() & {"ORCA_THREADS", "OMP_NUM_THREADS", "VLLM_X", "LD_PRELOAD"}

    async def test_a_driver_that_does_not_end_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\nexec tail -f /dev/null\n", encoding="utf-8")
        python.chmod(0o755)
        monkeypatch.setattr(systems, "_RUN_S", 0.2)
        openvino = systems.OpenVino("a peer", "a product", {}, {}, python, tmp_path / "model")
        with pytest.raises(UnavailableError, match=r"a peer was not done in 0\.2 s"):
            await openvino.measure(systems.Workload((), self.TRACE, 1))
        await openvino.close()


class TestWorkload:
    def test_all_systems_get_the_same_and_none_of_it_before(self) -> None:
        work, again = (peers.workload(16, 48, seed=3) for _ in range(2))
        assert work == again
        assert (len(work.trace), len(work.warmup)) == (48, 8)
        assert not {request.prompt for request in work.warmup} & {request.prompt for request in work.trace}


class TestExport:
    def test_a_folder_has_the_weights_of_the_file(self, tmp_path: Path) -> None:
        source = resolve(DEFAULT_MODEL)
        assert isinstance(source, GgufFile)
        hf_export.export_bfloat16(source.path, tmp_path / "model")
        config = ModelConfig.from_hf_folder(tmp_path / "model")
        expected = ModelConfig.from_gguf(source.path)
        assert replace(config, architecture="llama", dtype=expected.dtype) == expected
        shapes = hf_export.parameter_shapes(expected)
        weights = GgufWeights(source.path, expected)
        with safe_open(tmp_path / "model" / "model.safetensors", "pt") as tensors:
            assert set(tensors.keys()) == {f"model.{name}" for name in shapes}
            for name in ("norm.weight", "layers.3.self_attn.q_proj.weight", "layers.29.mlp.down_proj.weight"):
                shape = shapes[name]
                columns = range(shape[1]) if len(shape) == 2 else None
                wanted = weights.read(name, shape, range(shape[0]), columns).to(torch.bfloat16)
                assert torch.equal(tensors.get_tensor(f"model.{name}"), wanted)

    def test_other_models_are_refused(self) -> None:
        with pytest.raises(ModelError, match="only plain Llamas"):
            hf_export.parameter_shapes(ModelConfig.from_shape("gpt2"))


class FakeSystem:
    """Answers everything at once, and writes down what it was given."""

    versions: Mapping[str, str] = {"fake": "1"}
    settings: Mapping[str, Any] = {}

    def __init__(
        self, name: str, log: list[tuple[str, int]], *, fails: bool = False, client_cpu_s: float | None = None
    ) -> None:
        self.name = name
        self.product = name
        self._log = log
        self._fails = fails
        self._client_cpu_s = client_cpu_s

    async def measure(self, workload: systems.Workload) -> systems.Measurement:
        self._log.append((self.name, workload.in_flight))
        if self._fails:
            raise OrcaError("it cannot")
        records = [
            systems.record_of([index, 0, list(range(1, request.max_tokens + 1)), request.max_tokens], workload.trace)
            for index, request in enumerate(workload.trace)
        ]
        return systems.Measurement(records, self._client_cpu_s)

    async def close(self) -> None:
        self._log.append((self.name, 0))


class TestCompare:
    async def test_systems_take_turns_at_each_load_and_are_closed(self, tmp_path: Path) -> None:
        log: list[tuple[str, int]] = []
        both = [FakeSystem("a", log), FakeSystem("b", log)]
        path = tmp_path / "peers.jsonl"
        await peers.compare(both, Machine.this(), {1: 2, 16: 3}, 2, seed=0, path=path)
        assert log == [("a", 1), ("b", 1), ("a", 16), ("b", 16)] * 2 + [("b", 0), ("a", 0)]
        written = read(path)
        assert [(run.repetition, run.in_flight, run.system) for run in written[:4]] == [
            (1, 1, "a"),
            (1, 1, "b"),
            (1, 16, "a"),
            (1, 16, "b"),
        ]
        assert [run.num_requests for run in written] == [2, 2, 3, 3] * 2
        assert latest(written) == written

    async def test_the_client_s_cores_are_those_of_the_run_where_there_is_a_client(self, tmp_path: Path) -> None:
        both = [FakeSystem("a", [], client_cpu_s=3e-7), FakeSystem("b", [])]
        path = tmp_path / "peers.jsonl"
        await peers.compare(both, Machine.this(), {1: 2}, 1, seed=0, path=path)
        with_client, without = read(path)
        assert with_client.client_cores
        assert without.client_cores is None

    async def test_one_that_fails_ends_it_and_what_was_measured_stays(self, tmp_path: Path) -> None:
        log: list[tuple[str, int]] = []
        both = [FakeSystem("a", log), FakeSystem("b", log, fails=True)]
        path = tmp_path / "peers.jsonl"
        with pytest.raises(OrcaError, match="it cannot"):
            await peers.compare(both, Machine.this(), {1: 2}, 1, seed=0, path=path)
        assert log[-2:] == [("b", 0), ("a", 0)]
        assert [run.system for run in read(path)] == ["a"]


class TestArguments:
    @pytest.mark.parametrize(
        ("given", "requests"),
        [
            ([], {1: 12, 16: 48, 64: 128}),
            (["--concurrency", "16", "32"], {16: 48, 32: 64}),
            (["--concurrency", "1", "4", "--requests", "5", "6"], {1: 5, 4: 6}),
        ],
    )
    def test_requests_by_load(
        self, monkeypatch: pytest.MonkeyPatch, given: list[str], requests: dict[int, int]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["peers", *given])
        assert peers.arguments().requests == requests

    @pytest.mark.parametrize("given", [["--requests", "3"], ["--repetitions", "0"], ["--concurrency", "0"]])
    def test_what_makes_no_sense_is_refused(self, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["peers", *given])
        with pytest.raises(SystemExit, match="2"):
            peers.arguments()
