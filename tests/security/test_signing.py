"""Signed requests: what counts, and everything beside it that does not."""

from __future__ import annotations

import dataclasses

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.errors import InvalidRequest, NotAuthenticated
from storm_dagster.security.access_tokens import make_token, read_claims
from storm_dagster.security.settings import Security
from storm_dagster.security.signing import (
    RequestHead,
    Verifier,
    about_content,
    body_hash,
    is_among,
    sign,
    signer,
)

SECRET = "a-secret-planted-for-tests-4711"
TARGET = RequestHead("POST", "nimbus:7621", "/v1/topologies/a/kill?x=1")
NOW = 1_800_000_000.0


def test_a_signature_counts_once_and_tells_nothing() -> None:
    verifier = Verifier((SECRET,))
    header = sign(SECRET, TARGET, body_hash(b"{}"), NOW)
    assert SECRET not in header and verifier.check(header, TARGET, NOW + 5) == body_hash(b"{}")
    with pytest.raises(NotAuthenticated, match="seen before"):
        verifier.check(header, TARGET, NOW + 6)
    assert verifier.check(sign(SECRET, TARGET, body_hash(b"{}"), NOW), TARGET, NOW) == body_hash(
        b"{}"
    )


@pytest.mark.parametrize("part", ["method", "host", "path"])
def test_another_request_does_not_pass_with_it(part: str) -> None:
    header = sign(SECRET, TARGET, body_hash(b""), NOW)
    with pytest.raises(NotAuthenticated, match="changed on its way"):
        Verifier((SECRET,)).check(
            header, dataclasses.replace(TARGET, **{part: getattr(TARGET, part) + "x"}), NOW
        )


@given(st.data())
def test_no_other_text_is_a_signature(data: st.DataObject) -> None:
    header = sign(SECRET, TARGET, body_hash(b""), NOW)
    at = data.draw(st.integers(0, len(header) - 1))
    changed = (
        header[:at]
        + data.draw(st.characters().filter(lambda one: one != header[at]))
        + header[at + 1 :]
    )
    for wrong in (changed, header[:at], data.draw(st.text())):
        with pytest.raises(NotAuthenticated):
            Verifier((SECRET,)).check(wrong, TARGET, NOW)


@given(st.text(), st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=2))
def test_a_code_is_valid_only_if_it_is_one_of_the_valid_ones(text: str, valid: list[str]) -> None:
    """A text of any characters, which a client sends, is compared and raises nothing."""
    assert is_among(text, valid) == (text in valid)
    assert all(is_among(mac, valid) for mac in valid)
    assert not any(is_among(mac.upper() + text, valid) for mac in valid if text)


@pytest.mark.parametrize("late", [-121, 121, 10_000])
def test_an_old_signature_and_clocks_that_differ(late: float) -> None:
    with pytest.raises(NotAuthenticated, match="set the clocks"):
        Verifier((SECRET,)).check(sign(SECRET, TARGET, body_hash(b""), NOW), TARGET, NOW + late)


def test_no_signature_counts_again_while_it_is_young_enough() -> None:
    verifier = Verifier((SECRET,))
    headers = [(at, sign(SECRET, TARGET, body_hash(b""), NOW + at)) for at in range(0, 900, 30)]
    for at, header in headers:
        verifier.check(header, TARGET, NOW + at)
        for then, former in headers:
            if then <= at:
                with pytest.raises(NotAuthenticated):
                    verifier.check(former, TARGET, NOW + at)


def test_the_former_secret_counts_while_it_is_changed() -> None:
    new = SECRET + "-new"
    for used in (SECRET, new):
        assert Verifier((new, SECRET)).check(sign(used, TARGET, body_hash(b""), NOW), TARGET, NOW)
        token = make_token(used, "read", int(NOW) + 60, "0" * 16)
        assert read_claims((new, SECRET), token, NOW).scope == "read"
    with pytest.raises(NotAuthenticated):
        Verifier((new,)).check(sign(SECRET, TARGET, body_hash(b""), NOW), TARGET, NOW)


def test_clients_sign_and_send_nothing_where_nothing_is_asked() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    options = {**Security(SECRET).client_options(), "transport": httpx.MockTransport(answer)}
    with httpx.Client(**options) as client:
        client.get("http://n:1/healthz")
        client.get("http://n:1/v1/a b", params={"q": "ü&"})
        client.post("http://n:1/v1/x", json={"a": 1})
        hashed = {"X-Content-SHA256": body_hash(b"12"), "X-Storm-Epoch": "7"}
        client.put("http://n:1/v1/y", content=iter([b"1", b"2"]), headers=hashed)
        client.get("http://n:1/v1/z", headers={"Authorization": "Bearer own"})
        client.get("http://n:1/livez")
        client.get("http://n:1/readyz")
        with pytest.raises(InvalidRequest, match="needs X-Content-SHA256"):
            client.put("http://n:1/v1/y", content=iter([b"1", b"2"]))
    assert (
        "Authorization" not in seen[0].headers and seen[4].headers["Authorization"] == "Bearer own"
    )
    assert all("Authorization" not in request.headers for request in seen[5:7])
    for request, body in ((seen[1], b""), (seen[2], seen[2].content), (seen[3], b"12")):
        path, about = request.url.raw_path.decode(), about_content(request.headers.items())
        target = RequestHead(request.method, request.headers["Host"], path, about)
        assert Verifier((SECRET,)).check(request.headers["Authorization"], target) == body_hash(
            body
        )
        assert SECRET not in str(request.headers)
        changed = dataclasses.replace(
            target, about=about.replace("7", "8") + "x-content-by-hash: true"
        )
        with pytest.raises(NotAuthenticated, match="was changed on its way"):
            Verifier((SECRET,)).check(request.headers["Authorization"], changed)


def test_with_tls_nothing_is_sent_in_the_clear() -> None:
    with pytest.raises(InvalidRequest, match="is not https"):
        signer(SECRET, tls=True)(httpx.Request("GET", "http://nimbus:1/v1/topologies"))
