// The right panel: tiles of images in progress and of those that are kept.

import { $, announce, notice } from "./dom.js";
import * as compare from "./compare.js";
import * as service from "./service.js";
import * as store from "./store.js";
import { Lightbox } from "./lightbox.js";
import { fileName, finished, waiting } from "./tile.js";
import { zip } from "./zip.js";

const UNDER_WAY = "diptych.jobs";
export class Gallery {
  /** `on.again` is given an image to draw again, `on.use` one and the role of a source, `on.failed` a job's
   * message, and `on.worded` puts one into words for people. */
  constructor(on) {
    this.on = on;
    this.tiles = new Map(); // id of an image → its tile
    this.urls = new Map();
    this.lightbox = new Lightbox(this, on);
    $("clear").addEventListener("click", () => this.clear());
    $("download-all").addEventListener("click", () => this.downloadAll());
    $("grid").addEventListener("keydown", (event) => this.keyInGrid(event));
    this.settle();
  }

  // -- images that are kept ----------------------------------------------------------------------------------------

  add(picture, at = null) {
    const url = URL.createObjectURL(picture.blob);
    this.urls.set(picture.id, url);
    const tile = finished(picture, url, () => this.lightbox.look(picture));
    this.tiles.set(picture.id, tile);
    at?.replaceWith(tile);
    if (picture.group) compare.put($("grid"), tile, picture.group);
    else if (!at) $("grid").prepend(tile);
    this.settle();
    return tile;
  }

  settle() {
    compare.prune($("grid"));
    const done = this.done().length;
    const any = $("grid").children.length > 0;
    $("empty").hidden = any;
    $("bar").hidden = !any;
    $("bar-title").textContent = done === 0 ? "No finished image yet" : done === 1 ? "1 image" : `${done} images`;
    $("download-all").hidden = $("clear").hidden = done === 0;
  }

