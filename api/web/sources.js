// The images that a request brings along: its source with a mask, control images, image prompts. They come by a file
// dialog, by dropping, by pasting, or from the gallery, and are offered where the model's card has what reads them.

import { announce, field, fillSelect, make, png, range, select, $ } from "./dom.js";
import { draws, reads } from "./cards.js";
import { paint } from "./mask.js";

// Of a file that the API takes as it is; of any other the pixels are sent as PNG, so many that its size is within these too.
const TAKEN = { types: ["image/png", "image/jpeg", "image/webp"], bytes: 16 * 2 ** 20, pixels: 4096 ** 2, side: 8192 };
const SENT_PIXELS = 2048 ** 2;
const FITS = [["stretch", "stretch"], ["crop", "crop the middle"], ["contain", "fit inside"], ["exact", "must match"]];
const SIDES = ["left", "top", "right", "bottom"];
/** Of each role: the request's field, what it is called, also in short, how many there may be, whether a card offers it. */
const ROLES = {
  source: { field: "images", label: "Source image", short: "Source", most: 1, offered: (card) => draws(card, "image") || draws(card, "mask") },
  control: { field: "control", label: "Control image", short: "Control", most: 4, offered: (card) => card.controls?.length > 0 },
  prompt: { field: "image_prompts", label: "Image prompt", short: "Image prompt", most: 4, offered: (card) => card.image_prompts?.length > 0 },
};

let card = null;
let items = []; // as they stand in the list
let asked = "source"; // the role that the file dialog was opened for
let lastMask = Promise.resolve(); // of the dialog
let on = { changed() {}, added() {}, fail() {} };

const of = (role) => items.filter((item) => item.role === role);
export const roles = () => (card ? Object.keys(ROLES).filter((role) => ROLES[role].offered(card)) : []);
export const label = (role) => ROLES[role].label;
export const short = (role) => ROLES[role].short;
const free = (role) => roles().includes(role) && of(role).length < ROLES[role].most;

/** Listen; `handlers` are `changed`, told of every change, `added`, of what somebody brought, and `fail`, of a file that
 * cannot be read, with the request's field. */
