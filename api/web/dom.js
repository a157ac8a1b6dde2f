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

/** Options of a choice; what is chosen stays, if it is still there. */
export function fillSelect(node, options, usual) {
  const before = node.dataset.filled === JSON.stringify(options) ? node.value : usual;
  node.dataset.filled = JSON.stringify(options);
  node.replaceChildren(...options.map(([value, words]) => new Option(words, value)));
  if (options.some(([value]) => value === before)) node.value = before;
}

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
