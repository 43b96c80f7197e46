"""Measures how smoothly the server's chat page shows a fast stream, in headless Chromium.

    .venv/bin/python benches/chat_page.py [--rate 500] [--seconds 10]
    .venv/bin/python benches/chat_page.py --screenshot docs/chat.png

The page is that of a server in this process. An answer of Markdown arrives with `rate` tokens per second, one
event each. It prints the time between frames, the longest task of the page's thread, and the share of the
time for which that thread was busy. `--screenshot` takes a picture of answers of the demo model instead.
CHROMIUM can be the path of the browser.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import sys
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import uvicorn
from playwright.sync_api import sync_playwright

import penstock.server
from penstock import demo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page
    from starlette.types import Receive, Scope, Send

PART = """## Section

Rayleigh scattering explains **why the sky is blue**: `1/wavelength^4`, as [a page](https://example.org) says.

1. Sunlight enters the atmosphere, and *molecules* scatter it.
2. Blue light is scattered more than red light.

| colour | wavelength |
|---|---:|
| blue | 450 nm |
| red | 650 nm |

```python
def scattering(wavelength, reference=650):
    return (reference / wavelength) ** 4
```

"""
#: The first one has a chat of its own.
QUESTIONS = (
    "Explain gravity in two sentences.",
    "Give me three tips for sleeping well, as a list.",
    "Write a short Python function for the factorial.",
)
#: Frames and long tasks while the answer grows.
OBSERVE = """
window.frames_seen = [];
window.tasks_seen = [];
new PerformanceObserver((list) => tasks_seen.push(...list.getEntries().map(({ duration }) => duration)))
    .observe({ type: "longtask" });
const note = (time) => (frames_seen.push(time), requestAnimationFrame(note));
requestAnimationFrame(note);
"""


class Paced:
    """The server; it answers chats with text at a given rate."""

    def __init__(self, application: Any, rate: float, seconds: float) -> None:
        self._application = application
        self._rate = rate
        self._count = int(rate * seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["path"] != "/v1/chat/completions":
            await self._application(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = PART * (4 * self._count // len(PART) + 1)
        begin = time.perf_counter()
        for index in range(self._count):
            delay = begin + index / self._rate - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            choice = {
                "index": 0,
                "delta": {"content": text[4 * index : 4 * index + 4]},
                "finish_reason": None,
            }
            event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@contextmanager
def serving(application: Any) -> Iterator[str]:
    """Serve an application in a thread; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def opened(address: str, **options: Any) -> Iterator[Page]:
    """The chat page in a browser."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        page.goto(address)
        page.locator("#model:enabled").wait_for()
        yield page
        browser.close()


def measure(page: Page) -> dict[str, float]:
    """Ask a question, and return the numbers of its stream."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return sum(item["value"] for item in metrics if item["name"] == "TaskDuration")

    page.evaluate(OBSERVE)
    before, begin = busy(), time.perf_counter()
    page.fill("#question", QUESTIONS[0])
    page.press("#question", "Enter")
    page.locator(".answer .actions").wait_for(timeout=120_000)
    seconds, work = time.perf_counter() - begin, busy() - before
    frames, tasks = page.evaluate("[frames_seen, tasks_seen]")
    gaps = sorted(later - earlier for earlier, later in pairwise(frames))
    return {
        "characters": page.evaluate("document.querySelector('.answer .body').textContent.length"),
        "seconds": round(seconds, 2),
        "frames per second": round(len(frames) / seconds, 1),
        "median time between frames, ms": round(gaps[len(gaps) // 2], 1),
        "99th percentile, ms": round(gaps[len(gaps) * 99 // 100], 1),
        "longest, ms": round(gaps[-1], 1),
        "tasks above 50 ms": len(tasks),
        "longest task, ms": round(max(tasks, default=0), 1),
        "busy, %": round(100 * work / seconds, 1),
    }


def take_screenshot(address: str, file: str) -> None:
    """A picture of real answers."""
    parameters = json.dumps(json.dumps({"temperature": 0, "max_tokens": 400}))
    with opened(address, color_scheme="light") as page:
        page.evaluate(f"localStorage['penstock:/:parameters'] = {parameters}")
        for question in QUESTIONS:
            page.fill("#question", question)
            page.press("#question", "Enter")
            page.locator("#send:visible").wait_for(timeout=120_000)
            if question == QUESTIONS[0]:
                page.click("#new-chat")
        page.mouse.move(640, 700)
        page.screenshot(path=file)


def main() -> None:
    """Measure, or take the picture."""
    parser = argparse.ArgumentParser(description="Measures the chat page in Chromium.")
    parser.add_argument("--rate", type=float, default=500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--screenshot", metavar="FILE")
    given = parser.parse_args()
    with penstock.Engine(demo.model_path()) as engine:
        application = penstock.server.app({"SmolLM2-135M-Instruct": engine})
        if given.screenshot:
            with serving(application) as address:
                take_screenshot(address, given.screenshot)
            return
        with serving(Paced(application, given.rate, given.seconds)) as address, opened(address) as page:
            sys.stdout.writelines(f"{name}: {value}\n" for name, value in measure(page).items())


main()
