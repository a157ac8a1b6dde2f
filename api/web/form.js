// The form's fields: filled in from the model's card, read into a request, filled in from one, and told of errors.

import { $, fillSelect } from "./dom.js";
import { guidedAbove, planChoices, planSummary, reads, usualScheduler } from "./cards.js";
import * as loras from "./loras.js";
import * as service from "./service.js";
import * as share from "./share.js";
import * as sources from "./sources.js";

const KEPT = "diptych.form";
/** The control of each field of a request, and what people call it. */
const FIELDS = {
  prompt: ["prompt", "Prompt"], negative_prompt: ["negative", "Negative prompt"], seed: ["seed", "Seed"], steps: ["steps", "Steps"],
  guidance_scale: ["guidance", "Guidance scale"], lora: ["lora-field", "LoRA"], model: ["model", "Model"], size: ["size", "Size"],
  scheduler: ["scheduler", "Sampler"], schedule_type: ["schedule-type", "Noise schedule"], plan: ["plan", "Plan"],
  output_format: ["format", "Format"], vae: ["vae", "VAE"], upscale: ["upscale", "Upscaler"], refiner: ["refiner", "Refiner"],
};
const IMAGES = {
  image: "Source image", images: "Source image", mask: "Mask", strength: "Strength", fit: "Fit", outpaint: "Outpaint",
  control: "Control image", image_prompts: "Image prompt",
};
let models = [];
let shown = ""; // the model whose card the form has
let pending = null; // a request to fill in once the models are known
const box = $("error"); // beside a field that may go, and take it along

/** The chosen model's card. */
export const card = () => models.find((model) => model.id === $("model").value)?.diptych;

const text = (id) => $(id).value.trim();
const number = (id) => Number($(id).value);
const visible = (id) => !$(id).closest("[hidden]");

// -- from the card ------------------------------------------------------------------------------------------------

/** Offer these image models, and what the chosen one has. */
export function offer(images) {
  models = images;
  fillSelect($("model"), images.map(({ id }) => [id, id]), images.find((model) => model.diptych.live)?.id);
  turnTo(pending?.model);
}

/** Turn to a model, if it is offered, and to what it has. */
export function turnTo(model) {
  if (models.some(({ id }) => id === model)) $("model").value = model;
  leaveOut(choose());
}

/** Say what of the form, or of what was to be filled in, is not offered. */
export function leaveOut(names) {
  if (names.length) complain(new service.ServiceError(`Not offered here, and left out: ${names.join(", ")}.`));
}

/** Fill in what waited for the models, if it did. Returns what is not offered. */
export function complete() {
  if (!pending || !card()) return [];
  return fill({ ...pending, prompt: $("prompt").value }); // which may have been written meanwhile
}

/** Offer what the chosen model has. Returns what the form had and the model has not. */
function choose() {
  const has = card();
  if (!has) return [];
  const gone = [...sources.offer(has), ...loras.offer(has.loras ?? [])];
  fillSelect($("scheduler"), has.schedulers.map((name) => [name, name]), usualScheduler(has));
  const none = [["", "none"]];
  fillSelect($("upscale"), [...none, ...(has.upscalers ?? []).map((name) => [name, name])], "");
  fillSelect($("refiner"), [...none, ...(has.refiners ?? []).map((name) => [name, name])], "");
  $("steps").max = Math.min(60, has.limits.max_steps ?? 60);
  const offered = {
    "vae-field": has.vaes?.includes("tiny"), "upscale-row": has.upscalers?.length, "refiner-row": has.refiners?.length,
    "negative-field": reads(has, "negative_prompt"), "steps-field": reads(has, "steps"), "guidance-field": reads(has, "guidance_scale"),
    "schedule-field": reads(has, "schedule_type"), "plan-field": reads(has, "plan"), "scheduler-field": has.schedulers.length > 0,
  };
  for (const [id, there] of Object.entries(offered)) $(id).hidden = !there;
  if (shown !== $("model").value) {
    shown = $("model").value;
    $("scheduler").value = usualScheduler(has);
    $("steps").value = has.defaults.steps;
    $("guidance").value = has.defaults.guidance_scale;
    $("size").value = $("size").dataset.own = "";
  }
  show();
  return gone;
}

