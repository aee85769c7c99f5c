"""The pages of nimbus in a real browser: they keep up to date, load nothing from elsewhere, and
everybody can use them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, expect

from storm_rigs.stage.builder import Stage
from storm_rigs.stage.conf import zookeeper_conf
from storm_rigs.stage.shop import MARKUP, Shop, open_shop

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(300)]

PAGES = (
    "/",
    "/hosts",
    "/topologies/shop",
    "/topologies/shop?focus=enrich",
    "/topologies/shop/placement",
    "/topologies/none",
)
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}


@pytest.fixture(scope="module")
def make_shop(
    zookeeper_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Shop]]:
    @contextlib.contextmanager
    def make(**of: str) -> Iterator[Shop]:
        with Stage(tmp_path_factory.mktemp("shop"), zookeeper_conf(zookeeper_server)) as stage:
            yield open_shop(stage, **of)

    return make


@pytest.fixture(scope="module")
def shop(
    browser: Browser, make_shop: Callable[..., AbstractContextManager[Shop]]
) -> Iterator[Shop]:
    with make_shop() as made:
        yield made


Open = Callable[[str], Page]


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def visit(browser: Browser, shop: Shop, scheme: str) -> Iterator[Open]:
    """Opens a page of nimbus; in the end nothing was asked of others, and the browser had nothing
    to complain about.
    """
    context: BrowserContext = browser.new_context(
        viewport={"width": 1440, "height": 1180},
        color_scheme="dark" if scheme == "dark" else "light",
        timezone_id="UTC",
    )
    expect.set_options(timeout=60_000)
    refused: list[str] = []
    complaints: list[str] = []

    def only_nimbus(route: Route) -> None:
        if route.request.url.startswith((f"{shop.nimbus.url}/", "data:")):
            route.continue_()
        else:
            refused.append(route.request.url)
            route.abort()

    def note(message: ConsoleMessage) -> None:
        # Chromium reports the status of a page that is not there by itself.
        if "404 (Not Found)" not in message.text:
            complaints.append(message.text)

    context.route("**/*", only_nimbus)
    context.on("console", note)
    context.on("weberror", lambda error: complaints.append(str(error.error)))

    def opened(path: str) -> Page:
        page = context.new_page()
        page.goto(shop.nimbus.url + path)
        return page

    yield opened
    context.close()
    assert (refused, complaints) == ([], [])


@pytest.mark.browser
def test_everybody_can_use_every_page(visit: Open, shop: Shop, scheme: str) -> None:
    first = visit("/topologies/shop")
    expect(first.locator(".chart")).to_have_count(3)
    found: dict[str, list[str]] = {}
    for path in PAGES:
        page = visit(path)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(20, 22, 26)" if scheme == "dark" else "rgb(255, 255, 255)"
        )
        for summary in page.locator("summary").all():
            summary.click()
        violations = Axe().run(page, options=RULES).response["violations"]
        found[path] = [
            f"{one['id']}: {node['html'][:200]}" for one in violations for node in one["nodes"]
        ]
        # A narrow screen scrolls tables and graphs, never the page.
        page.set_viewport_size({"width": 380, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        page.close()
    assert not any(found.values()), found


@pytest.mark.browser
def test_a_page_changes_without_taking_away_what_is_looked_at(visit: Open, shop: Shop) -> None:
    page = visit("/topologies/shop")
    expect(page.locator("#state")).to_have_text(" · live")
    streams = page.locator("#streams")
    streams.locator("summary").click()
    link = page.get_by_role("region", name="Components").get_by_role(
        "link", name="enrich", exact=True
    )
    link.focus()
    page.evaluate("scrollTo(0, 300)")
    place = link.evaluate("link => link.getBoundingClientRect().top")
    shop.slow_down()
    try:
        expect(page.locator("#findings")).to_contain_text("enrich is the bottleneck")
        expect(page.locator("svg .box.slow")).to_have_count(1)
    finally:
        shop.slow_down(False)
    for table in ("stream", "output stream"):
        heading = streams.get_by_role("columnheader", name=table, exact=True)
        expect(heading).to_be_visible()
    expect(link).to_be_focused()
    assert link.evaluate("link => link.getBoundingClientRect().top") == pytest.approx(place, abs=3)
    expect(page.locator("#findings")).not_to_contain_text("bottleneck", timeout=90_000)


@pytest.mark.browser
def test_markup_is_text_and_a_component_is_a_link(visit: Open) -> None:
    page = visit("/topologies/shop")
    expect(page.locator("main")).to_contain_text(MARKUP)
    assert page.locator("main b, main script").count() == 0
    page.locator("svg.graph a", has_text="alerts<b>").click()
    expect(page.get_by_role("heading", name="Tasks of alerts<b>")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light"], indirect=True)
def test_the_list_leads_to_a_topology(visit: Open) -> None:
    page = visit("/")
    page.get_by_label("Name contains").fill("sho")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("link", name="shop", exact=True).click()
    expect(page.get_by_role("heading", name="shop", exact=True)).to_be_visible()
    page.get_by_role("link", name="Placement").click()
    expect(page.get_by_role("heading", name="Placement of shop")).to_be_visible()


@pytest.mark.browser
@pytest.mark.long  # five minutes pass
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", ["light"], indirect=True)
def test_a_page_that_is_opened_after_five_minutes_shows_them(visit: Open, shop: Shop) -> None:
    time.sleep(max(0.0, shop.rig.launched + 60 + 330 - time.time()))
    page = visit("/topologies/shop")
    page.locator("#chart1 summary").click()
    rows = page.locator("#chart1 tbody tr").all_inner_texts()
    times = [datetime.strptime(row.split()[0], "%H:%M:%S") for row in rows]
    shown = (times[0] - times[-1]).seconds
    assert shown >= 280, rows
    rates = [float(row.split()[1]) for row in rows[:-1]]
    assert all(rate > 0 for rate in rates), rows
    assert page.locator("svg.chart .gap").count() == 3, (
        "one in each: before the topology master began"
    )


@pytest.mark.browser
def test_the_first_picture_of_the_readme(
    page: Page, make_shop: Callable[..., AbstractContextManager[Shop]], screenshots: Path | None
) -> None:
    if screenshots is None:
        pytest.skip("no picture is wanted (make screenshots)")
    with make_shop(last="alerts") as shop:
        page.set_viewport_size({"width": 1440, "height": 1010})
        page.goto(f"{shop.nimbus.url}/topologies/shop")
        page.wait_for_timeout(120_000)
        shop.slow_down()
        expect(page.locator("#findings")).to_contain_text("enrich is the bottleneck")
        page.wait_for_timeout(30_000)
        page.screenshot(path=screenshots / "topology.png", animations="disabled")
