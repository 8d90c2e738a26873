"""A browser and a JupyterLab for these tests. Without Chromium they are skipped on a desk and fail in CI."""

import os
import shutil
from pathlib import Path

import pytest

from minillm.course.build.addresses import ROOT
from tests.browser import lab

SCREENSHOTS = "MINILLM_SCREENSHOTS"  # a folder to keep them in, else pytest's temporary one
HOW = "Chromium is missing: `sudo apt-get install chromium`; as root `make browser` does it"


@pytest.fixture(scope="session")
def browser():
    chromium = lab.find_chromium()
    if chromium is None:
        pytest.fail(HOW) if os.environ.get("CI") else pytest.skip(HOW)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=lab.CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A copy of the notebooks, which Lab may write to."""
    folder = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    return folder


@pytest.fixture(scope="session")
def address(browser, folder, tmp_path_factory):
    with lab.serving(folder, tmp_path_factory.mktemp("lab")) as address:
        yield address


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@pytest.fixture
def screenshots(tmp_path_factory, record_property):
    folder = Path(os.environ.get(SCREENSHOTS) or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    record_property("screenshots", str(folder))  # travels from a worker to the summary
    return folder


def pytest_terminal_summary(terminalreporter):
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    for folder in sorted({value for name, value in properties if name == "screenshots"}):
        terminalreporter.write_line(f"screenshots: {folder}")