export function open(handlers) {
  on = handlers;
  $("file").addEventListener("change", async () => {
    await addAll(asked, [...$("file").files]);
    $("file").value = "";
  });
  const takes = () => roles().length > 0 && !document.querySelector("dialog[open]");
  const carries = (event) => event.dataTransfer?.types.includes("Files");
  const over = (event) => {
    if (!carries(event)) return;
    event.preventDefault(); // also where it is not taken: the browser would leave the page for it
    if (takes()) document.body.dataset.dropping = event.target.closest?.("[data-role]")?.dataset.role ?? "any";
    else event.dataTransfer.dropEffect = "none";
  };
  for (const type of ["dragenter", "dragover"]) document.addEventListener(type, over);
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) delete document.body.dataset.dropping; });
  document.addEventListener("drop", (event) => {
    delete document.body.dataset.dropping;
    if (!carries(event)) return;
    event.preventDefault();
    if (takes()) addAll(event.target.closest?.("[data-role]")?.dataset.role, [...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    const { files = [], types = [] } = event.clipboardData ?? {};
    const pasted = [...files].filter(({ type }) => type.startsWith("image/"));
    if (!pasted.length || types.includes("text/plain") || !takes()) return; // text of an office program has an image beside it
    event.preventDefault();
    addAll(undefined, pasted);
  });
}

/** Offer what the card has. What it does not read goes; returns what that is called. */
export function offer(next) {
  card = next;
  const gone = items.filter((item) => !roles().includes(item.role));
  for (const item of gone) remove(item);
  for (const item of items) item.offer?.();
  $("sources").hidden = !roles().length;
  $("sources-hint").textContent = card.inpaint_only ? "This model only inpaints: it needs a source image and a mask." : "Drop or paste an image, or choose:";
  $("sources-hint").classList.toggle("by-key", !card.inpaint_only);
  show();
  return gone.map((item) => label(item.role).toLowerCase());
}

/** Add files in a role, or each in the first one that is free. */
async function addAll(role, files) {
  for (const file of files) {
    const next = roles().find((each) => (!role || each === role) && (free(each) || role === "source")); // whose first gives way
    if (!next) return on.fail(`${file.name}: there is no place for another image. Remove one first.`, ROLES[role ?? roles()[0]].field);
    if (!await add(next, file)) continue;
    announce(`${label(next)} added.`);
    on.added();
  }
}

/** Add an image. `values` are those of its fields, and a `mask`. Returns whether it could be read. */
export async function add(role, blob, values = {}) {
  if (!roles().includes(role)) return false;
  let image;
  try {
    image = await readable(blob);
  } catch {
    on.fail(`${blob.name ? `${blob.name}: ` : ""}this browser cannot read it as an image. Save it as PNG, JPEG or WebP first.`, ROLES[role].field);
    return false;
  }
  if (of(role).length >= ROLES[role].most) remove(of(role)[0]);
  const item = { role, ...image, values };
  ({ source: buildSource, control: buildControl, prompt: buildPrompt })[role](item);
  items.push(item);
  items.sort((a, b) => Object.keys(ROLES).indexOf(a.role) - Object.keys(ROLES).indexOf(b.role));
  $("sources-list").replaceChildren(...items.map(({ node }) => node));
  show();
  on.changed();
  return true;
}

/** The image as a format that the API takes, its size, and whether parts of it are transparent. Rejects what is no image. */
async function readable(blob) {
  const bitmap = await createImageBitmap(blob);
  const { width, height } = bitmap;
  const small = make("canvas", { width: Math.min(width, 128), height: Math.min(height, 128) }).getContext("2d", { willReadFrequently: true });
  small.imageSmoothingEnabled = false;
  small.drawImage(bitmap, 0, 0, small.canvas.width, small.canvas.height);
  const { data } = small.getImageData(0, 0, small.canvas.width, small.canvas.height);
  const transparent = data.some((value, k) => k % 4 === 3 && value === 0);
  const { types, bytes, pixels, side } = TAKEN;
  if (types.includes(blob.type) && blob.size <= bytes && width * height <= pixels && Math.max(width, height) <= side) {
    bitmap.close();
    return { blob, width, height, transparent, size: `${width} × ${height}` };
  }
  const scale = Math.min(1, Math.sqrt(SENT_PIXELS / (width * height)), side / Math.max(width, height));
  const canvas = make("canvas", { width: Math.max(1, Math.floor(scale * width)), height: Math.max(1, Math.floor(scale * height)) });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const size = `${canvas.width} × ${canvas.height}${scale < 1 ? `, reduced from ${width} × ${height}` : ""}`;
  return { blob: await png(canvas), width: canvas.width, height: canvas.height, transparent, size };
}

function remove(item) {
  items = items.filter((other) => other !== item);
  item.node.remove();
  URL.revokeObjectURL(item.url);
  show();
  on.changed();
}

export function clear() {
  for (const item of [...items]) remove(item);
}

// -- a request's fields -------------------------------------------------------------------------------------------

/** Resolves when the mask that was painted last is there: its dialog closes before the mask is encoded. */
export const settled = () => lastMask.catch(() => {});

/** What a request has of them: its fields, with {picture: k} for the k-th of `pictures`, [{blob, field}]. */
export function request() {
  const pictures = [];
  const refer = (blob, name) => ({ picture: pictures.push({ blob, field: name }) - 1 });
  const fields = {};
  for (const { role, blob, mask, read } of items) {
    const { field: name } = ROLES[role];
    if (role === "source") {
      Object.assign(fields, { type: "edit", images: [refer(blob, name)] }, read());
      if (mask && draws(card, "mask")) fields.mask = refer(mask, "mask");
    } else (fields[name] ??= []).push({ image: refer(blob, name), ...read() });
  }
  return { fields, pictures };
}

/** Take a request's images and their fields. Resolves when they are there. */
export async function restore({ fields = {}, pictures = [] }) {
  clear();
  const blob = (reference) => pictures[reference?.picture]?.blob;
  const source = blob(fields.images?.[0]);
  if (source) await add("source", source, { ...fields, mask: blob(fields.mask) ?? null });
  for (const [role, { field: name }] of Object.entries(ROLES).slice(1)) {
    for (const entry of fields[name] ?? []) if (blob(entry.image)) await add(role, blob(entry.image), entry);
  }
}

/** Width by height of what is drawn, if no size is asked for: as far as this page can tell. */
export function ratio() {
  const { width, height } = of("source")[0] ?? of("control")[0] ?? {};
  return width ? width / height : null;
}

/** Whether there is a source or a control image, whose shape a picture may take. */
export const shaped = () => ratio() !== null;

/** The node beside which an error of this parameter belongs, if it is one of an image. */
export function errorPlace(param) {
  const name = param.split(".")[0];
  const role = { image: "source", images: "source", mask: "source", strength: "source", fit: "source", outpaint: "source", control: "control", image_prompts: "prompt" }[name];
  return role && (of(role)[0]?.node ?? $("sources"));
}

// -- the list -----------------------------------------------------------------------------------------------------

function show() {
  $("sources-add").replaceChildren(...roles().map((role) => {
    const button = make("button", { type: "button", textContent: `+ ${short(role)}`, disabled: !free(role), id: `add-${role}` });
    button.setAttribute("aria-label", `Add a ${label(role).toLowerCase()}`.replace("a image", "an image"));
    button.dataset.role = role;
    button.addEventListener("click", () => {
      asked = role;
      $("file").multiple = ROLES[role].most > 1;
      $("file").click();
    });
    return button;
  }));
}

/** The node of an item: a small view, its name and size, a button that removes it, and its fields. */
function build(item, ...inside) {
  item.url = URL.createObjectURL(item.blob);
  item.thumb = make("span", { className: "thumb" }, make("img", { src: item.url, alt: "" }));
  const gone = make("button", { type: "button", className: "quiet", textContent: "Remove" });
  gone.setAttribute("aria-label", `Remove the ${label(item.role).toLowerCase()}`);
  gone.addEventListener("click", () => {
    remove(item);
    $(`add-${item.role}`)?.focus();
  });
  const name = make("span", { className: "name" }, make("b", { textContent: label(item.role) }), make("small", { textContent: item.size }));
  item.node = make("li", { className: "source" }, make("div", { className: "source-head" }, item.thumb, name, gone), ...inside);
  item.node.dataset.role = item.role;
}

const more = (summary, ...inside) => make("details", { className: "fine" }, make("summary", { textContent: summary }), ...inside);
const pair = (...inside) => make("div", { className: "pair" }, ...inside);

function buildSource(item) {
  const { values } = item;
  item.mask = values.mask ?? null;
  const margins = SIDES.map((side) => make("input", { type: "number", min: 0, max: 4096, step: 8, placeholder: "0", value: values.outpaint?.[side] || "" }));
  const fit = select(FITS, values.fit ?? "stretch");
  const strength = range(0, 1, 0.05, 0.8);
  let touched = values.strength !== undefined;
  const painting = make("button", { type: "button", textContent: "Paint a mask" });
  const unpaint = make("button", { type: "button", className: "quiet", textContent: "Remove mask" });
  const words = make("p", { className: "hint" });
  const masked = () => draws(card, "mask") && (item.mask !== null || item.transparent || margins.some(({ value }) => Number(value) > 0));
  const strengthField = field("Strength", strength);
  const rows = make("div", { className: "row" }, painting, unpaint);
  const outpaint = make("fieldset", { className: "margins" }, make("legend", { textContent: "Outpaint, pixels" }),
    ...SIDES.map((side, k) => field(side, margins[k])));
  let views = 0;
  const view = async () => {
    if (!touched) strength.value = masked() ? 1 : 0.8;
    strength.show();
    painting.textContent = item.mask ? "Edit mask" : "Paint a mask";
    unpaint.hidden = !item.mask;
    const mask = draws(card, "mask") ? item.mask : null;
    words.textContent = mask ? "Painted parts are drawn anew, all else is kept."
      : item.transparent ? "Its transparent parts are drawn anew, unless you paint a mask."
      : masked() ? "What lies beyond the image is drawn." : "1 draws everything anew, 0 keeps the source.";
    const drawn = ++views;
    const tint = mask && await tinted(mask);
    if (drawn !== views) return; // by a later one
    item.thumb.querySelector("canvas")?.remove();
    if (tint) item.thumb.append(tint);
  };
  const setMask = (mask) => {
    item.mask = mask;
    view();
    on.changed();
  };
  painting.addEventListener("click", async () => {
    const mask = await (lastMask = paint(item.blob, item.mask));
    painting.focus();
    if (mask !== undefined) setMask(mask);
  });
  unpaint.addEventListener("click", () => { setMask(null); painting.focus(); });
  strength.addEventListener("input", () => { touched = true; });
  for (const margin of margins) margin.addEventListener("input", view);
  build(item, rows, strengthField, words, more("Fit and outpaint", field("Fit to the size", fit), outpaint));
  item.node.querySelector("details").open = margins.some(({ value }) => value) || fit.value !== "stretch";
  item.offer = () => {
    strengthField.hidden = !reads(card, "strength");
    rows.hidden = outpaint.hidden = !draws(card, "mask");
    view();
  };
  if (touched) strength.value = values.strength;
  item.offer();
  item.read = () => {
    const sides = Object.fromEntries(SIDES.map((side, k) => [side, Math.round(Number(margins[k].value))]).filter(([, pixels]) => pixels > 0));
    return {
      ...(reads(card, "strength") && touched ? { strength: Number(strength.value) } : {}),
      ...(fit.value === "stretch" ? {} : { fit: fit.value }),
      ...(draws(card, "mask") && Object.keys(sides).length ? { outpaint: sides } : {}),
    };
  };
}

/** A mask as a tint over the small view of its image. */
async function tinted(mask) {
  const bitmap = await createImageBitmap(mask, { resizeWidth: 96, resizeHeight: 96 });
  const canvas = make("canvas", { width: 96, height: 96 });
  const context = canvas.getContext("2d");
  context.fillStyle = "#e0452a";
  context.fillRect(0, 0, 96, 96);
  context.globalCompositeOperation = "destination-out";
  context.drawImage(bitmap, 0, 0);
  return canvas;
}

/** The fields that control images and image prompts share, and how they are read. */
function following(item, names) {
  const { values } = item;
  const model = select([]);
  const strength = range(0, Math.max(2, values.strength ?? 1), 0.05, values.strength ?? 1);
  const start = range(0, 1, 0.05, values.start ?? 0);
  const end = range(0, 1, 0.05, values.end ?? 1);
  item.offer = () => fillSelect(model, names().map((name) => [name, name]), names().includes(values.model) ? values.model : names()[0]);
  item.offer();
  item.read = () => ({
    model: model.value,
    ...(Number(strength.value) === 1 ? {} : { strength: Number(strength.value) }),
    ...(Number(start.value) === 0 ? {} : { start: Number(start.value) }),
    ...(Number(end.value) === 1 ? {} : { end: Number(end.value) }),
  });
  const share = (value) => `${Math.round(100 * value)} %`;
  return { model: field("Model", model), strength: field("Strength", strength), steps: pair(field("From step", start, share), field("To step", end, share)) };
}

function buildPrompt(item) {
  const { model, strength, steps } = following(item, () => card.image_prompts);
  build(item, model, strength, more("When it acts", steps));
}

function buildControl(item) {
  const { values } = item;
  const { model, strength, steps } = following(item, () => card.controls);
  const preprocessor = select([]);
  const fit = select([["", "crop, or as the source"], ...FITS], values.fit ?? "");
  const mode = make("input", { type: "number", min: 0, max: 63, value: values.mode ?? "" });
  const { offer: offerModels, read } = item;
  // Networks are named after what they read; a new image is more often a photo than that.
  const guess = () => (values.model ? "" : { edge: "canny", canny: "canny", depth: "depth" }[/edge|canny|depth/i.exec(card.controls[0])?.[0].toLowerCase()] ?? "");
  item.offer = () => {
    offerModels();
    const words = { canny: "detect edges (canny)", depth: "estimate depth" };
    fillSelect(preprocessor, [["", "none: use the image as it is"], ...(card.preprocessors ?? []).map((name) => [name, words[name] ?? name])], values.preprocessor ?? guess());
  };
  item.offer();
  item.read = () => ({
    ...read(),
    ...(preprocessor.value ? { preprocessor: preprocessor.value } : {}),
    ...(fit.value ? { fit: fit.value } : {}),
    ...(mode.value === "" ? {} : { mode: Math.round(Number(mode.value)) }),
  });
  build(item, pair(model, field("Preprocessor", preprocessor)), strength, more("Fit, and when it acts", field("Fit to the size", fit), steps,
    field("Mode, of a ControlNet-Union", mode)));
}
