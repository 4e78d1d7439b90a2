"""One table of metrics: services show what stands in it, rules use what is in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from baton.errors import Reason
from baton.metrics import Metrics
from baton.metrics_families import HAND_OFF_STATES, OUTCOMES, SERVICES, Kind
from baton.metrics_table import FAMILIES, counter, counter_following, families_of, gauge, histogram
from baton.metrics_vllm import ALIASES, aliases_of, show_vllm_names
from baton.stages import STAGES
from services.decode.measures import DecodeMeasures
from services.gateway.events import FinishReason, KvSource, ServingMode
from services.gateway.handoffs import STATES, HandOffs
from services.gateway.hub import WorkerHub
from services.gateway.measures import GatewayMeasures
from services.gateway.planner import Planner, PlanRules
from services.gateway.policy import PrefillMode
from services.gateway.redis_measures import RedisMeasures
from services.gateway.registry import Registry, WorkerRole
from services.merger.measures import MergerMeasures
from services.prefill.measures import PrefillMeasures
from tests.unit.observability.expressions import metric_names

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def gateway_metrics() -> Metrics:
    from baton.testing.clock import ManualClock

    metrics = Metrics("gateway")
    measures = GatewayMeasures(metrics)
    measures.follow_running(lambda: 2.0, lambda: 0.0)
    measures.follow_handoffs(HandOffs())
    hub = WorkerHub(Registry(), ManualClock())
    measures.follow_workers(hub)
    rules = PlanRules(mode=PrefillMode.AUTO, tokenizer_hash=bytes(8))
    measures.follow_mismatched(Planner(hub, rules))
    RedisMeasures(metrics)
    return metrics


def test_names_follow_the_convention() -> None:
    """Our own prefix, base units last, no colon: that is for recorded names."""
    for family in FAMILIES.values():
        assert re.fullmatch(r"(baton|grpc_server)_[a-z0-9_]+", family.name), family
        assert not family.name.endswith("_total"), family
        assert family.help_text.endswith("."), family
        assert set(family.services) <= set(SERVICES), family
        if family.kind is Kind.HISTOGRAM:
            assert list(family.buckets) == sorted(set(family.buckets)), family


def test_the_tables_values_are_those_of_the_code() -> None:
    """A label value that the table does not know would first show when it happens."""
    labels = {label.name: label.values for label in FAMILIES["baton_answers"].labels}
    assert set(labels["mode"]) == {mode.value for mode in ServingMode}
    assert set(labels["kv_source"]) == {source.value for source in KvSource}
    assert set(labels["finish_reason"]) == {FinishReason.STOP.value, FinishReason.LENGTH.value}
    assert set(HAND_OFF_STATES) == set(STATES)
    roles = next(one for one in FAMILIES["baton_workers"].labels if one.name == "role").values
    assert set(roles) == {role.value for role in WorkerRole}
    reasons = FAMILIES["baton_request_errors"].labels[0].values
    assert set(reasons) == {reason.value for reason in Reason}
    assert FAMILIES["baton_stage_seconds"].labels[0].values == STAGES


def test_only_a_service_that_exports_a_family_gets_it() -> None:
    """A name in the wrong service, or with the wrong kind, is our own bug."""
    with pytest.raises(AssertionError):
        counter(Metrics("merger"), "baton_requests")
    with pytest.raises(AssertionError):
        gauge(Metrics("gateway"), "baton_requests")
    with pytest.raises(KeyError):
        histogram(Metrics("gateway"), "baton_invented_seconds")


def test_every_family_of_a_service_is_there_before_its_first_use() -> None:
    """A rate over the first failure needs the zero before it."""
    shown = {
        "gateway": gateway_metrics(),
        "prefill": Metrics("prefill"),
        "decode": Metrics("decode"),
        "merger": Metrics("merger"),
    }
    PrefillMeasures(shown["prefill"])
    DecodeMeasures(shown["decode"])
    MergerMeasures(shown["merger"])
    elsewhere = {"baton_worker_held_logs", "baton_worker_kv_cache_usage", "baton_worker_arena_info",
                 "baton_prefill_free_pages", "baton_worker_golden_checks",
                 "baton_worker_golden_distance", "baton_worker_degraded",
                 "baton_decode_gap_seconds", "baton_decode_local_prefill_rest_ratio",
                 "grpc_server_call_started",
                 "grpc_server_call_duration_seconds"}  # fmt: skip
    for service, metrics in shown.items():
        found = {metric.name for metric in metrics.registry.collect()}
        missing = {family.name for family in families_of(service)} - found
        assert missing <= elsewhere, (service, missing)
    for outcome in OUTCOMES:
        labels = {"outcome": outcome, "route": "chat"}
        assert value(shown["gateway"], "baton_requests_total", **labels) == 0.0


def test_a_followed_counter_shows_what_its_owner_counts() -> None:
    """The store and the hand-offs keep their own numbers: nothing is counted twice."""
    metrics, handoffs = Metrics("gateway"), HandOffs()
    reads = {state: (lambda state=state: handoffs.count(state)) for state in STATES}
    counter_following(metrics, "baton_handoffs", reads)
    with handoffs.begun() as one:
        one.received()
    assert value(metrics, "baton_handoffs_total", state="received") == 1.0
    assert value(metrics, "baton_handoffs_total", state="failed") == 0.0


def test_aliases_show_the_same_numbers_under_vllms_names() -> None:
    """A router made for vLLM reads them without configuration."""
    metrics = gateway_metrics()
    show_vllm_names(metrics, "m")
    answers = {"mode": "aggregated", "kv_source": "local", "finish_reason": "stop"}
    text = metrics.exposition().decode()
    assert "# TYPE vllm:request_success_total counter" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    named = {"model_name": "m", "engine": "0"}
    assert value(metrics, "vllm:num_requests_running", **named) == 2.0
    assert value(metrics, "vllm:request_success_total", finished_reason="stop", **named) == 0.0
    assert value(metrics, "vllm:time_to_first_token_seconds_count", **named) == 0.0
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.001", **named) == 0.0
    assert value(metrics, "baton_answers_total", **answers) == 0.0


def test_an_alias_sums_over_the_labels_it_does_not_have() -> None:
    """vLLM has no outcome label: its histogram holds all requests."""
    metrics = gateway_metrics()
    show_vllm_names(metrics, "m")
    ttft: Any = metrics.registry._names_to_collectors["baton_time_to_first_token_seconds"]
    for outcome in ("ok", "failed"):
        ttft.labels(outcome).observe(0.003)
    named = {"model_name": "m", "engine": "0"}
    assert value(metrics, "vllm:time_to_first_token_seconds_count", **named) == 2.0
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.005", **named) == 2.0
    assert value(metrics, "vllm:time_to_first_token_seconds_sum", **named) == pytest.approx(0.006)


def test_every_alias_stands_on_families_of_the_table() -> None:
    """An alias of nothing would show nothing, silently."""
    for alias in ALIASES:
        for service, sources in alias.sources.items():
            for source in sources:
                family = FAMILIES[source]
                assert service in family.services, (alias, source)
                assert family.kind is alias.kind, (alias, source)
                names = {label.name for label in family.labels}
                assert set(alias.labels) <= names, (alias, source)
    shown = {alias.name for service in SERVICES for alias in aliases_of(service)}
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
            "vllm:num_preemptions", "vllm:inter_token_latency_seconds"} <= shown  # fmt: skip


def test_openmetrics_names_the_trace_of_a_slow_request() -> None:
    """From a bar in a chart to the trace behind it."""
    from baton.tracing import new_trace, request_scope

    metrics = Metrics("gateway")
    ttft = histogram(metrics, "baton_time_to_first_token_seconds")
    trace = new_trace()
    with request_scope("r", trace):
        ttft.observe(0.3, outcome="ok")
    text, kind = metrics.negotiated("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert f'trace_id="{trace.trace_id}"' in text.decode()
    plain, kind = metrics.negotiated("text/plain")
    assert kind.startswith("text/plain")
    assert trace.trace_id not in plain.decode()


def test_openmetrics_own_parser_reads_the_whole_page() -> None:
    """Aliases and followed counters are shown by collectors of ours: the form must hold too."""
    metrics = gateway_metrics()
    show_vllm_names(metrics, "m")
    text, _kind = metrics.negotiated("application/openmetrics-text")
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"vllm:request_success", "baton_handoffs", "baton_stage_seconds"} <= names


def rule_expressions() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule.get("record") or rule["alert"]: rule["expr"] for rule in rules}


def test_rules_use_only_metrics_that_exist() -> None:
    """A rule over a name that nobody exports never fires."""
    shown: set[str] = set()
    for family in FAMILIES.values():
        shown.add(family.shown_name)
        if family.kind is Kind.HISTOGRAM:
            shown |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    expressions = rule_expressions()
    recorded = {name for name in expressions if ":" in name}
    used = {name for expression in expressions.values() for name in metric_names(expression)}
    assert used <= shown | recorded, used - shown - recorded
    assert recorded <= set(expressions)


def test_the_reader_of_expressions_finds_names_and_nothing_else() -> None:
    """The test above rests on it."""
    text = 'sum by (le) (rate(a_bucket{x="b_c", y=~"d|e"}[5m])) / on (i) clamp_min(f:g:sum, 1e-9)'
    assert metric_names(text) == {"a_bucket", "f:g:sum"}


def test_promtool_accepts_the_rules() -> None:
    """Prometheus itself reads them as we mean them."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("SKIPPED: promtool is not installed (Debian package prometheus)")
    checked = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout
