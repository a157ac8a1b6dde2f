// The page: a form on the left, pictures in the making and those that are kept on the right.

import * as service from "./service.js";
import * as store from "./store.js";
import { Gallery } from "./gallery.js";
import * as chat from "./chat.js";

const $ = (id) => document.getElementById(id);
const IDEAS = ["a slice of pizza", "a red heart", "a sleeping cat", "an orange fox face", "a green apple", "a birthday cake with candles",
  "a cactus in a pot", "the moon with a face", "a steaming cup of coffee", "a rocket", "a sunflower",
  "a penguin", "a crystal ball", "a purple umbrella", "a snowman"];
const state = { models: [], seen: false, stopped: false };

const gallery = new Gallery({ again, tell });

// -- what the server offers ---------------------------------------------------------------------------------------

async function look() {
  const found = await service.ready();
  const workers = found?.workers?.ready ?? 0;
  const [is, words] = found === null ? ["away", "the service is away"]
    : found.redis === false ? ["away", "its store is away"]
    : workers ? ["ready", workers === 1 ? "ready" : `ready, ${workers} workers`]
    : ["waiting", found.messages?.[0]?.message || "no worker yet"];
  $("state").dataset.is = is;
  $("state-text").textContent = words;
  if (found !== null && (!state.seen || is !== state.was || is === "waiting")) await offer();
  state.was = is;
}

async function offer() {
  try {
    state.models = (await service.models()).filter((model) => !model.diptych.alias_of);
    state.seen = state.models.length > 0;
  } catch (error) {
    if (error.status === 401) askKey(Boolean(service.key.get()));
    return;
  }
  const images = state.models.filter((model) => model.diptych.modality === "image");
  fill($("model"), images.map((model) => [model.id, model.id]), images.find((model) => model.diptych.live)?.id);
  choose();
  offerText(state.models.find((model) => model.diptych.modality === "text" && model.diptych.live));
  const variants = images.filter((model) => model.diptych.live).flatMap((model) => [
    { model: model.id, deepcache: "off", label: `${images.length > 1 ? `${model.id} ` : ""}${model.diptych.precision}` },
    { model: model.id, deepcache: "auto", label: `${images.length > 1 ? `${model.id} ` : ""}${model.diptych.precision} + DeepCache` },
  ]);
  if (JSON.stringify(variants) !== JSON.stringify(state.variants)) {
    state.variants = variants;
    $("variants").replaceChildren(...variants.map((variant, k) => {
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", value: k });
      label.append(box, variant.label);
      return label;
    }));
    $("compare").hidden = variants.length < 2;
  }
}

function choose() {
  const card = chosen();
  if (!card) return;
  fill($("size"), card.sizes.map((size) => [size, size.replace("x", " × ")]), card.native_size);
  fill($("scheduler"), card.schedulers.map((name) => [name, name]), usualScheduler(card));
  const plans = ["off", "auto", ...Object.keys(card.plans ?? {})];
  fill($("plan"), [["", "the model's"], ...plans.map((name) => [name, name])], "");
  $("steps").max = Math.min(60, card.limits.max_steps ?? 60);
  if (state.chosen !== $("model").value) {
    state.chosen = $("model").value;
    $("scheduler").value = usualScheduler(card);
    $("steps").value = card.defaults.steps;
    $("guidance").value = card.defaults.guidance_scale;
    show();
  }
  $("vae-field").hidden = !card.vaes?.includes("tiny");
  const loras = card.loras ?? [];
  $("lora-field").hidden = !loras.length;
  $("loras").replaceChildren(...loras.map((name) => new Option(name)));
  if (loras.length) $("lora-hint").textContent = `Such as ${loras[0]}:0.8, several with commas.`;
}

/** The card of the chosen model. */
function chosen() {
  return state.models.find((model) => model.id === $("model").value)?.diptych;
}

/** The largest guidance that is none. */
function guidedAbove() {
  return chosen()?.defaults.guided_above ?? 1;
}

function usualScheduler(card) {
  return card.defaults.scheduler ?? card.default_scheduler;
}

/** Options of a choice; what is chosen stays, if it is still there. */
function fill(select, options, usual) {
  const before = select.dataset.filled === JSON.stringify(options) ? select.value : usual;
  select.dataset.filled = JSON.stringify(options);
  select.replaceChildren(...options.map(([value, words]) => new Option(words, value)));
  if (options.some(([value]) => value === before)) select.value = before;
}

