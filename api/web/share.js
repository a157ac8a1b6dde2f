// Parameters outside of the page: in a link's fragment, which no server sees, and as a command for curl.
// Neither holds the API key. A link is a stranger's text: what is not a valid value of a known field is left out.

const MOST_CHARACTERS = 64_000; // of a fragment

const text = (most) => (value) => (value.length <= most && !/[\p{Cc}\p{Cs}]/u.test(value.replace(/[\n\t]/g, "")) ? value : undefined);
const matching = (pattern, read = (value) => value) => (value) => (pattern.test(value) ? read(value) : undefined);
const number = (low, high, whole = false) => matching(/^-?\d{1,16}(\.\d{1,16})?$/, (value) => {
  const found = Number(value);
  return found >= low && found <= high && (!whole || Number.isSafeInteger(found)) ? found : undefined;
});
const name = text(128);
/** `name:0.5`, or `name` alone, as an object with this member beside `model`. */
const withNumber = (member, low, high) => ({
  read(value) {
    const [model, given, ...rest] = value.split(":");
    const found = given === undefined ? undefined : number(low, high)(given);
    if (rest.length || !model || name(model) === undefined || (given !== undefined && found === undefined)) return undefined;
    return found === undefined ? { model } : { model, [member]: found };
  },
  write: (value) => (value[member] === undefined ? value.model : `${value.model}:${value[member]}`),
});

const FIELDS = new Map(Object.entries({
  prompt: text(10_000), negative_prompt: text(10_000), model: name, n: number(1, 10, true), seed: number(0, Number.MAX_SAFE_INTEGER, true),
  size: matching(/^(auto|\d{1,5}x\d{1,5})$/), steps: number(1, 1000, true), guidance_scale: number(0, 100), scheduler: name,
  schedule_type: matching(/^[a-z]{1,32}$/), plan: name, vae: name, lora: text(4096), output_format: matching(/^(png|webp|jpeg)$/),
  upscale: withNumber("scale", 1, 8), refiner: withNumber("from", 0, 1),
}));

/** A request's fields as a fragment, without the #. Its pictures are not among them. */
export function encode(fields) {
  const parameters = new URLSearchParams();
  for (const [field, kind] of FIELDS) {
    const value = fields[field];
    if (value !== undefined && value !== null && value !== "") parameters.set(field, kind.write ? kind.write(value) : String(value));
  }
  return parameters.toString();
}

/** The fields of a fragment. */
export function decode(fragment) {
  const fields = {};
  if (fragment.length > MOST_CHARACTERS) return fields;
  for (const [field, value] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    const kind = FIELDS.get(field);
    const found = kind && (kind.read ?? kind)(value);
    if (found !== undefined && found !== "") fields[field] = found;
  }
  return fields;
}

/** The address of this page with these fields. */
export const link = (fields) => `${location.origin}${location.pathname}#${encode(fields)}`;

// -- curl ---------------------------------------------------------------------------------------------------------

/** A word for a POSIX shell. */
const quoted = (words) => `'${words.replaceAll("'", "'\\''")}'`;

const ENDINGS = { "image/jpeg": "jpg", "image/webp": "webp" };
const STEMS = { images: "source", mask: "mask", control: "control", image_prompts: "image-prompt" };

/** A request as a command that draws the same, and the files that it reads: {command, files: [{name, blob}]}.
 *
 * Files are uploaded first, as the page does. With `hasKey` the key is read from a variable. */
export function curl({ fields, pictures }, hasKey) {
  const { type, preview_every: _, ...body } = fields;
  const key = hasKey ? ' -H "Authorization: Bearer $DIPTYCH_API_KEY"' : ""; // in double quotes: the shell fills it in
  const call = (path) => `curl -sS ${quoted(new URL(path, document.baseURI).href)}${key}`;
  const files = pictures.map(({ blob, field }, k) => ({ name: `${STEMS[field]}-${k + 1}.${ENDINGS[blob.type] ?? "png"}`, blob }));
  const uploads = files.map(({ name }, k) => (
    `picture_${k + 1}=$(${call("v1/files")} -F purpose=vision -F ${quoted(`file=@${name}`)} | grep -o 'file-[0-9a-f]\\{24\\}')`
  ));
  // A reference leaves the quotes for a moment, so that the shell fills in the variable.
  const json = quoted(JSON.stringify({ ...body, response_format: "url" }, (_name, value) => (
    Number.isInteger(value?.picture) ? { file_id: `\0${value.picture + 1}\0` } : value
  ))).replace(/\\u0000(\d+)\\u0000/g, `'"$picture_$1"'`);
  const path = type === "edit" ? "v1/images/edits" : "v1/images/generations";
  return { command: [...uploads, `${call(path)} -H 'Content-Type: application/json' \\\n  -d ${json}`].join("\n"), files };
}
