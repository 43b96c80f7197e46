// Inline Markdown as DOM nodes: emphasis, code, links, line breaks. Text becomes text nodes only.

import { make } from "./dom.js";

const CODE = "(?<!`)(?<ticks>`+)(?!`)(?<code>.*?[^`])\\k<ticks>(?!`)";
const TEXT = "(?<text>(?:[^\\[\\]\\\\]|\\\\.|\\[[^\\[\\]]*\\])*)";
const TARGET = "<?(?<target>[^\\s<>()]*(?:\\([^\\s<>()]*\\)[^\\s<>()]*)*)>?(?:\\s+\"[^\"]*\")?\\s*";
/** An image is a link to it: the page makes no request to another server. */
const LINK = `!?\\[${TEXT}\\]\\(\\s*${TARGET}\\)`;
const OUTSIDE_URL = "\\s<>\"`[\\]{}|\\\\^";
const BARE_URL = `(?<![\\p{L}\\p{N}])(?<url>https?://[^${OUTSIDE_URL}]*[^${OUTSIDE_URL}.,:;!?'*_~)])`;
/** The texts are bounded, so searches to their end are, too. */
const TOKEN = new RegExp(
  `\\\\(?<escaped>[!-/:-@[-\`{-~])|${CODE}|(?<break> *\\\\?\\n|<br ?/?>)|` +
    `${LINK}|${BARE_URL}|(?<run>\\*+|_+|~~)`,
  "gsu",
);
const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
/** The maximum nesting of emphasis; deeper delimiters have no effect. */
const MAX_NESTING = 8;

/** The nodes of a text. In the text of a link there are no links. */
export function inline(text, isLink = false) {
  const items = [];
  let end = 0;
  for (const found of text.matchAll(TOKEN)) {
    const item = itemOf(found, text, isLink);
    if (item === null) continue;
    items.push(text.slice(end, found.index), item);
    end = found.index + found[0].length;
  }
  return build(match([...items, text.slice(end)]));
}

/** The address if it is one of HTTP, else null. */
function safeUrl(text) {
  const url = URL.canParse(text) ? new URL(text) : null;
  return /^https?:$/.test(url?.protocol) ? url.href : null;
}

function itemOf({ groups, index, 0: whole }, text, isLink) {
  if (groups.escaped) return groups.escaped;
  if (groups.code) return make("code", {}, groups.code.replaceAll("\n", " ").replace(/^ (.+) $/, "$1"));
  if (groups.break !== undefined) return make("br");
  if (groups.run) return delimiter(text, index, groups.run);
  const href = isLink ? null : safeUrl(groups.url ?? groups.target);
  if (!href) return null;
  const children = groups.url ?? inline(groups.text, true);
  return make("a", { href, rel: "noopener noreferrer", target: "_blank" }, children);
}

/** A run of `*`, `_` or `~`, and whether it can begin or end emphasis, as in CommonMark. */
function delimiter(text, index, run) {
  const before = text[index - 1] ?? " ";
  const after = text[index + run.length] ?? " ";
  const isBound = (one, other) =>
    !SPACE.test(one) && (!PUNCTUATION.test(one) || SPACE.test(other) || PUNCTUATION.test(other));
  const isLeft = isBound(after, before);
  const isRight = isBound(before, after);
  const isWord = run[0] === "_";
  return {
    character: run[0],
    count: run.length,
    canOpen: isLeft && (!isWord || !isRight || PUNCTUATION.test(before)),
    canClose: isRight && (!isWord || !isLeft || PUNCTUATION.test(after)),
    opens: [],
    closes: 0,
  };
}

/** Pair the delimiters. Afterwards `count` is the number of characters that remain text. */
function match(items) {
  const stacks = { "*": [], _: [], "~": [] };
  items.forEach((item, index) => {
    if (!item.character) return;
    const stack = stacks[item.character];
    while (item.canClose && item.count && stack.length) {
      const opener = items[stack.at(-1)];
      const used = Math.min(opener.count, item.count, 2);
      opener.opens.unshift(item.character === "~" ? "del" : used === 2 ? "strong" : "em");
      item.closes += 1;
      opener.count -= used;
      item.count -= used;
      for (const other of Object.values(stacks)) {
        while (other.length && other.at(-1) > stack.at(-1)) other.pop();
      }
      if (!opener.count) stack.pop();
    }
    if (item.canOpen && item.count) stack.push(index);
  });
  return items;
}

function build(items) {
  const root = document.createDocumentFragment();
  const path = [root];
  for (const item of items) {
    if (!item.character) {
      path.at(-1).append(item);
      continue;
    }
    path.length -= item.closes;
    path.at(-1).append(item.character.repeat(item.count));
    for (const tag of item.opens) {
      const isDeep = path.length > MAX_NESTING;
      const node = isDeep ? path.at(-1) : make(tag);
      if (!isDeep) path.at(-1).append(node);
      path.push(node);
    }
  }
  root.normalize();
  return root;
}
