// The chat page: one chat is open, at most one answer is generated.

import { answer, health, models, untilReady } from "./api.js";
import { announce, byId, iconButton, isSending, make, textButton } from "./dom.js";
import { Answer, Question, enableCopying } from "./messages.js";
import { enableTheme, onSettings, openSettings, sampling, samplingText } from "./settings.js";
import { chats, newChat, removeAllChats, removeChat, saveChat, setting } from "./storage.js";

/** The distance from the end, in pixels, within which the page follows an answer. */
const NEAR_END = 60;
/** The length of an answer that is read out. */
const MAX_ANNOUNCED = 2000;
const MAX_TITLE = 60;

const scroller = byId("scroller");
const list = byId("messages");
const question = byId("question");
const select = byId("model");

let chat = newChat();
/** The request for the growing answer: its controller, and the function that ends it. */
let running = null;
let isFollowing = true;
/** The models of the server. */
let cards = [];

// ---- the open chat

function openChat(next) {
  stop();
  chat = next;
  document.title = chat.title ? `${chat.title} \u2013 Penstock` : "Penstock";
  list.replaceChildren(...chat.messages.map((message, index) => viewOf(message, index).node));
  showState();
  showChats();
  showSidebar(false);
  isFollowing = true;
  follow();
}

function viewOf(message, index) {
  const on = {
    edit: (text) => edit(index, text),
    remove: () => removeExchange(index),
    regenerate: () => regenerate(index),
  };
  if (message.role === "user") return new Question(message, on);
  const view = new Answer(message, on);
  view.end();
  return view;
}

function showState() {
  byId("welcome").hidden = chat.messages.length > 0;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

function save() {
  if (!chat.messages.length) removeChat(chat);
  else {
    chat.time = Date.now();
    chat.title ||= chat.messages[0].content.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);
    if (!saveChat(chat)) announce("This chat is too long to be stored in the browser.");
  }
  showChats();
}

function showChats() {
  const rows = chats().map((item) => {
    const open = textButton(item.title, "chat", () => openChat(item));
    if (item.id === chat.id) open.ariaCurrent = "true";
    const remove = iconButton("bin", `Delete the chat \u201c${item.title}\u201d`, () => {
      if (item.id === chat.id) openChat(newChat(chat.system));
      removeChat(item);
      showChats();
    });
    return make("li", {}, open, remove);
  });
  byId("chats").replaceChildren(...rows);
  byId("remove-all").hidden = rows.length === 0;
}

// ---- questions and answers

async function ask(text) {
  stop();
  chat.messages.push({ role: "user", content: text });
  list.append(viewOf(chat.messages.at(-1), chat.messages.length - 1).node);
  await generate();
}

async function edit(index, text) {
  truncate(index);
  await ask(text);
}

async function regenerate(index) {
  truncate(index);
  await generate();
}

function removeExchange(index) {
  stop();
  const first = chat.messages[index].role === "user" ? index : index - 1;
  const last = chat.messages[first + 1]?.role === "assistant" ? first + 2 : first + 1;
  chat.messages.splice(first, last - first);
  save();
  openChat(chat);
  question.focus();
}

/** Remove the messages from this one on. */
function truncate(index) {
  stop();
  chat.messages.length = index;
  while (list.children.length > index) list.lastChild.remove();
}

function stop() {
  running?.controller.abort();
  running?.finish({ ending: "stopped" });
}

async function generate() {
  const message = { role: "assistant", content: "" };
  const request = requestOf(chat);
  const index = chat.messages.push(message) - 1;
  const on = { remove: () => removeExchange(index), regenerate: () => regenerate(index) };
  const view = new Answer(message, on);
  const controller = new AbortController();
  const own = { controller, finish };
  running = own;
  list.append(view.node);
  view.start();
  view.onFrame = follow;
  isFollowing = true;
  save();
  showState();
  follow();
  question.focus();
  announce("Answering.");
  const begin = performance.now();
  try {
    for await (const event of answer(request, controller.signal)) {
      if (running !== own) return;
      const { content, reasoning, usage, ending } = event;
      if (content || reasoning) message.firstToken ??= performance.now() - begin;
      if (usage) message.usage = usage;
      message.total = performance.now() - begin;
      if (ending) message.ending = ending;
      view.add(content, reasoning);
    }
    finish({});
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
  }

  /** Show the end of the answer, once. */
  function finish(ending) {
    if (running !== own) return;
    running = null;
    Object.assign(message, ending);
    view.end();
    save();
    showState();
    follow();
    const text = message.content.slice(0, MAX_ANNOUNCED);
    announce(message.error ?? `${message.ending === "stopped" ? "Stopped" : "Answer"}: ${text}`);
  }

  function fail(error) {
    finish({ error: error.message });
    if (error.status === 401) openSettings(chat, samplingDefaults(), error.message);
    if (error.status === 503 || error.status === 0) showHealth();
  }
}

