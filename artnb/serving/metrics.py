"""Prometheus metrics of one endpoint: the engine's counters, and requests and latencies seen by the app."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engines.base import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class EndpointMetrics:
    """Its own registry, so that several endpoints live in one process."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "artnb_requests", "Chat completion requests that ended, by HTTP status", ["status"], registry=self.registry
        )
        self.in_flight = Gauge("artnb_requests_in_flight", "Requests that are being answered", registry=self.registry)
        self.seconds = Histogram(
            "artnb_request_seconds", "From request to last byte", registry=self.registry, buckets=_LATENCY_BUCKETS
        )
        self.registry.register(_EngineCollector(engine))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads engine.stats() when it is asked, so that the engine knows nothing of Prometheus."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        awake = self._engine.state == "awake"
        yield GaugeMetricFamily("artnb_engine_awake", "1 while the engine samples", value=float(awake))
        yield GaugeMetricFamily("artnb_engine_running", "Requests that are sampled", value=stats.running)
        yield GaugeMetricFamily("artnb_engine_waiting", "Requests that wait", value=stats.waiting)
        yield CounterMetricFamily("artnb_prompt_tokens", "Prompt tokens", value=stats.prompt_tokens)
        yield CounterMetricFamily(
            "artnb_cached_prompt_tokens", "Prompt tokens whose prefill was skipped", value=stats.cached_prompt_tokens
        )
        yield CounterMetricFamily("artnb_generated_tokens", "Sampled tokens", value=stats.generated_tokens)
        yield CounterMetricFamily("artnb_engine_requests", "Requests the engine took", value=stats.requests)
        yield CounterMetricFamily(
            "artnb_forward_seconds", "Seconds in the model's forward passes", value=stats.forward_seconds
        )
        for name, value in stats.extra.items():
            yield GaugeMetricFamily(f"artnb_engine_{name}", f"The engine's own {name}", value=value)
