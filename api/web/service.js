// The REST API as the page uses it: requests with a key, events that are resumed, errors in the server's words.

const KEY = "diptych.key";
const UPLOADS = "diptych.uploads";
// Browsers open six connections to a host, in all tabs: what follows jobs leaves some to all else.
const MOST_STREAMS = 3;

export class ServiceError extends Error {
  constructor(message, { status = 0, param = null, code = null, after = 0 } = {}) {
    super(message);
    Object.assign(this, { status, param, code, after });
  }
}

export const key = {
  get: () => localStorage.getItem(KEY) ?? "",
  set: (value) => (value ? localStorage.setItem(KEY, value) : localStorage.removeItem(KEY)),
};

async function send(path, { method = "GET", body, headers = {}, ...more } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  const form = body instanceof FormData; // whose type the browser writes
  if (body !== undefined && !form) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { ...more, method, headers: sent, body: body === undefined || form ? body : JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The service does not respond. Please try again.", { code: "away" });
  }
  if (answer.ok) return answer;
  const told = await answer.json().then((found) => found.error, () => null);
  throw new ServiceError(told?.message ?? `The service answered ${answer.status}.`, {
    status: answer.status, param: told?.param, code: told?.code, after: Number(answer.headers.get("retry-after") ?? 0),
  });
}

const json = (path, options) => send(path, options).then((answer) => answer.json());

export const models = () => json("v1/models").then((found) => found.data);
export const job = (id) => repeated(() => json(`v1/jobs/${id}`));
export const cancel = (id) => json(`v1/jobs/${id}/cancel`, { method: "POST" });
export const picture = (id, k) => repeated(() => send(`v1/jobs/${id}/images/${k}`).then((answer) => answer.blob()));
/** A look at a picture in the making; null where there is none, or no longer. */
export const preview = (id, k) => send(`v1/jobs/${id}/preview?image=${k}`).then((answer) => (answer.status === 204 ? null : answer.blob()));

export async function ready() {
  try {
    const answer = await fetch("readyz", { cache: "no-store" });
    return await answer.json();
  } catch {
    return null;
  }
}

/** Make jobs of requests that share their images, one after the other; `accept` is given each job and its request.
 *
 * Images are uploaded first, once for all requests, and deleted when the jobs have them, or could not be made. */
export async function submit(requests, pictures, accept) {
  const ids = [];
  try {
    for (const { blob, field } of pictures) ids.push(await upload(blob, field));
    for (const request of requests) {
      const body = JSON.parse(JSON.stringify(request.fields), (_name, value) => (
        Number.isInteger(value?.picture) ? { file_id: ids[value.picture] } : value
      ));
      const options = { method: "POST", body: { type: "image", ...body }, headers: { "Idempotency-Key": name() } };
      accept(await repeated(() => json("v1/jobs", options)), request);
    }
  } finally {
    tidy(ids);
  }
}

let uploads = JSON.parse(sessionStorage.getItem(UPLOADS) ?? "[]"); // ids of files that are to be deleted

function noteUploads(ids) {
  uploads = ids;
  sessionStorage.setItem(UPLOADS, JSON.stringify(ids));
}

/** Delete uploads: by default all that are left, of a page that was reloaded or a service that was away. */
export async function tidy(ids = uploads) {
  for (const id of [...ids]) {
    try {
      await json(`v1/files/${id}`, { method: "DELETE", keepalive: true });
    } catch (error) {
      if (error.status !== 404) continue;
    }
    noteUploads(uploads.filter((other) => other !== id));
  }
}

/** Upload an image. Returns its id; an error that is of the file names the request's field. */
async function upload(blob, field) {
  const body = new FormData();
  body.append("purpose", "vision");
  body.append("file", blob, `${field}.${blob.type.split("/")[1]}`);
  try {
    const { id } = await repeated(() => json("v1/files", { method: "POST", body }));
    noteUploads([...uploads, id]);
    return id;
  } catch (error) {
    if (error.status === 403) error.message += " Input images are uploaded, for which it is needed.";
    if (![400, 403, 413].includes(error.status)) throw error;
    throw new ServiceError(error.message.replace(/^(file: )?/, `${field}: `), { ...error, param: field });
  }
}

/** Send a request again whose answer got lost. A job is not made twice: its key says that it is the same. */
async function repeated(call) {
  for (let tries = 0; ; tries++) {
    try {
      return await call();
    } catch (error) {
      if (error.code !== "away" || tries >= 4) throw error;
      await pause(500 * 2 ** tries);
    }
  }
}

let streams = 0;

/** Tell what happens to a job until it ends, over as many connections as that takes. Returns the job as it ended.
 * Beyond some jobs at once the rest are asked how far they are. */
export async function follow(id, tell) {
  let last = "";
  for (let tries = 0; ; tries++) {
    if (streams >= MOST_STREAMS) {
      const found = await job(id).catch((error) => ({ error }));
      if ([401, 403, 404].includes(found.error?.status)) throw found.error;
      if (found.completed_at) return found;
      if (found.progress) tell("progress", found.progress);
      await pause(1000);
      continue;
    }
    streams++;
    try {
      const answer = await send(`v1/jobs/${id}/events`, { headers: last ? { "Last-Event-ID": last } : {} });
      if (answer.status === 204) return await job(id);
      for await (const event of events(answer.body)) {
        tries = 0;
        if (event.id) last = event.id;
        if (event.data.object === "job") return event.data;
        tell(event.type, event.data);
      }
    } catch (error) {
      if ([400, 401, 403, 404].includes(error.status)) throw error;
    } finally {
      streams--;
    }
    await pause(Math.min(5000, 300 * 2 ** Math.min(tries, 5)));
  }
}

/** Tell the words of an answer as they come. */
export async function chat(model, messages, tell, signal) {
  const answer = await send("v1/chat/completions", { method: "POST", body: { model, messages, stream: true }, signal });
  for await (const event of events(answer.body)) {
    const words = event.data.choices?.[0]?.delta?.content;
    if (words) tell(words);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { id: "", type: "message", data: "" };
        for (const line of block.split(/\r?\n/)) {
          const [, name, words] = /^(\w+): ?(.*)$/.exec(line) ?? [];
          if (name === "event") event.type = words;
          else if (name) event[name] = words;
        }
        if (event.data && event.data !== "[DONE]") yield { ...event, data: JSON.parse(event.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// Not crypto.randomUUID: that is only there where the page came over TLS or from this machine.
const name = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
