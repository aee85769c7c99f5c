"""Values of tuples and of state: equal and of the same type wherever they go, or refused where they
are emitted.
"""

from __future__ import annotations

import array
import logging
import math
import re
import types
import zlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag
from fractions import Fraction
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from storm_dagster.api import Bolt, Grouping, StatefulBolt, TopologyBuilder, Tuple
from storm_dagster.core.dataplane.keyed_state import Checkpoint, Contents, frame, read_log
from storm_dagster.host.resolve import load_plugin
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.groupings import fields_chooser, stable_hash
from storm_dagster.model.json_values import encode_converted
from storm_dagster.model.slot import Slot
from storm_dagster.model.values import UnreadableValue, decode_value, encode_value, register_classes
from storm_dagster.model.wire import MAX_FRAME_BYTES, decode_frame
from storm_dagster.testing.task_state import open_task_state
from storm_dagster.testing.topology_harness import TopologyHarness, run_topology
from storm_dagster.worker.dataplane.routes import Placement, RemoteLink, split_bundle
from storm_dagster.worker.dataplane.sending import send_remote
from storm_dagster.worker.dataplane.transport import Peer
from storm_dagster.worker.dataplane.tree import Tree
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.multilang.bolts import ShellBoltRunner
from storm_dagster.worker.tasks.shared import Shared
from storm_rigs.components import CollectBolt, InputSpout, QueueSpout


class Color(Enum):
    RED = 1
    BLUE = ("not", "text")


class Word(str, Enum):
    RED = "red"


class Level(IntEnum):
    ONE = 1


class Rights(IntFlag):
    READ = 1
    WRITE = 2


@dataclass
class Order:
    number: int
    lines: list[Any] = field(default_factory=list)
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1


@dataclass(frozen=True, slots=True)
class Point:
    x: Any
    y: Any = 0


@dataclass
class Unregistered:
    x: int


class UnregisteredEnum(Enum):
    A = 1


class Text(str):
    pass


Pair = namedtuple("Pair", "a b")
REGISTERED = [f"{__name__}:{kind.__name__}" for kind in (Color, Word, Level, Rights, Order, Point)]
CONF = {"topology.serialization.register": REGISTERED}
ZONES = st.one_of(st.none(), st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**63, 2**65),
    st.floats(allow_nan=False),
    st.text(st.characters(), max_size=8),
    st.sampled_from(["\ud800", "a\udfff"]),
    st.binary(max_size=8),
    st.datetimes(timezones=ZONES),
    st.dates(),
    st.times(timezones=ZONES),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.sampled_from([*Color, *Word, *Level, Rights.READ, Rights.READ | Rights.WRITE]),
)
KEYS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(Point, inner, inner),
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    KEYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(KEYS, max_size=3),
        st.binary(max_size=8).map(bytearray),
        st.builds(Order, st.integers(), st.lists(inner, max_size=2)),
    ),
    max_leaves=6,
)
nested: list[Any] = []
nested.append(nested)
REFUSED = [
    object(),
    1j,
    Fraction(1, 2),
    memoryview(b"a"),
    array.array("i", [1]),
    range(3),
    iter([]),
    print,
    Color,
    Text("a"),
    Pair(1, 2),
    Counter("a"),
    OrderedDict(a=1),
    defaultdict(int),
    Unregistered(1),
    UnregisteredEnum.A,
    types.SimpleNamespace(a=1),
    ValueError("a"),
    Path("a"),
    msgspec.Raw(b"\x01"),
    msgspec.msgpack.Ext(1, b"\x90"),
    time(12, tzinfo=ZoneInfo("Europe/Berlin")),
    nested,
    UnreadableValue("why"),
]


def shape(value: Any) -> Any:
    """Value with all types in it, comparable."""
    kind = type(value)
    if kind in (list, tuple):
        return (kind, [shape(item) for item in value])
    if kind in (set, frozenset):
        return (kind, sorted(map(repr, map(shape, value))))
    if kind is dict:
        return (kind, [(shape(key), shape(item)) for key, item in value.items()])
    if kind in (Order, Point):
        return (kind, [shape(getattr(value, name)) for name in kind.__dataclass_fields__])
    if kind in (datetime, time):
        return (kind, value.replace(tzinfo=None), value.utcoffset(), value.fold)
    return (kind, value if kind is not Decimal else value.as_tuple())


