// replicate-javascript.
import { readFileSync } from "node:fs";
import Replicate from "replicate";

const { DIPTYCH_URL: url, IMAGE_MODEL: image, PICTURE: picture } = process.env;
const client = new Replicate({ baseUrl: `${url}/v1`, auth: "none" });
const model = `diptych/${image}`;

async function draw(input, wait = { mode: "block" }) {
  const [file] = await client.run(model, { input: { prompt: "a cat", ...input }, wait });
  return pngSize(await (await file.blob()).arrayBuffer());
}

const calls = {
  generate: () => draw({}),
  poll: () => draw({}, { mode: "poll", interval: 100 }),
  edit: () => draw({ image: readFileSync(picture), prompt_strength: 0.5 }),
  stream: async () => {
    const kinds = [];
    for await (const event of client.stream(model, { input: { prompt: "a cat" } })) kinds.push(event.event);
    return kinds.slice(-2);
  },
  models: async () => (await client.models.get("diptych", image)).latest_version.id,
};
