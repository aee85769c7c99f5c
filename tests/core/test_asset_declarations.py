"""Assets on which a component may report to Dagster: declared ones, and a user's below prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.asset_declarations import (
    AssetPrefix,
    DeclaredAssets,
    LimitedUser,
    check_prefixes,
    decide_on_event,
    user_prefixes,
)
from storm_dagster.model.conf import CONF_KEYS, default_conf
from storm_dagster.model.dagster_events import target_key
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.topology import TopologySpec

ASSETS = "topology.component.assets"
DEFAULT: list[str] = default_conf()["nimbus.user.asset.prefixes"]


def declared(
    *assets: str, conf: dict[str, Any] | None = None, other: dict[str, Any] | None = None
) -> DeclaredAssets:
    """Those of the bolts ``count`` (``assets``) and ``other``; ``conf`` is the topology's."""
    component = {"object": {"python": "m:C"}}
    bolts = {
        "count": {**component, "conf": {ASSETS: list(assets)} if assets else {}},
        "other": {**component, "conf": other or {}},
    }
    spec = TopologySpec.model_validate({"name": "wc", "bolts": bolts})
    return DeclaredAssets.of(spec, {**default_conf(), **(conf or {})})


def outcome(
    declarations: DeclaredAssets,
    key: list[str],
    prefixes: list[str] | None = None,
    component: str | None = "count",
) -> str:
    """Outcome for a report of a topology ``wc`` of ``ann``; without prefixes she is not limited."""
    limited = None
    if prefixes is not None:
        limited = LimitedUser("ann", user_prefixes(prefixes, "wc", "ann"))
    return decide_on_event(declarations, "wc", component, key, limited).outcome


LAKE = ["lake", "clicks"]
# Declared assets, key of the event, outcome for others, outcome for a user of the prefix lake/.
TABLE: list[tuple[str, list[str], str, str]] = [
    ("lake/clicks", LAKE, "accepted", "accepted"),
    ("lake/sales", LAKE, "warned", "refused"),
    ("", LAKE, "warned", "refused"),
    ("finance/ledger", ["finance", "ledger"], "accepted", "refused"),
    ("lake", ["lake"], "accepted", "refused"),
    # Parts, and not texts.
    ("lake/clicks", ["lake/clicks"], "warned", "refused"),
    ("lake/a/b", ["lake", "a/b"], "warned", "refused"),
    ("lakes/clicks", ["lakes", "clicks"], "accepted", "refused"),
    ("lake/clicks", ["lake", "clicks", ""], "warned", "refused"),
    ("lake//clicks", LAKE, "warned", "refused"),
    ("lake/clicks", ["lake", "Clicks"], "warned", "refused"),
    ("Lake/clicks", ["Lake", "clicks"], "accepted", "refused"),
    # Composed and decomposed characters are different keys, as in Dagster.
    ("lake/\u00e4", ["lake", "a\u0308"], "warned", "refused"),
    ("lake/\u00e4", ["lake", "\u00e4"], "accepted", "accepted"),
    ("lake/..", ["lake", ".."], "accepted", "accepted"),
]


@pytest.mark.parametrize(("asset", "key", "others", "limited"), TABLE)
def test_a_declared_key_below_a_prefix_is_accepted(
    asset: str, key: list[str], others: str, limited: str
) -> None:
    declarations = declared(asset) if asset else declared()
    assert outcome(declarations, key) == others
    assert outcome(declarations, key, ["lake/"]) == limited


@pytest.mark.parametrize(
    ("key", "is_below"),
    [
        (["topologies", "wc", "words"], True),
        (["topologies", "wc", "a", "b"], True),
        (["topologies", "wc"], False),
        (["topologies", "wc2", "words"], False),
        (["topologies/wc", "words"], False),
        (["topologies", "wc/words"], False),
        (["Topologies", "wc", "words"], False),
        (["x", "topologies", "wc", "words"], False),
    ],
)
def test_the_default_prefix_is_the_topologys_own(key: list[str], is_below: bool) -> None:
    (prefix,) = user_prefixes(DEFAULT, "wc", "ann")
    assert prefix.covers(key) is is_below


def test_placeholders_stay_within_their_part() -> None:
    template = "team/{topology.submitter.user}/{topology.name}-x"
    (prefix,) = user_prefixes([template], "wc", "ann/../root")
    assert prefix.parts == ("team", "ann/../root", "wc-x")
    assert prefix.covers(["team", "ann/../root", "wc-x"])
    assert not prefix.covers(["team", "ann", "..", "root", "wc-x", "a"])
    assert not user_prefixes(["{topology.name}/"], "{topology.submitter.user}", "ann")[0].covers(
        ["ann", "a"]
    )


@pytest.mark.parametrize(
    "template", ["", "/", "//", "a//b", "/a", "a//", "{user}/", "{}/", "a/{topology.id}"]
)
def test_a_wrong_template_is_refused_by_its_key(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"nimbus\.user\.asset\.prefixes has "):
        check_prefixes({**default_conf(), "nimbus.user.asset.prefixes": ["lake/", template]})
    check_prefixes(default_conf())


