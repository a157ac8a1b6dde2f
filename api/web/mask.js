// The mask brush: what is painted on a source image is drawn anew. With mouse, pen, finger or keys.

import { $, make, png } from "./dom.js";

const INK = "#e0452a"; // on the screen; a mask has no colour

const canvas = $("mask-canvas");
const pen = canvas.getContext("2d");
let before = null; // the mask that was there, as painted pixels
let marks = []; // what was done since: strokes, "invert", "clear"
let stroke = null; // the one being painted
let at = { x: 0, y: 0 };
let settle = null;

/** Let a mask be painted on an image. Returns it as a PNG of the image's size, transparent where it is painted; null
 * without any paint, undefined if it was given up. `mask` is one to begin with, or null. */
export async function paint(image, mask) {
  const [picture, old] = await Promise.all([createImageBitmap(image), mask && createImageBitmap(mask)]);
  Object.assign(canvas, { width: picture.width, height: picture.height });
  before = old && painted(old);
  marks = [];
  at = { x: canvas.width / 2, y: canvas.height / 2 };
  redraw();
  const url = URL.createObjectURL(image);
  $("mask-image").src = url;
  $("mask-stage").style.setProperty("--ratio", String(picture.width / picture.height));
  picture.close();
  $("mask-dialog").showModal();
  canvas.focus({ preventScroll: true });
  const kept = await new Promise((done) => { settle = done; });
  URL.revokeObjectURL(url);
  return kept ? result() : undefined;
}

/** The paint that makes this mask: where it is transparent. */
function painted(mask) {
  const paint = make("canvas", { width: canvas.width, height: canvas.height });
  const context = paint.getContext("2d");
  context.fillStyle = INK;
  context.fillRect(0, 0, paint.width, paint.height);
  context.globalCompositeOperation = "destination-out";
  context.drawImage(mask, 0, 0, paint.width, paint.height);
  return paint;
}

async function result() {
  const mask = make("canvas", { width: canvas.width, height: canvas.height });
  const context = mask.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  // Of the brush's soft edge what is mostly painted counts: a mask is all or nothing.
  let any = false;
  for (let k = 0; k < data.length; k += 4) {
    const open = data[k + 3] > 127;
    any ||= open;
    data[k] = data[k + 1] = data[k + 2] = 0;
    data[k + 3] = open ? 0 : 255;
  }
  if (!any) return null;
  context.putImageData(new ImageData(data, canvas.width, canvas.height), 0, 0);
  return png(mask);
}

// -- painting -----------------------------------------------------------------------------------------------------

const radius = () => Math.max(0.5, (Number($("mask-size").value) / 200) * Math.min(canvas.width, canvas.height));

function redraw() {
  pen.globalCompositeOperation = "source-over";
  pen.clearRect(0, 0, canvas.width, canvas.height);
  if (before) pen.drawImage(before, 0, 0);
  for (const mark of marks) apply(mark);
  $("mask-undo").disabled = !marks.length;
  showBrush();
}

function apply(mark) {
  pen.fillStyle = pen.strokeStyle = INK;
  if (mark === "clear") pen.clearRect(0, 0, canvas.width, canvas.height);
  else if (mark === "invert") {
    pen.globalCompositeOperation = "source-out";
    pen.fillRect(0, 0, canvas.width, canvas.height);
  } else line(mark, mark.points);
}

/** A line through these points, or a dot at one, as the stroke has it. */
function line(mark, points) {
  pen.globalCompositeOperation = mark.erase ? "destination-out" : "source-over";
  Object.assign(pen, { fillStyle: INK, strokeStyle: INK, lineWidth: 2 * mark.radius, lineCap: "round", lineJoin: "round" });
  pen.beginPath();
  if (points.length === 1) pen.arc(points[0].x, points[0].y, mark.radius, 0, 2 * Math.PI);
  else for (const { x, y } of points) pen.lineTo(x, y);
  if (points.length === 1) pen.fill();
  else pen.stroke();
}

function begin(erase, point) {
  stroke = { erase, radius: radius(), points: [point] };
  marks.push(stroke);
  line(stroke, [point]);
  $("mask-undo").disabled = false;
}

function go(points) {
  const from = stroke.points.at(-1);
  stroke.points.push(...points);
  line(stroke, [from, ...points]);
}

function mark(what) {
  marks.push(what);
  redraw();
}

function undo() {
  marks.pop();
  redraw();
}

const place = (event) => {
  const box = canvas.getBoundingClientRect();
  return { x: ((event.clientX - box.left) / box.width) * canvas.width, y: ((event.clientY - box.top) / box.height) * canvas.height };
};

/** The circle that the brush would fill. */
function showBrush() {
  const brush = $("mask-brush");
  brush.style.setProperty("--x", `${(100 * at.x) / canvas.width}%`);
  brush.style.setProperty("--y", `${(100 * at.y) / canvas.height}%`);
  brush.style.setProperty("--wide", `${(200 * radius()) / canvas.width}%`);
  $("mask-size-out").textContent = `${$("mask-size").value} %`;
}

const erasing = () => $("mask-erase").checked;

canvas.addEventListener("pointerdown", (event) => {
  if (!event.isPrimary || (event.button !== 0 && event.button !== 5)) return;
  event.preventDefault();
  canvas.focus({ preventScroll: true });
  try {
    canvas.setPointerCapture(event.pointerId);
  } catch { /* it was lifted already */ }
  at = place(event);
  begin(erasing() || event.button === 5, at); // 5: a pen's eraser
});
canvas.addEventListener("pointermove", (event) => {
  if (!event.isPrimary) return;
  if (stroke) {
    const events = event.getCoalescedEvents?.() ?? [];
    go((events.length ? events : [event]).map(place));
  }
  at = place(event);
  showBrush();
});
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { stroke = null; });
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const far = Math.max(1, radius() / 2);
  const [x, y] = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, -far], ArrowDown: [0, far] }[event.key] ?? [0, 0];
  if (x || y) {
    at = { x: Math.min(canvas.width, Math.max(0, at.x + x)), y: Math.min(canvas.height, Math.max(0, at.y + y)) };
    if (event.shiftKey && !stroke) begin(erasing(), at);
    else if (stroke) go([at]);
    showBrush();
  } else if (event.key === " ") {
    begin(erasing(), at);
    stroke = null;
  } else return;
  event.preventDefault();
});
canvas.addEventListener("keyup", (event) => { if (event.key === "Shift") stroke = null; });

$("mask-size").addEventListener("input", showBrush);
$("mask-undo").addEventListener("click", undo);
$("mask-invert").addEventListener("click", () => mark("invert"));
$("mask-clear").addEventListener("click", () => mark("clear"));
$("mask-dialog").addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && marks.length) {
    event.preventDefault();
    undo();
  } else if (event.key === "[" || event.key === "]") {
    $("mask-size").value = Number($("mask-size").value) + (event.key === "]" ? 2 : -2);
    showBrush();
  }
});
$("mask-dialog").addEventListener("close", () => {
  stroke = null;
  settle?.($("mask-dialog").returnValue === "save");
  $("mask-dialog").returnValue = "";
  settle = null;
});