class DirectTransport:
    """Frames of one engine, decoded and delivered to the other one."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.peers: dict[Any, Peer] = {}

    def set_peers(self, addresses: dict[Any, str], alive: Any) -> list[bytes]:
        self.peers = {slot: Peer(slot, address, None) for slot, address in addresses.items()}  # type: ignore[arg-type]
        return []

    def busy(self) -> list[tuple[str, int]]:
        return []


class TwoWorkers:
    """A spout in one worker, a bolt in another."""

    def __init__(self, conf: dict[str, Any]) -> None:
        builder = TopologyBuilder("two")
        builder.set_spout("given", QueueSpout)
        builder.set_bolt("sink", CollectBolt, inputs="given")
        spec = builder.to_spec()
        slots = {1: Slot("a", 1), 2: Slot("b", 1), 3: Slot("a", 1)}
        components = {1: "given", 2: "sink", 3: "__acker"}
        self.errors: list[BaseException] = []
        self.engines: dict[Any, NativeEngine] = {}
        for slot in (Slot("a", 1), Slot("b", 1)):
            merged = {**default_conf(), **spec.conf, **conf}
            shared = Shared(
                conf=merged,
                owns=lambda: True,
                wake=lambda: None,
                report=lambda *a: self.errors.append(a[2]),
            )
            engine = NativeEngine(
                topology_id="two-1-0",
                spec=spec,
                conf=merged,
                shared=shared,
                transport=DirectTransport(slot[0]),  # type: ignore[arg-type]
                slot=slot,
            )
            mine = frozenset(task for task, at in slots.items() if at == slot)
            addresses = {Slot("a", 1): "h:1", Slot("b", 1): "h:2"}
            ready = frozenset(addresses)
            tokens = {"a": Slot("a", 1), "b": Slot("b", 1)}
            placement = Placement(
                0, slots, addresses, components, mine, mine, tokens=tokens, ready=ready
            )
            engine.place(placement)
            engine.activate(True)
            self.engines[slot] = engine

    def run(self) -> None:
        for _ in range(6):
            for engine in self.engines.values():
                for runner in engine.runners.values():
                    if runner.component == "given":
                        # No pause after the refusal of the value before.
                        runner.pause_until = 0.0  # type: ignore[attr-defined]
                        runner.call_errors.on_success()  # type: ignore[attr-defined]
                engine.run(engine.shared.clock())
                transport: Any = engine.transport
                for slot, peer in transport.peers.items():
                    if peer.has_news():
                        for raw in peer.frames(transport.token, 100, engine.cannot_travel):
                            self.engines[slot].deliver(decode_frame(raw))


def in_one_worker(value: Any, checked: bool) -> Any:
    builder = TopologyBuilder("one")
    builder.set_spout("given", QueueSpout)
    builder.set_bolt("sink", CollectBolt, inputs="given")
    conf = {**CONF, "topology.testing.always.try.serialize": checked}
    QueueSpout.reset([value])
    CollectBolt.everything.clear()
    with TopologyHarness(builder, conf=conf) as harness:
        result = harness.run()
    for _, error in result.errors:
        raise error
    ((found,),) = CollectBolt.everything
    return found


@pytest.fixture(scope="module")
def two_workers() -> Iterator[TwoWorkers]:
    yield TwoWorkers(CONF)


def in_two_workers(workers: TwoWorkers, value: Any) -> Any:
    QueueSpout.reset([value])
    CollectBolt.everything.clear()
    workers.errors.clear()
    workers.run()
    for error in workers.errors:
        raise error
    ((found,),) = CollectBolt.everything
    return found


class Keep(StatefulBolt):
    def process(self, tup: Any) -> None:
        key, value = tup.values
        self.state[key] = value


def keeping() -> TopologyBuilder:
    builder = TopologyBuilder("kept")
    builder.set_spout("pairs", InputSpout, outputs=["key", "value"])
    builder.set_bolt("keep", Keep, inputs={"pairs": Grouping.fields("key")}, par=2)
    return builder


def after_restart(folder: Path, key: Any, value: Any) -> dict[Any, Any]:
    with TopologyHarness(
        keeping(), {"pairs": [[key, value]]}, conf=CONF, state_dir=folder
    ) as harness:
        for _, error in harness.run().errors:
            raise error
    with TopologyHarness(keeping(), {"pairs": []}, conf=CONF, state_dir=folder) as harness:
        harness.run()
        return {key: value for task in harness.tasks("keep") for key, value in task.state.items()}


FEW = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
)
SLOW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
)


@SLOW
@given(VALUES, st.booleans())
@example([{"\ud800": 2**70}], False)
@example(({2**70: [{"a": "\ud800"}]}, 2**70), True)
def test_a_value_keeps_its_type_in_the_same_worker(value: Any, checked: bool) -> None:
    assert shape(in_one_worker(value, checked)) == shape(value)


@SLOW
@given(value=VALUES)
@example(value=[{"\ud800": 2**70}, {(1, date.min): {2**70: "\ud800"}}])
def test_a_value_keeps_its_type_in_another_worker(two_workers: TwoWorkers, value: Any) -> None:
    register_classes(REGISTERED, load_plugin)
    assert shape(in_two_workers(two_workers, value)) == shape(value)


@FEW
@given(value=VALUES)
@example(value=[date(2026, 1, 2), Decimal("9.90"), (1, 2), {1}, UUID(int=5)])
def test_a_value_keeps_its_type_when_a_task_passes_it_on(
    two_workers: TwoWorkers, value: Any
) -> None:
    register_classes(REGISTERED, load_plugin)
    QueueSpout.reset()
    CollectBolt.everything.clear()
    workers = two_workers
    passing = workers.engines["a", 1].shared
    passing.redirect(Tuple(0, "given", "default", 1, [value]), 2)
    workers.run()
    assert [shape(received) for (received,) in CollectBolt.everything] == [shape(value)]


@SLOW
@given(key=KEYS, value=VALUES)
def test_a_value_and_its_key_keep_their_types_in_state(
    tmp_path_factory: pytest.TempPathFactory, key: Any, value: Any
) -> None:
    found = after_restart(tmp_path_factory.mktemp("state"), key, value)
    assert [(shape(one), shape(other)) for one, other in found.items()] == [
        (shape(key), shape(value))
    ]


@SLOW
@given(key=st.text(max_size=8), value=VALUES)
@example(key="a", value=[-0.0, 1.0, {"1": 1}, {1: "1"}])
def test_a_value_keeps_its_type_in_the_store_of_a_task(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    register_classes(REGISTERED, load_plugin)
    folder = tmp_path_factory.mktemp("state")
    state = open_task_state(folder, "wc", "count", 4)
    state.save({key: value})
    state.close()
    state = open_task_state(folder, "wc", "count", 4)
    assert shape(state.get(key)) == shape(value)
    ((_, found),) = state.items()
    assert shape(found) == shape(value)


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_the_store_of_a_task_refuses_any_other_value(tmp_path: Path, value: Any) -> None:
    register_classes(REGISTERED, load_plugin)
    state = open_task_state(tmp_path, "wc", "count", 4)
    for within in (value, [value], {"a": (value,)}, Point(value)):
        with pytest.raises(TypeError, match=r"the state of 'a' cannot be saved: it is .+: .+"):
            state.save({"a": within, "b": 1})
    assert len(state) == 0


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_any_other_value_is_refused_where_it_is_emitted(
    two_workers: TwoWorkers, tmp_path: Path, value: Any
) -> None:
    expected = re.compile(
        r"component 'given', task \d: field 'value' of stream 'default' is .+: .+"
    )
    for within in (value, [value], {"a": (value,)}, Point(value)):
        for checked in (False, True):
            with pytest.raises(InvalidRequest) as error:
                in_one_worker(within, checked)
            assert expected.fullmatch(str(error.value))
        register_classes(REGISTERED, load_plugin)
        with pytest.raises(InvalidRequest) as error:
            in_two_workers(two_workers, within)
        assert expected.fullmatch(str(error.value)) and CollectBolt.everything == []
        with pytest.raises(InvalidRequest, match="the state of 'a' cannot be saved: it is "):
            set_state(tmp_path, "a", within)
    if type(value) is not Pair:  # A key of a tuple's kind is a tuple.
        with pytest.raises((InvalidRequest, TypeError, RecursionError)):
            set_state(tmp_path, value, 1)


class Sets(StatefulBolt):
    key: Any
    value: Any

    def process(self, tup: Any) -> None:
        self.state[Sets.key] = Sets.value


def set_state(folder: Path, key: Any, value: Any) -> None:
    Sets.key, Sets.value = key, value
    builder = TopologyBuilder("sets")
    builder.set_spout("given", QueueSpout)
    builder.set_bolt("sets", Sets, inputs="given")
    with TopologyHarness(builder, {"given": [[1]]}, conf=CONF, state_dir=folder) as harness:
        for _, error in harness.run().errors:
            raise error


def test_a_zone_travels_as_its_offset() -> None:
    moment = datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    found = in_one_worker(moment, False)
    assert (
        found == moment
        and found.utcoffset() == timedelta(hours=2)
        and type(found.tzinfo) is timezone
    )


class Cleared(Bolt):
    outputs = ["buffer"]

    def process(self, tup: Any) -> None:
        buffer = [tup.values[0], {"deep": [1]}]
        self.emit([buffer])
        buffer[1]["deep"].clear()
        buffer.clear()


class Spoils(Bolt):
    seen: list[Any] = []

    def process(self, tup: Any) -> None:
        Spoils.seen.append(repr(tup.values))
        tup.values[0].append("spoiled")
        tup.values.append("spoiled")


def test_receivers_get_what_was_emitted_and_share_nothing() -> None:
    Spoils.seen = []
    builder = TopologyBuilder("spoiled")
    builder.set_spout("given", QueueSpout)
    builder.set_bolt("cleared", Cleared, inputs="given")
    builder.set_bolt("one", Spoils, inputs={"cleared": Grouping.ALL}, par=2)
    builder.set_bolt("two", Spoils, inputs="cleared")
    conf = {"topology.testing.always.try.serialize": False}
    result = run_topology(builder, {"given": [[1]]}, conf=conf)
    assert Spoils.seen == ["[[1, {'deep': [1]}]]"] * 3
    assert result.values("cleared") == [[[1, {"deep": [1]}]]]


@given(
    st.lists(st.one_of(st.integers(0, 2**64 - 1), st.none()), max_size=3),
    st.integers(1, 30),
    st.integers(1, 9),
)
def test_a_divided_bundle_has_all_tuples_and_the_edge_of_the_whole(
    edges: list[Any], size: int, most: int
) -> None:
    roots = [part for number, edge in enumerate(edges, 1) for part in (number, edge or 7)]
    bundles = [(0, 0, list(range(size))), (5, 9, list(range(size))), (roots, 0, list(range(size)))]
    for bundle in bundles[: 3 if roots else 2]:
        parts = split_bundle(bundle, most)
        assert [number for _, _, many in parts for number in many] == list(range(size))
        assert all(0 < len(many) <= most for _, _, many in parts)
        total = [0] * len(roots)
        edge = 0
        for root, number, _ in parts:
            edge ^= number
            if isinstance(root, list):
                assert root[::2] == roots[::2]
                total = [one ^ other for one, other in zip(total, root, strict=True)]
            else:
                assert root == bundle[0]
        assert edge == bundle[1]
        if isinstance(bundle[0], list):
            assert total[1::2] == roots[1::2]


@pytest.mark.parametrize("tracked", [False, True])
def test_many_tuples_of_one_tree_never_make_a_frame_over_the_limit(tracked: bool) -> None:
    peer = Peer(Slot("s2", 7001), "127.0.0.1:7001", None)  # type: ignore[arg-type]
    link = RemoteLink(1, 99, "default", peer)
    tree = Tree(1, 5, 0) if tracked else None
    large = bytes(MAX_FRAME_BYTES // 4)
    for number in range(9):
        send_remote(link, tree, [number, large if number != 4 else bytes(MAX_FRAME_BYTES)])
    broken: list[Any] = []
    received, edge = [], 0
    for raw in peer.frames(
        "token", 100, lambda link, bundle, error: broken.append((bundle, error))
    ):
        assert len(raw) <= MAX_FRAME_BYTES
        for _, _, _, bundles in decode_frame(raw).groups:
            for _, number, many in bundles:
                edge ^= number
                received += [values[0] for values in many]
    assert received == [0, 1, 2, 3, 5, 6, 7, 8]
    ((lost, error),) = broken
    assert (
        len(lost[2]) == 1 and "a tuple of 671089" in str(error) and "send a reference" in str(error)
    )
    assert tree is None or tree.val == edge ^ lost[1]


def test_a_tree_of_many_tuples_makes_bundles_of_a_thousand() -> None:
    peer = Peer(Slot("s2", 7001), "127.0.0.1:7001", None)  # type: ignore[arg-type]
    link = RemoteLink(1, 99, "default", peer)
    tree = Tree(1, 5, 0)
    for number in range(2500):
        send_remote(link, tree, [number])
    items = link.take()
    assert [len(many) for _, _, many in items] == [1000, 1000, 500]
    assert tree.val == items[0][1] ^ items[1][1] ^ items[2][1]


@given(st.lists(st.sampled_from([1, 999, 1000, 1001, 2100]), min_size=1, max_size=4), st.booleans())
def test_no_bundle_is_over_a_thousand_wherever_a_large_tree_is(
    sizes: list[int], again: bool
) -> None:
    link = RemoteLink(1, 99, "default", Peer(Slot("s2", 7001), "127.0.0.1:7001", None))  # type: ignore[arg-type]
    for _ in range(1 + again):
        sent = []
        for root, size in enumerate(sizes, 1):
            tree = Tree(1, root, 0)
            for number in range(size):
                sent.append([root, number])
                send_remote(link, tree, sent[-1])
        items = link.take()
        assert max(len(many) for _, _, many in items) <= 1000
        assert [values for _, _, many in items for values in many] == sent


EQUAL = [
    [1, 1.0, True, Decimal(1), Decimal("1.00"), Level.ONE, Rights.READ],
    ["red", Word.RED],
    [0.5, Decimal("0.5"), Decimal("0.50")],
    [2**63, float(2**63), Decimal(2**63)],
    [10**30, Decimal(10**30), Decimal("1E+30")],
    [1e300, int(1e300), Decimal(int(1e300))],
    [b"a", bytearray(b"a")],
    [float("inf"), Decimal("Infinity")],
    [0, 0.0, -0.0, Decimal("-0"), False],
    [Decimal("0.1"), Decimal("0.10")],
    [{1: "a", 2: "b"}, {2.0: "b", True: "a"}, {Decimal(2): "b", 1: "a"}],
    [{"red": 1, "b": 2}, {"b": 2.0, Word.RED: True}],
    [{(1, 2): b"a"}, {(1.0, 2): bytearray(b"a")}],
    [{1, "a"}, frozenset(["a", 1.0])],
    [(1, "red"), (1.0, Word.RED)],
    [
        datetime(2026, 1, 1, 12, tzinfo=timezone.utc),
        datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1))),
    ],
    [time(12, tzinfo=timezone.utc), time(13, tzinfo=timezone(timedelta(hours=1)))],
    [timedelta(days=1), timedelta(hours=24)],
    [Point(1, "red"), Point(1.0, Word.RED)],
    [("\ud800", 1), ("\ud800", 1.0)],
]


@pytest.mark.parametrize("keys", EQUAL, ids=map(str, range(len(EQUAL))))
def test_keys_that_compare_equal_go_to_one_task(keys: list[Any]) -> None:
    assert all(one == other for one in keys for other in keys)
    assert len({stable_hash(key) for key in keys}) == 1
    assert len({stable_hash((key, "second")) for key in keys}) == 1
    for start in keys:
        choose = fields_chooser(range(97), [0])
        assert len({choose([key]) for key in [start, *keys]}) == 1


@given(KEYS, KEYS)
def test_the_hash_agrees_with_equality(one: Any, other: Any) -> None:
    assert one != other or stable_hash(one) == stable_hash(other)


def test_a_log_of_an_older_release_is_read() -> None:
    # As 0.1.0 wrote it: every type that MessagePack lacks as text or a list.
    encode = msgspec.msgpack.encode
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    old = Checkpoint(
        values=[
            (("a", 1), msgspec.Raw(encode({"x": (1, 2)}))),
            (uuid4(), msgspec.Raw(encode(moment))),
        ],
        ids=[(7, ("words", "default", "w", 3))],
        full=True,
    )
    payload = encode(old)
    raw = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload
    contents = Contents()
    for record in read_log(raw, "old"):
        contents.apply(record)
    assert list(contents.values.values()) == [{"x": [1, 2]}, moment]
    assert next(iter(contents.values)) == ("a", 1)
    assert contents.ids == {("words", "default", "w", 3): 7}
    # Plain keys are written as before, so that the older release reads them.
    again = [frame(record) for record in contents.snapshot()][-1]
    assert msgspec.msgpack.decode(again[8:])["values"][0][0] == ["a", 1]


def test_ids_of_other_types_are_known_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        builder = TopologyBuilder("once")
        builder.set_spout("given", InputSpout, outputs=["id"])
        builder.set_bolt("once", CountOnce, inputs={"given": Grouping.fields("id")})
        ids = [[UUID(int=7)], [date(2026, 1, 1)], [(1, Decimal(2))], [2**70]]
        with TopologyHarness(builder, {"given": ids}, state_dir=tmp_path) as harness:
            assert harness.run().errors == []
            (task,) = harness.tasks("once")
            assert dict(task.state.items()) == {one[0]: 1 for one in ids}


class CountOnce(StatefulBolt):
    message_id = "id"

    def process(self, tup: Any) -> None:
        self.state[tup.values[0]] = self.state.get(tup.values[0], 0) + 1


def test_what_cannot_be_read_harms_one_tuple_only() -> None:
    register_classes(REGISTERED, load_plugin)
    peer = Peer(Slot("s2", 7001), "127.0.0.1:7001", None)  # type: ignore[arg-type]
    link = RemoteLink(1, 99, "default", peer)
    for value in (Order(1), 1):
        send_remote(link, None, msgspec.Raw(encode_value([value])))
    bad = msgspec.msgpack.Ext(99, b"\xff")
    send_remote(link, None, [bad])
    (raw,) = peer.frames("token", 100, lambda *_: None)
    register_classes([], load_plugin)
    ((_, _, _, ((_, _, many),)),) = decode_frame(raw).groups
    assert many[1] == [1]
    with pytest.raises(
        InvalidRequest, match=r"Order cannot be read: name it in topology.serialization.register"
    ):
        _ = many[0][0].number
    assert "extension 99" in repr(many[2][0])


def test_a_field_that_a_newer_class_has_gets_its_default() -> None:
    register_classes(REGISTERED, load_plugin)
    part = msgspec.msgpack.encode([f"{__name__}:Order", "number", 3])
    found = decode_value(msgspec.msgpack.encode(msgspec.msgpack.Ext(15, part)))
    assert (found.number, found.lines, found.made) == (3, [], 0)
    part = msgspec.msgpack.encode([f"{__name__}:Order"])
    with pytest.raises(InvalidRequest, match="no field 'number'"):
        decode_value(msgspec.msgpack.encode(msgspec.msgpack.Ext(15, part)))


def test_a_shell_component_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    runner: Any = ShellBoltRunner.__new__(ShellBoltRunner)
    sent: list[Any] = []
    runner.__dict__.update(
        component="shell",
        shared=types.SimpleNamespace(warned=set()),
        context=types.SimpleNamespace(source_fields=lambda *_: ["a", "b"]),
        in_flight={},
        _ids=iter("12345"),
        process=types.SimpleNamespace(send=sent.append),
    )
    caplog.set_level(logging.WARNING)
    for values in ([1, "a"], [2.5, [None, {"a": True}]], [b"a", {1}], [[{"x": {1}}], 1]):
        tup = types.SimpleNamespace(component="given", stream="default", task=1, values=values)
        runner._send_tuple(tup)
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        "component 'shell'" in text
        and "field 'a', 'b' of stream 'default' of 'given'" in text
        and "base64" in text
    )
    assert len(sent) == 4


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, r"at \.tuple\[1\]: nan is not a number of JSON"),
        ({"x": [-math.inf]}, r"at \.tuple\[1\]\.x\[0\]: -inf"),
        ("\ud800", r"at \.tuple\[1\]: .* half of a surrogate pair"),
    ],
)
def test_a_value_that_json_lacks_fails_its_tuple_and_no_program_gets_it(
    value: Any, reason: str
) -> None:
    runner: Any = ShellBoltRunner.__new__(ShellBoltRunner)
    failed: list[Any] = []
    errors: list[BaseException] = []
    runner.__dict__.update(
        component="shell",
        task_id=1,
        shared=types.SimpleNamespace(warned=set(), catches=Exception),
        context=types.SimpleNamespace(source_fields=lambda *_: ["a", "b"]),
        in_flight={},
        _ids=iter("12"),
        process=types.SimpleNamespace(send=lambda message: encode_converted(message, str)),
        report=lambda error, activity: errors.append(error),
        fail=lambda tup, reason: failed.append(tup),
    )
    tuples = [
        types.SimpleNamespace(component="given", stream="default", task=1, values=[None, part])
        for part in (value, 2**70)
    ]
    for tup in tuples:
        runner._send_tuple(tup)
    assert failed == tuples[:1]
    assert [tup for tup, _ in runner.in_flight.values()] == tuples[1:]
    (error,) = errors
    assert re.search(reason, str(error))
