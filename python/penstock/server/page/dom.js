// Small helpers to make and find nodes.

/** The node of this id in the page. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new node with these properties and children. */
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** A button with one of the page's icons and a label. */
export function iconButton(name, label, onclick) {
  const icon = byId("icon").content.firstChild.cloneNode(true);
  icon.firstChild.setAttribute("href", `#${name}`);
  return make("button", { type: "button", className: "icon", title: label, ariaLabel: label, onclick }, icon);
}

/** A button with a text. */
export function textButton(text, className, onclick = null) {
  return make("button", { type: "button", className, onclick }, text);
}

/** Whether a key sends a question: Enter, but on touch screens, of which the keyboards lack Shift+Enter. */
export function isSending(event) {
  const isEnter = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  return isEnter && !matchMedia("(hover: none)").matches;
}

/** Copy a text, and show on a button that it is copied. */
export async function copyWith(button, text) {
  const isCopied = await copy(text);
  announce(isCopied ? "Copied." : "The browser does not allow to copy.");
  if (!isCopied || button.textContent === "\u2713") return;
  const content = [...button.childNodes];
  button.replaceChildren("\u2713");
  setTimeout(() => button.replaceChildren(...content), 1500);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyFromField(text); // pages without TLS have no clipboard API, but for localhost
  }
}

function copyFromField(text) {
  const focused = document.activeElement;
  const field = make("textarea", { value: text, className: "hidden", readOnly: true, ariaHidden: "true" });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}

/** Tell users of screen readers. */
export function announce(text) {
  byId("announcement").textContent = text;
}
