from __future__ import annotations

from services.worker.timeline import MAX_STEPS, Timeline
from shared.ids import StepId
from shared.messages import StepTiming


def timing(step_id: int) -> StepTiming:
    return StepTiming(StepId(step_id), step_id, step_id + 1, step_id + 2, 1, 1)


def test_latest_steps_oldest_first() -> None:
    timeline = Timeline()
    assert timeline.latest() == []
    for step_id in range(5):
        timeline.add(timing(step_id))
    assert timeline.latest() == [timing(step_id) for step_id in range(5)]
    assert timeline.latest(2) == [timing(3), timing(4)]
    assert timeline.latest(9) == timeline.latest()


def test_old_steps_make_room() -> None:
    timeline = Timeline()
    for step_id in range(MAX_STEPS + 3):
        timeline.add(timing(step_id))
    kept = timeline.latest()
    assert (len(kept), kept[0].step_id, kept[-1].step_id) == (MAX_STEPS, 3, MAX_STEPS + 2)


def test_what_is_new_since_a_step() -> None:
    timeline = Timeline()
    for step_id in range(10):
        timeline.add(timing(step_id))
    assert timeline.latest(after=StepId(6)) == [timing(step_id) for step_id in (7, 8, 9)]
    assert timeline.latest(2, after=StepId(6)) == [timing(8), timing(9)]
    assert timeline.latest(after=StepId(9)) == []
