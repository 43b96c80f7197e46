// Chats and settings in the browser's storage, which is bounded; the API key lasts as long as the tab.

/** Pages of other servers under the same origin have other paths. */
const PREFIX = `penstock:${location.pathname}:`;
const CHAT = `${PREFIX}chat:`;
const KEY = `${PREFIX}key`;
export const MAX_CHATS = 100;
/** Of all chats; browsers allow about five million. */
export const MAX_CHARACTERS = 2_000_000;

function read(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

/** Store a value, or remove it; returns whether that was possible. */
function write(storage, key, value) {
  try {
    if (value === null || value === "") window[storage].removeItem(key);
    else window[storage].setItem(key, value);
    return true;
  } catch {
    return false;
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function isChat(chat) {
  const isText = (message) => typeof message?.content === "string";
  return typeof chat?.id === "string" && Number.isFinite(chat.time) && [chat.messages].flat().every(isText);
}

/** The stored chats, the newest first, each with the size of its text. */
function stored() {
  const found = [];
  try {
    for (const key of Object.keys(localStorage).filter((key) => key.startsWith(CHAT))) {
      const text = localStorage.getItem(key) ?? "";
      const chat = parse(text);
      if (isChat(chat)) found.push({ chat, size: text.length });
      else localStorage.removeItem(key);
    }
  } catch {
    return [];
  }
  return found.sort((a, b) => b.chat.time - a.chat.time);
}

/** The stored chats, the newest first. */
export function chats() {
  return stored().map(({ chat }) => chat);
}

/** A chat without messages. */
export function newChat(system = "") {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  return { id, time: 0, title: "", system, messages: [] };
}

/** Store a chat, in place of the oldest ones if there is no room; returns whether it is stored. */
export function saveChat(chat) {
  const text = JSON.stringify(chat);
  if (text.length > MAX_CHARACTERS) return false;
  const others = stored().filter((item) => item.chat.id !== chat.id);
  let size = others.reduce((sum, item) => sum + item.size, text.length);
  while (others.length && (others.length >= MAX_CHATS || size > MAX_CHARACTERS)) {
    const oldest = others.pop();
    removeChat(oldest.chat);
    size -= oldest.size;
  }
  while (!write("localStorage", CHAT + chat.id, text)) {
    if (!others.length) return false;
    removeChat(others.pop().chat);
  }
  return true;
}

export function removeChat(chat) {
  write("localStorage", CHAT + chat.id, null);
}

export function removeAllChats() {
  for (const chat of chats()) removeChat(chat);
}

export const apiKey = {
  get: () => read("sessionStorage", KEY) ?? "",
  set: (key) => write("sessionStorage", KEY, key),
};

/** The settings are `model` and `parameters`. */
export const setting = {
  get: (name) => parse(read("localStorage", PREFIX + name)),
  set: (name, value) => write("localStorage", PREFIX + name, JSON.stringify(value)),
};

/** The theme is that of all pages of the origin. `null` is the system's. */
export const theme = {
  get: () => read("localStorage", "penstock:theme"),
  set: (name) => write("localStorage", "penstock:theme", name),
};
