"""Metrics exist before their first use, and their labels stay few."""

from __future__ import annotations

import grpc
import httpx
import pytest

from baton.errors import StartupError
from baton.http_server import HttpServer
from baton.lifecycle import Service
from baton.metrics import OTHER, TIME_TO_FIRST_TOKEN_BUCKETS, Label, Metrics
from baton.metrics_server import metrics_application
from baton.rpc.measures import RpcMeasures
from tests.unit.core.rpc_fixtures import method, serving, unary


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_families_show_zero_before_their_first_event() -> None:
    """A rate over the first failure needs the zero before it."""
    metrics = Metrics("decode")
    metrics.counter("baton_retries", "Retries.")
    metrics.counter("baton_failures", "Failures.", labels=(Label("kind", ("crc", "timeout")),))
    metrics.histogram("baton_time_to_first_token_seconds", "TTFT.", buckets=(1.0, 2.0))
    assert _value(metrics, "baton_retries_total") == 0.0
    assert _value(metrics, "baton_failures_total", kind="crc") == 0.0
    assert _value(metrics, "baton_failures_total", kind="timeout") == 0.0
    assert _value(metrics, "baton_time_to_first_token_seconds_count") == 0.0
    assert _value(metrics, "baton_info", service="decode") == 1.0


def test_label_values_over_the_bound_become_other() -> None:
    """A tenant who invents values must not fill the memory of the metrics store."""
    metrics = Metrics("gateway")
    requests = metrics.counter("baton_requests", "Requests.", labels=(Label("m", values_max=2),))
    for name in ("a", "b", "c", "d", "a"):
        requests.add(m=name)
    assert _value(metrics, "baton_requests_total", m="a") == 2.0
    assert _value(metrics, "baton_requests_total", m="b") == 1.0
    assert _value(metrics, "baton_requests_total", m=OTHER) == 2.0
    assert _value(metrics, "baton_requests_total", m="c") is None


def test_gauges_and_histograms_record() -> None:
    """Each family does what its name says."""
    metrics = Metrics("kvstore")
    pages = metrics.gauge("baton_pages", "Pages.", labels=(Label("state"),))
    pages.set(5.0, state="free")
    pages.add(-2.0, state="free")
    pages.follow(lambda: 7.0, state="live")
    seconds = metrics.histogram("baton_s", "S.", buckets=TIME_TO_FIRST_TOKEN_BUCKETS)
    seconds.observe(0.03)
    assert _value(metrics, "baton_pages", state="free") == 3.0
    assert _value(metrics, "baton_pages", state="live") == 7.0
    assert _value(metrics, "baton_s_bucket", le="0.04") == 1.0
    assert _value(metrics, "baton_s_bucket", le="0.02") == 0.0


def test_a_wrong_label_is_our_own_bug() -> None:
    """A misspelt label must fail in the first test, not vanish."""
    counter = Metrics("x").counter("baton_c", "C.", labels=(Label("kind"),))
    with pytest.raises(AssertionError):
        counter.add(knd="a")


async def test_calls_are_counted_under_grpcs_own_names() -> None:
    """Dashboards made for gRPC read them as they are."""
    metrics = Metrics("decode")

    async def echo(request: bytes, context: object) -> bytes:
        return request

    async with serving(RpcMeasures(metrics, "server"), Echo=unary(echo)) as (_server, channel):
        await channel.unary_unary(method("Echo"))(b"x")
    name = method("Echo").removeprefix("/")
    assert _value(metrics, "grpc_server_call_started_total", grpc_method=name) == 1.0
    code = grpc.StatusCode.OK.name
    count = "grpc_server_call_duration_seconds_count"
    assert _value(metrics, count, grpc_method=name, grpc_status=code) == 1.0


def test_metrics_and_health_are_served_over_http() -> None:
    """The endpoint lives and dies with the service, and says 503 while it could not serve."""
    import asyncio

    seen: dict[str, tuple[int, str]] = {}
    metrics = Metrics("merger")

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            for path in ("/metrics", "/healthz", "/readyz", "/secrets"):
                answer = await client.get(url + path)
                key = path if path not in seen else f"{path} again"
                seen[key] = (answer.status_code, answer.text)

    async def main() -> None:
        service = Service("merger")

        async def wire(service: Service) -> None:
            application = metrics_application(metrics, lambda: service.is_ready)
            server = HttpServer(application, "127.0.0.1:0", service.spawn)
            await service.start("http", server)
            await ask(server.url)

            async def when_ready(is_ready: bool) -> None:
                if is_ready:
                    await ask(server.url)
                    service.request_stop()

            service.on_ready_changed(when_ready)

        await service.run(wire, has_signals=False)

    asyncio.run(main())
    assert seen["/metrics"][0] == 200
    assert 'baton_info{service="merger"} 1.0' in seen["/metrics"][1]
    assert seen["/healthz"][0] == 200
    assert seen["/readyz"][0] == 503
    assert seen["/readyz again"][0] == 200
    assert seen["/secrets"][0] == 404


async def test_http_binds_by_the_same_rules_as_grpc() -> None:
    """A taken port is named; beyond loopback needs the flag."""
    application = metrics_application(Metrics("x"), lambda: True)

    def spawn(name: str, work: object) -> None:
        raise AssertionError(name)

    first = HttpServer(application, "127.0.0.1:0", spawn)
    # SO_REUSEADDR lets two sockets bind until one of them listens.
    first._socket.listen()
    with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{first.port}"):
        HttpServer(application, f"127.0.0.1:{first.port}", spawn)
    with pytest.raises(StartupError, match="reachable from other hosts"):
        HttpServer(application, "0.0.0.0:0", spawn)  # refused is the point
    await first.stop()
