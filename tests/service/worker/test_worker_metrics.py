"""What a worker exposes to Prometheus."""

from __future__ import annotations

from structlog.testing import capture_logs

from shared.config import ListenConfig, ObservabilityConfig
from tests.exposition import OPENMETRICS, Exposition, faults, metrics_url, scrape
from tests.fakes.fake_worker_peers import FakeRegistry, RankClient, join_request, plan, running_worker, sequence

RANK = {"stage": "0", "tp_rank": "0"}


async def test_steps_and_memory_of_a_rank() -> None:
    with capture_logs() as logs:
        async with (
            FakeRegistry().serving() as registry,
            running_worker(registry, ObservabilityConfig(ListenConfig(port=0))) as claim,
            RankClient.connected(claim.address) as worker,
        ):
            url = metrics_url(logs)
            found = await scrape(url)
            assert found.value("orca_worker_in_epoch", **RANK) == 0
            await worker.join(join_request("synthetic:num_layers=4", block_size=16))
            control, results = worker.execute(), worker.results()
            await control.send(
                plan(0, (0, 0, 20), new_sequences=[sequence(0, range(20))], num_new_blocks=[2], new_block_ids=[3, 5])
            )
            token_id = (await results.next()).token_ids[0]
            await control.send(plan(1, (0, 20, 1), num_appended_tokens=[1], appended_token_ids=[token_id]))
            await results.next()

            found = await scrape(url, OPENMETRICS)
            assert not faults(found)
            assert found.value("orca_build_info", service="worker", **_build(found)) == 1
            assert found.value("orca_worker_in_epoch", **RANK) == 1
            assert found.value("orca_worker_kv_cache_bytes", **RANK) > 0
            assert found.value("orca_worker_steps_submitted_total", **RANK) == 2
            assert found.value("orca_worker_steps_computed_total", **RANK) == 2
            assert found.value("orca_worker_steps_pending", **RANK) == 0
            assert found.value("orca_worker_step_tokens_sum", **RANK) == 21
            assert found.value("orca_worker_step_duration_seconds_count", **RANK) == 2
            assert found.value("orca_worker_step_wait_seconds_sum", **RANK) >= 0

            # A second epoch takes the place of the first; what the steps of both add up to still balances.
            await worker.join(join_request("synthetic:num_layers=4", epoch=2, block_size=16))
            found = await scrape(url)
            assert found.value("orca_worker_in_epoch", **RANK) == 1
            assert found.value("orca_worker_steps_submitted_total", **RANK) == (
                found.value("orca_worker_steps_computed_total", **RANK)
                + found.value("orca_worker_steps_dropped_total", **RANK)
                + found.value("orca_worker_steps_pending", **RANK)
            )


def _build(found: Exposition) -> dict[str, str]:
    ((labels, _),) = found.values("orca_build_info")
    return {name: value for name, value in labels.items() if name != "service"}
