// The right panel: tiles of pictures in the making and of those that are kept, and the box in which one is looked at.

import * as service from "./service.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const UNDER_WAY = "diptych.jobs";

const make = (tag, attributes = {}, ...inside) => {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...inside);
  return node;
};

const seconds = (s) => (s < 1.5 ? "a moment" : s < 90 ? `about ${Math.round(s)} s` : `about ${Math.round(s / 60)} min`);

export class Gallery {
  constructor({ again, tell }) {
    this.again = again;
    this.tell = tell;
    this.tiles = new Map(); // id of a picture → its tile
    this.urls = new Map();
    $("clear").addEventListener("click", () => this.clear());
    $("box-close").addEventListener("click", () => $("lightbox").close());
    $("again").addEventListener("click", () => this.repeat(false));
    $("vary").addEventListener("click", () => this.repeat(true));
    $("remove").addEventListener("click", () => this.remove());
    $("lightbox").addEventListener("click", (event) => { if (event.target === $("lightbox")) $("lightbox").close(); });
    $("lightbox").addEventListener("close", () => this.tiles.get(this.open?.id)?.querySelector(".leaf")?.focus());
    $("lightbox").addEventListener("keydown", (event) => this.keyInBox(event));
    $("grid").addEventListener("keydown", (event) => this.keyInGrid(event));
    this.settle();
  }

  // -- pictures that are kept --------------------------------------------------------------------------------------

  add(picture, at = null) {
    const url = URL.createObjectURL(picture.blob);
    this.urls.set(picture.id, url);
    const image = make("img", { src: url, alt: "", loading: "lazy", decoding: "async" });
    const frame = make("span", { className: "frame" }, image);
    frame.style.setProperty("--ratio", `${picture.width} / ${picture.height}`);
    const details = [picture.label, `seed ${picture.seed}`, effort(picture.asked)].filter(Boolean);
    const leaf = make("button", { type: "button", className: "leaf" }, frame, caption(picture.asked.prompt, details.slice(picture.label ? 1 : 0)));
    if (picture.label) frame.append(make("span", { className: "label", textContent: picture.label }));
    leaf.setAttribute("aria-label", `${picture.asked.prompt}, ${details.join(", ")}`);
    leaf.addEventListener("click", () => this.look(picture));
    const tile = make("li", { className: "tile done" }, leaf);
    tile.picture = picture;
    this.tiles.set(picture.id, tile);
    if (at) at.replaceWith(tile);
    else $("grid").prepend(tile);
    this.settle();
    return tile;
  }

  settle() {
    const count = $("grid").children.length;
    $("empty").hidden = count > 0;
    $("bar").hidden = count === 0;
    $("bar-title").textContent = count === 1 ? "One picture" : `${count} pictures`;
  }

  drop(id) {
    this.tiles.get(id)?.remove();
    this.tiles.delete(id);
    URL.revokeObjectURL(this.urls.get(id));
    this.urls.delete(id);
    this.settle();
  }

  async clear() {
    if ($("clear").dataset.sure !== "1") { // twice, and not in a dialog
      $("clear").dataset.sure = "1";
      $("clear").textContent = "Really all? Once more";
      setTimeout(() => { delete $("clear").dataset.sure; $("clear").textContent = "Take all away"; }, 4000);
      return;
    }
    for (const { id } of store.all()) this.drop(id);
    await store.clear();
    this.tell("All pictures are taken away.");
  }

  // -- pictures in the making --------------------------------------------------------------------------------------

  /** Show a job's pictures as they come, and keep them. */
  async follow(job, asked, label) {
    note(job.id, { asked, label });
    const [width, height] = (asked.size ?? "1x1").split("x").map(Number);
    const tiles = Array.from({ length: asked.n }, () => waiting(asked, label, width / height, () => service.cancel(job.id).catch(() => {})));
    $("grid").prepend(...tiles.map(({ tile }) => tile));
    this.settle();
    let ended = false;
    const place = async () => { // how long the queue is, as long as it waits
      while (!ended && tiles[0].waits) {
        const found = await service.job(job.id).catch(() => null);
        if (found?.status === "queued" && tiles[0].waits) for (const one of tiles) one.queue(found);
        await service.pause(1000);
      }
    };
    place();
    try {
      const end = await service.follow(job.id, (type, data) => this.hear(job.id, tiles, type, data));
      ended = true;
      if (end.status === "succeeded") await this.keep(end, asked, label, tiles);
      else if (end.status === "cancelled") for (const { tile } of tiles) tile.remove();
      else for (const one of tiles) one.fail(end.error?.message ?? "It could not be drawn.");
      if (end.status !== "succeeded") this.tell(end.error?.message ?? "Stopped.");
    } catch (error) {
      for (const one of tiles) one.fail(error.message);
    } finally {
      ended = true;
      note(job.id, null);
      this.settle();
    }
  }

