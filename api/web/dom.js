// Nodes: found by id, made with what is inside them, and fields with a label.

export const $ = (id) => document.getElementById(id);

export const make = (tag, attributes = {}, ...inside) => {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...inside);
  return node;
};

let fields = 0;

/** A labelled control; of a range the label shows its value, or what `words` makes of it. */
export function field(label, control, words = (value) => value) {
  control.id ||= `field-${++fields}`;
  const name = make("label", { htmlFor: control.id, textContent: label });
  if (control.type === "range") {
    const output = make("output");
    output.htmlFor.add(control.id);
    control.show = () => { output.textContent = words(control.value); };
    control.addEventListener("input", control.show);
    control.show();
    name.append(" ", output);
  }
  return make("div", { className: "field" }, name, control);
}

export const range = (min, max, step, value) => make("input", { type: "range", min, max, step, value });

export const select = (options, value = "") => {
  const node = make("select", {}, ...options.map(([option, words]) => new Option(words, option)));
  node.value = value;
  return node;
};

/** Options of a choice; what is chosen stays, if it is still there. A list that is the same stays as it is, maybe open. */
export function fillSelect(node, options, usual) {
  const filled = JSON.stringify(options);
  if (node.dataset.filled === filled) return;
  const before = node.options.length ? node.value : usual;
  node.dataset.filled = filled;
  node.replaceChildren(...options.map(([value, words]) => new Option(words, value)));
  const chosen = [before, usual].find((name) => options.some(([value]) => value === name));
  if (chosen !== undefined) node.value = chosen;
}

/** A canvas as a file. Rejects where it is larger than the browser can. */
export const png = (canvas) => new Promise((well, ill) => {
  canvas.toBlob((blob) => (blob ? well(blob) : ill(new RangeError("The image is too large for this browser."))), "image/png");
});

/** Say something to those who do not see it happen. */
export const announce = (words) => { $("told").textContent = words; };

/** Put text on the clipboard; where the browser allows that to secure pages only, show it to be copied by hand. */
export async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    announce(done);
    return true;
  } catch {
    $("copy-text").value = text;
    $("copy-dialog").showModal();
    $("copy-text").select();
    return false;
  }
}

let shown = [];
let hiding = 0;

/** Say something at the foot of the page for a while, with files to download. */
export function notice(words, files = []) {
  for (const url of shown) URL.revokeObjectURL(url);
  shown = files.map(({ blob }) => URL.createObjectURL(blob));
  const links = files.map(({ name }, k) => make("a", { href: shown[k], download: name, textContent: name }));
  $("notice").replaceChildren(words, ...links.flatMap((node) => [" ", node]));
  // Above what is modal, where its links can be reached.
  (document.querySelector("dialog[open] .box") ?? document.body).append($("notice"));
  $("notice").hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { $("notice").hidden = true; }, files.length ? 30_000 : 4000);
}
