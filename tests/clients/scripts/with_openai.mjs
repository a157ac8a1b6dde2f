// openai-node.
import { createReadStream } from "node:fs";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { DIPTYCH_URL: url, IMAGE_MODEL: image, TEXT_MODEL: text, PICTURE: picture } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const chat = { model: text, messages: [{ role: "user", content: "a cat" }], max_tokens: 20 };
const size = (answer) => pngSize(Buffer.from(answer.data[0].b64_json, "base64"));

const calls = {
  generate: async () => size(await client.images.generate({ prompt: "a cat", model: image })),
  edit: async () => size(await client.images.edit({ image: createReadStream(picture), prompt: "a hat", model: image })),
  chat: async () => (await client.chat.completions.create(chat)).choices[0].message.content,
  stream: async () => {
    let content = "";
    for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
      content += chunk.choices[0]?.delta?.content ?? "";
    }
    return content;
  },
  parse: async () => {
    const response_format = zodResponseFormat(z.object({ happy: z.boolean() }), "emoji");
    return (await client.chat.completions.parse({ ...chat, response_format })).choices[0].message.parsed.happy;
  },
  tools: async () => {
    const parameters = { type: "object", properties: { happy: { type: "boolean" } }, required: ["happy"] };
    const tool = { type: "function", function: { name: "Emoji", parameters, parse: JSON.parse, function: (emoji) => `${emoji.happy}` } };
    const choice = { type: "function", function: { name: "Emoji" } };
    const runner = client.chat.completions.runTools({ ...chat, max_tokens: 60, stream: true, tools: [tool], tool_choice: choice });
    return typeof JSON.parse(await runner.finalFunctionToolCallResult());
  },
  responses: async () => {
    const stream = await client.responses.create({ model: text, input: "a cat", max_output_tokens: 20, store: false, stream: true });
    let content = "", last;
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") content += event.delta;
      last = event;
    }
    if (!["response.completed", "response.incomplete"].includes(last.type)) throw new Error(last.type);
    return content;
  },
  gpt_image: async () => size(await client.images.generate({ prompt: "a cat", model: "gpt-image-1" })),
};