def test_a_user_without_prefixes_reports_on_nothing() -> None:
    assert outcome(declared("lake/clicks"), LAKE, []) == "refused"


@pytest.mark.parametrize("prefixes", [None, ["lake/"]])
def test_a_component_declares_for_itself_alone(prefixes: list[str] | None) -> None:
    undeclared = "warned" if prefixes is None else "refused"
    declarations = declared("lake/clicks", other={ASSETS: ["lake/sales"]})
    assert outcome(declarations, LAKE, prefixes, "other") == undeclared
    assert outcome(declarations, LAKE, prefixes, "absent") == undeclared
    # A worker of a former release names no component.
    assert outcome(declarations, LAKE, prefixes, None) == "accepted"
    assert outcome(declarations, ["lake", "x"], prefixes, None) == undeclared


def test_the_conf_of_the_topology_counts_for_components_without_a_list() -> None:
    declarations = declared("lake/sales", conf={ASSETS: ["lake/clicks"]}, other={ASSETS: None})
    assert outcome(declarations, LAKE, component="other") == "accepted"
    assert outcome(declarations, LAKE, component="count") == "warned"
    none = declared("lake/sales", conf={ASSETS: ["lake/clicks"]}, other={ASSETS: []})
    assert outcome(none, LAKE, component="other") == "warned"


def test_a_damaged_list_declares_nothing() -> None:
    for paths in ("lake/clicks", {"lake/clicks": 1}, 7, [7, None, ["lake", "clicks"]]):
        assert outcome(declared(conf={ASSETS: paths}), LAKE) == "warned", paths


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [(None, "accepted"), (DEFAULT, "accepted"), (["lake/"], "refused"), (["postgres/"], "refused")],
)
def test_a_report_of_a_sink_has_the_key_below_its_component(
    prefixes: list[str] | None, expected: str
) -> None:
    declarations = declared("postgres/orders")
    undeclared = "warned" if prefixes is None else "refused"
    assert outcome(declarations, target_key("count", "postgres/orders"), prefixes) == expected
    assert outcome(declarations, target_key("count", "postgres/other"), prefixes) == undeclared
    assert outcome(declarations, target_key("other", "postgres/orders"), prefixes) == undeclared


def test_reasons_name_component_assets_and_remedy() -> None:
    declarations = declared("lake/sales")
    warning = decide_on_event(declarations, "wc", "count", LAKE, None).reason
    assert "component 'count' (it declares 'lake/sales')" in warning
    assert "the next release refuses it" in warning and ASSETS in warning
    ann = LimitedUser("ann", user_prefixes(DEFAULT, "wc", "ann"))
    refusal = decide_on_event(declarations, "wc", "other", LAKE, ann).reason
    assert refusal.startswith("component 'other' does not declare it (it declares none): ")
    assert ASSETS in refusal
    outside = decide_on_event(declarations, "wc", "count", ["lake", "sales"], ann).reason
    for part in ("'count'", "'ann'", "'wc'", "nimbus.user.asset.prefixes: topologies/wc/"):
        assert part in outside
    many = declared(*(f"lake/{number}-{'x' * 200}" for number in range(1000)))
    assert len(decide_on_event(many, "wc", "count", LAKE, None).reason) < 1000


PARTS = st.lists(st.text("ab/.{\u00e4", min_size=1, max_size=3), min_size=1, max_size=4)


@given(prefix=PARTS, below=PARTS, other=PARTS, itself=st.booleans())
def test_a_prefix_covers_what_begins_with_its_parts(
    prefix: list[str], below: list[str], other: list[str], itself: bool
) -> None:
    rule = AssetPrefix(tuple(prefix), itself)
    assert rule.covers([*prefix, *below])
    assert rule.covers(prefix) is itself
    if other[: len(prefix)] != prefix:
        assert not rule.covers(other)
    # A longer first part is another part, whatever its text begins with.
    assert not rule.covers([*prefix[:-1], prefix[-1] + "x", *below])


@given(assets=st.lists(PARTS.map("/".join), max_size=4), key=PARTS)
def test_only_a_declared_key_of_a_user_is_accepted(assets: list[str], key: list[str]) -> None:
    declarations = declared(*assets)
    is_declared = any(path.split("/") == key for path in assets)
    result = outcome(declarations, key, ["a", "b"])
    assert result == ("accepted" if is_declared and key[0] in ("a", "b") else "refused")
    assert outcome(declarations, key) == ("accepted" if is_declared else "warned")


def test_the_cluster_alone_sets_the_prefixes() -> None:
    prefixes = CONF_KEYS["nimbus.user.asset.prefixes"]
    assets = CONF_KEYS[ASSETS]
    assert (prefixes.setter, prefixes.worker) == ("cluster", False)
    assert (assets.setter, assets.worker) == ("user", True)
