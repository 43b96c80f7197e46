// Markdown as DOM nodes while the text arrives: paragraphs, headings, lists, quotes, tables, code.
//
// A line that cannot change its meaning any more is added to its block at once; a line such as "--" or "1."
// waits for more. Finished blocks are not touched again. `flush` renders the end of the open block, which is
// bounded, so the time per character does not grow with the text.

import { make, textButton } from "./dom.js";
import { inline } from "./inline.js";

/** The maximum nesting of lists and quotes; deeper markers are text. */
const MAX_NESTING = 10;
/** A longer beginning of a line that is undecided is text. */
const MAX_UNDECIDED = 200;
/** The length of text after which a part of a paragraph is finished. */
const MAX_OPEN = 1000;
/** The lines and characters of a part of a code block. */
const MAX_CODE_LINES = 100;
const MAX_CODE = 20000;
const MAX_COLUMNS = 64;

const MARKERS = /^[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+|>[ \t]*)*/;
const UNDECIDED = /^(?:#{0,6}[ \t]*|[-*_+ \t]*|[-:| \t]+|\d{1,9}[.)]?|`{1,2}|~{1,2})$|^(?:```|~~~|\|)/;
const ITEM = /^([-*+]|(\d{1,9})([.)]))( +|$)/;
const FENCE = /^(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const HEADING = /^(#{1,6})(?: +|$)/;
const RULE = /^(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const DELIMITER_CELL = /^ *:?-+:? *$/;

/** A new node at the end of another one. */
function add(parent, tag, properties = {}, ...children) {
  const node = make(tag, properties, ...children);
  parent.append(node);
  return node;
}

/** A block that scrolls by itself if it is wide, also with the keyboard. */
function addWide(parent, tag, label, className = "") {
  return add(parent, tag, { className, tabIndex: 0, role: "region", ariaLabel: label });
}

/** A text of which the nodes of the end are rendered again while it grows. */
class Inline {
  constructor(node, { isParagraph = false, isHeading = false } = {}) {
    this.node = node;
    this.isParagraph = isParagraph;
    this.isHeading = isHeading;
    this.source = "";
    this.numLines = 1;
    this.isWhole = true;
    this.rendered = "";
    this.nodes = [];
  }

  append(text) {
    this.source += text;
    while (this.source.length > MAX_OPEN) this.#finish(this.#cut());
  }

  flush() {
    if (this.rendered === this.source) return;
    this.#render(this.source);
  }

  /** A position between words, if possible between lines. */
  #cut() {
    const start = this.source.slice(0, MAX_OPEN);
    const line = start.lastIndexOf("\n") + 1;
    const cut = line > MAX_OPEN / 2 ? line : start.lastIndexOf(" ") + 1;
    if (cut > MAX_OPEN / 2) return cut;
    const isPair = /[\uD800-\uDBFF]/.test(start.at(-1));
    return isPair ? MAX_OPEN - 1 : MAX_OPEN;
  }

  #finish(cut) {
    this.#render(this.source.slice(0, cut));
    this.source = this.source.slice(cut);
    this.isWhole = false;
    this.rendered = "";
    this.nodes = [];
  }

  #render(text) {
    for (const node of this.nodes) node.remove();
    const fragment = inline(text);
    this.nodes = [...fragment.childNodes];
    this.node.append(fragment);
    this.rendered = text;
  }
}

/** A code block, in parts: the browser lays out only the last one again. */
class Code {
  constructor(parent, language, fence) {
    this.fence = fence;
    const figure = add(parent, "figure", { className: "code" });
    const name = language ? `${language} code` : "code";
    const button = textButton("Copy", "copy-code");
    button.ariaLabel = `Copy the ${name}`;
    add(figure, "figcaption", {}, make("span", {}, language), button);
    this.pre = addWide(figure, "pre", name);
    this.#addPart();
  }

  #addPart() {
    this.text = document.createTextNode("");
    add(this.pre, "code", {}, this.text);
    this.pending = "";
    this.numInPart = 0;
  }

  addLine() {
    if (this.numInPart >= MAX_CODE_LINES || this.pending.length + this.text.length > MAX_CODE) {
      this.flush();
      this.#addPart();
    } else if (this.numInPart) this.pending += "\n";
    this.numInPart += 1;
  }

  append(text) {
    this.pending += text;
  }

  flush() {
    if (this.pending) this.text.appendData(this.pending);
    this.pending = "";
  }
}

