// The page: a form on the left, images in progress and those that are kept on the right.

import { $, announce, fillSelect, make } from "./dom.js";
import * as chat from "./chat.js";
import * as form from "./form.js";
import * as service from "./service.js";
import * as share from "./share.js";
import * as sources from "./sources.js";
import * as store from "./store.js";
import { Gallery } from "./gallery.js";
import { copyCurl, copyLink } from "./lightbox.js";

const IDEAS = ["a slice of pizza", "a red heart", "a sleeping cat", "an orange fox face", "a green apple", "a birthday cake with candles",
  "a cactus in a pot", "the moon with a face", "a steaming cup of coffee", "a rocket", "a sunflower",
  "a penguin", "a crystal ball", "a purple umbrella", "a snowman"];
const state = { seen: false, variants: [], drafted: 0, brought: null };

const gallery = new Gallery({ again, use, failed: form.complainOf, worded: form.worded });

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
  let models;
  try {
    models = (await service.models()).filter(({ diptych }) => !diptych.alias_of && diptych.precision !== undefined);
    state.seen = models.length > 0;
  } catch (error) {
    if (error.status === 401) askKey(Boolean(service.key.get()));
    return;
  }
  const images = models.filter((model) => model.diptych.modality === "image");
  form.offer(images);
  const texts = models.filter(({ diptych }) => diptych.modality === "text" && diptych.live);
  offerTexts(texts.filter(({ diptych }) => diptych.limits.generates !== false)); // others only embed
  offerVariants(images.filter((model) => model.diptych.live));
  if (!form.card()) return;
  const { brought } = state;
  state.brought = null;
  if (brought) await sources.restore(brought);
  form.leaveOut(form.complete());
}

function offerVariants(live) {
  const variants = live.flatMap((model) => ["off", "auto"].map((deepcache) => ({
    model: model.id, deepcache,
    label: `${live.length > 1 ? `${model.id} ` : ""}${model.diptych.precision}${deepcache === "auto" ? " + DeepCache" : ""}`,
  })));
  if (JSON.stringify(variants) === JSON.stringify(state.variants)) return;
  state.variants = variants;
  $("variants").replaceChildren(...variants.map(({ label }, k) => (
    make("label", {}, make("input", { type: "checkbox", value: k }), label)
  )));
  $("compare").hidden = variants.length < 2;
}

function offerTexts(models) {
  $("tabs").hidden = $("expand").hidden = !models.length;
  if (!models.length) return;
  state.texts = models;
  $("text-model-field").hidden = models.length < 2;
  fillSelect($("text-model"), models.map(({ id }) => [id, id]), models[0].id);
  openText();
}

/** Turn to the chosen text model: a conversation with another one ends. */
function openText() {
  const model = state.texts.find(({ id }) => id === $("text-model").value);
  if (state.text?.id === model.id) return;
  state.text = model;
  $("tab-chat").textContent = chat.writesPrompts(model) ? "Prompt writer" : "Chat";
  $("expand").title = `${model.id} rewrites the prompt in more detail`;
  chat.open($("conversation"), model, (prompt) => {
    turn("images");
    $("prompt").value = prompt;
    form.show();
    $("images-form").requestSubmit();
  });
}

function turn(name) {
  for (const [tab, panel, word] of [["tab-images", "images-form", "images"], ["tab-chat", "chat", "chat"]]) {
    $(tab).setAttribute("aria-selected", word === name);
    $(tab).tabIndex = word === name ? 0 : -1;
    $(panel).hidden = word !== name;
  }
}

// -- drawing ------------------------------------------------------------------------------------------------------

async function draw(event) {
  event?.preventDefault();
  form.complain(null);
  await sources.settled();
  const wrong = form.wrong();
  if (wrong) return form.complain(wrong);
  const { fields, pictures, ratio } = form.request();
  // Drawn here if nowhere else: one of the server's may have more digits than this language's numbers.
  fields.seed ??= Math.floor(Math.random() * 2 ** 32);
  if (!matchMedia("(hover: hover)").matches) $("prompt").blur(); // a keyboard on the screen would cover the images
  const ticked = [...$("variants").querySelectorAll(":checked")].map((box) => state.variants[box.value]);
  const drawn = ticked.map(({ label, ...variant }) => ({ fields: variantOf(fields, variant), label }));
  await order(ticked.length ? drawn : [{ fields, label: "" }], pictures, ratio);
}

/** Make jobs of requests, each with its label; several are shown side by side. */
async function order(requests, pictures, ratio) {
  const columns = requests.map(({ label }) => label);
  const id = `${Date.now()}-${Math.random()}`;
  let first = null;
  document.body.classList.add("sending");
  try {
    await service.submit(requests, pictures, (job, { fields, label }) => {
      const group = columns.length > 1 && { id, columns, prompt: fields.prompt, column: columns.indexOf(label) };
      const tile = gallery.follow(job, { fields, pictures, label, group: group || undefined, ratio });
      first ??= tile;
    });
    announce("Drawing.");
  } catch (error) {
    if (error.status === 401) askKey(true);
    form.complain(error);
  } finally {
    document.body.classList.remove("sending");
  }
  if (first) show(first);
}

/** Bring a tile into view, if it is not. */
function show(tile) {
  const { top, bottom } = tile.getBoundingClientRect();
  if (top >= 0 && bottom <= innerHeight) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  (bottom - top < innerHeight ? tile : $("bar")).scrollIntoView({ block: "center", behavior: calm ? "instant" : "smooth" });
}

