"""The chat page's Markdown in Chromium: its nodes, streams, hostile texts, the work per character."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from support.server.chat_page import COMPLETIONS, ask, body, opened, replies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from support.server.serving import Served

pytestmark = [pytest.mark.browser, pytest.mark.rare]  # each gate runs test_server_page.py


@pytest.fixture(scope="module")
def page(browser: Browser, chat_server: Served) -> Iterator[Page]:
    with opened(browser, chat_server) as page:
        page.evaluate(
            """async () => {
                const { Markdown } = await import("/page/blocks.js");
                window.render = (parts) => {
                    const root = document.createElement("div");
                    const markdown = new Markdown(root);
                    for (const part of parts) (markdown.feed(part), markdown.flush());
                    markdown.end();
                    return root;
                };
            }"""
        )
        yield page


def rendered(page: Page, *parts: str) -> str:
    """The HTML of the nodes, without what all code blocks and tables have."""
    script = """(parts) => {
        const root = render(parts);
        for (const node of root.querySelectorAll("[tabindex]")) {
            for (const name of ["tabindex", "role", "aria-label", "class"]) node.removeAttribute(name);
        }
        for (const node of root.querySelectorAll("button")) node.remove();
        for (const node of root.querySelectorAll("a")) {
            if (node.rel !== "noopener noreferrer" || node.target !== "_blank") throw new Error();
            node.removeAttribute("rel");
            node.removeAttribute("target");
        }
        return root.innerHTML;
    }"""
    html: str = page.evaluate(script, list(parts))
    return html.replace(' class=""', "")


CODE = '<figure class="code"><figcaption><span>{}</span></figcaption><pre>{}</pre></figure>'
CASES = {
    "Two\n\nparagraphs": "<p>Two</p><p>paragraphs</p>",
    "Two\nlines": "<p>Two<br>lines</p>",
    "*a* **b** ***c*** ~~d~~": "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em> "
    "<del>d</del></p>",
    "_a_ snake_case_name __b__": "<p><em>a</em> snake_case_name <strong>b</strong></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "*a **b* c**": "<p><em>a <em><em>b</em> c</em></em></p>",
    "2 * 3 * 4 and 5*6": "<p>2 * 3 * 4 and 5*6</p>",
    "\\*a\\* 1 < 2 & \\\\": "<p>*a* 1 &lt; 2 &amp; \\</p>",
    "`a < *b*` ``c ` d``": "<p><code>a &lt; *b*</code> <code>c ` d</code></p>",
    "`open": "<p>`open</p>",
    "[text](https://a.org/b_c_d)": '<p><a href="https://a.org/b_c_d">text</a></p>',
    '[*t*](<https://a.org/> "Title")': '<p><a href="https://a.org/"><em>t</em></a></p>',
    "[x](https://a.org/(1))": '<p><a href="https://a.org/(1)">x</a></p>',
    "![alt](https://a.org/i.png)": '<p><a href="https://a.org/i.png">alt</a></p>',
    "See https://a.org/b. Or": '<p>See <a href="https://a.org/b">https://a.org/b</a>. Or</p>',
    "# One\n## Two *2*\n####### 7": "<h2>One</h2><h3>Two <em>2</em></h3><p>####### 7</p>",
    "#hash": "<p>#hash</p>",
    "- a\n- b\n  - c\n\n    d\n- e": "<ul><li><p>a</p></li><li><p>b</p>"
    "<ul><li><p>c</p><p>d</p></li></ul></li><li><p>e</p></li></ul>",
    "3. a\n4. b\n\ntext": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol><p>text</p>',
    "1. a\n  - b\n2. c": "<ol><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>",
    "- a\n\n  ```\n  x\n   y\n  ```\n- b": "<ul><li><p>a</p>"
    + CODE.format("", "<code>x\n y</code>")
    + "</li>"
    "<li><p>b</p></li></ul>",
    "> a\n> b\n>\n> - c\n\nd": "<blockquote><p>a<br>b</p><ul><li><p>c</p></li></ul></blockquote><p>d</p>",
    "a\n---\nb\n* * *": "<p>a</p><hr><p>b</p><hr>",
    "```py\nif a < b:\n\n    c\n```\nd": CODE.format("py", "<code>if a &lt; b:\n\n    c</code>") + "<p>d</p>",
    "~~~\n```\n~~~": CODE.format("", "<code>```</code>"),
    "````\n```\n````": CODE.format("", "<code>```</code>"),
    "```\nopen": CODE.format("", "<code>open</code>"),
    "|a|b|\n|-|-:|\n|1|`x\\|y`|\n|2|\n\nend": "<div><table><thead><tr><th>a</th>"
    '<th class="right">b</th></tr></thead><tbody><tr><td>1</td><td class="right"><code>x|y</code></td></tr>'
    '<tr><td>2</td><td class="right"></td></tr></tbody></table></div><p>end</p>',
    "a | b\n--- | ---\n1 | 2": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td>"
    "<td>2</td></tr></tbody></table></div>",
    "| a |\nno table": "<p>| a |<br>no table</p>",
    "In\n1984. It": "<p>In<br>1984. It</p>",
    "a\r\nb\r\n": "<p>a<br>b</p>",
    "<b>x</b><br>y": "<p>&lt;b&gt;x&lt;/b&gt;<br>y</p>",
}


@pytest.mark.parametrize("text", CASES)
def test_markdown_has_the_expected_nodes(page: Page, text: str) -> None:
    assert rendered(page, text) == CASES[text]


def test_nodes_do_not_depend_on_the_parts_of_a_stream(page: Page) -> None:
    text = "\n\n".join(CASES)
    whole = rendered(page, text)
    assert rendered(page, *text) == whole
    for seed in range(20):
        source = random.Random(seed)
        cuts = sorted(source.sample(range(len(text)), source.randrange(1, 200)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
        assert rendered(page, *parts) == whole, f"seed {seed}"


def test_text_that_is_decided_is_shown_at_once(page: Page) -> None:
    script = """(parts) => {
        const root = document.createElement("div");
        return import("/page/blocks.js").then(({ Markdown }) => {
            const markdown = new Markdown(root);
            return parts.map((part) => {
                markdown.feed(part);
                markdown.flush();
                return root.textContent;
            });
        });
    }"""
    assert page.evaluate(script, ["-", " ", "it", "em", "\n", "#", "# He", "ad", "\n--", "-"]) == (
        [*["", "", "it"], *["item"] * 3, "itemHe", *["itemHead"] * 3]
    )


# ---- hostile texts

CODE_TAGS = {"CODE", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON", "PRE"}
TABLE_TAGS = {"DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}
HOSTILE = {
    "script": "<script>parent.hacked = 1</script><img src=x onerror='parent.hacked = 1'>",
    "links": "[a](javascript:parent.hacked=1) [b](data:text/html,x) [c](//a.org) [d](vbscript:x)"
    " <javascript:x> [e](java\nscript:x) [f](&#106;avascript:x) [g](file:///etc/passwd)",
    "code language": "```<img onerror=x>\" onclick='x'\ncode\n```",
    "table": "|<script>x</script>|[a](javascript:x)|\n|-|-|\n|<svg onload=x>|b|",
    "attributes": '[a](https://a.org/"onclick="x) ![" onerror="x](https://a.org/)',
}
LARGE = {
    "one line": "word " * 20_000,
    "one word": "x" * 100_000,
    "quotes": ">" * 100_000,
    "list markers": "- " * 50_000,
    "nested lists": "".join("  " * depth + "- x\n" for depth in range(300)),
    "brackets": "[" * 100_000,
    "link starts": "[a](" * 25_000,
    "stars": "*a **b " * 14_000,
    "nested emphasis": "*a " * 150 + "b* " * 150,
    "underscores": "_" * 100_000,
    "mixed delimiters": "*_~~**__" * 12_500,
    "ticks": "".join("`" * (count % 40 + 1) + "a" for count in range(4_000)),
    "open fence": "```\n" + "code\n" * 20_000,
    "long code line": "```\n" + "y" * 100_000,
    "rows": "|a|b|\n|-|-|\n" + "|1|2|\n" * 15_000,
    "wide row": "|a" * 30_000 + "|\n" + "|-" * 30_000 + "|\n",
    "headings": "#" * 50_000 + "\n" + "# " * 25_000,
    "spaces": " " * 50_000 + "a\n" + "a" + " " * 50_000,
    "rules": "- - " * 25_000 + "x",
    "digits": "1" * 50_000 + ". " + "1. " * 15_000,
    "links": "https://a.org/" * 7_000,
    "backslashes": "\\" * 100_000,
    "unicode": "\U0001f600" * 30_000 + "\u202e\u0000" * 5_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_makes_only_harmless_nodes(page: Page, name: str) -> None:
    script = """(text) => {
        const nodes = [...render([...text]).querySelectorAll("*")];
        const links = nodes.filter((node) => node.tagName === "A").map(({ protocol }) => protocol);
        const attributes = nodes.flatMap((node) => [...node.attributes].map(({ name }) => name));
        const tags = nodes.map(({ tagName }) => tagName);
        return [tags, links, attributes, render([text]).textContent];
    }"""
    tags, links, attributes, text = page.evaluate(script, HOSTILE[name])
    assert set(tags) <= {"P", "BR", "A", *CODE_TAGS, *TABLE_TAGS}
    assert set(links) <= {"https:"}
    known = {"href", "rel", "target", "class", "tabindex", "role", "aria-label", "type"}
    assert set(attributes) <= known
    assert page.evaluate("window.hacked") is None
    if name == "script":
        assert text == HOSTILE[name]


@pytest.mark.parametrize("name", LARGE)
def test_time_for_a_large_text_is_bounded(page: Page, name: str) -> None:
    script = """(parts) => {
        const begin = performance.now();
        const root = render(parts);
        return [performance.now() - begin, root.querySelectorAll("*").length, depth(root)];
        function depth(node) {
            let deepest = 0;
            for (let at = [node], level = 0; at.length; level += 1) {
                deepest = level;
                at = at.flatMap(({ children }) => [...children]);
            }
            return deepest;
        }
    }"""
    text = LARGE[name]
    parts = [text[start : start + 400] for start in range(0, len(text), 400)]
    milliseconds, count, depth = page.evaluate(script, parts)
    assert milliseconds < 10_000, "quadratic time would take minutes"
    assert count < 120_000
    assert depth < 40
    milliseconds, _, depth = page.evaluate(script, [text])
    assert milliseconds < 10_000
    assert depth < 40


@pytest.mark.parametrize(
    "unit", ["word ", "*a* `b` ", "- item\n", "line of code\n", "|1|2|\n", "text\n\n", "x"]
)
def test_work_per_character_does_not_grow(page: Page, unit: str) -> None:
    """Counts the nodes that are made while a text arrives, and one of four times its length."""
    head = {"line of code\n": "```\n", "|1|2|\n": "|a|b|\n|-|-|\n"}.get(unit, "")
    script = """(parts) => {
        let count = 0;
        const { createElement, createTextNode } = Document.prototype;
        document.createElement = (...names) => { count += 1; return createElement.apply(document, names); };
        document.createTextNode = (...texts) => { count += 1; return createTextNode.apply(document, texts); };
        render(parts);
        delete document.createElement;
        delete document.createTextNode;
        return count;
    }"""

    def made(length: int) -> int:
        text = head + unit * (length // len(unit))
        count: int = page.evaluate(script, [text[start : start + 4] for start in range(0, len(text), 4)])
        return count

    short, long = made(2_000), made(8_000)
    assert long <= 5 * short + 100


def test_hostile_answer_is_shown_as_text(browser: Browser, chat_server: Served) -> None:
    text = "\n\n".join(
        [*HOSTILE.values(), "x" * 100_000, LARGE["brackets"], LARGE["mixed delimiters"], "```\nopen"]
    )
    with opened(browser, chat_server) as page:
        page.route(COMPLETIONS, lambda route: route.fulfill(**replies({"content": text})))
        ask(page)
        expect(body(page)).to_contain_text("<script>parent.hacked = 1</script>")
        page.reload()
        expect(body(page)).to_contain_text("<script>parent.hacked = 1</script>")
        expect(body(page).locator("pre").last).to_have_text("open")


def test_policy_refuses_scripts_and_html_in_the_page(browser: Browser, chat_server: Served) -> None:
    attempts: dict[str, Any] = {
        "html": "(document.body.innerHTML = '<b>x</b>')",
        "request": "fetch('https://example.org/')",
        "script": """new Promise((resolve, reject) => {
            document.addEventListener("securitypolicyviolation", reject);
            const script = document.createElement("script");
            script.textContent = "resolve()";
            document.head.append(script);
        })""",
        "style": """new Promise((resolve, reject) => {
            document.addEventListener("securitypolicyviolation", reject);
            document.body.setAttribute("style", "color: red");
            setTimeout(resolve, 10_000);
        })""",
    }
    context = browser.new_context()
    page = context.new_page()
    page.goto(chat_server.url)
    for name, code in attempts.items():
        refused = page.evaluate(
            f"async () => {{ try {{ await {code}; return false; }} catch {{ return true; }} }}"
        )
        assert refused, name
    context.close()