function offerText(model) {
  $("tabs").hidden = $("expand").hidden = !model;
  if (!model || state.text?.id === model.id) return;
  state.text = model;
  chat.open($("chat"), model, (prompt) => {
    turn("pictures");
    $("prompt").value = prompt;
    $("pictures-form").requestSubmit();
  });
}

function turn(name) {
  for (const [tab, panel, word] of [["tab-pictures", "pictures-form", "pictures"], ["tab-chat", "chat", "chat"]]) {
    $(tab).setAttribute("aria-selected", word === name);
    $(tab).tabIndex = word === name ? 0 : -1;
    $(panel).hidden = word !== name;
  }
}

// -- drawing ------------------------------------------------------------------------------------------------------

const number = (value) => Number(value);

function fields() {
  const steps = number($("steps").value);
  const guidance = number($("guidance").value);
  const card = chosen();
  const given = {
    prompt: $("prompt").value.trim(),
    n: number(document.querySelector("input[name=n]:checked").value),
    steps,
    guidance_scale: guidance,
    preview_every: Math.max(1, Math.round(steps / 10)),
  };
  if ($("negative").value.trim()) given.negative_prompt = $("negative").value.trim();
  if (!$("lora-field").hidden && $("lora").value.trim()) given.lora = $("lora").value.trim();
  if ($("model").value) given.model = $("model").value;
  if ($("size").value) given.size = $("size").value;
  if ($("plan").value) given.plan = $("plan").value;
  // What is left as the model has it is not said: the service knows what goes with a plan, or a student's LoRA.
  const filled = given.lora || given.plan || card?.plan;
  if (filled && steps === card?.defaults.steps) delete given.steps;
  if (filled && guidance === card?.defaults.guidance_scale) delete given.guidance_scale;
  if ($("scheduler").value && !(card && $("scheduler").value === usualScheduler(card))) given.scheduler = $("scheduler").value;
  if ($("schedule-type").value) given.schedule_type = $("schedule-type").value;
  if (!$("vae-field").hidden && $("vae").value) given.vae = $("vae").value;
  if ($("format").value !== "png") given.output_format = $("format").value;
  return given;
}

async function draw(event) {
  event?.preventDefault();
  complain(null);
  const given = fields();
  if (!given.prompt) return complain(new service.ServiceError("Say first what is to be drawn.", { param: "prompt" }));
  const seed = $("seed").value.trim();
  if (seed && !/^\d{1,15}$/.test(seed)) {
    return complain(new service.ServiceError("A seed is a whole number, of 15 digits at most.", { param: "seed" }));
  }
  const ticked = [...$("variants").querySelectorAll(":checked")].map((box) => state.variants[box.value]);
  // Drawn here if nowhere else: one of the server's may have more digits than this language's numbers.
  given.seed = seed ? number(seed) : Math.floor(Math.random() * 2 ** 32);
  await order(ticked.length ? ticked.map(({ label, ...variant }) => [variantOf(given, variant), label]) : [[given, ""]]);
}

/** Make jobs of these fields, each with its label. */
async function order(wanted) {
  try {
    // One after the other: they stand in the gallery as they stand in the form.
    for (const [asked, label] of wanted.reverse()) {
      const job = await service.submit(asked);
      gallery.follow(job, asked, label);
    }
    tell("Drawing.");
  } catch (error) {
    complain(error);
  }
}

/** The request by another variant; a plan or decoder of one model is none of another's. */
function variantOf(given, variant) {
  const asked = { ...given, ...variant };
  if (given.model && variant.model !== given.model) for (const name of ["plan", "vae"]) delete asked[name];
  return asked;
}

function again(picture, { vary = false } = {}) {
  const { asked } = picture;
  $("prompt").value = asked.prompt;
  grow();
  $("negative").value = asked.negative_prompt ?? "";
  $("lora").value = asked.lora ?? "";
  if (asked.model !== undefined) $("model").value = asked.model;
  choose();
  const scheduler = asked.scheduler ?? (chosen() ? usualScheduler(chosen()) : undefined);
  for (const [id, value] of [["steps", asked.steps ?? chosen()?.defaults.steps], ["guidance", asked.guidance_scale ?? chosen()?.defaults.guidance_scale], ["size", asked.size], ["scheduler", scheduler], ["format", asked.output_format ?? "png"], ["schedule-type", asked.schedule_type ?? ""], ["plan", asked.plan ?? ""], ["vae", asked.vae ?? ""]]) {
    if (value !== undefined) $(id).value = value;
  }
  document.querySelector("input[name=n][value='1']").checked = true;
  $("seed").value = vary ? "" : String(picture.seed);
  show();
  if (vary || !picture.request) draw();
  else order([[picture.request, picture.label ?? ""]]);
}

