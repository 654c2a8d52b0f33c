"""As much of a Langfuse server as its SDK sends to: spans by OTLP over HTTP, and scores.

Spans are decoded with OpenTelemetry's own protobuf messages. Keys are not checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from loopback_server import Answer, LoopbackServer, as_json
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """One span; `attributes` are texts, numbers and booleans by name, as Langfuse's SDK makes them."""

    trace: str
    id: str
    parent: str
    name: str
    start: int  # nanoseconds
    end: int
    attributes: dict[str, Any]


class LangfuseServer(LoopbackServer):
    """LANGFUSE_BASE_URL is its `url`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.scores: list[dict[str, Any]] = []
        self.unknown: list[str] = []
        super().__init__()

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        if path == "/api/public/otel/v1/traces":
            self._take(ExportTraceServiceRequest.FromString(body))
            return 200, "application/x-protobuf", ExportTraceServiceResponse().SerializeToString()
        if path == "/api/public/scores":
            posted = json.loads(body)
            self.scores += posted
            return as_json({"accepted": len(posted), "rejected": 0, "errors": []}, 207)
        self.unknown.append(f"{method} {path}")
        return as_json({}, 404)

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {
                        a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes
                    }
                    self.spans.append(
                        Span(
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.name,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            values,
                        )
                    )
