"""Logs over HTTP: pages, rotated files, search, and names that lead elsewhere."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest

from storm_dagster.http.logs import search
from storm_rigs.protocols.served_logs import Served

TEN_GB = 10 * 2**30


def view(served: Served, **query: Any) -> httpx.Response:
    return served.http.get("/logview", params=query)


def test_show_log_gives_the_size_and_the_end_of_the_file(served: Served) -> None:
    (served.logs / "nimbus-n1.log").write_text("first\nlast\n")
    answer = view(served, cmd="showLog", log="nimbus-n1.log")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.content == b"0000000000000011\nfirst\nlast\n"
    assert (
        view(served, cmd="showLog", log="nimbus-n1.log", pos=6, size=4).content
        == b"0000000000000011\nlast"
    )
    assert view(served, cmd="showLog", log="nimbus-n1.log", pos=11).content == b"0000000000000011\n"
    assert view(served, cmd="download", log="nimbus-n1.log", pos=0, size=5).content == b"first"
    whole = view(served, cmd="download", log="nimbus-n1.log")
    assert (
        whole.content == b"first\nlast\n" and "attachment" in whole.headers["content-disposition"]
    )
    part = served.http.get(
        "/logview",
        params={"cmd": "download", "log": "nimbus-n1.log"},
        headers={"Range": "bytes=-5"},
    )
    assert (part.status_code, part.content) == (206, b"last\n")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search ends by what it read, not by the time that this machine took."""
    monkeypatch.setattr(search, "_SECS", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_file_of_ten_gigabytes_is_read_by_pages(served: Served) -> None:
    path = served.logs / "big.log"
    with path.open("wb") as stream:
        stream.truncate(TEN_GB)
        stream.seek(TEN_GB - 4)
        stream.write(b"end\n")
    answer = view(served, cmd="showLog", log="big.log")
    assert answer.content[:17] == b"%016d\n" % TEN_GB
    assert len(answer.content) == 17 + 131_072 and answer.content.endswith(b"end\n")
    assert (
        len(view(served, cmd="showLog", log="big.log", pos=5 * 2**30, size=2**40).content)
        == 17 + 2**20
    )
    found = view(served, cmd="searchLog", file="big.log", key="end", max_match=1).json()
    assert list(found["match_results"]) == [str(TEN_GB - 4)]
    budget = view(served, cmd="searchLog", file="big.log", key="absent").json()
    # After 128 MiB; or after two seconds, were it slower.
    assert budget["num_match"] == 0 and 2**27 - 100 < budget["next_offset"] <= 2**27
    assert served.http.get("/api/v1/daemonlog", params={"file": "big.log"}).status_code == 200
    path.unlink()


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"size": "-1"}, 400),
        ({"size": "0"}, 400),
        ({"size": str(2**63)}, 400),
        ({"size": "1e3"}, 400),
        ({"pos": "-1"}, 400),
        ({"pos": "12"}, 416),
        ({"pos": str(2**40)}, 416),
        ({"log": ""}, 400),
        ({"cmd": "rm"}, 400),
        ({"cmd": ""}, 400),
        ({"cmd": "jstack"}, 400),
        ({"cmd": "jstack", "workerPort": "70000"}, 400),
        ({"cmd": "searchLog", "file": "nimbus-n1.log"}, 400),
        ({"cmd": "searchLog", "file": "nimbus-n1.log", "key": "x" * 2000}, 400),
        ({"cmd": "searchLog", "file": "nimbus-n1.log", "key": "x", "max_match": "5000"}, 400),
    ],
)
def test_wrong_questions_are_refused(served: Served, query: dict[str, str], status: int) -> None:
    (served.logs / "nimbus-n1.log").write_text("first\nlast\n")
    answer = view(served, **{"cmd": "showLog", "log": "nimbus-n1.log", **query})
    assert answer.status_code == status and answer.json()["error"]["message"]


