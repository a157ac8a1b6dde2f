// Pictures that stay in this browser, with what they were made of: newest first, until they are taken away.
// Where the browser keeps nothing (a private window), they last as long as the page.

const MOST = 500;
let kept = new Map();
let database = null;

const done = (request) => new Promise((well, ill) => {
  request.onsuccess = () => well(request.result);
  request.onerror = () => ill(request.error);
});

export async function open() {
  try {
    const request = indexedDB.open("diptych", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("pictures", { keyPath: "id" });
    database = await done(request);
    for (const picture of await done(pictures("readonly").getAll())) kept.set(picture.id, picture);
  } catch {
    database = null;
  }
  return all();
}

const pictures = (mode) => database.transaction("pictures", mode).objectStore("pictures");

export const all = () => [...kept.values()].sort((a, b) => b.made - a.made || a.k - b.k);

export async function add(picture) {
  kept.set(picture.id, picture);
  await write((store) => store.put(picture));
  for (const old of all().slice(MOST)) await remove(old.id);
}

export async function remove(id) {
  kept.delete(id);
  await write((store) => store.delete(id));
}

export async function clear() {
  kept = new Map();
  await write((store) => store.clear());
}

async function write(change) {
  if (database === null) return;
  try {
    await done(change(pictures("readwrite")));
  } catch {
    database = null; // it is full, or was closed: from here on the page alone remembers
  }
}