/** The text of a code block. */
export function codeText(figure) {
  return [...figure.querySelectorAll("pre > code")].map((part) => part.textContent).join("\n");
}

/** A table, of which every row is a complete line. */
class Table {
  constructor(paragraph, head, alignments) {
    this.alignments = alignments;
    const frame = addWide(paragraph.parentNode, "div", "Table", "table");
    const table = add(frame, "table");
    this.#addRow(add(table, "thead"), head, "th");
    this.body = add(table, "tbody");
    paragraph.remove();
  }

  addRow(line) {
    this.#addRow(this.body, cells(line), "td");
  }

  #addRow(parent, texts, tag) {
    const row = add(parent, "tr");
    this.alignments.forEach((className, index) => {
      const text = new Inline(add(row, tag, { className }));
      text.append(texts[index] ?? "");
      text.flush();
    });
  }

  flush() {}
}

/** The cells of a row: `|` in code, or after a backslash, does not separate. */
function cells(line) {
  const found = [];
  let cell = "";
  let isCode = false;
  for (const { 0: part } of line.trim().matchAll(/\\\||[|`]|[^|`\\]+|\\/g)) {
    if (part === "|" && !isCode && found.length < MAX_COLUMNS) {
      found.push(cell);
      cell = "";
    } else cell += part === "\\|" ? "|" : part;
    if (part === "`") isCode = !isCode;
  }
  found.push(cell);
  const trimmed = found.map((text) => text.trim());
  if (trimmed.at(0) === "") trimmed.shift();
  if (trimmed.length > 1 && trimmed.at(-1) === "") trimmed.pop();
  return trimmed;
}

/** The classes of the columns if a line ends the head of a table, else null. */
function alignmentsOf(line) {
  if (line.length > MAX_OPEN || !/[-:]/.test(line) || /[^-:| ]/.test(line)) return null;
  const found = cells(line);
  if (!found.every((cell) => DELIMITER_CELL.test(cell))) return null;
  return found.map((cell) => {
    const isRight = cell.endsWith(":");
    return isRight && cell.startsWith(":") ? "center" : isRight ? "right" : "";
  });
}

/** Renders a text into a node while it arrives. */
export class Markdown {
  #containers;
  #leaf = null;
  #line = "";
  /** Whether the block of the current line is known: the rest of the line is added to it. */
  #isStarted = false;

  constructor(root) {
    this.#containers = [{ node: root, list: null }];
  }

  feed(added) {
    const text = added.replaceAll("\r", "");
    let start = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", start)) {
      this.#add(text.slice(start, end));
      this.#endLine();
      start = end + 1;
    }
    this.#add(text.slice(start));
    if (!this.#isStarted && this.#isDecided()) this.#startLine();
  }

  flush() {
    this.#leaf?.flush();
  }

  /** Show all text: there is no more of it. */
  end() {
    if (this.#isStarted || this.#line) this.#endLine();
    this.flush();
  }

  #add(text) {
    if (this.#isStarted) this.#leaf?.append?.(text);
    else this.#line += text;
  }

  #endLine() {
    if (!this.#isStarted) this.#startLine();
    this.#isStarted = false;
    this.#line = "";
    if (this.#leaf?.isHeading) this.#close();
  }

  /** Whether more characters of the line do not change its block. */
  #isDecided() {
    const line = this.#line;
    if (this.#leaf instanceof Table || line === "") return false;
    if (line.length > MAX_UNDECIDED) return true;
    if (this.#leaf instanceof Code) return !/^[\s>]*[`~]*$/.test(line);
    return !UNDECIDED.test(line.slice(MARKERS.exec(line)[0].length));
  }

  #close() {
    this.#leaf?.flush();
    this.#leaf = null;
  }

  get #top() {
    return this.#containers.at(-1);
  }

  /** Find the block of a line, and add the line so far. */
  #startLine() {
    this.#isStarted = true;
    const line = this.#line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
    const { rest, depth } = this.#continued(line);
    const isBlank = rest.trim() === "";
    if (depth < this.#containers.length) {
      const isLazy = this.#leaf?.isParagraph && !isBlank && !this.#startsBlock(rest.trimStart());
      if (isLazy) {
        this.#addToParagraph(rest.trimStart());
        return;
      }
      this.#close();
      this.#containers.length = depth;
    }
    if (this.#leaf instanceof Code) this.#addCode(rest);
    else if (isBlank) this.#close();
    else this.#addBlock(this.#openContainers(rest));
  }

  /** The line without the markers of the open lists and quotes, and the number of these. */
  #continued(line) {
    let rest = line;
    let depth = 1;
    for (; depth < this.#containers.length; depth += 1) {
      const container = this.#containers[depth];
      const text = rest.trimStart();
      const indent = rest.length - text.length;
      if (container.isQuote) {
        if (!text.startsWith(">")) break;
        rest = text.slice(text.startsWith("> ") ? 2 : 1);
      } else {
        const isNested = indent >= container.marker + 2 && ITEM.test(text);
        if (text !== "" && indent < container.indent && !isNested) break;
        rest = rest.slice(Math.min(indent, container.indent));
      }
    }
    return { rest, depth };
  }