function complain(error) {
  for (const wrong of document.querySelectorAll(".wrong")) wrong.classList.remove("wrong");
  $("error").hidden = error === null;
  if (error === null) return;
  if (error.status === 401) askKey(true);
  const wait = error.status === 429 && error.after ? ` Try again in ${error.after} s.` : "";
  $("error").textContent = error.message + wait;
  const at = { prompt: document.querySelector(".prompt-box"), seed: $("seed"), negative_prompt: $("negative"), lora: $("lora"), size: $("size"), scheduler: $("scheduler"), schedule_type: $("schedule-type"), plan: $("plan"), vae: $("vae") }[error.param];
  at?.classList.add("wrong");
  if (error.param === "prompt") $("prompt").focus();
}

function tell(words) {
  $("told").textContent = words;
}

// -- the form -----------------------------------------------------------------------------------------------------

function show() {
  $("steps-out").textContent = $("steps").value;
  $("guidance-out").textContent = number($("guidance").value) <= guidedAbove() ? "off" : $("guidance").value;
  $("unseed").hidden = !$("seed").value;
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

function theme(next) {
  const dark = next ?? (document.documentElement.dataset.theme
    ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  if (next) {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("diptych.theme", next);
  }
  $("theme").textContent = dark === "dark" ? "☀" : "☾";
  return dark;
}

let asking = false;
function askKey(wrong) {
  $("key").hidden = false;
  if (asking || $("key-dialog").open || (state.asked && !wrong)) return;
  asking = state.asked = true;
  $("key-input").value = service.key.get();
  $("key-dialog").showModal();
}

$("key-dialog").addEventListener("close", () => {
  asking = false;
  if ($("key-dialog").returnValue === "save") {
    service.key.set($("key-input").value.trim());
    complain(null);
    state.seen = false;
    look();
  }
});
$("key").addEventListener("click", () => { state.asked = false; askKey(true); });

$("pictures-form").addEventListener("submit", draw);
$("pictures-form").addEventListener("input", show);
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) draw(event);
});
$("model").addEventListener("change", choose);
$("unseed").addEventListener("click", () => { $("seed").value = ""; show(); $("seed").focus(); });
$("surprise").addEventListener("click", () => {
  const others = IDEAS.filter((idea) => idea !== $("prompt").value);
  $("prompt").value = others[Math.floor(Math.random() * others.length)];
  grow();
  $("prompt").focus();
});
$("expand").addEventListener("click", async () => {
  const before = $("prompt").value.trim();
  if (!before) return;
  try {
    await chat.expand(state.text, before, (words) => { $("prompt").value = words.trimStart(); grow(); });
  } catch (error) {
    complain(error);
  }
});
$("tab-pictures").addEventListener("click", () => turn("pictures"));
$("tab-chat").addEventListener("click", () => turn("chat"));
$("tabs").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = document.activeElement === $("tab-pictures") ? $("tab-chat") : $("tab-pictures");
  other.click();
  other.focus();
});
$("theme").addEventListener("click", () => theme(theme() === "dark" ? "light" : "dark"));
$("help").addEventListener("click", () => $("help-dialog").showModal());
for (const idea of IDEAS.slice(0, 5)) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: idea });
  button.addEventListener("click", () => { $("prompt").value = idea; grow(); draw(); });
  $("ideas").append(button);
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.matches?.("input:not([type=radio], [type=checkbox], [type=range]), textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") { event.preventDefault(); $("prompt").focus(); $("prompt").select(); }
  else if (event.key === "?") $("help-dialog").showModal();
  else if (event.key.toLowerCase() === "t") theme(theme() === "dark" ? "light" : "dark");
});

const kept = localStorage.getItem("diptych.theme");
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
theme();
show();
for (const picture of (await store.open()).reverse()) gallery.add(picture);
gallery.resume();
await look();
for (;;) {
  await service.pause(document.hidden ? 15000 : 3000);
  await look();
}
