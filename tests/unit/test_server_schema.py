"""Whatever the server's own OpenAPI document allows, and much that it does not: no answer is a 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.unit.running_server import Running

ROUTES = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def schema():
    with Running(max_model_len=64) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


def test_every_route_is_documented(schema):
    assert {operation.ok().path for operation in schema.get_all_operations()} == set(ROUTES)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "not allowed"])
@pytest.mark.parametrize("route", [route for route in ROUTES if route.startswith("/v1/c")])
def test_no_request_brings_the_server_down(schema, route, mode):
    statuses = set()

    @given(case=schema[route]["POST"].as_strategy(generation_mode=mode))
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def send(case):
        response = case.call(timeout=30)
        assert response.status_code < 500, response.text
        statuses.add(response.status_code)

    send()
    assert statuses <= ({200, 400, 404} if mode is GenerationMode.POSITIVE else {200, 400, 404, 405, 413, 415})
    assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses
