"""Identifiers, each a type of its own so that one is never taken for another."""

from __future__ import annotations

from typing import NewType

__all__ = ["BlockId", "Epoch", "Handle", "RequestId", "Row", "StepId"]

RequestId = NewType("RequestId", str)
"""Name of a request in logs, metadata and traces; chosen by the client or the gateway."""

Handle = NewType("Handle", int)
"""Number of a request within one gateway's session."""

Epoch = NewType("Epoch", int)
"""Counts the process groups that the workers have joined; everything of an older epoch is void."""

StepId = NewType("StepId", int)
"""Number of an iteration within an epoch, counted from 0 without gaps."""

Row = NewType("Row", int)
"""Row of the workers' sequence tables; reused after its release."""

BlockId = NewType("BlockId", int)
"""Physical K/V block, the same number on every rank."""