function requestOf({ system, messages }) {
  const texts = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content } of messages) {
    if (role === "user" || content) texts.push({ role, content });
    else texts.pop(); // a question without an answer
  }
  const options = { include_usage: true, continuous_usage_stats: true };
  const model = select.disabled ? undefined : select.value;
  return { ...sampling(samplingDefaults()), model, messages: texts, stream: true, stream_options: options };
}

// ---- the server

/** Show the models; returns the state of the server. */
async function showModels() {
  try {
    cards = await models();
    const chosen = select.disabled ? setting.get("model") : select.value;
    select.replaceChildren(...cards.map(({ id }) => make("option", {}, id)));
    if (cards.some(({ id }) => id === chosen)) select.value = chosen;
    select.disabled = cards.length === 0;
    showSampling();
  } catch (error) {
    if (error.status !== 401) return { status: "failed", text: error.message };
    openSettings(chat, samplingDefaults(), error.message);
  }
  return { status: "ok" };
}

/** The sampling parameters of the page with this model; none if its files have some. */
function samplingDefaults() {
  return cards.find(({ id }) => id === select.value)?.chat_sampling ?? {};
}

function showSampling() {
  byId("sampling").textContent = samplingText(samplingDefaults());
}

const STATES = {
  loading: "The server loads the model.",
  unavailable: "The model is not available now.",
  unreachable: "The server cannot be reached.",
  ok: "",
};

function showBanner({ status, loaded, text = STATES[status] }) {
  byId("banner").hidden = status === "ok";
  if (byId("banner-text").textContent !== text) byId("banner-text").textContent = text;
  byId("banner-progress").hidden = status !== "loading";
  if (loaded !== undefined) byId("banner-progress").value = loaded;
}

let isWaiting = false;

/** Show the state of the server until it is ready and its models are known. */
async function showHealth() {
  if (isWaiting) return;
  isWaiting = true;
  await untilReady(async () => {
    const state = await health();
    return state.status === "ok" ? await showModels() : state;
  }, showBanner);
  isWaiting = false;
}

// ---- scrolling

function follow() {
  if (isFollowing) scroller.scrollTop = scroller.scrollHeight;
  showToEnd();
}

function showToEnd() {
  byId("to-end").hidden = isFollowing || scroller.scrollHeight <= scroller.clientHeight;
}

function distanceFromEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
}

// ---- the sidebar of narrow windows

/** Open or close the drawer. While it is open, the focus stays in it. */
function showSidebar(isOpen) {
  document.body.classList.toggle("with-sidebar", isOpen);
  byId("toggle-sidebar").ariaExpanded = String(isOpen);
  byId("main").inert = isOpen;
}

function openSidebar() {
  showSidebar(true);
  byId("new-chat").focus();
}

function leaveSidebar() {
  showSidebar(false);
  byId("toggle-sidebar").focus();
}

// ---- events

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function submit() {
  const text = question.value.trim();
  if (!text || running) return;
  question.value = "";
  fitQuestion();
  ask(text);
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  question.addEventListener("keydown", (event) => {
    if (!isSending(event)) return;
    event.preventDefault();
    submit();
  });
  question.addEventListener("input", fitQuestion);
  byId("stop").addEventListener("click", () => {
    stop();
    question.focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("settings").open) return;
    if (running) stop();
    else if (byId("main").inert) leaveSidebar();
  });
  byId("new-chat").addEventListener("click", () => {
    openChat(newChat(chat.system));
    question.focus();
  });
  byId("remove-all").addEventListener("click", () => {
    if (!confirm("Remove all chats from this browser?")) return;
    stop();
    removeAllChats();
    openChat(newChat());
  });
  byId("toggle-sidebar").addEventListener("click", openSidebar);
  byId("close-sidebar").addEventListener("click", leaveSidebar);
  document.body.addEventListener("click", ({ target }) => {
    if (target === document.body) showSidebar(false);
  });
  matchMedia("(max-width: 760px)").addEventListener("change", () => showSidebar(false));
  byId("open-settings").addEventListener("click", () => openSettings(chat, samplingDefaults()));
  onSettings((system) => {
    chat.system = system;
    if (chat.messages.length) save();
    if (select.disabled) showHealth();
    else showSampling();
  });
  select.addEventListener("change", () => {
    setting.set("model", select.value);
    showSampling();
  });
  scroller.addEventListener("scroll", () => {
    isFollowing = distanceFromEnd() < NEAR_END;
    showToEnd();
  });
  byId("to-end").addEventListener("click", () => {
    isFollowing = true;
    follow();
  });
  addEventListener("pagehide", () => {
    if (running) save();
  });
  enableCopying(list);
}

async function start() {
  enableTheme();
  listen();
  openChat(chats()[0] ?? chat);
  question.focus();
  await showHealth();
}

start();
