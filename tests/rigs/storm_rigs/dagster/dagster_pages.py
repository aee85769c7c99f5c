"""One person at the pages of Dagster's webserver."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect


class DagsterPages:
    """One person at one webserver. Waits are the page's own: 60 s, and 120 s for a run to end."""

    def __init__(self, page: Page, url: str, screenshots: Path | None) -> None:
        self.page = page
        self.url = url
        self.screenshots = screenshots

    def picture(self, name: str) -> None:
        """Keep what is on the screen as ``name.png``, where pictures are wanted."""
        if self.screenshots is not None:
            # Charts and graphs glide to their place.
            self.page.wait_for_timeout(2_500)
            self.page.screenshot(path=self.screenshots / f"{name}.png", animations="disabled")

    def open(self, path: str) -> None:
        self.page.goto(self.url + path)

    def skip_first_dialog(self) -> None:
        """Close the dialog that Dagster shows to a new browser."""
        self.page.get_by_role("button", name="Skip").click()

    # -- launching ---------------------------------------------------------------------------------
    def open_asset_launchpad(self, job: str) -> None:
        """The Launchpad from the job's asset graph: the one in which a partition can be added."""
        self.open(f"/locations/storm/jobs/{job}")
        materialize = self.page.get_by_role("button", name="Materialize all")
        materialize.locator("xpath=following::button[1]").click()
        self.page.get_by_text("Open launchpad").click()

    def add_partition(self, name: str) -> None:
        self.page.get_by_role("button", name="Add new partition").click()
        self.page.get_by_placeholder("name", exact=True).fill(name)
        save = self.page.get_by_role("button", name="Save", exact=True)
        save.click()
        expect(save).to_have_count(0)
        expect(self.page.get_by_placeholder("Partition")).to_have_value(name)

    def open_job_launchpad(self, job: str) -> None:
        self.open(f"/locations/storm/jobs/{job}/playground")

    def choose_partition(self, name: str) -> None:
        self.page.get_by_placeholder("Partition").click()
        self.page.get_by_role("menuitem", name=name, exact=True).click()
        expect(self.page.get_by_placeholder("Partition")).to_have_value(name)

    def write_config(self, form: str, text: str) -> None:
        """Replace the form that contains ``form`` by ``text``; wait until the page finds no error
        in it.
        """
        editor = self.page.locator(".CodeMirror").filter(has_text=form)
        editor.click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)
        # Hints of the editor would cover what was typed.
        self.page.keyboard.press("End")
        expect(self.page.get_by_text("No errors")).to_be_visible()

    def launch(self) -> str:
        """Press the button and follow to the run's page; the run's id."""
        button = (
            self.page.locator("button")
            .filter(has_text=re.compile(r"^\W*(Launch Run|Materialize)$"))
            .last
        )
        expect(button).to_be_enabled()
        button.click()
        self.page.wait_for_url("**/runs/*")
        return self.page.url.rsplit("/", 1)[1]

    def materialize(self) -> None:
        """Press `Materialize` on the page of an asset without partitions, and follow to the run."""
        self.page.get_by_role("button", name="Materialize").first.click()
        expect(self.page.get_by_text("Launched run")).to_be_visible()

    # -- runs --------------------------------------------------------------------------------------
    def wait_success(self, steps: int) -> None:
        """Watch the run whose page is open until it ended well, with so many steps done and none
        failed.
        """
        over = self.page.get_by_text(re.compile(r"^(Success|Failure|Canceled)$")).first
        expect(over).to_be_visible(timeout=120_000)
        assert over.inner_text() == "Success", self.page.locator("body").inner_text()[:3000]
        expect(self.page.get_by_text(f"Succeeded ({steps})")).to_be_visible()
        expect(self.page.get_by_text("Errored (0)")).to_be_visible()

    def run_row(self, job: str) -> Locator:
        """The newest row of the runs page that names the job."""
        return self.page.locator("tr, [role=row], [data-index]").filter(has_text=job).first
