// The box in which one image is looked at: what it was made of, and what can be done with it.

import { $, announce, copy, make, notice } from "./dom.js";
import * as service from "./service.js";
import * as share from "./share.js";
import * as sources from "./sources.js";
import * as store from "./store.js";
import { fileName, flag } from "./tile.js";

const PICTURES = { images: "source", mask: "mask", control: "control", image_prompts: "image prompt" };

export class Lightbox {
  /** `gallery` has the images; `on` is the gallery's. */
  constructor(gallery, on) {
    this.gallery = gallery;
    this.on = on;
    this.shown = []; // object URLs of the images that the request brought
    const box = $("lightbox");
    $("box-close").addEventListener("click", () => box.close());
    $("again").addEventListener("click", () => this.repeat(false));
    $("vary").addEventListener("click", () => this.repeat(true));
    $("remove").addEventListener("click", () => this.remove());
    $("copy-link").addEventListener("click", () => this.copyLink());
    $("copy-curl").addEventListener("click", () => copyCurl(this.order()));
    box.addEventListener("click", (event) => { if (event.target === box) box.close(); });
    box.addEventListener("close", () => { $("notice").hidden = true; });
    box.addEventListener("close", () => this.gallery.tiles.get(this.picture?.id)?.querySelector(".leaf")?.focus());
    box.addEventListener("keydown", (event) => this.key(event));
  }

  look(picture) {
    if (picture !== this.picture) $("notice").hidden = true;
    this.picture = picture;
    const { asked } = picture;
    const url = this.gallery.urls.get(picture.id);
    Object.assign($("box-image"), { src: url, alt: asked.prompt });
    $("box-title").textContent = asked.prompt;
    const several = asked.n > 1;
    const labels = Object.entries(picture.content?.labels ?? {}).map(([name, score]) => `${name} ${score.toFixed(2)}`);
    const facts = [
      ["Seed", picture.seed], ["Steps", asked.steps], ["Guidance scale", asked.guidance_scale], ["Negative prompt", asked.negative_prompt],
      ["LoRA", asked.lora], ["Strength", asked.strength], ["Size", `${picture.width} × ${picture.height}`], ["Sampler", asked.scheduler],
      ["Schedule", asked.schedule_type], ["Plan", asked.plan], ["VAE", asked.vae], ["Refiner", asked.refiner?.model],
      ["Upscaler", asked.upscale?.model], ["Model", asked.model], ["Variant", picture.label],
      ["Content", flag(picture) && [flag(picture), ...labels].join(", ")],
      // A job's images are drawn together, and have no time of their own.
      [several ? "Job took" : "Took", picture.took ? `${picture.took.toFixed(1)} s${several ? ` for ${asked.n} images` : ""}` : null],
      ["Created", new Date(picture.made).toLocaleString()],
    ].filter(([, value]) => value !== undefined && value !== null && value !== "");
    $("box-facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
    this.showSources(picture.pictures ?? []);
    $("box-warning").hidden = !picture.warnings?.length;
    $("box-warning").textContent = (picture.warnings ?? []).join(" ");
    Object.assign($("download"), { href: url, download: fileName(picture) });
    $("use-as").replaceChildren(...sources.roles().map((role) => {
      const button = make("button", { type: "button", textContent: sources.short(role), id: `use-${role}` });
      button.setAttribute("aria-label", `Use as ${sources.label(role).toLowerCase()}`);
      button.addEventListener("click", () => {
        $("lightbox").close();
        this.on.use(this.picture, role);
      });
      return button;
    }));
    if (!$("lightbox").open) $("lightbox").showModal();
    $("again").focus({ preventScroll: true });
  }

  showSources(pictures) {
    for (const url of this.shown) URL.revokeObjectURL(url);
    this.shown = pictures.map(({ blob }) => URL.createObjectURL(blob));
    $("box-sources").hidden = !pictures.length;
    $("box-sources").replaceChildren(...pictures.map(({ field }, k) => make("li", {},
      make("img", { src: this.shown[k], alt: "", className: field === "mask" ? "mask" : "" }), make("small", { textContent: PICTURES[field] }))));
  }

  /** The request that draws this image. */
  order() {
    const { asked, request, seed, pictures = [] } = this.picture;
    return { fields: request ?? { ...asked, n: 1, seed }, pictures };
  }

  async copyLink() {
    const { asked, seed, pictures = [] } = this.picture;
    await copyLink({ fields: { ...asked, n: 1, seed }, pictures });
  }

  repeat(vary) {
    $("lightbox").close();
    this.on.again(this.picture, { vary });
  }

  async remove() {
    const { picture } = this;
    const next = this.gallery.beside(picture, 1) ?? this.gallery.beside(picture, -1);
    this.gallery.drop(picture.id);
    await store.remove(picture.id);
    announce("The image is deleted.");
    if (next) this.look(next);
    else $("lightbox").close();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && this.gallery.beside(this.picture, step);
    if (next) this.look(next);
    else if (event.key.toLowerCase() === "r") this.repeat(false);
    else if (event.key.toLowerCase() === "v") this.repeat(true);
    else if (event.key === "Backspace" || event.key === "Delete") this.remove();
    else return;
    event.preventDefault();
  }
}

/** Copy a link that fills in the form. */
export async function copyLink({ fields, pictures }) {
  const copied = await copy(share.link(fields), "The link is copied.");
  if (copied) notice(`Link copied.${pictures.length ? " Images are not part of a link." : ""}`);
}

/** Copy the request as a command; the images that it reads are offered beside it. */
export async function copyCurl(order) {
  const { command, files } = share.curl(order, Boolean(service.key.get()));
  if (!await copy(command, "The command is copied.")) return;
  notice(files.length ? "Command copied. It reads these files:" : "Command copied.", files);
}