  #startsBlock(text) {
    return text.startsWith(">") || [ITEM, FENCE, HEADING, RULE].some((pattern) => pattern.test(text));
  }

  /** Open the quotes and list items that begin in a line; returns the text after their markers. */
  #openContainers(line) {
    let rest = line;
    while (this.#containers.length <= MAX_NESTING) {
      const text = rest.trimStart();
      const item = RULE.test(text) ? null : ITEM.exec(text);
      const isSentence = this.#leaf?.isParagraph && item?.[2] && Number(item[2]) !== 1;
      if (text.startsWith(">")) {
        this.#close();
        this.#containers.push({ node: this.#block("blockquote"), list: null, isQuote: true });
        rest = text.slice(text.startsWith("> ") ? 2 : 1);
      } else if (item && !isSentence) {
        this.#close();
        this.#openItem(item, rest.length - text.length);
        rest = text.slice(item[0].length);
      } else break;
    }
    return rest.trimStart();
  }

  #openItem([marker, bullet, number, delimiter, space], column) {
    const kind = delimiter ?? bullet;
    if (this.#top.list?.kind !== kind) {
      const node = this.#block(number ? "ol" : "ul");
      if (number && Number(number) !== 1) node.start = Number(number);
      this.#top.list = { kind, node };
    }
    const width = space.length > 4 || space === "" ? bullet.length + 1 : marker.length;
    const node = add(this.#top.list.node, "li");
    this.#containers.push({ node, list: null, marker: column, indent: column + width });
  }

  /** A new block in the innermost list item or quote; it ends a list there. */
  #block(tag) {
    this.#top.list = null;
    return add(this.#top.node, tag);
  }

  #addBlock(text) {
    const fence = FENCE.exec(text);
    const heading = HEADING.exec(text);
    if (text === "") this.#close();
    else if (fence) {
      this.#close();
      this.#top.list = null;
      const language = (fence[2] ?? fence[4]).trim().split(/\s/)[0].slice(0, 40);
      this.#leaf = new Code(this.#top.node, language, fence[1] ?? fence[3]);
    } else if (heading) {
      this.#close();
      this.#leaf = new Inline(this.#block(`h${Math.min(heading[1].length + 1, 6)}`), { isHeading: true });
      this.#leaf.append(text.slice(heading[0].length));
    } else if (RULE.test(text)) {
      this.#close();
      this.#block("hr");
    } else if (this.#leaf instanceof Table && text.includes("|")) this.#leaf.addRow(text);
    else if (!this.#openTable(text)) this.#addToParagraph(text);
  }

  /** Make a table of a paragraph of one line if this line ends its head. */
  #openTable(text) {
    const paragraph = this.#leaf;
    const isLine = paragraph?.isParagraph && paragraph.numLines === 1 && paragraph.isWhole;
    if (!isLine || !paragraph.source.includes("|")) return false;
    const head = cells(paragraph.source);
    const alignments = alignmentsOf(text);
    if (alignments?.length !== head.length) return false;
    this.#leaf = new Table(paragraph.node, head, alignments);
    return true;
  }

  #addToParagraph(text) {
    if (this.#leaf?.isParagraph) {
      this.#leaf.numLines += 1;
      this.#leaf.append(`\n${text}`);
      return;
    }
    this.#close();
    this.#leaf = new Inline(this.#block("p"), { isParagraph: true });
    this.#leaf.append(text);
  }

  #addCode(line) {
    const { fence } = this.#leaf;
    const text = line.trim();
    const isEnd = text.length >= fence.length && text === fence[0].repeat(text.length);
    if (isEnd) this.#close();
    else {
      this.#leaf.addLine();
      this.#leaf.append(line);
    }
  }
}