  hear(id, tiles, type, data) {
    if (type === "running") for (const one of tiles) one.begin();
    if (type === "queued") for (const one of tiles) one.wait();
    if (type !== "progress") return;
    const each = data.steps / tiles.length;
    if (tiles.length === 1) tiles[0].step(data.steps_done, each);
    else for (const one of tiles) one.step(data.steps_done / tiles.length, each);
    for (const k of data.previews ?? []) service.preview(id, k).then((blob) => blob && tiles[k]?.look(blob), () => {});
  }

  async keep(end, asked, label, tiles) {
    const { request } = await service.job(end.id); // with nothing left to defaults that may change
    for (const [k, image] of end.images.entries()) {
      if (image.error) {
        tiles[k].fail(image.error.message);
        continue;
      }
      const picture = {
        id: `${end.id}/${k}`, k, made: Date.now(), asked: { ...asked, model: end.model }, label, seed: image.seed, width: image.width,
        height: image.height, warnings: image.warnings, blob: await service.picture(end.id, k),
        took: end.completed_at - end.started_at, request: request && { ...request, n: 1, seed: image.seed },
      };
      const focused = tiles[k].tile.contains(document.activeElement);
      const tile = this.add(picture, tiles[k].tile);
      if (focused) tile.querySelector(".leaf").focus();
      await store.add(picture);
    }
    this.tell(end.images.length === 1 ? "The picture is done." : `${end.images.length} pictures are done.`);
  }

  /** Go on with what was under way when the page was left. */
  resume() {
    for (const [id, { asked, label }] of Object.entries(notes())) this.follow({ id }, asked, label);
  }

  // -- one picture -------------------------------------------------------------------------------------------------

  look(picture) {
    this.open = picture;
    $("box-image").src = this.urls.get(picture.id);
    $("box-image").alt = picture.asked.prompt;
    $("box-title").textContent = picture.asked.prompt;
    const { asked } = picture;
    const facts = [
      ["Seed", picture.seed], ["Steps", asked.steps], ["Guidance", asked.guidance_scale], ["Without", asked.negative_prompt],
      ["LoRA", asked.lora],
      ["Size", `${picture.width} × ${picture.height}`], ["Sampler", asked.scheduler], ["Schedule", asked.schedule_type], ["Plan", asked.plan], ["Decoder", asked.vae], ["Model", asked.model], ["Drawn by", picture.label],
      ["Took", picture.took ? `${picture.took.toFixed(1)} s` : null], ["Made", new Date(picture.made).toLocaleString()],
    ].filter(([, value]) => value !== undefined && value !== null && value !== "");
    $("box-facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
    $("box-warning").hidden = !picture.warnings?.length;
    $("box-warning").textContent = (picture.warnings ?? []).join(" ");
    const ending = { "image/webp": "webp", "image/jpeg": "jpg" }[picture.blob.type] ?? "png";
    Object.assign($("download"), { href: this.urls.get(picture.id), download: `${asked.prompt.slice(0, 40).replace(/[^\p{L}\p{N}]+/gu, "-")}-${picture.seed}.${ending}` });
    if (!$("lightbox").open) $("lightbox").showModal();
    $("again").focus({ preventScroll: true });
  }

  repeat(vary) {
    $("lightbox").close();
    this.again(this.open, { vary });
    scrollTo({ top: 0, behavior: "smooth" });
  }

  async remove() {
    const { id } = this.open;
    const next = this.beside(1) ?? this.beside(-1);
    this.drop(id);
    await store.remove(id);
    if (next) this.look(next);
    else $("lightbox").close();
  }

  beside(step) {
    const done = [...$("grid").children].filter((tile) => tile.picture);
    return done[done.findIndex((tile) => tile.picture === this.open) + step]?.picture;
  }

  keyInBox(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && this.beside(step)) this.look(this.beside(step));
    else if (event.key.toLowerCase() === "r") this.repeat(false);
    else if (event.key.toLowerCase() === "v") this.repeat(true);
    else if (event.key === "Backspace" || event.key === "Delete") this.remove();
    else return;
    event.preventDefault();
  }