/** Bring what depends on the fields up to date. */
export function show() {
  const has = card();
  $("steps-out").textContent = $("steps").value;
  $("guidance-out").textContent = number("guidance") <= guidedAbove(has) ? "off" : $("guidance").value;
  $("refine-from-out").textContent = `${Math.round(100 * number("refine-from"))} %`;
  $("unseed").hidden = !$("seed").value;
  for (const [id, of] of [["scale-field", "upscale"], ["refine-from-field", "refiner"]]) $(id).hidden = !$(of).value;
  const most = has?.limits.max_prompt_characters ?? Infinity;
  const length = [...$("prompt").value].length; // in code points, as the service counts
  $("prompt-count").hidden = length < 0.8 * most;
  $("prompt-count").textContent = `${length} of ${most} characters`;
  $("prompt-count").classList.toggle("over", length > most);
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
  if (!has) return;
  const shaped = sources.shaped();
  const sizes = has.sizes.map((size) => [size, size.replace("x", " × ")]);
  const own = $("size").dataset.own; // a size of the model's range that no list has, from a link or an image
  if (own && !has.sizes.includes(own)) sizes.push([own, own.replace("x", " × ")]);
  const size = $("size").value;
  fillSelect($("size"), [...(shaped ? [["auto", "as the image"]] : []), ...sizes], has.native_size);
  const stays = ($("size").dataset.shaped === "1") === shaped && [...$("size").options].some(({ value }) => value === size);
  $("size").value = stays ? size : shaped ? "auto" : has.native_size;
  $("size").dataset.shaped = shaped ? "1" : "0";
  const fields = request().fields;
  const plan = $("plan").value;
  fillSelect($("plan"), planChoices(has, fields), plan);
  $("plan").value = plan;
  $("plan-hint").textContent = planSummary(has, fields);
}

// -- a request ----------------------------------------------------------------------------------------------------

/** The form as a request: `fields` of a job, and `pictures`. A seed is among them only if one is given. */
export function request() {
  const has = card();
  const { fields: brought, pictures } = sources.request();
  const fields = { prompt: text("prompt"), n: Number(document.querySelector("input[name=n]:checked").value), ...brought };
  const give = (name, id, usual = "") => { if (visible(id) && text(id) && text(id) !== usual) fields[name] = text(id); };
  if (visible("steps")) fields.steps = number("steps");
  if (visible("guidance")) fields.guidance_scale = number("guidance");
  fields.preview_every = Math.max(1, Math.round(number("steps") / 10));
  give("negative_prompt", "negative");
  give("model", "model");
  give("size", "size");
  give("plan", "plan");
  if (loras.value()) fields.lora = loras.value();
  // What is left as the model has it is not said: the service knows what goes with a plan, or a student's LoRA.
  const filled = fields.lora || fields.plan || has?.plan;
  if (filled && fields.steps === has?.defaults.steps) delete fields.steps;
  if (filled && fields.guidance_scale === has?.defaults.guidance_scale) delete fields.guidance_scale;
  give("scheduler", "scheduler", has && usualScheduler(has));
  give("schedule_type", "schedule-type");
  give("vae", "vae");
  give("output_format", "format", "png");
  if (visible("upscale") && $("upscale").value) fields.upscale = { model: $("upscale").value, ...(text("scale") ? { scale: number("scale") } : {}) };
  if (visible("refiner") && $("refiner").value) fields.refiner = { model: $("refiner").value, from: number("refine-from") };
  if (text("seed")) fields.seed = Number(text("seed"));
  return { fields, pictures, ratio: sources.ratio() };
}

/** An error of what cannot be sent, or null. */
export function wrong() {
  const most = card()?.limits.max_prompt_characters ?? Infinity;
  const length = [...text("prompt")].length;
  const error = (message, param) => new service.ServiceError(`${param}: ${message}`, { param });
  if (!length) return new service.ServiceError("Enter a prompt first.", { param: "prompt" });
  if (length > most) return error(`has ${length} characters; the model reads at most ${most}`, "prompt");
  const seed = text("seed");
  if (seed && !(/^\d{1,16}$/.test(seed) && Number.isSafeInteger(Number(seed)))) {
    return new service.ServiceError(`A seed is a whole number from 0 to ${Number.MAX_SAFE_INTEGER}.`, { param: "seed" });
  }
  return null;
}

