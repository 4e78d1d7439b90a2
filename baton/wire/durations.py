"""Durations and timestamps: seconds as float inside, messages on the wire.

Owns the conversion and its bounds. Never reads a clock.
"""

from __future__ import annotations

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def duration_to_proto(seconds: float) -> Duration:
    """Seconds as a Duration; negative and non-finite values are our bugs."""
    assert math.isfinite(seconds), seconds
    assert seconds >= 0.0, seconds
    whole = math.floor(seconds)
    return Duration(seconds=whole, nanos=min(999_999_999, int((seconds - whole) * 1e9)))


def duration_from_proto(message: Duration) -> float:
    """A Duration as seconds."""
    return float(message.seconds + message.nanos / 1e9)


def timestamp_to_proto(wall_s: float) -> Timestamp:
    """Seconds since the epoch as a Timestamp."""
    whole = math.floor(wall_s)
    return Timestamp(seconds=whole, nanos=min(999_999_999, int((wall_s - whole) * 1e9)))


def timestamp_from_proto(message: Timestamp) -> float:
    """A Timestamp as seconds since the epoch."""
    return float(message.seconds + message.nanos / 1e9)
