"""What the scheduler exposes to Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from structlog.testing import capture_logs

from shared.config import ListenConfig, ObservabilityConfig
from shared.ids import Handle
from shared.messages import Cancel, FinishReason
from tests.exposition import OPENMETRICS, Exposition, faults, metrics_url, scrape
from tests.factories import make_submit
from tests.fakes.scripted_workers import ScriptedWorker

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    StartScheduler = Callable[..., contextlib.AbstractAsyncContextManager["SchedulerUnderTest"]]
    from tests.service.scheduler.conftest import SchedulerUnderTest


def in_flight(found: Exposition) -> float:
    return found.value("orca_num_requests_running") + found.value("orca_num_requests_waiting")


async def test_sequences_and_iterations(start_scheduler: StartScheduler) -> None:
    with capture_logs() as logs:
        async with start_scheduler(observability=ObservabilityConfig(ListenConfig(port=0))) as scheduler:
            url = metrics_url(logs)
            found = await scrape(url)
            assert found.value("orca_engine_ready") == 0
            assert found.value("orca_workers", state="missing") == 1
            worker = ScriptedWorker()
            await worker.start()
            async with worker.registered(scheduler.address), scheduler.session() as session:
                await session.next()
                await session.send(make_submit(1, prompt=4, max_tokens=2))
                await session.send(make_submit(2, prompt=4, max_tokens=9))
                await session.send(make_submit(3, prompt=999, max_tokens=1))
                assert (await session.until_ended(3)).reason is FinishReason.ERROR
                while 1 not in session.ended:
                    worker.answer(await worker.plans.get(), 7)
                    await session.next()

                found = await scrape(url, OPENMETRICS)
                assert not faults(found)
                assert found.value("orca_engine_ready") == 1
                assert found.value("orca_workers", state="ready") == 1
                assert found.value("orca_epochs_total") == 1
                assert found.value("orca_sequences_submitted_total") == 3
                assert found.value("orca_sequences_ended_total", reason="length", code="OK") == 1
                assert found.value("orca_sequences_ended_total", reason="refused", code="INVALID_ARGUMENT") == 1
                assert in_flight(found) == 1
                assert found.value("orca_iteration_duration_seconds_count") >= 2
                assert found.value("orca_kv_cache_usage_ratio") > 0
                ((engine, _),) = found.values("orca_engine_info")
                assert engine == {"model": "test-model", "dtype": "float32", "num_stages": "1", "tp_size": "1"}

                await session.send(Cancel(Handle(2)))
                await session.until_ended(2)
                found = await scrape(url)
                assert found.value("orca_sequences_ended_total", reason="cancelled", code="CANCELLED") == 1
                assert found.total("orca_sequences_ended_total") == 3
                assert in_flight(found) == 0
            await worker.kill()
