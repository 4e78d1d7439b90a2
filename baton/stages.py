"""The stages of a request: their names, which of them make up the time to the first token.

Owns the words of `stage_seconds` in answers, metrics and traces; docs/observability.md explains
each. Stages of the time to the first token follow each other and never overlap: what a worker does
beside its computation is not counted twice.
"""

from __future__ import annotations

from typing import Final

RECEIVE: Final = "receive"
TOKENISE: Final = "tokenise"
ADMISSION_WAIT: Final = "admission_wait"
FAILED_ATTEMPTS: Final = "failed_attempts"
ROUTE: Final = "route"
SPLICE: Final = "splice"
OPEN: Final = "open"
PREFILL_RPC: Final = "prefill_rpc"
LOG_REPLAY: Final = "log_replay"
REQUEST_QUEUE_WAIT: Final = "request_queue_wait"
PREFILL_COMPUTE: Final = "prefill_compute"
KV_PACK: Final = "kv_pack"
FIRST_TOKEN_SAMPLE: Final = "first_token_sample"
SEAL: Final = "seal"
FIRST_TOKEN_EMIT: Final = "first_token_emit"

KV_TRANSFER: Final = "kv_transfer"
KV_UNPACK: Final = "kv_unpack"
DECODE_QUEUE_WAIT: Final = "decode_queue_wait"
PER_TOKEN_DECODE: Final = "per_token_decode"

FIRST_TOKEN_STAGES: Final = (
    RECEIVE,
    TOKENISE,
    ADMISSION_WAIT,
    FAILED_ATTEMPTS,
    ROUTE,
    SPLICE,
    OPEN,
    PREFILL_RPC,
    LOG_REPLAY,
    REQUEST_QUEUE_WAIT,
    PREFILL_COMPUTE,
    KV_PACK,
    FIRST_TOKEN_SAMPLE,
    SEAL,
    FIRST_TOKEN_EMIT,
)
"""They add up to the time to the first token."""

LATER_STAGES: Final = (KV_TRANSFER, KV_UNPACK, DECODE_QUEUE_WAIT, PER_TOKEN_DECODE)
"""The hand-off, and the mean time of each token after the first."""

STAGES: Final = (*FIRST_TOKEN_STAGES, *LATER_STAGES)
