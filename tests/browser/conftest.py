"""A headless Chromium: the machine's own, or the one that Playwright installed. Without any the
tests are skipped.

``SCREENSHOTS=DIR`` (``make screenshots``) also leaves the pictures of README and documents in DIR.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from storm_rigs.dagster.dagster_pages import DagsterPages

ON_PATH = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = (
    "no Chromium found (chromium, chromium-browser or google-chrome on PATH, or Playwright's own). "
    "As root on Debian: make chromium (apt-get install chromium); Ubuntu: sudo snap install chromium; "
    "Fedora: sudo dnf install chromium; elsewhere: .venv/bin/python -m playwright install chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a module.

    Playwright keeps an event loop running in this thread. Later modules of the same process start
    loops of their own.
    """
    with sync_playwright() as playwright:
        found = next((path for path in map(shutil.which, ON_PATH) if path), None)
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(REMEDY)
        # Chromium refuses its sandbox to root; what it opens here is our own page on loopback.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=found, args=options)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page, large enough for all columns of Dagster's pages."""
    context = browser.new_context(
        viewport={"width": 1440, "height": 900}, timezone_id="UTC", locale="en-GB"
    )
    made = context.new_page()
    # A loaded machine takes its time over the first page of the webserver.
    made.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    yield made
    context.close()


@pytest.fixture(scope="session")
def screenshots() -> Path | None:
    """Folder of the screenshots; none without SCREENSHOTS."""
    wanted = os.environ.get("SCREENSHOTS")
    if not wanted:
        return None
    folder = Path(wanted).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def open_pages(page: Page, screenshots: Path | None) -> Callable[[str], DagsterPages]:
    """Makes a person at the webserver of that address."""
    return lambda url: DagsterPages(page, url, screenshots)
