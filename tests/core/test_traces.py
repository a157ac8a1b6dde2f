"""Spans reach a collector that speaks OTLP, whole and in their places; and nothing is loaded where nobody asks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core import traces
from tests.collector import Collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_spans_are_sent_within_one_another() -> None:
    with Collector() as collector:
        traces.begin(collector.url + "/", "diptych-test")
        try:
            with traces.span("outer", "server", PARENT, {"gen_ai.request.seed": 7}, job_id="a", attempt=2) as outer:
                carried = traces.current()
                outer.name("renamed")
                outer.set({"gen_ai.response.finish_reasons": ["stop", "length"]})
                with pytest.raises(RuntimeError), traces.span("inner"):
                    raise RuntimeError("nothing of a user's is told")
            with traces.span("elsewhere", "consumer", carried):
                pass
            with traces.span("alone"):
                pass
        finally:
            traces.end()
    spans = {span.name: span for span in collector.spans()}
    assert {*spans} == {"renamed", "inner", "elsewhere", "alone"} and collector.services == {"diptych-test"}
    outer, inner = spans["renamed"], spans["inner"]
    assert outer.trace_id.hex() == PARENT[3:35] and outer.parent_span_id.hex() == PARENT[36:52]
    assert inner.parent_span_id == spans["elsewhere"].parent_span_id == outer.span_id
    assert carried == f"00-{outer.trace_id.hex()}-{outer.span_id.hex()}-01"
    assert inner.status.message == "RuntimeError" and not inner.events and not outer.status.code
    told = {attribute.key: attribute.value for attribute in outer.attributes}
    assert told["diptych.job_id"].string_value == "a" and told["diptych.attempt"].int_value == 2
    reasons = told["gen_ai.response.finish_reasons"].array_value.values
    assert told["gen_ai.request.seed"].int_value == 7 and [one.string_value for one in reasons] == ["stop", "length"]
    assert spans["alone"].parent_span_id == b"" and spans["alone"].trace_id != outer.trace_id


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 3000])
def test_a_strangers_trace_that_is_none(parent: str) -> None:
    with Collector() as collector:
        traces.begin(collector.url, "diptych-test")
        with traces.span("root", parent=parent):
            pass
        traces.end()
    (span,) = collector.spans()
    assert span.parent_span_id == b""


def test_a_collector_that_is_away_costs_no_work() -> None:
    """What it missed is dropped: tracing ends, and the next collector is sent none of it."""
    traces.begin("http://127.0.0.1:1", "diptych-test")
    done = []
    with traces.span("lost"):
        assert traces.current().startswith("00-"), "it is traced"
        done.append("work")
    traces.end()
    assert done == ["work"] and traces.current() == ""
    with Collector() as collector:
        traces.begin(collector.url, "diptych-test")
        with traces.span("kept"):
            pass
        traces.end()
    assert [span.name for span in collector.spans()] == ["kept"]


def test_nothing_is_loaded_where_nobody_asks() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None  # as where it is not installed
from core import traces
traces.begin("", "diptych")
with traces.span("nothing", job_id="a") as span:
    span.note(a=1); span.name("b"); span.fail("c"); span.set({"d": 1})
    assert traces.current() == ""
try:
    traces.begin("http://collector:4318", "diptych")
except traces.TracesError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "needs OpenTelemetry: pip install '.[otel]'\n"
