"""The Thrift port of a secured cluster: certificates name users, and without certificates nobody
may call.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trustme
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TFramedTransportFactory, TTransportException

from storm_dagster.nimbus.blobs.uploads import MAX_PER_USER
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.security.settings import Security
from storm_dagster.testing.waiting import eventually
from storm_rigs.operations.archives import pack_archive
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper


@contextmanager
def calling(nimbus: NimbusThread, keys: dict[str, str] | None) -> Iterator[Any]:
    client = make_client(
        load_idl().Nimbus,
        host="127.0.0.1",
        port=nimbus.ports["thrift"],
        proto_factory=TBinaryProtocolFactory(),
        trans_factory=TFramedTransportFactory(),
        timeout=20_000,
        ssl_context=None if keys is None else Security.of(keys).client_context(),
    )
    try:
        yield client
    finally:
        client.close()


def is_served(nimbus: NimbusThread, keys: dict[str, str] | None) -> bool:
    with calling(nimbus, keys) as client:
        return bool(client.getNimbusConf())


def test_a_certificate_names_its_user(
    stage: Stage,
    certificate: Callable[..., dict[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    daemon = certificate("daemon")
    nimbus = stage.nimbus(conf=daemon, nimbus__admins=["daemon"], nimbus__users=["alice"])
    nimbus.await_leading()
    eventually(lambda: is_served(nimbus, daemon), 30, "the service")
    refusal = load_idl().AuthorizationException
    with calling(nimbus, certificate("alice")) as alice:
        assert alice.getClusterInfo().topologies == []
        assert alice.isTopologyNameAllowed("x") is True
        location = alice.beginFileUpload()
        alice.uploadChunk(location, b"x")
        for call in (
            alice.getNimbusConf,
            lambda: alice.beginCreateBlob("k", None),
            lambda: alice.getSupervisorPageInfo("s", None, True),
            lambda: alice.killTopology("x"),
            lambda: alice.getTopologyConf("x-1-1"),
        ):
            with pytest.raises(refusal, match="'alice'"):
                call()
    with calling(nimbus, certificate("mallory")) as mallory:
        for call in (mallory.getClusterInfo, mallory.getLeader, mallory.beginFileUpload):
            with pytest.raises(refusal, match="'mallory'"):
                call()
    audited = [
        record.getMessage() for record in caplog.records if record.name == "storm_dagster.audit"
    ]
    assert any("getNimbusConf of alice" in line for line in audited)
    assert any("getLeader of mallory" in line for line in audited)


def test_an_upload_is_of_whoever_began_it(
    stage: Stage, certificate: Callable[..., dict[str, str]]
) -> None:
    nimbus = stage.nimbus(
        conf=certificate("daemon"), nimbus__admins=["daemon"], nimbus__users=["ann", "eve"]
    )
    nimbus.await_leading()
    idl = load_idl()
    shell = idl.ComponentObject(shell=idl.ShellComponent(execution_command="python", script="s.py"))
    common = idl.ComponentCommon(
        inputs={}, streams={"default": idl.StreamInfo(output_fields=["word"], direct=False)}
    )
    spouts = {"s": idl.SpoutSpec(spout_object=shell, common=common)}
    topology = idl.StormTopology(spouts=spouts, bolts={}, state_spouts={})
    with calling(nimbus, certificate("ann")) as ann, calling(nimbus, certificate("eve")) as eve:
        location, whole = ann.beginFileUpload(), ann.beginFileUpload()
        ann.uploadChunk(whole, pack_archive("code"))
        ann.finishFileUpload(whole)
        for call in (
            lambda: eve.uploadChunk(location, b"evil"),
            lambda: eve.finishFileUpload(location),
        ):
            with pytest.raises(TApplicationException, match="no file upload"):
                call()
        with pytest.raises(idl.InvalidTopologyException, match="no uploaded archive"):
            eve.submitTopology("mine", whole, "{}", topology)
        # What is of its own gets further, to a Dagster that is not there.
        with pytest.raises(TApplicationException, match="dagster"):
            ann.submitTopology("mine", whole, "{}", topology)
        ann.uploadChunk(location, b"x")
        for _ in range(MAX_PER_USER - 1):
            ann.beginFileUpload()
        with pytest.raises(TApplicationException, match="'ann' has"):
            ann.beginFileUpload()
        assert eve.beginFileUpload()


def test_without_a_certificate_of_the_authority_there_is_no_conversation(
    stage: Stage, certificate: Callable[..., dict[str, str]]
) -> None:
    daemon = certificate("daemon")
    nimbus = stage.nimbus(conf=daemon, nimbus__admins=["daemon"])
    nimbus.await_leading()
    outsider = certificate("daemon", by=trustme.CA())
    for keys in (outsider, {"storm.tls.ca": daemon["storm.tls.ca"]}):
        with pytest.raises((OSError, EOFError, TTransportException)):
            is_served(nimbus, keys)
    with socket.create_connection(("127.0.0.1", nimbus.ports["thrift"]), timeout=20) as plain:
        plain.sendall(b"\0\0\0\x20" + b"\x80\x01\0\x01" + b"\0" * 28)
        try:
            while plain.recv(4096):
                pass
        except ConnectionError:
            pass
    assert is_served(nimbus, daemon)


def test_a_secret_alone_closes_the_port_to_everybody(
    stage: Stage,
) -> None:
    nimbus = stage.nimbus(storm__secret="a-secret-planted-for-tests-4711")
    nimbus.await_leading()
    with calling(nimbus, None) as client:
        for call in (
            client.getLeader,
            client.getClusterInfo,
            client.beginFileUpload,
            client.getNimbusConf,
        ):
            with pytest.raises(load_idl().AuthorizationException, match="carry no secret"):
                call()
        with pytest.raises(TApplicationException, match="NotAuthenticated"):
            client.listBlobs("")
