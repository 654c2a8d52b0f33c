"""In which trace of an observability tool a rollout runs, so that its reward can be put on that trace later.

A reward is often known long after the rollout's span has ended: from a judge, from a comparison inside the group. So a
trajectory notes the trace around it when it is made. Looks only at libraries that are imported already; starts,
patches and sends nothing.
"""

from __future__ import annotations

import sys
from typing import Any

OTEL = "otel"
WEAVE = "weave"


def current_traces() -> dict[str, str]:
    """The traces around the caller: `otel` (32 hex digits; Langfuse's, too), `weave` (the call's address)."""
    found: dict[str, str] = {}
    opentelemetry = _ready("opentelemetry.trace", "get_current_span")
    if opentelemetry is not None:
        context = opentelemetry.get_current_span().get_span_context()
        if context.is_valid:
            found[OTEL] = f"{context.trace_id:032x}"
    weave = _ready("weave", "get_current_call")
    if weave is not None:
        call = weave.get_current_call()
        if call is not None and call.id:
            found[WEAVE] = f"weave:///{call.project_id}/call/{call.id}"
    return found


def _ready(module: str, name: str) -> Any:
    """The module, if it is imported and not only half-way (another thread may be importing it)."""
    loaded = sys.modules.get(module)
    return loaded if hasattr(loaded, name) else None
