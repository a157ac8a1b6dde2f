// Images that stay in this browser, with what they were made of: newest first, until they are deleted.
// Where the browser keeps nothing (a private window), they last as long as the page.
//
// Drafts stand beside them: the images of the form, and those of jobs that are under way.

const MOST = 500;
const DRAFT = "draft:";
const DRAFT_MS = 7 * 24 * 3600 * 1000; // after which one that nobody came back for is deleted
let kept = new Map();
let drafts = new Map();
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
    for (const record of await done(database.transaction("pictures").objectStore("pictures").getAll())) {
      if (!record.id.startsWith(DRAFT)) kept.set(record.id, record);
      else if (record.made > Date.now() - DRAFT_MS) drafts.set(record.id, record);
      else await write((store) => store.delete(record.id));
    }
  } catch {
    database = null;
  }
  return all();
}

export const all = () => [...kept.values()].sort((a, b) => b.made - a.made || a.k - b.k);

/** Keep an image. Returns whether it outlasts the page. */
export async function add(picture) {
  kept.set(picture.id, picture);
  const there = await write((store) => store.put(picture));
  for (const old of all().slice(MOST)) await remove(old.id);
  return there;
}

export async function remove(id) {
  kept.delete(id);
  await write((store) => store.delete(id));
}

export async function clear() {
  const ids = [...kept.keys()];
  kept = new Map();
  await write((store) => ids.forEach((id) => store.delete(id)));
}

export const draft = (name) => drafts.get(DRAFT + name)?.value;

/** Keep a draft; null forgets it. */
export async function keepDraft(name, value) {
  const record = { id: DRAFT + name, made: Date.now(), value };
  if (value === null) drafts.delete(record.id);
  else drafts.set(record.id, record);
  await write((store) => (value === null ? store.delete(record.id) : store.put(record)));
}

/** Make a change that outlasts the page. Returns whether that could be, which it cannot where there is no room. */
async function write(change) {
  if (database === null) return true;
  try {
    const transaction = database.transaction("pictures", "readwrite");
    change(transaction.objectStore("pictures"));
    await new Promise((well, ill) => {
      transaction.oncomplete = well;
      transaction.onabort = () => ill(transaction.error);
    });
    return true;
  } catch {
    return false;
  }
}
