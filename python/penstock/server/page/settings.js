// The settings: API key, system prompt, sampling parameters, theme.

import { byId, make } from "./dom.js";
import { apiKey, setting, theme } from "./storage.js";

/** The label, the minimum, the maximum and the step of each sampling parameter. */
const PARAMETERS = {
  temperature: ["Temperature", 0, 2, "any"],
  max_tokens: ["Maximum tokens", 1, "", 1],
  top_p: ["Top-p", 0, 1, "any"],
  top_k: ["Top-k", -1, "", 1],
  min_p: ["Min-p", 0, 1, "any"],
  repetition_penalty: ["Repetition penalty", 0, "", "any"],
  seed: ["Seed", "", "", 1],
};

const dialog = byId("settings");
const fields = Object.entries(PARAMETERS).map(([id, [label, min, max, step]]) => {
  const field = make("input", { id, type: "number", min, max, step });
  byId("parameters").append(make("div", {}, make("label", { htmlFor: id }, label), field));
  return field;
});

/** The sampling parameters that are set, by their names in a request. */
function parameters() {
  const values = setting.get("parameters") ?? {};
  const names = Object.keys(PARAMETERS).filter((name) => Number.isFinite(values[name]));
  return Object.fromEntries(names.map((name) => [name, values[name]]));
}

/** The sampling parameters of a request: those that are set, and for the others the defaults of the page. */
export function sampling(defaults) {
  return { ...defaults, ...parameters() };
}

/** The same in words. */
export function samplingText(defaults) {
  const values = Object.entries(sampling(defaults));
  if (!values.length) return "The files of the model choose the sampling parameters.";
  return values.map(([name, value]) => `${PARAMETERS[name][0]} ${value}`).join(", ");
}

/** Open the dialog, with the defaults in the fields that are empty; after an error, the key is asked for. */
export function openSettings(chat, defaults, error = "") {
  byId("api-key").value = apiKey.get();
  byId("system").value = chat.system;
  const values = parameters();
  for (const field of fields) {
    field.value = values[field.id] ?? "";
    field.placeholder = defaults[field.id] ?? "default";
  }
  byId("settings-error").textContent = error;
  byId("settings-error").hidden = !error;
  if (!dialog.open) dialog.showModal();
  if (error) byId("api-key").focus();
}

/** Call a function with the system prompt when the dialog is closed; the rest is stored. */
export function onSettings(listener) {
  dialog.addEventListener("close", () => {
    apiKey.set(byId("api-key").value.trim());
    const given = fields.filter((field) => field.value !== "" && field.validity.valid);
    setting.set("parameters", Object.fromEntries(given.map((field) => [field.id, field.valueAsNumber])));
    listener(byId("system").value);
  });
  byId("reset").addEventListener("click", () => fields.forEach((field) => (field.value = "")));
}

const systemTheme = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = theme.get();
  return chosen ? chosen === "dark" : systemTheme.matches;
}

function showTheme() {
  const chosen = theme.get();
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}

/** Let the button switch between the system's theme and the other one. */
export function enableTheme() {
  byId("theme").addEventListener("click", () => {
    const wanted = isDark() ? "light" : "dark";
    theme.set(wanted === (systemTheme.matches ? "dark" : "light") ? null : wanted);
    showTheme();
  });
  systemTheme.addEventListener("change", showTheme);
  showTheme();
}
