"""A closed loop on OpenVINO GenAI's continuous batching, in its own process: run by OpenVINO's Python, not by ours.

Reads a job as JSON from standard input::

    {"model": <.gguf>, "kv_gib": 2, "max_batch_tokens": 0, "properties": {}, "in_flight": 16,
     "warmup": [[ids, max_tokens], …], "trace": […]}

and prints one JSON list for each request of the trace: ``[index, sent_ns, event_times_ns, num_output_tokens]``, times
by the host's monotonic clock. There is no server and no network between: the loop adds a request, lets the pipeline
step, and reads what came.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def run(pipeline: Any, trace: list[Any], in_flight: int) -> list[tuple[int, int, list[int], int]]:
    """Send the requests with at most ``in_flight`` at a time; greedy, and to their full length."""
    running: dict[int, Any] = {}
    sent_ns: list[int] = []
    event_times_ns: list[list[int]] = [[] for _ in trace]
    num_tokens = [0] * len(trace)
    while len(sent_ns) < len(trace) or running:
        while len(sent_ns) < len(trace) and len(running) < in_flight:
            index = len(sent_ns)
            ids, max_tokens = trace[index]
            config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
            sent_ns.append(time.monotonic_ns())
            prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
            running[index] = pipeline.add_request(index, prompt, config)
        pipeline.step()
        now_ns = time.monotonic_ns()
        for index, handle in list(running.items()):
            while handle.can_read():
                num_tokens[index] += sum(len(output.generated_ids) for output in handle.read().values())
                event_times_ns[index].append(now_ns)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[index]
    return list(zip(range(len(trace)), sent_ns, event_times_ns, num_tokens, strict=True))


def main() -> None:
    """Do the job."""
    job = json.load(sys.stdin)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = job["kv_gib"]
    scheduler.enable_prefix_caching = False
    if job["max_batch_tokens"]:
        scheduler.max_num_batched_tokens = job["max_batch_tokens"]
    pipeline = genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", job["properties"])
    run(pipeline, job["warmup"], job["in_flight"])
    for record in run(pipeline, job["trace"], job["in_flight"]):
        print(json.dumps(record))


if __name__ == "__main__":
    main()
