// Images side by side: a row for each seed, and in it a column for each variant, in one item of the gallery.

import { make } from "./dom.js";

/** The part of the gallery for a comparison, `{id, columns, prompt}`; made and put at the top if it is not there. */
function section(grid, { id, columns, prompt }) {
  const there = [...grid.children].find((node) => node.dataset.group === id);
  if (there) return there;
  const heads = make("div", { className: "side-row side-heads" }, make("span"), ...columns.map((textContent) => make("span", { textContent })));
  heads.setAttribute("aria-hidden", "true"); // each tile says its variant
  const node = make("li", { className: "side" }, make("h3", { textContent: prompt, dir: "auto" }), heads);
  node.dataset.group = id;
  node.style.setProperty("--columns", columns.length);
  node.setAttribute("aria-label", `Side by side: ${prompt}`);
  grid.prepend(node);
  return node;
}

/** Put a tile of its own, or one that takes its place later, into its row and column. `place` is {id, columns, prompt, column, row, seed}. */
export function put(grid, tile, place) {
  const node = section(grid, place);
  let row = [...node.querySelectorAll("ul")].find((list) => list.dataset.row === String(place.row));
  if (!row) {
    row = make("ul", { className: "side-row" }, make("li", { className: "side-seed", textContent: `seed ${place.seed}` }));
    row.dataset.row = place.row;
    const after = [...node.querySelectorAll("ul")].find((list) => Number(list.dataset.row) > place.row);
    node.insertBefore(row, after ?? null);
  }
  tile.dataset.column = place.column;
  tile.style.setProperty("--column", place.column + 2);
  const after = [...row.querySelectorAll(".tile")].find((other) => Number(other.dataset.column) > place.column);
  row.insertBefore(tile, after ?? null);
}

/** Take away rows, and comparisons, without images. */
export function prune(grid) {
  for (const row of grid.querySelectorAll("ul.side-row")) if (!row.querySelector(".tile")) row.remove();
  for (const node of grid.querySelectorAll(".side")) if (!node.querySelector(".tile")) node.remove();
}