/** Fill in a request's fields, and defaults for what it does not say. Returns what the model does not offer. */
export function fill(fields) {
  const missing = [];
  const choice = (id, value, usual) => {
    const there = value !== undefined && [...$(id).options].some((option) => option.value === String(value));
    if (value !== undefined && !there) missing.push(Object.values(FIELDS).find(([control]) => control === id)[1].toLowerCase());
    $(id).value = there ? value : usual;
  };
  $("prompt").value = fields.prompt ?? "";
  $("negative").value = fields.negative_prompt ?? "";
  $("seed").value = fields.seed ?? "";
  const n = document.querySelector(`input[name=n][value="${Number(fields.n ?? 1)}"]`) ?? document.querySelector("input[name=n]");
  n.checked = true;
  if (Number(n.value) !== (fields.n ?? 1)) missing.push(`number ${fields.n}`);
  if (!card()) {
    pending = fields;
    show();
    return missing;
  }
  pending = null;
  choice("model", fields.model, $("model").value);
  choose();
  const has = card();
  $("steps").value = fields.steps ?? has.defaults.steps;
  $("guidance").value = fields.guidance_scale ?? has.defaults.guidance_scale;
  for (const name of ["steps", "guidance_scale"]) { // a slider has no other values
    const [id, label] = FIELDS[name];
    if (fields[name] !== undefined && number(id) !== fields[name]) missing.push(`${label.toLowerCase()} ${fields[name]}`);
  }
  $("size").dataset.own = inRange(fields.size, has.size_range) ? fields.size : "";
  choice("scheduler", fields.scheduler, usualScheduler(has));
  choice("schedule-type", fields.schedule_type, "");
  choice("plan", fields.plan, "");
  choice("vae", fields.vae, "");
  choice("format", fields.output_format, "png");
  choice("upscale", fields.upscale?.model, "");
  choice("refiner", fields.refiner?.model, "");
  $("scale").value = fields.upscale?.scale ?? "";
  $("refine-from").value = fields.refiner?.from ?? 0.8;
  missing.push(...loras.fill(fields.lora ?? "").map((name) => `LoRA ${name}`));
  show();
  choice("size", fields.size === "auto" && !sources.shaped() ? undefined : fields.size, $("size").value);
  if (!$("more").open && ["negative_prompt", "lora", "scheduler", "plan", "schedule_type"].some((name) => fields[name])) $("more").open = true;
  show();
  return missing;
}

function inRange(size, range) {
  const [width, height] = (size ?? "").split("x").map(Number);
  return Boolean(range) && width * height <= range.most_pixels
    && [width, height].every((side) => side >= range.shortest && side <= range.longest && side % range.multiple === 0);
}

// -- what is kept in the browser, and in a link -------------------------------------------------------------------

/** Keep the fields for when the page comes back. */
export function keep() {
  localStorage.setItem(KEPT, share.encode(pending ? { ...pending, prompt: text("prompt") } : request().fields));
}

export const kept = () => share.decode(localStorage.getItem(KEPT) ?? "");

// -- errors -------------------------------------------------------------------------------------------------------

/** Show an error beside the field that it is of; null takes the last one away. */
export function complain(error) {
  for (const node of document.querySelectorAll(".wrong")) node.classList.remove("wrong");
  box.hidden = true;
  if (error === null) return;
  const name = (error.param ?? "").split(".")[0];
  const wait = error.status === 429 && error.after ? ` Try again in ${error.after} s.` : "";
  box.textContent = worded(error.message) + wait;
  const control = name === "prompt" ? document.querySelector(".prompt-box") : $(FIELDS[name]?.[0] ?? "");
  const place = sources.errorPlace(error.param ?? "") ?? (control && visible(control.id || "prompt") ? control : null);
  place?.classList.add("wrong");
  for (let at = place; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (place && place !== control) place.append(box);
  else (control?.closest(".field") ?? document.querySelector(".prompt-field")).append(box);
  box.hidden = false;
  if (name === "prompt") $("prompt").focus({ preventScroll: true });
  box.scrollIntoView({ block: "nearest" });
}

const PREFIX = /^([a-z]\w*)(?:\.\w+)*: /; // of a message: its field

const labelOf = (name) => (Object.hasOwn(FIELDS, name) ? FIELDS[name][1] : Object.hasOwn(IMAGES, name) ? IMAGES[name] : null);

/** A message of the service with its field called as it is here. */
export const worded = (message) => message.replace(PREFIX, (prefix, name) => (labelOf(name) ? `${labelOf(name)}: ` : prefix));

/** Tell a failed job's message where it belongs, if it names a field. */
export function complainOf(message) {
  const [, param] = PREFIX.exec(message) ?? [];
  if (param && labelOf(param)) complain(new service.ServiceError(message, { param }));
}

/** Listen. `on.changed` is told of every change, `on.added` of an image that somebody brought. */
export function open(on) {
  const heard = () => { show(); keep(); on.changed(); };
  loras.open(heard);
  sources.open({ changed: heard, added: on.added, fail: (message, param) => complain(new service.ServiceError(message, { param })) });
  $("images-form").addEventListener("input", heard);
  $("images-form").addEventListener("change", heard);
  $("model").addEventListener("change", () => { complain(null); turnTo(); });
  $("unseed").addEventListener("click", () => { $("seed").value = ""; heard(); $("seed").focus(); });
}
