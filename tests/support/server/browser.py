"""Headless Chromium, and the checks that hold for every page of a test."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

expect.set_options(timeout=20_000)

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium_path() -> str:
    """The path of Chromium; without one the test is skipped, or fails in CI."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is not None:
        return path
    message = "Chromium is missing: install it, or set CHROMIUM to its path; the chat page was not tested"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser until the block is left."""
    path = chromium_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def new_page(browser: Browser, *, may_fail: bool = False, **options: Any) -> Iterator[Page]:
    """A page with a storage of its own.

    Afterwards no script has failed, no rule of the content security policy was violated, and no request went
    to another server. A failed response is an error in the console unless it is expected.
    """
    context = browser.new_context(**options)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type != "log" else None)
    addresses: set[str] = set()
    page.on("request", lambda request: addresses.add(request.url))
    try:
        yield page
        origin = urlsplit(page.url).netloc
        if may_fail:
            errors = [error for error in errors if not error.startswith("Failed to load resource")]
        assert not errors
        assert {urlsplit(address).netloc for address in addresses} == {origin}
    finally:
        context.close()


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The contrast ratio of two colours (red, green and blue from 0 to 255), as WCAG 2 defines it."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [
            value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
            for value in (channel / 255 for channel in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
