// The messages of a chat as DOM nodes: questions, and answers that grow.

import { Markdown, codeText } from "./blocks.js";
import { copyWith, iconButton, isSending, make, textButton } from "./dom.js";

/** Ends of answers that the model did not choose. */
const ENDINGS = {
  length: "The answer reached the maximum number of tokens.",
  abort: "The server ended the answer.",
  stopped: "Stopped.",
};

/** Let the buttons of code blocks copy. */
export function enableCopying(root) {
  root.addEventListener("click", ({ target }) => {
    if (target.matches(".copy-code")) copyWith(target, codeText(target.closest("figure")));
  });
}

/** A question; `on` has `edit` and `remove`. */
export class Question {
  #text;
  #on;

  constructor(message, on) {
    this.#text = message.content;
    this.#on = on;
    this.node = make("li", { className: "message question", ariaLabel: "You" });
    this.#show();
  }

  #show() {
    const body = make("div", { className: "bubble" }, this.#text);
    this.editButton = iconButton("pencil", "Edit the question", () => this.#edit());
    const copyButton = iconButton("copy", "Copy the question", () => copyWith(copyButton, this.#text));
    const remove = iconButton("bin", "Delete the question and its answer", () => this.#on.remove());
    const actions = make("div", { className: "actions" }, copyButton, this.editButton, remove);
    this.node.replaceChildren(body, actions);
  }

  #edit() {
    const rows = Math.min(this.#text.split("\n").length, 12);
    const field = make("textarea", { value: this.#text, rows, ariaLabel: "Question" });
    const save = () => field.value.trim() && this.#on.edit(field.value);
    const cancel = () => {
      this.#show();
      this.editButton.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (isSending(event)) {
        event.preventDefault();
        save();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
    });
    const buttons = [textButton("Cancel", "quiet", cancel), textButton("Send", "primary", save)];
    const row = make("div", { className: "row" }, ...buttons);
    this.node.replaceChildren(make("div", { className: "editor" }, field, row));
    field.focus();
  }
}

/** An answer; `message` is the stored one, `on` has `regenerate` and `remove`. */
export class Answer {
  #on;
  #body = make("div", { className: "body" });
  #markdown = new Markdown(this.#body);
  #thoughts = null;
  #frame = 0;

  constructor(message, on) {
    this.message = message;
    this.#on = on;
    this.node = make("li", { className: "message answer", ariaLabel: "Answer" }, this.#body);
    this.onFrame = () => {};
    if (message.reasoning) this.#showReasoning(message.reasoning);
    this.#markdown.feed(message.content);
  }

  /** Show that the answer is being generated. */
  start() {
    this.node.ariaBusy = "true";
  }

  /** Add to the answer, which is shown in the next frame. */
  add(content, reasoning) {
    if (reasoning) {
      this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
      this.#showReasoning(reasoning);
    }
    if (content) {
      this.message.content += content;
      this.#markdown.feed(content);
    }
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#markdown.flush();
      this.onFrame();
    });
  }

  #showReasoning(text) {
    if (!this.#thoughts) {
      this.#thoughts = make("div", { className: "thoughts" });
      this.node.prepend(make("details", {}, make("summary", {}, "Reasoning"), this.#thoughts));
    }
    this.#thoughts.append(text);
  }

  /** Show the complete answer, with the numbers and the buttons. */
  end() {
    cancelAnimationFrame(this.#frame);
    this.#markdown.end();
    this.node.ariaBusy = null;
    const { message } = this;
    const copyButton = iconButton("copy", "Copy the answer", () => copyWith(copyButton, message.content));
    const again = iconButton("repeat", "Regenerate the answer", () => this.#on.regenerate());
    again.classList.add("regenerate");
    const remove = iconButton("bin", "Delete the question and its answer", () => this.#on.remove());
    const numbers = make("span", { className: "numbers" }, numbersIn(message));
    const ending = ENDINGS[message.ending];
    if (message.error) {
      const retry = textButton("Try again", "quiet", () => this.#on.regenerate());
      this.node.append(make("div", { className: "error" }, make("p", {}, message.error), retry));
    }
    if (ending) this.node.append(make("p", { className: "note" }, ending));
    this.node.append(make("div", { className: "actions" }, copyButton, again, remove, numbers));
  }
}

function numbersIn({ usage, firstToken, total }) {
  if (!usage) return "";
  const texts = [`${usage.completion_tokens} tokens`];
  const seconds = (total - firstToken) / 1000;
  if (usage.completion_tokens > 1 && seconds > 0) {
    texts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (firstToken !== undefined) texts.push(`first token after ${(firstToken / 1000).toFixed(2)} s`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  texts.push(`prompt ${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`);
  return texts.join(" \u00b7 ");
}
