"""Records of two releases: a copy of this tree, with a field more and an optional one less in each,
beside this one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from storm_dagster.model.errors import Corrupt
from storm_dagster.model.records import (
    MAX_UNKNOWN_BYTES,
    Assignment,
    Record,
    StormBase,
    WorkerSlot,
    decode_record,
    encode_record,
)
from storm_rigs.operations.releases import (
    ADDED,
    OtherRelease,
    changed_fields,
    copy_release,
    example,
    examples,
    modify,
    modify_all,
    record_names,
)

NAMES = record_names()


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherRelease]:
    """The next release."""
    release = OtherRelease(copy_release(tmp_path_factory.mktemp("release"), drop=True))
    yield release
    release.close()


@pytest.fixture(scope="module")
def upgraded_first(newer: OtherRelease) -> dict[str, tuple[str, str, str]]:
    """Each record as the newer release writes it, as this one changes it, and as the newer one
    changes that.
    """
    written = newer.ask("storm_rigs.operations.releases:examples", NAMES)
    changed = modify_all(written)
    again = newer.ask("storm_rigs.operations.releases:modify_all", changed)
    return {name: (written[name], changed[name], again[name]) for name in NAMES}


@pytest.fixture(scope="module")
def upgraded_last(newer: OtherRelease) -> dict[str, tuple[str, str, str]]:
    """Each record as this release writes it, as the newer one changes it, and as this one changes
    that.
    """
    written = examples(NAMES)
    changed = newer.ask("storm_rigs.operations.releases:modify_all", written)
    again = modify_all(changed)
    return {name: (written[name], changed[name], again[name]) for name in NAMES}


def lost(before: Any, after: Any, where: str = "") -> list[str]:
    """Where ``after`` lacks a value of ``before``, at any depth."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            each
            for key in before
            for each in (
                lost(before[key], after[key], f"{where}.{key}")
                if key in after
                else [f"{where}.{key}"]
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            each
            for one, other in zip(before, after, strict=True)
            for each in lost(one, other, where)
        ]
    return [] if before == after else [where]


def meant(name: str) -> set[str]:
    """Where the change of the record is meant to be seen."""
    module, _, attribute = name.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    return {f".{field}" for field in changed_fields(cls, decode_record(cls, example(name)))}


def test_every_record_class_is_met() -> None:
    for name in NAMES:
        importlib.import_module(name.partition(":")[0])
    waiting: list[type[Record]] = [Record]
    found = set()
    while waiting:
        waiting += (subclasses := waiting.pop().__subclasses__())
        found |= {f"{each.__module__}:{each.__qualname__}" for each in subclasses}
    assert {each for each in found if each.startswith("storm_dagster.")} == set(NAMES)
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition(":")[2])
def test_what_a_newer_release_wrote_outlives_a_change_by_this_one(
    name: str, upgraded_first: dict[str, tuple[str, str, str]]
) -> None:
    written, changed, again = (json.loads(raw) for raw in upgraded_first[name])
    assert written[ADDED] == changed[ADDED] == again[ADDED] == "1"
    assert set(lost(written, changed)) <= meant(name) and set(lost(changed, again)) <= meant(name)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition(":")[2])
def test_what_this_release_wrote_outlives_a_change_by_a_newer_one(
    name: str, upgraded_last: dict[str, tuple[str, str, str]]
) -> None:
    written, changed, again = (json.loads(raw) for raw in upgraded_last[name])
    assert ADDED not in written and changed[ADDED] == again[ADDED] == "kept"
    assert set(lost(written, changed)) <= meant(name) and set(lost(changed, again)) <= meant(name)


def test_most_records_were_changed(upgraded_first: dict[str, tuple[str, str, str]]) -> None:
    unchanged = [
        name
        for name, raws in upgraded_first.items()
        if not lost(json.loads(raws[0]), json.loads(raws[1]))
    ]
    assert len(unchanged) < len(NAMES) / 3, unchanged


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition(":")[2])
def test_an_unchanged_record_is_equal_when_it_is_read_again(name: str) -> None:
    module, _, attribute = name.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    raw = example(name)[:-1] + b',"zz_added":{"a":[1,"b"]}}'
    record = decode_record(cls, raw)
    assert record == decode_record(cls, raw) == decode_record(cls, encode_record(record))
    assert record != decode_record(cls, example(name))
    assert json.loads(encode_record(record)) == json.loads(raw)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition(":")[2])
def test_our_own_code_writes_no_unknown_field(name: str) -> None:
    module, _, attribute = name.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    record = decode_record(cls, example(name))
    fields = {each: getattr(record, each) for each in cls.model_fields}
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        cls(**fields, zz_added="x")
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        cls.model_validate({**fields, "zz_added": "x"})
    with pytest.raises(TypeError, match="zz_added"):
        record.model_copy(update={"zz_added": "x"})
    with pytest.raises(ValidationError):
        record.zz_added = "x"


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition(":")[2])
def test_another_version_is_corrupt_and_says_what_to_do(name: str) -> None:
    module, _, attribute = name.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    document = {**json.loads(example(name)), "v": 2}
    with pytest.raises(Corrupt, match=r"/a/b is a \w+ of version 2, .* run that release here too"):
        decode_record(cls, json.dumps(document).encode(), "/a/b")
    with pytest.raises(Corrupt, match="of version 2"):
        decode_record(cls, b'{"v":2}', "/a/b")


BASE = "storm_dagster.model.records:StormBase"


def test_unknown_fields_are_bounded_in_all() -> None:
    def raw(size: int) -> bytes:
        half = "x" * (size // 2)
        return example(BASE)[:-1] + f',"more":"{half}","and":"{half}"}}'.encode()

    assert (
        len(encode_record(decode_record(StormBase, raw(MAX_UNKNOWN_BYTES - 100))))
        > MAX_UNKNOWN_BYTES - 200
    )
    with pytest.raises(
        Corrupt, match=r"/topology/t has .* bytes in fields that this release does not know"
    ):
        decode_record(StormBase, raw(2 * MAX_UNKNOWN_BYTES), "/topology/t")


def test_the_bound_counts_records_in_records_and_grows_with_them() -> None:
    slot = {"node": "s", "host": "h", "port": 1, "tasks": "1"}
    document = json.loads(example("storm_dagster.model.records:Assignment"))

    def raw(each: str) -> bytes:
        return json.dumps({**document, "workers": [{**slot, "more": each}] * 5000}).encode()

    assert len(decode_record(Assignment, raw("x" * 20)).workers) == 5000
    with pytest.raises(Corrupt, match="does not know"):
        decode_record(Assignment, raw("x" * 200))


def test_a_new_record_keeps_unknown_fields_of_its_predecessor() -> None:
    before = decode_record(WorkerSlot, b'{"node":"s","host":"h","port":1,"tasks":"1","more":1}')
    after = WorkerSlot(node="s", host="h", port=1, tasks="1-2")
    assert json.loads(encode_record(after.keep_unknown(before))) == {
        **json.loads(encode_record(after)), "more": 1
    }  # fmt: skip
    assert after.keep_unknown(None) is after
    assert after.keep_unknown(after) is after


def test_the_other_release_is_refused_nothing_that_this_one_checks(newer: OtherRelease) -> None:
    """A change of one field is checked as ever: unknown fields do not make the known ones loose."""
    raw = newer.ask("storm_rigs.operations.releases:examples", [BASE])[BASE].encode()
    with pytest.raises(Corrupt, match="workers"):
        decode_record(StormBase, raw.replace(b'"workers":1', b'"workers":"1"'), "/topology/t")
    assert b'"zz_added":"1"' in modify(BASE, raw)
