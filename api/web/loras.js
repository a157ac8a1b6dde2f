// LoRAs of a request: a chip with a slider for each, and those of the model's card to add.

import { $, field, make, range } from "./dom.js";

const MOST = 8; // in a request
const MOST_SHOWN = 12; // to add, at once
const SEARCHED = 8; // from so many on there is a search

let offered = [];
let chosen = []; // [{name, scale}]
let changed = () => {};

export function open(tell) {
  changed = tell;
  $("lora-search").addEventListener("input", showOffered);
  $("lora-search").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    $("lora-offered").querySelector("button")?.click();
  });
}

/** Offer these names; what is chosen and not among them goes, and is returned. */
export function offer(names) {
  if (JSON.stringify(names) === JSON.stringify(offered)) return [];
  const gone = chosen.filter(({ name }) => !names.includes(name));
  offered = names;
  chosen = chosen.filter(({ name }) => names.includes(name));
  $("lora-field").hidden = !names.length;
  show();
  return gone.map(({ name }) => `LoRA ${name}`);
}

/** The value of a request's field. */
export const value = () => chosen.map(({ name, scale }) => (scale === 1 ? name : `${name}:${scale}`)).join(",");

/** Take a request's field. Returns the names that are not offered. */
export function fill(text) {
  const entries = text.split(",").filter((part) => part.trim()).map((part) => {
    const [name, scale = "1"] = part.split(":");
    return { name: name.trim().normalize("NFC"), scale: Number(scale) };
  });
  const valid = entries.filter(({ name, scale }, k) => (
    offered.includes(name) && Math.abs(scale) <= 100 && entries.findIndex((other) => other.name === name) === k
  ));
  chosen = valid.slice(0, MOST);
  show();
  return entries.filter((entry) => !chosen.includes(entry)).map(({ name }) => name);
}

function show() {
  $("lora-chips").replaceChildren(...chosen.map((lora) => {
    const slider = range(Math.min(-1, lora.scale), Math.max(2, lora.scale), 0.01, lora.scale);
    slider.addEventListener("input", () => { lora.scale = Number(slider.value); });
    const name = make("span", { className: "name", textContent: lora.name, title: lora.name });
    const gone = make("button", { type: "button", className: "quiet", textContent: "×", title: "Remove" });
    gone.setAttribute("aria-label", `Remove the LoRA ${lora.name}`);
    gone.addEventListener("click", () => {
      chosen = chosen.filter((other) => other !== lora);
      show();
      $("lora-search").hidden ? $("lora-offered").querySelector("button")?.focus() : $("lora-search").focus();
      changed();
    });
    const strength = field(`Strength of ${lora.name}`, slider, () => `${lora.scale}`);
    slider.addEventListener("input", slider.show);
    return make("li", { className: "chip" }, name, strength, gone);
  }));
  showOffered();
}

function showOffered() {
  const words = $("lora-search").value.trim().toLowerCase();
  const left = offered.filter((name) => !chosen.some((lora) => lora.name === name));
  const found = left.filter((name) => name.toLowerCase().includes(words));
  $("lora-search").hidden = offered.length < SEARCHED || chosen.length >= MOST;
  $("lora-hint").textContent = chosen.length >= MOST ? `At most ${MOST}.`
    : !found.length && words ? "None has this name." : found.length > MOST_SHOWN ? `${found.length - MOST_SHOWN} more: search for them.` : "";
  $("lora-hint").hidden = !$("lora-hint").textContent;
  $("lora-offered").replaceChildren(...(chosen.length >= MOST ? [] : found.slice(0, MOST_SHOWN)).map((name) => {
    const button = make("button", { type: "button", textContent: `+ ${name}` });
    button.setAttribute("aria-label", `Add the LoRA ${name}`);
    button.addEventListener("click", () => {
      chosen.push({ name, scale: 1 });
      $("lora-search").value = "";
      show();
      $("lora-chips").lastElementChild.querySelector("input").focus();
      changed();
    });
    return button;
  }));
}