  /** The tiles of images that are there, as they stand. */
  done() {
    return [...$("grid").querySelectorAll(".tile.done")];
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
      $("clear").textContent = "Really delete all?";
      setTimeout(() => { delete $("clear").dataset.sure; $("clear").textContent = "Delete all"; }, 4000);
      return;
    }
    for (const { id } of store.all()) this.drop(id);
    await store.clear();
    announce("All images are deleted.");
  }

  async downloadAll() {
    $("download-all").disabled = true;
    try {
      const files = this.done().map(({ picture }) => ({ name: fileName(picture), blob: picture.blob, time: picture.made }));
      const url = URL.createObjectURL(await zip(files));
      Object.assign(document.createElement("a"), { href: url, download: "diptych.zip" }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
      announce(`${files.length} images in diptych.zip.`);
    } catch (error) {
      notice(error.message);
    } finally {
      $("download-all").disabled = false;
    }
  }

  // -- images in progress ------------------------------------------------------------------------------------------

  /** Show a job's images as they come, and keep them. `order` is {fields, pictures, label, group, ratio}; a `group` is
   * a column of a comparison. Returns the first tile, at once; the rest goes on by itself. */
  follow(job, order) {
    note(job.id, order);
    if (order.pictures.length) store.keepDraft(job.id, order.pictures);
    const { fields, label, group } = order;
    const [width, height] = (fields.size ?? "").split("x").map(Number);
    const tiles = Array.from({ length: fields.n }, () => waiting(
      fields, label, width / height || order.ratio, () => service.cancel(job.id).catch(() => {}),
    ));
    if (group) tiles.forEach(({ tile }, row) => compare.put($("grid"), tile, placeOf(order, row)));
    else $("grid").prepend(...tiles.map(({ tile }) => tile));
    this.settle();
    this.watch(job, order, tiles);
    return tiles[0].tile;
  }

  async watch(job, order, tiles) {
    let ended = false;
    const fail = (message) => tiles.forEach((one) => this.fail(one, message));
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
      const message = end.error?.message;
      if (end.status === "succeeded") await this.keep(end, order, tiles);
      else if (end.status === "cancelled") for (const { tile } of tiles) tile.remove();
      else {
        fail(message ?? "It could not be drawn.");
        if (message) this.on.failed(message);
      }
      if (end.status !== "succeeded") announce(message ?? "Stopped.");
    } catch (error) {
      fail(error.message);
    } finally {
      ended = true;
      note(job.id, null);
      if (order.pictures.length) store.keepDraft(job.id, null);
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

  fail(tile, message) {
    tile.fail(this.on.worded(message), () => this.settle());
  }

  async keep(end, order, tiles) {
    const { fields, pictures, label } = order;
    const { request } = await service.job(end.id); // with nothing left to defaults that may change
    const made = Date.now(); // of all, so that they stay in this order
    let stays = true;
    for (const [k, image] of end.images.entries()) {
      if (image.error) {
        this.fail(tiles[k], image.error.message);
        continue;
      }
      const picture = {
        id: `${end.id}/${k}`, k, made, asked: { ...fields, model: end.model }, label, seed: image.seed, width: image.width,
        height: image.height, warnings: image.warnings, content: image.content, blob: await service.picture(end.id, k), took: end.completed_at - end.started_at,
        request: request && { ...request, n: 1, seed: image.seed }, pictures, group: order.group && placeOf(order, k),
      };
      const { tile: before } = tiles[k];
      const focused = before.contains(document.activeElement);
      const tile = this.add(picture, before);
      if (focused) tile.querySelector(".leaf").focus();
      stays = await store.add(picture) && stays;
    }
    const refused = end.images.filter(({ error }) => error).length;
    const count = end.images.length - refused;
    announce(`${count === 1 ? "The image is" : `${count} images are`} done.${refused ? ` ${refused} refused.` : ""}`);
    if (!stays) notice("This browser has no room for more images: what it cannot keep goes with this page. Download it, or delete others.");
  }

  /** Go on with what was in progress when the page was left. */
  resume() {
    for (const [id, order] of Object.entries(notes())) this.follow({ id }, { ...order, pictures: store.draft(id) ?? [] });
  }

  // -- keys --------------------------------------------------------------------------------------------------------

  /** The image `step` places after this one. */
  beside(picture, step) {
    const done = this.done();
    return done[done.findIndex((tile) => tile.picture === picture) + step]?.picture;
  }

  keyInGrid(event) {
    const tiles = [...$("grid").querySelectorAll(".tile")];
    const at = tiles.findIndex((tile) => tile.contains(document.activeElement));
    if (at < 0) return;
    if (event.key === "Escape") tiles[at].stop?.();
    const next = { ArrowRight: tiles[at + 1], ArrowLeft: tiles[at - 1] }[event.key] ?? below(tiles, at, { ArrowDown: 1, ArrowUp: -1 }[event.key]);
    if (!next) return;
    event.preventDefault();
    next.querySelector(".leaf").focus();
  }
}

/** The tile of the next row down (1) or up (-1) that is nearest to this column. */
function below(tiles, at, down) {
  if (!down) return undefined;
  const boxes = tiles.map((tile) => tile.getBoundingClientRect());
  const far = (box) => Math.abs(box.left - boxes[at].left) + 10 * Math.abs(box.top - boxes[at].top);
  const there = tiles.map((_, k) => k).filter((k) => down * (boxes[k].top - boxes[at].top) > 8);
  return tiles[there.sort((a, b) => far(boxes[a]) - far(boxes[b]))[0]];
}

/** The place of a job's k-th image in its comparison. */
const placeOf = ({ fields, group }, row) => ({ ...group, row, seed: fields.seed + row });

const notes = () => {
  try {
    return JSON.parse(sessionStorage.getItem(UNDER_WAY) ?? "{}");
  } catch {
    return {};
  }
};

function note(id, order) {
  const known = notes();
  if (order) known[id] = { ...order, pictures: undefined };
  else delete known[id];
  sessionStorage.setItem(UNDER_WAY, JSON.stringify(known));
}