/** The request by another variant; a plan or VAE of one model is none of another's. */
function variantOf(fields, variant) {
  const other = { ...fields, ...variant };
  if (fields.model && variant.model !== fields.model) for (const name of ["plan", "vae"]) delete other[name];
  return other;
}

async function again(picture, { vary = false } = {}) {
  const { asked, label, pictures = [] } = picture;
  form.complain(null);
  form.turnTo(asked.model);
  await sources.restore({ fields: asked, pictures });
  form.leaveOut(form.fill({ ...asked, n: 1, seed: vary ? undefined : picture.seed }));
  form.keep();
  if (vary) return draw();
  const fields = picture.request ?? { ...asked, n: 1, seed: picture.seed };
  return order([{ fields, label: label ?? "" }], pictures, picture.width / picture.height);
}

/** Use an image of the gallery in a role of the form. */
async function use(picture, role) {
  turn("images");
  if (!await sources.add(role, picture.blob)) return;
  announce(`${sources.label(role)} added.`);
  $("sources").scrollIntoView({ block: "nearest" });
  $("prompt").focus({ preventScroll: true });
}

/** Keep the form's images for when the page comes back; its other fields are kept by itself. */
function keepSources() {
  clearTimeout(state.drafted);
  state.drafted = setTimeout(() => {
    if (state.brought) return; // not yet restored
    const { fields, pictures } = sources.request();
    store.keepDraft("form", pictures.length ? { fields, pictures } : null);
  }, 300);
}

// -- the rest of the page -----------------------------------------------------------------------------------------

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

const otherTheme = () => theme(theme() === "dark" ? "light" : "dark");

let asking = false;
function askKey(wrong) {
  $("key").hidden = false;
  if (asking || $("key-dialog").open || (state.asked && !wrong)) return;
  asking = state.asked = true;
  $("key-hint").textContent = wrong && service.key.get() ? "The service does not accept this key." : "This service requires one. It stays in this browser.";
  $("key-input").value = service.key.get();
  $("key-dialog").returnValue = ""; // which Esc leaves as it was
  $("key-dialog").showModal();
}

$("key-dialog").addEventListener("close", () => {
  asking = false;
  if ($("key-dialog").returnValue === "save") {
    service.key.set($("key-input").value.trim());
    form.complain(null);
    state.seen = false;
    look();
  }
});
$("key").addEventListener("click", () => { state.asked = false; askKey(false); });

form.open({ changed: keepSources, added: () => turn("images") });
$("images-form").addEventListener("submit", draw);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) draw(event);
});
$("surprise").addEventListener("click", () => {
  const others = IDEAS.filter((idea) => idea !== $("prompt").value);
  $("prompt").value = others[Math.floor(Math.random() * others.length)];
  form.show();
  form.keep();
  $("prompt").focus();
});
$("expand").addEventListener("click", async () => {
  if (state.expanding) return state.expanding.abort();
  const before = $("prompt").value.trim();
  if (!before) return form.complain(form.wrong());
  state.expanding = new AbortController();
  $("expand").textContent = "Stop";
  try {
    await chat.expand(state.text, before, (words) => { $("prompt").value = words.trimStart(); form.show(); }, state.expanding.signal);
    form.keep();
  } catch (error) {
    $("prompt").value = before;
    form.show();
    if (error.name !== "AbortError") form.complain(error);
  } finally {
    state.expanding = null;
    $("expand").textContent = "Expand prompt";
  }
});
$("form-link").addEventListener("click", () => copyLink(form.request()));
$("form-curl").addEventListener("click", () => { form.complain(form.wrong()); if (!form.wrong()) copyCurl(form.request()); });
$("tab-images").addEventListener("click", () => turn("images"));
$("tab-chat").addEventListener("click", () => turn("chat"));
$("text-model").addEventListener("change", openText);
$("tabs").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = document.activeElement === $("tab-images") ? $("tab-chat") : $("tab-images");
  other.click();
  other.focus();
});
$("theme").addEventListener("click", otherTheme);
$("help").addEventListener("click", () => $("help-dialog").showModal());
for (const idea of IDEAS.slice(0, 5)) {
  const button = make("button", { type: "button", textContent: idea });
  button.addEventListener("click", () => { $("prompt").value = idea; form.show(); form.keep(); draw(); });
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
  else if (event.key.toLowerCase() === "t") otherTheme();
});

// -- the beginning ------------------------------------------------------------------------------------------------

/** Fill in the form from a link, if there is one, and take it out of the address. */
function takeLink() {
  const fields = share.decode(location.hash);
  if (!Object.keys(fields).length) return false;
  history.replaceState(null, "", location.pathname + location.search);
  form.leaveOut(form.fill(fields));
  form.keep();
  return true;
}

const chosenTheme = localStorage.getItem("diptych.theme");
if (chosenTheme === "dark" || chosenTheme === "light") document.documentElement.dataset.theme = chosenTheme;
theme();
const linked = takeLink();
if (!linked) form.fill(form.kept());
addEventListener("hashchange", () => { if (takeLink()) turn("images"); });
// On a touch screen it would open the keyboard.
if (matchMedia("(hover: hover) and (pointer: fine)").matches) $("prompt").focus({ preventScroll: true });
for (const picture of (await store.open()).reverse()) gallery.add(picture);
if (!linked) state.brought = store.draft("form") ?? null;
gallery.resume();
service.tidy();
await look();
for (;;) {
  await service.pause(document.hidden ? 15000 : 3000);
  await look();
}
