"""When requests of an open loop arrive: a Poisson process, or one that is more or less regular.

Knows nothing of requests and clocks.
"""

from __future__ import annotations

import random
from itertools import accumulate

from shared.errors import ConfigError

__all__ = ["poisson_arrivals"]


def poisson_arrivals(num_requests: int, *, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Return when each request arrives, in seconds after the start, in order; the first one at 0.

    ``rate`` is in requests per second. Gaps are gamma-distributed with the mean 1 / rate and the shape ``burstiness``:
    1 is a Poisson process, less comes in bursts, more is more regular.

    Raises:
        ConfigError: ``rate`` or ``burstiness`` is not a positive number.
    """
    if not 0 < rate < float("inf"):
        raise ConfigError(f"a request rate of {rate:g}: it is a positive number of requests per second")
    if not 0 < burstiness < float("inf"):
        raise ConfigError(f"a burstiness of {burstiness:g}: it is a positive number, 1 for a Poisson process")
    # A string as seed, so that the gaps do not repeat what a trace draws from the same number.
    rng = random.Random(f"arrivals/{seed}")
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num_requests - 1))
    return list(accumulate(gaps, initial=0.0))[:num_requests]
