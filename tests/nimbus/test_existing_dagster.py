"""A Dagster that ``dev`` does not start: its address, its code location, and what is missing."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from storm_dagster.cli.dev.existing_dagster import (
    check_location,
    check_workspace,
    definition_lines,
    graphql_url,
)
from storm_dagster.cli.health import healing_sensor
from storm_dagster.defs.resources.handles import start_arguments
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.endpoints import ClusterFile, DagsterEndpoint, DevFile, cluster_conf
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import InvalidRequest, Misconfigured, StormDagsterError, Unavailable
from storm_dagster.testing.cluster import run_cli
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.dagster_webserver import DagsterServer

HOME = Path("/srv/storm")


def conf_of(url: str, **values: object) -> ClusterConf:
    keys = {f"dagster.{key}": value for key, value in values.items()}
    return load_cluster_conf(None, {"dagster.graphql.url": url, **keys})


def refusal(conf: ClusterConf) -> StormDagsterError:
    with pytest.raises(StormDagsterError) as raised:
        check_location(conf, HOME)
    return raised.value


@contextmanager
def serve_page(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Address of a web server that is not Dagster's."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", "7")
            self.end_headers()
            self.wfile.write(b"<p>Hi!\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "address",
    ["http://h:3000", "http://h:3000/", "http://h:3000/graphql", "http://h:3000/graphql/"],
)
def test_the_address_of_the_ui_is_enough(address: str) -> None:
    assert graphql_url(address) == "http://h:3000/graphql"
    assert graphql_url("https://h/team/a") == "https://h/team/a/graphql"


@pytest.mark.parametrize(
    "address", ["", "h:3000", "ftp://h", "http://", "http://h:x", "http://h/?a=b", "http://[::1"]
)
def test_an_address_without_http_or_host_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"such as http://127\.0\.0\.1:3000: correct it"):
        graphql_url(address)


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidRequest, match=r"storm\.yaml.*--no-dagster") as raised:
        graphql_url("https://ann:s3cret-word@h/graphql")
    assert "s3cret-word" not in raised.value.message


def test_a_password_of_storm_yaml_reaches_clients_and_no_endpoint(tmp_path: Path) -> None:
    url = "https://ann:s3cret-word@dagster.example/graphql"
    (tmp_path / "storm.yaml").write_text(f"dagster.graphql.url: {url}\n")
    (tmp_path / "storm.yaml").chmod(0o600)
    dagster = DagsterEndpoint(url="https://dagster.example", home="", pids=(), own=False)
    ClusterFile(zookeeper="127.0.0.1:1", zookeeper_root="/storm", dagster=dagster).write(tmp_path)
    assert cluster_conf(tmp_path)["dagster.graphql.url"] == url
    own = dagster.model_copy(update={"own": True})
    ClusterFile(zookeeper="127.0.0.1:1", zookeeper_root="/storm", dagster=own).write(tmp_path)
    assert cluster_conf(tmp_path)["dagster.graphql.url"] == "https://dagster.example/graphql"


def test_a_sensor_of_a_dagster_that_exists_is_not_expected_to_start(tmp_path: Path) -> None:
    dagster = DagsterEndpoint(url="http://h:3000", home="", pids=(), own=False)
    ClusterFile(zookeeper="127.0.0.1:1", zookeeper_root="/storm", dagster=dagster).write(tmp_path)
    state, text = healing_sensor(tmp_path, armed=False)
    assert state == "warning" and "runs in the Dagster at http://h:3000" in text
    assert healing_sensor(tmp_path, armed=True) == ("ok", "healing sensor armed: it heals")


def test_a_cluster_that_a_run_starts_has_the_dagster_of_before(tmp_path: Path) -> None:
    assert "--no-dagster" not in start_arguments(tmp_path)
    url = "http://127.0.0.1:3001/graphql"
    DevFile(conf={"dagster.graphql.url": url}, ports={"webserver": 0}).write(tmp_path)
    assert start_arguments(tmp_path)[-3:] == ["--no-dagster", "-c", f"dagster.graphql.url={url}"]
    secret = {"dagster.graphql.url": "http://ann:s3cret-word@h/graphql"}
    DevFile(conf=secret, ports={"webserver": 0}).write(tmp_path)
    assert start_arguments(tmp_path)[-1] == "--no-dagster"
    DevFile(conf={}, ports={"webserver": 3000}).write(tmp_path)
    assert "--no-dagster" not in start_arguments(tmp_path)


@pytest.mark.dagster
def test_a_dagster_with_the_code_location_is_accepted(dagster_server: DagsterServer) -> None:
    check_location(conf_of(dagster_server.url), HOME)
    check_location(conf_of(dagster_server.url, cluster="prod"), HOME)


@pytest.mark.dagster
def test_a_location_of_another_name_is_named(dagster_server: DagsterServer) -> None:
    error = refusal(conf_of(dagster_server.url, location="team"))
    assert isinstance(error, Misconfigured)
    assert "the job submit_topology is in 'storm'" in error.message
    assert "-c dagster.location=storm" in error.message


@pytest.mark.dagster
def test_a_dagster_without_the_cluster_gets_the_lines_to_add(dagster_server: DagsterServer) -> None:
    conf = conf_of(dagster_server.url, cluster="east")
    error = refusal(conf)
    assert isinstance(error, Misconfigured)
    assert "(it has: 'storm') has the job east_submit_topology" in error.message
    assert definition_lines(HOME, conf) in error.message
    assert "build_storm_defs(cluster='east', home='/srv/storm')" in error.message


def test_an_address_without_a_server_is_unavailable() -> None:
    error = refusal(conf_of(f"http://127.0.0.1:{free_port()}/graphql"))
    assert isinstance(error, Unavailable)
    assert "does not answer" in error.message and "start its webserver" in error.message


def test_another_service_is_not_taken_for_dagster() -> None:
    with serve_page() as url:
        error = refusal(conf_of(f"{url}/graphql"))
    assert isinstance(error, Unavailable)
    assert f"{url}/graphql does not answer as Dagster does" in error.message


def test_a_wrong_certificate_is_named_with_the_remedy() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with serve_page(context) as url:
        error = refusal(conf_of(f"{url}/graphql"))
    assert isinstance(error, Unavailable)
    assert "has a certificate that is not trusted" in error.message
    assert "set storm.tls.ca" in error.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "cannot be read"),
        ("[]", "no list load_from"),
        ("load_from: 3", "no list load_from"),
        (
            "load_from: [{python_file: {relative_path: a.py, location_name: storm}}]",
            "give it another location_name",
        ),
    ],
)
def test_a_wrong_workspace_file_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "workspace.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=reason):
        check_workspace(path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        check_workspace(tmp_path / "missing.yaml")
    path.write_text("load_from:\n  - python_file: team.py\n  - python_module: {module_name: a}\n")
    check_workspace(path)


@pytest.mark.long
def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    workspace = tmp_path / "w.yaml"
    workspace.write_text("load_from: []\n")
    url = f"http://127.0.0.1:{free_port()}"
    cases = {
        ("--no-dagster", "--dagster-url", url): "exclude each other",
        ("--no-dagster", "--workspace", str(workspace)): "none is started",
        ("--dagster-url", url, "--workspace", str(workspace)): "none is started",
        ("--dagster-url", url): "start its webserver",
    }
    for options, reason in cases.items():
        result = run_cli("dev", "--json", *options, home=tmp_path / "home")
        assert result.code != 0 and reason in str(result.document), options
    assert not (tmp_path / "home").exists()
