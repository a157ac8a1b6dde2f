// Tiles of the gallery: of an image that is there, and of one in progress.

import { make } from "./dom.js";

const seconds = (s) => (s < 1.5 ? "a moment" : s < 90 ? `about ${Math.round(s)} s` : `about ${Math.round(s / 60)} min`);

/** What was asked of the steps: their number, or the plan that has it. */
export function effort(fields) {
  if (fields.steps) return `${fields.steps} steps`;
  return fields.plan ? `plan ${fields.plan}` : "";
}

const ENDINGS = { "image/webp": "webp", "image/jpeg": "jpg" };

/** The name of an image's file. */
export const fileName = ({ asked, seed, blob }) => (
  `${asked.prompt.slice(0, 40).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "image"}-${seed}.${ENDINGS[blob.type] ?? "png"}`
);

/** What the service's checker did to an image, in words; "" for one that it does not flag. */
export const flag = ({ content }) => (content?.flagged ? `${content.action === "blur" ? "blurred" : "flagged"} by the checker` : "");

function caption(prompt, details) {
  const small = make("small", {}, ...details.flatMap((words, k) => [...(k ? ["·"] : []), make("span", { textContent: words })]));
  return make("span", { className: "caption" }, make("b", { textContent: prompt, dir: "auto" }), small);
}

/** A tile of an image that is kept, at this object URL. */
export function finished(picture, url, open) {
  const { asked, label } = picture;
  const frame = make("span", { className: "frame" }, make("img", { src: url, alt: "", loading: "lazy", decoding: "async" }));
  frame.style.setProperty("--ratio", `${picture.width} / ${picture.height}`);
  const details = [`seed ${picture.seed}`, effort(asked)].filter(Boolean);
  const flagged = flag(picture);
  const leaf = make("button", { type: "button", className: "leaf" }, frame, caption(asked.prompt, details));
  if (label) frame.append(make("span", { className: "label", textContent: label }));
  if (flagged) frame.append(make("span", { className: "label flag", textContent: flagged }));
  leaf.setAttribute("aria-label", [asked.prompt, label, flagged, ...details].filter(Boolean).join(", "));
  leaf.addEventListener("click", open);
  const tile = make("li", { className: "tile done" }, leaf);
  tile.picture = picture;
  return tile;
}

/** A tile of an image that is not there yet, and what can be said about it. `ratio` is its width by its height. */
export function waiting(asked, label, ratio, stop) {
  const frame = make("span", { className: "frame" });
  frame.style.setProperty("--ratio", Number.isFinite(ratio) && ratio > 0 ? ratio : 1);
  const words = make("span", { textContent: "queued" });
  const bar = make("i");
  const track = make("span", { className: "track" }, bar);
  const progress = make("span", { className: "progress" }, words, track);
  frame.append(progress);
  if (label) frame.append(make("span", { className: "label", textContent: label }));
  const leaf = make("div", { className: "leaf", tabIndex: 0 }, frame, caption(asked.prompt, [effort(asked)].filter(Boolean)));
  leaf.setAttribute("role", "group");
  leaf.setAttribute("aria-label", `In progress: ${[asked.prompt, label].filter(Boolean).join(", ")}`);
  track.setAttribute("role", "progressbar");
  track.setAttribute("aria-label", "Steps");
  track.setAttribute("aria-valuemin", "0");
  if (asked.steps) track.setAttribute("aria-valuemax", String(asked.steps));
  const button = make("button", { type: "button", className: "stop", textContent: "×", title: "Stop" });
  button.setAttribute("aria-label", `Stop drawing ${asked.prompt}`);
  button.addEventListener("click", stop);
  const tile = make("li", { className: "tile waits" }, leaf, button);
  tile.stop = stop;
  return {
    tile,
    get waits() { return tile.classList.contains("waits") && tile.isConnected; },
    wait() { tile.classList.add("waits"); words.textContent = "queued"; },
    queue({ position, estimated_start_s: start }) {
      const before = position === 0 ? "next" : `${position} ahead`;
      words.textContent = position === null ? "queued" : start === null ? before : `${before}, ${seconds(start)}`;
    },
    begin() { tile.classList.remove("waits"); words.textContent = "starting"; },
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
      }, () => {}).finally(() => URL.revokeObjectURL(url));
    },
    fail(message, removed) {
      tile.classList.remove("waits");
      tile.classList.add("failed");
      frame.replaceChildren(make("span", { textContent: message }));
      tile.stop = () => { tile.remove(); removed(); };
      const remove = Object.assign(button.cloneNode(true), { title: "Remove", onclick: tile.stop });
      remove.setAttribute("aria-label", `Remove the failed image ${asked.prompt}`);
      button.replaceWith(remove);
    },
  };
}
