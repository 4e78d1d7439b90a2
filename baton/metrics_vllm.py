"""The numbers of a service under vLLM's names, for the routers, scalers and boards that read those.

Owns the table of aliases and the collector that shows them. Nothing is measured twice: an alias is
read from the families it stands for when the metrics are shown. docs/observability.md says where a
meaning differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.metrics import Metrics
from baton.metrics_families import Kind
from baton.metrics_table import FAMILIES

ENGINE: Final = "0"
"""vLLM numbers the engines of one process; we have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A name of vLLM's. `sources`: by service, the families whose numbers add up to it.

    `labels`: theirs by ours; other labels are summed over. Counters are shown with `_total`.
    """

    name: str
    kind: Kind
    help_text: str
    sources: Mapping[str, tuple[str, ...]]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown_name(self) -> str:
        """The name in the exposition."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


_NOW, _SUM, _BUCKETS = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM


def _alias(
    name: str,
    kind: Kind,
    help_text: str,
    labels: Mapping[str, str] | None = None,
    **sources: tuple[str, ...],
) -> Alias:
    return Alias(name=name, kind=kind, help_text=help_text, sources=sources, labels=labels or {})


ALIASES: Final = (
    _alias(
        "vllm:num_requests_running", _NOW, "Requests under way.",
        gateway=("baton_requests_in_flight",),
        prefill=("baton_prefill_running_requests",),
        decode=("baton_decode_active_sequences",),
    ),
    _alias(
        "vllm:num_requests_waiting", _NOW, "Requests that wait to be computed.",
        gateway=("baton_requests_waiting",),
        prefill=("baton_prefill_waiting_requests",),
        decode=("baton_decode_reserved_slots",),
    ),
    _alias(
        "vllm:kv_cache_usage_perc", _NOW, "Used part of the KV cache; 1 is all of it.",
        gateway=("baton_kv_cache_usage",),
        prefill=("baton_worker_kv_cache_usage",),
        decode=("baton_worker_kv_cache_usage",),
    ),
    _alias(
        "vllm:cache_config_info", _NOW, "1, with block size and number as labels.",
        {"block_tokens": "block_size", "pages": "num_gpu_blocks"},
        prefill=("baton_worker_arena_info",),
        decode=("baton_worker_arena_info",),
    ),
    _alias(
        "vllm:time_to_first_token_seconds", _BUCKETS, "Time to first token.",
        gateway=("baton_time_to_first_token_seconds",),
    ),
    _alias(
        "vllm:e2e_request_latency_seconds", _BUCKETS, "From receipt to the last byte.",
        gateway=("baton_e2e_request_latency_seconds",),
    ),
    _alias(
        "vllm:time_per_output_token_seconds", _BUCKETS, "Mean time between tokens of an answer.",
        gateway=("baton_request_time_per_output_token_seconds",),
        decode=("baton_inter_token_latency_seconds",),
    ),
    _alias(
        "vllm:request_time_per_output_token_seconds", _BUCKETS,
        "Mean time between tokens of an answer.",
        gateway=("baton_request_time_per_output_token_seconds",),
    ),
    _alias(
        "vllm:inter_token_latency_seconds", _BUCKETS, "Time between two tokens of a sequence.",
        decode=("baton_inter_token_latency_seconds",),
    ),
    _alias(
        "vllm:request_queue_time_seconds", _BUCKETS, "Waiting before computation.",
        gateway=("baton_request_queue_time_seconds",),
        prefill=("baton_prefill_queue_wait_seconds",),
    ),
    _alias(
        "vllm:request_prefill_time_seconds", _BUCKETS, "Prefill of a request.",
        gateway=("baton_request_prefill_time_seconds",),
        prefill=("baton_prefill_compute_seconds",),
    ),
    _alias(
        "vllm:request_decode_time_seconds", _BUCKETS, "Decode of a request.",
        gateway=("baton_request_decode_time_seconds",),
    ),
    _alias(
        "vllm:request_prompt_tokens", _BUCKETS, "Prompt tokens of a request.",
        gateway=("baton_request_prompt_tokens",),
    ),
    _alias(
        "vllm:request_generation_tokens", _BUCKETS, "Output tokens of a request.",
        gateway=("baton_request_output_tokens",),
    ),
    _alias(
        "vllm:iteration_tokens_total", _BUCKETS, "Tokens of one step.",
        decode=("baton_decode_step_tokens",),
    ),
    _alias(
        "vllm:prompt_tokens", _SUM, "Prompt tokens, found and computed.",
        gateway=("baton_prompt_tokens",),
        prefill=("baton_prefill_computed_tokens", "baton_prefill_hit_tokens"),
    ),
    _alias(
        "vllm:generation_tokens", _SUM, "Output tokens.",
        gateway=("baton_output_tokens",),
        decode=("baton_decode_output_tokens",),
    ),
    _alias(
        "vllm:request_success", _SUM, "Finished answers.", {"finish_reason": "finished_reason"},
        gateway=("baton_answers",),
    ),
    _alias(
        "vllm:prefix_cache_queries", _SUM, "Prompt tokens looked for in the cache.",
        gateway=("baton_prompt_tokens",),
        prefill=("baton_prefill_computed_tokens", "baton_prefill_hit_tokens"),
    ),
    _alias(
        "vllm:prefix_cache_hits", _SUM, "Prompt tokens found in the cache.",
        gateway=("baton_cached_prompt_tokens",),
        prefill=("baton_prefill_hit_tokens",),
    ),
    _alias(
        "vllm:num_preemptions", _SUM, "Sequences ended for want of a page.",
        decode=("baton_decode_preemptions",),
    ),
)  # fmt: skip


def aliases_of(service: str) -> tuple[Alias, ...]:
    """What one service shows."""
    return tuple(alias for alias in ALIASES if service in alias.sources)


class VllmNames(Collector):
    """Shows a service's aliases, labelled with the model's name as vLLM does."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._registry = metrics.registry
        self._service = metrics.service
        self._fixed = {"model_name": model_name, "engine": ENGINE}

    def describe(self) -> Iterator[Metric]:
        """The names, so that none is taken twice."""
        for alias in aliases_of(self._service):
            yield Metric(alias.name, alias.help_text, alias.kind.value)

    def collect(self) -> Iterator[Metric]:
        """Each alias with the numbers of now."""
        for alias in aliases_of(self._service):
            yield self._shown(alias)

    def _shown(self, alias: Alias) -> Metric:
        metric = Metric(alias.name, alias.help_text, alias.kind.value)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for source in alias.sources[self._service]:
            for name, labels, value in self._samples(source):
                kept = [(theirs, labels[ours]) for ours, theirs in alias.labels.items()]
                if "le" in labels:
                    kept.append(("le", labels["le"]))
                key = (alias.name + name.removeprefix(source), tuple(kept))
                sums[key] = sums.get(key, 0.0) + value
        for (name, kept_labels), value in sums.items():
            metric.add_sample(name, {**self._fixed, **dict(kept_labels)}, value)
        return metric

    def _samples(self, source: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
        shown = FAMILIES[source].shown_name
        # Asked for by name, so that this collector is not among those that answer.
        for family in self._registry.restricted_registry(
            [shown, f"{shown}_bucket", f"{shown}_sum", f"{shown}_count"]
        ).collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    yield sample.name, sample.labels, sample.value


def show_vllm_names(metrics: Metrics, model_name: str) -> None:
    """Adds the aliases to what the service shows; its families must be there already."""
    metrics.collect(VllmNames(metrics, model_name))
