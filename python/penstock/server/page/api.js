// Requests to the server that this page is from; the addresses are relative, so a prefix does not matter.

import { apiKey } from "./storage.js";

/** The time between two questions for the state of the server, in milliseconds; it grows unless a model loads. */
const HEALTH_INTERVAL = 500;
const MAX_HEALTH_INTERVAL = 4000;
const UNREADABLE = "The server sent an answer that cannot be read.";

/** A request that failed, in plain words. */
export class RequestError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function send(path, options = {}) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (options.body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server cannot be reached.");
  }
}

async function errorOf(response) {
  const { status } = response;
  const text = await response.text().catch(() => "");
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  return new RequestError(explained(status, messageIn(text), retryAfter), status);
}

function messageIn(text) {
  try {
    return String(JSON.parse(text).error.message);
  } catch {
    return "";
  }
}

function explained(status, message, retryAfter) {
  const later = retryAfter ? ` Try again in ${retryAfter} s.` : " Try again later.";
  if (status === 401) {
    return apiKey.get() ? "The server does not accept this API key." : "This server needs an API key.";
  }
  if (status === 429) return `The server has too many requests now.${later}`;
  if (status === 503) return `The model is not available now.${later}`;
  const outcome = status >= 500 ? "failed" : "refused the request";
  return `The server ${outcome} (${status})${message ? `: ${message}` : "."}`;
}

/** The models of the server: objects with `id`, `max_model_len` and `chat_sampling`. */
export async function models() {
  const response = await send("v1/models");
  if (!response.ok) throw await errorOf(response);
  const found = await response.json().catch(() => null);
  if (!Array.isArray(found?.data)) throw new RequestError(UNREADABLE);
  return found.data;
}

/** The events of a streamed chat: objects with `content`, `reasoning`, `usage` and `ending`. */
export async function* answer(body, signal) {
  const response = await send("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let isDone = false;
  while (!isDone) {
    const { value, done } = await read(reader);
    if (done) throw new RequestError("The connection ended before the answer was complete.");
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data: "))) {
      const data = line.slice(6);
      if (data === "[DONE]") isDone = true;
      else yield eventOf(data);
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The connection to the server was lost.");
  }
}

function eventOf(data) {
  let event = null;
  try {
    event = JSON.parse(data);
  } catch {
    // refused below
  }
  if (event?.error) throw new RequestError(`The answer ended early: ${event.error.message ?? event.error}`);
  const choice = event?.choices?.[0];
  const { delta } = choice ?? {};
  const content = delta?.content ?? "";
  const reasoning = delta?.reasoning ?? delta?.reasoning_content ?? "";
  const isReadable = event instanceof Object && typeof content === "string" && typeof reasoning === "string";
  if (!isReadable) throw new RequestError(UNREADABLE);
  return { content, reasoning, usage: event.usage, ending: choice?.finish_reason };
}

/** The state of the server: "loading" with the loaded part of all bytes, or another one. */
export async function health() {
  let found;
  try {
    found = await (await send("health")).json();
  } catch {
    return { status: "unreachable" };
  }
  if (found.status === "ok") return { status: "ok" };
  const states = Object.values(found.models ?? {});
  if (!states.some((state) => state.status === "loading")) return { status: "unavailable" };
  const sum = (name) => states.reduce((total, state) => total + (state[name] ?? 0), 0);
  return { status: "loading", loaded: sum("bytes") ? sum("bytes_loaded") / sum("bytes") : 0 };
}

/** Ask for the state while the page is visible until the server is ready. `check` returns it, `show` gets it. */
export async function untilReady(check, show) {
  for (let interval = HEALTH_INTERVAL; ; interval = Math.min(2 * interval, MAX_HEALTH_INTERVAL)) {
    const state = await check();
    show(state);
    if (state.status === "ok") return;
    if (state.status === "loading") interval = HEALTH_INTERVAL;
    await new Promise((resolve) => setTimeout(resolve, interval));
    if (document.hidden) await new Promise((resolve) => (document.onvisibilitychange = resolve));
  }
}