  keyInGrid(event) {
    const tiles = [...$("grid").children];
    const at = tiles.findIndex((tile) => tile.contains(document.activeElement));
    if (event.key === "Escape") tiles[at]?.stop?.();
    const columns = getComputedStyle($("grid")).gridTemplateColumns.split(" ").length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step || !tiles[at + step]) return;
    event.preventDefault();
    tiles[at + step].querySelector(".leaf").focus();
  }
}

function caption(prompt, details) {
  const small = make("small", {}, ...details.flatMap((words, k) => [...(k ? ["·"] : []), make("span", { textContent: words })]));
  return make("span", { className: "caption" }, make("b", { textContent: prompt }), small);
}

/** What was asked of the steps: their number, or the plan that has it. */
function effort(asked) {
  if (asked.steps) return `${asked.steps} steps`;
  return asked.plan ? `plan ${asked.plan}` : "";
}

/** A tile of a picture that is not there yet, and what can be said about it. */
function waiting(asked, label, ratio, stop) {
  const frame = make("span", { className: "frame" });
  frame.style.setProperty("--ratio", Number.isFinite(ratio) && ratio > 0 ? ratio : 1);
  const words = make("span", { textContent: "waits" });
  const bar = make("i");
  const track = make("span", { className: "track" }, bar);
  const progress = make("span", { className: "progress" }, words, track);
  const status = make("small", {}, make("span", { textContent: label || effort(asked) }));
  frame.append(progress);
  if (label) frame.append(make("span", { className: "label", textContent: label }));
  const leaf = make("div", { className: "leaf", tabIndex: 0 }, frame, make("span", { className: "caption" }, make("b", { textContent: asked.prompt }), status));
  leaf.setAttribute("role", "group");
  leaf.setAttribute("aria-label", `In the making: ${asked.prompt}`);
  track.setAttribute("role", "progressbar");
  track.setAttribute("aria-label", "Steps");
  track.setAttribute("aria-valuemin", "0");
  if (asked.steps) track.setAttribute("aria-valuemax", String(asked.steps));
  const button = make("button", { type: "button", className: "stop", textContent: "×", title: "Stop" });
  button.setAttribute("aria-label", `Stop drawing ${asked.prompt}`);
  button.addEventListener("click", stop);
  const tile = make("li", { className: "tile waits" }, leaf, button);
  tile.stop = stop;
  let shown = null;
  return {
    tile,
    get waits() { return tile.classList.contains("waits") && tile.isConnected; },
    wait() { tile.classList.add("waits"); words.textContent = "waits"; },
    queue({ position, estimated_start_s: start }) {
      const before = position === 0 ? "next" : position === 1 ? "one before it" : `${position} before it`;
      words.textContent = position === null ? "waits" : start === null ? before : `${before}, ${seconds(start)}`;
    },
    begin() { tile.classList.remove("waits"); words.textContent = "begins"; },
    step(done, steps) {
      tile.classList.remove("waits");
      const part = Math.min(1, done / steps);
      bar.style.setProperty("--done", part);
      frame.style.setProperty("--blur", `${(14 * (1 - part) + 3).toFixed(1)}px`);
      track.setAttribute("aria-valuemax", String(Math.round(steps)));
      words.textContent = part >= 1 ? "finishing" : `step ${Math.floor(done)} of ${Math.round(steps)}`;
      track.setAttribute("aria-valuenow", String(Math.floor(done)));
    },
    look(blob) {
      const url = URL.createObjectURL(blob);
      const next = make("img", { className: "look", alt: "", src: url });
      next.decode().then(() => {
        frame.querySelector("img.look")?.remove();
        frame.prepend(next);
        if (shown) URL.revokeObjectURL(shown);
        shown = url;
      }, () => URL.revokeObjectURL(url));
    },
    fail(message) {
      tile.classList.remove("waits");
      tile.classList.add("failed");
      frame.replaceChildren(make("span", { textContent: message }));
      button.title = "Take away";
      tile.stop = () => tile.remove();
      button.replaceWith(Object.assign(button.cloneNode(true), { onclick: () => tile.remove() }));
    },
  };
}

const notes = () => {
  try {
    return JSON.parse(sessionStorage.getItem(UNDER_WAY) ?? "{}");
  } catch {
    return {};
  }
};

function note(id, what) {
  const known = notes();
  if (what) known[id] = what;
  else delete known[id];
  sessionStorage.setItem(UNDER_WAY, JSON.stringify(known));
}