NAMES = [
    "../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e/secret.txt",
    "%252e%252e/secret.txt",
    "/etc/passwd",
    "a/../../secret.txt",
    "./nimbus-n1.log",
    "a//b",
    "..\\secret.txt",
    "nimbus-n1.log%00",
    "%c0%ae%c0%ae/secret.txt",
    "../logs-secret/other.txt",
    "link.txt",
    "linked/other.txt",
    "fifo",
    "workers",
    "x" * 3000,
    "/".join("a" * 40),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_look_like_names_of_nothing(served: Served, name: str) -> None:
    home = served.logs.parent
    (home / "secret.txt").write_text("planted secret")
    (home / "logs-secret").mkdir(exist_ok=True)
    (home / "logs-secret/other.txt").write_text("planted secret")
    for link, target in (("link.txt", home / "secret.txt"), ("linked", home / "logs-secret")):
        if not (served.logs / link).is_symlink():
            (served.logs / link).symlink_to(target)
    if not (served.logs / "fifo").exists():
        os.mkfifo(served.logs / "fifo")
    absent = served.http.get("/logview?cmd=showLog&log=absent.log")
    assert absent.status_code == 404
    for path in (
        f"/logview?cmd=showLog&log={name}",
        f"/logview?cmd=download&log={name}",
        f"/logview?cmd=searchLog&key=planted&file={name}",
        f"/api/v1/daemonlog?file={name}",
        f"/api/v1/daemondownload?file={name}",
        f"/api/v1/log?file={name}",
    ):
        answer = served.http.get(path)
        assert (answer.status_code, answer.content) == (404, absent.content), path
    if name != "workers":
        assert served.http.get(f"/logview?cmd=listDir&dir={name}").content == absent.content
    listed = view(served, cmd="listDir").json()
    assert not {"link.txt", "linked", "fifo"} & set(listed)


def test_directories_are_listed_as_in_jstorm(served: Served) -> None:
    slot = served.logs / "workers/wc-1-1/6900"
    slot.mkdir(parents=True, exist_ok=True)
    (slot / "worker.log").write_text("now\n")
    (slot / "worker.log.1").write_text("before\n")
    listed = view(served, cmd="listDir", dir="workers/wc-1-1").json()
    entry = listed["workers/wc-1-1/6900"]
    assert (entry["fileName"], entry["isDir"], entry["size"]) == ("6900", "true", 4096)
    files = view(served, cmd="listDir", dir="workers/wc-1-1/6900").json()
    assert files["workers/wc-1-1/6900/worker.log.1"]["size"] == 7
    assert served.http.get("/api/v1/listLogs", params={"topoId": "wc-1-1"}).json() == [
        "wc-1-1/6900/worker.log",
        "wc-1-1/6900/worker.log.1",
    ]
    assert served.http.get("/api/v1/listLogs", params={"port": "1"}).json() == []
    rotated = view(served, cmd="showLog", log="workers/wc-1-1/6900/worker.log.1")
    assert rotated.content.endswith(b"before\n")
    assert "now" in served.http.get("/api/v1/log", params={"file": "wc-1-1/6900/worker.log"}).text
    # Rotated in between: a reader that asks on from where it was learns that the file is shorter.
    (slot / "worker.log").write_text("")
    assert (
        view(served, cmd="showLog", log="workers/wc-1-1/6900/worker.log", pos=4).status_code == 416
    )


def test_what_logs_say_runs_nothing_in_a_browser(served: Served) -> None:
    name = "<b>&\"'.log"
    (served.logs / name).write_bytes(
        b"<script>alert(1)</script>\x1b[31m\x00 \xe2\x80\xae \xff\xfe </pre><img src=x>\n"
    )
    page = served.http.get("/api/v1/daemonlog", params={"file": name})
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    body = page.text
    for forbidden in ("<script", "<b>", "</pre><img", "\x1b", "\x00", "\u202e"):
        assert forbidden not in body, forbidden
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body
    assert "access-control-allow-origin" not in page.headers


def test_encodings_and_cut_characters(served: Served) -> None:
    text = "日本" * 50
    (served.logs / "jp.log").write_bytes(text.encode())
    (served.logs / "sjis.log").write_bytes(text.encode("shift_jis"))
    page = served.http.get(
        "/api/v1/daemonlog", params={"file": "jp.log", "start": 1, "length": 10}
    ).text
    assert "本日" in page and "\ufffd" not in page
    sjis = served.http.get(
        "/api/v1/daemonlog", params={"file": "sjis.log", "encoding": "shift_jis"}
    )
    assert "日本日本" in sjis.text
    refused = served.http.get(
        "/api/v1/daemonlog", params={"file": "jp.log", "encoding": "zlib_codec"}
    )
    assert refused.status_code == 400
    found = view(
        served, cmd="searchLog", file="jp.log", key="本", max_match=1, search_from="head"
    ).json()
    assert list(found["match_results"]) == ["3"]
    binary = b"\x00\x01needle\xff\xfe\n" * 3
    (served.logs / "binary.log").write_bytes(binary)
    assert view(served, cmd="showLog", log="binary.log").content[17:] == binary
    raw = served.http.get(
        "/logview?cmd=searchLog&file=binary.log&key=e%ff%fe&search_from=head"
    ).json()
    assert list(raw["match_results"]) == ["7", "18", "29"]


@pytest.mark.usefixtures("patient")
def test_search_goes_both_ways_with_context_and_a_limit(served: Served) -> None:
    lines = [
        f"line {number} {'Boom' if number % 10 == 0 else 'fine'}\n" for number in range(40_000)
    ]
    (served.logs / "words.log").write_text("".join(lines))
    content = "".join(lines)

    def ask(**query: Any) -> dict[str, Any]:
        return view(served, cmd="searchLog", file="words.log", **query).json()

    first = ask(key="Boom", max_match=2, search_from="head", look_back=1, look_ahead=1)
    offsets = [int(offset) for offset in first["match_results"]]
    assert offsets == [content.index("Boom"), content.index("Boom", 20)]
    assert first["match_results"][str(offsets[1])] == "line 9 fine\nline 10 Boom\nline 11 fine\n"
    again = ask(key="Boom", max_match=1, search_from="head", offset=first["next_offset"])
    assert [int(offset) for offset in again["match_results"]] == [
        content.index("Boom", offsets[1] + 1)
    ]
    last = ask(key="Boom", max_match=1)
    assert [int(offset) for offset in last["match_results"]] == [content.rindex("Boom")]
    before = ask(key="Boom", max_match=1, offset=last["next_offset"])
    assert [int(offset) for offset in before["match_results"]] == [
        content.rindex("Boom", 0, content.rindex("Boom"))
    ]
    assert ask(key="boom")["num_match"] == 0
    assert ask(key="boom", case_ignore="true")["num_match"] == 10
    everything = ask(key="Boom", max_match=1000, search_from="tail")
    assert everything["num_match"] == 1000
    seen = {int(offset) for offset in everything["match_results"]}
    offset = everything["next_offset"]
    while offset is not None:
        page = ask(key="Boom", max_match=1000, search_from="tail", offset=offset)
        assert not seen & {int(key) for key in page["match_results"]}
        seen |= {int(key) for key in page["match_results"]}
        offset = page["next_offset"] if page["num_match"] else None
    assert len(seen) == 4000
    evil = ask(key="(a+)+$")
    assert evil == {"num_match": 0, "match_results": {}, "next_offset": None}


@pytest.mark.parametrize("search_from", ["head", "tail"])
def test_an_answer_is_bounded_whatever_the_log_holds(served: Served, search_from: str) -> None:
    """Matches in lines without end, and a key that makes a naive search quadratic."""
    (served.logs / "long.log").write_bytes(b"x" * 2**20)
    many = view(
        served, cmd="searchLog", file="long.log", key="x", max_match=1000, search_from=search_from
    )
    assert len(many.content) < 3 * 2**20 and many.json()["next_offset"] is not None
    (served.logs / "same.log").write_bytes(b"a" * 8 * 2**20)
    none = view(
        served,
        cmd="searchLog",
        file="same.log",
        key="a" * 512 + "b" + "a" * 511,
        search_from=search_from,
    ).json()
    while none["next_offset"] is not None and none["num_match"] == 0:
        none = view(
            served,
            cmd="searchLog",
            file="same.log",
            key="a" * 512 + "b" + "a" * 511,
            search_from=search_from,
            offset=none["next_offset"],
        ).json()
    assert none == {"num_match": 0, "match_results": {}, "next_offset": None}


def test_stacks_are_text_and_the_conf_has_no_secret(served: Served) -> None:
    assert view(served, cmd="jstack", workerPort=6900).text == "stacks of 6900\n"
    assert json.loads(view(served, cmd="showConf").content)["storm.secret"] == "*****"
