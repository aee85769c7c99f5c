"""The tour of the documents in the browser: the reader presses one button, the asset page shows the
event of the bolt, and the batch asset has a run that nobody launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from storm_rigs.dagster.dagster_pages import DagsterPages
from storm_rigs.dagster.tour import Tour

pytestmark = [
    pytest.mark.long,
    pytest.mark.browser,
    pytest.mark.cluster,
    pytest.mark.dagster,
    pytest.mark.timeout(1200),
]


def test_the_asset_page_shows_what_the_bolt_reported(
    tmp_path: Path, open_pages: Callable[[str], DagsterPages]
) -> None:
    with Tour(tmp_path) as tour:
        ui = open_pages(tour.dagster.url.removesuffix("/graphql"))
        ui.page.set_viewport_size({"width": 1240, "height": 560})
        ui.open("/assets/topologies/sales")
        ui.skip_first_dialog()
        ui.materialize()
        first, *_ = tour.await_batch()

        ui.open("/assets/lake/sales?view=events")
        expect(
            ui.page.get_by_text(f"Partition {tour.reported_hours()[-1]} materialized")
        ).to_be_visible()
        expect(ui.page.get_by_text("storm/event", exact=True)).to_be_visible()
        expect(ui.page.get_by_text("storm/topology", exact=True)).to_be_visible()
        expect(ui.page.get_by_text(first, exact=True)).to_be_visible()
        ui.picture("reported-hours")

        ui.open("/assets/lake/revenue?view=events")
        expect(ui.page.get_by_text(re.compile("revenue")).first).to_be_visible()
        expect(ui.page.get_by_text(first, exact=True)).to_be_visible()
